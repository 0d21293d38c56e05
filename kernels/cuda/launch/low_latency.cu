// low_latency.cu - launches of the low-latency mode.
#include "cuda/impl/low_latency/combine_beside.cuh"
#include "cuda/impl/low_latency/dispatch.cuh"
#include "cuda/launch/copies.h"
#include "cuda/launch/internode.h"
#include "cuda/launch/low_latency.h"

namespace deepep {
namespace {

template <class P, class Kernel, class Params>
int32_t launch(P *p, const Team *team, Kernel *kernel, int blocks, size_t shared, const Params &params) {
  const OnDevice on(team->device, OnDevice::kAnyTime);
  kernel<<<blocks, kLlThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
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

template <class Args>
int32_t fill_params(const Args *p, const Team *team, uint32_t op, LowLatencyParams<Args> &params) {
  const int32_t code = check_low_latency(p, team->view);
  if (code != DK_OK) return code;
  const uint32_t num_ranks = team->view.num_ranks;
  params.at = low_latency_layout(num_ranks, p->num_max_tokens, p->hidden, p->num_experts);
  if (params.at.rdma_bytes > team->view.rdma_bytes ||
      team->view.ring.bytes + params.at.wire_bytes > team->view.wire_bytes)
    return DK_EINVAL;
  static_cast<Args &>(params) = *p;
  params.session = session_of(p, op, p->phases);
  params.places = places_of(team->view, params.at);
  params.by_local = Divisor(p->num_experts / num_ranks);
  params.by_topk = Divisor(p->num_topk);
  return DK_OK;
}

// With DK_TEAM_LL_COPY, before a kernel that sends: slots are used in turn, each once its copies have ended.
template <class Args>
cudaError_t choose_slot(Team *team, LowLatencyParams<Args> &params) {
  if (team->copies == nullptr || (params.phases & DK_PHASE_SEND) == 0) return cudaSuccess;
  const OnDevice on(team->device);
  params.second_slot = static_cast<uint32_t>(team->copies->slot);
  return on.error() == cudaSuccess ? join_copies(team, team->copies->slot, stream_of(params.stream), true) : on.error();
}
// After the kernel.
template <class Args>
void use_slot(Team *team, const LowLatencyParams<Args> &params) {
  if (team->copies == nullptr || (params.phases & DK_PHASE_SEND) == 0) return;
  team->copies->slot ^= 1;
  team->copies->slot_of_ticket[params.ticket] = static_cast<int>(params.second_slot);
}

// Rows of a send half by copy engines: the kernel packs them, copies follow. Of a receive half: the caller's stream
// goes on once this rank's own copies have ended, too.
template <class Run>
int32_t launch_half(dk_ll_dispatch_params *p, Team *team, LowLatencyDispatchParams &params, Run run) {
  const OnDevice on(team->device);
  const bool packs = p->phases == DK_PHASE_SEND && p->num_tokens > 0 && team->view.num_ranks > 1;
  cudaError_t error = on.error();
  if (error == cudaSuccess && packs) error = open_outbox(team, &params);
  if (error != cudaSuccess) return device_failure(p, error);
  const int32_t code = run();
  if (code != DK_OK) return code;
  if (packs) error = send_outbox(team, shipment_of(team, params), stream_of(p->stream), {});
  if (p->phases == DK_PHASE_RECV)
    error = join_copies(team, team->copies->slot_of_ticket[p->ticket], stream_of(p->stream), false);
  note_dispatch(team->copies, p);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

// Likewise. Where the weights come with this combine, what the kernel of the send half leaves to do is done beside the
// caller's stream. A team that shrinks does not send them.
int32_t launch_combine_half(dk_ll_combine_params *p, Team *team, const LowLatencyCombineParams &params, size_t shared) {
  const OnDevice on(team->device);
  CopiedCombineParams c{params};
  const cudaStream_t stream = stream_of(p->stream);
  const Weights weights = find_weights(team->copies, p);
  const bool sums = p->phases == DK_PHASE_SEND && team->view.num_ranks > 1 && (p->flags & DK_LL_UNREDUCED) == 0,
             shrinks = (team->view.flags & DK_TEAM_SHRINK) != 0, packs = sums && weights == Weights::kOfDispatch,
             defers = sums && weights == Weights::kOfCombine && !shrinks;
  const int slot = team->copies->slot_of_ticket[p->ticket];
  cudaError_t error = on.error();
  if (error == cudaSuccess && (packs || defers)) error = open_outbox(team, &c);
  if (error == cudaSuccess && p->phases == DK_PHASE_RECV) error = join_sums(team, slot, stream);
  if (error != cudaSuccess) return device_failure(p, error);
  c.defers = defers ? 1 : 0;
  const int32_t code = launch(p, team, deep_ep::internode_ll::combine<CopiedCombineParams>,
                              low_latency_blocks(team, p->num_sms, p->num_max_tokens), shared, c);
  if (code != DK_OK) return code;
  std::function<cudaError_t(cudaStream_t)> sum;
  if (defers)
    sum = [&](cudaStream_t beside) {
      SumsBesideParams s{c};
      const int blocks = min(p->num_sms > 0 ? p->num_sms : kSumSms, team->own_sms());
      deep_ep::internode_ll::sums_beside<<<blocks, kLlThreads, 4 * p->num_experts, beside>>>(s);
      return cudaGetLastError();
    };
  if (packs || defers) error = send_outbox(team, shipment_of(team, c), stream, sum);
  if (p->phases == DK_PHASE_RECV) error = join_copies(team, slot, stream, false);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

}  // namespace

cudaError_t load_low_latency_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, deep_ep::internode_ll::dispatch);
  if (error == cudaSuccess)
    error = cudaFuncGetAttributes(&attributes, deep_ep::internode_ll::combine<LowLatencyCombineParams>);
  if (error == cudaSuccess)
    error = cudaFuncGetAttributes(&attributes, deep_ep::internode_ll::combine<CopiedCombineParams>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode_ll::sums_beside);
  return error;
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
  const bool remote =
      p->num_nvl_peers > 0 && (p->num_ranks > p->num_nvl_peers || (p->flags & DK_TEAM_LL_TRANSPORT) != 0);
  if (remote) internode_ll_layout(p);
  return DK_OK;
}

DK_EXPORT int32_t dk_ll_dispatch(dk_ll_dispatch_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team->internode != nullptr) return internode_ll_dispatch(p);
  LowLatencyDispatchParams d{};
  const int32_t code = fill_params(p, team, DK_OP_LL_DISPATCH, d);
  if (code != DK_OK) return code;
  if (!is_sane_format(p)) return DK_EINVAL;
  d.tile_tokens = tokens_of_tile(p->num_topk);
  const size_t num_ranks = team->view.num_ranks,
               tables = 4 * (p->num_experts + num_ranks) + sizeof(LowLatencyCall) * num_ranks;
  const size_t shared = align_up<size_t>(8 * num_ranks, 16) + max<size_t>(tables, 2 * kTileCodes);
  if (shared > kMaxTables) return DK_EUNSUPPORTED;
  const cudaError_t error = choose_slot(team, d);
  if (error != cudaSuccess) return device_failure(p, error);
  const auto run = [&] {
    return launch(p, team, deep_ep::internode_ll::dispatch, low_latency_blocks(team, p->num_sms, p->num_max_tokens),
                  shared, d);
  };
  const int32_t result = team->copies != nullptr ? launch_half(p, team, d, run) : run();
  if (result == DK_OK) use_slot(team, d);
  return result;
}

DK_EXPORT int32_t dk_ll_combine(dk_ll_combine_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team->internode != nullptr) return internode_ll_combine(p);
  LowLatencyCombineParams c{};
  const int32_t code = fill_params(p, team, DK_OP_LL_COMBINE, c);
  if (code != DK_OK) return code;
  if (!is_sane_format(p)) return DK_EINVAL;
  const size_t num_ranks = team->view.num_ranks;
  const size_t shared =
      (8 + sizeof(LowLatencyCall)) * num_ranks + 4 * (p->num_experts / num_ranks + 1) + 4 * p->num_experts;
  if (shared > kMaxTables) return DK_EUNSUPPORTED;
  const cudaError_t error = choose_slot(team, c);
  if (error != cudaSuccess) return device_failure(p, error);
  const int32_t result = team->copies != nullptr
                             ? launch_combine_half(p, team, c, shared)
                             : launch(p, team, deep_ep::internode_ll::combine<LowLatencyCombineParams>,
                                      low_latency_blocks(team, p->num_sms, p->num_max_tokens), shared, c);
  if (result == DK_OK) use_slot(team, c);
  return result;
}

#ifdef DEEPEP_TIMELINE
// Marks of the last calls on the current device: [dispatch, combine][kTimelineCalls][kTimelineBlocks][kNumMarks];
// returns words.
extern "C" __attribute__((visibility("default"))) uint64_t dk_timeline(uint64_t *to) {
  if (to != nullptr && cudaMemcpyFromSymbol(to, g_timeline, sizeof g_timeline) != cudaSuccess) return 0;
  return sizeof g_timeline / sizeof(uint64_t);
}
#endif
