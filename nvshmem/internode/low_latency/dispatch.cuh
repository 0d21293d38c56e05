// dispatch.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: tokens to the ranks of their experts.
// The receiver waits for the counts and for each row by itself, copies rows to their places, and keeps which rows
// belong to a token, and their weights, for combine.
#pragma once
#include "internode/low_latency/dispatch_send.cuh"

namespace deepep::internode {

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

// With shrink: whether the blocks agree that a source's counts have come. Finds its call if another block saw them.
__device__ __noinline__ inline bool agree_on_counts(const InternodeLlParams &p, uint64_t epoch, int source, bool here,
                                                    uint64_t &theirs) {
  if (decide_arrival(p.session, epoch, source, here ? kArrived : kAbsent) != kArrived) return false;
  if (here) return true;
  if (theirs == 0 && !find_source_call(p, epoch, source, theirs)) return false;
  return is_from(ptx::ld_acquire_sys(mine_at<uint64_t>(p, message_word_at(p, theirs, source))), theirs, source);
}

// By the counters, with shrink: waits for the messages with the counts of all sources.
__device__ __noinline__ inline void await_sources(const InternodeLlParams &p, uint64_t epoch, uint64_t *calls) {
#pragma unroll 1
  for (int r = counter_id(); r < p.session.team.num_ranks; r += kCounters) {
    uint64_t theirs = calls[r];
    const bool here = theirs != 0 && await_message_word(p, epoch, theirs, r);
    calls[r] = agree_on_counts(p, epoch, r, here, theirs) ? theirs : 0;
  }
  sync_counters();
}

// By one thread: the value of a word of a source's counts, at most `most`, once it is there; 0 if it does not come.
__device__ inline int32_t await_count(const InternodeLlParams &p, uint64_t theirs, int source, int which, int most) {
  if (theirs == 0) return 0;
  const uint64_t *at = counts_from(p, theirs, source) + which;
  uint64_t word = ptx::ld_relaxed_sys(at);
  const bool here = is_from(word, theirs, source) || wait_or_mask(p.session, source, theirs, [&](int64_t &seen) {
                      word = ptx::ld_relaxed_sys(at);
                      seen = static_cast<int64_t>(word >> 32);
                      return is_from(word, theirs, source);
                    });
  return here ? min(static_cast<int32_t>(signal_value(word)), most) : 0;
}

// By the counters: waits for the counts of all sources and turns them into first rows. Block b of G writes the outputs
// of experts b, b + G, ...
__device__ inline void read_counts(const InternodeLlDispatchParams &d, const SourceTables &tables) {
  const InternodeLlParams &p = d.call;
  const int num_ranks = p.session.team.num_ranks, each = p.num_local + 1;
#pragma unroll 1
  for (int i = counter_id(); i < each * num_ranks; i += kCounters) {
    const int source = i / each, l = i % each;
    const uint64_t theirs = tables.calls[source];
    const int32_t count = await_count(p, theirs, source, l, p.max_tokens);  // of an expert, or of all rows
    if (l < p.num_local) {
      tables.base[source * p.num_local + l] = count;
    } else {
      const bool weights = await_count(p, theirs, source, p.num_local + kCountHasWeights, 1) != 0;
      tables.rows[source] = count | (weights && p.at.weights_at < p.at.row_bytes ? kTableHasWeights : 0);
    }
  }
  sync_counters();
  mark(kMarkKnown, counter_id() == 0);
#pragma unroll 1
  for (int l = counter_id(); l < p.num_local; l += kCounters) {
    int64_t *range = p.layout_range + static_cast<int64_t>(l) * num_ranks;
    const bool mine = l % static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x);
    int first = 0;
#pragma unroll 1
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
               *counts_at = counts_from(p, theirs, source) + p.num_local + kCountRows;
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
#pragma unroll 1
  for (int first = thread; first < chunks; first += kLlGroupThreads * kUnroll) {
    uint4 data[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (first + u * kLlGroupThreads < chunks) data[u] = ptx::ld_stream(from + 16 * (first + u * kLlGroupThreads));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = first + u * kLlGroupThreads;
      if (at >= chunks) continue;
#pragma unroll 1
      for (int n = 0; n < count; ++n)
        ptx::st_stream(d.recv_x + static_cast<uint64_t>(list->row[n]) * row_bytes + 16 * at, data[u]);
    }
  }
#pragma unroll 1
  for (int n = thread; n < count; n += kLlGroupThreads) p.src_info[list->row[n]] = list->token;
#pragma unroll 1
  for (int64_t at = thread; at < num_scales; at += kLlGroupThreads) {
    const uint32_t value = at == thread ? first_scale : load_scale(at);
#pragma unroll 1
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
    if (p.shrinks()) await_sources(p, epoch, tables.calls);
    read_counts(d, tables);
  } else if (early) {
    taken = await_row(p, epoch, epoch, group, first, false);
  }
  __syncthreads();
#pragma unroll 1
  for (int number = first; number < p.max_tokens; number += gridDim.x)
#pragma unroll 1
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
  TokenLoads loads = p.sends() ? load_token(d, first) : TokenLoads{};
  const uint64_t epoch = epoch_of_call(p), number = p.state->num_received + 1;
  const SlotLoads slots = p.sends() ? load_slots(p, epoch, false) : SlotLoads{};
  auto *base = reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks);
  set_source_calls(p, epoch, calls);
  if (begin(p.session)) {
    if (p.sends() && is_counting_block(p)) count_tokens(p, base);
    if (is_control_block()) post_low_latency(p, epoch, false);
    mark(kMarkBegun, threadIdx.x == 0);
    bool good = true;
    // One loop for a block's first token, which nearly all blocks have alone, and others: a second copy of the code
    // would lie between parts that are run (RATIONALE.md).
#pragma unroll 1
    for (int token = first; p.sends(); token += gridDim.x) {
      if (token < p.num_tokens && is_route_warp()) read_route(p, loads, &route);
      if (token == first) {
        good = await_empty_slots(p, epoch, slots, false);
        mark(kMarkEmpty, threadIdx.x == 0);
        if (good && is_counting_block(p)) {
          send_token_counts(p, epoch, base);
          mark(kMarkCounted, threadIdx.x == 0);
        }
      } else {
        __syncthreads();
      }
      if (!good || token >= p.num_tokens) break;
      send_token(d, epoch, token, loads, &route);
      if (token + static_cast<int>(gridDim.x) >= p.num_tokens) break;
      loads = load_token(d, token + static_cast<int>(gridDim.x));
      __syncthreads();  // the route has been used
    }
    if (p.sends() && good) mark(kMarkSent, threadIdx.x == 0);
    if (is_control_block()) publish_newest_by_last_warp(p.session.team);  // while rows are in flight
    if (p.receives() && good) {
      find_source_calls(p, epoch, calls);
      if (is_control_block()) check_low_latency_peers(p, calls);
      const SourceTables tables{calls, base, base + p.num_experts};
      receive_rows(d, epoch, static_cast<int>(number % kTables), tables, lists);
      mark(kMarkArrived, true);
      if (is_control_block()) end_receiving(p, epoch, true);
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
