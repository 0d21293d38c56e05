// handshake.cuh - the message with which a rank begins a normal-mode call.
#pragma once
#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/dispatch_params.cuh"
#include "cuda/impl/normal/notify_params.cuh"
#include "cuda/sync/session.cuh"

namespace deepep {

__device__ inline Handshake notify_handshake(const NotifyParams &p, uint64_t epoch) {
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.hidden_bytes;
  hand.mine.op = DK_OP_NOTIFY;
  hand.mine.num_experts = p.num_experts;
  hand.mine.num_topk = p.num_topk;
  hand.mine.num_scales = p.num_scales;
  hand.mine.row_limit = p.num_worst_tokens > 0 ? p.num_worst_tokens : -1;
  return hand;
}

__device__ inline Handshake dispatch_handshake(const DispatchParams &p, uint64_t epoch) {
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.row_bytes;
  hand.mine.op = DK_OP_DISPATCH;
  hand.mine.flags = (p.cached() ? kHandshakeCached : 0) | (p.has_weights() ? kHandshakeWeights : 0) |
                    (p.num_tokens == 0 ? kHandshakeSilent : 0);
  hand.mine.num_experts = p.num_experts;
  hand.mine.num_topk = p.num_topk;
  hand.mine.num_scales = p.num_scales;
  hand.mine.row_limit = p.num_recv_tokens;
  hand.mine.segment = p.recv_segment;
  hand.mine.segment_offset = p.recv_segment_offset;
  return hand;
}

__device__ inline Handshake combine_handshake(const CombineParams &p, uint64_t epoch) {
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.row_bytes;
  hand.mine.op = DK_OP_COMBINE;
  hand.mine.num_topk = p.num_topk;
  if (p.num_tokens == 0 && p.num_recv_tokens == 0) hand.mine.flags = kHandshakeSilent;
  return hand;
}

}  // namespace deepep
