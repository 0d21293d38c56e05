// layout_kernel.cuh - how many tokens go to each rank, node and expert, and which token to which rank. Each block
// counts a share of the tokens in shared memory and adds it to the team's histogram; the last one writes the outputs.
#pragma once
#include "cuda/sync/agreement.cuh"

namespace deepep {

constexpr int kLayoutThreads = 512;

// The arguments of a call (see DispatchParams).
struct LayoutParams : dk_layout_params {
  Session session{};
  int32_t num_nodes = 0;
  int32_t shrinks = 0;  // normal mode leaves out masked ranks

  __device__ const void *topk_idx() const { return pointer<const void>(dk_layout_params::topk_idx); }
  __device__ int32_t *tokens_per_rank() const { return pointer<int32_t>(dk_layout_params::tokens_per_rank); }
  __device__ int32_t *tokens_per_node() const { return pointer<int32_t>(dk_layout_params::tokens_per_node); }
  __device__ int32_t *tokens_per_expert() const { return pointer<int32_t>(dk_layout_params::tokens_per_expert); }
  __device__ uint8_t *token_in_rank() const { return pointer<uint8_t>(dk_layout_params::token_in_rank); }
};

struct LayoutCounts {
  uint32_t *experts, *ranks, *nodes;
};  // shared

// An entry of topk_idx, or -1. A wrong entry is kept in `wrong`, for the failure record.
// Nothing goes to experts of a masked rank.
__device__ inline int64_t checked_entry(const LayoutParams &p, int64_t expert, int64_t &wrong) {
  const Session &s = p.session;
  if (expert >= -1 && expert < p.num_experts)
    return p.shrinks && expert >= 0 && is_without(s, static_cast<int>(expert) / (p.num_experts / s.team.num_ranks))
               ? -1
               : expert;
  wrong = expert;
  return -1;
}

// ---- A lane for each entry, as many whole tokens as a warp has lanes for: all loads are in flight together ----------

struct LaneEntry {
  int token, of_warp;
  bool used;
};  // its token, and which of the warp's tokens that is
__device__ inline int tokens_per_warp(const LayoutParams &p) { return kWarp / p.num_topk; }
__device__ inline int tokens_per_block(const LayoutParams &p) { return tokens_per_warp(p) * (kLayoutThreads / kWarp); }
__device__ inline LaneEntry lane_entry(const LayoutParams &p, int first) {
  const int of_warp = lane_id() / p.num_topk, token = first + warp_id() * tokens_per_warp(p) + of_warp;
  return {token, of_warp, of_warp < tokens_per_warp(p) && token < p.num_tokens};
}
__device__ inline int64_t load_entry(const LayoutParams &p, const LaneEntry &at) {
  if (!at.used) return -1;
  return load_index(p.topk_idx(), static_cast<int64_t>(at.token) * p.num_topk + lane_id() % p.num_topk, p.index_bytes);
}
// Whether this lane is the first of its token with this key, < limit; false for a key < 0.
__device__ inline bool leads(const LaneEntry &at, int key, int limit) {
  const uint32_t mine = key < 0 ? 0x80000000u | lane_id() : static_cast<uint32_t>(at.of_warp * limit + key);
  return __ffs(static_cast<int>(__match_any_sync(kAllLanes, mine))) - 1 == lane_id() && key >= 0;
}
__device__ inline void count_entries(const LayoutParams &p, const LaneEntry &at, int64_t entry,
                                     const LayoutCounts &counts, int64_t &wrong) {
  const int num_ranks = p.session.team.num_ranks, first = at.token - at.of_warp;  // the warp's first token
  const int tokens = min(tokens_per_warp(p), max(p.num_tokens - first, 0));
  uint8_t *in_rank = p.token_in_rank() + static_cast<int64_t>(first) * num_ranks;
  for (int i = lane_id(); i < tokens * num_ranks; i += kWarp) in_rank[i] = 0;
  const int expert = static_cast<int>(checked_entry(p, entry, wrong));
  const int rank = expert < 0 ? -1 : expert / (p.num_experts / num_ranks),
            node = rank < 0 ? -1 : rank / p.session.team.num_nvl_peers;
  if (expert >= 0) atomicAdd(counts.experts + expert, 1u);
  if (leads(at, node, p.num_nodes)) atomicAdd(counts.nodes + node, 1u);
  const bool goes = leads(at, rank, num_ranks);
  __syncwarp();  // the zeros are stored
  if (goes) {
    atomicAdd(counts.ranks + rank, 1u);
    in_rank[at.of_warp * num_ranks + rank] = 1;
  }
}

// ---- More than 32 entries a token: a thread for each token ----------------------------------------------------------

__device__ inline void count_token(const LayoutParams &p, int token, const LayoutCounts &counts, int64_t &wrong) {
  const int num_ranks = p.session.team.num_ranks, local = p.num_experts / num_ranks,
            peers = p.session.team.num_nvl_peers;
  uint8_t *in_rank = p.token_in_rank() + static_cast<int64_t>(token) * num_ranks;
  for (int r = 0; r < num_ranks; ++r) in_rank[r] = 0;
  const int64_t row = static_cast<int64_t>(token) * p.num_topk;
  for (int k = 0; k < p.num_topk; ++k) {
    const int64_t expert = checked_entry(p, load_index(p.topk_idx(), row + k, p.index_bytes), wrong);
    if (expert == -1) continue;
    const int rank = static_cast<int>(expert) / local, node = rank / peers;
    bool new_rank = true, new_node = true;
    for (int before = 0; before < k; ++before) {
      int64_t unused;
      const int64_t other = checked_entry(p, load_index(p.topk_idx(), row + before, p.index_bytes), unused);
      if (other < 0) continue;
      const int other_rank = static_cast<int>(other) / local;
      new_rank &= other_rank != rank;
      new_node &= other_rank / peers != node;
    }
    atomicAdd(counts.experts + expert, 1u);
    if (new_rank) {
      atomicAdd(counts.ranks + rank, 1u);
      in_rank[rank] = 1;
    }
    if (new_node) atomicAdd(counts.nodes + node, 1u);
  }
}

// The last block of the grid brings the statistics page up to date instead.
__global__ void __launch_bounds__(kLayoutThreads, 1) layout_kernel(const __grid_constant__ LayoutParams p) {
  extern __shared__ uint32_t counts[];  // experts, ranks, nodes
  const Session &s = p.session;
  const int total = p.num_experts + s.team.num_ranks + p.num_nodes, workers = static_cast<int>(gridDim.x) - 1;
  const bool works = static_cast<int>(blockIdx.x) < workers, by_lanes = p.num_topk <= kWarp;
  LaneEntry at{};
  int64_t entry = -1, wrong = -1;
  if (works && by_lanes) {  // in flight while the block clears its counts
    at = lane_entry(p, blockIdx.x * tokens_per_block(p));
    entry = load_entry(p, at);
  }
  for (int i = threadIdx.x; works && i < total; i += kLayoutThreads) counts[i] = 0;
  const bool begun = begin(s);  // else the statistics page may be gone
  if (begun && works) {
    const LayoutCounts mine{counts, counts + p.num_experts, counts + p.num_experts + s.team.num_ranks};
    for (int first = blockIdx.x * (by_lanes ? tokens_per_block(p) : 0); by_lanes && first < p.num_tokens;) {
      count_entries(p, at, entry, mine, wrong);
      first += workers * tokens_per_block(p);
      at = lane_entry(p, first);
      entry = load_entry(p, at);
    }
    for (int t = blockIdx.x * kLayoutThreads + threadIdx.x; !by_lanes && t < p.num_tokens;
         t += workers * kLayoutThreads)
      count_token(p, t, mine, wrong);
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += kLayoutThreads)
      if (counts[i] != 0) atomicAdd(&s.team.scratch->histogram[i], counts[i]);
  } else if (begun) {
    publish_newest_by_last_warp(s.team);
  }
  if (wrong != -1) report_refusal(s, kNoted, DK_EINVAL, s.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, wrong);
  finish(s, [&](bool failed) {
    constexpr int kOthers = kLayoutThreads - kWarp;  // the last warp has the statistics to do
    for (int i = threadIdx.x; threadIdx.x < kOthers && i < total; i += kOthers) {
      const int count = failed ? 0 : static_cast<int>(ptx::ld_relaxed_gpu(&s.team.scratch->histogram[i]));
      s.team.scratch->histogram[i] = 0;
      if (i < p.num_experts)
        p.tokens_per_expert()[i] = count;
      else if (i < p.num_experts + s.team.num_ranks)
        p.tokens_per_rank()[i - p.num_experts] = count;
      else if (p.tokens_per_node() != nullptr)
        p.tokens_per_node()[i - p.num_experts - s.team.num_ranks] = count;
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deepep
