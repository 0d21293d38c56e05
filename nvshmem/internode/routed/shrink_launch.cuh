// shrink_launch.cuh - libdeepep_nvshmem.so: launches of calls with a routing of teams that shrink across nodes. Part of
// normal.cu, as launch.cuh is.
#pragma once
#include "internode/routed/launch_shape.h"
#include "internode/routed/shrink_combine.cuh"
#include "internode/routed/shrink_dispatch.cuh"
#include "internode/routed/shrink_notify.cuh"

namespace deepep::internode {

template <bool kExpand>
int32_t launch_shrinking_dispatch(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  const Team *team = handle_of<Team>(p->team);
  RoutedShrinkDispatchParams<kExpand> params{{d, team->internode->view, *team->internode->shrink, {}}};
  params.d.meta = meta_shape(d);
  params.rings = pair_rings(team->view, pair_bytes(params));
  if (params.rings.places == 0) return DK_EUNSUPPORTED;  // nvl or rdma region under its minimum
  const OnDevice on(team->device);
  deep_ep::internode::dispatch_routed_shrinking<kExpand>
      <<<blocks, ShrinkDispatchRoles::kThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

template <bool kExpand>
int32_t launch_shrinking_combine(dk_combine_params *p, const CombineParams &c, int blocks) {
  const Team *team = handle_of<Team>(p->team);
  const RoutedShrinkCombineParams params{
      {c, team->internode->view, *team->internode->shrink, pair_rings(team->view, record_bytes_of(c))}};
  if (params.rings.places == 0) return DK_EUNSUPPORTED;  // nvl or rdma region under its minimum
  const OnDevice on(team->device);
  deep_ep::internode::combine_routed_shrinking<kExpand>
      <<<blocks, ShrinkCombineRoles::kThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

inline cudaError_t load_routed_shrinking_kernels() {
  using namespace deep_ep::internode;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, notify_routed_shrinking);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, dispatch_routed_shrinking<false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, dispatch_routed_shrinking<true>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, combine_routed_shrinking<false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, combine_routed_shrinking<true>);
  return error;
}

inline int32_t launch_routed_shrinking(dk_notify_params *p, const NotifyParams &n) {
  const Team *team = handle_of<Team>(p->team);
  RoutedShrinkNotifyParams params{{{n}, team->internode->view}, *team->internode->shrink};
  const NotifyShape shape = shape_notify(team, &params.n);
  const OnDevice on(team->device);
  deep_ep::internode::notify_routed_shrinking<<<shape.blocks, kNotifyThreads, shape.shared, stream_of(p->stream)>>>(
      params);
  return launched(p);
}

inline int32_t launch_routed_shrinking(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  return p->routing == DK_ROUTING_EXPANDED ? launch_shrinking_dispatch<true>(p, d, blocks)
                                           : launch_shrinking_dispatch<false>(p, d, blocks);
}

inline int32_t launch_routed_shrinking(dk_combine_params *p, const CombineParams &c, int blocks) {
  return p->routing == DK_ROUTING_EXPANDED ? launch_shrinking_combine<true>(p, c, blocks)
                                           : launch_shrinking_combine<false>(p, c, blocks);
}

}  // namespace deepep::internode
