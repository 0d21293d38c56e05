// combine_params.cuh - the parameters of combine.
#pragma once
#include <cuda_bf16.h>

#include "cuda/layout/team.cuh"

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

}  // namespace deepep
