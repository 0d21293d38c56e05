// low_latency_combine.cuh - experts' rows back to the tokens. Where the dispatch brought the weights along, the expert's rank sums
// its own experts' rows for a token in FP32 and sends one row; else each expert's row crosses by itself and the token's rank
// applies the weights. Row words say which of the two a row is, so ranks need not agree.
#pragma once
#include "cuda/impl/logfmt.cuh"
#include "cuda/impl/low_latency_common.cuh"

namespace deepep {

struct LowLatencyCombineParams {
  LowLatencyParams call;        // layout_range and src_info are inputs here
  const uint8_t *x;
  uint64_t x_row_stride;
  uint8_t *combined_x;
};

enum : uint32_t { kKindRow = 1, kKindLogfmt = 2, kKindSum = 3, kKindMask = 3 };

__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4 &data, float weight) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(bf16_low(words[i]), weight, sum[2 * i]);
    sum[2 * i + 1] = fmaf(bf16_high(words[i]), weight, sum[2 * i + 1]);
  }
}

// ---- Send: sums of this rank's experts ------------------------------------------------------------------------------------

struct SumList {                // shared, of a group
  int64_t row[kMaxTopk];
  float weight[kMaxTopk];
  int32_t count, first_expert;
};

// By the first warp of a group: which rows of x belong to a token, from the header of its dispatch.
__device__ inline void read_sum(const LowLatencyParams &p, uint64_t dispatch, int source, int token, SumList *list) {
  const int lane = lane_id(), num_ranks = p.session.team.num_ranks;
  if ((p.session.team.flags & DK_TEAM_SHRINK) != 0) dispatch += p.session.team.scratch->dispatch_ahead[source]; // by the source's own count
  const uint64_t *header = token_header(p, dispatch, p.session.team.rank, source, token);
  const uint64_t entry = lane < p.num_topk ? ptx::ld_relaxed_sys(&header[2 * lane]) : 0;
  const uint64_t weight = lane < p.num_topk ? ptx::ld_relaxed_sys(&header[2 * lane + 1]) : 0;
  const uint32_t code = static_cast<uint32_t>(entry);
  const bool row = lane < p.num_topk && has_tag(entry, dispatch_tag(dispatch)) && (code & kEntryRow) != 0 && entry_expert(code) < p.num_local();
  const bool nothing = __any_sync(kAllLanes, lane == 0 && (!has_tag(entry, dispatch_tag(dispatch)) || (code & kEntryNothing) != 0)) != 0;
  const uint32_t rows = nothing ? 0 : __ballot_sync(kAllLanes, row);
  const int expert = row ? entry_expert(code) : 0x7fffffff;
  const int first = __reduce_min_sync(kAllLanes, nothing ? 0x7fffffff : expert);
  if (rows >> lane & 1) {
    const int at = __popc(rows & ((1u << lane) - 1));
    const int64_t base = p.layout_range[static_cast<int64_t>(expert) * num_ranks + source] >> 32;
    list->row[at] = expert * p.rows_per_expert() + base + entry_position(code);
    list->weight[at] = __uint_as_float(static_cast<uint32_t>(weight));
  }
  if (lane == 0) list->count = __popc(rows), list->first_expert = first;
}

__device__ inline uint4 round_to_bf16(const float (&sum)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t *>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

// By a group. A rounded sum is never two NaNs with all bits set, so the first pattern always serves. Loads of several chunks and
// rows go side by side: one after the other they would cost the latency of memory each.
__device__ inline void send_sum(const LowLatencyCombineParams &c, const LowLatencyCall &call, const SumList *list, int dest, int token, int thread) {
  constexpr int kChunks = 4, kRows = 2;
  const LowLatencyParams &p = c.call;
  const int expert = p.session.team.rank * p.num_local() + list->first_expert, chunks = p.hidden / 8;
  uint8_t *to = expert_row(p, call, dest, expert, token);
  for (int base = thread; base < chunks; base += kLlGroupThreads * kChunks) {
    float sum[kChunks][8] = {};
    for (int first = 0; first < list->count; first += kRows) {
      uint4 data[kRows][kChunks];
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (first + n >= list->count) continue;
        const uint8_t *from = c.x + static_cast<uint64_t>(list->row[first + n]) * c.x_row_stride + 16 * base;
#pragma unroll
        for (int u = 0; u < kChunks; ++u)
          if (base + u * kLlGroupThreads < chunks) data[n][u] = ptx::ld_stream(from + 16 * kLlGroupThreads * u);
      }
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (first + n >= list->count) continue;
#pragma unroll
        for (int u = 0; u < kChunks; ++u)
          if (base + u * kLlGroupThreads < chunks) add_weighted(sum[u], data[n][u], list->weight[first + n]);
      }
    }
#pragma unroll
    for (int u = 0; u < kChunks; ++u)
      if (base + u * kLlGroupThreads < chunks)
        ptx::st_relaxed_sys_v4(to + 16 * (base + u * kLlGroupThreads), exclusive_or(round_to_bf16(sum[u]), pattern_of(0)));
  }
  if (thread == 0)
    ptx::st_relaxed_sys(row_word(p, call, dest, expert, token), tagged(combine_tag(call.epoch), (pattern_of(0) & ~kKindMask) | kKindSum));
}

__device__ inline void send_sums(const LowLatencyCombineParams &c, const LowLatencyCall &call, uint64_t dispatch, SumList *lists) {
  const LowLatencyParams &p = c.call;
  const int num_ranks = p.session.team.num_ranks;
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads, thread = static_cast<int>(threadIdx.x) % kLlGroupThreads;
  SumList *list = lists + group;
  for (int item = group * gridDim.x + blockIdx.x; item < num_ranks * p.max_tokens; item += kLlGroups * gridDim.x) {
    const int dest = (item / p.max_tokens + p.session.team.rank) % num_ranks, token = item % p.max_tokens;
    if (thread < kWarp) read_sum(p, dispatch, dest, token, list);
    ptx::barrier_among<kLlGroupThreads>(1 + group);
    if (list->count > 0 && !is_masked(p.session, dest)) {
      send_sum(c, call, list, dest, token, thread);
      if (thread == 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(&p.session.team.scratch->sent_bytes[dest]), 2ull * p.hidden);
    }
    ptx::barrier_among<kLlGroupThreads>(1 + group);
  }
}

// ---- Send: each expert's row ---------------------------------------------------------------------------------------------------

struct RowTarget {              // shared, of a group
  int32_t dest, token, found, reserved;
};

// Local expert and row within it of the n-th row to send; `before` has the running sums, [L + 1].
__device__ inline int expert_of_row(const int32_t *before, int num_local, int n) {
  int low = 0, high = num_local - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (before[middle] <= n) low = middle;
    else high = middle - 1;
  }
  return low;
}

__device__ inline void send_plain_row(const LowLatencyCombineParams &c, const LowLatencyCall &call, int local_expert, const uint8_t *row,
                                      RowTarget *target, int group, int thread) {
  const LowLatencyParams &p = c.call;
  const int chunks = p.hidden / 8, expert = p.session.team.rank * p.num_local() + local_expert;
  uint32_t attempt = 0;
  for (;; ++attempt) { // a pattern that the row does not hold
    bool found = false;
    for (int at = thread; at < chunks; at += kLlGroupThreads) found |= holds(ptx::ld_stream(row + 16 * at), pattern_of(attempt));
    if (found) target->found = 1;
    ptx::barrier_among<kLlGroupThreads>(1 + group);
    const bool again = target->found != 0;
    ptx::barrier_among<kLlGroupThreads>(1 + group);
    if (!again) break;
    if (thread == 0) target->found = 0;
    ptx::barrier_among<kLlGroupThreads>(1 + group);
  }
  uint8_t *to = expert_row(p, call, target->dest, expert, target->token);
  for (int at = thread; at < chunks; at += kLlGroupThreads)
    ptx::st_relaxed_sys_v4(to + 16 * at, exclusive_or(ptx::ld_stream(row + 16 * at), pattern_of(attempt)));
  if (thread == 0)
    ptx::st_relaxed_sys(row_word(p, call, target->dest, expert, target->token),
                        tagged(combine_tag(call.epoch), (pattern_of(attempt) & ~kKindMask) | kKindRow));
}

__device__ inline void send_logfmt_row(const LowLatencyCombineParams &c, const LowLatencyCall &call, int local_expert, const uint8_t *row,
                                       const RowTarget *target, int thread) {
  const LowLatencyParams &p = c.call;
  const int expert = p.session.team.rank * p.num_local() + local_expert;
  uint8_t *to = expert_row(p, call, target->dest, expert, target->token);
  // The words of [E, B] rows are found as those of a source are, with the expert in its stead.
  send_logfmt(row, to, token_words(p, call, target->dest, expert, target->token), p.hidden, thread, kLlGroupThreads);
  if (thread == 0) ptx::st_relaxed_sys(row_word(p, call, target->dest, expert, target->token), tagged(combine_tag(call.epoch), kKindLogfmt));
}

__device__ inline void send_rows(const LowLatencyCombineParams &c, const LowLatencyCall &call, int32_t *before, RowTarget *targets) {
  const LowLatencyParams &p = c.call;
  const int num_ranks = p.session.team.num_ranks, num_local = p.num_local();
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads, thread = static_cast<int>(threadIdx.x) % kLlGroupThreads;
  const bool logfmt = (p.flags & DK_LL_LOGFMT) != 0;
  for (int l = threadIdx.x; l < num_local; l += kLlThreads) {
    int total = 0;
    for (int r = 0; r < num_ranks; ++r) total += static_cast<int>(p.layout_range[static_cast<int64_t>(l) * num_ranks + r] & 0xffffffff);
    before[l + 1] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    before[0] = 0;
    for (int l = 0; l < num_local; ++l) before[l + 1] += before[l];
  }
  __syncthreads();
  RowTarget *target = targets + group;
  for (int n = group * gridDim.x + blockIdx.x; n < before[num_local]; n += kLlGroups * gridDim.x) {
    const int l = expert_of_row(before, num_local, n), row = n - before[l];
    if (thread == 0) {
      const int64_t *range = p.layout_range + static_cast<int64_t>(l) * num_ranks;
      int dest = 0;
      while (dest + 1 < num_ranks && row >= static_cast<int>((range[dest] >> 32) + (range[dest] & 0xffffffff))) ++dest;
      const int token = p.src_info[l * p.rows_per_expert() + row];
      const bool sent = token >= 0 && token < p.max_tokens && !is_masked(p.session, dest);
      *target = {sent ? dest : -1, token, 0, 0};
    }
    ptx::barrier_among<kLlGroupThreads>(1 + group);
    if (target->dest >= 0) {
      const uint8_t *from = c.x + static_cast<uint64_t>(l * p.rows_per_expert() + row) * c.x_row_stride;
      if (logfmt) send_logfmt_row(c, call, l, from, target, thread);
      else send_plain_row(c, call, l, from, target, group, thread);
      if (thread == 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(&p.session.team.scratch->sent_bytes[target->dest]), 2ull * p.hidden);
    }
    ptx::barrier_among<kLlGroupThreads>(1 + group);
  }
}

// The dispatch that made src_info, if its headers are still here and hold weights; 0: none.
__device__ inline uint64_t routed_dispatch(const LowLatencyParams &p, const LowLatencyCall &call) {
  if ((p.flags & (DK_LL_UNREDUCED | DK_LL_LOGFMT)) != 0) return 0;
  LowLatencyRouting newest{};
  for (int i = 0; i < kRoutingCopies; ++i) { // the handle's memory may have served several dispatches
    const LowLatencyRouting *routing = &p.session.team.scratch->routing[i];
    if (routing->src_info == reinterpret_cast<uint64_t>(p.src_info) && routing->dispatch > newest.dispatch) newest = *routing;
  }
  const bool usable = newest.has_weights != 0 && newest.num_topk == static_cast<uint64_t>(p.num_topk) && newest.dispatch + 1 >= call.dispatch;
  return usable ? newest.dispatch : 0;
}

// ---- Receive -----------------------------------------------------------------------------------------------------------------------

struct ArrivalList {            // shared: the rows that make up a token
  uint8_t *row[kMaxTopk];
  uint32_t *words[kMaxTopk];
  float weight[kMaxTopk];
  uint32_t kind[kMaxTopk], pattern[kMaxTopk];
  uint64_t epoch[kMaxTopk];
  int32_t rank[kMaxTopk], count;
};

// By the first warp: waits for the row words of a token's experts. Rows of a rank that does not come are left out.
__device__ inline void read_row_words(const LowLatencyParams &p, const LowLatencyCall *calls, int token, ArrivalList *list) {
  const Session &s = p.session;
  const int lane = lane_id(), num_local = p.num_local();
  const int64_t at = static_cast<int64_t>(token) * p.num_topk + lane;
  int64_t expert = lane < p.num_topk ? load_index(p.topk_idx, at, p.index_bytes) : -1;
  const float weight = lane < p.num_topk ? p.topk_weights[at] : 0;
  if (expert < 0 || expert >= p.num_experts) expert = -1;
  int rank = expert < 0 ? -1 : static_cast<int>(expert) / num_local;
  if (rank >= 0 && (is_masked(s, rank) || calls[rank].epoch == 0)) rank = -1;
  const LowLatencyCall call = calls[rank < 0 ? s.team.rank : rank]; // of the rank that this lane waits for
  // The first naming of an expert carries the weights of all; its rank's lowest expert leads: a sum would stand in its row.
  bool repeated = false, leads = rank >= 0;
  int leader = lane;
  int64_t lowest = expert;
  float sum = 0;
  for (int k = 0; k < p.num_topk; ++k) {
    const int64_t other = __shfl_sync(kAllLanes, expert, k);
    const int other_rank = __shfl_sync(kAllLanes, rank, k);
    const float other_weight = __shfl_sync(kAllLanes, weight, k);
    if (other == expert) sum += other_weight;
    repeated |= k < lane && other == expert;
    if (other_rank == rank && rank >= 0 && (other < lowest || (other == lowest && k < leader))) lowest = other, leader = k;
  }
  bool needed = rank >= 0 && !repeated;
  leads = needed && leader == lane;
  const uint64_t *mine = row_word(p, call, s.team.rank, expert < 0 ? 0 : static_cast<int>(expert), token);
  uint64_t word = 0;
  for (int round = 0; round < 2; ++round) {
    bool wait = round == 0 ? leads : needed && !leads;
    int peer = -1;
    uint64_t waited = 0;
    for (;;) { // again where a rank was masked: the others are still awaited
      const uint32_t code = warp_wait_until(
          s, peer, waited,
          [&] {
            if (wait && !has_tag(word, combine_tag(call.epoch))) word = ptx::ld_relaxed_sys(mine);
            return __all_sync(kAllLanes, !wait || has_tag(word, combine_tag(call.epoch))) != 0;
          },
          [&] { return wait && !has_tag(word, combine_tag(call.epoch)) ? rank : -1; });
      if (code == 0) break;
      bool masked = false;
      if (lane == 0) {
        masked = mask_instead(s, code, peer);
        if (!masked) report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, static_cast<int64_t>(call.epoch), 0, waited);
      }
      masked = __shfl_sync(kAllLanes, masked, 0);
      if (!masked) {
        if (lane == 0) list->count = 0;
        return;
      }
      if (rank == peer) wait = needed = false;
    }
    const uint32_t leader_kind = __shfl_sync(kAllLanes, static_cast<uint32_t>(word), leader) & kKindMask;
    const bool leader_here = __shfl_sync(kAllLanes, static_cast<int>(needed), leader) != 0;
    if (round == 0 && !leads && needed && leader_here && leader_kind == kKindSum) needed = false; // it is in the leader's row
  }
  const uint32_t rows = __ballot_sync(kAllLanes, needed);
  if (needed) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const uint32_t value = static_cast<uint32_t>(word), kind = value & kKindMask;
    list->row[n] = expert_row(p, call, s.team.rank, static_cast<int>(expert), token);
    list->words[n] = token_words(p, call, s.team.rank, static_cast<int>(expert), token);
    list->kind[n] = kind, list->pattern[n] = value | kKindMask, list->rank[n] = rank, list->epoch[n] = call.epoch;
    list->weight[n] = kind == kKindSum ? 1.0f : sum;
  }
  if (lane == 0) list->count = __popc(rows);
}

// Chunks `at` and, if there is one, `at` + kLlThreads of a token: the loads of both go side by side.
__device__ inline void add_rows(const LowLatencyCombineParams &c, const ArrivalList *list, int token, int at) {
  constexpr int kRows = 4, kChunks = 2;
  const Session &s = c.call.session;
  const int chunks = c.call.hidden / 8;
  float sum[kChunks][8] = {};
  for (int first = 0; first < list->count; first += kRows) {
    uint4 data[kRows][kChunks];
#pragma unroll
    for (int n = 0; n < kRows; ++n)
#pragma unroll
      for (int u = 0; u < kChunks; ++u)
        if (first + n < list->count && list->kind[first + n] != kKindLogfmt && at + u * kLlThreads < chunks)
          data[n][u] = ptx::ld_relaxed_sys_v4(list->row[first + n] + 16 * (at + u * kLlThreads));
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n >= list->count) continue;
      const int which = first + n;
#pragma unroll
      for (int u = 0; u < kChunks; ++u) {
        const int chunk = at + u * kLlThreads;
        if (chunk >= chunks) continue;
        if (list->kind[which] == kKindLogfmt) {
          add_logfmt(s, list->rank[which], list->epoch[which], list->row[which], list->words[which], chunk, list->weight[which], sum[u]);
        } else if (take_chunk(s, list->rank[which], list->epoch[which], list->row[which] + 16 * chunk, data[n][u])) {
          add_weighted(sum[u], exclusive_or(data[n][u], list->pattern[which]), list->weight[which]);
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kChunks; ++u)
    if (at + u * kLlThreads < chunks)
      ptx::st_stream(c.combined_x + static_cast<uint64_t>(token) * 2 * c.call.hidden + 16 * (at + u * kLlThreads), round_to_bf16(sum[u]));
}

__device__ inline void receive_sums(const LowLatencyCombineParams &c, const LowLatencyCall *calls, ArrivalList *list) {
  const LowLatencyParams &p = c.call;
  const int chunks = p.hidden / 8;
  for (int token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    if (warp_id() == 0) read_row_words(p, calls, token, list);
    __syncthreads();
    // Whole halves of warps, for LogFMT's threads work together; H is a multiple of 128 there.
    for (int at = threadIdx.x; at < chunks; at += 2 * kLlThreads) add_rows(c, list, token, at);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kLlThreads, 1) low_latency_combine_kernel(const __grid_constant__ LowLatencyCombineParams c) {
  extern __shared__ __align__(16) LowLatencyCall calls[]; // [R], then row counts [L + 1]
  __shared__ union {
    SumList sums[kLlGroups];
    RowTarget targets[kLlGroups];
    ArrivalList arrivals;
  } shared;
  __shared__ uint64_t dispatch; // whose routing is known, or 0
  const LowLatencyParams &p = c.call;
  const LowLatencyCall call = low_latency_call(p, false);
  if (begin(p.session)) {
    if (is_clerk()) post_low_latency(p, call);
    bool good = true;
    if (p.sends()) {
      good = await_empty_slots(p, call, [&] {
        const uint64_t found = routed_dispatch(p, call);
        if (threadIdx.x == 0) dispatch = found;
      });
      if (good && dispatch != 0) send_sums(c, call, dispatch, shared.sums);
      else if (good) send_rows(c, call, reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks), shared.targets);
    }
    __syncthreads();
    if (is_clerk()) publish_newest_by_last_warp(p.session.team); // rows are on their way meanwhile
    if (p.receives() && good) {
      find_source_calls(p, call, calls);
      if (is_clerk()) check_low_latency_peers(p, calls);
      receive_sums(c, calls, &shared.arrivals);
    }
  }
  finish(p.session, [&](bool failed) {
    if (failed && p.receives()) {
      const uint64_t chunks = static_cast<uint64_t>(p.num_tokens) * p.hidden / 8;
      for (uint64_t i = threadIdx.x; i < chunks; i += kLlThreads)
        reinterpret_cast<uint4 *>(c.combined_x)[i] = {0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u};
    }
    end_low_latency(p, call, calls, failed);
  });
}

}  // namespace deepep
