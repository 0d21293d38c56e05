// anew.cuh - what a clean does to the numbers of low-latency calls.
#pragma once
#include "cuda/sync/session.cuh"

namespace deepep {

// Whole block, once all have come to a clean: what was sent before is nothing that will be received, and all go on from the greatest
// number of a call that any of them has. message_of(rank): what it came with.
template <class MessageOf> __device__ inline void start_calls_anew(const Session &s, MessageOf message_of) {
  Scratch *scratch = s.team.scratch;
  uint64_t newest = scratch->low_latency_epoch;
  for (int r = 0; r < s.team.num_ranks; ++r)
    if (!is_masked(s, r)) newest = most(newest, message_of(r)->segment_offset);
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    if (is_masked(s, r)) continue;
    scratch->seen[r] = scratch->consumed[0][r] = scratch->consumed[1][r] = newest;
    scratch->epoch_ahead[r] = scratch->dispatch_ahead[r] = 0;
    scratch->returned[r] = 0;
  }
  __syncthreads(); // everyone has read its own number
  if (threadIdx.x == 0) scratch->low_latency_epoch = scratch->low_latency_dispatches = newest;
}

}  // namespace deepep
