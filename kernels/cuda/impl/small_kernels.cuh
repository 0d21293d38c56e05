// small_kernels.cuh - barrier, masks, statistics that the host asks for, the clock.
#pragma once
#include "cuda/sync/anew.cuh"

namespace deepep {

struct BarrierParams {
  Session session;
  uint32_t counts_as_call; // 0: one of several kernels of an operation
};

__global__ void __launch_bounds__(128, 1) barrier_kernel(const __grid_constant__ BarrierParams p) {
  const Session &s = p.session;
  meet_everybody(s, p.counts_as_call, [&](const Handshake &hand) { post_enter(s, hand); }, [&](const Handshake &hand) { return await_enter(s, hand); },
                 [&](uint64_t epoch, int r) { return s.team.enter(s.team.rank, epoch % kEnterCopies, r); });
}

struct MaskParams {
  Session session;
  int32_t what, rank, value, reserved;
  int32_t *out;
};

// A rank comes back: what it sent so far counts as taken, and its next message says where it stands.
__device__ inline void lift_mask(const Session &s, int rank) {
  Scratch *scratch = s.team.scratch;
  if (scratch->masked[rank] == 0) return;
  uint64_t newest = scratch->seen[rank];
  for (int copy = 0; copy < kLowLatencyEnterCopies; ++copy)
    newest = most(newest, ptx::ld_acquire_sys(&s.team.low_latency_enter(s.team.rank, copy, rank)->epoch));
  scratch->seen[rank] = scratch->consumed[0][rank] = scratch->consumed[1][rank] = newest;
  scratch->returned[rank] = 1;
  scratch->masked[rank] = 0;
}

__global__ void __launch_bounds__(128, 1) mask_kernel(const __grid_constant__ MaskParams p) {
  const Session &s = p.session;
  begin(s);
  publish_newest_by_last_warp(s.team);
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    uint32_t *mask = &s.team.scratch->masked[r];
    if (p.what == DK_MASK_QUERY) p.out[r] = static_cast<int32_t>(*mask);
    else if (p.what == DK_MASK_CLEAN || (r == p.rank && p.value == 0)) lift_mask(s, r);
    else if (r == p.rank) *mask = 1;
  }
  finish(s, [&](bool failed) { record_kernel(s, nullptr, true, failed); });
}

// The host asks: everything that was counted.
__global__ void __launch_bounds__(512) stats_kernel(const __grid_constant__ TeamView team) {
  const Scratch *scratch = team.scratch;
  if (threadIdx.x == 0) store_out(&team.status->progress, load_fresh(&scratch->progress));
  if (team.stats == nullptr) return;
  constexpr int kWords = DK_NUM_OPS * (kOpCounters + DK_HIST_BUCKETS);
  for (int i = threadIdx.x; i < kWords; i += blockDim.x)
    store_out(reinterpret_cast<uint64_t *>(team.stats->ops) + i, load_fresh(reinterpret_cast<const uint64_t *>(scratch->ops) + i));
  uint64_t *bytes = page_peers(team), *waits = bytes + DK_NUM_OPS * team.num_ranks;
  for (int i = threadIdx.x; i < DK_NUM_OPS * team.num_ranks; i += blockDim.x) {
    store_out(bytes + i, load_fresh(&scratch->peer_bytes[i / team.num_ranks][i % team.num_ranks]));
    store_out(waits + i, load_fresh(&scratch->peer_wait_ns[i / team.num_ranks][i % team.num_ranks]));
  }
  if (warp_id() == 0) publish_trace(team, lane_id());
}

__global__ void clock_kernel(uint64_t *now) { *now = ptx::global_timer_ns(); }

}  // namespace deepep
