// combine.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: experts' rows back to the tokens' ranks.
// The experts' rank sums what it can (sums.cuh); the token's rank applies the weights to rows that came by themselves.
#pragma once
#include "internode/low_latency/sums.cuh"

namespace deepep::internode {

// ---- Send: each expert's row ----------------------------------------------------------------------------------------

// By a warp: the rank that sent an expert's row; -1: layout_range has none.
__device__ inline int source_of_row(const InternodeLlParams &p, int local_expert, int row) {
  const int num_ranks = p.session.team.num_ranks;
  const int64_t *ranges = p.layout_range + static_cast<int64_t>(local_expert) * num_ranks;
#pragma unroll 1
  for (int first = 0; first < num_ranks; first += kWarp) {
    const int r = first + lane_id();
    const int64_t range = r < num_ranks ? ranges[r] : 0, start = range >> 32;
    const uint32_t found = __ballot_sync(kAllLanes, row >= start && row < start + (range & 0xffffffff));
    if (found != 0) return first + __ffs(static_cast<int>(found)) - 1;
  }
  return -1;
}

// By a warp: stores the row at the destination, or stages it where a NIC can read it, unless zero copy has it there
// already.
__device__ inline void send_expert_row(const InternodeLlCombineParams &c, uint64_t epoch, int local_expert, int row,
                                       int dest, int token) {
  const InternodeLlParams &p = c.call;
  const int rank = p.session.team.rank, expert = rank * p.num_local + local_expert;
  const int64_t number = local_expert * p.rows_per_expert() + row;
  const uint8_t *from = c.x + static_cast<uint64_t>(number) * c.x_row_stride;
  const uint64_t at = expert_row_at(p, epoch, expert, token);
  uint8_t *const block = p.blocks[dest];
  uint8_t *to = block != nullptr ? block + at : mine_at(p, p.at.stage + static_cast<uint64_t>(number) * 2 * p.hidden);
  uint32_t kind = kRowPlain, bytes = 2 * static_cast<uint32_t>(p.hidden);
  const bool logfmt = (p.flags & DK_LL_LOGFMT) != 0, spread = logfmt && block != nullptr;
  const uint4 coded = spread   ? store_spread_row(from, to, p.hidden)
                      : logfmt ? choose_coded(from, p.hidden)
                               : uint4{0, 0, 0, 0};
  if (spread) {
    if (lane_id() == 0) kind |= end_spread_row(to, p.hidden / kScaleChannels, coded);
  } else if (is_any_coded(coded)) {
    bytes = encode_row(from, to, p.hidden, coded);
    kind |= coded_kind(coded, p.hidden / kScaleChannels);
    from = to;
  } else if (block != nullptr || (p.flags & DK_LL_ZERO_COPY) == 0) {
    copy_row(to, from, bytes);
    from = to;
  }
  __syncwarp();
  send_delivery(
      p, {dest, block, bytes, at, expert_word_at(p, epoch, expert, token), signal_word(epoch, rank, kind), from});
  if (lane_id() == 0) count_bytes(p.session, dest, 2ull * p.hidden);
}

// Whole block: the rows for ranks of which `sums` has no sums. before: shared, [L + 1].
__device__ inline void send_expert_rows(const InternodeLlCombineParams &c, uint64_t epoch, const int32_t *sums,
                                        int32_t *before) {
  const InternodeLlParams &p = c.call;
  sum_expert_rows(p, p.layout_range, p.num_local, before);
  const int total = before[p.num_local], stride = kLlWarps * static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int n = warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); n < total; n += stride) {
    const int l = expert_of_row(before, p.num_local, n), row = n - before[l];
    const int dest = source_of_row(p, l, row), token = p.src_info[l * p.rows_per_expert() + row];
    if (dest < 0 || sums[dest] >= 0 || token < 0 || token >= p.max_tokens ||
        __any_sync(kAllLanes, is_masked(p.session, dest)))
      continue;
    send_expert_row(c, epoch, l, row, dest, token);
  }
}

// Whole block of a send half. sums, first_row: as plan_sums left them; the latter is [L + 1] afterwards. shared: all of
// the dynamic shared memory.
__device__ inline void send_rows(const InternodeLlCombineParams &c, uint64_t epoch, int table, const SumWords &first,
                                 int most, int32_t *sums, int32_t *first_row, SumList *lists, void *shared) {
  const InternodeLlParams &p = c.call;
  if (most > 0) send_sums(c, epoch, table, first, most, sums, first_row, lists, shared);
  bool apart = false;
#pragma unroll 1
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) apart |= sums[r] < 0;
  if (__syncthreads_or(apart) != 0) send_expert_rows(c, epoch, sums, first_row);
}

// ---- Receive --------------------------------------------------------------------------------------------------------

constexpr int kNoSum = -1;
struct ExpertRows {  // shared: the rows that make up a token; count kNoSum: its sum is NaN
  const uint8_t *row[kMaxTopk];
  uint4 coded[kMaxTopk];  // LogFMT: the bits of a row of which some blocks stay BF16
  float weight[kMaxTopk];
  uint32_t kind[kMaxTopk];
  int32_t count;
};

// A lane's entry of a token, and what of it the sums need.
struct LaneEntry {
  int expert, rank,
      leader;       // leader: the lane of the lowest of the rank's experts, whose row has the sum if there is one
  float weight;     // of all entries that name the expert
  uint64_t theirs;  // the number of that rank's call
  bool needed;      // the first entry that names it; its rank is not masked
};
__device__ inline LaneEntry read_entry(const InternodeLlParams &p, const uint64_t *calls, int token, int expert) {
  const int lane = lane_id();
  LaneEntry e{expert, expert < 0 ? -1 : expert / p.num_local, lane, 0, 0, false};
  const float weight = load_weight_of_lane(p, token);
  const uint32_t same = __match_any_sync(kAllLanes, expert), same_rank = __match_any_sync(kAllLanes, e.rank);
  e.weight = sum_of_same(p, expert, weight, same);
  e.theirs = e.rank < 0 ? 0 : calls[e.rank];
  e.needed = e.rank >= 0 && (same & ((1u << lane) - 1)) == 0 && e.theirs != 0 && !is_masked(p.session, e.rank);
  int lowest = expert;
#pragma unroll 1
  for (int k = 0; k < p.num_topk; ++k) {
    const int other = __shfl_sync(kAllLanes, expert, k);
    if ((same_rank >> k & 1) == 0 || e.rank < 0 || (other >= lowest && (other > lowest || k >= e.leader))) continue;
    lowest = other;
    e.leader = k;
  }
  return e;
}

// By a warp: waits for the words of the rows that lanes `wait` for, and leaves out ranks that are masked meanwhile.
// False: the call has failed.
__device__ inline bool await_row_words(const InternodeLlParams &p, bool wait, const uint64_t *at, LaneEntry &e,
                                       uint64_t &word) {
  const Session &s = p.session;
  const auto missing = [&] { return wait && !is_from(word, e.theirs, e.rank); };
  for (;;) {  // after a rank was masked it still waits for the others
    int peer = -1;
    uint64_t waited = 0;
    const uint32_t code = warp_wait_until(
        s, peer, waited,
        [&] {
          if (missing()) word = ptx::ld_acquire_sys(at);
          return __any_sync(kAllLanes, missing()) == 0;
        },
        [&] { return missing() ? e.rank : -1; });
    if (code == 0) return true;
    bool masked = false;
    if (lane_id() == 0) {
      masked = mask_instead(s, code, peer);
      if (!masked)
        report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, static_cast<int64_t>(e.theirs), 0, waited);
    }
    if (__shfl_sync(kAllLanes, static_cast<int>(masked), 0) == 0) return false;
    if (e.rank == peer) wait = e.needed = false;
  }
}

// By the first warp: waits for the rows of a token's experts: first for that of the lowest expert of each rank, and
// where that is a sum for none of its others. Rows of a masked rank are left out.
__device__ inline void await_expert_rows(const InternodeLlParams &p, const uint64_t *calls, int token,
                                         ExpertRows *list) {
  const int lane = lane_id();
  bool wrong = false;
  const int expert = checked_expert(p, load_index_of_lane(p, token), wrong);
  if (__any_sync(kAllLanes, wrong) != 0) {  // which row has the sum is not known here
    if (lane == 0) list->count = kNoSum;
    return;
  }
  LaneEntry e = read_entry(p, calls, token, expert);
  const auto *at = mine_at<uint64_t>(p, expert_word_at(p, e.theirs, expert < 0 ? 0 : expert, token));
  uint64_t word = 0;
  const bool leads = e.needed && e.leader == lane;
  bool good = await_row_words(p, leads, at, e, word);
  const bool summed =
      __shfl_sync(kAllLanes, static_cast<int>(leads && e.needed && is_sum(signal_value(word))), e.leader) != 0;
  if (summed && !leads) e.needed = false;
  good = good && await_row_words(p, e.needed && !leads, at, e, word);
  const uint32_t rows = good ? __ballot_sync(kAllLanes, e.needed) : 0;
  if ((rows >> lane & 1) != 0) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const uint8_t *row = list->row[n] = mine_at(p, expert_row_at(p, e.theirs, expert, token));
    const uint32_t kind = list->kind[n] = signal_value(word);
    if (is_logfmt(kind) && !is_all_coded(kind))
      list->coded[n] =
          ptx::ld_stream(row + (is_spread(kind) ? (kind >> kSpreadFirstAt) * kPlainBlockBytes + kSpreadBitsAt : 0));
    list->weight[n] = is_sum(kind) ? 1.0f : e.weight;
  }
  if (lane == 0) list->count = __popc(rows);
}

// Sums a token's chunks of 8 channels `at` and, if there is one, `at` + kLlThreads. Loads of both and of several rows
// are in flight together. kLogfmt: rows may be in LogFMT.
template <bool kLogfmt>
__device__ __forceinline__ void add_expert_rows(const InternodeLlCombineParams &c, const ExpertRows *list, int token,
                                                int at) {
  constexpr int kRows = 4, kChunks = 2;
  const int chunks = c.call.hidden / 8;
  const float none = __uint_as_float(list->count == kNoSum ? 0x7fc00000u : 0);
  float sum[kChunks][8];
#pragma unroll
  for (int i = 0; i < kChunks * 8; ++i) sum[i / 8][i % 8] = none;
#pragma unroll 1
  for (int first = 0; first < list->count; first += kRows) {
    uint4 data[kRows][kChunks];
    uint32_t place[kRows][kChunks];  // of a row in LogFMT
#pragma unroll
    for (int i = 0; i < kRows * kChunks; ++i) {
      const int n = i / kChunks, u = i % kChunks, chunk = at + u * kLlThreads;
      if (first + n >= list->count || chunk >= chunks) continue;
      const uint8_t *row = list->row[first + n];
      const uint32_t kind = list->kind[first + n];
      if (kLogfmt && is_logfmt(kind)) {
        const int block = chunk / 16;
        place[n][u] = is_all_coded(kind) ? coded_place(is_spread(kind), block)
                      : is_spread(kind)  ? spread_place(list->coded[first + n], block)
                                         : place_of_block(list->coded[first + n], block);
        data[n][u] = load_wire_part(row, place[n][u], chunk % 16);
      } else {
        data[n][u] = ptx::ld_stream(row + 16 * chunk);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows * kChunks; ++i) {
      const int n = i / kChunks, u = i % kChunks, chunk = at + u * kLlThreads;
      if (first + n >= list->count || chunk >= chunks) continue;
      const float weight = list->weight[first + n];
      if (kLogfmt && is_logfmt(list->kind[first + n]))
        add_wire_part(data[n][u], place[n][u], chunk % 16, weight, sum[u]);
      else
        add_weighted(sum[u], data[n][u], weight);
    }
  }
#pragma unroll
  for (int u = 0; u < kChunks; ++u)
    if (at + u * kLlThreads < chunks)
      ptx::st_stream(c.combined_x + static_cast<uint64_t>(token) * 2 * c.call.hidden + 16 * (at + u * kLlThreads),
                     round_bf16(sum[u]));
}

__device__ inline void receive_sums(const InternodeLlCombineParams &c, const uint64_t *calls, ExpertRows *list) {
  const InternodeLlParams &p = c.call;
#pragma unroll 1
  for (int token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    if (warp_id() == 0) await_expert_rows(p, calls, token, list);
    __syncthreads();
    mark(kMarkLastHeader, threadIdx.x == 0);
#pragma unroll 1
    for (int at = threadIdx.x; at < p.hidden / 8; at += 2 * kLlThreads) {
      if ((p.flags & DK_LL_LOGFMT) != 0)
        add_expert_rows<true>(c, list, token, at);
      else
        add_expert_rows<false>(c, list, token, at);
    }
    __syncthreads();
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode_ll {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(kLlThreads, 1) combine(const __grid_constant__ InternodeLlCombineParams c) {
  // [R], then sums [R], then first rows [L][R] or row counts [L + 1]; then the sums that groups keep.
  extern __shared__ __align__(16) uint64_t calls[];
  __shared__ union {
    SumList sums[kLlGroups];
    ExpertRows arrivals;
  } shared;
  const InternodeLlParams &p = c.call;
  begin_timeline();
  const uint64_t epoch = epoch_of_call(p);
  const SlotLoads slots = p.sends() ? load_slots(p, epoch, true) : SlotLoads{};
  const KnownTables known = find_table(p);
  const PlanLoads plan = load_plan(p, known.table);
  const SumWords first = load_first_words(p, known.table);
  auto *sums = reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks),
       *first_row = sums + p.session.team.num_ranks;
  set_source_calls(p, epoch, calls);
  if (begin(p.session)) {
    if (is_control_block()) post_low_latency(p, epoch, known.sends_weights);
    mark(kMarkBegun, threadIdx.x == 0);
    const int most = p.sends() ? plan_sums(p, known.table, plan, sums, first_row) : 0;
    const bool good = !p.sends() || await_empty_slots(p, epoch, slots, true);
    mark(kMarkEmpty, threadIdx.x == 0);
    if (known.sends_weights && good) send_weights(p, epoch);
    if (p.sends() && good) send_rows(c, epoch, known.table, first, most, sums, first_row, shared.sums, calls);
    __syncthreads();
    mark(kMarkSent, threadIdx.x == 0);
    if (is_control_block()) publish_newest_by_last_warp(p.session.team);  // while rows are in flight
    if (p.receives() && good) {
      find_source_calls(p, epoch, calls);
      if (is_control_block()) check_low_latency_peers(p, calls);
      mark(kMarkKnown, threadIdx.x == 0);
      receive_sums(c, calls, &shared.arrivals);
      mark(kMarkArrived, true);
      if (is_control_block()) end_receiving(p, epoch, false);
    }
  }
  finish(p.session, [&](bool failed) {
    if (failed && p.receives()) clear_combined(p, c.combined_x);
    end_low_latency(p, epoch, calls, true, failed);
  });
  end_timeline(1, epoch);
}

}  // namespace deep_ep::internode_ll
