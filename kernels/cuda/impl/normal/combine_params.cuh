// combine_params.cuh - what combine is told, its message, sums of BF16.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/sync/session.cuh"

namespace deepep {

struct CombineParams {
  Session session;
  const uint8_t *x;
  const float *topk_weights;
  const __nv_bfloat16 *bias[2];
  const int32_t *rank_prefix_matrix, *send_head, *recv_src_idx;
  uint32_t row_bytes, stage_bytes;
  int32_t senders;  // warps of a block that send rows
  int32_t num_tokens, num_recv_tokens, hidden, num_topk;
  __nv_bfloat16 *combined_x;
  float *combined_weights;
};

__device__ inline int matrix_before(const int32_t *matrix, int num_ranks, int source, int owner) {
  return source == 0 ? 0 : matrix[(source - 1) * num_ranks + owner];
}

__device__ inline Handshake combine_handshake(const CombineParams &p, uint64_t epoch) {
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.row_bytes;
  hand.mine.op = DK_OP_COMBINE;
  hand.mine.num_topk = p.num_topk;
  if (p.num_tokens == 0 && p.num_recv_tokens == 0) hand.mine.flags = kEnterSilent;
  return hand;
}

// A failed combine leaves NaN.
__device__ inline void clear_combine_outputs(const CombineParams &p) {
  const uint64_t chunks = static_cast<uint64_t>(p.num_tokens) * p.row_bytes / 16;
  constexpr uint32_t kNan = 0x7fc07fc0u;
  for (uint64_t i = threadIdx.x; i < chunks; i += blockDim.x)
    reinterpret_cast<uint4 *>(p.combined_x)[i] = {kNan, kNan, kNan, kNan};
  for (int64_t i = threadIdx.x; p.combined_weights != nullptr && i < static_cast<int64_t>(p.num_tokens) * p.num_topk;
       i += blockDim.x)
    p.combined_weights[i] = __uint_as_float(0x7fc00000u);
}

}  // namespace deepep
