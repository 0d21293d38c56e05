// low_latency.h - launches of low latency, what is the same in both GPU libraries (see impl/low_latency/shared.cuh):
// checks of a call's parameters, its arguments, the size of its grid. Host.
#pragma once
#include "cuda/impl/low_latency/shared.cuh"
#include "cuda/launch/host.h"

namespace deepep {

// Dynamic shared memory that a block gets without opting in, less the static part.
constexpr size_t kMaxTables = 48 * 1024 - 6 * 1024;

// A block for each token of a full call and one for the control block, as far as this rank's share of the device goes.
inline int low_latency_blocks(const Team *team, int32_t num_sms, int32_t max_tokens) {
  return min(num_sms > 0 ? num_sms : max(32, max_tokens) + 1, team->own_sms());
}

// The limits are those of dk_info.
template <class P>
int32_t check_low_latency(const P *p, const TeamView &view) {
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_topk <= 0 || p->num_topk > kMaxTopk) return DK_EINVAL;
  if (p->num_max_tokens <= 0 || p->num_max_tokens > kMaxLowLatencyTokens || p->num_tokens < 0 ||
      p->num_tokens > p->num_max_tokens)
    return DK_EINVAL;
  if (p->num_experts <= 0 || p->num_experts % view.num_ranks != 0 || (p->index_bytes != 4 && p->index_bytes != 8))
    return DK_EINVAL;
  if (p->phases < DK_PHASE_SEND || p->phases > DK_PHASE_BOTH || p->ticket >= DK_NUM_TICKETS) return DK_EINVAL;
  return static_cast<uint32_t>(p->num_experts / view.num_ranks) > kMaxLocalExperts ? DK_EUNSUPPORTED : DK_OK;
}
inline bool is_sane_format(const dk_ll_dispatch_params *p) {
  if (p->format < DK_FORMAT_BF16 || p->format > DK_FORMAT_NVFP4) return false;
  if (p->format != DK_FORMAT_BF16 && p->hidden % kScaleChannels != 0) return false;
  if (p->format >= DK_FORMAT_FP4 && p->flags != 0) return false;
  if (p->format == DK_FORMAT_FP4 && (p->phases & DK_PHASE_SEND) != 0 && p->num_tokens > 0 && p->x_scales == 0)
    return false;
  return (p->flags & DK_LL_UE8M0) == 0 ||
         ((p->flags & DK_LL_ROUND_SCALE) != 0 && p->hidden % (4 * kScaleChannels) == 0);
}
inline bool is_sane_format(const dk_ll_combine_params *p) {
  const bool logfmt = (p->flags & DK_LL_LOGFMT) != 0;
  if (logfmt && ((p->flags & DK_LL_ZERO_COPY) != 0 || p->hidden % kScaleChannels != 0)) return false;
  return p->x_row_stride >= 2ull * p->hidden && p->x_row_stride % 16 == 0;
}

// All but the format.
template <class P>
LowLatencyArguments low_latency_arguments(const P *p, const TeamView &view, uint32_t op) {
  LowLatencyArguments call{};
  call.session = Session{view, p->call, p->timeout_ns, op, p->phases};
  call.phases = p->phases;
  call.ticket = p->ticket;
  call.flags = p->flags;
  call.topk_idx = pointer<void>(p->topk_idx);
  call.topk_weights = pointer<float>(p->topk_weights);
  call.num_tokens = p->num_tokens;
  call.num_topk = p->num_topk;
  call.index_bytes = p->index_bytes;
  call.max_tokens = p->num_max_tokens;
  call.hidden = p->hidden;
  call.num_experts = p->num_experts;
  call.src_info = pointer<int32_t>(p->src_info);
  call.layout_range = pointer<int64_t>(p->layout_range);
  call.wait_stats = pointer<int64_t>(p->wait_stats);
  return call;
}
inline LowLatencyDispatchBuffers low_latency_buffers(const dk_ll_dispatch_params *p) {
  return {pointer<uint8_t>(p->x),          pointer<uint8_t>(p->x_scales),
          pointer<uint8_t>(p->recv_x),     pointer<uint32_t>(p->recv_scales),
          pointer<int32_t>(p->recv_count), pointer<int32_t>(p->cumulative_stats)};
}
inline LowLatencyCombineBuffers low_latency_buffers(const dk_ll_combine_params *p) {
  return {pointer<uint8_t>(p->x), p->x_row_stride, pointer<uint8_t>(p->combined_x)};
}

}  // namespace deepep
