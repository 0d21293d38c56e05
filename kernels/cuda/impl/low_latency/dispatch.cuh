// dispatch.cuh - dispatch, the receiving half and the kernel: blocks copy the rows that arrive to their experts' rows.
// Block b receives tokens b, b + W, ... of every source. Nothing is fenced: each word shows by itself that it has
// arrived.
#pragma once
#include "cuda/impl/low_latency/compact_rows.cuh"
#include "cuda/impl/low_latency/dispatch_send.cuh"

namespace deepep {

// ---- Receive --------------------------------------------------------------------------------------------------------

struct ReceiveTables {    // shared
  int32_t *base;          // [R][L]: first count, then first row of the source's rows for the expert
  int32_t *tokens;        // [R]: tokens of the source, 0: it takes no part
  LowLatencyCall *calls;  // [R]: the source's own number of this call
};

// Whole block: waits for all counts and fills the tables.
__device__ inline void read_counts(const LowLatencyDispatchParams &p, const LowLatencyCall &call,
                                   const ReceiveTables &tables) {
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks, num_local = p.num_local();
  const bool shrink = (s.team.flags & DK_TEAM_SHRINK) != 0;
  for (int r = threadIdx.x; r < num_ranks; r += kLlThreads) tables.tokens[r] = tables.calls[r].epoch == 0 ? -1 : 0;
  __syncthreads();
  bool all_came = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_experts; i += kLlThreads) {
    const int source = p.by_local.quotient(i), l = i - source * num_local;
    const uint64_t dispatch = tables.calls[source].dispatch;
    const uint64_t *word = count_word(p, own_block(p), dispatch, source, l);
    uint64_t value = 0;
    bool came = tables.calls[source].epoch != 0;  // not tokens[source]: another thread writes it now
    if (came)
      came = wait_or_mask(s, source, call.epoch, [&](int64_t &seen) {
        value = ptx::ld_relaxed_sys(word);
        seen = static_cast<int64_t>(value >> 32);
        return has_tag(value, dispatch_tag(dispatch));
      });
    tables.base[i] = came ? static_cast<int32_t>(value & 0xffff) : -1;
    if (came && l == 0) tables.tokens[source] = static_cast<int32_t>(value >> 16 & 0xffff);
    all_came &= came;
  }
  const bool complete = __syncthreads_and(all_came) != 0 && !shrink;
  for (int r = threadIdx.x; r < num_ranks && !complete; r += kLlThreads) {
    bool here = tables.tokens[r] >= 0;
    for (int l = 0; l < num_local; ++l) here &= tables.base[r * num_local + l] >= 0;
    // Another block may have seen everything of a source that this one gave up: then it is all in memory.
    if (tables.calls[r].epoch == 0 && shrink) (void)decide_arrival(s, call.epoch, r, kAbsent);
    if (shrink && tables.calls[r].epoch != 0 &&
        decide_arrival(s, call.epoch, r, here ? kArrived : kAbsent) == kArrived) {
      const uint64_t dispatch = tables.calls[r].dispatch;
      for (int l = 0; !here && l < num_local; ++l)
        tables.base[r * num_local + l] =
            static_cast<int32_t>(ptx::ld_relaxed_sys(count_word(p, own_block(p), dispatch, r, l)) & 0xffff);
      tables.tokens[r] =
          static_cast<int32_t>(ptx::ld_relaxed_sys(count_word(p, own_block(p), dispatch, r, 0)) >> 16 & 0xffff);
      here = true;
    } else if (shrink) {
      here = false;
    }
    if (here) continue;
    tables.tokens[r] = 0;
    for (int l = 0; l < num_local; ++l) tables.base[r * num_local + l] = 0;
  }
  if (!complete) __syncthreads();
  // Counts become first rows; block b writes the outputs of experts b, b + W, ...
  for (int l = threadIdx.x; l < num_local; l += kLlThreads) {
    int64_t *range = p.layout_range() + static_cast<int64_t>(l) * num_ranks;
    const bool mine = l % num_workers() == static_cast<int>(blockIdx.x);
    int first = 0;
#pragma unroll 1
    for (int r = 0; r < num_ranks; ++r) {
      const int count = tables.base[r * num_local + l];
      if (mine) range[r] = static_cast<int64_t>(first) << 32 | count;
      tables.base[r * num_local + l] = first;
      first += count;
    }
    if (!mine) continue;
    p.recv_count()[l] = first;
    if (p.cumulative_stats() != nullptr) atomicAdd(&p.cumulative_stats()[l], first);  // waits for no load
  }
  __syncthreads();
}

struct RowPlaces {  // shared, of a group: the places of a row
  uint8_t *row[kMaxTopk];
  uint32_t *scales[kMaxTopk];  // its first scale
  int32_t count;
  uint32_t pattern;
};

// By the first warp of a group: the header of a token; the list is empty if it has nothing here or never came.
__device__ inline void read_header(const LowLatencyDispatchParams &p, const LowLatencyCall &call, int source, int token,
                                   int row_bytes, const ReceiveTables &tables, RowPlaces *list) {
  const Session &s = p.session;
  const int lane = lane_id();
  const uint64_t dispatch = tables.calls[source].dispatch;
  const uint64_t *header = token_header(p, own_block(p), dispatch, source, token);
  uint64_t entry = 0, weight = 0,
           pattern = tagged(dispatch_tag(dispatch), kAllOnes);  // the weight is for combine, but must be here
  int peer = -1;
  uint64_t waited = 0;
  const uint32_t code = warp_wait_until(
      s, peer, waited,
      [&] {
        if (lane < p.num_topk) ptx::ld_relaxed_sys_pair(&header[2 * lane], entry, weight);
        if (lane == 0 && p.format != DK_FORMAT_FP8) pattern = ptx::ld_relaxed_sys(&header[kPatternAt]);
        const bool here = (lane >= p.num_topk ||
                           (has_tag(entry, dispatch_tag(dispatch)) && has_tag(weight, dispatch_tag(dispatch)))) &&
                          has_tag(pattern, dispatch_tag(dispatch));
        const bool nothing = lane == 0 && has_tag(entry, dispatch_tag(dispatch)) && (entry & kEntryNothing) != 0;
        return __all_sync(kAllLanes, here) != 0 || __any_sync(kAllLanes, nothing) != 0;
      },
      [&] { return lane == 0 ? source : -1; });
  bool row = code == 0 && lane < p.num_topk && has_tag(entry, dispatch_tag(dispatch)) && (entry & kEntryRow) != 0;
  const int expert = entry_expert(static_cast<uint32_t>(entry)),
            position = entry_position(static_cast<uint32_t>(entry));
  row = row && expert < p.num_local() && position < p.num_max_tokens;
  const uint32_t rows = __ballot_sync(kAllLanes, row);
  if (row) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const int64_t within = tables.base[source * p.num_local() + expert] + position;
    const int64_t row_number = expert * p.rows_per_expert() + within;
    p.src_info()[row_number] = token;
    list->row[n] = p.recv_x() + row_number * row_bytes;
    list->scales[n] = p.recv_scales() + scale_places(p).first(expert, within);
  }
  if (lane != 0) return;
  list->count = __popc(rows);
  list->pattern = static_cast<uint32_t>(pattern);
  if (code == 0) return;
  if (!mask_instead(s, code, source))
    report_failure(s, code, culprit(s, code, source), DK_FIELD_NONE, static_cast<int64_t>(call.epoch), 0, waited);
  s.team.scratch->late[source] = call.epoch;
}

// A row in a slot, of row_bytes, and the scale that this thread copies (null: none).
struct SlotRow {
  uint8_t *data;
  int row_bytes;
  const uint32_t *scale;
};

// What a thread waits for, all loads in flight together: chunks `at`, `at` + kLlGroupThreads, ... of a row, and one of
// its scales.
template <int kChunks>
struct Arrivals {
  uint4 data[kChunks];
  uint32_t word;
};
// Loads what has not arrived yet.
template <int kChunks>
__device__ __forceinline__ void load_missing(Arrivals<kChunks> &arrivals, const uint8_t *from, int chunks,
                                             const uint32_t *word, int at) {
#pragma unroll
  for (int u = 0; u < kChunks; ++u)
    if (at + u * kLlGroupThreads < chunks && !has_arrived(arrivals.data[u]))
      arrivals.data[u] = ptx::ld_relaxed_sys_v4(from + 16 * (at + u * kLlGroupThreads));
  if (word != nullptr && arrivals.word == 0) arrivals.word = ptx::ld_relaxed_sys(word);
}
template <int kChunks>
__device__ __forceinline__ bool are_complete(const Arrivals<kChunks> &arrivals, int chunks, const uint32_t *word,
                                             int at) {
  bool all = word == nullptr || arrivals.word != 0;
#pragma unroll
  for (int u = 0; u < kChunks; ++u) all &= at + u * kLlGroupThreads >= chunks || has_arrived(arrivals.data[u]);
  return all;
}

// By a group: copies a row from the slot to its places, and empties the slot. False: the row did not come whole.
template <int kChunks>
__device__ inline bool spread_row(const Session &s, uint64_t expected, int source, const SlotRow &row,
                                  const RowPlaces *list, Arrivals<kChunks> &arrivals, int thread) {
  uint8_t *from = row.data;
  const int chunks = row.row_bytes / 16;
  bool came = true;
  for (int at = thread; came && at < chunks; at += kLlGroupThreads * kChunks) {
    if (at != thread) {
#pragma unroll
      for (int u = 0; u < kChunks; ++u) arrivals.data[u] = {0, 0, 0, 0};
      load_missing(arrivals, from, chunks, nullptr, at);
    }
    const uint32_t *awaited = at == thread ? row.scale : nullptr;
    if (!are_complete(arrivals, chunks, awaited, at))
      came =
          wait_or_mask(s, source, expected, [&](int64_t &) {  // one chunk at first: polling all would keep memory busy
            if (!has_arrived(arrivals.data[0])) arrivals.data[0] = ptx::ld_relaxed_sys_v4(from + 16 * at);
            if (!has_arrived(arrivals.data[0])) return false;
            load_missing(arrivals, from, chunks, awaited, at);
            return are_complete(arrivals, chunks, awaited, at);
          });
#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
      const int chunk = at + u * kLlGroupThreads;
      if (chunk >= chunks || !has_arrived(arrivals.data[u])) continue;
      ptx::st_stream(from + 16 * chunk, uint4{0, 0, 0, 0});
      arrivals.data[u] = exclusive_or(arrivals.data[u], list->pattern);
    }
#pragma unroll 1
    for (int n = 0; came && n < list->count; ++n) {
      uint8_t *to = list->row[n] + 16 * at;
#pragma unroll
      for (int u = 0; u < kChunks; ++u)
        if (at + u * kLlGroupThreads < chunks) ptx::st_stream(to + 16 * kLlGroupThreads * u, arrivals.data[u]);
    }
  }
  return came;
}

__device__ inline bool spread_scales(const LowLatencyDispatchParams &p, const LowLatencyCall &call, int source,
                                     uint32_t *from, const RowPlaces *list, uint32_t early, int thread) {
  const bool packed = (p.flags & DK_LL_UE8M0) != 0;
  const int64_t step = scale_places(p).step, stored = stored_scales(p);
#pragma unroll 1
  for (int64_t at = thread; at < stored; at += kLlGroupThreads) {
    uint32_t value = 0;
    for (int part = 0; part < (packed ? 4 : 1); ++part) {
      uint32_t word = at == thread ? early : 0;
      if (!take_word(p.session, source, call.epoch, from + (packed ? 4 * at + part : at), word)) return false;
      word ^= list->pattern;  // with FP8 kAllOnes
      value = packed ? value | (word >> 23 & 0xff) << (8 * part) : word;
    }
#pragma unroll 1
    for (int n = 0; n < list->count; ++n) list->scales[n][at * step] = value;
  }
  return true;
}

// kChunks: chunks of a row that a thread has in flight.
template <int kChunks>
__device__ inline void receive_tokens(const LowLatencyDispatchParams &p, const LowLatencyCall &call,
                                      const ReceiveTables &tables, RowPlaces *lists) {
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads,
            thread = static_cast<int>(threadIdx.x) % kLlGroupThreads;
  const int row_bytes = value_bytes(p);
  const bool scaled = p.format != DK_FORMAT_BF16;
  const int64_t plain_scales = scaled && (p.flags & DK_LL_UE8M0) == 0 ? stored_scales(p) : 0;
  RowPlaces *list = lists + group;
#pragma unroll 1
  for (int token = first_of_block(); token < p.num_max_tokens; token += num_workers())
#pragma unroll 1
    for (int source = group; source < p.session.team.num_ranks; source += kLlGroups) {
      if (token >= tables.tokens[source]) continue;
      const LowLatencyCall &theirs = tables.calls[source];
      const uint32_t number = number_of_token(p, source, token);
      uint32_t *words = slot_scales(p, own_block(p), theirs, number);
      const SlotRow row{slot_row(p, own_block(p), theirs, number), row_bytes,
                        thread < plain_scales ? words + thread : nullptr};
      // Loaded before the header says where the row goes: if it has arrived, a round trip to memory is saved.
      Arrivals<kChunks> arrivals{};
      load_missing(arrivals, row.data, row_bytes / 16, row.scale, thread);
      if (thread < kWarp) read_header(p, call, source, token, row_bytes, tables, list);
      ptx::barrier_among<kLlGroupThreads>(1 + group);
      mark(kMarkLastHeader, thread == 0);
      if (list->count > 0) {
        bool whole = spread_row(p.session, call.epoch, source, row, list, arrivals, thread);
        whole = (!scaled || spread_scales(p, theirs, source, words, list, arrivals.word, thread)) && whole;
        if (!whole) p.session.team.scratch->late[source] = call.epoch;
      }
      ptx::barrier_among<kLlGroupThreads>(1 + group);
    }
}

// Whole block. The tables follow calls [R] in shared memory.
__device__ inline void receive(const LowLatencyDispatchParams &p, const LowLatencyCall &call, LowLatencyCall *calls,
                               RowPlaces *lists) {
  auto *base = reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks);
  const ReceiveTables tables{base, base + p.num_experts, calls};
  __syncthreads();  // calls are there
  read_counts(p, call, tables);
  mark(kMarkKnown, threadIdx.x == 0);
  if (value_bytes(p) <= 4 * 16 * kLlGroupThreads)
    receive_tokens<4>(p, call, tables, lists);
  else
    receive_tokens<8>(p, call, tables, lists);
}

// ---- End ------------------------------------------------------------------------------------------------------------

__device__ inline DispatchOutputs outputs_of(const LowLatencyDispatchParams &p) {
  return {p.recv_x(),       p.recv_scales(),     p.recv_count(),  p.cumulative_stats(), p.src_info(),
          p.layout_range(), p.rows_per_expert(), scale_places(p), p.num_local(),        value_bytes(p)};
}

__device__ inline void finish_outputs(const LowLatencyDispatchParams &p, const LowLatencyCall &call, bool failed) {
  if (p.receives()) {
    if (failed || (p.session.team.flags & DK_TEAM_SHRINK) != 0)
      mend_outputs<kLlThreads>(p.session, call.epoch, outputs_of(p), failed);
    if (threadIdx.x == 0)
      p.session.team.scratch->routing[call.dispatch % kRoutingCopies] = {
          reinterpret_cast<uint64_t>(p.src_info()), failed ? 0 : call.dispatch, p.topk_weights() != nullptr,
          static_cast<uint64_t>(p.num_topk)};
  }
}

}  // namespace deepep

namespace deep_ep::internode_ll {  // V1's names: tools find kernels in traces by them
using namespace deepep;

__global__ void __launch_bounds__(kLlThreads, 1) dispatch(const __grid_constant__ LowLatencyDispatchParams p) {
  // peers [R]; while sending codes [kTileCodes], then calls [R], base [E], tokens [R]
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ SendTables sending;
  __shared__ RowPlaces lists[kLlGroups];
  begin_timeline();
  auto **peers = reinterpret_cast<uint8_t **>(memory);
  uint8_t *tables = memory + align_up<int>(8 * p.session.team.num_ranks, 16);
  const CodeTile tile(tables, p.num_topk, p.tile_tokens);
  auto *calls = reinterpret_cast<LowLatencyCall *>(tables);
  const EarlyStart start = load_start(p);
  const EarlyControl control = load_control(p);
  EarlySend early{};
  if (p.sends()) early = load_early_send(p, tile);
  if (threadIdx.x == 0) sending.peers = peers;
  if (p.sends() && p.num_tokens <= tile.tokens) store_first_tile(p, tile, early.codes);
  const bool begun = begin_low_latency(p, start, peers);
  const LowLatencyCall call = low_latency_call(p, start, true);
  mark(kMarkBegun, threadIdx.x == 0);
  if (begun) {
    if (is_control_block()) post_low_latency(p, call, peers, control);
    const bool good = !p.sends() || !is_worker() || send_tokens(p, call, tile, early, &sending);
    mark(kMarkSent, threadIdx.x == 0);
    if (is_control_block() && p.sends()) publish_newest_by_last_warp(p.session.team, counts_to_publish(p));
    if (p.receives() && good) {
      find_source_calls(p, call, calls);
      if (is_control_block()) check_low_latency_peers(p, calls);
      if (is_worker()) receive(p, call, calls, lists);
    }
    mark(kMarkArrived, true);
  }
  finish_low_latency(p, start.begun_ns, call, calls, [&](bool failed) { finish_outputs(p, call, failed); });
  end_timeline(0, call.epoch);
}

}  // namespace deep_ep::internode_ll
