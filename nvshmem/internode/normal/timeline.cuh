// timeline.cuh - libdeepep_nvshmem.so: where the warps of normal mode spend their time, for bench_ops mode=nodes. Only
// with -DDEEPEP_TIMELINE each warp adds up the clock by role and phase; what is in no phase is waiting and bookkeeping.
#pragma once
#include "cuda/common/ptx.cuh"
#include "cuda/common/types.cuh"

namespace deepep::internode {

enum Role { kRoleSender, kRoleReader, kRolePusher, kRoleNodeSum, kRoleTokenSum, kNumRoles };
enum Phase { kPhaseStage, kPhasePut, kPhaseCopy, kPhaseSum, kPhaseSignal, kNumPhases };

// Of one role, in cycles: warps that had streams; their time from first to last; the longest of them; by phase. From
// the kernel's begin: when warps began and when a stream of theirs first moved, added up; the last end of a warp.
struct RoleTimes {
  unsigned long long warps, all, longest, began, moved, last, phases[kNumPhases];
};

#ifdef DEEPEP_TIMELINE
__device__ RoleTimes g_role_times[2][kNumRoles];  // dispatch, combine: since they were read
struct BlockTimes {
  long long begin;
  RoleTimes roles[kNumRoles];
};
__device__ __forceinline__ BlockTimes &block_times() {
  __shared__ BlockTimes times;
  return times;
}
// A shared word of the warp's role: which phases it adds to.
__device__ __forceinline__ int &role_of_warp() {
  __shared__ int roles[32];
  return roles[threadIdx.x / 32];
}

struct InPhase {
  Phase phase;
  long long begin;
  __device__ explicit InPhase(Phase which) {
    phase = which;
    begin = clock64();
  }
  __device__ ~InPhase() {
    __syncwarp();
    if (lane_id() == 0)
      atomicAdd(&block_times().roles[role_of_warp()].phases[phase], static_cast<unsigned long long>(clock64() - begin));
  }
};
struct InRole {
  bool counts;
  long long begin, first_move = 0;
  __device__ InRole(Role role, bool has_streams) {
    counts = has_streams;
    begin = clock64();
    if (lane_id() == 0) role_of_warp() = role;
    __syncwarp();
  }
  __device__ void moved() {
    if (first_move == 0) first_move = clock64();
  }
  __device__ ~InRole() {
    if (lane_id() != 0 || !counts) return;
    RoleTimes &times = block_times().roles[role_of_warp()];
    const long long end = clock64();
    atomicAdd(&times.warps, 1ull);
    atomicAdd(&times.all, static_cast<unsigned long long>(end - begin));
    atomicMax(&times.longest, static_cast<unsigned long long>(end - begin));
    atomicAdd(&times.began, static_cast<unsigned long long>(begin - block_times().begin));
    atomicAdd(&times.moved,
              static_cast<unsigned long long>((first_move == 0 ? end : first_move) - block_times().begin));
    atomicMax(&times.last, static_cast<unsigned long long>(end - block_times().begin));
  }
};
__device__ __forceinline__ void begin_role_times() {
  auto *words = reinterpret_cast<unsigned long long *>(block_times().roles);
  for (unsigned i = threadIdx.x; i < sizeof(BlockTimes::roles) / 8; i += blockDim.x) words[i] = 0;
  if (threadIdx.x == 0) block_times().begin = clock64();
  __syncthreads();
}
__device__ __forceinline__ void end_role_times(int op) {
  __syncthreads();
  if (threadIdx.x >= kNumRoles) return;
  const RoleTimes &mine = block_times().roles[threadIdx.x];
  RoleTimes &all = g_role_times[op][threadIdx.x];
  atomicAdd(&all.warps, mine.warps);
  atomicAdd(&all.all, mine.all);
  atomicMax(&all.longest, mine.longest);
  atomicAdd(&all.began, mine.began);
  atomicAdd(&all.moved, mine.moved);
  atomicMax(&all.last, mine.last);
  for (int i = 0; i < kNumPhases; ++i) atomicAdd(&all.phases[i], mine.phases[i]);
}
#else
struct InPhase {
  __device__ explicit InPhase(Phase) {}
};
struct InRole {
  __device__ InRole(Role, bool) {}
  __device__ void moved() {}
};
__device__ __forceinline__ void begin_role_times() {}
__device__ __forceinline__ void end_role_times(int) {}
#endif

}  // namespace deepep::internode
