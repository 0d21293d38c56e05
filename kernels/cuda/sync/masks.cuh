// masks.cuh - which ranks this one does without: asked, changed by hand, lifted.
#pragma once
#include "cuda/sync/session.cuh"

namespace deepep {

struct MaskParams {
  Session session;
  int32_t what, rank, value, reserved;
  int32_t *out;
};

// A rank comes back: what it sent so far counts as taken, and its next message says where it stands. It is told the number of my
// newest call, for what I sent before I went on without it may still lie there. False: it was not masked.
template <class Tell> __device__ inline bool lift_mask(const Session &s, int rank, Tell tell) {
  Scratch *scratch = s.team.scratch;
  if (scratch->masked[rank] == 0) return false;
  uint64_t newest = scratch->seen[rank];
  for (int copy = 0; copy < kLowLatencyEnterCopies; ++copy)
    newest = most(newest, ptx::ld_acquire_sys(&s.team.low_latency_enter(s.team.rank, copy, rank)->epoch));
  scratch->seen[rank] = scratch->consumed[0][rank] = scratch->consumed[1][rank] = newest;
  scratch->returned[rank] = 1;
  tell(rank, scratch->low_latency_epoch);
  scratch->masked[rank] = 0;
  return true;
}

// Whole block. Whether this thread lifted a mask. tell(rank, call): see TeamView::given_up.
template <class Tell> __device__ inline bool change_masks(const MaskParams &p, Tell tell) {
  const Session &s = p.session;
  bool lifted = false;
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    uint32_t *mask = &s.team.scratch->masked[r];
    if (p.what == DK_MASK_QUERY) p.out[r] = static_cast<int32_t>(*mask);
    else if (p.what == DK_MASK_CLEAN || (r == p.rank && p.value == 0)) lifted |= lift_mask(s, r, tell);
    else if (r == p.rank) *mask = 1;
  }
  return lifted;
}

}  // namespace deepep
