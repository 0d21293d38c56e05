// dispatch_kernel.cuh - libdeepep_nvshmem.so: the kernel of dispatch with a routing across nodes.
#pragma once
#include "internode/normal/dispatch_roles.cuh"
#include "internode/routed/push_rows.cuh"

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

template <bool kExpand>
__global__ void __launch_bounds__(DispatchRoles::kThreads, 1)
    dispatch_routed(const __grid_constant__ DispatchChoice<RoutedDispatchParams<kExpand>> choice) {
  extern __shared__ __align__(16) uint8_t shared[];
  const RoutedDispatchParams<kExpand> &p = choice.params[0];
  dispatch_between_nodes(
      choice, shared, [&](uint64_t epoch) { return kExpand || has_room_everywhere(p, epoch); },
      [&] {
        if (kExpand) clear_expanded_outputs(p.d);
        if (!kExpand) clear_dispatch_outputs(p.d);
      });
}

}  // namespace deep_ep::internode
