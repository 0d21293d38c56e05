// launch.cuh - libdeepep_nvshmem.so: launches of calls with a routing across nodes. Part of normal.cu: what its kernels
// call is compiled for their registers.
#pragma once
#include "internode/routed/combine.cuh"
#include "internode/routed/dispatch_kernel.cuh"
#include "internode/routed/launch_shape.h"
#include "internode/routed/notify.cuh"
#include "internode/routed/shrink_launch.cuh"

namespace deepep::internode {

inline cudaError_t load_routed_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, deep_ep::internode::notify_routed);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode::dispatch_routed<false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode::dispatch_routed<true>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode::combine_routed<false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode::combine_routed<true>);
  return error == cudaSuccess ? load_routed_shrinking_kernels() : error;
}

template <bool kExpand>
int32_t launch_dispatch(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  const Team *team = handle_of<Team>(p->team);
  RoutedDispatchParams<kExpand> params{{d, team->internode->view, {}, {}, nullptr}};
  params.state = static_cast<NormalState *>(team->internode->state);
  params.d.meta = meta_shape(d);
  params.lists = stream_lists(params.state, params.internode);
  const DispatchChoice<RoutedDispatchParams<kExpand>> choice = dispatch_choice(params, blocks);
  if (choice.params[1].rings.slots == 0) return DK_EUNSUPPORTED;  // a region under its minimum
  const size_t places = team->view.num_ranks * sizeof(RowsThere);
  const OnDevice on(team->device);
  deep_ep::internode::dispatch_routed<kExpand>
      <<<blocks, DispatchRoles::kThreads, places, stream_of(p->stream)>>>(choice);
  return launched(p);
}

template <bool kExpand>
int32_t launch_combine(dk_combine_params *p, const CombineParams &c, int blocks) {
  const Team *team = handle_of<Team>(p->team);
  RoutedCombineParams params{{c, team->internode->view, {}, {}, {}, {}}, 0, 0};
  const uint64_t shared = shape_records(params, team->device->bulk ? team->device->max_shared : 0);
  if (params.rings.slots == 0) return DK_EUNSUPPORTED;  // a region has no room for a token's records
  params.lists = stream_lists(static_cast<NormalState *>(team->internode->state), params.internode);
  const OnDevice on(team->device);
  deep_ep::internode::combine_routed<kExpand><<<blocks, CombineRoles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace deepep::internode

namespace deepep {

int32_t internode_routed_notify(dk_notify_params *p, const NotifyParams &n) {
  const Team *team = handle_of<Team>(p->team);
  if (team->internode->shrink != nullptr) return internode::launch_routed_shrinking(p, n);
  internode::RoutedNodesNotifyParams params{{n}, team->internode->view};
  const internode::NotifyShape shape = internode::shape_notify(team, &params.n);
  const OnDevice on(team->device);
  deep_ep::internode::notify_routed<<<shape.blocks, kNotifyThreads, shape.shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

inline int32_t launch_routed_dispatch(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  if (handle_of<Team>(p->team)->internode->shrink != nullptr) return internode::launch_routed_shrinking(p, d, blocks);
  return p->routing == DK_ROUTING_EXPANDED ? internode::launch_dispatch<true>(p, d, blocks)
                                           : internode::launch_dispatch<false>(p, d, blocks);
}

inline int32_t launch_routed_combine(dk_combine_params *p, const CombineParams &c, int blocks) {
  if (p->num_recv_tokens > 0 && (p->recv_src_metadata == 0 || p->num_max_tokens <= 0)) return DK_EINVAL;
  if (handle_of<Team>(p->team)->internode->shrink != nullptr) return internode::launch_routed_shrinking(p, c, blocks);
  return p->routing == DK_ROUTING_EXPANDED ? internode::launch_combine<true>(p, c, blocks)
                                           : internode::launch_combine<false>(p, c, blocks);
}

}  // namespace deepep
