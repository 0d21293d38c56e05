// notify_kernel.cuh - ranks exchange how many rows each sends to each, and number their rows. Block 0 exchanges counts;
// block 1 + j numbers the rows to rank j, then to rank j + (blocks - 1), ...
#pragma once
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/notify_counts.cuh"

namespace deepep {

// Writes this rank's row of the matrix and the counts of the peer's experts to each peer, a warp for each, then the
// message that makes them valid.
__device__ inline void send_counts(const NotifyParams &p, const Handshake &hand) {
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks, local = p.num_experts / num_ranks;
  for (int r = warp_id(); r < num_ranks; r += kNotifyThreads / kWarp) {
    uint32_t *to = s.team.counts(r, own_copy(s.team, hand.epoch), s.team.rank);
    for (int i = lane_id(); i < num_ranks; i += kWarp) to[i] = p.tokens_per_rank()[i];
    for (int i = lane_id(); i < local; i += kWarp) to[num_ranks + i] = p.tokens_per_expert()[r * local + i];
  }
  __syncthreads();  // the release of each message below covers what the block has stored
  shrinks(s.team) ? post_to_members(s, hand) : post_handshake(s, hand);
}

// The numbers of the rows to each rank. In a team that shrinks ranks that take no part get none.
__device__ inline void number_all_rows(const NotifyParams &p, const Handshake &hand) {
  const Session &s = p.session;
  uint64_t epoch = hand.epoch;
  if (shrinks(s.team) && !await_agreement(s, hand, epoch)) return;
  for (int to = blockIdx.x - 1; to < s.team.num_ranks; to += gridDim.x - 1) {
    if (!is_without(s, to)) {
      number_rows(p, to);
      continue;
    }
    for (int t = threadIdx.x; t < p.num_tokens; t += kNotifyThreads)
      p.send_head()[static_cast<int64_t>(t) * s.team.num_ranks + to] = -1;
  }
}

}  // namespace deepep

namespace deep_ep::intranode {  // V1's names: tools find kernels in traces by them
using namespace deepep;

__global__ void __launch_bounds__(kNotifyThreads) notify_dispatch(const __grid_constant__ NotifyParams p) {
  const Session &s = p.session;
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand = notify_handshake(p, epoch);
    if (blockIdx.x == 0) {
      send_counts(p, hand);
      publish_newest_by_last_warp(s.team);
      if (shrinks(s.team) ? await_agreement(s, hand, epoch) : await_handshake(s, hand))
        sum_matrix(
            p, [&](int i) { return s.team.counts(s.team.rank, message_copy(s.team, epoch, i), i); },
            [&](int i) { return message_from(s.team, epoch, i)->row_limit; },
            [&](int i) { return shrinks(s.team) && is_without(s, i); });
      announce_counts(p);
    } else {
      number_all_rows(p, hand);
    }
  }
  finish(s, [&](bool failed) { end_notify(p, failed); });
}

}  // namespace deep_ep::intranode
