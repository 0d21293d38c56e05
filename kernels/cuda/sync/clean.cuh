// clean.cuh - barriers, and how a clean sets the numbers of low-latency calls.
#pragma once
#include "cuda/sync/agreement.cuh"

namespace deepep {

// Whole block, once all ranks have entered a clean: no rank will receive what was sent before, and all go on from the
// greatest call number that any of them has. message_of(rank): its message of this clean.
template <class MessageOf>
__device__ inline void restart_call_numbers(const Session &s, MessageOf message_of) {
  Scratch *scratch = s.team.scratch;
  uint64_t newest = scratch->low_latency_epoch;
  for (int r = 0; r < s.team.num_ranks; ++r)
    if (!is_masked(s, r)) newest = max(newest, message_of(r)->newest_call);
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    if (is_masked(s, r)) continue;
    scratch->seen[r] = scratch->consumed[0][r] = scratch->consumed[1][r] = newest;
    scratch->epoch_ahead[r] = scratch->dispatch_ahead[r] = 0;
    scratch->returned[r] = 0;
  }
  __syncthreads();                               // all threads have read low_latency_epoch
  if (threadIdx.x == 0) scratch->unsettled = 0;  // what a combine left is emptied with the slots
  if (threadIdx.x == 0) scratch->low_latency_epoch = scratch->low_latency_dispatches = newest;
}

// The body of a barrier kernel, by one block: a barrier, or one of the two of a clean (counts_as_call: the second,
// after which a rank may send again). Masked ranks are not waited for. message_of(epoch, rank): a rank's message.
template <class Post, class Await, class MessageOf>
__device__ inline void run_barrier(const Session &s, uint32_t counts_as_call, Post post, Await await,
                                   MessageOf message_of) {
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    Handshake hand{};
    const bool restarts = s.op == DK_OP_CLEAN && counts_as_call == 0;
    hand.epoch = epoch;
    hand.mine.op = s.op;
    if (restarts) hand.mine.newest_call = s.team.scratch->low_latency_epoch;
    post(hand);
    publish_newest_by_last_warp(s.team);
    if (await(hand) && restarts) restart_call_numbers(s, [&](int r) { return message_of(hand.epoch, r); });
  }
  finish(s, [&](bool failed) {
    if (threadIdx.x == 0) end_epoch(s.team);
    record_kernel(s, &s.team.scratch->clean_ns, counts_as_call != 0, failed);
  });
}

}  // namespace deepep
