// params.cuh - the parameters of low-latency dispatch and combine.
#pragma once
#include "cuda/layout/low_latency.cuh"
#include "cuda/layout/team.cuh"

namespace deepep {

// Where a send half whose rows cross by copy engines leaves them: [R, tokens] rows of row_bytes and as many of words,
// in this rank's own memory. Null: rows are stored at their receivers.
struct Outbox {
  uint8_t *rows;
  uint32_t *words;  // of FP8 and LogFMT, as in a slot; FP4's scales lie behind a row's values
  uint32_t row_bytes;
};

// Offsets in a block, so that no thread has to work them out.
struct LowLatencyPlaces {
  uint64_t slot[kLowLatencySlots], headers, header_step, row_words[kLowLatencySlots], weights[kWeightCopies];
};

// The arguments of a call (dk_ll_dispatch_params or dk_ll_combine_params), and what the launcher derives from them.
template <class Args>
struct LowLatencyParams : Args {
  Session session{};
  LowLatencyLayout at{};
  LowLatencyPlaces places{};
  Divisor by_local, by_topk;  // experts of a rank, entries of a token
  uint32_t second_slot = 0;   // with DK_TEAM_LL_COPY: the slot of a call that sends

  __device__ bool sends() const { return (Args::phases & DK_PHASE_SEND) != 0; }
  __device__ bool receives() const { return (Args::phases & DK_PHASE_RECV) != 0; }
  __device__ int num_local() const { return static_cast<int>(by_local.by); }
  __device__ int64_t rows_per_expert() const {
    return static_cast<int64_t>(session.team.num_ranks) * Args::num_max_tokens;
  }
  __device__ const void *topk_idx() const { return pointer<const void>(Args::topk_idx); }
  __device__ const float *topk_weights() const { return pointer<const float>(Args::topk_weights); }
  __device__ int32_t *src_info() const { return pointer<int32_t>(Args::src_info); }
  __device__ int64_t *layout_range() const { return pointer<int64_t>(Args::layout_range); }
  __device__ int64_t *wait_stats() const { return pointer<int64_t>(Args::wait_stats); }
};

struct LowLatencyDispatchParams : LowLatencyParams<dk_ll_dispatch_params> {
  int32_t tile_tokens = 0;  // whose entries fit into shared memory
  Outbox outbox{};

  __device__ const uint8_t *x() const { return pointer<const uint8_t>(dk_ll_dispatch_params::x); }
  __device__ const uint8_t *x_scales() const { return pointer<const uint8_t>(dk_ll_dispatch_params::x_scales); }
  __device__ uint8_t *recv_x() const { return pointer<uint8_t>(dk_ll_dispatch_params::recv_x); }
  __device__ uint32_t *recv_scales() const { return pointer<uint32_t>(dk_ll_dispatch_params::recv_scales); }
  __device__ int32_t *recv_count() const { return pointer<int32_t>(dk_ll_dispatch_params::recv_count); }
  __device__ int32_t *cumulative_stats() const { return pointer<int32_t>(dk_ll_dispatch_params::cumulative_stats); }
};

struct LowLatencyCombineParams : LowLatencyParams<dk_ll_combine_params> {  // layout_range and src_info are inputs here
  static constexpr bool kCopies = false, kBeside = false;
  __device__ const uint8_t *x() const { return pointer<const uint8_t>(dk_ll_combine_params::x); }
  __device__ uint8_t *combined_x() const { return pointer<uint8_t>(dk_ll_combine_params::combined_x); }
};
// In a team with DK_TEAM_LL_COPY (see combine_outbox.cuh).
struct CopiedCombineParams : LowLatencyCombineParams {
  static constexpr bool kCopies = true;
  Outbox outbox{};      // of [R, num_max_tokens] rows, for a send half
  uint32_t defers = 0;  // 1: SumsBeside follows, and sums
};
// Of the kernel that sums beside the caller's stream, between the halves.
struct SumsBesideParams : CopiedCombineParams {
  static constexpr bool kBeside = true;
};

}  // namespace deepep
