// dispatch_send.cuh - libdeepep_nvshmem.so, low latency for teams with a transport, the sending half of dispatch. A
// token's row goes once to each rank that holds one of its experts. The sender casts the row once, stores it at each
// rank that it can store to and stages it for the others, after a header with its position among this source's rows of
// each of its experts. A source numbers its rows for a destination in the order of its tokens, so it sends nothing
// about tokens without an expert there. One more message for each pair of ranks carries the counts.
#pragma once
#include "cuda/impl/low_latency/compact_rows.cuh"
#include "internode/low_latency/table.cuh"

namespace deepep::internode {

struct InternodeLlDispatchParams : LowLatencyDispatchBuffers {
  InternodeLlParams call;
};

// Header: a word for each entry of topk_idx: the expert in the upper 16 bits, in the lower ones the number of the
// source's earlier tokens for it. kNoEntry: no expert, or one that an earlier entry names.
constexpr uint32_t kNoEntry = 0xffffffffu;
// With one expert a rank these words lie behind the payload, before the weights, and have no number.
__device__ __forceinline__ uint32_t entries_at(const InternodeLlParams &p) {
  return p.at.header_bytes != 0 ? 0 : p.at.weights_at;
}
__device__ __forceinline__ uint32_t entry_weights_at(const InternodeLlParams &p) {
  return p.at.weights_at + (p.at.header_bytes != 0 ? 0 : (p.at.row_bytes - p.at.weights_at) / 2);
}

struct SendRoute {                    // shared: of the token that a block sends now
  int32_t expert[kMaxTopk];           // -1: none, or an earlier entry names it
  float weight[kMaxTopk];             // summed over the entries that name it
  int32_t rank[kMaxTopk], num_ranks;  // destinations
  uint8_t *block[kMaxTopk];           // theirs; null: a NIC serves them
  uint8_t *stores[kMaxTopk + 1];      // blocks into which the row is stored, this rank's too where a NIC has to read it
  int32_t num_stores;
  bool puts;                     // to some of them
  uint32_t before[2][kMaxTopk];  // earlier tokens for each of these experts, and for each of these ranks
};

// What a block loads of a token, of its first one before it knows whether the slots are empty.
constexpr int kIndices = 8;                                                   // loads in flight together
constexpr int kCountThreads = 128, kCountTeams = kLlThreads / kCountThreads;  // that count earlier tokens
struct TokenLoads {
  uint4 a, b;           // what this thread stores first: 32 bytes of x for FP8, two chunks kLlThreads apart of BF16
  int named[kIndices];  // of the earlier token of this thread in its team, its first experts
  int64_t index;        // the route warp's, of the token itself
  float weight;
};

__device__ __forceinline__ void load_named(const InternodeLlParams &p, int earlier, int token, int base,
                                           int (&named)[kIndices]) {
#pragma unroll
  for (int j = 0; j < kIndices; ++j)
    named[j] = base + j < p.num_topk && earlier < token
                   ? static_cast<int>(
                         load_index(p.topk_idx, static_cast<int64_t>(earlier) * p.num_topk + base + j, p.index_bytes))
                   : -1;
}

// Whether they have one of the experts from `first` on.
__device__ __forceinline__ bool names_any(const int (&named)[kIndices], int first, int experts) {
  bool found = false;
#pragma unroll
  for (int j = 0; j < kIndices; ++j) found |= static_cast<uint32_t>(named[j] - first) < static_cast<uint32_t>(experts);
  return found;
}

// The warp of a block that reads a token's route and sends the row's words: one that waits for rows after that, while
// others read counts. It waits longest for its stores.
__device__ __forceinline__ bool is_route_warp() { return warp_id() == kLlWarps - kLlWarps / kLlGroups; }

__device__ __forceinline__ TokenLoads load_token(const InternodeLlDispatchParams &d, int token) {
  const InternodeLlParams &p = d.call;
  const bool fp8 = p.format == DK_FORMAT_FP8;
  const int thread = static_cast<int>(threadIdx.x), first = fp8 ? 2 * thread : thread,
            second = fp8 ? first + 1 : first + kLlThreads, chunks = is_fp4(p) ? 0 : p.hidden / 8;
  const uint8_t *x = d.x + static_cast<uint64_t>(token) * 2 * p.hidden;
  TokenLoads loads{};
  if (token >= p.num_tokens) return loads;
  if (first < chunks) loads.a = ptx::ld_stream(x + 16 * first);
  if (second < chunks) loads.b = ptx::ld_stream(x + 16 * second);
  load_named(p, thread % kCountThreads, token, 0, loads.named);
  if (!is_route_warp()) return loads;
  loads.index = load_index_of_lane(p, token);
  if (p.brings_weights()) loads.weight = load_weight_of_lane(p, token);
  return loads;
}

// By the route warp: the token's experts without repetitions, and the ranks that hold them and are not masked.
__device__ inline void read_route(const InternodeLlParams &p, const TokenLoads &loads, SendRoute *route) {
  const int lane = lane_id(), expert = checked_expert(p, loads.index), rank = expert < 0 ? -1 : expert / p.num_local;
  const bool serves = rank >= 0 && !is_masked(p.session, rank);
  const uint32_t below = (1u << lane) - 1, same_expert = __match_any_sync(kAllLanes, expert),
                 same_rank = __match_any_sync(kAllLanes, serves ? rank : -1);
  route->expert[lane] = (same_expert & below) != 0 ? -1 : expert;
  if (p.brings_weights()) route->weight[lane] = sum_of_same(p, expert, loads.weight, same_expert);
  const bool first = serves && (same_rank & below) == 0;
  uint8_t *block = first ? p.blocks[rank] : nullptr, *self = p.session.team.self;
  const uint32_t ranks = __ballot_sync(kAllLanes, first), stores = __ballot_sync(kAllLanes, block != nullptr);
  const bool puts = stores != ranks, stages = puts && !__any_sync(kAllLanes, block == self);
  if (first) {
    route->rank[__popc(ranks & below)] = rank;
    route->block[__popc(ranks & below)] = block;
  }
  if (block != nullptr) route->stores[__popc(stores & below)] = block;
  if (lane == 0) {
    if (stages) route->stores[__popc(stores)] = self;
    route->num_ranks = __popc(ranks);
    route->num_stores = __popc(stores) + (stages ? 1 : 0);
    route->puts = puts;
  }
  route->before[0][lane] = route->before[1][lane] = 0;
}

// Whole block: counts the tokens before this one that go to the same experts and to the same ranks. Each team of warps
// has some of the experts and ranks, and counts all tokens for them.
__device__ inline void count_earlier_tokens(const InternodeLlParams &p, int token, const TokenLoads &loads,
                                            SendRoute *route) {
  const int thread = static_cast<int>(threadIdx.x) % kCountThreads,
            team = static_cast<int>(threadIdx.x) / kCountThreads;
#pragma unroll 1
  for (int first = thread / kWarp * kWarp; first < token; first += kCountThreads) {
    const int earlier = first + lane_id();
    int named[kIndices];
    if (earlier == thread) {
#pragma unroll
      for (int j = 0; j < kIndices; ++j) named[j] = loads.named[j];
    } else {
      load_named(p, earlier, token, 0, named);
    }
    const auto count = [&](int first_expert, int experts, uint32_t *before) {
      bool found = names_any(named, first_expert, experts);
#pragma unroll 1
      for (int base = kIndices; base < p.num_topk; base += kIndices) {
        int others[kIndices];
        load_named(p, earlier, token, base, others);
        found |= names_any(others, first_expert, experts);
      }
      const uint32_t more = __popc(__ballot_sync(kAllLanes, found));
      if (lane_id() == 0 && more != 0) atomicAdd(before, more);
    };
#pragma unroll 1
    for (int k = team; k < p.num_topk && p.at.header_bytes != 0; k += kCountTeams)
      if (route->expert[k] >= 0) count(route->expert[k], 1, &route->before[0][k]);
#pragma unroll 1
    for (int n = team; n < route->num_ranks; n += kCountTeams)
      count(route->rank[n] * p.num_local, p.num_local, &route->before[1][n]);
  }
}

// Where a row is stored: at the same offset of several blocks.
struct RowStores {
  uint8_t *const *blocks;  // shared
  int count;
  uint64_t at;

  __device__ __forceinline__ void store(uint32_t offset, const uint4 &data) const {
#pragma unroll 1
    for (int n = 0; n < count; ++n) ptx::st_stream(blocks[n] + at + offset, data);
  }
  template <class T>
  __device__ __forceinline__ void store_value(uint32_t offset, T value) const {
#pragma unroll 1
    for (int n = 0; n < count; ++n) *reinterpret_cast<T *>(blocks[n] + at + offset) = value;
  }
};

// Whole block: casts the row to FP8, 16 channels a thread, and stores its scales after it.
__device__ inline void store_fp8_row(const InternodeLlParams &p, const uint4 *x, const TokenLoads &loads,
                                     const RowStores &to) {
  const int pieces = p.hidden / 16;
#pragma unroll 1
  for (int first = 0; first < pieces; first += kLlThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    const bool mine = at < pieces;
    uint4 a = loads.a, b = loads.b;
    if (first != 0) {
      const uint4 none{0, 0, 0, 0};
      a = mine ? x[2 * at] : none;
      b = mine ? x[2 * at + 1] : none;
    }
    const Fp8Scale scale = fp8_scale_of_eight(a, b, (p.flags & DK_LL_ROUND_SCALE) != 0);
    if (!mine) continue;
    to.store(16 * at, cast_sixteen(a, b, scale.inverse));
    if (at % 8 == 0) to.store_value(p.hidden + at / 2, scale.scale);
  }
}

// Whole block: FP4, the caller's bytes or a cast of the row, 32 channels a thread; the scales are stored after it.
__device__ __noinline__ inline void store_fp4_row(const InternodeLlDispatchParams &d, int token, const RowStores &to) {
  const InternodeLlParams &p = d.call;
  const bool casts = p.format == DK_FORMAT_NVFP4;
  const uint8_t *x = d.x + static_cast<uint64_t>(token) * (casts ? 2 * p.hidden : p.hidden / 2);
  const float factor = casts ? fp4_factor(d.x_scales) : 0;
#pragma unroll 1
  for (int at = threadIdx.x; at < p.hidden / 32; at += kLlThreads) {
    uint32_t scales = 0;
    to.store(16 * at, casts ? cast_fp4_piece(x + 64 * at, factor, scales) : ptx::ld_stream(x + 16 * at));
    if (casts) to.store_value(p.hidden / 2 + 2 * at, static_cast<uint16_t>(scales));
  }
  if (casts) return;
  const auto *scales =
      reinterpret_cast<const uint32_t *>(d.x_scales + static_cast<uint64_t>(token) * (p.hidden / kFp4Channels));
#pragma unroll 1
  for (int at = threadIdx.x; at < p.hidden / 64; at += kLlThreads) to.store_value(p.hidden / 2 + 4 * at, scales[at]);
}

__device__ inline void store_row(const InternodeLlDispatchParams &d, int token, const TokenLoads &loads,
                                 const RowStores &to) {
  const InternodeLlParams &p = d.call;
  if (is_fp4(p)) return store_fp4_row(d, token, to);
  const auto *x = reinterpret_cast<const uint4 *>(d.x + static_cast<uint64_t>(token) * 2 * p.hidden);
  if (p.format == DK_FORMAT_FP8) return store_fp8_row(p, x, loads, to);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int at = thread; at < p.hidden / 8; at += kLlThreads)
    to.store(16 * at, at == thread ? loads.a : at == thread + kLlThreads ? loads.b : x[at]);
}

// Whole block, after read_route and a barrier. Earlier tokens are counted while the row is under way.
__device__ inline void send_token(const InternodeLlDispatchParams &d, uint64_t epoch, int token,
                                  const TokenLoads &loads, SendRoute *route) {
  const InternodeLlParams &p = d.call;
  const Session &s = p.session;
  const int rank = s.team.rank, lane = lane_id(), num_ranks = route->num_ranks;
  const uint64_t at = row_at(p, epoch, rank, token);
  const bool brings_weights = p.brings_weights();
  const RowStores row{route->stores, route->num_stores, at};
  store_row(d, token, loads, {row.blocks, row.count, at + p.at.header_bytes});
  count_earlier_tokens(p, token, loads, route);
  __syncthreads();
  mark(kMarkRowOut, threadIdx.x == 0);
  const auto word_of = [&](int n) { return row_word_at(p, epoch, rank, static_cast<int>(route->before[1][n])); };
  const uint64_t word = signal_word(epoch, rank, static_cast<uint32_t>(token));
  if (is_route_warp()) {
    if (lane < p.num_topk && (p.at.header_bytes != 0 || brings_weights)) {
      const int expert = route->expert[lane];
      row.store_value(entries_at(p) + 4 * lane,
                      expert < 0 ? kNoEntry : static_cast<uint32_t>(expert) << 16 | route->before[0][lane]);
      if (brings_weights) row.store_value(entry_weights_at(p) + 4 * lane, route->weight[lane]);
    }
    __syncwarp();
    if (lane == 0) {  // one fence for all words
      ptx::fence_acq_rel_sys();
#pragma unroll 1
      for (int n = 0; n < num_ranks; ++n)
        if (route->block[n] != nullptr)
          ptx::st_relaxed_sys(reinterpret_cast<uint64_t *>(route->block[n] + word_of(n)), word);
    }
    if (lane < num_ranks) count_bytes(s, route->rank[lane], dispatch_payload(p));
  }
  if (!route->puts) return;
  __syncthreads();
#pragma unroll 1
  for (int n = warp_id(); n < num_ranks; n += kLlWarps)
    if (route->block[n] == nullptr)
      send_delivery(p, {route->rank[n], nullptr, brings_weights ? p.at.row_bytes : p.at.weights_at, at, word_of(n),
                        word, mine_at(p, at)});
}

// Counts the tokens: a block of its own if there is one without a token, else the control block.
__device__ __forceinline__ bool is_counting_block(const InternodeLlParams &p) {
  const int last = static_cast<int>(gridDim.x) - 1;
  return static_cast<int>(blockIdx.x) == (last > p.num_tokens ? last - 1 : last);
}

// The counting block counts this rank's tokens for each expert and its rows for each rank. counts: shared, [E] and then
// [R].
__device__ inline void count_tokens(const InternodeLlParams &p, int32_t *counts) {
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_experts + p.session.team.num_ranks; i += kLlThreads) counts[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int first = warp_id(); first < p.num_tokens; first += kIndices * kLlWarps) {
    int64_t index[kIndices];
#pragma unroll
    for (int n = 0; n < kIndices; ++n) index[n] = load_index_of_lane(p, first + n * kLlWarps);
#pragma unroll
    for (int n = 0; n < kIndices; ++n) {
      const int expert = checked_expert(p, index[n]), rank = expert < 0 ? -1 : expert / p.num_local;
      const uint32_t below = (1u << lane_id()) - 1, same_expert = __match_any_sync(kAllLanes, expert),
                     same_rank = __match_any_sync(kAllLanes, rank);
      if (expert >= 0 && (same_expert & below) == 0) atomicAdd(&counts[expert], 1);
      if (rank >= 0 && (same_rank & below) == 0) atomicAdd(&counts[p.num_experts + rank], 1);
    }
  }
  __syncthreads();
}
// The counting block sends them.
__device__ inline void send_token_counts(const InternodeLlParams &p, uint64_t epoch, const int32_t *counts) {
  const TeamView &team = p.session.team;
  const uint64_t out = p.at.counts_out[slot_of(epoch)],
                 in = p.at.counts_in[slot_of(epoch)] + static_cast<uint64_t>(team.rank) * p.at.counts_bytes;
  const int each = p.num_local + kCountWords;
#pragma unroll 1
  for (int i = threadIdx.x; i < each * team.num_ranks; i += kLlThreads) {
    const int r = i / each, l = i % each;
    uint8_t *block = is_masked(p.session, r) ? nullptr : p.blocks[r],
            *to = block != nullptr ? block + in : mine_at(p, out + static_cast<uint64_t>(r) * p.at.counts_bytes);
    const int32_t count = l < p.num_local                 ? counts[r * p.num_local + l]
                          : l - p.num_local == kCountRows ? counts[p.num_experts + r]
                                                          : p.brings_weights();
    ptx::st_relaxed_sys(reinterpret_cast<uint64_t *>(to) + l,
                        signal_word(epoch, team.rank, static_cast<uint32_t>(count)));
  }
  __syncthreads();
#pragma unroll 1
  for (int r = warp_id(); r < team.num_ranks; r += kLlWarps) {
    if (__any_sync(kAllLanes, is_masked(p.session, r))) continue;
    const uint32_t rows = static_cast<uint32_t>(counts[p.num_experts + r]);
    send_delivery(
        p, {r, p.blocks[r], p.at.counts_bytes, in, message_word_at(p, epoch, team.rank),
            signal_word(epoch, team.rank, rows), mine_at(p, out + static_cast<uint64_t>(r) * p.at.counts_bytes)});
  }
  __syncthreads();
}

}  // namespace deepep::internode
