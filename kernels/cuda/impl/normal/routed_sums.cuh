// routed_sums.cuh - the sums of a token's rows in the order of its choices: biases first, then a row for each rank at
// the token's last choice of it, or a row for each choice.
#pragma once
#include "cuda/impl/normal/combine_sums.cuh"

namespace deepep {

// Shared words of a reducing warp: the slot of the row from each rank, then the terms in their order.
__host__ __device__ inline uint32_t reducer_words(const CombineParams &p) {
  return p.session.team.num_ranks + p.num_topk;
}
constexpr int kTermShift = 16;  // of a term: its rank, and above which of that rank's rows it is

// Whole warp: the ranks of a token's choices, lane k that of choice k; and its terms in shared memory. Result: how
// many.
__device__ inline int order_terms(const CombineParams &p, int token, const int32_t *slots, int32_t *terms, int &rank) {
  rank = -1;
  if (lane_id() < p.num_topk) {
    const int64_t expert = load_index(pointer<const void>(p.topk_idx),
                                      static_cast<int64_t>(token) * p.num_topk + lane_id(), p.index_bytes);
    if (expert >= p.num_experts)
      report_refusal(p.session, kVoid, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert);
    else if (expert >= 0)
      rank = static_cast<int>(expert) / (p.num_experts / p.session.team.num_ranks);
    if (rank >= 0 && slots[rank] < 0) rank = -1;
  }
  const uint32_t together =
      __match_any_sync(kAllLanes, rank < 0 ? 0x80000000u | lane_id() : static_cast<uint32_t>(rank));
  const bool unreduced = (p.flags & DK_COMBINE_UNREDUCED) != 0, last = (together >> lane_id()) == 1;
  const bool term = rank >= 0 && (unreduced || last);
  const uint32_t chosen = __ballot_sync(kAllLanes, term), below = (1u << lane_id()) - 1;
  if (term) terms[__popc(chosen & below)] = rank | (unreduced ? __popc(together & below) : 0) << kTermShift;
  __syncwarp();
  return __popc(chosen);
}

// Sums a piece of a token's rows. Loads of two rows are in flight at a time.
__device__ inline void sum_terms(const CombineParams &p, const CombineSource *sources, const RingShape &ring,
                                 const int32_t *slots, const int32_t *terms, int num_terms, const SumPiece &piece) {
  constexpr int kUnroll = 4;
  const uint64_t row = static_cast<uint64_t>(piece.token) * p.row_bytes;
  auto row_of = [&](int32_t term) {
    const int r = term & ((1 << kTermShift) - 1);
    return sources[r].rows + static_cast<uint64_t>(slots[r]) * ring.payload_stride +
           static_cast<uint64_t>(term >> kTermShift) * p.row_bytes;
  };
  for (int base = piece.first + lane_id(); base < piece.end; base += kWarp * kUnroll) {
    float sum[kUnroll][8] = {};
#pragma unroll 1
    for (int b = 0; b < 2; ++b) {
      if (p.bias(b) == nullptr) continue;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (base + u * kWarp < piece.end)
          add_bf16(sum[u], ptx::ld_stream(p.bias(b) + row + 16ull * (base + u * kWarp)));
    }
    for (int t = 0; t < num_terms; t += 2) {
      uint4 data[2][kUnroll];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (t + n >= num_terms) continue;
        const uint8_t *from = row_of(terms[t + n]) + 16ull * base;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (base + u * kWarp < piece.end) data[n][u] = ptx::ld_stream(from + 16 * kWarp * u);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (t + n >= num_terms) continue;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (base + u * kWarp < piece.end) add_bf16(sum[u], data[n][u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (base + u * kWarp < piece.end)
        ptx::st_stream(p.combined_x() + row + 16ull * (base + u * kWarp), round_bf16(sum[u]));
  }
}

// Role of a warp. `shared`: reducer_words words of its own.
__device__ inline void reduce_routed(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                     int32_t *shared) {
  const int num_ranks = p.session.team.num_ranks;
  const RingShape ring = combine_ring(p);
  const int each = piece_chunks(p, sources, ring);
  int32_t *slots = shared, *terms = shared + num_ranks;
  const auto take = [&] {
    return lane_id() == 0 ? static_cast<int>(atomicAdd(&p.session.team.scratch->tokens_taken[epoch % 2], 1u)) : 0;
  };
  int ticket = take();
  for (;;) {
    const SumPiece piece = sum_piece_at(p, each, __shfl_sync(kAllLanes, ticket, 0));
    if (piece.token >= p.num_tokens) return;
    ticket = take();
    const int32_t *heads = p.send_head() + static_cast<int64_t>(piece.token) * num_ranks;
    for (int r = lane_id(); r < num_ranks; r += kWarp) {
      const int head = heads[r];
      if (head >= sources[r].num_rows)
        report_refusal(p.session, kVoid, DK_EINVAL, p.session.team.rank, DK_FIELD_SEND_HEAD, sources[r].num_rows - 1,
                       head);
      slots[r] = head < sources[r].num_rows ? head : -1;
    }
    __syncwarp();
    int missing = -1;
    const bool good = warp_wait_or_fail(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          missing = -1;
          for (int r = lane_id(); r < num_ranks && missing < 0; r += kWarp) {
            const int head = slots[r];  // the row's number, until all rows are here
            if (head < 0) continue;
            const RingPlace place = ring_place(head, ring.slots);
            if (ptx::ld_acquire_sys(&sources[r].flags[place.slot]) != ring_value(epoch, place.lap)) missing = r;
          }
          return __all_sync(kAllLanes, missing < 0) != 0;
        },
        [&] { return missing; });
    if (!good) return;
    __syncwarp();
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      if (slots[r] >= 0) slots[r] = static_cast<int>(ring_place(slots[r], ring.slots).slot);
    __syncwarp();
    int rank;
    const int num_terms = order_terms(p, piece.token, slots, terms, rank);
    sum_terms(p, sources, ring, slots, terms, num_terms, piece);
    if (piece.first == 0 && p.combined_topk_weights() != nullptr && lane_id() < p.num_topk)
      p.combined_topk_weights()[static_cast<int64_t>(piece.token) * p.num_topk + lane_id()] =
          rank < 0 ? 0
                   : reinterpret_cast<const float *>(sources[rank].meta +
                                                     static_cast<uint64_t>(slots[rank]) * ring.meta_stride)[lane_id()];
    __syncwarp();
    for (int r = lane_id(); each == kWholeRow && r < num_ranks; r += kWarp) {
      const int head = heads[r];
      if (head < 0 || head + static_cast<int>(ring.slots) >= sources[r].num_rows) continue;
      const RingPlace place = ring_place(head, ring.slots);
      ptx::st_release_sys(&sources[r].credits[place.slot], ring_value(epoch, place.lap));
    }
    __syncwarp();
  }
}

}  // namespace deepep
