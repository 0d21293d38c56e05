// standing.cuh - libdeepep_nvshmem.so: what a rank of a team that shrinks tells ranks of other nodes: how it stands,
// and whether it has masked them. No NVSHMEM.
#pragma once
#include "cuda/sync/session.cuh"
#include "internode/shrink_layout.h"

namespace deepep::internode {

// Puts this rank's standing, then its notice for the rank. put(to, from, bytes, word, value, rank): by a whole warp.
template <class Put>
__device__ inline void put_standing(const TeamView &team, const ShrinkView &shrink, int rank, Put put) {
  auto *from = reinterpret_cast<Standing *>(team.self + shrink.at.standing_out);
  if (lane_id() == 0) *from = {team.scratch->lifts, team.scratch->generation};
  __syncwarp();
  put(team.standing(team.rank, team.rank), from, static_cast<uint32_t>(sizeof(Standing)),
      team.notice(team.rank, team.rank), shrink.state->notices[rank], rank);
}
// Notes that the rank, of another node, is masked. Returns whether it has to be told.
__device__ inline bool note_mask(const TeamView &team, const ShrinkView &shrink, int rank) {
  uint64_t &notice = shrink.state->notices[rank];
  if (notice != 0) return false;
  notice = ptx::ld_relaxed_sys(&team.standing(team.rank, rank)->lifts) + 1;
  return true;
}

}  // namespace deepep::internode
