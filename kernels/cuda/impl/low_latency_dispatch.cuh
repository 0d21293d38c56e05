// low_latency_dispatch.cuh - a token's row goes once to each rank that holds one of its experts, with a header that says which
// local experts and where in their order; the receiver spreads it. Block b sends tokens b, b + G, ... and receives the same ones
// of every source. Nothing is fenced: each word says by itself that it has arrived.
#pragma once
#include "cuda/impl/low_latency_common.cuh"

namespace deepep {

struct LowLatencyDispatchParams {
  LowLatencyParams call;
  const uint8_t *x;
  uint8_t *recv_x;
  uint32_t *recv_scales;
  int32_t *recv_count, *cumulative_stats;
};

// ---- Send ------------------------------------------------------------------------------------------------------------------

struct TokenRoute {             // of the token that a block sends now, in shared memory
  int32_t expert[kMaxTopk];     // -1: none, or named before
  float weight[kMaxTopk];       // summed over repetitions
  uint32_t position[kMaxTopk];  // among this rank's tokens for the expert
  int32_t rank[kMaxTopk], num_ranks;
  uint32_t pattern;
};

// Counts, for up to 32 things at once, the tokens below `end` of which found(token) has the thing's bit; into shared counts[32].
template <class Found> __device__ inline void count_tokens(int end, uint32_t *counts, Found found) {
  if (threadIdx.x < kWarp) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int first = warp_id() * kWarp; first < end; first += kLlThreads) {
    const int token = first + lane_id();
    const uint32_t bits = token < end ? found(token) : 0;
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t votes = __popc(__ballot_sync(kAllLanes, bits >> i & 1));
      if (lane_id() == i) mine = votes;
    }
    if (mine != 0) atomicAdd(&counts[lane_id()], mine);
  }
  __syncthreads();
}

// Tells the owners of experts b, b + G, ... how many of my tokens choose them, and how many tokens I have.
__device__ inline void send_expert_counts(const LowLatencyParams &p, const LowLatencyCall &call, uint32_t *counts) {
  const int blocks = static_cast<int>(gridDim.x), num_local = p.num_local();
  for (int first = 0; blockIdx.x + first * blocks < p.num_experts; first += 32) {
    count_tokens(p.num_tokens, counts, [&](int token) {
      uint32_t found = 0;
      for (int k = 0; k < p.num_topk; ++k) {
        const int64_t expert = load_index(p.topk_idx, static_cast<int64_t>(token) * p.num_topk + k, p.index_bytes);
        if (expert < 0 || expert >= p.num_experts) continue;
        const uint32_t round = static_cast<uint32_t>(expert) / static_cast<uint32_t>(blocks);
        if (static_cast<uint32_t>(expert) - round * blocks != blockIdx.x) continue;
        const int which = static_cast<int>(round) - first;
        if (which >= 0 && which < 32) found |= 1u << which;
      }
      return found;
    });
    const int expert = static_cast<int>(blockIdx.x) + (first + static_cast<int>(threadIdx.x)) * blocks;
    if (threadIdx.x < 32 && expert < p.num_experts && !is_masked(p.session, expert / num_local))
      ptx::st_relaxed_sys(count_word(p, call.dispatch, expert / num_local, p.session.team.rank, expert % num_local),
                          tagged(dispatch_tag(call.dispatch), static_cast<uint32_t>(p.num_tokens) << 16 | counts[threadIdx.x]));
    __syncthreads();
  }
}

// By the first warp: the token's experts without repetitions, the ranks that hold them.
__device__ inline void read_route(const LowLatencyParams &p, int token, TokenRoute *route) {
  const int lane = lane_id();
  int64_t expert = -1;
  float weight = 0;
  if (lane < p.num_topk) {
    const int64_t at = static_cast<int64_t>(token) * p.num_topk + lane;
    expert = load_index(p.topk_idx, at, p.index_bytes);
    weight = p.topk_weights != nullptr ? p.topk_weights[at] : 0;
    if (expert < -1 || expert >= p.num_experts) {
      report_failure(p.session, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert, 0);
      expert = -1;
    }
  }
  const int rank = expert < 0 ? -1 : static_cast<int>(expert) / p.num_local();
  bool repeated = false, rank_repeated = false;
  float sum = 0;
  for (int k = 0; k < p.num_topk; ++k) { // in this order, so that the sum repeats
    const int64_t other = __shfl_sync(kAllLanes, expert, k);
    const int other_rank = __shfl_sync(kAllLanes, rank, k);
    const float other_weight = __shfl_sync(kAllLanes, weight, k);
    if (other == expert) sum += other_weight;
    repeated |= k < lane && other == expert;
    rank_repeated |= k < lane && other_rank == rank;
  }
  route->expert[lane] = expert < 0 || repeated ? -1 : static_cast<int>(expert);
  route->weight[lane] = sum;
  const bool leads = rank >= 0 && !rank_repeated && !is_masked(p.session, rank);
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  if (leads) route->rank[__popc(leaders & ((1u << lane) - 1))] = rank;
  if (lane == 0) route->num_ranks = __popc(leaders);
}

__device__ inline void send_headers(const LowLatencyParams &p, const LowLatencyCall &call, int token, const TokenRoute *route) {
  const TeamView &team = p.session.team;
  const int num_local = p.num_local();
  for (int i = threadIdx.x; i < team.num_ranks * p.num_topk; i += kLlThreads) {
    const int r = i / p.num_topk, k = i % p.num_topk;
    if (is_masked(p.session, r)) continue;
    bool chosen = false;
    for (int n = 0; n < route->num_ranks; ++n) chosen |= route->rank[n] == r;
    if (!chosen && k > 0) continue;
    uint64_t *header = token_header(p, call.dispatch, r, team.rank, token);
    const int expert = route->expert[k];
    const bool here = expert >= 0 && expert / num_local == r;
    const uint32_t code = !chosen ? kEntryNothing : here ? entry_row(expert % num_local, static_cast<int>(route->position[k])) : 0;
    if (chosen) ptx::st_relaxed_sys(&header[2 * k + 1], tagged(dispatch_tag(call.dispatch), __float_as_uint(route->weight[k])));
    if (chosen && k == 0) ptx::st_relaxed_sys(&header[kPatternAt], tagged(dispatch_tag(call.dispatch), route->pattern));
    ptx::st_relaxed_sys(&header[2 * k], tagged(dispatch_tag(call.dispatch), code));
  }
}

// The row cast to FP8: 8 threads hold a block of 128 channels, 16 channels each.
__device__ inline void send_fp8_row(const LowLatencyDispatchParams &d, const LowLatencyCall &call, int token, const TokenRoute *route) {
  const LowLatencyParams &p = d.call;
  const int pieces = p.hidden / 16;
  const auto *x = reinterpret_cast<const uint4 *>(d.x + static_cast<uint64_t>(token) * 2 * p.hidden);
  for (int first = 0; first < pieces; first += kLlThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    const bool mine = at < pieces;
    const uint4 none{0, 0, 0, 0}, a = mine ? x[2 * at] : none, b = mine ? x[2 * at + 1] : none;
    float amax = 0;
    for (uint32_t pair : {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}) amax = greatest_magnitude(amax, pair);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
    const Fp8Scale scale = fp8_scale(amax, (p.flags & DK_LL_ROUND_SCALE) != 0);
    const uint4 cast = exclusive_or(cast_sixteen(a, b, scale.inverse), kAllOnes);
    for (int n = 0; mine && n < route->num_ranks; ++n) {
      uint8_t *row = token_row(p, call, route->rank[n], p.session.team.rank, token);
      ptx::st_relaxed_sys_v4(row + 16 * at, cast);
      if (at % 8 == 0)
        ptx::st_relaxed_sys(token_words(p, call, route->rank[n], p.session.team.rank, token) + at / 8, __float_as_uint(scale.scale) ^ kAllOnes);
    }
  }
}

// A pattern that no word of the row equals: nearly always the first one tried. Whole block.
__device__ inline uint32_t find_pattern(const uint4 *row, int chunks) {
  for (uint32_t attempt = 0;; ++attempt) {
    const uint32_t pattern = pattern_of(attempt);
    bool found = false;
    for (int at = threadIdx.x; at < chunks; at += kLlThreads) found |= holds(row[at], pattern);
    if (__syncthreads_or(found) == 0) return pattern;
  }
}
__device__ inline void send_bf16_row(const LowLatencyDispatchParams &d, const LowLatencyCall &call, int token, TokenRoute *route) {
  const LowLatencyParams &p = d.call;
  const int chunks = p.hidden / 8;
  const auto *x = reinterpret_cast<const uint4 *>(d.x + static_cast<uint64_t>(token) * 2 * p.hidden);
  const uint32_t pattern = find_pattern(x, chunks);
  if (threadIdx.x == 0) route->pattern = pattern;
  for (int at = threadIdx.x; at < chunks; at += kLlThreads) {
    const uint4 chunk = exclusive_or(x[at], pattern);
    for (int n = 0; n < route->num_ranks; ++n)
      ptx::st_relaxed_sys_v4(token_row(p, call, route->rank[n], p.session.team.rank, token) + 16 * at, chunk);
  }
  __syncthreads();
}

// False: the team failed.
__device__ inline bool send_tokens(const LowLatencyDispatchParams &d, const LowLatencyCall &call, TokenRoute *route, uint32_t *counts) {
  const LowLatencyParams &p = d.call;
  const bool fp8 = p.format == DK_FORMAT_FP8;
  const int first = blockIdx.x;
  const bool empty = await_empty_slots(p, call, [&] {
    if (first < p.num_tokens) read_route(p, first, route);
  });
  if (!empty) return false;
  for (int token = first; token < p.num_tokens; token += gridDim.x) {
    if (token != first && warp_id() == 0) read_route(p, token, route);
    __syncthreads();
    if (fp8) send_fp8_row(d, call, token, route);
    else send_bf16_row(d, call, token, route);
    if (token == first) send_expert_counts(p, call, counts); // the rows are on their way meanwhile
    // Where the row stands among those of its experts.
    count_tokens(token, counts, [&](int before) {
      uint32_t found = 0;
      for (int j = 0; j < p.num_topk; ++j) {
        const int64_t expert = load_index(p.topk_idx, static_cast<int64_t>(before) * p.num_topk + j, p.index_bytes);
        for (int k = 0; k < p.num_topk; ++k) found |= static_cast<uint32_t>(expert >= 0 && expert == route->expert[k]) << k;
      }
      return found;
    });
    if (threadIdx.x < kMaxTopk) route->position[threadIdx.x] = counts[threadIdx.x];
    __syncthreads();
    send_headers(p, call, token, route);
    for (int n = threadIdx.x; n < route->num_ranks; n += kLlThreads) // payload, for the statistics
      atomicAdd(reinterpret_cast<unsigned long long *>(&p.session.team.scratch->sent_bytes[route->rank[n]]),
                static_cast<unsigned long long>(fp8 ? p.hidden + p.hidden / 32 : 2 * p.hidden));
    __syncthreads();
  }
  if (first >= p.num_tokens) send_expert_counts(p, call, counts);
  return true;
}

// ---- Receive ----------------------------------------------------------------------------------------------------------------

enum : uint64_t { kArrived = 1, kAbsent = 2 };

// With shrink all blocks must agree whether a source's counts came: the first to say decides.
__device__ inline uint64_t decide(const Session &s, const LowLatencyCall &call, int source, uint64_t mine) {
  auto *verdict = reinterpret_cast<unsigned long long *>(&s.team.scratch->verdict[source]);
  for (;;) {
    const unsigned long long before = ptx::ld_relaxed_gpu(&s.team.scratch->verdict[source]);
    if (before >> 2 == call.epoch) return before & 3;
    if (atomicCAS(verdict, before, call.epoch << 2 | mine) == before) return mine;
  }
}

struct ReceiveTables {          // shared
  int32_t *base;                // [R][L]: first count, then first row of the source's rows for the expert
  int32_t *tokens;              // [R]: tokens of the source, 0: it takes no part
  LowLatencyCall *calls;        // [R]: the source's own number of this call
};

// Whole block: waits for all counts and makes tables of them.
__device__ inline void read_counts(const LowLatencyDispatchParams &d, const LowLatencyCall &call, const ReceiveTables &tables) {
  const LowLatencyParams &p = d.call;
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks, num_local = p.num_local();
  const bool shrink = (s.team.flags & DK_TEAM_SHRINK) != 0;
  for (int r = threadIdx.x; r < num_ranks; r += kLlThreads) tables.tokens[r] = tables.calls[r].epoch == 0 ? -1 : 0;
  __syncthreads();
  bool all_came = true;
  for (int i = threadIdx.x; i < p.num_experts; i += kLlThreads) {
    const int source = i / num_local;
    const uint64_t dispatch = tables.calls[source].dispatch;
    const uint64_t *word = count_word(p, dispatch, s.team.rank, source, i % num_local);
    uint64_t value = 0;
    bool came = tables.calls[source].epoch != 0; // not tokens[source]: another thread writes it now
    if (came)
      came = wait_or_mask(s, source, call.epoch, [&](int64_t &seen) {
        value = ptx::ld_relaxed_sys(word);
        seen = static_cast<int64_t>(value >> 32);
        return has_tag(value, dispatch_tag(dispatch));
      });
    tables.base[i] = came ? static_cast<int32_t>(value & 0xffff) : -1;
    if (came && i % num_local == 0) tables.tokens[source] = static_cast<int32_t>(value >> 16 & 0xffff);
    all_came &= came;
  }
  const bool complete = __syncthreads_and(all_came) != 0 && !shrink;
  for (int r = threadIdx.x; r < num_ranks && !complete; r += kLlThreads) {
    bool here = tables.tokens[r] >= 0;
    for (int l = 0; l < num_local; ++l) here &= tables.base[r * num_local + l] >= 0;
    // Another block may have seen everything of a source that this one gave up: then it is all in memory.
    if (tables.calls[r].epoch == 0 && shrink) (void)decide(s, call, r, kAbsent);
    if (shrink && tables.calls[r].epoch != 0 && decide(s, call, r, here ? kArrived : kAbsent) == kArrived) {
      const uint64_t dispatch = tables.calls[r].dispatch;
      for (int l = 0; !here && l < num_local; ++l)
        tables.base[r * num_local + l] = static_cast<int32_t>(ptx::ld_relaxed_sys(count_word(p, dispatch, s.team.rank, r, l)) & 0xffff);
      tables.tokens[r] = static_cast<int32_t>(ptx::ld_relaxed_sys(count_word(p, dispatch, s.team.rank, r, 0)) >> 16 & 0xffff);
      here = true;
    } else if (shrink) {
      here = false;
    }
    if (here) continue;
    tables.tokens[r] = 0;
    for (int l = 0; l < num_local; ++l) tables.base[r * num_local + l] = 0;
  }
  if (!complete) __syncthreads();
  // Counts become first rows; block b writes out what experts b, b + G, ... get.
  for (int l = threadIdx.x; l < num_local; l += kLlThreads) {
    int64_t *range = p.layout_range + static_cast<int64_t>(l) * num_ranks;
    const bool mine = l % static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x);
    int first = 0;
    for (int r = 0; r < num_ranks; ++r) {
      const int count = tables.base[r * num_local + l];
      if (mine) range[r] = static_cast<int64_t>(first) << 32 | count;
      tables.base[r * num_local + l] = first;
      first += count;
    }
    if (!mine) continue;
    d.recv_count[l] = first;
    if (d.cumulative_stats != nullptr) d.cumulative_stats[l] += first;
  }
  __syncthreads();
}

struct RowList {                // shared, of a group: where a row goes
  int64_t row[kMaxTopk];        // of [L, R*B]
  int64_t scales[kMaxTopk];     // its first scale
  int32_t count;
  uint32_t pattern;
};
__device__ inline int64_t stored_scales(const LowLatencyParams &p) { return p.hidden / ((p.flags & DK_LL_UE8M0) != 0 ? 4 * kScaleChannels : kScaleChannels); }

// By the first warp of a group: the header of a token; the list is empty if it has nothing here or never came.
__device__ inline void read_header(const LowLatencyParams &p, const LowLatencyCall &call, int source, int token, const ReceiveTables &tables,
                                   RowList *list) {
  const Session &s = p.session;
  const int lane = lane_id();
  const uint64_t dispatch = tables.calls[source].dispatch;
  const uint64_t *header = token_header(p, dispatch, s.team.rank, source, token);
  uint64_t entry = 0, pattern = tagged(dispatch_tag(dispatch), kAllOnes);
  int peer = -1;
  uint64_t waited = 0;
  const uint32_t code = warp_wait_until(
      s, peer, waited,
      [&] {
        if (lane < p.num_topk) entry = ptx::ld_relaxed_sys(&header[2 * lane]);
        if (lane == 0 && p.format != DK_FORMAT_FP8) pattern = ptx::ld_relaxed_sys(&header[kPatternAt]);
        const bool here = (lane >= p.num_topk || has_tag(entry, dispatch_tag(dispatch))) && has_tag(pattern, dispatch_tag(dispatch));
        const bool nothing = lane == 0 && has_tag(entry, dispatch_tag(dispatch)) && (entry & kEntryNothing) != 0;
        return __all_sync(kAllLanes, here) != 0 || __any_sync(kAllLanes, nothing) != 0;
      },
      [&] { return lane == 0 ? source : -1; });
  bool row = code == 0 && lane < p.num_topk && has_tag(entry, dispatch_tag(dispatch)) && (entry & kEntryRow) != 0;
  const int expert = entry_expert(static_cast<uint32_t>(entry)), position = entry_position(static_cast<uint32_t>(entry));
  row = row && expert < p.num_local() && position < p.max_tokens;
  const uint32_t rows = __ballot_sync(kAllLanes, row);
  if (row) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const int64_t within = tables.base[source * p.num_local() + expert] + position;
    list->row[n] = expert * p.rows_per_expert() + within;
    list->scales[n] = expert * stored_scales(p) * p.rows_per_expert() + within;
  }
  if (lane != 0) return;
  list->count = __popc(rows), list->pattern = static_cast<uint32_t>(pattern);
  if (code == 0) return;
  if (!mask_instead(s, code, source)) report_failure(s, code, culprit(s, code, source), DK_FIELD_NONE, static_cast<int64_t>(call.epoch), 0, waited);
  s.team.scratch->late[source] = call.epoch;
}

// What a thread loads before it knows where to: if it has arrived by then, a round trip to memory is saved.
constexpr int kSpreadUnroll = 4;
struct EarlyLoads { uint4 data[kSpreadUnroll]; uint32_t word; };
__device__ inline EarlyLoads load_early(const LowLatencyParams &p, const uint8_t *row, const uint32_t *words, int row_bytes, int thread) {
  EarlyLoads early;
#pragma unroll
  for (int u = 0; u < kSpreadUnroll; ++u)
    if (thread + u * kLlGroupThreads < row_bytes / 16) early.data[u] = ptx::ld_relaxed_sys_v4(row + 16 * (thread + u * kLlGroupThreads));
  early.word = p.format == DK_FORMAT_FP8 && (p.flags & DK_LL_UE8M0) == 0 && thread < p.hidden / kScaleChannels ? ptx::ld_relaxed_sys(words + thread) : 0;
  return early;
}

// By a group: a row from the slot to its places, the slot is emptied. False: it did not come whole.
__device__ inline bool spread_row(const LowLatencyDispatchParams &d, const LowLatencyCall &call, int source, uint8_t *from, int row_bytes,
                                  const RowList *list, EarlyLoads &early, int thread) {
  const Session &s = d.call.session;
  const int chunks = row_bytes / 16;
  for (int first = thread; first < chunks; first += kLlGroupThreads * kSpreadUnroll) {
#pragma unroll
    for (int u = 0; u < kSpreadUnroll; ++u)
      if (first != thread && first + u * kLlGroupThreads < chunks) early.data[u] = ptx::ld_relaxed_sys_v4(from + 16 * (first + u * kLlGroupThreads));
#pragma unroll
    for (int u = 0; u < kSpreadUnroll; ++u) {
      const int at = first + u * kLlGroupThreads;
      if (at >= chunks) continue;
      if (!take_chunk(s, source, call.epoch, from + 16 * at, early.data[u])) return false;
      const uint4 data = exclusive_or(early.data[u], list->pattern);
      for (int n = 0; n < list->count; ++n)
        ptx::st_stream(d.recv_x + static_cast<uint64_t>(list->row[n]) * row_bytes + 16 * at, data);
    }
  }
  return true;
}

__device__ inline bool spread_scales(const LowLatencyDispatchParams &d, const LowLatencyCall &call, int source, uint32_t *from,
                                     const RowList *list, uint32_t early, int thread) {
  const LowLatencyParams &p = d.call;
  const bool packed = (p.flags & DK_LL_UE8M0) != 0;
  const int64_t rows = p.rows_per_expert(), stored = stored_scales(p);
  for (int64_t at = thread; at < stored; at += kLlGroupThreads) {
    uint32_t value = 0;
    for (int part = 0; part < (packed ? 4 : 1); ++part) {
      uint32_t word = at == thread ? early : 0;
      if (!take_word(p.session, source, call.epoch, from + (packed ? 4 * at + part : at), word)) return false;
      word ^= kAllOnes;
      value = packed ? value | (word >> 23 & 0xff) << (8 * part) : word;
    }
    for (int n = 0; n < list->count; ++n) d.recv_scales[list->scales[n] + at * rows] = value;
  }
  return true;
}

__device__ inline void receive_tokens(const LowLatencyDispatchParams &d, const LowLatencyCall &call, const ReceiveTables &tables, RowList *lists) {
  const LowLatencyParams &p = d.call;
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads, thread = static_cast<int>(threadIdx.x) % kLlGroupThreads;
  const int row_bytes = p.format == DK_FORMAT_FP8 ? p.hidden : 2 * p.hidden, rank = p.session.team.rank;
  RowList *list = lists + group;
  for (int token = blockIdx.x; token < p.max_tokens; token += gridDim.x)
    for (int source = group; source < p.session.team.num_ranks; source += kLlGroups) {
      if (token >= tables.tokens[source]) continue;
      const LowLatencyCall &theirs = tables.calls[source];
      uint8_t *row = token_row(p, theirs, rank, source, token);
      uint32_t *words = token_words(p, theirs, rank, source, token);
      EarlyLoads early = load_early(p, row, words, row_bytes, thread);
      if (thread < kWarp) read_header(p, call, source, token, tables, list);
      ptx::barrier_among<kLlGroupThreads>(1 + group);
      if (list->count > 0) {
        bool whole = p.format != DK_FORMAT_FP8 || spread_scales(d, theirs, source, words, list, early.word, thread);
        whole = spread_row(d, theirs, source, row, row_bytes, list, early, thread) && whole;
        if (!whole) p.session.team.scratch->late[source] = call.epoch;
        for (int n = thread; n < list->count; n += kLlGroupThreads) p.src_info[list->row[n]] = token;
      }
      ptx::barrier_among<kLlGroupThreads>(1 + group);
    }
}

// ---- End --------------------------------------------------------------------------------------------------------------------

// A source whose rows did not all come is taken out; rows behind it move up. By the last block, only after a rank was lost.
__device__ inline void close_gaps(const LowLatencyDispatchParams &d, const LowLatencyCall &call) {
  const LowLatencyParams &p = d.call;
  const int num_ranks = p.session.team.num_ranks;
  const int64_t rows = p.rows_per_expert(), words = p.format != DK_FORMAT_FP8 ? 0 : p.hidden / ((p.flags & DK_LL_UE8M0) != 0 ? 512 : 128);
  const int chunks = (p.format == DK_FORMAT_FP8 ? p.hidden : 2 * p.hidden) / 16;
  for (int64_t l = 0; l < p.num_local(); ++l) {
    int64_t next = 0;
    auto *x = reinterpret_cast<uint4 *>(d.recv_x) + l * rows * chunks;
    for (int r = 0; r < num_ranks; ++r) {
      const int64_t range = p.layout_range[l * num_ranks + r], first = range >> 32;
      const int64_t count = p.session.team.scratch->late[r] == call.epoch ? 0 : range & 0xffffffff;
      for (int64_t i = 0; i < count && first != next; ++i) {
        for (int at = threadIdx.x; at < chunks; at += kLlThreads) x[(next + i) * chunks + at] = x[(first + i) * chunks + at];
        for (int64_t w = threadIdx.x; w < words; w += kLlThreads)
          d.recv_scales[(l * words + w) * rows + next + i] = d.recv_scales[(l * words + w) * rows + first + i];
        if (threadIdx.x == 0) p.src_info[l * rows + next + i] = p.src_info[l * rows + first + i];
        __syncthreads();
      }
      __syncthreads();
      if (threadIdx.x == 0) p.layout_range[l * num_ranks + r] = next << 32 | count;
      next += count;
    }
  }
  __syncthreads();
}

// A source was lost after its counts had come, or the call has failed: what the others wrote is put right.
__device__ inline void mend_outputs(const LowLatencyDispatchParams &d, const LowLatencyCall &call, bool failed) {
  const LowLatencyParams &p = d.call;
  const int num_ranks = p.session.team.num_ranks;
  bool late = false;
  for (int r = threadIdx.x; r < num_ranks; r += kLlThreads) late |= p.session.team.scratch->late[r] == call.epoch;
  if (__syncthreads_or(late) != 0 && !failed) close_gaps(d, call);
  for (int l = threadIdx.x; l < p.num_local(); l += kLlThreads) {
    int total = 0;
    for (int r = 0; r < num_ranks; ++r) {
      int64_t *range = p.layout_range + static_cast<int64_t>(l) * num_ranks + r;
      if (failed) *range = 0;
      total += static_cast<int>(*range & 0xffffffff);
    }
    if (d.cumulative_stats != nullptr && !failed) d.cumulative_stats[l] += total - d.recv_count[l];
    d.recv_count[l] = total;
  }
}

__device__ inline void finish_dispatch(const LowLatencyDispatchParams &d, const LowLatencyCall &call, const LowLatencyCall *calls, bool failed) {
  const LowLatencyParams &p = d.call;
  if (p.receives()) {
    if (failed || (p.session.team.flags & DK_TEAM_SHRINK) != 0) mend_outputs(d, call, failed);
    if (threadIdx.x == 0)
      p.session.team.scratch->routing[call.dispatch % kRoutingCopies] = {
          reinterpret_cast<uint64_t>(p.src_info), failed ? 0 : call.dispatch, p.topk_weights != nullptr, static_cast<uint64_t>(p.num_topk)};
  }
  end_low_latency(p, call, calls, failed);
}

__global__ void __launch_bounds__(kLlThreads, 1) low_latency_dispatch_kernel(const __grid_constant__ LowLatencyDispatchParams d) {
  extern __shared__ __align__(16) LowLatencyCall calls[]; // [R], then base [E], tokens [R]
  __shared__ TokenRoute route;
  __shared__ RowList lists[kLlGroups];
  __shared__ uint32_t counts[32];
  const LowLatencyParams &p = d.call;
  const LowLatencyCall call = low_latency_call(p, true);
  if (p.sends() && static_cast<int>(blockIdx.x) < p.num_tokens && threadIdx.x < ceil_div(p.hidden, 64)) // lines of 128 bytes
    ptx::prefetch_l2(d.x + blockIdx.x * 2ull * p.hidden + 128ull * threadIdx.x);
  if (begin(p.session)) {
    if (is_clerk()) post_low_latency(p, call);
    bool good = true;
    if (p.sends()) good = send_tokens(d, call, &route, counts);
    if (is_clerk()) publish_newest_by_last_warp(p.session.team); // rows are on their way meanwhile
    if (p.receives() && good) {
      find_source_calls(p, call, calls);
      if (is_clerk()) check_low_latency_peers(p, calls);
      auto *base = reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks);
      const ReceiveTables tables{base, base + p.num_experts, calls};
      read_counts(d, call, tables);
      receive_tokens(d, call, tables, lists);
    }
  }
  finish(p.session, [&](bool failed) { finish_dispatch(d, call, calls, failed); });
}

}  // namespace deepep
