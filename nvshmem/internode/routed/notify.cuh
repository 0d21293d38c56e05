// notify.cuh - libdeepep_nvshmem.so: notify with a routing across nodes. The CUDA library's functions count and place
// the choices; each message carries this rank's row of the matrix and its counts of all ranks' experts.
#pragma once
#include "cuda/impl/normal/routed_notify.cuh"
#include "internode/normal/common.cuh"

namespace deepep::internode {

struct RoutedNodesNotifyParams {
  RoutedNotifyParams n;
  NodeView internode;
};

struct NetworkMessages {
  const Session &s;
  const NodeView &internode;
  uint64_t epoch;
  __device__ const HandshakeMessage *handshake(int i) const { return &message_from(s, internode, epoch, i)->handshake; }
  __device__ const uint32_t *counts(int i) const { return message_from(s, internode, epoch, i)->counts; }
};

// Block 0, after sum_routing(): what depends on nodes. With fewer sums than ranks each is of every run of so many.
__device__ inline void sum_nodes(const RoutedNotifyParams &p) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, sums = p.num_psums();
  const auto rows = [&](int source) {
    const int before = source == 0 ? 0 : p.rank_prefix_matrix()[(source - 1) * num_ranks + team.rank];
    return p.rank_prefix_matrix()[source * num_ranks + team.rank] - before;
  };
  for (int u = threadIdx.x; sums < num_ranks && u < sums; u += blockDim.x) {
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < num_ranks; ++i)
      if (i % sums <= u) sum += rows(i);
    p.psum_per_rank()[u] = sum;
  }
  if (threadIdx.x != 0 || p.counts() == nullptr) return;
  const int first = team.rank / team.num_nvl_peers * team.num_nvl_peers;
  int remote = p.counts()->num_recv_tokens;
#pragma unroll 1
  for (int i = first; i < min(first + team.num_nvl_peers, num_ranks); ++i) remote -= rows(i);
  p.counts()->num_recv_nodes_tokens = remote;
}

}  // namespace deepep::internode

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

// kNotifyThreads of a block: with more, puts would have too few registers.
__global__ void __launch_bounds__(kNotifyThreads, 1) notify_routed(const __grid_constant__ RoutedNodesNotifyParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Session &s = p.n.session;
  const RoutingCounts counts(p.n, shared);
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    int64_t wrong = -1;
    count_choices(p.n, counts, wrong);
    wrong = await_blocks(p.n, wrong);
    const Handshake hand = routed_notify_handshake(p.n, epoch, wrong);
    const NetworkMessages messages{s, p.internode, epoch};
    uint32_t *mine = message_from(s, p.internode, epoch, s.team.rank)->counts;
    sum_blocks(p.n, counts, [&](int at, int sum) { mine[at] = static_cast<uint32_t>(sum); });
    if (blockIdx.x == 0) {
      const int words = s.team.num_ranks + p.n.num_experts;
      __syncthreads();  // all of `mine` is there
      post_messages(s, p.internode, hand, words, [&](int r, uint32_t *to) {
        for (int i = lane_id(); r != s.team.rank && i < words; i += kWarp) to[i] = mine[i];
      });
      publish_newest_by_last_warp(s.team);
    }
    keep_choices(p.n);
    if (await_messages(s, p.internode, hand) && sum_routing<false>(p.n, counts, messages)) {
      if (blockIdx.x == 0) {
        sum_nodes(p.n);
        announce_counts(p.n);
      }
      place_choices<false>(p.n, counts);
    }
  }
  finish(s, [&](bool failed) { end_routed_notify(p.n, counts, failed); });
}

}  // namespace deep_ep::internode
