// low_latency.cu - launches of the low-latency mode.
#include "cuda/impl/low_latency/combine.cuh"
#include "cuda/impl/low_latency/dispatch.cuh"
#include "cuda/launch/internode.h"

namespace deepep {
namespace {

constexpr size_t kMaxTables = 48 * 1024 - 6 * 1024;  // shared memory of a block without opting in, less the static part

template <class P, class Kernel, class Params>
int32_t launch(P *p, const Team *team, Kernel *kernel, int blocks, size_t shared, const Params &params) {
  const OnDevice on(team->device, OnDevice::kAnyTime);
  kernel<<<blocks, kLlThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

// A block for each token of a full call and one for the control block, as far as this rank's share of the device goes.
int blocks_for(const Team *team, int32_t num_sms, int32_t max_tokens) {
  const int share = max(1, team->device->num_sms / max(1, team->sm_share));
  return min(num_sms > 0 ? num_sms : max(32, max_tokens) + 1, share);
}

template <class P>
bool is_sane(const P *p, const Team *team) {
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_topk <= 0 || p->num_topk > kMaxTopk) return false;
  if (p->num_max_tokens <= 0 || p->num_max_tokens > kMaxLowLatencyTokens || p->num_tokens < 0 ||
      p->num_tokens > p->num_max_tokens)
    return false;
  if (p->num_experts <= 0 || p->num_experts % team->view.num_ranks != 0 || (p->index_bytes != 4 && p->index_bytes != 8))
    return false;
  return p->phases >= DK_PHASE_SEND && p->phases <= DK_PHASE_BOTH && p->ticket < DK_NUM_TICKETS;
}

LowLatencyPlaces places_of(const TeamView &team, const LowLatencyLayout &at) {
  const uint64_t wire = team.wire + team.ring.bytes, left = team.wire_bytes - team.ring.bytes;
  LowLatencyPlaces places{};
  for (int slot = 0; slot < kLowLatencySlots; ++slot) {
    places.slot[slot] = team.rdma + slot_offset(team.rdma_bytes, at.slot_bytes, slot);
    places.row_words[slot] = wire + row_word_area(left, slot);
  }
  for (int copy = 0; copy < kWeightCopies; ++copy) places.weights[copy] = wire + weight_area(left, copy);
  places.headers = wire + header_area(left, 0);
  places.header_step = header_area(left, 1) - header_area(left, 0);
  return places;
}

template <class P>
int32_t fill_common(const P *p, const Team *team, uint32_t op, LowLatencyParams &call) {
  if (!is_sane(p, team)) return DK_EINVAL;
  const uint32_t num_ranks = team->view.num_ranks;
  call.at = low_latency_layout(num_ranks, p->num_max_tokens, p->hidden, p->num_experts);
  if (call.at.rdma_bytes > team->view.rdma_bytes || team->view.ring.bytes + call.at.wire_bytes > team->view.wire_bytes)
    return DK_EINVAL;
  if (p->num_experts / num_ranks > kMaxLocalExperts) return DK_EUNSUPPORTED;
  call.places = places_of(team->view, call.at);
  call.by_local = Divisor(p->num_experts / num_ranks);
  call.by_topk = Divisor(p->num_topk);
  call.session = session_of(p, op, p->phases);
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
  return DK_OK;
}

}  // namespace

cudaError_t load_low_latency_kernels() {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, low_latency_dispatch_kernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, low_latency_combine_kernel) : error;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_ll_layout(dk_ll_layout_params *p) {
  DK_ENTER(p);
  if (p->num_ranks < 1 || p->num_ranks > DK_MAX_RANKS || p->num_max_tokens <= 0 ||
      p->num_max_tokens > kMaxLowLatencyTokens)
    return DK_EINVAL;
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_experts <= 0 || p->num_experts % p->num_ranks != 0)
    return DK_EINVAL;
  const LowLatencyLayout at = low_latency_layout(p->num_ranks, p->num_max_tokens, p->hidden, p->num_experts);
  p->rdma_bytes = at.rdma_bytes;
  p->wire_bytes = ring_flags(p->num_ranks).bytes + at.wire_bytes;
  p->zero_copy_offset[0] = at.zero_copy(0);
  p->zero_copy_offset[1] = at.zero_copy(1);
  p->zero_copy_row_stride = 2ull * p->hidden;
  return DK_OK;
}

DK_EXPORT int32_t dk_ll_dispatch(dk_ll_dispatch_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team->internode != nullptr) return internode_ll_dispatch(p);
  LowLatencyDispatchParams d{};
  const int32_t code = fill_common(p, team, DK_OP_LL_DISPATCH, d.call);
  if (code != DK_OK) return code;
  const bool packed = (p->flags & DK_LL_UE8M0) != 0;
  if (p->format != DK_FORMAT_BF16 && p->format != DK_FORMAT_FP8) return DK_EINVAL;
  if (p->format == DK_FORMAT_FP8 && p->hidden % kScaleChannels != 0) return DK_EINVAL;
  if (packed && ((p->flags & DK_LL_ROUND_SCALE) == 0 || p->hidden % 512 != 0)) return DK_EINVAL;
  d.call.format = static_cast<uint32_t>(p->format);
  d.tile_tokens = tokens_of_tile(p->num_topk);
  d.x = pointer<uint8_t>(p->x);
  d.recv_x = pointer<uint8_t>(p->recv_x);
  d.recv_scales = pointer<uint32_t>(p->recv_scales);
  d.recv_count = pointer<int32_t>(p->recv_count);
  d.cumulative_stats = pointer<int32_t>(p->cumulative_stats);
  const size_t num_ranks = team->view.num_ranks,
               tables = 4 * (p->num_experts + num_ranks) + sizeof(LowLatencyCall) * num_ranks;
  const size_t shared = align_up<size_t>(8 * num_ranks, 16) + max<size_t>(tables, 2 * kTileCodes);
  if (shared > kMaxTables) return DK_EUNSUPPORTED;
  return launch(p, team, low_latency_dispatch_kernel, blocks_for(team, p->num_sms, p->num_max_tokens), shared, d);
}

DK_EXPORT int32_t dk_ll_combine(dk_ll_combine_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team->internode != nullptr) return internode_ll_combine(p);
  LowLatencyCombineParams c{};
  const int32_t code = fill_common(p, team, DK_OP_LL_COMBINE, c.call);
  if (code != DK_OK) return code;
  if ((p->flags & DK_LL_LOGFMT) != 0 && p->hidden % kScaleChannels != 0) return DK_EINVAL;
  if ((p->flags & DK_LL_ZERO_COPY) != 0 && (p->flags & DK_LL_LOGFMT) != 0) return DK_EINVAL;
  c.x = pointer<uint8_t>(p->x);
  c.x_row_stride = p->x_row_stride;
  c.combined_x = pointer<uint8_t>(p->combined_x);
  if (c.x_row_stride < 2ull * p->hidden || c.x_row_stride % 16 != 0) return DK_EINVAL;
  const size_t num_ranks = team->view.num_ranks;
  const size_t shared =
      (8 + sizeof(LowLatencyCall)) * num_ranks + 4 * (p->num_experts / num_ranks + 1) + 4 * p->num_experts;
  if (shared > kMaxTables) return DK_EUNSUPPORTED;
  return launch(p, team, low_latency_combine_kernel, blocks_for(team, p->num_sms, p->num_max_tokens), shared, c);
}

#ifdef DEEPEP_TIMELINE
// Marks of the last calls on the current device: [dispatch, combine][kTimelineCalls][kTimelineBlocks][kNumMarks];
// returns words.
extern "C" __attribute__((visibility("default"))) uint64_t dk_timeline(uint64_t *to) {
  if (to != nullptr && cudaMemcpyFromSymbol(to, g_timeline, sizeof g_timeline) != cudaSuccess) return 0;
  return sizeof g_timeline / sizeof(uint64_t);
}
#endif
