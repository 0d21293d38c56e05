// dispatch_kernel.cuh - libdeepep_nvshmem.so: the kernel of dispatch between nodes.
#pragma once
#include "internode/normal/push_rows.cuh"

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(DispatchRoles::kThreads, 1)
    dispatch_with_notify(const __grid_constant__ DispatchChoice<InternodeDispatchParams> choice) {
  const InternodeDispatchParams &p = choice.params[0];
  extern __shared__ __align__(16) uint8_t shared[];
  auto *there = reinterpret_cast<RowsThere *>(shared);  // [R]
  const Session &s = p.d.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  begin_role_times();
  if (begin(s)) {
    Handshake hand = dispatch_handshake(
        p.d, epoch, load_matrix_entry(p.d.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x), load_wrong_counts(p.d));
    add_channels(hand, p.rings.channels);
    if (blockIdx.x == 0) post_messages(s, p.internode, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_messages(s, p.internode, hand) && has_room_everywhere(p, epoch)) {
      if (blockIdx.x == 0) count_bytes_in_node(p);
      const bool stages = find_places(p, epoch, there);
      // Not by a number: constants that instructions name cost 1 to 3 % less.
      if (agree_on_rings(p, epoch))
        run_dispatch_roles<false>(p, epoch, there, stages);
      else
        run_dispatch_roles<true>(choice.params[1], epoch, there, stages);
    }
  }
  end_role_times(0);
  finish(s, [&](bool failed) {
    if (failed) clear_dispatch_outputs(p.d);
    end_dispatch(p, epoch);
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
