// notify.cuh - libdeepep_nvshmem.so: notify and barriers across nodes. The CUDA library's functions do the counting.
#pragma once
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/notify_counts.cuh"
#include "cuda/sync/clean.cuh"
#include "internode/normal/common.cuh"

namespace deepep::internode {

struct InternodeNotifyParams {
  NotifyParams n;
  NodeView internode;
};

}  // namespace deepep::internode

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

// Block 0 exchanges messages: each carries this rank's row of the matrix and the counts of the peer's experts. The
// other blocks number rows.
__global__ void __launch_bounds__(kNotifyThreads, 1) notify_dispatch(const __grid_constant__ InternodeNotifyParams p) {
  const Session &s = p.n.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    if (blockIdx.x == 0) {
      const Handshake hand = notify_handshake(p.n, epoch);
      const int num_ranks = s.team.num_ranks, local = p.n.num_experts / num_ranks;
      post_messages(s, p.internode, hand, num_ranks + local, [&](int r, uint32_t *to) {
        for (int i = lane_id(); i < num_ranks; i += kWarp) to[i] = p.n.tokens_per_rank()[i];
        for (int i = lane_id(); i < local; i += kWarp) to[num_ranks + i] = p.n.tokens_per_expert()[r * local + i];
      });
      publish_newest_by_last_warp(s.team);
      if (await_messages(s, p.internode, hand))
        sum_matrix(
            p.n, [&](int i) { return message_from(s, p.internode, epoch, i)->counts; },
            [&](int i) { return message_from(s, p.internode, epoch, i)->handshake.row_limit; },
            [](int) { return false; });
      announce_counts(p.n);
    } else {
      for (int to = blockIdx.x - 1; to < s.team.num_ranks; to += gridDim.x - 1) number_rows(p.n, to);
    }
  }
  finish(s, [&](bool failed) { end_notify(p.n, failed); });
}

}  // namespace deep_ep::internode

namespace deepep::internode {

struct InternodeBarrierParams {
  Session session;
  NodeView internode;
  uint32_t counts_as_call;  // 0: one of several kernels of an operation
};

__global__ void __launch_bounds__(256, 1) internode_barrier_kernel(const __grid_constant__ InternodeBarrierParams p) {
  const Session &s = p.session;
  run_barrier(
      s, p.counts_as_call, [&](const Handshake &hand) { post_messages(s, p.internode, hand); },
      [&](const Handshake &hand) { return await_messages(s, p.internode, hand); },
      [&](uint64_t epoch, int r) { return &message_from(s, p.internode, epoch, r)->handshake; });
}

}  // namespace deepep::internode
