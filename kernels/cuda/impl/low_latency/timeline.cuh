// timeline.cuh - where a low-latency call spends its time, for bench_ops mode=lltimeline. Only with -DDEEPEP_TIMELINE
// does each block record the clock at each mark, for the last calls of dispatch and of combine.
#pragma once
#include "cuda/common/ptx.cuh"
#include "cuda/common/types.cuh"

namespace deepep {

enum Mark {
  kMarkBegin,
  kMarkBegun,
  kMarkEmpty,
  kMarkRowOut,
  kMarkCounted,
  kMarkSent,
  kMarkKnown,
  kMarkLastHeader,
  kMarkArrived,
  kMarkLeft,
  kMarkRecorded,
  kMarkClockBegin,
  kMarkClockEnd,
  kNumMarks = 16
};

#ifdef DEEPEP_TIMELINE
constexpr int kTimelineCalls = 64, kTimelineBlocks = 192;
__device__ uint64_t g_timeline[2][kTimelineCalls][kTimelineBlocks][kNumMarks];

__device__ __forceinline__ unsigned long long *block_marks() {
  __shared__ unsigned long long marks[kNumMarks];
  return marks;
}
// One thread, or several: the latest counts.
__device__ __forceinline__ void mark(Mark which, bool by_me) {
  if (by_me) atomicMax(block_marks() + which, static_cast<unsigned long long>(clock64()));
}
__device__ __forceinline__ void begin_timeline() {
  if (threadIdx.x < kNumMarks) block_marks()[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == 0) block_marks()[kMarkClockBegin] = ptx::global_timer_ns();
  mark(kMarkBegin, threadIdx.x == 0);
}
__device__ __forceinline__ void end_timeline(int op, uint64_t call) {
  __syncthreads();
  mark(kMarkRecorded, threadIdx.x == 0);
  if (threadIdx.x == 0) block_marks()[kMarkClockEnd] = ptx::global_timer_ns();
  __syncthreads();
  if (threadIdx.x < kNumMarks && blockIdx.x < kTimelineBlocks)
    g_timeline[op][call / 2 % kTimelineCalls][blockIdx.x][threadIdx.x] = block_marks()[threadIdx.x];
}
#else
__device__ __forceinline__ void mark(Mark, bool) {}
__device__ __forceinline__ void begin_timeline() {}
__device__ __forceinline__ void end_timeline(int, uint64_t) {}
#endif

}  // namespace deepep
