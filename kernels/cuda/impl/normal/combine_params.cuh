// combine_params.cuh - the parameters of combine.
#pragma once
#include "cuda/layout/team.cuh"

namespace deepep {

// The arguments of a call, and what the launcher derives from them (see DispatchParams).
struct CombineParams : dk_combine_params {
  Session session{};
  uint32_t row_bytes = 0, stage_bytes = 0;
  int32_t senders = 0;       // warps of a block that send rows
  int32_t piece_chunks = 0;  // of a row, that a reducing warp takes at a time: see SumPiece
  RingShape ring{};          // with a routing: threads that sum have no register for it
  uint32_t slot_bytes = 0;   // of the ring: a row, or with DK_COMBINE_UNREDUCED a row for each choice
  // Which inbox of each peer this rank's rows are in, by copies that the host has made by a matrix with this hash, by
  // which so many rows are this rank's (launch/normal_copies.h); -1: SMs send them.
  int32_t inbox = -1, pushed_rows = 0;
  uint32_t pushed_hash = 0;
  int32_t captured = 0;  // a graph replays the kernel: peers' blocks may be gone by then

  __host__ __device__ bool pushes() const { return inbox >= 0; }
  __device__ const uint8_t *x() const { return pointer<const uint8_t>(dk_combine_params::x); }
  __device__ const float *topk_weights() const { return pointer<const float>(dk_combine_params::topk_weights); }
  __device__ const uint8_t *bias(int which) const { return pointer<const uint8_t>(dk_combine_params::bias[which]); }
  __device__ const int32_t *rank_prefix_matrix() const {
    return pointer<const int32_t>(dk_combine_params::rank_prefix_matrix);
  }
  __device__ const int32_t *send_head() const { return pointer<const int32_t>(dk_combine_params::send_head); }
  __device__ const int32_t *recv_src_idx() const { return pointer<const int32_t>(dk_combine_params::recv_src_idx); }
  __device__ uint8_t *combined_x() const { return pointer<uint8_t>(dk_combine_params::combined_x); }
  __device__ float *combined_topk_weights() const { return pointer<float>(dk_combine_params::combined_topk_weights); }
};

}  // namespace deepep
