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
  if (lane_id() == 0) {
    Told &told = shrink.state->told[rank];
    told.lifts = from->lifts = team.scratch->lifts;
    told.generation = from->generation = team.scratch->generation;
    told.notice = shrink.state->notices[rank];
  }
  __syncwarp();
  put(team.standing(team.rank, team.rank), from, static_cast<uint32_t>(sizeof(Standing)),
      team.notice(team.rank, team.rank), shrink.state->notices[rank], rank);
}
// Waits, until the time limit, for what this rank has told living ranks of other nodes: then no earlier put overtakes
// what it tells them next, whichever queue pairs they take. A fence or a quiet of NVSHMEM is for all ranks together,
// and does not end while a put goes to a dead one. A rank that does not answer in time is told without: the barrier
// after it was taken back waits as long for it, and masks it again. By a whole warp. get(to, from, words, rank): by one
// thread, does not wait; `to` and `from` in this rank's block, `from` as in the rank's.
constexpr uint64_t kNotRead = ~0ull;  // no word of Told has this value
template <class Get>
__device__ inline void await_told(const Session &s, const ShrinkView &shrink, int rank, Get get) {
  const TeamView &team = s.team;
  auto *back = reinterpret_cast<uint64_t *>(team.self + shrink.at.told_back + rank * sizeof(Told));
  const auto *told = reinterpret_cast<const uint64_t *>(&shrink.state->told[rank]);
  bool asked = false;
  int unused_peer = -1;
  uint64_t unused;
  warp_wait_until(
      s, unused_peer, unused,
      [&] {
        bool same = true;
        if (lane_id() == 0 && !asked) {
          for (int i = 0; i < 4; ++i) ptx::st_relaxed_sys(back + i, kNotRead);
          ptx::fence_acq_rel_sys();
          get(back, &team.standing(team.rank, team.rank)->lifts, 2, rank);
          get(back + 2, team.notice(team.rank, team.rank), 1, rank);
          get(back + 3, team.given_up(team.self, team.rank), 1, rank);
          asked = true;
        }
        if (lane_id() == 0) {
          bool whole = true;
          for (int i = 0; i < 4; ++i) {
            const uint64_t word = ptx::ld_acquire_sys(back + i);
            whole &= word != kNotRead;
            same &= word == told[i];
          }
          asked = !whole;  // once more, if it is not there yet
        }
        return __all_sync(kAllLanes, same) != 0;
      },
      [&] { return rank; });
}

// Notes that the rank, of another node, is masked. Returns whether it has to be told.
__device__ inline bool note_mask(const TeamView &team, const ShrinkView &shrink, int rank) {
  uint64_t &notice = shrink.state->notices[rank];
  if (notice != 0) return false;
  notice = ptx::ld_relaxed_sys(&team.standing(team.rank, rank)->lifts) + 1;
  return true;
}

}  // namespace deepep::internode
