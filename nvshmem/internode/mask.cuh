// mask.cuh - libdeepep_nvshmem.so: masks of teams with a transport. A rank that lifts a mask writes the number of its
// newest call to the unmasked rank (TeamView::given_up), by a store inside the node, by a put to another node.
#pragma once
#include "cuda/sync/masks.cuh"
#include "internode/low_latency/common.cuh"

namespace deepep::internode {

// A wait for puts never ends while one of them goes to a dead rank.
__device__ inline bool is_any_rank_dead(const TeamView &team) {
  bool dead = false;
  for (int r = threadIdx.x; r < team.num_ranks; r += blockDim.x)
    dead |= *static_cast<volatile uint8_t *>(&team.status->dead[r]) != 0;
  return __syncthreads_or(dead) != 0;
}

// One block. It ends when its puts are complete: after a barrier that follows, the unmasked ranks must have the
// numbers.
__global__ void __launch_bounds__(128, 1) internode_mask_kernel(const __grid_constant__ MaskParams p) {
  const Session &s = p.session;
  begin(s);
  publish_newest_by_last_warp(s.team);
  const bool lifted = change_masks(p, [&](int r, uint64_t call) {
    if (uses_stores(s.team, r))
      ptx::st_release_sys(s.team.given_up(s.team.peers[r], s.team.rank), call);
    else
      signal_by_thread(s.team.given_up(s.team.self, s.team.rank), call, r);
  });
  const bool dead = is_any_rank_dead(s.team);
  if (__syncthreads_or(lifted) != 0 && !dead && threadIdx.x == 0) quiet_by_thread();
  finish(s, [&](bool failed) { record_kernel(s, nullptr, true, failed); });
}

}  // namespace deepep::internode
