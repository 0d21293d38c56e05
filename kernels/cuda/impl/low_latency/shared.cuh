// shared.cuh - what low latency has in common in both GPU libraries: the kernels of this folder (ranks that load and
// store in each other's memory) and those of nvshmem/internode/low_latency (teams with a transport). The arguments of a
// call, which call of a peer belongs to it, how blocks agree on a lost peer, sums of counts and weights. How rows
// travel differs: here each word of a row says by itself that it has arrived, there a signal word follows each row.
#pragma once
#include "cuda/layout/low_latency.cuh"
#include "cuda/sync/session.cuh"

namespace deepep {

constexpr int kLlThreads = 512, kLlGroups = 4, kLlGroupThreads = kLlThreads / kLlGroups;

// Of dispatch and of combine; combine reads src_info and layout_range.
struct LowLatencyArguments {
  Session session;
  uint32_t phases, ticket, flags, format;
  const void *topk_idx;
  const float *topk_weights;
  int32_t num_tokens, num_topk, index_bytes, max_tokens, hidden, num_experts;
  int32_t *src_info;
  int64_t *layout_range, *wait_stats;

  __device__ bool sends() const { return (phases & DK_PHASE_SEND) != 0; }
  __device__ bool receives() const { return (phases & DK_PHASE_RECV) != 0; }
  __device__ bool shrinks() const { return (session.team.flags & DK_TEAM_SHRINK) != 0; }
  __device__ int64_t rows_per_expert() const { return static_cast<int64_t>(session.team.num_ranks) * max_tokens; }
};
struct LowLatencyDispatchBuffers {
  const uint8_t *x, *x_scales;
  uint8_t *recv_x;
  uint32_t *recv_scales;
  int32_t *recv_count, *cumulative_stats;
};
struct LowLatencyCombineBuffers {
  const uint8_t *x;
  uint64_t x_row_stride;
  uint8_t *combined_x;
};

// The last block does what concerns all ranks.
__device__ inline bool is_control_block() { return blockIdx.x == gridDim.x - 1; }

// Of a row on its way and at its place, without scales.
template <class P>
__host__ __device__ inline int value_bytes(const P &p) {
  return p.format == DK_FORMAT_BF16 ? 2 * p.hidden : p.format == DK_FORMAT_FP8 ? p.hidden : p.hidden / 2;
}
template <class P>
__host__ __device__ inline bool is_fp4(const P &p) {
  return p.format >= DK_FORMAT_FP4;
}
// Words of a received row's scales.
template <class P>
__device__ inline int64_t stored_scales(const P &p) {
  if (is_fp4(p)) return p.hidden / 64;
  return p.hidden / ((p.flags & DK_LL_UE8M0) != 0 ? 4 * kScaleChannels : kScaleChannels);
}
// Where a row's scales are in recv_scales, as words: the first one, and how far it is to the next.
struct ScalePlaces {
  int64_t rows_per_expert, words, step;
  int format;
  __device__ int64_t first(int64_t expert, int64_t row) const {
    if (format == DK_FORMAT_FP4) return (expert * rows_per_expert + row) * words;
    if (format == DK_FORMAT_NVFP4)  // tiles of 128 rows x one word
      return (expert * ((rows_per_expert + 127) / 128) + row / 128) * words * 128 + row % 32 * 4 + row / 32 % 4;
    return expert * words * rows_per_expert + row;
  }
};
template <class P>
__device__ inline ScalePlaces scale_places(const P &p) {
  const int format = static_cast<int>(p.format);
  const int64_t rows = p.rows_per_expert(), words = format == DK_FORMAT_BF16 ? 0 : stored_scales(p);
  return {rows, words, format == DK_FORMAT_FP4 ? 1 : format == DK_FORMAT_NVFP4 ? 128 : rows, format};
}

// Statistics: of a row on the wire.
template <class P>
__device__ __forceinline__ uint64_t dispatch_payload(const P &p) {
  const int scales = p.format == DK_FORMAT_BF16 ? 0 : p.format == DK_FORMAT_FP8 ? p.hidden / 32 : p.hidden / 16;
  return static_cast<uint64_t>(value_bytes(p) + scales);
}

// Whole warp, a lane for each entry of a token: the weight of an expert that is named several times, by the lanes of
// `same`.
template <class P>
__device__ inline float sum_of_same(const P &p, int expert, float weight, uint32_t same) {
  const bool repeated = (same & ((1u << lane_id()) - 1)) != 0;
  if (__any_sync(kAllLanes, expert >= 0 && repeated) == 0) return weight;
  float sum = 0;
  for (int k = 0; k < p.num_topk; ++k) {  // in this order, so that the sum repeats
    const float other = __shfl_sync(kAllLanes, weight, k);
    if ((same >> k & 1) != 0) sum += other;
  }
  return sum;
}

// Whole block of a combine's send half: running sums of the rows of each local expert, [L + 1] in shared memory.
template <class P>
__device__ inline void sum_expert_rows(const P &p, const int64_t *layout_range, int num_local, int32_t *before) {
  const int num_ranks = p.session.team.num_ranks;
  for (int l = threadIdx.x; l < num_local; l += kLlThreads) {
    int64_t total = 0;
    for (int r = 0; r < num_ranks; ++r) total += layout_range[static_cast<int64_t>(l) * num_ranks + r] & 0xffffffff;
    before[l + 1] = static_cast<int32_t>(min(total, p.rows_per_expert()));
  }
  __syncthreads();
  if (warp_id() == 0) {
    int32_t sum = 0;  // of the experts before
    for (int first = 0; first < num_local; first += kWarp) {
      const int l = first + lane_id();
      int32_t running = l < num_local ? before[l + 1] : 0;
      for (int step = 1; step < kWarp; step *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, running, step);
        if (lane_id() >= step) running += other;
      }
      if (l < num_local) before[l + 1] = sum + running;
      sum += __shfl_sync(kAllLanes, running, kWarp - 1);
    }
    if (lane_id() == 0) before[0] = 0;
  }
  __syncthreads();
}

// Whole block: a failed combine leaves NaN.
template <class P>
__device__ inline void clear_combined(const P &p, uint8_t *combined_x) {
  const uint64_t chunks = static_cast<uint64_t>(p.num_tokens) * p.hidden / 8;
  for (uint64_t i = threadIdx.x; i < chunks; i += kLlThreads)
    reinterpret_cast<uint4 *>(combined_x)[i] = {0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u};
}

// With shrink all blocks of a dispatch's receive half must agree whether a source's counts came: the first block that
// writes its verdict decides for all.
enum : uint64_t { kArrived = 1, kAbsent = 2 };
__device__ inline uint64_t decide_arrival(const Session &s, uint64_t epoch, int source, uint64_t mine) {
  auto *verdict = reinterpret_cast<unsigned long long *>(&s.team.scratch->verdict[source]);
  for (;;) {
    const unsigned long long before = ptx::ld_relaxed_gpu(&s.team.scratch->verdict[source]);
    if (before >> 2 == epoch) return before & 3;
    if (atomicCAS(verdict, before, static_cast<unsigned long long>(epoch << 2 | mine)) == before) return mine;
  }
}

// With shrink: one poll for the call of `source` that belongs to this rank's call `epoch`. In step it has the same
// number, or is as far ahead as last time; a source that went on without this rank is further ahead; one whose mask was
// lifted may have any number, but sends a new one. number_at(copy): the call's number in the source's newest message of
// that copy, by an acquire. Returns the copy, or -1.
template <class NumberAt>
__device__ inline int find_handshake(const TeamView &team, uint64_t epoch, int source, NumberAt number_at,
                                     uint64_t &found) {
  const uint64_t expected = epoch + team.scratch->epoch_ahead[source], given_up = given_up_by(team, source);
  const uint64_t seen = max(team.scratch->seen[source], given_up);
  const bool anywhere = team.scratch->returned[source] != 0;
  int best = -1;
  found = 0;
  for (int pass = 0; pass < 2; ++pass) {  // the second one finds what was stored before the newest of the first one
    for (int copy = 0; copy < kLowLatencyHandshakeCopies; ++copy) {
      const uint64_t number = number_at(copy);
      const bool exact = number == expected && !anywhere && number > given_up;
      if (!exact && (number <= seen || (number <= expected && !anywhere))) continue;
      if (exact || best < 0 || number < found) {
        best = copy;
        found = number;
      }
      if (exact) return best;
    }
    if (best < 0) return -1;
  }
  return best;
}

}  // namespace deepep
