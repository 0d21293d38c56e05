// dispatch_kernel.cuh - libdeepep_nvshmem.so: the kernel of dispatch between nodes.
#pragma once
#include "internode/normal/dispatch_roles.cuh"

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(DispatchRoles::kThreads, 1)
    dispatch_with_notify(const __grid_constant__ DispatchChoice<InternodeDispatchParams> choice) {
  extern __shared__ __align__(16) uint8_t shared[];
  const InternodeDispatchParams &p = choice.params[0];
  dispatch_between_nodes(
      choice, shared, [&](uint64_t epoch) { return has_room_everywhere(p, epoch); },
      [&] { clear_dispatch_outputs(p.d); });
}

}  // namespace deep_ep::internode
