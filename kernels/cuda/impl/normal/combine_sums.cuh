// combine_sums.cuh - reducing warps: the sums of a token's rows at its own rank.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/combine_ends.cuh"

namespace deepep {

// What a reducing warp takes at a time: chunks (16 bytes) [first, end) of a token's row. Whole rows where slots are
// used again, since a slot's credit stands for all of it. Else pieces of 8 KB: with whole rows the warps with the last
// tokens run on while the others are idle, 5 us longer for rows of 14 KB. Each piece costs a look at the flags: pieces
// of 4 KB took 70 us more. With a routing the pieces of few tokens are smaller, so that every warp has one.
struct SumPiece {
  int token, first, end;
};
constexpr int kSumPieceChunks = 512;
constexpr int kWholeRow = 1 << 30;
template <bool kPushed = false>
__device__ inline int piece_chunks(const CombineParams &p, const CombineSource *sources, const RingShape &ring,
                                   int usual = kSumPieceChunks) {
  int longest = 0;
#pragma unroll 1
  for (int r = 0; r < p.session.team.num_ranks; ++r)
    if (!kPushed || !is_pushed(sources[r])) longest = max(longest, sources[r].num_rows);
  return longest <= static_cast<int>(ring.slots) ? usual : kWholeRow;
}
__device__ inline SumPiece sum_piece_at(const CombineParams &p, int each, int ticket) {
  const int chunks = static_cast<int>(p.row_bytes / 16), per_token = ceil_div(chunks, each),
            first = ticket % per_token * each;
  return {ticket / per_token, first, min(first + each, chunks)};
}

// Sums a piece of a token's rows. `slots` is shared, [R]: the slot of the row from each rank, or -1. Loads of two rows
// are in flight at a time: a warp that waited for each in turn would be bound by latency.
template <bool kPushed>
__device__ inline void sum_piece(const CombineParams &p, const CombineSource *sources, const RingShape &ring,
                                 const int32_t *slots, const SumPiece &piece) {
  constexpr int kUnroll = 4;
  const int num_ranks = p.session.team.num_ranks, token = piece.token, chunks = piece.end;
  const uint64_t row = static_cast<uint64_t>(token) * p.row_bytes;
  for (int base = piece.first + lane_id(); base < chunks; base += kWarp * kUnroll) {
    float sum[kUnroll][8] = {};
    for (int r = 0; r < num_ranks;) {
      const uint8_t *from[2] = {nullptr, nullptr};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        while (r < num_ranks && slots[r] < 0) ++r;
        if (r < num_ranks) {
          from[n] = sources[r].rows + static_cast<uint64_t>(slots[r]) * p.row_bytes + 16ull * base;
          ++r;
        }
      }
      uint4 data[2][kUnroll];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (from[n] != nullptr && base + u * kWarp < chunks) data[n][u] = ptx::ld_stream(from[n] + 16 * kWarp * u);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (from[n] != nullptr && base + u * kWarp < chunks) add_bf16(sum[u], data[n][u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + u * kWarp;
      if (at >= chunks) continue;
#pragma unroll 1
      for (int b = 0; b < 2; ++b)
        if (p.bias(b) != nullptr) add_bf16(sum[u], ptx::ld_stream(p.bias(b) + row + 16ull * at));
      ptx::st_stream(p.combined_x() + row + 16ull * at, round_bf16(sum[u]));
    }
  }
  if (piece.first != 0 || p.combined_topk_weights() == nullptr) return;
  for (int k = lane_id(); k < p.num_topk; k += kWarp) {
    float sum = 0;
#pragma unroll 1
    for (int r = 0; r < num_ranks; ++r) {
      const uint32_t stride = kPushed && is_pushed(sources[r]) ? p.num_topk * 4u : ring.meta_stride;
      if (slots[r] >= 0)
        sum += reinterpret_cast<const float *>(sources[r].meta + static_cast<uint64_t>(slots[r]) * stride)[k];
    }
    p.combined_topk_weights()[static_cast<int64_t>(token) * p.num_topk + k] = sum;
  }
}

// In a team that shrinks: the rows of a rank that takes no part are left out, and of one that was given up meanwhile
// those that have not come.
__device__ __noinline__ inline void leave_out_lost(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                                   int32_t *slots, int r) {
  const int how = absence_of(p, sources[r]), head = slots[r];
  if (how == 0 || head < 0) return;
  const RingPlace place = ring_place(head, p.ring.slots);
  if (how == kLeftOut || ptx::ld_acquire_sys(&sources[r].flags[place.slot]) != ring_value(epoch, place.lap))
    slots[r] = -1;
}
__device__ __noinline__ inline void give_up_row(const CombineSource *sources, int32_t *slots, int peer) {
  drop_end(sources, peer, kGivenUp);
  slots[peer] = -1;
}

// Role of a warp. `slots`: the warp's own, shared [R].
template <bool kPushed>
__device__ inline void reduce_tokens(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                     int32_t *slots) {
  const int num_ranks = p.session.team.num_ranks;
  const RingShape &ring = p.ring;
  const int each = piece_chunks<kPushed>(p, sources, ring);
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
      if (shrinks(p.session.team)) leave_out_lost(p, epoch, sources, slots, r);
    }
    __syncwarp();
    int missing = -1;
    const bool good = warp_wait_or_drop<kForRows>(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          missing = -1;
          for (int r = lane_id(); r < num_ranks && missing < 0; r += kWarp) {
            const int head = slots[r];  // the row's number, until all rows are here
            if (head < 0 || (kPushed && is_pushed(sources[r]))) continue;
            const RingPlace place = ring_place(head, ring.slots);
            if (ptx::ld_acquire_sys(&sources[r].flags[place.slot]) != ring_value(epoch, place.lap)) missing = r;
          }
          return __all_sync(kAllLanes, missing < 0) != 0;
        },
        [&] { return missing; }, [&](int peer) { give_up_row(sources, slots, peer); });
    if (!good) return;
    __syncwarp();
#pragma unroll 1
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      if (slots[r] >= 0 && !(kPushed && is_pushed(sources[r])))
        slots[r] = static_cast<int>(ring_place(slots[r], ring.slots).slot);
    __syncwarp();
    sum_piece<kPushed>(p, sources, ring, slots, piece);
    __syncwarp();
    for (int r = lane_id(); each == kWholeRow && r < num_ranks; r += kWarp) {
      const int head = heads[r];
      if (head < 0 || head + static_cast<int>(ring.slots) >= sources[r].num_rows || (kPushed && is_pushed(sources[r])))
        continue;
      const RingPlace place = ring_place(head, ring.slots);
      ptx::st_release_sys(&sources[r].credits[place.slot], ring_value(epoch, place.lap));
    }
    __syncwarp();
  }
}

}  // namespace deepep
