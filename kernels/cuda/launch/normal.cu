// normal.cu - launches of the normal mode: checks, grid, shared memory.
#include "cuda/impl/normal/combine_at_once.cuh"
#include "cuda/impl/normal/combine_kernel.cuh"
#include "cuda/impl/normal/dispatch_at_once.cuh"
#include "cuda/impl/normal/dispatch_kernel.cuh"
#include "cuda/impl/normal/layout_kernel.cuh"
#include "cuda/impl/normal/notify_kernel.cuh"
#include "cuda/impl/normal/routed_combine_kernel.cuh"
#include "cuda/impl/normal/routed_dispatch_kernel.cuh"
#include "cuda/impl/normal/routed_notify.cuh"
#include "cuda/launch/internode.h"
#include "cuda/launch/normal_copies.h"

namespace deepep {
namespace {

constexpr int kDefaultSms = 20;  // for callers other than the engine, which always gives a number (internal/plan)

// Blocks of a kernel that fills an SM: as many as the caller asks for, but at most this rank's share of the device.
int blocks_for(const Team *team, int32_t num_sms) { return min(num_sms > 0 ? num_sms : kDefaultSms, team->own_sms()); }

// The largest piece of a row, at most `most`, that leaves room for so many stages: whole rows where they fit.
uint32_t stage_bytes_for(uint64_t row_bytes, uint64_t most, uint32_t stages, size_t limit) {
  const uint64_t whole = min<uint64_t>(row_bytes, most);
  const uint64_t fit = limit / stages / 128 * 128;
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
                 kMinForStages = 12 * 1024, kRoutingLimit = 96 * 1024;

// Shared memory that a block of a normal-mode kernel may take on this device.
template <bool kBulk>
size_t shared_limit(const Device &device) {
  return min(device.max_shared, kBulk ? kSharedLimit90 : kSharedLimit80);
}

// Calls with a routing have kernels of their own for teams that shrink.
template <bool kShrinks>
cudaError_t load_routed_kernels(const Device &device) {
  const size_t limit80 = shared_limit<false>(device), limit90 = shared_limit<true>(device);
  const bool bulk = device.bulk;
  cudaError_t error = load(deep_ep::intranode::notify_routed<kShrinks>, min(device.max_shared, kRoutingLimit));
  if (error == cudaSuccess) error = load(deep_ep::intranode::dispatch_routed<false, kShrinks>, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::dispatch_expanded<false, kShrinks>, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::combine_routed<false, kShrinks>, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::combine_expanded<false, kShrinks>, limit80);
#if DEEPEP_SM90
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::dispatch_routed<true, kShrinks>, limit90);
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::dispatch_expanded<true, kShrinks>, limit90);
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::combine_routed<true, kShrinks>, limit90);
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::combine_expanded<true, kShrinks>, limit90);
#else
  (void)bulk, (void)limit90;
#endif
  return error;
}

}  // namespace

cudaError_t load_normal_kernels(const Device &device) {
  const size_t limit80 = shared_limit<false>(device), limit90 = shared_limit<true>(device);
  const bool bulk = device.bulk;
  cudaError_t error = load(layout_kernel, min<size_t>(device.max_shared, 96 * 1024));
  if (error == cudaSuccess) error = load(deep_ep::intranode::notify_dispatch, 0);
  if (error == cudaSuccess) error = load(deep_ep::intranode::dispatch<false>, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::dispatch_at_once<false>, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::combine_at_once, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::combine<false, false>, limit80);
  if (error == cudaSuccess) error = load(deep_ep::intranode::combine<false, true>, limit80);
#if DEEPEP_SM90
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::dispatch<true>, limit90);
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::dispatch_at_once<true>, limit90);
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::combine<true, false>, limit90);
  if (error == cudaSuccess && bulk) error = load(deep_ep::intranode::combine<true, true>, limit90);
#else
  (void)bulk, (void)limit90;
#endif
  if (error == cudaSuccess) error = load_routed_kernels<false>(device);
  if (error == cudaSuccess) error = load_routed_kernels<true>(device);
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
                            ceil_div(num_ranks, team->view.num_nvl_peers), shrinks(team->view)};
  const size_t shared = 4ull * (p->num_experts + num_ranks + params.num_nodes);
  if (shared > 96 * 1024) return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  const int per_block =
      p->num_topk <= kWarp ? kWarp / p->num_topk * (kLayoutThreads / kWarp) : kLayoutThreads;  // tokens
  const int blocks = min(max(1, ceil_div(p->num_tokens, per_block)), team->device->num_sms);
  layout_kernel<<<blocks + 1, kLayoutThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

namespace {

static_assert(kMaxRoutedExperts == DK_MAX_ROUTED_EXPERTS, "one limit");

// With a routing: what any of the three calls cannot do.
int32_t check_routing(const Team *team, int32_t routing, int32_t num_topk, int32_t num_experts, int32_t index_bytes) {
  if (routing != DK_ROUTING_PLAIN && routing != DK_ROUTING_EXPANDED) return DK_EINVAL;
  if (num_topk < 1 || num_topk > kWarp || (index_bytes != 4 && index_bytes != 8)) return DK_EINVAL;
  const bool fits = num_experts >= 1 && num_experts <= DK_MAX_ROUTED_EXPERTS;
  return fits && num_experts % team->view.num_ranks == 0 ? DK_OK : DK_EINVAL;
}

int32_t check_routed_notify(const Team *team, const dk_notify_params *p) {
  const int32_t code = check_routing(team, p->routing, p->num_topk, p->num_experts, p->index_bytes);
  if (code != DK_OK) return code;
  if (p->num_tokens < 0 || p->hidden_bytes == 0 || p->expert_alignment < 1 || p->num_worst_expanded < 0 ||
      p->num_max_tokens < p->num_tokens)
    return DK_EINVAL;
  if (p->psum_per_rank == 0 || p->psum_per_expert == 0 || p->num_per_expert == 0) return DK_EINVAL;
  const int sums = p->num_scaleup_ranks == 0 ? team->view.num_ranks : p->num_scaleup_ranks;
  if (sums != team->view.num_ranks && (!is_remote(team) || sums != team->view.num_nvl_peers)) return DK_EINVAL;
  return p->num_tokens > 0 && (p->topk_idx == 0 || p->dst_slot == 0) ? DK_EINVAL : DK_OK;
}
int32_t check_notify(const Team *team, const dk_notify_params *p) {
  if (p->routing != DK_ROUTING_NONE) return check_routed_notify(team, p);
  const int num_ranks = team->view.num_ranks;
  if (p->num_tokens < 0 || p->num_experts < 0 || p->num_experts % num_ranks != 0 || p->hidden_bytes == 0)
    return DK_EINVAL;
  if (p->expert_alignment < 1 || (p->num_experts > 0 && p->tokens_per_expert == 0)) return DK_EINVAL;
  return static_cast<uint32_t>(p->num_experts / num_ranks) > max_local_experts(num_ranks) ? DK_EUNSUPPORTED : DK_OK;
}

int32_t notify_with_routing(dk_notify_params *p) {
  auto *team = handle_of<Team>(p->team);
  if (is_remote(team)) return internode_routed_notify(p, {*p, session_of(p, DK_OP_NOTIFY, DK_PHASE_BOTH)});
  const uint32_t num_ranks = team->view.num_ranks, experts = p->num_experts;
  RoutedNotifyParams params{{*p, session_of(p, DK_OP_NOTIFY, DK_PHASE_BOTH)}};
  const int blocks = min(min(max(1, ceil_div(p->num_tokens, kRoutedNotifyTokens)), kRoutedBlocks), team->own_sms());
  params.share = ceil_div(p->num_tokens, blocks);
  params.warps = min(kRoutedNotifyThreads / kWarp, max(1, ceil_div(params.share * p->num_topk, kWarp)));
  while (params.warps > 1 && routing_counts_bytes(experts, num_ranks, params.warps) > kRoutingLimit) --params.warps;
  const size_t shared = routing_counts_bytes(experts, num_ranks, params.warps);
  const OnDevice on(team->device);
  const cudaError_t error = choose_note(team, p, &params.note);
  if (error != cudaSuccess) return device_failure(p, error);
  const auto kernel =
      shrinks(team->view) ? deep_ep::intranode::notify_routed<true> : deep_ep::intranode::notify_routed<false>;
  kernel<<<blocks, kRoutedNotifyThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace

DK_EXPORT int32_t dk_notify(dk_notify_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  const int32_t code = check_notify(team, p);
  if (code != DK_OK) return code;
  if (p->routing != DK_ROUTING_NONE) return notify_with_routing(p);
  const int num_ranks = team->view.num_ranks;
  NotifyParams params{*p, session_of(p, DK_OP_NOTIFY, DK_PHASE_BOTH)};
  if (is_remote(team)) return internode_notify(p, params);
  const OnDevice on(team->device);
  const cudaError_t error = choose_note(team, p, &params.note);
  if (error != cudaSuccess) return device_failure(p, error);
  deep_ep::intranode::notify_dispatch<<<1 + min(num_ranks, 16), kNotifyThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

namespace {

// The shared memory of a call's kernel.
template <bool kBulk>
size_t dispatch_shared(const DispatchParams &p, uint32_t stage_bytes) {
  return p.routing == DK_ROUTING_EXPANDED ? RoutedShared<kBulk, true>(p, stage_bytes).bytes
                                          : DispatchShared<kBulk>(p, stage_bytes).bytes;
}

template <bool kBulk>
int32_t launch_dispatch(dk_dispatch_params *p, DispatchParams &params, int blocks) {
  auto *team = handle_of<Team>(p->team);
  const uint32_t num_ranks = team->view.num_ranks;
  using Roles = DispatchRoles<kBulk>;
  if (blocks * Roles::kMetaReceivers < static_cast<int>(num_ranks)) return DK_EUNSUPPORTED;
  const size_t limit = shared_limit<kBulk>(*team->device);
  const bool staged_here = params.recv_segment < 0;
  params.meta_senders = Roles::meta_senders(
      params, params.routing == DK_ROUTING_EXPANDED &&
                  DispatchSplit<kBulk>(true, blocks_apart(params), blocks, static_cast<int>(num_ranks)).apart);
  // Of few tokens each warp sends some: 8 of 128 took a warp 14 us.
  params.meta_rows =
      min<uint32_t>(staged_here ? kMetaBatch : kMetaBatchOfMany,
                    max<uint32_t>(1, ceil_div<uint32_t>(params.num_tokens, blocks * params.meta_senders)));
  const size_t buffers = min<size_t>(kMetaBuffers, limit - kSharedForRoles - kMinForStages);
  while (params.meta_rows > 1 && params.meta_senders * meta_space_bytes(params) > buffers) --params.meta_rows;
  const size_t roles = dispatch_shared<kBulk>(params, 0);
  if (roles + kMinForStages > limit) return DK_EUNSUPPORTED;
  params.stage_bytes = stage_bytes_for(params.row_bytes, kMaxStageBytes, Roles::kSenders * kSendStages, limit - roles);
  const size_t shared = dispatch_shared<kBulk>(params, params.stage_bytes);
  const OnDevice on(team->device);
  if (params.routing == DK_ROUTING_EXPANDED) {
    const auto kernel = shrinks(team->view) ? deep_ep::intranode::dispatch_expanded<kBulk, true>
                                            : deep_ep::intranode::dispatch_expanded<kBulk, false>;
    kernel<<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
    return launched(p);
  }
  if (params.routing != DK_ROUTING_NONE) {
    const auto kernel = shrinks(team->view) ? deep_ep::intranode::dispatch_routed<kBulk, true>
                                            : deep_ep::intranode::dispatch_routed<kBulk, false>;
    kernel<<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
    return launched(p);
  }
  deep_ep::intranode::dispatch<kBulk><<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

template <bool kBulk>
int32_t launch_combine(dk_combine_params *p, CombineParams &params, int blocks) {
  auto *team = handle_of<Team>(p->team);
  const uint32_t num_ranks = team->view.num_ranks;
  const size_t limit = shared_limit<kBulk>(*team->device);
  using Roles = CombineRoles<kBulk>;
  if (blocks * Roles::kSenders < static_cast<int>(num_ranks)) return DK_EUNSUPPORTED;
  params.senders = Roles::senders(blocks, static_cast<int>(num_ranks));
  params.stage_bytes =
      stage_bytes_for(params.row_bytes, kMaxStageBytes, Roles::kSenders * kSendStages, limit - kSharedForRoles);
  const size_t shared = CombineShared<kBulk>(num_ranks, params.stage_bytes).bytes +
                        4ull * (Roles::kReducers + Roles::kSenders) * num_ranks;
  if (shared > limit) return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  if (team->normal_copies != nullptr) {
    const cudaError_t error = on.error() == cudaSuccess ? push_rows(team, &params) : on.error();
    if (error != cudaSuccess) return device_failure(p, error);
  }
  const auto kernel = team->normal_copies != nullptr ? deep_ep::intranode::combine<kBulk, true>
                                                     : deep_ep::intranode::combine<kBulk, false>;
  kernel<<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

// What a reducing warp takes at a time: of few tokens there are as many pieces as such warps.
int32_t piece_chunks(const CombineParams &p, int warps) {
  constexpr int kLeast = 128;
  const int parts = max(1, warps / max(1, p.num_tokens)), chunks = static_cast<int>(p.row_bytes / 16);
  return min(kSumPieceChunks, max(kLeast, align_up<int>(ceil_div(chunks, parts), kWarp)));
}

// Whether a combine goes without tickets and flags of rows. Every rank decides alike: by what ranks compare.
bool combines_at_once(const Team *team, const CombineParams &p) {
  const uint64_t num_ranks = team->view.num_ranks, from_each = max(p.num_max_tokens, 0);
  const bool routed = p.routing != DK_ROUTING_NONE;
  if (shrinks(team->view) || (p.flags & DK_COMBINE_UNREDUCED) != 0 || num_ranks > kAtOnceRanks || from_each == 0)
    return false;
  if (from_each > p.ring.slots || p.session.team.nvl_bytes / 16 > UINT32_MAX) return false;
  if (!routed) return team->normal_copies == nullptr;  // its dispatch has looked at the rest
  return from_each * num_ranks <= kAtOnceRows && from_each * num_ranks * p.num_topk <= kAtOnceTerms;
}
int32_t launch_combine_at_once(dk_combine_params *p, const CombineParams &c, int blocks) {
  auto *team = handle_of<Team>(p->team);
  blocks = min(blocks, kAtOnceBlocks);
  const int with_rows = row_blocks_of(blocks);
  CombineAtOnceParams params{c};
  params.by_chunks = Divisor(c.row_bytes / 16);
  params.by_topk = Divisor(max(c.num_topk, 1));
  params.by_local = Divisor(max(c.num_experts / team->view.num_ranks, 1));
  params.rows_each = ceil_div(max(c.num_recv_tokens, 0), with_rows);
  params.tokens_each = ceil_div(c.num_tokens, with_rows);
  const size_t shared = CombineAtOnceShared(c, params.rows_each, params.tokens_each).bytes;
  if (shared > shared_limit<false>(*team->device)) return DK_EINVAL;  // more rows than the handle's number of tokens
  const OnDevice on(team->device);
  deep_ep::intranode::combine_at_once<<<blocks, kAtOnceThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

// Combine where the handle keeps the routing.
template <bool kBulk>
int32_t launch_routed_combine(dk_combine_params *p, CombineParams &params, int blocks) {
  auto *team = handle_of<Team>(p->team);
  const uint32_t num_ranks = team->view.num_ranks;
  const size_t limit = shared_limit<kBulk>(*team->device);
  const OnDevice on(team->device);
  if (params.routing == DK_ROUTING_EXPANDED) {
    using Roles = ExpandedRoles<kBulk>;
    if (blocks * Roles::kSenders < static_cast<int>(num_ranks)) return DK_EUNSUPPORTED;
    params.piece_chunks = piece_chunks(params, blocks * Roles::kReducers);
    constexpr int kLoaded = kTermPiece / 16;
    if (kBulk && params.piece_chunks > kLoaded) params.piece_chunks -= params.piece_chunks % kLoaded;
    const size_t shared = ExpandedShared<kBulk>(params).bytes;
    if (shared > limit) {  // the form without bulk copies takes a tenth; blocks of cc 12.0 have 97 KiB
      if constexpr (kBulk) return launch_routed_combine<false>(p, params, blocks);
      return DK_EUNSUPPORTED;
    }
    const auto kernel = shrinks(team->view) ? deep_ep::intranode::combine_expanded<kBulk, true>
                                            : deep_ep::intranode::combine_expanded<kBulk, false>;
    kernel<<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
    return launched(p);
  }
  using Roles = RoutedRoles<kBulk>;
  if (blocks * Roles::kSenders < static_cast<int>(num_ranks)) return DK_EUNSUPPORTED;
  params.senders = Roles::senders(blocks, static_cast<int>(num_ranks));
  params.piece_chunks = piece_chunks(params, blocks * (Roles::kWarps - params.senders - Roles::kPublishers));
  params.stage_bytes =
      stage_bytes_for(params.row_bytes, kMaxStageBytes, Roles::kSenders * kSendStages, limit - kSharedForRoles);
  const size_t shared = CombineShared<kBulk>(num_ranks, params.stage_bytes).bytes +
                        4ull * (Roles::kReducers + Roles::kSenders) * reducer_words(params);
  if (shared > limit) return DK_EUNSUPPORTED;
  const auto kernel = shrinks(team->view) ? deep_ep::intranode::combine_routed<kBulk, true>
                                          : deep_ep::intranode::combine_routed<kBulk, false>;
  kernel<<<blocks, Roles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t check_routed_dispatch(const Team *team, const dk_dispatch_params &p) {
  const int32_t code = check_routing(team, p.routing, p.num_topk, p.num_experts, p.index_bytes);
  if (code != DK_OK) return code;
  const bool expanded = p.routing == DK_ROUTING_EXPANDED, padding = (p.flags & DK_DISPATCH_ZERO_PADDING) != 0;
  if (p.num_max_tokens < p.num_tokens || p.recv_src_idx != 0 || p.num_expanded_tokens < 0) return DK_EINVAL;
  if (padding && (!expanded || p.psum_per_expert == 0 || p.expert_alignment < 1)) return DK_EINVAL;
  if (!expanded) return DK_OK;
  const bool lacks = (p.num_tokens > 0 && p.dst_slot == 0) || (p.num_recv_tokens > 0 && p.recv_src_metadata == 0);
  return lacks || p.recv_topk_idx != 0 ? DK_EINVAL : DK_OK;
}

int32_t check_routed_combine(const Team *team, const dk_combine_params &p) {
  const int32_t code = check_routing(team, p.routing, p.num_topk, p.num_experts, p.index_bytes);
  if (code != DK_OK) return code;
  if (p.num_tokens > 0 && p.topk_idx == 0) return DK_EINVAL;
  const bool expanded = p.routing == DK_ROUTING_EXPANDED;
  return expanded && (p.num_x_rows < 0 || (p.num_recv_tokens > 0 && p.recv_src_metadata == 0)) ? DK_EINVAL : DK_OK;
}

DispatchParams dispatch_params(const dk_dispatch_params *p) {
  DispatchParams d{*p, session_of(p, DK_OP_DISPATCH, DK_PHASE_BOTH)};
  d.row_bytes = static_cast<uint32_t>(p->hidden_bytes);
  d.index_bytes = p->index_bytes == 4 ? 4 : 8;
  d.recv_segment = max(p->recv_segment, -1);
  // A rank that was left out may still be storing rows: never where the caller has something else by then.
  const auto *team = handle_of<Team>(p->team);
  if (shrinks(team->view) && !is_remote(team)) d.recv_segment = -1;
  if (d.routing != DK_ROUTING_NONE) return d;
  d.recv_scale_token_stride = d.num_scales;
  d.recv_scale_stride = 1;
  if (d.cached()) d.num_topk = d.num_worst_tokens = 0;
  if (d.num_topk == 0) d.num_experts = 0;
  return d;
}

bool is_aligned(uint64_t address) { return address % 16 == 0; }

// Whether one kernel makes both calls. Every rank decides alike: by what ranks compare, without a routing by whether
// there is room for more than DK_AT_ONCE_ROWS.
bool goes_at_once(const Team *team, const dk_notify_params &n, const DispatchParams &d, const RingShape &ring) {
  const bool routed = is_routed(d);
  const uint32_t num_ranks = team->view.num_ranks, counts = at_once_counts(d),
                 from_each = routed ? d.num_max_tokens : kAtOnceRows, rows = routed ? from_each * num_ranks : from_each;
  if (shrinks(team->view) || team->normal_copies != nullptr || num_ranks > kAtOnceRanks) return false;
  if (n.num_worst_tokens < 1 || (!routed && n.num_worst_tokens > static_cast<int32_t>(kAtOnceRows))) return false;
  return counts * num_ranks <= kAtOnceCounts && 2 * counts <= counts_words(num_ranks) &&
         (!routed || from_each * d.num_topk <= kAtOnceChoices) && rows <= kAtOnceRows &&
         rows * d.num_topk <= kAtOnceTerms && from_each <= ring.slots;
}

// Both calls; DK_EUNSUPPORTED: each has to be made by itself.
template <bool kBulk>
int32_t launch_at_once(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  auto *team = handle_of<Team>(p->team);
  const auto &n = *pointer<const dk_notify_params>(p->notify);
  const uint32_t num_ranks = team->view.num_ranks;
  const RingShape ring = ring_shape(team->view.nvl_bytes, num_ranks, d.row_bytes, align_up(4 * at_once_words(d), 16u));
  if (!goes_at_once(team, n, d, ring)) return DK_EUNSUPPORTED;
  const uint32_t most_rows = is_routed(d) ? d.num_max_tokens * num_ranks : d.num_worst_tokens;
  AtOnceParams params{RoutedNotifyParams{{n, d.session}}, d};
  params.ring = ring;
  params.by_chunks = Divisor(d.row_bytes / 16);
  params.by_words = Divisor(at_once_words(d));
  params.by_topk = Divisor(max(d.num_topk, 1));
  params.by_ranks = Divisor(num_ranks);
  params.by_experts = Divisor(max(d.num_experts, 1));
  params.by_local = Divisor(max(d.meta.num_local, 1u));
  blocks = min(blocks, kAtOnceBlocks);
  do {  // a block alone may not have the room for all
    const int with_rows = row_blocks_of(blocks);
    params.tokens_each = ceil_div(d.num_tokens, with_rows);
    params.rows_each = ceil_div<uint32_t>(most_rows, with_rows);
  } while (AtOnceShared(params).bytes > shared_limit<false>(*team->device) && blocks++ < kAtOnceBlocks);
  if (AtOnceShared(params).bytes > shared_limit<false>(*team->device)) return DK_EINVAL;  // tokens that go nowhere
  if constexpr (kBulk) {
    const bool few = uint64_t{params.rows_each} * d.row_bytes < kLeastBulkRows && d.routing != DK_ROUTING_EXPANDED;
    if (few) return launch_at_once<false>(p, d, blocks);
    const size_t limit = shared_limit<true>(*team->device);
    params.copy_bytes = min(d.row_bytes, kCopyPiece);
    const auto fits = [&] { return ++params.copiers <= kMaxCopiers && AtOnceShared(params).bytes <= limit; };
    while (fits()) continue;
    if (--params.copiers == 0) return launch_at_once<false>(p, d, blocks);
  }
  const OnDevice on(team->device);
  const size_t shared = AtOnceShared(params).bytes;
  deep_ep::intranode::dispatch_at_once<kBulk><<<blocks, kAtOnceThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace

DK_EXPORT int32_t dk_dispatch(dk_dispatch_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  const int32_t code = p->routing == DK_ROUTING_NONE ? int32_t{DK_OK} : check_routed_dispatch(team, *p);
  if (code != DK_OK) return code;
  if (p->hidden_bytes == 0 || p->hidden_bytes % 16 != 0 || p->hidden_bytes > (1u << 30) || p->num_tokens < 0)
    return DK_EINVAL;
  if (!is_aligned(p->x) || !is_aligned(p->recv_x) || (p->recv_segment >= 0 && !is_aligned(p->recv_segment_offset)))
    return DK_EINVAL;
  if (p->recv_segment >= DK_MAX_SEGMENTS || p->num_scales < 0 || p->num_topk < 0) return DK_EINVAL;
  if (p->num_topk > 0 && p->index_bytes != 4 && p->index_bytes != 8) return DK_EINVAL;
  DispatchParams d = dispatch_params(p);
  const int blocks = blocks_for(team, p->num_sms);
  if (is_remote(team)) return p->notify != 0 ? DK_EUNSUPPORTED : internode_dispatch(p, d, blocks);
  d.meta = meta_shape(d);
  if (p->notify != 0) {
    const auto *notify = pointer<const dk_notify_params>(p->notify);
    const int32_t counted = notify->size < sizeof *notify ? int32_t{DK_EVERSION} : check_notify(team, notify);
    if (counted != DK_OK) return counted;
#if DEEPEP_SM90
    if (team->device->bulk) return launch_at_once<true>(p, d, blocks);
#endif
    return launch_at_once<false>(p, d, blocks);
  }
  choose_pulls(team, &d);
  if (dispatch_ring(d, false).slots == 0) return DK_EUNSUPPORTED;  // nvl region under min_nvl_bytes
#if DEEPEP_SM90
  const int32_t result =
      team->device->bulk ? launch_dispatch<true>(p, d, blocks) : launch_dispatch<false>(p, d, blocks);
#else
  const int32_t result = launch_dispatch<false>(p, d, blocks);
#endif
  if (result != DK_OK || !d.pulls()) return result;
  const OnDevice on(team->device);
  const cudaError_t error = on.error() == cudaSuccess ? pull_rows(team, d) : on.error();
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_combine(dk_combine_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  const int32_t code = p->routing == DK_ROUTING_NONE ? int32_t{DK_OK} : check_routed_combine(team, *p);
  if (code != DK_OK) return code;
  if (p->hidden <= 0 || p->hidden % 8 != 0 || p->num_tokens < 0 || p->num_topk < 0) return DK_EINVAL;
  if (!is_aligned(p->x) || !is_aligned(p->combined_x) || !is_aligned(p->bias[0]) || !is_aligned(p->bias[1]))
    return DK_EINVAL;
  CombineParams c{*p, session_of(p, DK_OP_COMBINE, DK_PHASE_BOTH), 2u * p->hidden};
  const bool apart = p->routing == DK_ROUTING_EXPANDED && (p->flags & DK_COMBINE_UNREDUCED) != 0;
  c.slot_bytes = c.row_bytes * (apart ? p->num_topk : 1);
  c.ring = combine_ring(c);
  const int blocks = blocks_for(team, p->num_sms);
  if (is_remote(team)) return internode_combine(p, c, blocks);
  if (c.ring.slots == 0) return DK_EUNSUPPORTED;  // nvl region under min_nvl_bytes
  if (combines_at_once(team, c)) return launch_combine_at_once(p, c, blocks);
#if DEEPEP_SM90
  if (team->device->bulk)
    return c.routing == DK_ROUTING_NONE ? launch_combine<true>(p, c, blocks)
                                        : launch_routed_combine<true>(p, c, blocks);
#endif
  if (c.routing != DK_ROUTING_NONE) return launch_routed_combine<false>(p, c, blocks);
  return launch_combine<false>(p, c, blocks);
}
