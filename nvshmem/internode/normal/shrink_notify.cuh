// shrink_notify.cuh - libdeepep_nvshmem.so: notify, barriers and masks of a team that shrinks across nodes.
#pragma once
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/notify_counts.cuh"
#include "cuda/sync/clean.cuh"
#include "internode/normal/shrink.cuh"

namespace deepep::internode {

struct ShrinkNotifyParams {
  NotifyParams n;
  NodeView internode;
  ShrinkView shrink;
};

// Ranks that take no part get no row.
__device__ inline void number_rows_of_members(const NotifyParams &p, int first, int step) {
  const Session &s = p.session;
  for (int to = first; to < s.team.num_ranks; to += step) {
    if (!is_without(s, to)) {
      number_rows(p, to);
      continue;
    }
    for (int t = threadIdx.x; t < p.num_tokens; t += kNotifyThreads)
      p.send_head()[static_cast<int64_t>(t) * s.team.num_ranks + to] = -1;
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

// As notify_dispatch. The other blocks number rows once it is agreed who takes part.
__global__ void __launch_bounds__(kNotifyThreads, 1)
    notify_dispatch_shrinking(const __grid_constant__ ShrinkNotifyParams p) {
  const Session &s = p.n.session;
  const PutPost by{s, p.internode, p.shrink};
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand = notify_handshake(p.n, epoch);
    if (blockIdx.x == 0) {
      const int num_ranks = s.team.num_ranks, local = p.n.num_experts / num_ranks;
      post_to_members(by, hand, num_ranks + local, [&](int r, uint32_t *to) {
        for (int i = lane_id(); i < num_ranks; i += kWarp) to[i] = p.n.tokens_per_rank()[i];
        for (int i = lane_id(); i < local; i += kWarp) to[num_ranks + i] = p.n.tokens_per_expert()[r * local + i];
      });
      publish_newest_by_last_warp(s.team);
    }
    const bool agreed = await_agreement(s, hand, epoch, by);
    if (blockIdx.x == 0) {
      if (agreed)
        sum_matrix(
            p.n, [&](int i) { return by.body(i)->counts; }, [&](int i) { return by.message(i)->row_limit; },
            [&](int i) { return is_without(s, i); });
      announce_counts(p.n);
    } else if (agreed) {
      number_rows_of_members(p.n, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
    }
  }
  finish(s, [&](bool failed) { end_notify(p.n, failed); });
}

}  // namespace deep_ep::internode

namespace deepep::internode {

struct ShrinkBarrierParams {
  Session session;
  NodeView internode;
  ShrinkView shrink;
  uint32_t counts_as_call;  // 0: one of several kernels of an operation
};

__global__ void __launch_bounds__(256, 1)
    internode_shrinking_barrier_kernel(const __grid_constant__ ShrinkBarrierParams p) {
  const Session &s = p.session;
  const PutPost by{s, p.internode, p.shrink};
  run_barrier(
      s, p.counts_as_call, [&](const Handshake &hand) { post_to_members(by, hand); },
      [&](const Handshake &hand) {
        uint64_t epoch;
        return await_agreement(s, hand, epoch, by);
      },
      [&](uint64_t, int r) { return by.message(r); });
}

}  // namespace deepep::internode
