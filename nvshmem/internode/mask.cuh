// mask.cuh - libdeepep_nvshmem.so: masks of teams with a transport. A rank that lifts a mask writes the number of its
// newest call to the unmasked rank (TeamView::given_up), by a store inside the node, by a put to another node.
#pragma once
#include "cuda/sync/masks.cuh"
#include "internode/low_latency/common.cuh"
#include "internode/standing.cuh"

namespace deepep::internode {

// Whether a rank is of this node, and low latency may use NVLink.
__device__ inline bool uses_stores(const TeamView &team, int rank) {
  if (rank == team.rank) return true;
  return (team.flags & DK_TEAM_LL_TRANSPORT) == 0 && rank / team.num_nvl_peers == team.rank / team.num_nvl_peers;
}
__device__ inline bool is_rank_dead(const TeamView &team, int rank) {
  return *static_cast<volatile uint8_t *>(&team.status->dead[rank]) != 0;
}
// A wait for puts never ends while one of them goes to a dead rank.
__device__ inline bool is_any_rank_dead(const TeamView &team) {
  bool dead = false;
  for (int r = threadIdx.x; r < team.num_ranks; r += blockDim.x) dead |= is_rank_dead(team, r);
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

// Where normal mode too goes on without masked ranks: ranks of other nodes are told as those of this one.
struct ShrinkMaskParams {
  MaskParams m;
  NodeView internode;
  ShrinkView shrink;
};

// By one warp, after change_masks.
__device__ inline void tell_other_nodes(const ShrinkMaskParams &p, bool lifts) {
  const Session &s = p.m.session;
  for (int r = 0; r < s.team.num_ranks; ++r) {
    if (p.internode.is_local(r)) continue;
    const bool dead = is_rank_dead(s.team, r), masked = is_masked(s, r);
    bool tells = lifts;
    if (lane_id() == 0 && masked) tells |= note_mask(s.team, p.shrink, r);
    if (lane_id() == 0 && !masked) p.shrink.state->notices[r] = 0;
    __syncwarp();
    if (__any_sync(kAllLanes, tells) == 0 || __any_sync(kAllLanes, dead) != 0) continue;
    put_standing(s.team, p.shrink, r,
                 [](void *to, const void *from, uint32_t bytes, uint64_t *word, uint64_t value, int rank) {
                   put_by_warp(to, from, bytes, word, value, rank);
                 });
  }
}

// By the whole block, before and after a mask is lifted: what this rank has told is there.
__device__ inline void complete_told(const ShrinkMaskParams &p) {
  const Session &s = p.m.session;
  for (int r = 0; warp_id() == 0 && r < s.team.num_ranks; ++r)
    if (!p.internode.is_local(r) && !__any_sync(kAllLanes, is_rank_dead(s.team, r)))
      await_told(s, p.shrink, r,
                 [](uint64_t *to, const uint64_t *from, int words, int rank) { get_by_thread(to, from, words, rank); });
  __syncthreads();
}

// One block.
__global__ void __launch_bounds__(128, 1) internode_shrinking_mask_kernel(const __grid_constant__ ShrinkMaskParams p) {
  const Session &s = p.m.session;
  const bool lifts = p.m.what == DK_MASK_CLEAN || (p.m.what == DK_MASK_UPDATE && p.m.value == 0);
  if (begin(s)) {
    publish_newest_by_last_warp(s.team);
    if (lifts) complete_told(p);
    change_masks(p.m, [&](int r, uint64_t call) {
      if (uses_stores(s.team, r))
        ptx::st_release_sys(s.team.given_up(s.team.peers[r], s.team.rank), call);
      else
        signal_by_thread(s.team.given_up(s.team.self, s.team.rank), call, r);
      p.shrink.state->told[r].given_up = call;
    });
    __syncthreads();
    if (p.m.what != DK_MASK_QUERY && warp_id() == 0) tell_other_nodes(p, lifts);
    __syncthreads();
    if (lifts) complete_told(p);
  } else if (p.m.what == DK_MASK_QUERY) {
    change_masks(p.m, [](int, uint64_t) {});
  }
  finish(s, [&](bool failed) { record_kernel(s, nullptr, true, failed); });
}

}  // namespace deepep::internode
