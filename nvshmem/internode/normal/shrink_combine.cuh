// shrink_combine.cuh - libdeepep_nvshmem.so: combine of a team that shrinks across nodes. Each rank sends its rows to
// the tokens' rank, which forms the sums that ranks would have formed on their way: one for each other node, rounded,
// then nodes in ascending order. So a sum is that of a team which does not shrink, less the rows of lost ranks.
#pragma once
#include "internode/normal/combine.cuh"
#include "internode/normal/shrink.cuh"

namespace deepep::internode {

struct ShrinkCombineParams {
  CombineParams c;
  NodeView internode;
  ShrinkView shrink;
  PairRings rings;
};

struct ShrinkCombineRoles {
  static constexpr int kSenders = 8, kSums = 12;
  static constexpr int kWarps = kSenders + kSums, kThreads = kWarps * kWarp;
};

__device__ inline PairRows rows_of_pair(const CombineParams &c, int source, int holder) {
  return pair_rows(c.rank_prefix_matrix(), c.session.team.num_ranks, source, holder);
}

// ---- Senders: a stream is rows of this rank for a rank's tokens, every channels-th ----------------------------------

// After a row's payload: its weights.
__device__ inline void send_pair_row(const ShrinkCombineParams &p, int64_t row, uint8_t *to) {
  copy_payload(to, p.c.x() + row * p.c.row_bytes, p.c.row_bytes);
  auto *words = reinterpret_cast<uint32_t *>(to + p.c.row_bytes);
  for (int k = lane_id(); k < p.c.num_topk; k += kWarp)
    words[k] = p.c.topk_weights() == nullptr ? 0 : __float_as_uint(p.c.topk_weights()[row * p.c.num_topk + k]);
}

__device__ inline Outcome serve_pair_sender(const ShrinkCombineParams &p, uint64_t epoch, int stream,
                                            BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  const int owner = (team.rank + 1 + stream) % team.num_ranks, channel = stream / team.num_ranks,
            step = static_cast<int>(p.rings.channels);
  RowStream *state = p.shrink.sends() + stream;
  if (owner == team.rank || state->closed != 0) return kDone;
  const PairRows rows = rows_of_pair(p.c, owner, team.rank);
  const int before = static_cast<int>(state->count);
  int number = channel + before * step;
  bool closed = false;
  while (number < channel + (before + kSumsAtOnce) * step) {
    closed = number >= rows.count || __any_sync(kAllLanes, is_without(p.c.session, owner));
    if (closed || !has_room(team, p.internode, p.rings, epoch, owner, number)) break;
    send_pair_row(p, static_cast<int64_t>(rows.first) + number, place_for(team, p.internode, p.rings, owner, number));
    publish_row(team, p.internode, p.rings, epoch, owner, number, p.c.row_bytes + 4u * p.c.num_topk);
    number += step;
  }
  const int sent = (number - channel) / step;
  __syncwarp();
  if (lane_id() == 0) {
    *state = {0, static_cast<uint32_t>(sent), closed, 1};
    if (closed) add_to(&team.scratch->sent_bytes[owner], static_cast<uint64_t>(sent) * p.c.row_bytes);
  }
  __syncwarp();
  if (closed) return kDone;
  if (sent != before) return kMoved;
  blocked = {owner, number - static_cast<int64_t>(p.rings.places) + 1, 0};
  return kBlocked;
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// The rows of one token in ascending order of their ranks: in shared memory, a list for each warp. Bits of an address,
// a multiple of 16, say how its row is added.
constexpr uint64_t kRemoteRow = 1;  // to its node's sum
constexpr uint64_t kNewNode = 2;    // the first row of its node
struct NodeRows {
  uint64_t *rows;
  int count;
};

// The word of the newest row that this rank has released at a place.
__device__ inline uint64_t *released_at(const ShrinkCombineParams &p, int source, int row) {
  return reinterpret_cast<uint64_t *>(p.shrink.receives(p.c.session.team.num_ranks) +
                                      static_cast<int64_t>(source) * kMaxChannels +
                                      static_cast<uint32_t>(row) % p.rings.places);
}
// Another warp of this rank still has the row that was in this one's place: it cannot be here.
__device__ inline bool waits_for_this_rank(const ShrinkCombineParams &p, uint64_t epoch, int source, int row) {
  if (static_cast<uint32_t>(row) < p.rings.places) return false;
  return count_in(ptx::ld_relaxed_gpu(released_at(p, source, row)), epoch) !=
         static_cast<uint32_t>(row) - p.rings.places + 1;
}

// Waits for no row. False: one has not arrived, or the handle is wrong. A row of peer -1 is one that another warp of
// this rank holds up.
__device__ inline bool find_node_rows(const ShrinkCombineParams &p, uint64_t epoch, int token, NodeRows &list,
                                      BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  int last_node = -1;
  for (int base = 0; base < team.num_ranks; base += kWarp) {
    const int r = base + lane_id();
    const int number = r < team.num_ranks ? p.c.send_head()[static_cast<int64_t>(token) * team.num_ranks + r] : -1;
    const bool has = number >= 0 && !is_without(p.c.session, r);
    const PairRows rows = has ? rows_of_pair(p.c, team.rank, r) : PairRows{0, 0};
    const bool wrong = has && number >= rows.count;
    if (wrong) report_failure(p.c.session, DK_EINVAL, r, DK_FIELD_SEND_HEAD, rows.count - 1, number, 0);
    if (__any_sync(kAllLanes, wrong)) return false;
    uint64_t row = 0;
    if (has && r == team.rank)
      row = reinterpret_cast<uint64_t>(p.c.x() + (static_cast<int64_t>(rows.first) + number) * p.c.row_bytes);
    else if (has && count_in(ptx::ld_acquire_sys(row_word(p.internode, p.rings, team.self, r, number)), epoch) ==
                        static_cast<uint32_t>(number) + 1)
      row = reinterpret_cast<uint64_t>(team.self + p.rings.in_at(r, number));
    const uint32_t missing = __ballot_sync(kAllLanes, has && row == 0), having = __ballot_sync(kAllLanes, has);
    if (missing != 0) {
      const bool held_up = has && row == 0 && waits_for_this_rank(p, epoch, r, number);
      const uint32_t late = missing & ~__ballot_sync(kAllLanes, held_up);
      const int lane = __ffs(static_cast<int>(late != 0 ? late : missing)) - 1;
      blocked = {late != 0 ? base + lane : -1, static_cast<int64_t>(__shfl_sync(kAllLanes, number, lane)) + 1, 0};
      return false;
    }
    const uint32_t below = having & ((1u << lane_id()) - 1);
    const int node = has ? p.internode.node_of(r) : -1,
              before = below == 0 ? last_node : p.internode.node_of(base + 31 - __clz(static_cast<int>(below)));
    if (has)
      list.rows[list.count + __popc(below)] =
          row | (node != p.internode.node ? kRemoteRow : 0) | (node != before ? kNewNode : 0);
    list.count += __popc(having);
    if (having != 0) last_node = p.internode.node_of(base + 31 - __clz(static_cast<int>(having)));
  }
  return true;
}

constexpr int kNodePieces = 2;  // of 16 bytes, that a lane adds side by side
__device__ __forceinline__ void add_row(float (&sum)[kNodePieces][8], const uint8_t *row, uint32_t base,
                                        uint32_t bytes) {
  uint4 data[kNodePieces];
#pragma unroll
  for (int u = 0; u < kNodePieces; ++u)
    if (base + 16 * kWarp * u < bytes) data[u] = ptx::ld_stream(row + base + 16 * kWarp * u);
#pragma unroll
  for (int u = 0; u < kNodePieces; ++u)
    if (base + 16 * kWarp * u < bytes) add_bf16(sum[u], data[u]);
}
// Adds a node's sum, rounded as it would have crossed.
__device__ __forceinline__ void add_node(float (&sum)[kNodePieces][8], float (&node)[kNodePieces][8]) {
#pragma unroll
  for (int u = 0; u < kNodePieces; ++u) {
    add_bf16(sum[u], round_bf16(node[u]));
#pragma unroll
    for (int i = 0; i < 8; ++i) node[u][i] = 0;
  }
}

__device__ inline float weight_of(const ShrinkCombineParams &p, const uint8_t *row, int k) {
  const uint64_t from = static_cast<uint64_t>(row - p.c.x());
  if (from >= static_cast<uint64_t>(p.c.num_recv_tokens) * p.c.row_bytes)
    return __uint_as_float(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(row + p.c.row_bytes) + k));
  return p.c.topk_weights() == nullptr ? 0 : p.c.topk_weights()[from / p.c.row_bytes * p.c.num_topk + k];
}

// Biases are added last.
__device__ inline void sum_node_rows(const ShrinkCombineParams &p, const NodeRows &list, int token) {
  const uint32_t bytes = p.c.row_bytes;
  const uint64_t first = static_cast<uint64_t>(token) * bytes;
  auto row_at = [&](int i) { return reinterpret_cast<const uint8_t *>(list.rows[i] & ~(kRemoteRow | kNewNode)); };
  __syncwarp();  // all lanes see the list
#pragma unroll 1
  for (uint32_t base = 16 * lane_id(); base < bytes; base += 16 * kWarp * kNodePieces) {
    float sum[kNodePieces][8] = {}, node[kNodePieces][8] = {};
#pragma unroll 1
    for (int i = 0; i < list.count; ++i) {
      if ((list.rows[i] & kNewNode) != 0) add_node(sum, node);
      if ((list.rows[i] & kRemoteRow) != 0)
        add_row(node, row_at(i), base, bytes);
      else
        add_row(sum, row_at(i), base, bytes);
    }
    add_node(sum, node);
#pragma unroll 1
    for (int b = 0; b < 2; ++b)
      if (p.c.bias(b) != nullptr) add_row(sum, p.c.bias(b) + first, base, bytes);
#pragma unroll
    for (int u = 0; u < kNodePieces; ++u)
      if (base + 16 * kWarp * u < bytes)
        ptx::st_stream(p.c.combined_x() + first + base + 16 * kWarp * u, round_bf16(sum[u]));
  }
  float *weights = p.c.combined_topk_weights();
#pragma unroll 1
  for (int k = lane_id(); weights != nullptr && k < p.c.num_topk; k += kWarp) {
    float sum = 0, node = 0;
#pragma unroll 1
    for (int i = 0; i < list.count; ++i) {
      if ((list.rows[i] & kNewNode) != 0) {
        sum += node;
        node = 0;
      }
      ((list.rows[i] & kRemoteRow) != 0 ? node : sum) += weight_of(p, row_at(i), k);
    }
    weights[static_cast<int64_t>(token) * p.c.num_topk + k] = sum + node;
  }
  __syncwarp();  // all lanes have read the rows
}

// Posts credits for the token's rows where their ranks have more rows than places. own: this rank's come by its ring
// too.
__device__ inline void release_node_rows(const ShrinkCombineParams &p, uint64_t epoch, int token, bool own) {
  const TeamView &team = p.c.session.team;
  for (int base = 0; base < team.num_ranks; base += kWarp) {
    const int r = base + lane_id();
    const int number = r < team.num_ranks ? p.c.send_head()[static_cast<int64_t>(token) * team.num_ranks + r] : -1;
    const bool posts = number >= 0 && (own || r != team.rank) && !is_without(p.c.session, r) &&
                       number + static_cast<int>(p.rings.places) < rows_of_pair(p.c, team.rank, r).count;
    for (uint32_t left = __ballot_sync(kAllLanes, posts); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1, row = __shfl_sync(kAllLanes, number, lane);
      release_row(team, p.internode, p.rings, epoch, base + lane, row);
      if (lane_id() == 0)
        atomicExch(reinterpret_cast<unsigned long long *>(released_at(p, base + lane, row)),
                   static_cast<unsigned long long>(tagged(epoch, static_cast<uint32_t>(row) + 1)));
    }
  }
}

// The tokens first, first + step, ... of this rank; `token`: the next one.
__device__ inline Outcome serve_tokens(const ShrinkCombineParams &p, uint64_t epoch, int step, const NodeRows &empty,
                                       int &token, BlockedStream &blocked) {
  const int before = token;
  for (int turn = 0; turn < kSumsAtOnce && token < p.c.num_tokens; ++turn, token += step) {
    NodeRows list = empty;
    if (!find_node_rows(p, epoch, token, list, blocked)) break;
    sum_node_rows(p, list, token);
    release_node_rows(p, epoch, token, false);
  }
  if (token >= p.c.num_tokens) return kDone;
  return token != before ? kMoved : kBlocked;
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

__device__ inline void run_combine_roles(const ShrinkCombineParams &p, const PutPost &by, uint64_t epoch,
                                         uint64_t *rows) {
  using Roles = ShrinkCombineRoles;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
            num_ranks = p.c.session.team.num_ranks;
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks,
              count = num_ranks * static_cast<int>(p.rings.channels);
    reset_pairs(p.shrink.sends(), first, step, count);
    serve_pairs(by, kForPairRoom, first, step, count,
                [&](int stream, BlockedStream &blocked) { return serve_pair_sender(p, epoch, stream, blocked); });
  } else {
    const int worker = warp - Roles::kSenders, step = Roles::kSums * blocks;
    const NodeRows list{rows + worker * num_ranks, 0};
    int token = worker * blocks + block;
    serve_pairs(by, kForPairRows, 0, 1, 1,
                [&](int, BlockedStream &blocked) { return serve_tokens(p, epoch, step, list, token, blocked); });
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(ShrinkCombineRoles::kThreads, 1)
    combine_with_notify_shrinking(const __grid_constant__ ShrinkCombineParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Session &s = p.c.session;
  const PutPost by{s, p.internode, p.shrink};
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand =
        combine_handshake(p.c, epoch, load_matrix_entry(p.c.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x));
    if (blockIdx.x == 0) post_to_members(by, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_agreement(s, hand, epoch, by)) {
      run_combine_roles(p, by, epoch, reinterpret_cast<uint64_t *>(shared));
      confirm_membership(s);
    }
  }
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.c);
    forget_bytes(s);
    if (threadIdx.x == 0) end_epoch(s.team);
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
