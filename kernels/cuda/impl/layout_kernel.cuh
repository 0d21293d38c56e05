// layout_kernel.cuh - how many tokens go to each rank, node and expert, and which token to which rank.
// Blocks count a share of the tokens each in shared memory, add it to the team's histogram, and the last one writes it out.
#pragma once
#include "cuda/sync/session.cuh"

namespace deepep {

constexpr int kLayoutThreads = 128;

struct LayoutParams {
  Session session;
  const void *topk_idx;
  int32_t index_bytes, num_tokens, num_topk, num_experts, num_nodes;
  int32_t *per_rank, *per_node, *per_expert;
  uint8_t *token_in_rank;
};

// One thread, one token: counts each rank and node once, each expert once.
__device__ inline void count_token(const LayoutParams &p, int token, uint32_t *experts, uint32_t *ranks, uint32_t *nodes) {
  const int num_ranks = p.session.team.num_ranks, local = p.num_experts / num_ranks, peers = p.session.team.num_nvl_peers;
  uint8_t *in_rank = p.token_in_rank + static_cast<int64_t>(token) * num_ranks;
  for (int r = 0; r < num_ranks; ++r) in_rank[r] = 0;
  const int64_t row = static_cast<int64_t>(token) * p.num_topk;
  for (int k = 0; k < p.num_topk; ++k) {
    const int64_t expert = load_index(p.topk_idx, row + k, p.index_bytes);
    if (expert == -1) continue;
    if (expert < -1 || expert >= p.num_experts) {
      report_failure(p.session, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert, 0);
      continue;
    }
    const int rank = static_cast<int>(expert) / local, node = rank / peers;
    bool new_expert = true, new_rank = true, new_node = true;
    for (int before = 0; before < k; ++before) {
      const int64_t other = load_index(p.topk_idx, row + before, p.index_bytes);
      if (other < 0 || other >= p.num_experts) continue;
      const int other_rank = static_cast<int>(other) / local;
      new_expert &= other != expert, new_rank &= other_rank != rank, new_node &= other_rank / peers != node;
    }
    if (new_expert) atomicAdd(experts + expert, 1u);
    if (new_rank) atomicAdd(ranks + rank, 1u), in_rank[rank] = 1;
    if (new_node) atomicAdd(nodes + node, 1u);
  }
}

__global__ void __launch_bounds__(kLayoutThreads) layout_kernel(const __grid_constant__ LayoutParams p) {
  extern __shared__ uint32_t counts[]; // experts, ranks, nodes
  const Session &s = p.session;
  const int total = p.num_experts + s.team.num_ranks + p.num_nodes;
  for (int i = threadIdx.x; i < total; i += kLayoutThreads) counts[i] = 0;
  if (begin(s)) {
    uint32_t *ranks = counts + p.num_experts;
    for (int t = blockIdx.x * kLayoutThreads + threadIdx.x; t < p.num_tokens; t += gridDim.x * kLayoutThreads)
      count_token(p, t, counts, ranks, ranks + s.team.num_ranks);
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += kLayoutThreads)
      if (counts[i] != 0) atomicAdd(&s.team.scratch->histogram[i], counts[i]);
  }
  finish(s, [&](bool failed) {
    for (int i = threadIdx.x; i < total; i += kLayoutThreads) {
      const int count = failed ? 0 : static_cast<int>(ptx::ld_relaxed_gpu(&s.team.scratch->histogram[i]));
      s.team.scratch->histogram[i] = 0;
      if (i < p.num_experts) p.per_expert[i] = count;
      else if (i < p.num_experts + s.team.num_ranks) p.per_rank[i - p.num_experts] = count;
      else if (p.per_node != nullptr) p.per_node[i - p.num_experts - s.team.num_ranks] = count;
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deepep
