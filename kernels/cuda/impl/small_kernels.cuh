// small_kernels.cuh - kernels of one block: barrier, masks, statistics for dk_stats_flush, the clock.
#pragma once
#include "cuda/sync/clean.cuh"
#include "cuda/sync/masks.cuh"

namespace deepep {

struct BarrierParams {
  Session session;
  uint32_t counts_as_call;  // 0: one of several kernels of an operation
};

__global__ void __launch_bounds__(128, 1) barrier_kernel(const __grid_constant__ BarrierParams p) {
  const Session &s = p.session;
  run_barrier(
      s, p.counts_as_call,
      [&](const Handshake &hand) { shrinks(s.team) ? post_to_members(s, hand) : post_handshake(s, hand); },
      [&](const Handshake &hand) {
        uint64_t epoch;
        return shrinks(s.team) ? await_agreement(s, hand, epoch) : await_handshake(s, hand);
      },
      [&](uint64_t epoch, int r) { return message_from(s.team, epoch, r); });
}

__global__ void __launch_bounds__(128, 1) mask_kernel(const __grid_constant__ MaskParams p) {
  const Session &s = p.session;
  const bool begun = begin(s);  // else the peers' blocks may be gone, and a query alone touches none
  if (begun) publish_newest_by_last_warp(s.team);
  if (begun || p.what == DK_MASK_QUERY)
    change_masks(
        p, [&](int r, uint64_t call) { ptx::st_release_sys(s.team.given_up(s.team.peers[r], s.team.rank), call); });
  finish(s, [&](bool failed) { record_kernel(s, nullptr, true, failed); });
}

// dk_stats_flush: copies all counters to the page.
__global__ void __launch_bounds__(512) stats_kernel(const __grid_constant__ TeamView team) {
  const Scratch *scratch = team.scratch;
  if (threadIdx.x == 0) store_out(&team.status->progress, load_fresh(&scratch->progress));
  if (team.stats == nullptr) return;
  constexpr int kWords = DK_NUM_OPS * (kOpCounters + DK_HIST_BUCKETS);
  for (int i = threadIdx.x; i < kWords; i += blockDim.x)
    store_out(reinterpret_cast<uint64_t *>(team.stats->ops) + i,
              load_fresh(reinterpret_cast<const uint64_t *>(scratch->ops) + i));
  uint64_t *bytes = page_peers(team), *waits = bytes + DK_NUM_OPS * team.num_ranks;
  for (int i = threadIdx.x; i < DK_NUM_OPS * team.num_ranks; i += blockDim.x) {
    store_out(bytes + i, load_fresh(&scratch->peer_bytes[i / team.num_ranks][i % team.num_ranks]));
    store_out(waits + i, load_fresh(&scratch->peer_wait_ns[i / team.num_ranks][i % team.num_ranks]));
  }
  if (warp_id() != 0) return;
  const uint64_t next = load_fresh(&scratch->trace_next), num = load_fresh(&scratch->num_waiting);
  for (uint64_t i = 0; i < num; ++i)
    store_trace(team, lane_id(), load_record(team, static_cast<int>(i), lane_id()),
                load_fresh(&scratch->waiting[i].index));
  store_num_records(team, lane_id(), next);
}

__global__ void clock_kernel(uint64_t *now) { *now = ptx::global_timer_ns(); }

}  // namespace deepep
