// normal.cu - launches of the normal mode: checks, grid, shared memory.
#include "cuda/impl/normal/combine_kernel.cuh"
#include "cuda/impl/normal/dispatch_kernel.cuh"
#include "cuda/impl/normal/layout_kernel.cuh"
#include "cuda/impl/normal/notify_kernel.cuh"
#include "cuda/launch/internode.h"

namespace deepep {
namespace {

constexpr int kDefaultSms = 20;  // for callers other than the engine, which always gives a number (internal/plan)

// Blocks of a kernel that fills an SM: as many as the caller asks for, but at most this rank's share of the device.
int blocks_for(const Team *team, int32_t num_sms) {
  const int share = max(1, team->device->num_sms / max(1, team->sm_share));
  return min(num_sms > 0 ? num_sms : kDefaultSms, share);
}

// The largest piece of a row that leaves room for every sender's stages: whole rows where they fit.
uint32_t stage_bytes_for(uint64_t row_bytes, uint32_t senders, uint32_t limit) {
  const uint64_t whole = min<uint64_t>(row_bytes, kMaxStageBytes);
  const uint64_t fit = limit / (senders * kSendStages) / 128 * 128;
  return static_cast<uint32_t>(align_up<uint64_t>(min(whole, fit), 16));
}

template <class Kernel>
cudaError_t load(Kernel *kernel, size_t max_shared) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || max_shared == 0) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(max_shared));
}

constexpr size_t kSharedLimit80 = 160 * 1024, kSharedLimit90 = 224 * 1024, kSharedForRoles = 44 * 1024,
                 kMinForStages = 12 * 1024;

}  // namespace

cudaError_t load_normal_kernels(bool bulk) {
  int limit = 0, ordinal = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  const size_t max_shared = static_cast<size_t>(limit) - 2048;  // static shared memory comes on top
  if (error == cudaSuccess) error = load(layout_kernel, min<size_t>(max_shared, 96 * 1024));
  if (error == cudaSuccess) error = load(deep_ep::intranode::notify_dispatch, 0);
  if (error == cudaSuccess) error = load(deep_ep::intranode::dispatch<false>, min(max_shared, kSharedLimit80));
  if (error == cudaSuccess) error = load(deep_ep::intranode::combine<false>, min(max_shared, kSharedLimit80));
#if DEEPEP_SM90
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::dispatch<true>, min(max_shared, kSharedLimit90));
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::combine<true>, min(max_shared, kSharedLimit90));
#else
  (void)bulk;
#endif
  return error;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_layout(dk_layout_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  const int num_ranks = team->view.num_ranks;
  if (p->num_tokens < 0 || p->num_topk <= 0 || p->num_experts <= 0 || p->num_experts % num_ranks != 0) return DK_EINVAL;
  if (p->index_bytes != 4 && p->index_bytes != 8) return DK_EINVAL;
  const LayoutParams params{*p, session_of(p, DK_OP_LAYOUT, DK_PHASE_BOTH),
                            ceil_div(num_ranks, team->view.num_nvl_peers)};
  const size_t shared = 4ull * (p->num_experts + num_ranks + params.num_nodes);
  if (shared > 96 * 1024) return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  const int per_block =
      p->num_topk <= kWarp ? kWarp / p->num_topk * (kLayoutThreads / kWarp) : kLayoutThreads;  // tokens
  const int blocks = min(max(1, ceil_div(p->num_tokens, per_block)), team->device->num_sms);
  layout_kernel<<<blocks + 1, kLayoutThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

DK_EXPORT int32_t dk_notify(dk_notify_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  const int num_ranks = team->view.num_ranks;
  if (p->routing != DK_ROUTING_NONE) return DK_EUNSUPPORTED;
  if (p->num_tokens < 0 || p->num_experts < 0 || p->num_experts % num_ranks != 0 || p->hidden_bytes == 0)
    return DK_EINVAL;
  if (p->expert_alignment < 1 || (p->num_experts > 0 && p->tokens_per_expert == 0)) return DK_EINVAL;
  if (static_cast<uint32_t>(p->num_experts / num_ranks) > max_local_experts(num_ranks)) return DK_EUNSUPPORTED;
  const NotifyParams params{*p, session_of(p, DK_OP_NOTIFY, DK_PHASE_BOTH)};
  if (is_remote(team)) return internode_notify(p, params);
  const OnDevice on(team->device);
  deep_ep::intranode::notify_dispatch<<<1 + min(num_ranks, 16), kNotifyThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

namespace {

template <bool kBulk>
int32_t launch_dispatch(dk_dispatch_params *p, DispatchParams &params, int blocks) {
  auto *team = handle_of<Team>(p->team);
  const uint32_t num_ranks = team->view.num_ranks;
  using Roles = DispatchRoles<kBulk>;
  if (blocks * Roles::kMetaReceivers < static_cast<int>(num_ranks)) return DK_EUNSUPPORTED;
  const size_t limit = kBulk ? kSharedLimit90 : kSharedLimit80;
  const bool staged_here = params.recv_segment < 0;
  params.meta_rows = staged_here ? kMetaBatch : kMetaBatchOfMany;
  while (params.meta_rows > 1 && Roles::meta_senders(params) * meta_space_bytes(params) > kMetaBuffers)
    --params.meta_rows;
  const size_t roles = DispatchShared<kBulk>(params, 0).bytes;
  if (roles + kMinForStages > limit) return DK_EUNSUPPORTED;
  params.stage_bytes = stage_bytes_for(params.row_bytes, Roles::kSenders, limit - roles);
  const size_t shared = DispatchShared<kBulk>(params, params.stage_bytes).bytes;
  const OnDevice on(team->device);
  deep_ep::intranode::dispatch<kBulk><<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

template <bool kBulk>
int32_t launch_combine(dk_combine_params *p, CombineParams &params, int blocks) {
  auto *team = handle_of<Team>(p->team);
  const uint32_t num_ranks = team->view.num_ranks;
  using Roles = CombineRoles<kBulk>;
  if (blocks * Roles::kSenders < static_cast<int>(num_ranks)) return DK_EUNSUPPORTED;
  params.senders = Roles::senders(blocks, static_cast<int>(num_ranks));
  params.stage_bytes = stage_bytes_for(params.row_bytes, Roles::kSenders, kSharedLimit90 - kSharedForRoles);
  const size_t shared = CombineShared<kBulk>(num_ranks, params.stage_bytes).bytes +
                        4ull * (Roles::kReducers + Roles::kSenders) * num_ranks;
  if (shared > (kBulk ? kSharedLimit90 : kSharedLimit80)) return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  deep_ep::intranode::combine<kBulk><<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

DispatchParams dispatch_params(const dk_dispatch_params *p) {
  DispatchParams d{*p, session_of(p, DK_OP_DISPATCH, DK_PHASE_BOTH)};
  d.row_bytes = static_cast<uint32_t>(p->hidden_bytes);
  d.index_bytes = p->index_bytes == 4 ? 4 : 8;
  d.recv_segment = max(p->recv_segment, -1);
  if (d.cached()) d.num_topk = d.num_worst_tokens = 0;
  if (d.num_topk == 0) d.num_experts = 0;
  return d;
}

bool is_aligned(uint64_t address) { return address % 16 == 0; }

}  // namespace

DK_EXPORT int32_t dk_dispatch(dk_dispatch_params *p) {
  DK_ENTER(p);
  if (p->routing != DK_ROUTING_NONE) return DK_EUNSUPPORTED;
  auto *team = handle_of<Team>(p->team);
  if (p->hidden_bytes == 0 || p->hidden_bytes % 16 != 0 || p->hidden_bytes > (1u << 30) || p->num_tokens < 0)
    return DK_EINVAL;
  if (!is_aligned(p->x) || !is_aligned(p->recv_x) || (p->recv_segment >= 0 && !is_aligned(p->recv_segment_offset)))
    return DK_EINVAL;
  if (p->recv_segment >= DK_MAX_SEGMENTS || p->num_scales < 0 || p->num_topk < 0) return DK_EINVAL;
  if (p->num_topk > 0 && p->index_bytes != 4 && p->index_bytes != 8) return DK_EINVAL;
  DispatchParams d = dispatch_params(p);
  const int blocks = blocks_for(team, p->num_sms);
  if (is_remote(team)) return internode_dispatch(p, d, blocks);
  d.meta = meta_shape(d);
  if (dispatch_ring(d, false).slots == 0) return DK_EUNSUPPORTED;  // nvl region under min_nvl_bytes
#if DEEPEP_SM90
  if (team->device->bulk) return launch_dispatch<true>(p, d, blocks);
#endif
  return launch_dispatch<false>(p, d, blocks);
}

DK_EXPORT int32_t dk_combine(dk_combine_params *p) {
  DK_ENTER(p);
  if (p->routing != DK_ROUTING_NONE) return DK_EUNSUPPORTED;
  auto *team = handle_of<Team>(p->team);
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_tokens < 0 || p->num_topk < 0) return DK_EINVAL;
  if (!is_aligned(p->x) || !is_aligned(p->combined_x) || !is_aligned(p->bias[0]) || !is_aligned(p->bias[1]))
    return DK_EINVAL;
  CombineParams c{*p, session_of(p, DK_OP_COMBINE, DK_PHASE_BOTH), 2u * p->hidden};
  const int blocks = blocks_for(team, p->num_sms);
  if (is_remote(team)) return internode_combine(p, c, blocks);
  if (combine_ring(c).slots == 0) return DK_EUNSUPPORTED;  // nvl region under min_nvl_bytes
#if DEEPEP_SM90
  if (team->device->bulk) return launch_combine<true>(p, c, blocks);
#endif
  return launch_combine<false>(p, c, blocks);
}
