// normal.cu - libdeepep_nvshmem.so: launches of normal mode, barriers and cleans across nodes.
#include "cuda/launch/internode.h"
#include "internode/normal/combine.cuh"
#include "internode/normal/dispatch_kernel.cuh"
#include "internode/normal/notify.cuh"
#include "internode/normal/shrink_combine.cuh"
#include "internode/normal/shrink_dispatch.cuh"
#include "internode/normal/shrink_notify.cuh"
#include "internode/routed/launch.cuh"

namespace deepep {
namespace {

using namespace internode;

template <class P>
int32_t launch_barrier(P *p, uint32_t op, bool counts_as_call) {
  const Team *team = handle_of<Team>(p->team);
  if (team->internode->shrink != nullptr && spans_nodes(team)) {
    const OnDevice on(team->device);
    internode_shrinking_barrier_kernel<<<1, 256, 0, stream_of(p->stream)>>>(
        {session_of(p, op, DK_PHASE_BOTH), team->internode->view, *team->internode->shrink, counts_as_call});
    return launched(p);
  }
  InternodeBarrierParams params{};
  params.session = session_of(p, op, DK_PHASE_BOTH);
  params.internode = team->internode->view;
  params.counts_as_call = counts_as_call;
  const OnDevice on(team->device);
  internode_barrier_kernel<<<1, 256, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

// ---- Teams that shrink ----------------------------------------------------------------------------------------------

int32_t launch_shrinking(dk_notify_params *p, const NotifyParams &n, const Team *team) {
  const OnDevice on(team->device);
  deep_ep::internode::
      notify_dispatch_shrinking<<<1 + min(team->view.num_ranks, 16), kNotifyThreads, 0, stream_of(p->stream)>>>(
          {n, team->internode->view, *team->internode->shrink});
  return launched(p);
}

int32_t launch_shrinking(dk_dispatch_params *p, const DispatchParams &d, int blocks, const Team *team) {
  const ShrinkDispatchParams params{d, team->internode->view, *team->internode->shrink,
                                    pair_rings(team->view, d.row_bytes + 4ull * pair_words(d).end)};
  if (params.rings.places == 0) return DK_EUNSUPPORTED;  // nvl or rdma region under its minimum
  const OnDevice on(team->device);
  deep_ep::internode::
      dispatch_with_notify_shrinking<<<blocks, ShrinkDispatchRoles::kThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t launch_shrinking(dk_combine_params *p, const CombineParams &c, int blocks, const Team *team) {
  const ShrinkCombineParams params{c, team->internode->view, *team->internode->shrink,
                                   pair_rings(team->view, c.row_bytes + 4ull * c.num_topk)};
  if (params.rings.places == 0) return DK_EUNSUPPORTED;  // nvl or rdma region under its minimum
  const size_t shared = sizeof(uint64_t) * ShrinkCombineRoles::kSums * team->view.num_ranks;
  const OnDevice on(team->device);
  const cudaError_t error = opt_in(deep_ep::internode::combine_with_notify_shrinking, shared);
  if (error != cudaSuccess) return device_failure(p, error);
  deep_ep::internode::
      combine_with_notify_shrinking<<<blocks, ShrinkCombineRoles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

cudaError_t load_shrinking_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, deep_ep::internode::notify_dispatch_shrinking);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, internode_shrinking_barrier_kernel);
  if (error == cudaSuccess)
    error = cudaFuncGetAttributes(&attributes, deep_ep::internode::dispatch_with_notify_shrinking);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, deep_ep::internode::combine_with_notify_shrinking)
                              : error;
}

}  // namespace

cudaError_t internode::load_normal_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, deep_ep::internode::notify_dispatch);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, internode_barrier_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode::dispatch_with_notify);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode::combine_with_notify);
  if (error == cudaSuccess) error = load_shrinking_kernels();
  return error == cudaSuccess ? load_routed_kernels() : error;
}

cudaError_t internode::prepare_normal(const Team *team) {
  cudaError_t error = opt_in(deep_ep::internode::combine_with_notify, team->device->max_shared);
  if (error == cudaSuccess) error = opt_in(deep_ep::internode::combine_routed<false>, team->device->max_shared);
  return error == cudaSuccess ? opt_in(deep_ep::internode::combine_routed<true>, team->device->max_shared) : error;
}

int32_t internode_notify(dk_notify_params *p, const NotifyParams &n) {
  const Team *team = handle_of<Team>(p->team);
  if (team->internode->shrink != nullptr) return launch_shrinking(p, n, team);
  const InternodeNotifyParams params{n, team->internode->view};
  const OnDevice on(team->device);
  deep_ep::internode::notify_dispatch<<<1 + min(team->view.num_ranks, 16), kNotifyThreads, 0, stream_of(p->stream)>>>(
      params);
  return launched(p);
}

int32_t internode_dispatch(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  if (p->routing != DK_ROUTING_NONE) return launch_routed_dispatch(p, d, blocks);
  const Team *team = handle_of<Team>(p->team);
  if (team->internode->shrink != nullptr) return launch_shrinking(p, d, blocks, team);
  InternodeDispatchParams params{d, team->internode->view, {}, {}, static_cast<NormalState *>(team->internode->state)};
  params.lists = stream_lists(params.state, params.internode);
  const DispatchChoice<InternodeDispatchParams> choice = dispatch_choice(params, blocks);
  if (choice.params[1].rings.slots == 0) return DK_EUNSUPPORTED;  // a region under its minimum
  const size_t places = team->view.num_ranks * sizeof(RowsThere);
  const OnDevice on(team->device);
  deep_ep::internode::dispatch_with_notify<<<blocks, DispatchRoles::kThreads, places, stream_of(p->stream)>>>(choice);
  return launched(p);
}

int32_t internode_combine(dk_combine_params *p, const CombineParams &c, int blocks) {
  if (p->routing != DK_ROUTING_NONE) return launch_routed_combine(p, c, blocks);
  const Team *team = handle_of<Team>(p->team);
  if (team->internode->shrink != nullptr) return launch_shrinking(p, c, blocks, team);
  if (p->num_recv_tokens > 0 && p->recv_src_idx == 0) return DK_EINVAL;
  InternodeCombineParams params{c, team->internode->view, {}, {}, {}, {}};
  const uint64_t room = team->device->bulk ? team->device->max_shared : 0;  // that bulk copies may fill
  const uint64_t shared = shape_combine(params, blocks, room);
  if (shared > team->device->max_shared) return DK_EUNSUPPORTED;
  if (params.rings.slots == 0)
    return DK_EUNSUPPORTED;  // nvl region under min_nvl_bytes, or rdma region under min_rdma_bytes
  params.lists = stream_lists(static_cast<NormalState *>(team->internode->state), params.internode);
  const OnDevice on(team->device);
  deep_ep::internode::combine_with_notify<<<blocks, CombineRoles::kThreads, shared, stream_of(p->stream)>>>(
      combine_choice(params));
  return launched(p);
}

#ifdef DEEPEP_TIMELINE
// Role times on the current device, [dispatch, combine][kNumRoles], since they were last read; returns their bytes.
extern "C" __attribute__((visibility("default"))) uint64_t dk_role_times(RoleTimes *to) {
  static const RoleTimes none[2][kNumRoles] = {};
  if (cudaMemcpyFromSymbol(to, g_role_times, sizeof none) != cudaSuccess) return 0;
  return cudaMemcpyToSymbol(g_role_times, none, sizeof none) == cudaSuccess ? sizeof none : 0;
}
#endif

int32_t internode_barrier(dk_barrier_params *p) { return launch_barrier(p, DK_OP_BARRIER, true); }

int32_t internode_clean(dk_clean_params *p) {
  const bool all = p->num_max_tokens == 0 && p->hidden == 0 && p->num_experts == 0;
  if (!all && (p->num_max_tokens <= 0 || p->hidden <= 0 || p->num_experts <= 0)) return DK_EINVAL;
  // Between the barriers nothing needs to be emptied: signal words lie apart from rows and carry the call's number. The
  // first one makes the call numbers of all ranks equal (clean.cuh), the second one keeps ranks from sending before
  // that.
  const int32_t code = launch_barrier(p, DK_OP_CLEAN, false);
  return code == DK_OK ? launch_barrier(p, DK_OP_CLEAN, true) : code;
}

}  // namespace deepep
