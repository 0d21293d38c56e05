// routed_sums.cuh - the sums of a token's rows in the order of its choices: biases first, then a row for each rank at
// the token's last choice of it, or a row for each choice.
#pragma once
#include "cuda/impl/normal/combine_sums.cuh"

namespace deepep {

// Shared words of a reducing warp: where a token's biases and the rows of its terms lie, in the order of the sum; the
// slot of the row from each rank.
constexpr int kMaxBiases = 2;
__host__ __device__ inline uint32_t reducer_words(const CombineParams &p) {
  return align_up(2u * (kMaxBiases + p.num_topk) + p.session.team.num_ranks, 2u);
}

// The expert of choice lane_id(); negative: none.
__device__ inline int64_t load_choice(const CombineParams &p, int token) {
  if (lane_id() >= p.num_topk) return -1;
  return load_index(pointer<const void>(p.topk_idx), static_cast<int64_t>(token) * p.num_topk + lane_id(),
                    p.index_bytes);
}

// Whole warp: the rank of choice lane_id(), -1: none; and the token's terms. num_terms: how many.
__device__ inline int order_terms(const CombineParams &p, const CombineSource *sources, int64_t expert,
                                  const int32_t *slots, const uint8_t **terms, int &num_terms) {
  int rank = -1;
  if (expert >= p.num_experts)
    report_refusal(p.session, kVoid, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert);
  else if (expert >= 0)
    rank = static_cast<int>(expert) / (p.num_experts / p.session.team.num_ranks);
  if (rank >= 0 && slots[rank] < 0) rank = -1;
  const uint32_t together =
      __match_any_sync(kAllLanes, rank < 0 ? 0x80000000u | lane_id() : static_cast<uint32_t>(rank));
  const bool unreduced = (p.flags & DK_COMBINE_UNREDUCED) != 0, last = (together >> lane_id()) == 1;
  const bool term = rank >= 0 && (unreduced || last);
  const uint32_t chosen = __ballot_sync(kAllLanes, term), below = (1u << lane_id()) - 1;
  if (term) {
    const uint8_t *row = sources[rank].rows + static_cast<uint64_t>(slots[rank]) * p.ring.payload_stride;
    if (unreduced) row += static_cast<uint64_t>(__popc(together & below)) * p.row_bytes;
    terms[__popc(chosen & below)] = row;
  }
  __syncwarp();
  num_terms = __popc(chosen);
  return rank;
}

// Sums a piece of a token's rows; the loads of kRowsTogether rows are in flight.
template <int kRowsTogether>
__device__ inline void sum_terms(const CombineParams &p, const uint8_t *const *terms, int num_terms,
                                 const SumPiece &piece) {
  constexpr int kUnroll = 4;
  const uint64_t row = static_cast<uint64_t>(piece.token) * p.row_bytes;
  for (int base = piece.first + lane_id(); base < piece.end; base += kWarp * kUnroll) {
    float sum[kUnroll][8] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + u * kWarp;
#pragma unroll 1
      for (int b = 0; b < 2; ++b)
        if (p.bias(b) != nullptr && at < piece.end) add_bf16(sum[u], ptx::ld_stream(p.bias(b) + row + 16ull * at));
    }
#pragma unroll 1
    for (int t = 0; t < num_terms; t += kRowsTogether) {
      const uint8_t *from[kRowsTogether];
#pragma unroll
      for (int n = 0; n < kRowsTogether; ++n) from[n] = t + n < num_terms ? terms[t + n] + 16ull * base : nullptr;
      uint4 data[kRowsTogether][kUnroll];
#pragma unroll
      for (int n = 0; n < kRowsTogether; ++n)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (from[n] != nullptr && base + u * kWarp < piece.end) data[n][u] = ptx::ld_stream(from[n] + 16 * kWarp * u);
#pragma unroll
      for (int n = 0; n < kRowsTogether; ++n)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (from[n] != nullptr && base + u * kWarp < piece.end) add_bf16(sum[u], data[n][u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (base + u * kWarp < piece.end)
        ptx::st_stream(p.combined_x() + row + 16ull * (base + u * kWarp), round_bf16(sum[u]));
  }
}

// Whole warp: the numbers of a token's rows, -1: none, of which head(r) is what the handle says.
template <bool kShrinks, class Head>
__device__ inline void put_heads(const CombineParams &p, uint64_t epoch, const CombineSource *sources, int32_t *slots,
                                 Head head_of) {
  __syncwarp();
#pragma unroll 1
  for (int r = lane_id(); r < p.session.team.num_ranks; r += kWarp) {
    const int head = head_of(r);
    if (head >= sources[r].num_rows)
      report_refusal(p.session, kVoid, DK_EINVAL, p.session.team.rank, DK_FIELD_SEND_HEAD, sources[r].num_rows - 1,
                     head);
    slots[r] = head < sources[r].num_rows ? head : -1;
    if constexpr (kShrinks) leave_out_lost(p, epoch, sources, slots, r);
  }
  __syncwarp();
}
// A rank whose row, by those numbers, is not here; -1: this lane found none.
__device__ inline int missing_row(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                  const int32_t *slots) {
  int missing = -1;
  for (int r = lane_id(); r < p.session.team.num_ranks && missing < 0; r += kWarp) {
    const int head = slots[r];
    if (head < 0) continue;
    const RingPlace place = ring_place(head, p.ring.slots);
    if (ptx::ld_acquire_sys(&sources[r].flags[place.slot]) != ring_value(epoch, place.lap)) missing = r;
  }
  return missing;
}
template <bool kShrinks>
__device__ inline bool await_rows(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                  int32_t *slots) {
  int missing = -1;
  return warp_await<kShrinks, kForRows>(
      p.session, static_cast<int64_t>(epoch),
      [&] {
        missing = missing_row(p, epoch, sources, slots);
        return __all_sync(kAllLanes, missing < 0) != 0;
      },
      [&] { return missing; }, [&](int peer) { give_up_row(sources, slots, peer); });
}
// Once all rows are here: from their numbers to their slots.
__device__ inline void find_slots(const CombineParams &p, int32_t *slots) {
  __syncwarp();
  for (int r = lane_id(); r < p.session.team.num_ranks; r += kWarp)
    if (slots[r] >= 0) slots[r] = static_cast<int>(ring_place(slots[r], p.ring.slots).slot);
  __syncwarp();
}
// `rank`: that of choice lane_id().
__device__ inline void take_weights(const CombineParams &p, const CombineSource *sources, const int32_t *slots,
                                    int token, int rank) {
  if (p.combined_topk_weights() == nullptr || lane_id() >= p.num_topk) return;
  p.combined_topk_weights()[static_cast<int64_t>(token) * p.num_topk + lane_id()] =
      rank < 0 ? 0
               : reinterpret_cast<const float *>(sources[rank].meta +
                                                 static_cast<uint64_t>(slots[rank]) * p.ring.meta_stride)[lane_id()];
}
// Gives the slots of a token's rows back, where rows still need them.
__device__ inline void give_credits(const CombineParams &p, uint64_t epoch, const CombineSource *sources, int token) {
  const int num_ranks = p.session.team.num_ranks;
  __syncwarp();
#pragma unroll 1
  for (int r = lane_id(); r < num_ranks; r += kWarp) {
    const int head = p.send_head()[static_cast<int64_t>(token) * num_ranks + r];
    if (head < 0 || head + static_cast<int>(p.ring.slots) >= sources[r].num_rows) continue;
    const RingPlace place = ring_place(head, p.ring.slots);
    ptx::st_release_sys(&sources[r].credits[place.slot], ring_value(epoch, place.lap));
  }
}

// Role of a warp. `shared`: reducer_words words of its own.
template <int kRowsTogether, bool kShrinks>
__device__ inline void reduce_routed(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                     int32_t *shared) {
  const int num_ranks = p.session.team.num_ranks;
  const int each = piece_chunks(p, sources, p.ring, p.piece_chunks);
  auto **terms = reinterpret_cast<const uint8_t **>(shared);
  int32_t *slots = shared + 2 * (kMaxBiases + p.num_topk);
  const auto take = [&] {
    return lane_id() == 0 ? static_cast<int>(atomicAdd(&p.session.team.scratch->tokens_taken[epoch % 2], 1u)) : 0;
  };
  int ticket = take();
  for (;;) {
    const SumPiece piece = sum_piece_at(p, each, __shfl_sync(kAllLanes, ticket, 0));
    if (piece.token >= p.num_tokens) return;
    ticket = take();
    const int32_t *heads = p.send_head() + static_cast<int64_t>(piece.token) * num_ranks;
    put_heads<kShrinks>(p, epoch, sources, slots, [&](int r) { return heads[r]; });
    if (!await_rows<kShrinks>(p, epoch, sources, slots)) return;
    find_slots(p, slots);
    int num_terms;
    const int rank = order_terms(p, sources, load_choice(p, piece.token), slots, terms, num_terms);
    if (piece.first == 0) take_weights(p, sources, slots, piece.token, rank);
    sum_terms<kRowsTogether>(p, terms, num_terms, piece);
    if (each == kWholeRow) give_credits(p, epoch, sources, piece.token);
    __syncwarp();
  }
}

}  // namespace deepep
