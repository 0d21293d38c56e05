// combine_at_once.cuh - combine of few rows: they leave all together, and each block sums its tokens once all rows are
// here, with a routing in the order of the token's choices, without one in that of the ranks.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/common/lanes.cuh"
#include "cuda/impl/normal/at_once.cuh"
#include "cuda/impl/normal/combine_ends.cuh"
#include "cuda/impl/normal/expanded_sums.cuh"
#include "cuda/impl/normal/failed_outputs.cuh"

namespace deepep {

constexpr int kTermsTogether = 4, kChunksTogether = 3;  // of sums, whose loads are in flight together

// A row that a block sends: where it lies, or with expanded rows nothing; where it goes, null: there is no room.
struct SentRow {
  const uint8_t *from;
  uint8_t *to;
};

// Of a token's sum.
__host__ __device__ inline uint32_t most_terms(const CombineParams &p) {
  return p.routing == DK_ROUTING_NONE ? p.session.team.num_ranks : p.num_topk;
}

// Shared memory of a block, in this order: dests, sources; each row that the block sends, and with expanded rows how
// many rows it is the sum of, and which; of each token that it sums how many rows that takes, where
// they lie in the nvl region, in units of 16 bytes, and where the weight of each choice, or those of each row, do.
struct CombineAtOnceShared {
  uint32_t sources, sent, row_terms, token_terms, bytes;
  __host__ __device__ CombineAtOnceShared(const CombineParams &p, uint32_t rows_each, uint32_t tokens_each) {
    const uint32_t num_ranks = p.session.team.num_ranks;
    sources = num_ranks * static_cast<uint32_t>(sizeof(CombineDest));
    sent = sources + num_ranks * static_cast<uint32_t>(sizeof(CombineSource));
    row_terms = sent + rows_each * static_cast<uint32_t>(sizeof(SentRow));
    token_terms = row_terms + (p.routing == DK_ROUTING_EXPANDED ? rows_each * (p.num_topk + 1) * 4 : 0);
    bytes = align_up<uint32_t>(token_terms + tokens_each * (2 * most_terms(p) + 1) * 4, 128);
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
  __device__ bool is_routed() const { return p().routing != DK_ROUTING_NONE; }
  __device__ int chunks() const { return static_cast<int>(all.by_chunks.by); }
  __device__ CombineDest *dests() const { return reinterpret_cast<CombineDest *>(shared); }
  __device__ CombineSource *sources() const { return reinterpret_cast<CombineSource *>(shared + at.sources); }
  __device__ SentRow *sent() const { return reinterpret_cast<SentRow *>(shared + at.sent); }
  __device__ int32_t *terms_of_row(int i) const {  // their number, then they
    return reinterpret_cast<int32_t *>(shared + at.row_terms) + i * (p().num_topk + 1);
  }
  __device__ uint32_t *terms_of_token(int i) const {  // their number, then they, then the weights
    return reinterpret_cast<uint32_t *>(shared + at.token_terms) + i * (2 * most_terms(p()) + 1);
  }
  __device__ uint8_t *here() const { return s().team.self + s().team.nvl; }
  __device__ int rows() const { return dests()[num_ranks() - 1].first_row + dests()[num_ranks() - 1].num_rows; }

  // ---- Sending, by all warps but the last one

  // Rows to the next rank first: ranks that begin with the same one would share its link.
  __device__ int row_at(int i) const {
    const int next = s().team.rank + 1 == num_ranks() ? 0 : s().team.rank + 1,
              row = item_at(i) + dests()[next].first_row;
    return row < rows() ? row : row - rows();
  }
  __device__ int dest_of(int row) const {
    int r = 0;
    while (row >= dests()[r].first_row + dests()[r].num_rows) ++r;
    return r;
  }
  __device__ void find_rows() const {
    for (int i = threadIdx.x; i < num_items(rows()); i += kAtOnceThreads) {
      const int row = row_at(i), r = dest_of(row), number = row - dests()[r].first_row;
      const bool fits = number < static_cast<int>(p().ring.slots);
      sent()[i] = {is_expanded() ? nullptr : p().x() + static_cast<uint64_t>(row) * p().row_bytes,
                   fits ? dests()[r].rows + static_cast<uint64_t>(number) * p().ring.payload_stride : nullptr};
    }
    // A warp for each row that is a sum.
    for (int i = warp_id(); is_expanded() && i < num_items(rows()); i += kAtOnceWarps) {
      const Terms terms = checked_terms(p(), load_slot(p(), row_at(i)));
      int32_t *to = terms_of_row(i);
      if (lane_id() == 0) to[0] = terms.wrong ? kWrongTerms : __popc(terms.here);
      if ((terms.here >> lane_id() & 1) != 0) to[1 + lanes_before(terms.here)] = terms.slot;
    }
    __syncthreads();
  }
  // The sums of some chunks that a thread makes together, from the `base`-th on: begin(chunk, sum), then
  // num_terms(chunk) terms in their order, load(chunk, t) each; end(chunk, sum).
  template <int kThreads, class Begin, class NumTerms, class Load, class End>
  __device__ void sum_chunks(int base, int total, Begin begin, NumTerms num_terms, Load load, End end) const {
    float sum[kChunksTogether][8] = {};
    Chunk chunk[kChunksTogether];
    int terms[kChunksTogether], most = 0;
#pragma unroll
    for (int u = 0; u < kChunksTogether; ++u) {
      chunk[u] = chunk_at(base + u * kThreads, all.by_chunks);
      const bool mine = base + u * kThreads < total;
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
      if (base + u * kThreads < total) end(chunk[u], sum[u]);
  }
  __device__ void send_rows() const {
    constexpr int kUnroll = 5;
    const int total = num_items(rows()) * chunks();
    for (int base = threadIdx.x; base < total; base += kSendingThreads * kUnroll) {
      uint4 data[kUnroll];
      Chunk chunk[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        chunk[u] = chunk_at(base + u * kSendingThreads, all.by_chunks);
        if (base + u * kSendingThreads < total) data[u] = ptx::ld_stream(sent()[chunk[u].item].from + 16 * chunk[u].at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (base + u * kSendingThreads < total && sent()[chunk[u].item].to != nullptr)
          ptx::st_stream(sent()[chunk[u].item].to + 16 * chunk[u].at, data[u]);
    }
  }
  // Of expanded rows: a row that is sent as the sum of its terms.
  struct SentSums {
    const CombineAtOnce &call;
    __device__ int num_terms(int i) const { return call.terms_of_row(i)[0]; }
    __device__ const uint8_t *term(int i, int t) const {
      return call.p().x() + static_cast<int64_t>(call.terms_of_row(i)[1 + t]) * call.p().row_bytes;
    }
    __device__ void begin(int, int, float (&)[8]) const {}
    __device__ void end(int i, int chunk, float (&sum)[8]) const {
      uint4 data = round_bf16(sum);
      if (num_terms(i) == kWrongTerms) data = {kNanPair, kNanPair, kNanPair, kNanPair};
      if (call.sent()[i].to != nullptr) ptx::st_stream(call.sent()[i].to + 16 * chunk, data);
    }
  };
  template <int kThreads, class Job>
  __device__ void sum_items(const Job &job, int items) const {
    const int total = items * chunks();
    for (int base = threadIdx.x; base < total; base += kThreads * kChunksTogether)
      sum_chunks<kThreads>(
          base, total, [&](const Chunk &chunk, float (&sum)[8]) { job.begin(chunk.item, chunk.at, sum); },
          [&](const Chunk &chunk) { return job.num_terms(chunk.item); },
          [&](const Chunk &chunk, int t) { return ptx::ld_stream(job.term(chunk.item, t) + 16ull * chunk.at); },
          [&](const Chunk &chunk, float (&sum)[8]) { job.end(chunk.item, chunk.at, sum); });
  }
  __device__ void send_weights() const {
    const int topk = p().num_topk;
    for (int j = threadIdx.x; j < num_items(rows()) * topk; j += kSendingThreads) {
      const Chunk choice = chunk_at(j, all.by_topk);
      const int row = row_at(choice.item), r = dest_of(row), number = row - dests()[r].first_row;
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

  // Whole warp, without a routing: lane r has the number of the row from rank r, -1: none.
  __device__ void keep_ranks(uint32_t *to, int head) const {
    const uint32_t chosen = __ballot_sync(kAllLanes, head >= 0);
    const int lane = lane_id(), before = lanes_before(chosen);
    if (lane == 0) to[0] = __popc(chosen);
    if (head < 0) return;
    to[1 + before] = static_cast<uint32_t>(p().ring.payload(lane, head) / 16);
    to[1 + num_ranks() + before] = static_cast<uint32_t>(p().ring.meta(lane, head) / 16);
  }
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
      if (!is_routed()) {
        keep_ranks(terms_of_token(i), head);
        continue;
      }
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
      if (term) to[1 + lanes_before(chosen)] = static_cast<uint32_t>((p().ring.payload(rank, slot)) / 16);
      if (lane < topk)
        to[1 + topk + lane] = rank < 0 ? kNothing : static_cast<uint32_t>((p().ring.meta(rank, slot)) / 16);
    }
  }
  struct TokenSums {
    const CombineAtOnce &call;
    __device__ uint64_t out_of(int i, int chunk) const {
      return static_cast<uint64_t>(item_at(i)) * call.p().row_bytes + 16ull * chunk;
    }
    __device__ int num_terms(int i) const { return static_cast<int>(call.terms_of_token(i)[0]); }
    __device__ const uint8_t *term(int i, int t) const { return call.here() + 16ull * call.terms_of_token(i)[1 + t]; }
    __device__ void add_biases(int i, int chunk, float (&sum)[8]) const {
#pragma unroll 1
      for (int b = 0; b < 2; ++b)
        if (call.p().bias(b) != nullptr) add_bf16(sum, ptx::ld_stream(call.p().bias(b) + out_of(i, chunk)));
    }
    __device__ void begin(int i, int chunk, float (&sum)[8]) const {
      if (call.is_routed()) add_biases(i, chunk, sum);
    }
    __device__ void end(int i, int chunk, float (&sum)[8]) const {
      if (!call.is_routed()) add_biases(i, chunk, sum);
      ptx::st_stream(call.p().combined_x() + out_of(i, chunk), round_bf16(sum));
    }
  };
  __device__ void take_weights() const {
    const int topk = p().num_topk;
    for (int j = threadIdx.x; p().combined_topk_weights() != nullptr && j < num_items(p().num_tokens) * topk;
         j += kAtOnceThreads) {
      const Chunk choice = chunk_at(j, all.by_topk);
      const uint32_t *terms = terms_of_token(choice.item), *from = terms + 1 + most_terms(p());
      const auto weight = [&](uint32_t at) { return reinterpret_cast<const float *>(here() + 16ull * at)[choice.at]; };
      float sum = 0;
      for (uint32_t t = 0; !is_routed() && t < terms[0]; ++t) sum += weight(from[t]);
      if (is_routed() && from[choice.at] != kNothing) sum = weight(from[choice.at]);
      p().combined_topk_weights()[static_cast<int64_t>(item_at(choice.item)) * topk + choice.at] = sum;
    }
  }

  // ---- The call

  __device__ void run(Handshake hand, uint64_t finished) const {
    const bool refused = (hand.mine.flags & kHandshakeRefused) != 0;
    hand.mine.flags |= kHandshakeAtOnce;
    if (blockIdx.x == 0) {
      post_handshake(s(), hand);
      publish_newest_by_last_warp(s().team);
    }
    set_up_combine(p(), dests(), sources());
    if (!refused) find_rows();
    if (!await_room(s(), hand, finished, is_routed())) return;
    bool good = true;
    if (is_control()) {
      good = !is_routed() || await_messages(s(), hand, lane_id(), kWarp);
    } else {
      if (!refused && is_expanded())
        sum_items<kSendingThreads>(SentSums{*this}, num_items(rows()));
      else if (!refused)
        send_rows();
      if (!refused) send_weights();
      announce_rows(s(), epoch);  // also where there are none: peers wait for them while they read the refusal
    }
    if (!refused) find_terms();
    if (!await_rows(s(), epoch, good)) return;
    sum_items<kAtOnceThreads>(TokenSums{*this}, num_items(p().num_tokens));
    take_weights();
  }
};

}  // namespace deepep

namespace deep_ep::intranode {
using namespace deepep;

__global__ void __launch_bounds__(kAtOnceThreads, 1) combine_at_once(const __grid_constant__ CombineAtOnceParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.combine.session;
  const MatrixEntry early = load_matrix_entry(p.combine.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x);
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const uint64_t finished = load_finished(s.team, p.combine.routing != DK_ROUTING_NONE);
    CombineAtOnce{p, shared, epoch}.run(combine_handshake(p.combine, epoch, early), finished);
  }
  finish_at_once(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.combine);
    if (threadIdx.x == 0) end_epoch_of(s.team, epoch);
  });
}

}  // namespace deep_ep::intranode
