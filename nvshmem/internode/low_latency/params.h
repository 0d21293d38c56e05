// params.h - what low-latency kernels among nodes are told, from what the interface was told. Host.
#pragma once
#include "internode/low_latency/combine.cuh"
#include "internode/low_latency/dispatch.cuh"

namespace deepep::internode {

constexpr size_t kMaxSharedBytes =
    48 * 1024 - 6 * 1024;  // shared memory of a block without opting in, less the static part
template <class P>
size_t shared_bytes(const P *p, int num_ranks) {
  return sizeof(uint64_t) * num_ranks + 4ull * (p->num_experts + num_ranks + 1);
}

// What a team has for it.
struct LowLatencyTeam {
  TeamView view;
  uint64_t outbox;  // from the start of the block, kLowLatencyOutboxBytes
  LowLatencyState *state;
  int next_stage;  // of the two buffers of combine's rows, the one that the next combine sends from
};

template <class P>
bool is_sane_call(const P *p, const TeamView &view) {
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_topk <= 0 || p->num_topk > kMaxTopk) return false;
  if (p->num_max_tokens <= 0 || p->num_max_tokens > kMaxLowLatencyTokens || p->num_tokens < 0 ||
      p->num_tokens > p->num_max_tokens)
    return false;
  if (p->num_experts <= 0 || p->num_experts % view.num_ranks != 0 || (p->index_bytes != 4 && p->index_bytes != 8))
    return false;
  return p->phases >= DK_PHASE_SEND && p->phases <= DK_PHASE_BOTH && p->ticket < DK_NUM_TICKETS;
}

// Where all lies. False: not in this block.
template <class P>
bool find_offsets(const P *p, const LowLatencyTeam &team, uint32_t payload, LowLatencyOffsets *at) {
  const TeamView &view = team.view;
  const uint64_t ranks = view.num_ranks, experts = p->num_experts, tokens = p->num_max_tokens, hidden = p->hidden;
  const LowLatencyLayout layout = low_latency_layout(ranks, tokens, hidden, experts);
  at->header_bytes =
      experts == ranks ? 0 : align_up<uint32_t>(4 * p->num_topk, 16);  // one expert a rank: it stands at its number
  at->row_bytes = at->header_bytes + payload;
  at->counts_bytes = align_up<uint32_t>(4 * static_cast<uint32_t>(experts / ranks), 16);
  at->stage_bytes = layout.zero_copy_bytes;
  at->source_bytes = max<uint64_t>(layout.zero_copy_bytes / ranks, tokens * at->row_bytes);
  if (layout.rdma_bytes > view.rdma_bytes || ranks * at->source_bytes > layout.slot_bytes) return false;
  const uint64_t wire = view.wire + view.ring.bytes, area = (view.wire_bytes - view.ring.bytes) / 4 / 128 * 128;
  const uint64_t words = experts * tokens * 8 + ranks * 8, counts = ranks * at->counts_bytes;
  if (view.wire_bytes < view.ring.bytes || area < words || area < 2 * counts) return false;
  for (int i = 0; i < kLowLatencySlots; ++i) {
    at->slot[i] = view.rdma + slot_offset(view.rdma_bytes, layout.slot_bytes, i);
    at->words[i] = wire + i * area;
    at->counts_in[i] = wire + (2 + i) * area;
    at->counts_out[i] = at->counts_in[i] + counts;
  }
  at->outbox = team.outbox;
  return true;
}

template <class P>
int32_t fill_call(const P *p, const LowLatencyTeam &team, uint32_t op, uint32_t payload, InternodeLlParams *call) {
  if (!is_sane_call(p, team.view) || !find_offsets(p, team, payload, &call->at)) return DK_EINVAL;
  if (shared_bytes(p, team.view.num_ranks) > kMaxSharedBytes) return DK_EUNSUPPORTED;
  call->session = Session{team.view, p->call, p->timeout_ns, op, p->phases};
  call->state = team.state;
  call->phases = p->phases;
  call->ticket = p->ticket;
  call->flags = p->flags;
  call->topk_idx = pointer<void>(p->topk_idx);
  call->topk_weights = pointer<float>(p->topk_weights);
  call->num_tokens = p->num_tokens;
  call->num_topk = p->num_topk;
  call->index_bytes = p->index_bytes;
  call->max_tokens = p->num_max_tokens;
  call->hidden = p->hidden;
  call->num_experts = p->num_experts;
  call->num_local = p->num_experts / team.view.num_ranks;
  call->src_info = pointer<int32_t>(p->src_info);
  call->layout_range = pointer<int64_t>(p->layout_range);
  call->wait_stats = pointer<int64_t>(p->wait_stats);
  return DK_OK;
}

inline int32_t fill_dispatch(const dk_ll_dispatch_params *p, const LowLatencyTeam &team, InternodeLlDispatchParams *d) {
  if (p->format != DK_FORMAT_BF16 && p->format != DK_FORMAT_FP8) return DK_EINVAL;
  const bool fp8 = p->format == DK_FORMAT_FP8;
  if (fp8 && p->hidden % kScaleChannels != 0) return DK_EINVAL;
  if ((p->flags & DK_LL_UE8M0) != 0 && ((p->flags & DK_LL_ROUND_SCALE) == 0 || p->hidden % (4 * kScaleChannels) != 0))
    return DK_EINVAL;
  const uint32_t hidden = static_cast<uint32_t>(p->hidden);
  const int32_t code =
      fill_call(p, team, DK_OP_LL_DISPATCH, fp8 ? hidden + align_up(hidden / 32, 16u) : 2 * hidden, &d->call);
  d->call.format = static_cast<uint32_t>(p->format);
  d->x = pointer<uint8_t>(p->x);
  d->recv_x = pointer<uint8_t>(p->recv_x);
  d->recv_scales = pointer<uint32_t>(p->recv_scales);
  d->recv_count = pointer<int32_t>(p->recv_count);
  d->cumulative_stats = pointer<int32_t>(p->cumulative_stats);
  return code;
}

inline bool bad_zero_copy(const dk_ll_combine_params *p, const TeamView &view) {
  const uint64_t base = reinterpret_cast<uint64_t>(view.self + view.rdma),
                 rows = static_cast<uint64_t>(p->num_experts) * p->num_max_tokens;
  return p->x < base || p->x - base + (rows - 1) * p->x_row_stride + 2ull * p->hidden > view.rdma_bytes;
}

// Rows are staged where zero copy has them, so that whoever alternates meets no row on its way. p->x says where, if
// they are there.
inline int32_t fill_combine(const dk_ll_combine_params *p, const LowLatencyTeam &team, InternodeLlCombineParams *c) {
  const bool logfmt = (p->flags & DK_LL_LOGFMT) != 0, zero_copy = (p->flags & DK_LL_ZERO_COPY) != 0;
  if (logfmt && (zero_copy || p->hidden % kScaleChannels != 0)) return DK_EINVAL;
  if (logfmt && p->hidden > kMaxLogChannels) return DK_EUNSUPPORTED;
  if (p->x_row_stride < 2ull * p->hidden || p->x_row_stride % 16 != 0) return DK_EINVAL;
  const int32_t code = fill_call(p, team, DK_OP_LL_COMBINE, 0, &c->call);
  if (code != DK_OK) return code;
  if (zero_copy && (p->phases & DK_PHASE_SEND) != 0 && bad_zero_copy(p, team.view)) return DK_EINVAL;
  const uint64_t second = reinterpret_cast<uint64_t>(team.view.self + team.view.rdma + c->call.at.stage_bytes);
  c->call.stage = zero_copy ? p->x == second : team.next_stage;
  c->call.at.stage = team.view.rdma + c->call.stage * c->call.at.stage_bytes;
  c->x = pointer<uint8_t>(p->x);
  c->x_row_stride = p->x_row_stride;
  c->combined_x = pointer<uint8_t>(p->combined_x);
  return DK_OK;
}

}  // namespace deepep::internode
