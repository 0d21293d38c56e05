// compact_rows.cuh - low-latency dispatch: the outputs after a source was lost during a call.
#pragma once
#include "cuda/impl/low_latency/shared.cuh"

namespace deepep {

struct DispatchOutputs {
  uint8_t *recv_x;  // rows of row_bytes, rows_per_expert for each local expert
  uint32_t *recv_scales;
  int32_t *recv_count, *cumulative_stats, *src_info;
  int64_t *layout_range;
  int64_t rows_per_expert;
  ScalePlaces scales;
  int32_t num_local, row_bytes;
};
__device__ inline DispatchOutputs outputs_of(const LowLatencyArguments &p, const LowLatencyDispatchBuffers &d,
                                             int num_local) {
  return {d.recv_x,       d.recv_scales,       d.recv_count,    d.cumulative_stats, p.src_info,
          p.layout_range, p.rows_per_expert(), scale_places(p), num_local,          value_bytes(p)};
}

// By the last block, only after a rank was lost: removes the rows of a source that did not send all of them, and moves
// the rows after them up.
template <int kThreads>
__device__ inline void close_gaps(const Session &s, uint64_t epoch, const DispatchOutputs &out) {
  const int num_ranks = s.team.num_ranks;
  const int64_t rows = out.rows_per_expert, words = out.scales.words;
  const int chunks = out.row_bytes / 16;
  for (int64_t l = 0; l < out.num_local; ++l) {
    int64_t next = 0;
    auto *x = reinterpret_cast<uint4 *>(out.recv_x) + l * rows * chunks;
    for (int r = 0; r < num_ranks; ++r) {
      const int64_t range = out.layout_range[l * num_ranks + r], first = range >> 32;
      const int64_t count = s.team.scratch->late[r] == epoch ? 0 : range & 0xffffffff;
      for (int64_t i = 0; i < count && first != next; ++i) {
        for (int at = threadIdx.x; at < chunks; at += kThreads)
          x[(next + i) * chunks + at] = x[(first + i) * chunks + at];
        for (int64_t w = threadIdx.x; w < words; w += kThreads)
          out.recv_scales[out.scales.first(l, next + i) + w * out.scales.step] =
              out.recv_scales[out.scales.first(l, first + i) + w * out.scales.step];
        if (threadIdx.x == 0) out.src_info[l * rows + next + i] = out.src_info[l * rows + first + i];
        __syncthreads();
      }
      __syncthreads();
      if (threadIdx.x == 0) out.layout_range[l * num_ranks + r] = next << 32 | count;
      next += count;
    }
  }
  __syncthreads();
}

// By the last block, if a source was lost after its counts had come, or the call has failed: corrects what the other
// blocks wrote.
template <int kThreads>
__device__ __noinline__ inline void mend_outputs(const Session &s, uint64_t epoch, const DispatchOutputs &out,
                                                 bool failed) {
  const int num_ranks = s.team.num_ranks;
  bool late = false;
  for (int r = threadIdx.x; r < num_ranks; r += kThreads) late |= s.team.scratch->late[r] == epoch;
  if (__syncthreads_or(late) != 0 && !failed) close_gaps<kThreads>(s, epoch, out);
  for (int l = threadIdx.x; l < out.num_local; l += kThreads) {
    int total = 0;
    for (int r = 0; r < num_ranks; ++r) {
      int64_t *range = out.layout_range + static_cast<int64_t>(l) * num_ranks + r;
      if (failed) *range = 0;
      total += static_cast<int>(*range & 0xffffffff);
    }
    if (out.cumulative_stats != nullptr && !failed) out.cumulative_stats[l] += total - out.recv_count[l];
    out.recv_count[l] = total;
  }
}

}  // namespace deepep
