// far_ll.cu - launches of low latency among nodes.
#include <cstddef>
#include <new>

#include "far_ll_combine.cuh"
#include "far_ll_dispatch.cuh"

#include "cuda/launch/far.h"
#include "far.h"

namespace deepep {

struct FarLowLatency {
  FarLlState *state = nullptr; // device
  int next_stage = 0;          // of the two buffers of combine's rows, the one that the next combine sends from
};

namespace {

constexpr size_t kMaxTables = 48 * 1024 - 6 * 1024; // shared memory of a block without opting in, less the static part

// A block for each token of a full call and one for the clerk, as far as this rank's share of the device goes.
int blocks_for(const Team *team, int32_t num_sms, int32_t max_tokens) {
  const int share = most(1, team->device->num_sms / most(1, team->sm_share));
  return least(num_sms > 0 ? num_sms : most(32, max_tokens) + 1, share);
}

template <class P> bool is_sane(const P *p, const Team *team) {
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_topk <= 0 || p->num_topk > kMaxTopk) return false;
  if (p->num_max_tokens <= 0 || p->num_max_tokens > 65535 || p->num_tokens < 0 || p->num_tokens > p->num_max_tokens) return false;
  if (p->num_experts <= 0 || p->num_experts % team->view.num_ranks != 0 || (p->index_bytes != 4 && p->index_bytes != 8)) return false;
  return p->phases >= DK_PHASE_SEND && p->phases <= DK_PHASE_BOTH && p->ticket < DK_NUM_TICKETS;
}

// Where all lies. False: not in this block.
template <class P> bool find_places(const P *p, const Team *team, uint32_t payload, FarLlPlaces *at) {
  const TeamView &view = team->view;
  const uint64_t ranks = view.num_ranks, experts = p->num_experts, tokens = p->num_max_tokens, hidden = p->hidden;
  const LowLatencyLayout layout = low_latency_layout(ranks, tokens, hidden, experts);
  at->header_bytes = experts == ranks ? 0 : align_up<uint32_t>(4 * p->num_topk, 16); // one expert a rank: it stands at its number
  at->row_bytes = at->header_bytes + payload;
  at->counts_bytes = align_up<uint32_t>(4 * (experts / ranks), 16);
  at->stage_bytes = layout.zero_copy_bytes;
  if (layout.rdma_bytes > view.rdma_bytes || ranks * tokens * at->row_bytes > layout.slot_bytes) return false;
  const uint64_t wire = view.wire + view.ring.bytes, area = (view.wire_bytes - view.ring.bytes) / 4 / 128 * 128;
  const uint64_t words = experts * tokens * 8 + ranks * 8, counts = ranks * at->counts_bytes;
  if (view.wire_bytes < view.ring.bytes || area < words || area < 2 * counts) return false;
  for (int i = 0; i < kLowLatencySlots; ++i) {
    at->slot[i] = view.rdma + slot_offset(view.rdma_bytes, layout.slot_bytes, i);
    at->words[i] = wire + i * area;
    at->counts_in[i] = wire + (2 + i) * area, at->counts_out[i] = at->counts_in[i] + counts;
  }
  at->outbox = team->far->view.ll_control;
  return true;
}

template <class P> int32_t fill_common(const P *p, const Team *team, uint32_t op, uint32_t payload, FarLlParams &call) {
  if (!is_sane(p, team)) return DK_EINVAL;
  if (!find_places(p, team, payload, &call.at)) return DK_EINVAL;
  if (sizeof(uint64_t) * team->view.num_ranks + 4ull * (p->num_experts + team->view.num_ranks + 1) > kMaxTables) return DK_EUNSUPPORTED;
  call.session = session_of(p, op, p->phases);
  call.state = team->far->ll->state;
  call.phases = p->phases, call.ticket = p->ticket, call.flags = p->flags;
  call.topk_idx = pointer<void>(p->topk_idx), call.topk_weights = pointer<float>(p->topk_weights);
  call.num_tokens = p->num_tokens, call.num_topk = p->num_topk, call.index_bytes = p->index_bytes;
  call.max_tokens = p->num_max_tokens, call.hidden = p->hidden, call.num_experts = p->num_experts;
  call.num_local = p->num_experts / team->view.num_ranks;
  call.src_info = pointer<int32_t>(p->src_info), call.layout_range = pointer<int64_t>(p->layout_range);
  call.wait_stats = pointer<int64_t>(p->wait_stats);
  return DK_OK;
}

template <class P, class K> int32_t launch(P *p, const Team *team, const K &params, void (*kernel)(K)) {
  const size_t shared = sizeof(uint64_t) * team->view.num_ranks + 4ull * (p->num_experts + team->view.num_ranks + 1);
  const OnDevice on(team->device);
  kernel<<<blocks_for(team, p->num_sms, p->num_max_tokens), kFarLlThreads, shared, stream_of(p->stream)>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

// Where zero copy has its rows, so that whoever alternates meets no row on its way. p->x says which, if the rows are there already.
int choose_stage(const dk_ll_combine_params *p, const Team *team, uint64_t stage_bytes) {
  if ((p->flags & DK_LL_ZERO_COPY) == 0) return team->far->ll->next_stage;
  return p->x == handle_to(team->view.self + team->view.rdma + stage_bytes) ? 1 : 0;
}

bool bad_zero_copy(const dk_ll_combine_params *p, const Team *team) {
  const uint64_t base = handle_to(team->view.self + team->view.rdma), rows = static_cast<uint64_t>(p->num_experts) * p->num_max_tokens;
  return p->x < base || p->x - base + (rows - 1) * p->x_row_stride + 2ull * p->hidden > team->view.rdma_bytes;
}

}  // namespace

FarLowLatencyBytes far_ll_bytes(int, int, uint64_t, uint32_t) { return {kFarLlControlBytes, 0}; }
static_assert(kLowLatencyEnterCopies * sizeof(Enter) <= kFarLlControlBytes, "the outbox");

int32_t far_ll_team_create(dk_team_create_params *p, Team *team) {
  auto *ll = new (std::nothrow) FarLowLatency;
  if (ll == nullptr) return DK_ENOMEM;
  team->far->ll = ll;
  cudaStream_t service = team->device->service;
  cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&ll->state), sizeof(FarLlState));
  if (error == cudaSuccess) error = cudaMemsetAsync(ll->state, 0, sizeof(FarLlState), service);
  if (error == cudaSuccess) error = cudaStreamSynchronize(service);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

void far_ll_team_destroy(Team *team) {
  if (team->far->ll == nullptr) return;
  (void)cudaFree(team->far->ll->state);
  delete team->far->ll;
  team->far->ll = nullptr;
}

// No word lies where rows do, and words are told apart by the call: nothing there needs to be empty.
int32_t far_ll_clear(dk_clean_params *, const Team *) { return DK_OK; }

cudaError_t load_far_ll_kernels() {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, far_low_latency_dispatch_kernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, far_low_latency_combine_kernel) : error;
}

int32_t far_ll_dispatch(dk_ll_dispatch_params *p) {
  auto *team = handle_of<Team>(p->team);
  if (p->format != DK_FORMAT_BF16 && p->format != DK_FORMAT_FP8) return DK_EINVAL;
  const bool fp8 = p->format == DK_FORMAT_FP8;
  if (fp8 && p->hidden % kScaleChannels != 0) return DK_EINVAL;
  if ((p->flags & DK_LL_UE8M0) != 0 && ((p->flags & DK_LL_ROUND_SCALE) == 0 || p->hidden % (4 * kScaleChannels) != 0)) return DK_EINVAL;
  const uint32_t hidden = static_cast<uint32_t>(p->hidden);
  FarLlDispatchParams d{};
  const int32_t code = fill_common(p, team, DK_OP_LL_DISPATCH, fp8 ? hidden + align_up(hidden / 32, 16u) : 2 * hidden, d.call);
  if (code != DK_OK) return code;
  d.call.format = static_cast<uint32_t>(p->format);
  d.x = pointer<uint8_t>(p->x), d.recv_x = pointer<uint8_t>(p->recv_x), d.recv_scales = pointer<uint32_t>(p->recv_scales);
  d.recv_count = pointer<int32_t>(p->recv_count), d.cumulative_stats = pointer<int32_t>(p->cumulative_stats);
  return launch(p, team, d, far_low_latency_dispatch_kernel);
}

int32_t far_ll_combine(dk_ll_combine_params *p) {
  auto *team = handle_of<Team>(p->team);
  if ((p->flags & DK_LL_LOGFMT) != 0 && p->hidden % kScaleChannels != 0) return DK_EINVAL;
  if ((p->flags & DK_LL_LOGFMT) != 0 && p->hidden > kMaxLogChannels) return DK_EUNSUPPORTED;
  if ((p->flags & DK_LL_ZERO_COPY) != 0 && (p->flags & DK_LL_LOGFMT) != 0) return DK_EINVAL;
  FarLlCombineParams c{};
  const int32_t code = fill_common(p, team, DK_OP_LL_COMBINE, 0, c.call);
  if (code != DK_OK) return code;
  c.x = pointer<uint8_t>(p->x), c.x_row_stride = p->x_row_stride, c.combined_x = pointer<uint8_t>(p->combined_x);
  if (c.x_row_stride < 2ull * p->hidden || c.x_row_stride % 16 != 0) return DK_EINVAL;
  const bool sends = (p->phases & DK_PHASE_SEND) != 0;
  if (sends && (p->flags & DK_LL_ZERO_COPY) != 0 && bad_zero_copy(p, team)) return DK_EINVAL;
  c.call.stage = choose_stage(p, team, c.call.at.stage_bytes);
  c.call.at.stage = team->view.rdma + c.call.stage * c.call.at.stage_bytes;
  const int32_t launched = launch(p, team, c, far_low_latency_combine_kernel);
  if (sends && launched == DK_OK) team->far->ll->next_stage = 1 - c.call.stage;
  return launched;
}

}  // namespace deepep
