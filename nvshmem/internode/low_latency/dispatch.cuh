// dispatch.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: tokens to the ranks of their experts. A
// token's row goes once to each rank that holds one of its experts. The sender casts and stages the row once, after a
// header with its position among this source's rows of each of its experts. A source numbers its rows for a destination
// in the order of its tokens, so it sends nothing about tokens without an expert there. One more message for each pair
// of ranks carries the counts. The receiver keeps which rows belong to a token, and their weights, for combine.
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
constexpr uint32_t kBringsWeights = 1u << 31;  // in each count that a source sends

// ---- Send -----------------------------------------------------------------------------------------------------------

struct SendRoute {                    // shared: of the token that a block sends now
  int32_t expert[kMaxTopk];           // -1: none, or an earlier entry names it
  float weight[kMaxTopk];             // summed over the entries that name it
  int32_t rank[kMaxTopk], num_ranks;  // destinations
  uint32_t before[2][kMaxTopk];       // earlier tokens for each of these experts, and for each of these ranks
};

// What a block loads of a token, of its first one before it knows whether the slots are empty.
constexpr int kIndices = 8;  // loads in flight together
struct TokenLoads {
  uint4 a, b;           // what this thread stages first: 32 bytes of x for FP8, two chunks kLlThreads apart of BF16
  int named[kIndices];  // of the earlier token of this thread, its first experts; the counting block's: load_entries
  int64_t index;        // the last warp's, of the token itself
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

// Counts the tokens: a block of its own if there is one without a token, else the control block.
__device__ __forceinline__ bool is_counting_block(const InternodeLlParams &p) {
  const int last = static_cast<int>(gridDim.x) - 1;
  return static_cast<int>(blockIdx.x) == (last > p.num_tokens ? last - 1 : last);
}

// Of the counting block: this lane's entry of tokens `first`, + kLlWarps, ...
__device__ __forceinline__ void load_entries(const InternodeLlParams &p, int first, int (&entry)[kIndices]) {
#pragma unroll
  for (int n = 0; n < kIndices; ++n) {
    const int64_t index = load_index_of_lane(p, first + n * kLlWarps);
    entry[n] = index >= 0 && index < p.num_experts ? static_cast<int>(index) : -1;  // the token's block reports others
  }
}

__device__ __forceinline__ bool is_last_warp() { return warp_id() == kLlWarps - 1; }

__device__ __forceinline__ TokenLoads load_token(const InternodeLlDispatchParams &d, int token) {
  const InternodeLlParams &p = d.call;
  const bool fp8 = p.format == DK_FORMAT_FP8;
  const int thread = static_cast<int>(threadIdx.x), first = fp8 ? 2 * thread : thread,
            second = fp8 ? first + 1 : first + kLlThreads, chunks = is_fp4(p) ? 0 : p.hidden / 8;
  const uint8_t *x = d.x + static_cast<uint64_t>(token) * 2 * p.hidden;
  TokenLoads loads{};
  if (token >= p.num_tokens) {
    if (is_counting_block(p)) load_entries(p, warp_id(), loads.named);
    return loads;
  }
  if (first < chunks) loads.a = ptx::ld_stream(x + 16 * first);
  if (second < chunks) loads.b = ptx::ld_stream(x + 16 * second);
  load_named(p, thread, token, 0, loads.named);
  if (!is_last_warp()) return loads;
  loads.index = load_index_of_lane(p, token);
  if (p.brings_weights()) loads.weight = load_weight_of_lane(p, token);
  return loads;
}

// By the last warp: the token's experts without repetitions, and the ranks that hold them and are not masked.
__device__ inline void read_route(const InternodeLlParams &p, const TokenLoads &loads, SendRoute *route) {
  const int lane = lane_id(), expert = checked_expert(p, loads.index), rank = expert < 0 ? -1 : expert / p.num_local;
  const bool serves = rank >= 0 && !is_masked(p.session, rank);
  const uint32_t below = (1u << lane) - 1, same_expert = __match_any_sync(kAllLanes, expert),
                 same_rank = __match_any_sync(kAllLanes, serves ? rank : -1);
  route->expert[lane] = (same_expert & below) != 0 ? -1 : expert;
  if (p.brings_weights()) route->weight[lane] = sum_of_same(p, expert, loads.weight, same_expert);
  const bool first = serves && (same_rank & below) == 0;
  const uint32_t ranks = __ballot_sync(kAllLanes, first);
  if (first) route->rank[__popc(ranks & below)] = rank;
  if (lane == 0) route->num_ranks = __popc(ranks);
  route->before[0][lane] = route->before[1][lane] = 0;
}

// Sets a bit for each of the route's experts and ranks that one of these indices names.
__device__ __forceinline__ void match_route(const InternodeLlParams &p, const SendRoute *route,
                                            const int (&named)[kIndices], uint32_t &experts, uint32_t &ranks) {
  for (int k = 0; k < p.num_topk && p.at.header_bytes != 0; ++k) {
    const int expert = route->expert[k];
    bool found = false;
#pragma unroll
    for (int j = 0; j < kIndices; ++j) found |= named[j] == expert;
    experts |= static_cast<uint32_t>(found && expert >= 0) << k;
  }
  for (int n = 0; n < route->num_ranks; ++n) {
    const int first = route->rank[n] * p.num_local;
    bool found = false;
#pragma unroll
    for (int j = 0; j < kIndices; ++j)
      found |= static_cast<uint32_t>(named[j] - first) < static_cast<uint32_t>(p.num_local);
    ranks |= static_cast<uint32_t>(found) << n;
  }
}

// Whole block: counts the tokens before this one that go to the same experts and to the same ranks.
__device__ inline void count_earlier_tokens(const InternodeLlParams &p, int token, const TokenLoads &loads,
                                            SendRoute *route) {
  for (int first = warp_id() * kWarp; first < token; first += kLlThreads) {
    const int earlier = first + lane_id();
    uint32_t experts = 0, ranks = 0;
    for (int base = 0; base < p.num_topk; base += kIndices) {
      if (base == 0 && earlier == static_cast<int>(threadIdx.x)) {
        match_route(p, route, loads.named, experts, ranks);
        continue;
      }
      int named[kIndices];
      load_named(p, earlier, token, base, named);
      match_route(p, route, named, experts, ranks);
    }
    for (int k = 0; k < p.num_topk; ++k) {
      const uint32_t of_expert = __popc(__ballot_sync(kAllLanes, experts >> k & 1)),
                     of_rank = __popc(__ballot_sync(kAllLanes, ranks >> k & 1));
      if (lane_id() == 0 && of_expert != 0) atomicAdd(&route->before[0][k], of_expert);
      if (lane_id() == 0 && of_rank != 0) atomicAdd(&route->before[1][k], of_rank);
    }
  }
}

// Whole block: casts the row to FP8, 16 channels a thread, and writes its scales after it.
__device__ inline void stage_fp8_row(const InternodeLlParams &p, const uint4 *x, const TokenLoads &loads, uint8_t *to) {
  const int pieces = p.hidden / 16;
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
    ptx::st_stream(to + 16 * at, cast_sixteen(a, b, scale.inverse));
    if (at % 8 == 0) reinterpret_cast<float *>(to + p.hidden)[at / 8] = scale.scale;
  }
}

// Whole block: FP4, the caller's bytes or a cast of the row, 32 channels a thread; the scales are written after it.
__device__ inline void stage_fp4_row(const InternodeLlDispatchParams &d, int token, uint8_t *to) {
  const InternodeLlParams &p = d.call;
  const bool casts = p.format == DK_FORMAT_NVFP4;
  const uint8_t *x = d.x + static_cast<uint64_t>(token) * (casts ? 2 * p.hidden : p.hidden / 2);
  const float factor = casts ? fp4_factor(d.x_scales) : 0;
  for (int at = threadIdx.x; at < p.hidden / 32; at += kLlThreads) {
    uint32_t scales = 0;
    ptx::st_stream(to + 16 * at, casts ? cast_fp4_piece(x + 64 * at, factor, scales) : ptx::ld_stream(x + 16 * at));
    if (casts) reinterpret_cast<uint16_t *>(to + p.hidden / 2)[at] = static_cast<uint16_t>(scales);
  }
  if (casts) return;
  const auto *scales =
      reinterpret_cast<const uint32_t *>(d.x_scales + static_cast<uint64_t>(token) * (p.hidden / kFp4Channels));
  for (int at = threadIdx.x; at < p.hidden / 64; at += kLlThreads)
    reinterpret_cast<uint32_t *>(to + p.hidden / 2)[at] = scales[at];
}

__device__ inline void stage_row(const InternodeLlDispatchParams &d, int token, const TokenLoads &loads, uint8_t *to) {
  const InternodeLlParams &p = d.call;
  if (is_fp4(p)) return stage_fp4_row(d, token, to);
  const auto *x = reinterpret_cast<const uint4 *>(d.x + static_cast<uint64_t>(token) * 2 * p.hidden);
  if (p.format == DK_FORMAT_FP8) return stage_fp8_row(p, x, loads, to);
  const int thread = static_cast<int>(threadIdx.x);
  for (int at = thread; at < p.hidden / 8; at += kLlThreads)
    ptx::st_stream(to + 16 * at, at == thread ? loads.a : at == thread + kLlThreads ? loads.b : x[at]);
}

// Whole block: the token's route, with the numbers of earlier tokens.
__device__ inline void find_route(const InternodeLlParams &p, int token, const TokenLoads &loads, SendRoute *route) {
  if (is_last_warp()) read_route(p, loads, route);
  __syncthreads();
  count_earlier_tokens(p, token, loads, route);
}

// Whole block, after find_route and a barrier.
__device__ inline void send_token(const InternodeLlDispatchParams &d, uint64_t epoch, int token,
                                  const TokenLoads &loads, SendRoute *route) {
  const InternodeLlParams &p = d.call;
  const Session &s = p.session;
  const int rank = s.team.rank, lane = lane_id(), num_ranks = route->num_ranks;
  const uint64_t at = row_at(p, epoch, rank, token);
  const bool brings_weights = p.brings_weights();
  uint8_t *stage = mine_at(p, at);
  stage_row(d, token, loads, stage + p.at.header_bytes);
  if (is_last_warp() && lane < p.num_topk && (p.at.header_bytes != 0 || brings_weights)) {
    const int expert = route->expert[lane];
    reinterpret_cast<uint32_t *>(stage + entries_at(p))[lane] =
        expert < 0 ? kNoEntry : static_cast<uint32_t>(expert) << 16 | route->before[0][lane];
    if (brings_weights) reinterpret_cast<float *>(stage + entry_weights_at(p))[lane] = route->weight[lane];
  }
  __syncthreads();
  mark(kMarkRowOut, threadIdx.x == 0);
  const auto delivery = [&](int n) -> Delivery {
    return {route->rank[n],
            brings_weights ? p.at.row_bytes : p.at.weights_at,
            at,
            row_word_at(p, epoch, rank, static_cast<int>(route->before[1][n])),
            signal_word(epoch, rank, static_cast<uint32_t>(token)),
            stage};
  };
  const int warps = max(1, kLlWarps / max(num_ranks, 1));  // for each rank
  for (int i = warp_id(); i < num_ranks * warps; i += kLlWarps)
    deliver_share(p, delivery(i / warps), {i % warps, warps});
  __syncthreads();
  for (int n = warp_id(); n < num_ranks && lane == 0; n += kLlWarps) {
    end_delivery(p, delivery(n));
    count_bytes(s, route->rank[n], dispatch_payload(p));
  }
}

// The counting block counts this rank's tokens for each expert and its rows for each rank. loads: if it has no token,
// entries of the first ones. counts: shared, [E] and then [R].
__device__ inline void count_tokens(const InternodeLlParams &p, const TokenLoads &loads, int32_t *counts) {
  for (int i = threadIdx.x; i < p.num_experts + p.session.team.num_ranks; i += kLlThreads) counts[i] = 0;
  __syncthreads();
  for (int first = warp_id(); first < p.num_tokens; first += kIndices * kLlWarps) {
    int entry[kIndices];
#pragma unroll
    for (int n = 0; n < kIndices; ++n) entry[n] = loads.named[n];
    if (first != warp_id() || static_cast<int>(blockIdx.x) < p.num_tokens) load_entries(p, first, entry);
#pragma unroll
    for (int n = 0; n < kIndices; ++n) {
      const int expert = entry[n], rank = expert < 0 ? -1 : expert / p.num_local;
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
  const uint64_t out = p.at.counts_out[slot_of(epoch)];
  for (int i = threadIdx.x; i < p.num_experts; i += kLlThreads)
    mine_at<uint32_t>(p, out + static_cast<uint64_t>(i / p.num_local) * p.at.counts_bytes)[i % p.num_local] =
        static_cast<uint32_t>(counts[i]) | (p.brings_weights() ? kBringsWeights : 0);
  __syncthreads();
  for (int r = warp_id(); r < team.num_ranks; r += kLlWarps) {
    if (__any_sync(kAllLanes, is_masked(p.session, r))) continue;
    const uint32_t rows = static_cast<uint32_t>(counts[p.num_experts + r]);
    deliver(
        p, {r, p.at.counts_bytes, p.at.counts_in[slot_of(epoch)] + static_cast<uint64_t>(team.rank) * p.at.counts_bytes,
            message_word_at(p, epoch, team.rank), signal_word(epoch, team.rank, rows),
            mine_at(p, out + static_cast<uint64_t>(r) * p.at.counts_bytes)});
  }
  __syncthreads();
}

// ---- Receive --------------------------------------------------------------------------------------------------------

struct SourceTables {  // shared
  uint64_t *calls;     // [R]: the source's number of this call, 0: it takes no part
  int32_t *base;       // [R][L]: at first the source's rows for the expert, then the index of the first of them
  int32_t *rows;       // [R]: rows that the source sends to this rank, as num_tokens_of() takes it
};

// The first warp of each group takes rows, and all others read the counts meanwhile.
constexpr int kTakers = kLlGroups * kWarp, kCounters = kLlThreads - kTakers;
__device__ __forceinline__ bool takes_rows() { return threadIdx.x % kLlGroupThreads < kWarp; }
__device__ __forceinline__ int counter_id() {
  const int thread = static_cast<int>(threadIdx.x);
  return thread - (thread / kLlGroupThreads + 1) * kWarp;
}
__device__ __forceinline__ void sync_counters() { ptx::barrier_among<kCounters>(1 + kLlGroups); }

// By the counters: waits for the counts of all sources.
__device__ inline void await_counts(const InternodeLlParams &p, uint64_t epoch, const SourceTables &tables) {
  const Session &s = p.session;
  for (int r = counter_id(); r < s.team.num_ranks; r += kCounters) {
    uint64_t theirs = tables.calls[r], word = 0;
    bool here = theirs != 0 && wait_or_mask(s, r, epoch, [&](int64_t &seen) {
                  word = ptx::ld_acquire_sys(mine_at<uint64_t>(p, message_word_at(p, theirs, r)));
                  seen = static_cast<int64_t>(word >> 32);
                  return is_from(word, theirs, r);
                });
    if (p.shrinks()) {
      const bool agreed = decide_arrival(s, epoch, r, here ? kArrived : kAbsent) == kArrived;
      uint64_t since = 1;  // long ago
      if (agreed && !here &&
          (theirs != 0 ||
           find_source_call(p, epoch, r, since, theirs))) {  // another block saw the counts: they are in memory
        word = ptx::ld_acquire_sys(mine_at<uint64_t>(p, message_word_at(p, theirs, r)));
        here = is_from(word, theirs, r);
      }
      here = here && agreed;
    }
    tables.rows[r] = here ? static_cast<int32_t>(min(signal_value(word), static_cast<uint32_t>(p.max_tokens))) : 0;
    tables.calls[r] = here ? theirs : 0;
  }
  sync_counters();
}

// By the counters: reads the counts and turns them into first rows. Block b of G writes the outputs of experts b,
// b + G, ...
__device__ inline void read_counts(const InternodeLlDispatchParams &d, const SourceTables &tables) {
  const InternodeLlParams &p = d.call;
  const int num_ranks = p.session.team.num_ranks;
  for (int i = counter_id(); i < p.num_experts; i += kCounters) {
    const int source = i / p.num_local;
    const uint64_t theirs = tables.calls[source];
    const auto *counts =
        mine_at<uint32_t>(p, p.at.counts_in[slot_of(theirs)] + static_cast<uint64_t>(source) * p.at.counts_bytes);
    const uint32_t count = theirs == 0 ? 0 : ptx::ld_relaxed_sys(counts + i % p.num_local);
    tables.base[i] = static_cast<int32_t>(min(count & ~kBringsWeights, static_cast<uint32_t>(p.max_tokens)));
    if (i % p.num_local == 0 && (count & kBringsWeights) != 0 && p.at.weights_at < p.at.row_bytes)
      tables.rows[source] |= kTableHasWeights;
  }
  sync_counters();
  for (int l = counter_id(); l < p.num_local; l += kCounters) {
    int64_t *range = p.layout_range + static_cast<int64_t>(l) * num_ranks;
    const bool mine = l % static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x);
    int first = 0;
    for (int r = 0; r < num_ranks; ++r) {
      const int count = tables.base[r * p.num_local + l];
      if (mine) range[r] = static_cast<int64_t>(first) << 32 | count;
      tables.base[r * p.num_local + l] = first;
      first += count;
    }
    if (!mine) continue;
    d.recv_count[l] = first;
    if (d.cumulative_stats != nullptr) d.cumulative_stats[l] += first;
  }
}

struct RowPlaces {           // shared, of a group of threads: where a received row belongs
  int64_t row[kMaxTopk];     // in [L, R*B]
  int64_t scales[kMaxTopk];  // index of its first scale
  const uint8_t *from;
  int32_t count, token;
};

struct TakenRow {  // of a lane: an entry of the header, and its weight
  uint32_t entry, weight;
  int32_t token;
  bool came;  // false: the source was lost, or has no such row
  const uint8_t *from;
};

// By a warp: waits for row `number` of a source's call `theirs`, and loads its header. Before the counts are known the
// wait ends, too, with counts that say that there is no such row.
__device__ inline TakenRow await_row(const InternodeLlParams &p, uint64_t epoch, uint64_t theirs, int source,
                                     int number, bool known) {
  const Session &s = p.session;
  const int lane = lane_id();
  uint64_t word = 0;
  bool came = true;
  if (lane == 0) {
    const auto *at = mine_at<uint64_t>(p, row_word_at(p, theirs, source, number)),
               *counts_at = mine_at<uint64_t>(p, message_word_at(p, theirs, source));
    bool none = false;
    came = wait_or_mask(s, source, epoch, [&](int64_t &seen) {
      const uint64_t counts = known ? 0 : ptx::ld_relaxed_sys(counts_at);
      word = ptx::ld_acquire_sys(at);
      seen = static_cast<int64_t>(word >> 32);
      none = is_from(counts, theirs, source) && static_cast<int>(signal_value(counts)) <= number;
      return none || is_from(word, theirs, source);
    });
    if (!came) s.team.scratch->late[source] = epoch;
    came = came && !none;
  }
  word = __shfl_sync(kAllLanes, word, 0);
  came = __shfl_sync(kAllLanes, static_cast<int>(came), 0) != 0;
  const int token = static_cast<int>(signal_value(word));
  const uint8_t *from = mine_at(p, row_at(p, theirs, source, min(token, p.max_tokens - 1)));
  const bool room = p.at.weights_at < p.at.row_bytes;
  TakenRow row{kNoEntry, 0, token, came, from};
  if ((room || p.at.header_bytes != 0) && came && lane < p.num_topk)
    row.entry = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(from + entries_at(p)) + lane);
  if (room && came && lane < p.num_topk)
    row.weight = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(from + entry_weights_at(p)) + lane);
  return row;
}

// By the same warp, the first of a group: lists the row's places; none if the source was lost.
__device__ inline void list_places(const InternodeLlParams &p, int table, int source, int number, const TakenRow &taken,
                                   const SourceTables &tables, RowPlaces *list) {
  const int lane = lane_id(), rank = p.session.team.rank;
  const bool has_weights = (tables.rows[source] & kTableHasWeights) != 0, came = taken.came;
  const uint32_t weight = has_weights ? taken.weight : 0;
  uint32_t entry = taken.entry;
  if (p.at.header_bytes == 0 && !has_weights) entry = lane == 0 ? static_cast<uint32_t>(rank) << 16 : kNoEntry;
  const int expert = static_cast<int>(entry >> 16) - rank * p.num_local,
            position = p.at.header_bytes == 0 ? number : static_cast<int>(entry & 0xffff);
  const bool row = came && entry != kNoEntry && expert >= 0 && expert < p.num_local && position < p.max_tokens;
  const uint32_t rows = __ballot_sync(kAllLanes, row);
  if (row) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const int64_t within = tables.base[source * p.num_local + expert] + position;
    list->row[n] = expert * p.rows_per_expert() + within;
    list->scales[n] = scale_places(p).first(expert, within);
  }
  keep_token(p, table, source, number, taken.token, rows, {expert, position, weight});
  if (lane == 0) {
    list->count = __popc(rows);
    list->token = taken.token;
    list->from = taken.from + p.at.header_bytes;
  }
}

// By a group: copies a row to its places.
__device__ inline void spread_row(const InternodeLlDispatchParams &d, const RowPlaces *list, int thread) {
  constexpr int kUnroll = 4;
  const InternodeLlParams &p = d.call;
  const int row_bytes = value_bytes(p), chunks = row_bytes / 16, count = list->count;
  const uint8_t *from = list->from;
  const bool packed = (p.flags & DK_LL_UE8M0) != 0;
  const auto *scales = reinterpret_cast<const uint32_t *>(from + row_bytes);
  const int64_t num_scales = p.format == DK_FORMAT_BF16 ? 0 : stored_scales(p), step = scale_places(p).step;
  const auto load_scale = [&](int64_t at) {
    if (!packed) return ptx::ld_relaxed_sys(scales + at);
    uint32_t value = 0;
    for (int part = 0; part < 4; ++part)
      value |= (ptx::ld_relaxed_sys(scales + 4 * at + part) >> 23 & 0xff) << (8 * part);
    return value;
  };
  const uint32_t first_scale = thread < num_scales ? load_scale(thread) : 0;  // under way with the row's
  for (int first = thread; first < chunks; first += kLlGroupThreads * kUnroll) {
    uint4 data[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (first + u * kLlGroupThreads < chunks) data[u] = ptx::ld_stream(from + 16 * (first + u * kLlGroupThreads));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = first + u * kLlGroupThreads;
      if (at >= chunks) continue;
      for (int n = 0; n < count; ++n)
        ptx::st_stream(d.recv_x + static_cast<uint64_t>(list->row[n]) * row_bytes + 16 * at, data[u]);
    }
  }
  for (int n = thread; n < count; n += kLlGroupThreads) p.src_info[list->row[n]] = list->token;
  for (int64_t at = thread; at < num_scales; at += kLlGroupThreads) {
    const uint32_t value = at == thread ? first_scale : load_scale(at);
    for (int n = 0; n < count; ++n) d.recv_scales[list->scales[n] + at * step] = value;
  }
}

// Groups take the first row of their first source while the counters wait for the counts and read them. Not with
// shrink: which call is the source's is not certain then.
__device__ inline void receive_rows(const InternodeLlDispatchParams &d, uint64_t epoch, int table,
                                    const SourceTables &tables, RowPlaces *lists) {
  const InternodeLlParams &p = d.call;
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads,
            thread = static_cast<int>(threadIdx.x) % kLlGroupThreads, first = static_cast<int>(blockIdx.x);
  RowPlaces *list = lists + group;
  const bool early = !p.shrinks() && group < p.session.team.num_ranks && first < p.max_tokens;
  TakenRow taken{};
  if (!takes_rows()) {
    await_counts(p, epoch, tables);
    mark(kMarkKnown, counter_id() == 0);
    read_counts(d, tables);
  } else if (early) {
    taken = await_row(p, epoch, epoch, group, first, false);
  }
  __syncthreads();
  for (int number = first; number < p.max_tokens; number += gridDim.x)
    for (int source = group; source < p.session.team.num_ranks; source += kLlGroups) {
      if (number >= num_tokens_of(tables.rows[source])) continue;
      if (thread < kWarp) {
        if (!early || number != first || source != group)
          taken = await_row(p, epoch, tables.calls[source], source, number, true);
        list_places(p, table, source, number, taken, tables, list);
      }
      mark(kMarkLastHeader, thread == 0);
      ptx::barrier_among<kLlGroupThreads>(1 + group);
      if (list->count > 0) spread_row(d, list, thread);
      ptx::barrier_among<kLlGroupThreads>(1 + group);
    }
}

// ---- End ------------------------------------------------------------------------------------------------------------

}  // namespace deepep::internode

namespace deep_ep::internode_ll {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(kLlThreads, 1) dispatch(const __grid_constant__ InternodeLlDispatchParams d) {
  // [R], then base [E] and rows [R], which first hold the counts that the send half sends.
  extern __shared__ __align__(16) uint64_t calls[];
  __shared__ SendRoute route;
  __shared__ RowPlaces lists[kLlGroups];
  const InternodeLlParams &p = d.call;
  begin_timeline();
  const int first = static_cast<int>(blockIdx.x);
  const TokenLoads loads = p.sends() ? load_token(d, first) : TokenLoads{};
  const uint64_t epoch = epoch_of_call(p), number = p.state->num_received + 1;
  const SlotLoads slots = p.sends() ? load_slots(p, epoch, false) : SlotLoads{};
  auto *base = reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks);
  if (begin(p.session)) {
    if (p.sends() && is_counting_block(p)) count_tokens(p, loads, base);
    if (is_control_block()) {
      post_credits(p);
      if (p.sends()) post_message(p, epoch, false);
    }
    if (p.sends() && first < p.num_tokens) find_route(p, first, loads, &route);
    mark(kMarkBegun, threadIdx.x == 0);
    const bool good = !p.sends() || await_empty_slots(p, epoch, slots, false);
    mark(kMarkEmpty, threadIdx.x == 0);
    if (p.sends() && good) {
      if (is_counting_block(p)) {
        send_token_counts(p, epoch, base);
        mark(kMarkCounted, threadIdx.x == 0);
      }
      if (first < p.num_tokens) send_token(d, epoch, first, loads, &route);
      for (int token = first + static_cast<int>(gridDim.x); token < p.num_tokens; token += gridDim.x) {
        const TokenLoads more = load_token(d, token);
        __syncthreads();  // the route of the token before has been used
        find_route(p, token, more, &route);
        __syncthreads();
        send_token(d, epoch, token, more, &route);
      }
      mark(kMarkSent, threadIdx.x == 0);
    }
    if (is_control_block()) publish_newest_by_last_warp(p.session.team);  // while rows are in flight
    if (p.receives() && good) {
      find_source_calls(p, epoch, calls);
      if (is_control_block()) check_low_latency_peers(p, calls);
      const SourceTables tables{calls, base, base + p.num_experts};
      receive_rows(d, epoch, static_cast<int>(number % kTables), tables, lists);
      mark(kMarkArrived, true);
      if (is_control_block()) await_callers_buffer(p, epoch);
    }
  }
  finish(p.session, [&](bool failed) {
    if (p.receives() && (failed || p.shrinks()))
      mend_outputs<kLlThreads>(p.session, epoch, outputs_of(p, d, p.num_local), failed);
    if (p.receives()) keep_dispatch(p, epoch, number, base + p.num_experts, failed);
    end_low_latency(p, epoch, calls, false, failed);
  });
  end_timeline(0, epoch);
}

}  // namespace deep_ep::internode_ll
