// notify_counts.cuh - notify: numbers of a rank's rows, and the sums of all ranks' counts.
#pragma once
#include "cuda/impl/normal/notify_params.cuh"
#include "cuda/sync/agreement.cuh"

namespace deepep {

constexpr int kNotifyThreads = 512;

// Of a warp: the sum of the values up to this lane's.
template <class T>
__device__ inline T inclusive_sum(T sum) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane_id() >= step) sum += other;
  }
  return sum;
}

// By a warp: f(i, the sum of the rows of ranks 0 .. i), where rows(i) is what rank i sends; all ranks' loads are in
// flight together. Returns the sum of all.
template <class Rows, class F>
__device__ inline int sum_over_ranks(int num_ranks, Rows rows, F f) {
  int before = 0;
  for (int base = 0; base < num_ranks; base += kWarp) {
    const int i = base + lane_id(), sum = before + inclusive_sum(i < num_ranks ? rows(i) : 0);
    if (i < num_ranks) f(i, sum);
    before = __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return before;
}

// Exclusive sum over the block's threads; the sum of all is left in total.
__device__ inline int block_prefix(int value, int &total) {
  __shared__ int warps[kNotifyThreads / kWarp];
  const int sum = inclusive_sum(value);
  __syncthreads();
  if (lane_id() == kWarp - 1) warps[warp_id()] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kNotifyThreads / kWarp; ++w) {
    if (w < warp_id()) before += warps[w];
    total += warps[w];
  }
  return before + sum - value;
}

__device__ inline void number_rows(const NotifyParams &p, int to) {
  constexpr int kEach = 8;  // consecutive tokens of one thread, with all loads in flight: 4096 tokens need one round
  const int num_ranks = p.session.team.num_ranks;
  int base = 0;
  for (int first = 0; first < p.num_tokens; first += kNotifyThreads * kEach) {
    const int mine = first + static_cast<int>(threadIdx.x) * kEach;
    uint32_t sent = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (mine + i < p.num_tokens && p.token_in_rank()[static_cast<int64_t>(mine + i) * num_ranks + to] != 0)
        sent |= 1u << i;
    int total;
    const int before = base + block_prefix(__popc(sent), total);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (mine + i < p.num_tokens)
        p.send_head()[static_cast<int64_t>(mine + i) * num_ranks + to] =
            (sent >> i & 1) != 0 ? before + __popc(sent & ((1u << i) - 1)) : -1;
    base += total;
  }
  // The counts have left already: this rank's first message of the dispatch says that they are wrong.
  const int given = p.tokens_per_rank()[to];
  if (threadIdx.x != 0 || given == base) return;
  WrongCounts &wrong = p.session.team.scratch->wrong_counts[p.session.call % kExchanges];
  auto *call = reinterpret_cast<unsigned long long *>(&wrong.call);
  const unsigned long long before = *call;
  if (before == p.session.call || atomicCAS(call, before, p.session.call) != before) return;  // another block's
  wrong.expected = base;
  wrong.seen = given;
}

// counts(i): the counts that rank i sent; limit(i): how many rows it has room for; without(i): it takes no part. A warp
// for each rank, from the last one on, beside those that sum the experts'.
template <class Counts, class Limit, class Without>
__device__ inline void sum_matrix(const NotifyParams &p, Counts counts, Limit limit, Without without) {
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks, node = s.team.rank / s.team.num_nvl_peers;
  constexpr int kWarps = kNotifyThreads / kWarp;
  for (int j = kWarps - 1 - warp_id(); j < num_ranks; j += kWarps) {
    const auto rows = [&](int i) { return without(i) || without(j) ? 0 : static_cast<int>(counts(i)[j]); };
    const int sum = sum_over_ranks(num_ranks, rows, [&](int i, int rows_before_next) {
      p.rank_prefix_matrix()[i * num_ranks + j] = rows_before_next;
    });
    const int max_rows = without(j) ? -1 : limit(j);
    if (max_rows >= 0 && sum > max_rows && lane_id() == 0)  // on every rank: none goes on
      report_refusal(s, kVoid, DK_EINVAL, j, DK_FIELD_WORST_TOKENS, max_rows, sum);
    if (j != s.team.rank || p.counts() == nullptr) continue;
    const int from_node = sum_over_ranks(
        num_ranks, [&](int i) { return i / s.team.num_nvl_peers == node ? rows(i) : 0; }, [](int, int) {});
    if (lane_id() != 0) continue;
    p.counts()->num_recv_tokens = sum;
    p.counts()->num_recv_nodes_tokens = sum - from_node;
  }
  const int local = p.num_experts / num_ranks;
  for (int e = threadIdx.x; p.counts() != nullptr && e < local; e += kNotifyThreads) {
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < num_ranks; ++i) sum += without(i) ? 0 : static_cast<int>(counts(i)[num_ranks + e]);
    p.counts()->per_expert[e] = ceil_div(sum, p.expert_alignment) * p.expert_alignment;
  }
  __syncthreads();  // the first thread looks for refusals next
}

// By one block: leaves the matrix for copies of later dispatches.
__device__ inline void note_matrix(const NotifyParams &p) {
  if (p.note == nullptr) return;
  const int entries = p.session.team.num_ranks * p.session.team.num_ranks;
  if (threadIdx.x == 0) {
    ptx::st_relaxed_sys(&p.note->call, 0);
    ptx::fence_acq_rel_sys();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += static_cast<int>(blockDim.x))
    p.note->matrix[i] = p.rank_prefix_matrix()[i];
  __syncthreads();
  if (threadIdx.x == 0) ptx::st_release_sys(&p.note->call, p.session.call);
}

// By one block, unless the notify failed: signals the host that the counts are valid.
__device__ inline void announce_counts(const NotifyParams &p) {
  const bool good = __syncthreads_or(threadIdx.x == 0 && !has_failed(p.session) &&
                                     ptx::ld_relaxed_gpu(&p.session.team.scratch->refusing) != kVoid) != 0;
  if (good) note_matrix(p);
  if (threadIdx.x == 0 && p.counts() != nullptr && good) ptx::st_release_sys(&p.counts()->seq, p.session.call);
}
// By the last block, of an exchange that failed. A dispatch that follows it moves nothing.
__device__ inline void void_notify(const NotifyParams &p) {
  const int64_t num_ranks = p.session.team.num_ranks;
  for (int64_t i = threadIdx.x; i < num_ranks * num_ranks; i += kNotifyThreads) p.rank_prefix_matrix()[i] = 0;
  for (int64_t i = threadIdx.x; i < p.num_tokens * num_ranks; i += kNotifyThreads) p.send_head()[i] = -1;
  if (threadIdx.x != 0 || p.counts() == nullptr) return;
  p.counts()->num_recv_tokens = -1;
  ptx::st_release_sys(&p.counts()->seq, p.session.call);
}
// By the last block.
__device__ inline void end_notify(const NotifyParams &p, bool failed) {
  if (failed) void_notify(p);
  if (threadIdx.x == 0) end_epoch(p.session.team);
  record_kernel(p.session, nullptr, true, failed);
}

}  // namespace deepep
