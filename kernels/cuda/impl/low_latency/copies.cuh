// copies.cuh - dispatch's send half whose rows cross by copy engines (DK_TEAM_LL_COPY). The kernel packs the rows into
// an outbox in this rank's own memory, as they travel, and stores headers, counts and messages at the receivers itself.
// Copies on streams of the team (launch/copies.cu) then bring the rows to where the kernel of a whole call would have
// stored them. They need neither flags nor order: each word of a row shows by itself that it has arrived.
//
// A copy brings all tokens' rows of one receiver. Of a token that is not for it the outbox has zeros, which find zeros
// in the slot: this rank alone writes there, and its next call that uses the slot comes after the copies have ended. A
// copy in a captured graph goes to the same place in every replay. So here the host chooses the slot of a call, by
// turns, not the parity of the epoch, and the call's message names it.
#pragma once
#include "cuda/impl/low_latency/common.cuh"

namespace deepep {

__device__ __forceinline__ uint64_t outbox_number(const LowLatencyDispatchParams &p, int rank, int token) {
  return static_cast<uint64_t>(rank) * static_cast<uint32_t>(p.num_tokens) + static_cast<uint32_t>(token);
}
__device__ __forceinline__ uint8_t *outbox_row(const LowLatencyDispatchParams &p, int rank, int token) {
  return p.outbox.rows + outbox_number(p, rank, token) * p.outbox.row_bytes;
}
// Of a row's scales; unused with BF16.
__device__ __forceinline__ uint32_t *outbox_words(const LowLatencyDispatchParams &p, int rank, int token) {
  if (is_fp4(p)) return reinterpret_cast<uint32_t *>(outbox_row(p, rank, token) + value_bytes(p));
  return p.outbox.words + outbox_number(p, rank, token) * static_cast<uint32_t>(p.hidden / kScaleChannels);
}

// Whole block: zeros where a token's row would be for the other ranks that do not take it. `ranks`: those that do.
__device__ inline void clear_unsent(const LowLatencyDispatchParams &p, int token, const int32_t *ranks, int num_ranks) {
  const int chunks = static_cast<int>(p.outbox.row_bytes) / 16,
            words = p.format == DK_FORMAT_FP8 ? p.hidden / kScaleChannels : 0;
#pragma unroll 1
  for (int rank = 0; rank < p.session.team.num_ranks; ++rank) {
    bool takes = rank == p.session.team.rank;
    for (int n = 0; n < num_ranks; ++n) takes |= ranks[n] == rank;
    if (takes) continue;
    uint8_t *row = outbox_row(p, rank, token);
    for (int at = static_cast<int>(threadIdx.x); at < chunks; at += kLlThreads)
      ptx::st_relaxed_sys_v4(row + 16 * at, uint4{0, 0, 0, 0});
    for (int at = static_cast<int>(threadIdx.x); at < words; at += kLlThreads) outbox_words(p, rank, token)[at] = 0;
  }
}

}  // namespace deepep
