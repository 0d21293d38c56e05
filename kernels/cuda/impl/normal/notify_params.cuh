// notify_params.cuh - the parameters of notify.
#pragma once
#include "cuda/layout/team.cuh"

namespace deepep {

struct NotifyParams {
  Session session;
  const int32_t *per_rank, *per_expert;
  const uint8_t *token_in_rank;
  int32_t num_tokens, num_topk, num_experts, expert_alignment, num_worst_tokens, num_scales;
  uint64_t hidden_bytes;
  int32_t *rank_prefix_matrix, *send_head;
  dk_counts *counts;
};

}  // namespace deepep
