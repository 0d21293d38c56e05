// launch_shape.h - libdeepep_nvshmem.so: blocks and shared memory of notify with a routing across nodes.
#pragma once
#include "cuda/impl/normal/routed_notify.cuh"
#include "cuda/launch/internode.h"

namespace deepep::internode {

constexpr uint32_t kCountsShared = 40 * 1024;  // of its counters: what a kernel gets without opting in

struct NotifyShape {
  int blocks;
  uint32_t shared;
};
inline NotifyShape shape_notify(const Team *team, RoutedNotifyParams *n) {
  const uint32_t experts = n->num_experts, num_ranks = team->view.num_ranks;
  n->warps = kNotifyThreads / kWarp;
  while (n->warps > 1 && routing_counts_bytes(experts, num_ranks, n->warps) > kCountsShared) --n->warps;
  const int blocks = min(min(max(1, ceil_div(n->num_tokens, kRoutedNotifyTokens)), kRoutedBlocks), team->own_sms());
  n->share = ceil_div(n->num_tokens, blocks);
  return {blocks, routing_counts_bytes(experts, num_ranks, n->warps)};
}

}  // namespace deepep::internode
