// combine_outbox.cuh - combine's send half whose rows cross by copy engines (DK_TEAM_LL_COPY; dispatch's: copies.cuh).
// The experts' rank sums as ever, but leaves each sum in an outbox in its own memory, a row for each (rank, token), and
// stores the row words at the receivers itself. Copies then bring the rows of a rank to the places of this rank's first
// local expert, one after the other, and a row word says that its sum lies there (kKindPacked). A token to which this
// rank adds nothing has zeros, which find zeros in the slot.
//
// Where the dispatch brought the weights, the send half sums. Else it sends its own weights to the experts' ranks and
// ends: the kernel of combine_beside.cuh waits for the peers' weights and sums, on a stream of the team, in front of
// the copies. What it needs of the call the send half leaves in the scratch (SumsBeside, the ticket).
//
// Where no sums are possible each expert's row is sent by itself, those of this rank's first expert through the outbox,
// since the copies go to their places, the others by stores.
//
// A rank whose token has a wrong index takes no row of that token, and cannot know when copies have brought one. So it
// says so in place of the token's weights, and no rank sums for the token. Rows of ranks that do not wait for weights
// it awaits with its next call (await_left_rows).
#pragma once
#include "cuda/impl/low_latency/control.cuh"
#include "cuda/impl/low_latency/logfmt.cuh"

namespace deepep {

// In place of a weight: the token's sums are not wanted. A NaN; weights that are one travel as another one.
constexpr uint32_t kUnwanted = 0x7fdeadffu;
__device__ __forceinline__ uint32_t weight_bits(float weight) {
  return __float_as_uint(weight) == kUnwanted ? 0x7fc00000u : __float_as_uint(weight);
}

// Whether rows for `rank` are left in the outbox.
__device__ __forceinline__ bool goes_by_copy(const CopiedCombineParams &p, int rank) {
  return p.outbox.rows != nullptr && rank != p.session.team.rank;
}
__device__ __forceinline__ uint8_t *outbox_row(const CopiedCombineParams &p, int rank, int token) {
  return p.outbox.rows + static_cast<uint64_t>(number_of_row(p, rank, token)) * p.outbox.row_bytes;
}
__device__ __forceinline__ uint32_t *outbox_words(const CopiedCombineParams &p, int rank, int token) {
  return p.outbox.words +
         static_cast<uint64_t>(number_of_row(p, rank, token)) * static_cast<uint32_t>(p.at.words_bytes / 4);
}
// By a group: zeros where a row for another rank would be.
__device__ inline void empty_outbox_row(const CopiedCombineParams &p, int rank, int token, int thread) {
  uint8_t *row = outbox_row(p, rank, token);
  const int words = (p.flags & DK_LL_LOGFMT) != 0 ? p.hidden / kScaleChannels : 0;
  for (int at = thread; at < p.hidden / 8; at += kLlGroupThreads)
    ptx::st_relaxed_sys_v4(row + 16 * at, uint4{0, 0, 0, 0});
  for (int at = thread; at < words; at += kLlGroupThreads) outbox_words(p, rank, token)[at] = 0;
}

// By the control block of a receive half, thread r for rank r: what the kernel beside has counted is the call's.
__device__ inline void take_counts_beside(const CopiedCombineParams &p) {
  Scratch *scratch = p.session.team.scratch;
  SumsBeside *beside = &scratch->beside[p.ticket];
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) {
    const uint64_t bytes = load_fresh(&beside->sent_bytes[r]), waited = load_fresh(&beside->wait_ns[r]);
    if (bytes != 0) count_bytes(p.session, r, bytes);
    if (waited != 0) scratch->wait_ns[r] += waited;
    beside->sent_bytes[r] = beside->wait_ns[r] = 0;
  }
}

}  // namespace deepep
