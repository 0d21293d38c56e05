// routed_notify.cuh - the exchange of counts where the handle keeps the routing. Each block counts the choices of some
// consecutive tokens; block 0 exchanges the sums with the other ranks, and each block gives its rows and choices their
// places. Each warp has a run of a block's tokens and counters of its own, so that places ascend with the tokens.
#pragma once
#include "cuda/common/lanes.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/notify_counts.cuh"

namespace deepep {

constexpr int kRoutedNotifyThreads = 1024;
constexpr int kRoutedNotifyTokens = 32;  // a block's, where there are blocks enough; one block alone waits for none

// `warps` of a block count its tokens [blockIdx.x * share, ...).
struct RoutedNotifyParams : NotifyParams {
  int32_t warps = 0, share = 0;

  __device__ bool expanded() const { return routing == DK_ROUTING_EXPANDED; }
  __device__ int experts_each() const { return num_experts / session.team.num_ranks; }
  __device__ int num_psums() const { return num_scaleup_ranks > 0 ? num_scaleup_ranks : session.team.num_ranks; }
  __device__ const void *topk_idx() const { return pointer<const void>(dk_notify_params::topk_idx); }
  __device__ void *topk_copy() const { return pointer<void>(dk_notify_params::topk_copy); }
  __device__ int32_t *dst_slot() const { return pointer<int32_t>(dk_notify_params::dst_slot); }
  __device__ int32_t *psum_per_rank() const { return pointer<int32_t>(dk_notify_params::psum_per_rank); }
  __device__ int32_t *psum_per_expert() const { return pointer<int32_t>(dk_notify_params::psum_per_expert); }
  __device__ int32_t *num_per_expert() const { return pointer<int32_t>(dk_notify_params::num_per_expert); }
  __device__ int32_t *cumulative_stats() const { return pointer<int32_t>(dk_notify_params::cumulative_stats); }
};

// Shared memory. For each expert: the choices that precede this block's, later the row of its first choice; all ranks'
// count. For each rank: the rows that precede this block's. Then the counters of each warp: experts, ranks.
struct RoutingCounts {
  int32_t *first, *total, *ranks, *warps;
  int stride;
  __device__ RoutingCounts(const RoutedNotifyParams &p, uint8_t *shared)
      : first(reinterpret_cast<int32_t *>(shared)),
        total(first + p.num_experts),
        ranks(total + p.num_experts),
        warps(ranks + p.session.team.num_ranks),
        stride(p.num_experts + p.session.team.num_ranks) {}
  __device__ int32_t *of_warp(int warp) const { return warps + warp * stride; }
};
__host__ __device__ inline uint32_t routing_counts_bytes(uint32_t num_experts, uint32_t num_ranks, uint32_t warps) {
  return 4 * (2 * num_experts + num_ranks + warps * (num_experts + num_ranks));
}

// An entry of topk_idx as its lane sees it. Lanes of a warp hold whole tokens.
struct Choice {
  int token, of_warp, k;  // of_warp: which of the warp's tokens it is
  int expert, rank;       // -1: none
};

// All of this warp's choices in the order of tokens and choices, as many whole tokens at a time as a warp has lanes
// for: f(choice, tokens), with the tokens of this time. A wrong index is kept in `wrong`.
template <class F>
__device__ inline void for_choices(const RoutedNotifyParams &p, int64_t &wrong, F f) {
  constexpr int kAhead = 8;  // loads in flight
  const int each = kWarp / p.num_topk, local = p.experts_each();
  const int run = ceil_div(ceil_div(p.share, p.warps), each) * each, of_warp = lane_id() / p.num_topk,
            k = lane_id() % p.num_topk;
  const int from = static_cast<int>(blockIdx.x) * p.share, first_token = from + warp_id() * run;
  const int end = min(first_token + run, min(from + p.share, p.num_tokens));
  for (int base = first_token; base < end; base += each * kAhead) {
    int64_t entries[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int token = base + i * each + of_warp;
      entries[i] = of_warp < each && token < end
                       ? load_index(p.topk_idx(), static_cast<int64_t>(token) * p.num_topk + k, p.index_bytes)
                       : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int first = base + i * each;
      if (first >= end) break;
      if (entries[i] >= p.num_experts) {
        wrong = entries[i];
        entries[i] = -1;
      }
      const int expert = entries[i] < 0 ? -1 : static_cast<int>(entries[i]);
      f(Choice{first + of_warp, of_warp, k, expert, expert < 0 ? -1 : expert / local}, min(each, end - first));
    }
  }
}

// The number of this lane's entry under `key` among the warp's, which `counter` counts.
__device__ inline int next_number(int32_t *counter, int key) {
  const uint32_t lanes = same_key(key);
  const int before = key < 0 ? 0 : counter[key];
  __syncwarp();
  if (is_first(lanes)) counter[key] = before + __popc(lanes);
  __syncwarp();
  return before + lanes_before(lanes);
}

// Whole block: counts its choices, for all blocks to see, and turns each warp's counters into what the warps before it
// have counted.
__device__ inline void count_choices(const RoutedNotifyParams &p, const RoutingCounts &counts, int64_t &wrong) {
  const int num_ranks = p.session.team.num_ranks;
  for (int i = threadIdx.x; i < p.warps * counts.stride; i += blockDim.x) counts.warps[i] = 0;
  __syncthreads();
  if (warp_id() < p.warps) {
    int32_t *mine = counts.of_warp(warp_id());
    for_choices(p, wrong, [&](const Choice &c, int) {
      if (c.expert >= 0) atomicAdd(&mine[c.expert], 1);
      if (is_first(same_key(c.rank < 0 ? -1 : c.of_warp * num_ranks + c.rank)))
        atomicAdd(&mine[p.num_experts + c.rank], 1);
    });
  }
  __syncthreads();
  int32_t *sums = p.session.team.scratch->routed_counts[blockIdx.x];
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    int sum = 0;
#pragma unroll 8
    for (int w = 0; w < p.warps; ++w) {
      const int count = counts.of_warp(w)[i];
      counts.of_warp(w)[i] = sum;
      sum += count;
    }
    sums[i] = sum;
  }
}

// Whole block, after count_choices: waits until all blocks have counted. `wrong`: a wrong index that some thread has
// seen, -1: none; returns that of all blocks.
__device__ inline int64_t await_blocks(const RoutedNotifyParams &p, int64_t wrong) {
  __shared__ int64_t wrong_here;
  Scratch *scratch = p.session.team.scratch;
  if (threadIdx.x == 0) wrong_here = -1;
  __syncthreads();
  if (wrong >= 0) wrong_here = wrong;
  __syncthreads();
  if (gridDim.x == 1) return wrong_here;
  if (threadIdx.x == 0) {
    scratch->routed_wrong[blockIdx.x] = wrong_here;
    ptx::atomic_add_acq_rel_gpu(&scratch->routed_blocks, 1);
    spin_in_block([&] { return ptx::ld_acquire_gpu(&scratch->routed_blocks) == gridDim.x; });
  }
  __syncthreads();
  static_assert(kRoutedBlocks <= kWarp, "a lane for each block");
  wrong = lane_id() < static_cast<int>(gridDim.x) ? scratch->routed_wrong[lane_id()] : -1;
  const uint32_t seen = __ballot_sync(kAllLanes, wrong >= 0);
  return seen == 0 ? -1 : __shfl_sync(kAllLanes, wrong, __ffs(static_cast<int>(seen)) - 1);
}

// Whole block: what the blocks before it have counted; block 0 hands the sums of all to store(at, sum), `at` being the
// word of the message.
template <class Store>
__device__ inline void sum_blocks(const RoutedNotifyParams &p, const RoutingCounts &counts, Store store) {
  const TeamView &team = p.session.team;
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    const bool is_expert = i < p.num_experts;
    int before = 0, sum = 0;
#pragma unroll
    for (int b = 0; b < kRoutedBlocks; ++b) {
      const int count = b < static_cast<int>(gridDim.x) ? team.scratch->routed_counts[b][i] : 0;
      if (b < static_cast<int>(blockIdx.x)) before += count;
      sum += count;
    }
    (is_expert ? counts.first[i] : counts.ranks[i - p.num_experts]) = before;
    if (blockIdx.x == 0) store(is_expert ? team.num_ranks + i : i - p.num_experts, sum);
  }
}

// Whole block, while the counts are on their way: its tokens' choices for the caller to keep.
template <class Index>
__device__ inline void copy_choices(const RoutedNotifyParams &p) {
  const int64_t from = static_cast<int64_t>(blockIdx.x) * p.share, to = min<int64_t>(from + p.share, p.num_tokens);
  for (int64_t i = from * p.num_topk + threadIdx.x; i < to * p.num_topk; i += blockDim.x)
    static_cast<Index *>(p.topk_copy())[i] = static_cast<const Index *>(p.topk_idx())[i];
}
__device__ inline void keep_choices(const RoutedNotifyParams &p) {
  if (p.topk_copy() == nullptr) return;
  p.index_bytes == 8 ? copy_choices<int64_t>(p) : copy_choices<int32_t>(p);
}

// wrong: an index that is no expert's; -1: none. It travels in the message, so that every rank refuses the call.
__device__ inline Handshake routed_notify_handshake(const RoutedNotifyParams &p, uint64_t epoch, int64_t wrong) {
  Handshake hand = notify_handshake(p, epoch);
  hand.mine.flags |= routing_flags(p.routing, 0);
  hand.mine.max_tokens = p.num_max_tokens;
  hand.mine.segment_offset = static_cast<uint64_t>(p.expert_alignment);
  hand.mine.segment = p.expanded() && p.num_worst_tokens > 0 ? p.num_worst_expanded : -1;
  if (wrong >= 0) {
    hand.mine.flags |= kHandshakeRefused | static_cast<uint32_t>(DK_FIELD_TOPK_IDX) << kHandshakeFieldShift;
    hand.mine.segment = p.num_experts;
    hand.mine.row_limit = static_cast<int32_t>(min<int64_t>(wrong, INT32_MAX));
  }
  return hand;
}

// Messages of ranks of one node.
template <bool kShrinks>
struct NodeMessages {
  const TeamView &team;
  uint64_t epoch;
  __device__ const HandshakeMessage *handshake(int i) const {
    return team.handshake(team.rank, copy_of<kShrinks>(team, epoch, i), i);
  }
  // What rank i has counted.
  __device__ const uint32_t *counts(int i) const {
    return team.counts(team.rank, copy_of<kShrinks>(team, epoch, i), i);
  }
};

// A warp, `first` of `warps`, for each rank: its rows from each rank, and whether it has room for them. False: it does
// not. Every block finds out; block 0 writes and reports it, here and below.
template <bool kShrinks, class Messages>
__device__ inline bool sum_ranks(const RoutedNotifyParams &p, const Messages &messages, int first, int warps) {
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks;
  const bool reports = blockIdx.x == 0;
  bool good = true;
  for (int j = first; j < num_ranks; j += warps) {
    const bool without = is_out<kShrinks>(s, j);
    const HandshakeMessage *from = messages.handshake(j);
    const auto alignment = static_cast<int64_t>(from->segment_offset);
    const int limit = from->row_limit;
    const int sum = sum_over_ranks(
        num_ranks,
        [&](int i) { return without || is_out<kShrinks>(s, i) ? 0 : static_cast<int>(messages.counts(i)[j]); },
        [&](int i, int rows) {
          if (!reports) return;
          p.rank_prefix_matrix()[i * num_ranks + j] = rows;
          if (j == s.team.rank && i < p.num_psums() && p.psum_per_rank() != nullptr) p.psum_per_rank()[i] = rows;
        });
    const bool writes = reports && lane_id() == 0;
    if (!without && p.routing != DK_ROUTING_NONE && alignment != p.expert_alignment) {
      if (writes) report_failure(s, DK_EMISMATCH, j, DK_FIELD_ALIGNMENT, p.expert_alignment, alignment, 0);
      good = false;
    }
    if (writes && j == s.team.rank && p.counts() != nullptr) {
      p.counts()->num_recv_tokens = sum;
      p.counts()->num_recv_nodes_tokens = 0;
    }
    if (without || limit < 0 || sum <= limit) continue;
    if (writes) report_refusal(s, kVoid, DK_EINVAL, j, DK_FIELD_WORST_TOKENS, limit, sum);
    good = false;
  }
  return good;
}

// The row of a choice that has none: what is added to it leaves it below 0.
constexpr int32_t kNoRow = INT32_MIN;

// A warp for each rank: where its experts' rows begin, and this rank's rows among them. False: there is no room.
template <bool kShrinks, class Messages>
__device__ inline bool place_experts(const RoutedNotifyParams &p, const RoutingCounts &counts,
                                     const Messages &messages) {
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks, local = p.experts_each();
  bool good = true;
  for (int r = warp_id(); r < num_ranks; r += static_cast<int>(blockDim.x) / kWarp) {
    const bool without = is_out<kShrinks>(s, r);
    int64_t start = 0;  // rows of the experts before
#pragma unroll 1
    for (int base = 0; base < local; base += kWarp) {
      const int e = base + lane_id(), expert = r * local + e;
      const bool mine = e < local;
      const int total = mine ? counts.total[expert] : 0;
      const int64_t rows = ceil_div<int64_t>(total, p.expert_alignment) * p.expert_alignment;
      const int64_t sum = inclusive_sum(rows);
      const int64_t first = start + sum - rows;
      if (mine) counts.first[expert] = without ? kNoRow : counts.first[expert] + static_cast<int>(first);
      if (mine && r == s.team.rank && blockIdx.x == 0) {
        p.num_per_expert()[e] = total;
        p.psum_per_expert()[e] = static_cast<int>(p.expanded() ? first + total : first + rows);
        if (p.counts() != nullptr) p.counts()->per_expert[e] = static_cast<int>(rows);
      }
      start += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (without) continue;
    const HandshakeMessage *from = messages.handshake(r);
    const int64_t limit = from->segment < 0 ? INT32_MAX : from->segment;
    if (!p.expanded() || start <= limit) continue;
    if (lane_id() == 0 && blockIdx.x == 0)
      report_refusal(s, kVoid, DK_EINVAL, r, DK_FIELD_WORST_EXPANDED, limit, start);
    good = false;
  }
  return good;
}

// Whole block, once all counts are here. False: the call moves no rows.
template <bool kShrinks, class Messages>
__device__ inline bool sum_routing(const RoutedNotifyParams &p, const RoutingCounts &counts, const Messages &messages) {
  const Session &s = p.session;
  const int num_ranks = s.team.num_ranks;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  bool good = sum_ranks<kShrinks>(p, messages, warps - 1 - warp_id(), warps);
  for (int r = threadIdx.x; kShrinks && r < num_ranks; r += blockDim.x)
    if (is_without(s, r)) counts.ranks[r] = kNoRow;
  for (int e = threadIdx.x; e < p.num_experts; e += blockDim.x) {
    int sum = 0, before = 0;
#pragma unroll 8
    for (int i = 0; i < num_ranks; ++i) {
      if (i == s.team.rank) before = sum;
      if (!is_out<kShrinks>(s, i)) sum += static_cast<int>(messages.counts(i)[num_ranks + e]);
    }
    counts.first[e] += before;
    counts.total[e] = sum;
  }
  __syncthreads();
  good &= place_experts<kShrinks>(p, counts, messages);
  return __syncthreads_or(!good) == 0;
}

// Whole block: send_head and dst_slot. Those of a rank that takes no part are -1.
template <bool kShrinks>
__device__ inline void place_choices(const RoutedNotifyParams &p, const RoutingCounts &counts) {
  if (warp_id() >= p.warps) return;
  const int num_ranks = p.session.team.num_ranks, me = p.session.team.rank;
  int32_t *mine = counts.of_warp(warp_id());
  int64_t wrong = -1;
  for_choices(p, wrong, [&](const Choice &c, int tokens) {
    const int64_t token = c.token - c.of_warp;  // the first one of this time
#pragma unroll 1
    for (int i = lane_id(); i < tokens * num_ranks; i += kWarp) p.send_head()[token * num_ranks + i] = -1;
    const int row = next_number(mine, c.expert);
    const uint32_t together = same_key(c.rank < 0 ? -1 : c.of_warp * num_ranks + c.rank);
    int place = next_number(mine + p.num_experts, is_first(together) ? c.rank : -1);
    place = __shfl_sync(kAllLanes, place, together == 0 ? 0 : __ffs(static_cast<int>(together)) - 1);
    if (c.of_warp >= tokens) return;
    if (together != 0) place += counts.ranks[c.rank];
    if (kShrinks) place = max(place, -1);
    if (is_first(together)) p.send_head()[static_cast<int64_t>(c.token) * num_ranks + c.rank] = place;
    int slot = -1;
    if (c.expert >= 0 && p.expanded()) slot = counts.first[c.expert] + row;
    if (is_last(together) && !p.expanded() && (!kShrinks || place >= 0)) slot = me * p.num_max_tokens + place;
    if (kShrinks) slot = max(slot, -1);
    p.dst_slot()[static_cast<int64_t>(c.token) * p.num_topk + c.k] = slot;
  });
}

// By the last block, of an exchange that failed.
__device__ inline void void_routing(const RoutedNotifyParams &p) {
  const int64_t choices = static_cast<int64_t>(p.num_tokens) * p.num_topk;
  for (int64_t i = threadIdx.x; i < choices; i += blockDim.x) p.dst_slot()[i] = -1;
  for (int i = threadIdx.x; i < p.num_psums(); i += blockDim.x) p.psum_per_rank()[i] = 0;
  for (int i = threadIdx.x; i < p.experts_each(); i += blockDim.x) p.psum_per_expert()[i] = p.num_per_expert()[i] = 0;
}
// By one block, which has all counts.
__device__ inline void add_to_stats(const RoutedNotifyParams &p, const RoutingCounts &counts) {
  const int local = p.experts_each();
  for (int i = threadIdx.x; p.cumulative_stats() != nullptr && i < local; i += blockDim.x)  // waits for no load
    atomicAdd(&p.cumulative_stats()[i], counts.total[p.session.team.rank * local + i]);
}
// By the last block.
__device__ inline void end_routed_notify(const RoutedNotifyParams &p, const RoutingCounts &counts, bool failed) {
  if (threadIdx.x == 0) p.session.team.scratch->routed_blocks = 0;
  failed ? void_routing(p) : add_to_stats(p, counts);
  end_notify(p, failed);
}

}  // namespace deepep

namespace deep_ep::intranode {
using namespace deepep;

template <bool kShrinks>
__global__ void __launch_bounds__(kRoutedNotifyThreads) notify_routed(const __grid_constant__ RoutedNotifyParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.session;
  const RoutingCounts counts(p, shared);
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    int64_t wrong = -1;
    count_choices(p, counts, wrong);
    wrong = await_blocks(p, wrong);
    const Handshake hand = routed_notify_handshake(p, epoch, wrong);
    const int copy = kShrinks ? own_copy(s.team, epoch) : static_cast<int>(epoch % kHandshakeCopies);
    sum_blocks(p, counts, [&](int at, int sum) {
#pragma unroll 1
      for (int r = 0; r < s.team.num_ranks; ++r) s.team.counts(r, copy, s.team.rank)[at] = sum;
    });
    if (blockIdx.x == 0) {
      __syncthreads();  // the release of each message below covers what the block has stored
      post_to_peers<kShrinks>(s, hand);
      publish_newest_by_last_warp(s.team);
    }
    keep_choices(p);
    if (await_peers<kShrinks>(s, hand, epoch) &&
        sum_routing<kShrinks>(p, counts, NodeMessages<kShrinks>{s.team, epoch})) {
      if (blockIdx.x == 0) announce_counts(p);
      place_choices<kShrinks>(p, counts);
    }
  }
  finish(s, [&](bool failed) { end_routed_notify(p, counts, failed); });
}

}  // namespace deep_ep::intranode
