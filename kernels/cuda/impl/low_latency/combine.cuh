// combine.cuh - combine, the receiving half and the kernel: the token's rank sums the rows that the experts' ranks sent
// back, and applies the weights to rows that are not sums already.
#pragma once
#include "cuda/impl/low_latency/combine_send.cuh"

namespace deepep {

// ---- Receive --------------------------------------------------------------------------------------------------------

constexpr int kNoSum = -1;
struct ArrivalList {  // shared: the rows that make up a token; count kNoSum: its sum is NaN
  uint8_t *row[kMaxTopk];
  uint32_t *words[kMaxTopk];
  float weight[kMaxTopk];
  uint32_t pattern[kMaxTopk];
  uint64_t epoch[kMaxTopk];
  int32_t rank[kMaxTopk], count;
};

// By the first warp: waits for the row words of a token's experts, and leaves out ranks that are masked meanwhile.
// `entry`: the lane's, of the token.
template <class P>
__device__ inline void read_row_words(const P &p, const LowLatencyCall *calls, int token, const Entry &entry,
                                      ArrivalList *list) {
  const Session &s = p.session;
  const int lane = lane_id();
  int64_t expert = entry.expert;
  const float weight = entry.weight;
  const uint32_t wrong = __ballot_sync(kAllLanes, expert < -1 || expert >= p.num_experts);
  if (wrong != 0) {  // its own row, or the sum that has it, is at a rank that nobody knows here: see Leftover
    if (lane == __ffs(static_cast<int>(wrong)) - 1)
      report_refusal(s, kNoted, DK_EINVAL, s.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert);
    if (lane == 0) list->count = kNoSum;
    return;
  }
  int rank = expert < 0 ? -1 : p.by_local.quotient(static_cast<int>(expert));
  if (rank >= 0 && (is_masked(s, rank) || calls[rank].epoch == 0)) rank = -1;
  const LowLatencyCall call = calls[rank < 0 ? s.team.rank : rank];  // of the rank that this lane waits for
  // The first entry of an expert has the weights of all its entries; of a rank's experts the lowest leads, since a sum
  // is in its row.
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
    if (other_rank == rank && rank >= 0 && (other < lowest || (other == lowest && k < leader))) {
      lowest = other;
      leader = k;
    }
  }
  bool needed = rank >= 0 && !repeated;
  leads = needed && leader == lane;
  const uint32_t number = number_of_row(p, expert < 0 ? 0 : static_cast<int>(expert), token);
  const uint64_t *mine = row_word(p, own_block(p), call, number);
  uint64_t word = 0;
  for (int round = 0; round < 2; ++round) {
    bool wait = round == 0 ? leads : needed && !leads;
    int peer = -1;
    uint64_t waited = 0;
    for (;;) {  // again where a rank was masked: the others are still awaited
      const uint32_t code = warp_wait_until(
          s, peer, waited,
          [&] {
            if (needed && !has_tag(word, combine_tag(call.epoch))) word = ptx::ld_relaxed_sys(mine);
            return __all_sync(kAllLanes, !wait || has_tag(word, combine_tag(call.epoch))) != 0;
          },
          [&] { return wait && !has_tag(word, combine_tag(call.epoch)) ? rank : -1; });
      if (code == 0) break;
      bool masked = false;
      if (lane == 0) {
        masked = mask_instead(s, code, peer);
        if (!masked)
          report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, static_cast<int64_t>(call.epoch), 0, waited);
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
    if (round == 0 && !leads && needed && leader_here &&
        (leader_kind == kKindSum || (P::kCopies && leader_kind == kKindPacked)))
      needed = false;  // the leader's row includes it
  }
  const uint32_t rows = __ballot_sync(kAllLanes, needed);
  if (needed) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const uint32_t value = static_cast<uint32_t>(word), kind = value & kKindMask;
    const bool packed = P::kCopies && kind == kKindPacked;
    const uint32_t place = packed ? number_of_token(p, rank, token) : number;
    list->row[n] = slot_row(p, own_block(p), call, place);
    list->words[n] = slot_words(p, own_block(p), call, place);
    list->pattern[n] = value | kKindMask;
    list->rank[n] = rank;
    list->epoch[n] = call.epoch;
    list->weight[n] = kind == kKindSum || packed ? 1.0f : sum;
  }
  if (lane == 0) list->count = __popc(rows);
}

// Chunks `at` and `at` + kLlThreads of several rows, all in flight together. Masks have bit kChunks * row + chunk.
// Either all ranks send LogFMT or none.
constexpr int kRows = 4, kChunks = 2;
template <bool kLogfmt>
__device__ __forceinline__ uint32_t load_missing(const ArrivalList *list, int first, int at, int chunks,
                                                 uint32_t missing, uint4 (&data)[kRows][kChunks]) {
#pragma unroll
  for (int i = 0; i < kRows * kChunks; ++i)
    if ((missing >> i & 1) != 0) {
      const int row = first + i / kChunks, chunk = at + i % kChunks * kLlThreads;
      data[i / kChunks][i % kChunks] = kLogfmt ? load_logfmt_chunk(list->row[row], list->words[row], chunk, chunks)
                                               : ptx::ld_relaxed_sys_v4(list->row[row] + 16 * chunk);
    }
#pragma unroll
  for (int i = 0; i < kRows * kChunks; ++i) {
    const uint4 &chunk = data[i / kChunks][i % kChunks];
    if ((missing >> i & 1) != 0 && (kLogfmt ? has_logfmt_arrived(chunk) : has_arrived(chunk))) missing &= ~(1u << i);
  }
  return missing;
}

// Sums chunks `at` and, if there is one, `at` + kLlThreads of a token's rows, in the order of the list. LogFMT: by
// whole halves of warps.
template <bool kLogfmt, class P>
__device__ inline void add_rows(const P &p, const ArrivalList *list, int token, int at) {
  const Session &s = p.session;
  const int chunks = p.hidden / 8;
  const uint32_t of_row = at + kLlThreads < chunks ? 3 : 1, half = 0xffffu << (lane_id() & 16);
  float sum[kChunks][8];
  const float none = __uint_as_float(list->count == kNoSum ? 0x7fc00000u : 0);
#pragma unroll
  for (int i = 0; i < kChunks * 8; ++i) sum[i / 8][i % 8] = none;
  for (int first = 0; first < list->count; first += kRows) {
    uint4 data[kRows][kChunks];
    uint32_t missing = 0;
#pragma unroll
    for (int n = 0; n < kRows; ++n)
      if (first + n < list->count) missing |= of_row << (kChunks * n);
    missing = load_missing<kLogfmt>(list, first, at, chunks, missing, data);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n >= list->count) continue;
      const int which = first + n, rank = list->rank[which];
      const uint64_t epoch = list->epoch[which];
      if ((missing >> (kChunks * n) & of_row) != 0)
        wait_or_mask(s, rank, epoch, [&](int64_t &) {  // one chunk at first: polling all would keep memory busy
          const uint32_t first_missing = missing & (0u - missing);
          if (load_missing<kLogfmt>(list, first, at, chunks, first_missing, data) != 0) return false;
          missing = load_missing<kLogfmt>(list, first, at, chunks, missing ^ first_missing, data);
          return (missing >> (kChunks * n) & of_row) == 0;
        });
      uint32_t absent = missing >> (kChunks * n) & of_row;  // of a rank that was lost
      missing &= ~(of_row << (kChunks * n));
      if (kLogfmt) absent = __reduce_or_sync(half, absent);  // all 16 threads have read a block's word
#pragma unroll
      for (int u = 0; u < kChunks; ++u) {
        if ((of_row >> u & 1) == 0 || (absent >> u & 1) != 0) continue;
        const int chunk = at + u * kLlThreads;
        if (kLogfmt) {
          add_logfmt(s, rank, epoch, list->row[which], list->words[which], chunk, chunks, data[n][u],
                     list->weight[which], sum[u]);
          continue;
        }
        ptx::st_stream(list->row[which] + 16 * chunk, uint4{0, 0, 0, 0});
        add_weighted(sum[u], exclusive_or(data[n][u], list->pattern[which]), list->weight[which]);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kChunks; ++u)
    if (at + u * kLlThreads < chunks)
      ptx::st_stream(p.combined_x() + static_cast<uint64_t>(token) * 2 * p.hidden + 16 * (at + u * kLlThreads),
                     round_bf16(sum[u]));
}

// `entry`: of the block's first token, in the first warp.
template <class P>
__device__ inline void receive_sums(const P &p, const LowLatencyCall *calls, Entry entry, ArrivalList *list) {
  const int chunks = p.hidden / 8;
  __syncthreads();  // calls are there
  mark(kMarkKnown, threadIdx.x == 0);
  for (int token = first_of_block(); token < p.num_tokens; token += num_workers()) {
    if (warp_id() == 0) {
      if (token != first_of_block()) entry = load_entry(p, token);
      read_row_words(p, calls, token, entry, list);
    }
    __syncthreads();
    mark(kMarkLastHeader, threadIdx.x == 0);
    if ((p.flags & DK_LL_LOGFMT) != 0)
      for (int at = threadIdx.x; at < chunks; at += kChunks * kLlThreads) add_rows<true>(p, list, token, at);
    else
      for (int at = threadIdx.x; at < chunks; at += kChunks * kLlThreads) add_rows<false>(p, list, token, at);
    __syncthreads();
  }
}

// The first row of a source's range, such that B rows from there on are the expert's, whatever the caller's tensor
// holds.
template <class P>
__device__ __forceinline__ int32_t first_row_of(const P &p, int64_t range) {
  const int64_t last = p.rows_per_expert() - p.num_max_tokens;
  return static_cast<int32_t>(min(max(range >> 32, int64_t{0}), last));
}

}  // namespace deepep

namespace deep_ep::internode_ll {  // V1's names: tools find kernels in traces by them
using namespace deepep;

template <class P>
__global__ void __launch_bounds__(kLlThreads, 1) combine(const __grid_constant__ P p) {
  extern __shared__ __align__(16) uint8_t memory[];  // peers [R], calls [R], then row counts [L + 1], first rows [L][R]
  __shared__ union {
    SumList sums[kLlGroups];
    ArrivalList arrivals;
  } shared;
  __shared__ SummedDispatch summed;
  begin_timeline();
  auto **peers = reinterpret_cast<uint8_t **>(memory);
  auto *calls = reinterpret_cast<LowLatencyCall *>(peers + p.session.team.num_ranks);
  auto *before = reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks), *bases = before + p.num_local() + 1;
  // All that the first row needs is loaded at the same time.
  bool defers = false;
  if constexpr (P::kCopies) defers = p.defers != 0;
  const bool reads_sums = p.sends() && may_sum(p), leads_group = threadIdx.x % kLlGroupThreads < kWarp;
  const SumItem item = sum_item(p, first_item());
  const EarlyStart start = load_start(p);
  const EarlyControl control = load_control(p);
  Headers headers{};
  LowLatencyRouting routing{};
  SlotSeen slot{0, 0, 0, -1};
  const bool needs_entry = (is_last_warp() && sends_weights(p)) || (warp_id() == 0 && p.receives());
  const Entry entry = needs_entry ? load_entry(p, first_of_block()) : Entry{-1, 0};
  if (reads_sums && leads_group) {
    routing = load_routing(p);
    if (first_item() < num_items(p) && !defers) headers = load_headers(p, item.dest, item.token);
  }
  int64_t range = 0;
  if (p.sends() && threadIdx.x < p.num_experts) range = p.layout_range()[threadIdx.x];
  if (p.sends()) slot = look_at_slot(p);
  if (p.sends() && threadIdx.x < p.num_experts) bases[threadIdx.x] = first_row_of(p, range);
#pragma unroll 1
  for (int i = threadIdx.x + kLlThreads; p.sends() && i < p.num_experts; i += kLlThreads)
    bases[i] = first_row_of(p, p.layout_range()[i]);
  const bool begun = begin_low_latency(p, start, peers);
  const LowLatencyCall call = low_latency_call(p, start, false);
  mark(kMarkBegun, threadIdx.x == 0);
  if (begun) {
    if (is_last_warp() && sends_weights(p)) send_weights(p, call, peers, entry);
    if (is_control_block()) post_low_latency(p, call, peers, control);
    bool good = true;
    if (p.sends() && is_worker()) {
      if (leads_group) {
        const SummedDispatch found = reads_sums ? routed_dispatch(p, call, routing) : SummedDispatch{0, false};
        if (threadIdx.x == 0) summed = found;
        if constexpr (P::kCopies)
          if (defers && blockIdx.x == 0 && threadIdx.x == 0)
            p.session.team.scratch->beside[p.ticket].dispatch = found.number;
        if (found.number != 0 && first_item() < num_items(p) && !defers)
          read_sum(p, call, found, headers, item.dest, item.token, bases, shared.sums + threadIdx.x / kLlGroupThreads);
      }
      good = await_empty_slots(p, call, slot);
      mark(kMarkEmpty, threadIdx.x == 0);
      if (good && !(defers && summed.number != 0)) send_items(p, call, summed, peers, bases, before, shared.sums);
      __syncthreads();
    }
    mark(kMarkSent, threadIdx.x == 0);
    if (is_control_block() && p.sends()) publish_newest_by_last_warp(p.session.team, counts_to_publish(p));
    if (p.receives() && good) {
      if constexpr (P::kCopies)
        if (is_control_block() && !p.sends()) take_counts_beside(p);
      find_source_calls(p, call, calls);
      if (is_control_block()) check_low_latency_peers(p, calls);
      if (is_worker()) receive_sums(p, calls, entry, &shared.arrivals);
    }
    mark(kMarkArrived, true);
  }
  finish_low_latency(p, start.begun_ns, call, calls, [&](bool failed) {
    if (failed && p.receives()) clear_combined(p, p.combined_x());
  });
  end_timeline(1, call.epoch);
}

}  // namespace deep_ep::internode_ll
