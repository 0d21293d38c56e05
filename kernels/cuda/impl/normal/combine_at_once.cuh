// combine_at_once.cuh - combine of few rows where the handle keeps the routing: rows leave before any rank has
// answered, and each block sums its tokens once all rows are here, in the order of the token's choices.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/at_once.cuh"
#include "cuda/impl/normal/combine_ends.cuh"
#include "cuda/impl/normal/expanded_sums.cuh"
#include "cuda/impl/normal/failed_outputs.cuh"

namespace deepep {

constexpr int kTermsTogether = 2, kChunksTogether = 4;  // of sums, whose loads are in flight together

// Shared memory of a block, in this order: dests, sources; of each row that the block sends where it goes, and with
// expanded rows how many rows it is the sum of, and which; of each token that it sums how many rows that takes, where
// they lie in the nvl region, in units of 16 bytes, and where the weight of each choice does.
struct CombineAtOnceShared {
  uint32_t sources, places, row_terms, token_terms, bytes;
  __host__ __device__ CombineAtOnceShared(const CombineParams &p, uint32_t rows_each, uint32_t tokens_each) {
    const uint32_t num_ranks = p.session.team.num_ranks;
    sources = num_ranks * static_cast<uint32_t>(sizeof(CombineDest));
    places = sources + num_ranks * static_cast<uint32_t>(sizeof(CombineSource));
    row_terms = places + rows_each * 8;
    token_terms = row_terms + (p.routing == DK_ROUTING_EXPANDED ? rows_each * (p.num_topk + 1) * 4 : 0);
    bytes = align_up<uint32_t>(token_terms + tokens_each * (2 * p.num_topk + 1) * 4, 128);
  }
};

struct CombineAtOnceParams {
  CombineParams combine;
  uint32_t rows_each = 0, tokens_each = 0;     // of a block, at most
  Divisor by_chunks{}, by_topk{}, by_local{};  // numbers of 16 bytes of a row, of choices, of experts of a rank
};

// A block's part of the call.
struct CombineAtOnce {
  const CombineAtOnceParams &all;
  uint8_t *shared;
  uint64_t epoch;
  const CombineAtOnceShared at{all.combine, all.rows_each, all.tokens_each};

  static constexpr uint32_t kNothing = ~0u;
  static constexpr int32_t kWrongTerms = -1;  // how many rows a row is the sum of, where one is outside x

  __device__ const CombineParams &p() const { return all.combine; }
  __device__ const Session &s() const { return all.combine.session; }
  __device__ int num_ranks() const { return s().team.num_ranks; }
  __device__ bool is_expanded() const { return p().routing == DK_ROUTING_EXPANDED; }
  __device__ int chunks() const { return static_cast<int>(all.by_chunks.by); }
  __device__ CombineDest *dests() const { return reinterpret_cast<CombineDest *>(shared); }
  __device__ CombineSource *sources() const { return reinterpret_cast<CombineSource *>(shared + at.sources); }
  __device__ uint8_t **places() const { return reinterpret_cast<uint8_t **>(shared + at.places); }
  __device__ int32_t *terms_of_row(int i) const {  // their number, then they
    return reinterpret_cast<int32_t *>(shared + at.row_terms) + i * (p().num_topk + 1);
  }
  __device__ uint32_t *terms_of_token(int i) const {  // their number, then they, then the weights
    return reinterpret_cast<uint32_t *>(shared + at.token_terms) + i * (2 * p().num_topk + 1);
  }
  __device__ uint8_t *here() const { return s().team.self + s().team.nvl; }
  __device__ int rows() const { return dests()[num_ranks() - 1].first_row + dests()[num_ranks() - 1].num_rows; }

  // ---- Sending, by the whole block

  __device__ int dest_of(int row) const {
    int r = 0;
    while (row >= dests()[r].first_row + dests()[r].num_rows) ++r;
    return r;
  }
  __device__ void find_places() const {
    for (int i = threadIdx.x; i < num_items(rows()); i += kAtOnceThreads) {
      const int row = item_at(i), r = dest_of(row), number = row - dests()[r].first_row;
      const bool fits = number < static_cast<int>(p().ring.slots);
      places()[i] = fits ? dests()[r].rows + static_cast<uint64_t>(number) * p().ring.payload_stride : nullptr;
    }
    // A warp for each row that is a sum.
    for (int i = warp_id(); is_expanded() && i < num_items(rows()); i += kAtOnceWarps) {
      const Terms terms = checked_terms(p(), load_slot(p(), item_at(i)));
      int32_t *to = terms_of_row(i);
      if (lane_id() == 0) to[0] = terms.wrong ? kWrongTerms : __popc(terms.here);
      if ((terms.here >> lane_id() & 1) != 0) to[1 + __popc(terms.here & ((1u << lane_id()) - 1))] = terms.slot;
    }
    __syncthreads();
  }
  __device__ uint4 chunk_of(int64_t row, int c) const {
    return ptx::ld_stream(p().x() + row * p().row_bytes + 16ull * c);
  }
  // The sums of some chunks that a thread makes together, from the `base`-th on: begin(chunk, sum), then
  // num_terms(chunk) terms in their order, load(chunk, t) each; end(chunk, sum).
  template <class Begin, class NumTerms, class Load, class End>
  __device__ void sum_chunks(int base, int total, Begin begin, NumTerms num_terms, Load load, End end) const {
    float sum[kChunksTogether][8] = {};
    Chunk chunk[kChunksTogether];
    int terms[kChunksTogether], most = 0;
#pragma unroll
    for (int u = 0; u < kChunksTogether; ++u) {
      chunk[u] = chunk_at(base + u * kAtOnceThreads, all.by_chunks);
      const bool mine = base + u * kAtOnceThreads < total;
      if (mine) begin(chunk[u], sum[u]);
      terms[u] = mine ? num_terms(chunk[u]) : 0;
      most = max(most, terms[u]);
    }
#pragma unroll 1
    for (int t = 0; t < most; t += kTermsTogether) {
      uint4 data[kChunksTogether][kTermsTogether];
#pragma unroll
      for (int u = 0; u < kChunksTogether; ++u)
#pragma unroll
        for (int n = 0; n < kTermsTogether; ++n)
          if (t + n < terms[u]) data[u][n] = load(chunk[u], t + n);
#pragma unroll
      for (int u = 0; u < kChunksTogether; ++u)
#pragma unroll
        for (int n = 0; n < kTermsTogether; ++n)
          if (t + n < terms[u]) add_bf16(sum[u], data[u][n]);
    }
#pragma unroll
    for (int u = 0; u < kChunksTogether; ++u)
      if (base + u * kAtOnceThreads < total) end(chunk[u], sum[u]);
  }
  __device__ void send_rows() const {
    constexpr int kUnroll = 5;
    const int total = num_items(rows()) * chunks();
    for (int base = threadIdx.x; base < total; base += kAtOnceThreads * kUnroll) {
      uint4 data[kUnroll];
      Chunk chunk[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        chunk[u] = chunk_at(base + u * kAtOnceThreads, all.by_chunks);
        if (base + u * kAtOnceThreads < total) data[u] = chunk_of(item_at(chunk[u].item), chunk[u].at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (base + u * kAtOnceThreads < total && places()[chunk[u].item] != nullptr)
          ptx::st_stream(places()[chunk[u].item] + 16 * chunk[u].at, data[u]);
    }
  }
  // Of expanded rows.
  __device__ void send_sums() const {
    const int total = num_items(rows()) * chunks();
    for (int base = threadIdx.x; base < total; base += kAtOnceThreads * kChunksTogether)
      sum_chunks(
          base, total, [](const Chunk &, float (&)[8]) {},
          [&](const Chunk &chunk) { return terms_of_row(chunk.item)[0]; },
          [&](const Chunk &chunk, int t) { return chunk_of(terms_of_row(chunk.item)[1 + t], chunk.at); },
          [&](const Chunk &chunk, const float (&sum)[8]) {
            uint4 data = round_bf16(sum);
            if (terms_of_row(chunk.item)[0] == kWrongTerms) data = {kNanPair, kNanPair, kNanPair, kNanPair};
            if (places()[chunk.item] != nullptr) ptx::st_stream(places()[chunk.item] + 16 * chunk.at, data);
          });
  }
  __device__ void send_weights() const {
    const int topk = p().num_topk;
    for (int j = threadIdx.x; j < num_items(rows()) * topk; j += kAtOnceThreads) {
      const Chunk choice = chunk_at(j, all.by_topk);
      const int row = item_at(choice.item), r = dest_of(row), number = row - dests()[r].first_row;
      if (number >= static_cast<int>(p().ring.slots)) continue;
      int64_t from = static_cast<int64_t>(row) * topk + choice.at;
      if (is_expanded())
        from = pointer<const int32_t>(p().recv_src_metadata)[static_cast<int64_t>(row) * (topk + 2) + 2 + choice.at];
      const bool given = p().topk_weights() != nullptr && from >= 0 && (!is_expanded() || from < p().num_x_rows);
      reinterpret_cast<float *>(dests()[r].meta + static_cast<uint64_t>(number) * p().ring.meta_stride)[choice.at] =
          given ? p().topk_weights()[from] : 0;
    }
  }

  // ---- Summing

  // A warp for each token of the block: what it is the sum of, which needs no rows. Not the first warp, which is busy
  // with the flags.
  __device__ void find_terms() const {
    const int ranks = num_ranks(), topk = p().num_topk, lane = lane_id();
    for (int i = warp_id() - 1; i >= 0 && i < num_items(p().num_tokens); i += kAtOnceWarps - 1) {
      const int64_t token = item_at(i);
      int head = lane < ranks ? p().send_head()[token * ranks + lane] : -1;
      const int most = lane < ranks ? min(sources()[lane].num_rows, static_cast<int>(p().ring.slots)) : 0;
      if (head >= most) report_refusal(s(), kVoid, DK_EINVAL, s().team.rank, DK_FIELD_SEND_HEAD, most - 1, head);
      if (head >= most) head = -1;
      int rank = -1;
      if (lane < topk) {
        const int64_t expert = load_index(pointer<const void>(p().topk_idx), token * topk + lane, p().index_bytes);
        if (expert >= p().num_experts)
          report_refusal(s(), kVoid, DK_EINVAL, s().team.rank, DK_FIELD_TOPK_IDX, p().num_experts, expert);
        else if (expert >= 0)
          rank = all.by_local.quotient(static_cast<int>(expert));
      }
      const int slot = __shfl_sync(kAllLanes, head, max(rank, 0));
      if (slot < 0) rank = -1;
      const uint32_t together =
          __match_any_sync(kAllLanes, rank < 0 ? 0x80000000u | lane : static_cast<uint32_t>(rank));
      const bool term = rank >= 0 && (together >> lane) == 1;  // at the last choice of the rank
      const uint32_t chosen = __ballot_sync(kAllLanes, term);
      uint32_t *to = terms_of_token(i);
      if (lane == 0) to[0] = __popc(chosen);
      if (term)
        to[1 + __popc(chosen & ((1u << lane) - 1))] = static_cast<uint32_t>((p().ring.payload(rank, slot)) / 16);
      if (lane < topk)
        to[1 + topk + lane] = rank < 0 ? kNothing : static_cast<uint32_t>((p().ring.meta(rank, slot)) / 16);
    }
  }
  __device__ uint64_t out_of(const Chunk &chunk) const {
    return static_cast<uint64_t>(item_at(chunk.item)) * p().row_bytes + 16ull * chunk.at;
  }
  __device__ void sum_tokens() const {
    const int total = num_items(p().num_tokens) * chunks();
    for (int base = threadIdx.x; base < total; base += kAtOnceThreads * kChunksTogether)
      sum_chunks(
          base, total,
          [&](const Chunk &chunk, float (&sum)[8]) {
#pragma unroll 1
            for (int b = 0; b < 2; ++b)
              if (p().bias(b) != nullptr) add_bf16(sum, ptx::ld_stream(p().bias(b) + out_of(chunk)));
          },
          [&](const Chunk &chunk) { return static_cast<int>(terms_of_token(chunk.item)[0]); },
          [&](const Chunk &chunk, int t) {
            return ptx::ld_stream(here() + 16ull * (terms_of_token(chunk.item)[1 + t] + chunk.at));
          },
          [&](const Chunk &chunk, const float (&sum)[8]) {
            ptx::st_stream(p().combined_x() + out_of(chunk), round_bf16(sum));
          });
  }
  __device__ void take_weights() const {
    const int topk = p().num_topk;
    for (int j = threadIdx.x; p().combined_topk_weights() != nullptr && j < num_items(p().num_tokens) * topk;
         j += kAtOnceThreads) {
      const Chunk choice = chunk_at(j, all.by_topk);
      const uint32_t from = terms_of_token(choice.item)[1 + topk + choice.at];
      p().combined_topk_weights()[static_cast<int64_t>(item_at(choice.item)) * topk + choice.at] =
          from == kNothing ? 0 : reinterpret_cast<const float *>(here() + 16ull * from)[choice.at];
    }
  }

  // ---- The call

  __device__ void run(Handshake hand, uint64_t finished) const {
    const bool refused = (hand.mine.flags & kHandshakeRefused) != 0;
    hand.mine.flags |= kHandshakeAtOnce;
    if (!refused) hand.mine.row_limit = row_blocks();
    if (blockIdx.x == 0) {
      post_handshake(s(), hand);
      publish_newest_by_last_warp(s().team);
    }
    set_up_combine(p(), dests(), sources());
    if (!refused) {
      find_places();
      if (!await_finished(s(), epoch, finished)) return;
      is_expanded() ? send_sums() : send_rows();
      send_weights();
      announce_rows(s(), epoch);
      find_terms();
    }
    if (__syncthreads_or(!await_messages(s(), hand)) != 0) return;
    const TeamView &team = s().team;
    const auto blocks_of = [&](int r) { return team.handshake(team.rank, epoch % kHandshakeCopies, r)->row_limit; };
    if (!await_rows(s(), epoch, blocks_of)) return;
    sum_tokens();
    take_weights();
  }
};

}  // namespace deepep

namespace deep_ep::intranode {
using namespace deepep;

__global__ void __launch_bounds__(kAtOnceThreads, 1) combine_at_once(const __grid_constant__ CombineAtOnceParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.combine.session;
  const uint64_t finished = load_finished(s.team);
  const MatrixEntry early = load_matrix_entry(p.combine.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x);
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) CombineAtOnce{p, shared, epoch}.run(combine_handshake(p.combine, epoch, early), finished);
  finish_at_once(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.combine);
    if (threadIdx.x == 0) end_epoch_of(s.team, epoch);
  });
}

}  // namespace deep_ep::intranode
