// combine.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: experts' rows back to the tokens' ranks.
// Each expert's row is sent by itself, and the token's rank applies the weights; the CUDA library's combine sums at the
// experts' rank instead.
#pragma once
#include "internode/low_latency/logfmt.cuh"

namespace deepep::internode {

struct InternodeLlCombineParams : LowLatencyCombineBuffers {
  InternodeLlParams call;
};

enum : uint32_t { kRowPlain = 1, kRowLogfmt = 2 };  // values of a row's signal word

// ---- Send -----------------------------------------------------------------------------------------------------------

// By a warp: the rank that sent an expert's row; -1: layout_range has none.
__device__ inline int source_of_row(const InternodeLlParams &p, int local_expert, int row) {
  const int num_ranks = p.session.team.num_ranks;
  const int64_t *ranges = p.layout_range + static_cast<int64_t>(local_expert) * num_ranks;
  for (int first = 0; first < num_ranks; first += kWarp) {
    const int r = first + lane_id();
    const int64_t range = r < num_ranks ? ranges[r] : 0, start = range >> 32;
    const uint32_t found = __ballot_sync(kAllLanes, row >= start && row < start + (range & 0xffffffff));
    if (found != 0) return first + __ffs(static_cast<int>(found)) - 1;
  }
  return -1;
}

// By a warp. Inside the node it stores the row at the destination; for another node it stages the row where a NIC can
// read it, unless zero copy has it there already.
__device__ inline void send_expert_row(const InternodeLlCombineParams &c, uint64_t epoch, int local_expert, int row,
                                       int dest, int token) {
  const InternodeLlParams &p = c.call;
  const int rank = p.session.team.rank, expert = rank * p.num_local + local_expert;
  const int64_t number = local_expert * p.rows_per_expert() + row;
  const uint8_t *from = c.x + static_cast<uint64_t>(number) * c.x_row_stride;
  uint8_t *stage = mine_at(p, p.at.stage + static_cast<uint64_t>(number) * 2 * p.hidden);
  uint32_t kind = kRowPlain, bytes = 2 * static_cast<uint32_t>(p.hidden);
  uint4 coded{0, 0, 0, 0};
  if ((p.flags & DK_LL_LOGFMT) != 0) coded = choose_coded(from, p.hidden);
  if ((coded.x | coded.y | coded.z | coded.w) != 0) {
    bytes = encode_row(from, stage, p.hidden, coded);
    kind = kRowLogfmt;
    from = stage;
  } else if ((p.flags & DK_LL_ZERO_COPY) == 0 && !uses_stores(p.session.team, dest)) {
    copy_row(stage, from, bytes);
    __syncwarp();
    from = stage;
  }
  deliver(p, dest, expert_row_at(p, epoch, expert, token), from, bytes, expert_word_at(p, epoch, expert, token),
          signal_word(epoch, rank, kind));
  if (lane_id() == 0) add_sent_bytes(p.session, dest, 2ull * p.hidden);
}

__device__ inline void send_expert_rows(const InternodeLlCombineParams &c, uint64_t epoch, int32_t *before) {
  const InternodeLlParams &p = c.call;
  sum_expert_rows(p, p.layout_range, p.num_local, before);
  const int total = before[p.num_local], stride = kLlWarps * static_cast<int>(gridDim.x);
  for (int n = warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); n < total; n += stride) {
    const int l = expert_of_row(before, p.num_local, n), row = n - before[l];
    const int dest = source_of_row(p, l, row), token = p.src_info[l * p.rows_per_expert() + row];
    if (dest < 0 || token < 0 || token >= p.max_tokens || __any_sync(kAllLanes, is_masked(p.session, dest))) continue;
    send_expert_row(c, epoch, l, row, dest, token);
  }
}

// ---- Receive --------------------------------------------------------------------------------------------------------

struct ExpertRows {  // shared: the rows of a token's experts
  const uint8_t *row[kMaxTopk];
  float weight[kMaxTopk];
  uint32_t kind[kMaxTopk];
  int32_t count;
};

// By the first warp: waits for the rows of a token's experts; rows of a masked rank are left out.
__device__ inline void await_expert_rows(const InternodeLlParams &p, const uint64_t *calls, int token,
                                         ExpertRows *list) {
  const Session &s = p.session;
  const int lane = lane_id(), expert = expert_of_lane(p, token);
  const float weight = lane < p.num_topk ? p.topk_weights[static_cast<int64_t>(token) * p.num_topk + lane] : 0;
  const int rank = expert < 0 ? -1 : expert / p.num_local;
  // The first entry that names an expert carries the weights of all that do.
  const uint32_t same = __match_any_sync(kAllLanes, expert);
  const bool repeated = (same & ((1u << lane) - 1)) != 0;
  const float sum = sum_of_same(p, expert, weight, same);
  const uint64_t theirs = rank < 0 ? 0 : calls[rank];
  bool needed = rank >= 0 && !repeated && theirs != 0 && !is_masked(s, rank);
  const auto *at = mine_at<uint64_t>(p, expert_word_at(p, theirs, expert < 0 ? 0 : expert, token));
  uint64_t word = 0;
  for (;;) {  // after a rank was masked it still waits for the others
    int peer = -1;
    uint64_t waited = 0;
    const uint32_t code = warp_wait_until(
        s, peer, waited,
        [&] {
          if (needed && !is_from(word, theirs, rank)) word = ptx::ld_acquire_sys(at);
          return __all_sync(kAllLanes, !needed || is_from(word, theirs, rank)) != 0;
        },
        [&] { return needed && !is_from(word, theirs, rank) ? rank : -1; });
    if (code == 0) break;
    bool masked = false;
    if (lane == 0) {
      masked = mask_instead(s, code, peer);
      if (!masked)
        report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, static_cast<int64_t>(theirs), 0, waited);
    }
    masked = __shfl_sync(kAllLanes, static_cast<int>(masked), 0) != 0;
    if (!masked) {
      if (lane == 0) list->count = 0;
      return;
    }
    if (rank == peer) needed = false;
  }
  const uint32_t rows = __ballot_sync(kAllLanes, needed);
  if (needed) {
    const int n = __popc(rows & ((1u << lane) - 1));
    list->row[n] = mine_at(p, expert_row_at(p, theirs, expert, token));
    list->kind[n] = signal_value(word);
    list->weight[n] = sum;
  }
  if (lane == 0) list->count = __popc(rows);
}

// Sums 8 channels of a token. Loads of several rows are in flight together.
__device__ inline void add_expert_rows(const InternodeLlCombineParams &c, const ExpertRows *list, int token,
                                       int chunk) {
  constexpr int kRows = 8;
  float sum[8] = {};
  for (int first = 0; first < list->count; first += kRows) {
    uint4 data[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n)
      if (first + n < list->count && list->kind[first + n] == kRowPlain)
        data[n] = ptx::ld_stream(list->row[first + n] + 16 * chunk);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n >= list->count) continue;
      if (list->kind[first + n] == kRowPlain)
        add_weighted(sum, data[n], list->weight[first + n]);
      else
        add_coded(list->row[first + n], chunk, list->weight[first + n], sum);
    }
  }
  ptx::st_stream(c.combined_x + static_cast<uint64_t>(token) * 2 * c.call.hidden + 16 * chunk, round_bf16(sum));
}

__device__ inline void receive_sums(const InternodeLlCombineParams &c, const uint64_t *calls, ExpertRows *list) {
  const InternodeLlParams &p = c.call;
  for (int token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    if (warp_id() == 0) await_expert_rows(p, calls, token, list);
    __syncthreads();
    for (int chunk = threadIdx.x; chunk < p.hidden / 8; chunk += kLlThreads) add_expert_rows(c, list, token, chunk);
    __syncthreads();
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode_ll {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(kLlThreads, 1) combine(const __grid_constant__ InternodeLlCombineParams c) {
  extern __shared__ __align__(16) uint64_t calls[];  // [R], then row counts [L + 1]
  __shared__ ExpertRows arrivals;
  const InternodeLlParams &p = c.call;
  const uint64_t epoch = epoch_of_call(p);
  if (begin(p.session)) {
    if (is_control_block()) post_low_latency(p, epoch);
    const bool good = !p.sends() || await_empty_slots(p, epoch, true);
    if (p.sends() && good) send_expert_rows(c, epoch, reinterpret_cast<int32_t *>(calls + p.session.team.num_ranks));
    __syncthreads();
    if (is_control_block()) publish_newest_by_last_warp(p.session.team);  // while rows are in flight
    if (p.receives() && good) {
      find_source_calls(p, epoch, calls);
      if (is_control_block()) check_low_latency_peers(p, calls);
      receive_sums(c, calls, &arrivals);
      if (is_control_block()) await_callers_buffer(p, epoch);
    }
  }
  finish(p.session, [&](bool failed) {
    if (failed && p.receives()) clear_combined(p, c.combined_x);
    end_low_latency(p, epoch, calls, true, failed);
  });
}

}  // namespace deep_ep::internode_ll
