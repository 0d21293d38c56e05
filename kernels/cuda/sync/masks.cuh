// masks.cuh - the ranks that this one does without: dk_mask queries, sets and lifts masks.
#pragma once
#include "cuda/sync/session.cuh"

namespace deepep {

// The arguments of a call (see DispatchParams).
struct MaskParams : dk_mask_params {
  Session session{};

  __device__ int32_t *out() const { return pointer<int32_t>(dk_mask_params::out); }
};

// A rank comes back: what it sent so far counts as taken, and its next message has the number of its next call. If this
// rank made calls without it, give_up(rank, call) writes the number of the newest to it, for rows of such a call may
// still lie there. False: it was not masked.
template <class GiveUp>
__device__ inline bool lift_mask(const Session &s, int rank, GiveUp give_up) {
  Scratch *scratch = s.team.scratch;
  if (scratch->masked[rank] == 0) return false;
  uint64_t newest = scratch->seen[rank];
  for (int copy = 0; copy < kLowLatencyHandshakeCopies; ++copy)
    newest = max(newest, ptx::ld_acquire_sys(&s.team.low_latency_handshake(s.team.rank, copy, rank)->epoch));
  scratch->seen[rank] = scratch->consumed[0][rank] = scratch->consumed[1][rank] = newest;
  scratch->returned[rank] = 1;
  const uint64_t own = scratch->low_latency_epoch;
  if (scratch->masked_at[rank] != own) give_up(rank, own);
  scratch->masked_at[rank] = 0;
  scratch->masked[rank] = 0;
  return true;
}

// Whole block. Returns whether this thread lifted a mask. give_up(rank, call): see TeamView::given_up.
template <class GiveUp>
__device__ inline bool change_masks(const MaskParams &p, GiveUp give_up) {
  const Session &s = p.session;
  bool lifted = false;
  const bool lifts = p.what == DK_MASK_CLEAN || (p.what == DK_MASK_UPDATE && p.value == 0);
  if (lifts && threadIdx.x == 0) {
    ++s.team.scratch->lifts;
    ++s.team.scratch->generation;
  }
  __syncthreads();
  for (int r = threadIdx.x; lifts && r < s.team.num_ranks; r += blockDim.x) {
    tell_standing(s.team, r);  // before the notice is taken back: what this rank sent before is void
    if ((p.what == DK_MASK_CLEAN || r == p.rank) && s.team.peers[r] != nullptr)
      ptx::st_release_sys(s.team.notice(r, s.team.rank), 0);
  }
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    uint32_t *mask = &s.team.scratch->masked[r];
    if (p.what == DK_MASK_QUERY)
      p.out()[r] = static_cast<int32_t>(*mask);
    else if (p.what == DK_MASK_CLEAN || (r == p.rank && p.value == 0))
      lifted |= lift_mask(s, r, give_up);
    else if (r == p.rank && *mask == 0) {
      *mask = 1;
      s.team.scratch->masked_at[r] = s.team.scratch->low_latency_epoch;
      tell_masked(s, r);
    }
  }
  return lifted;
}

}  // namespace deepep
