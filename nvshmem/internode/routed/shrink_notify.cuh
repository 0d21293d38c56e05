// shrink_notify.cuh - libdeepep_nvshmem.so: notify with a routing of a team that shrinks across nodes: as notify.cuh,
// but ranks agree who takes part, and rows and choices of the others have no place.
#pragma once
#include "internode/normal/shrink.cuh"
#include "internode/routed/notify.cuh"

namespace deepep::internode {

struct RoutedShrinkNotifyParams : RoutedNodesNotifyParams {
  ShrinkView shrink;
};

struct MemberMessages {
  const PutPost &by;
  __device__ const HandshakeMessage *handshake(int i) const { return by.message(i); }
  __device__ const uint32_t *counts(int i) const { return by.body(i)->counts; }
};

}  // namespace deepep::internode

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(kNotifyThreads, 1)
    notify_routed_shrinking(const __grid_constant__ RoutedShrinkNotifyParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Session &s = p.n.session;
  const PutPost by{s, p.internode, p.shrink};
  const RoutingCounts counts(p.n, shared);
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    int64_t wrong = -1;
    count_choices(p.n, counts, wrong);
    wrong = await_blocks(p.n, wrong);
    const Handshake hand = routed_notify_handshake(p.n, epoch, wrong);
    // Counts lie where this rank's own message has them.
    uint32_t *mine = message_from(s, p.internode, own_copy(s.team, epoch), s.team.rank)->counts;
    sum_blocks(p.n, counts, [&](int at, int sum) { mine[at] = static_cast<uint32_t>(sum); });
    if (blockIdx.x == 0) {
      const int words = s.team.num_ranks + p.n.num_experts;
      __syncthreads();  // all of `mine` is there
      post_to_members(by, hand, static_cast<uint32_t>(words), [&](int r, uint32_t *to) {
        for (int i = lane_id(); r != s.team.rank && i < words; i += kWarp) to[i] = mine[i];
      });
      publish_newest_by_last_warp(s.team);
    }
    keep_choices(p.n);
    if (await_agreement(s, hand, epoch, by) && sum_routing<true>(p.n, counts, MemberMessages{by})) {
      if (blockIdx.x == 0) {
        sum_nodes(p.n);
        announce_counts(p.n);
      }
      place_choices<true>(p.n, counts);
    }
  }
  finish(s, [&](bool failed) { end_routed_notify(p.n, counts, failed); });
}

}  // namespace deep_ep::internode
