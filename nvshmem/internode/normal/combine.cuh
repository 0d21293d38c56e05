// combine.cuh - rows back to their tokens' ranks. Warps give rows to the rank of their node that adds them up, add up a
// node's rows for a token of another node, or add up what came for a token of this rank. Each serves its share of
// streams.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/common.cuh"
#include "internode/normal/rings.h"

namespace deepep::internode {

struct InternodeCombineParams {
  CombineParams c;
  NodeView internode;
  RowRings rings;
  StreamLists lists;
};

struct CombineRoles {
  static constexpr int kSenders = 4, kNodeSummers = 3, kTokenSummers = 5;
  static constexpr int kWarps = kSenders + kNodeSummers + kTokenSummers, kThreads = kWarps * kWarp;
};
constexpr int kSumsAtOnce = 4;  // of a stream, before the others of the warp have their turn

// After a row's payload: the token, then its weights.
__device__ inline uint32_t *row_words(const InternodeCombineParams &p, uint8_t *row) {
  return reinterpret_cast<uint32_t *>(row + p.c.row_bytes);
}
__device__ inline int token_of(const InternodeCombineParams &p, const uint8_t *row) {
  return static_cast<int>(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(row + p.c.row_bytes)));
}
__device__ inline int64_t local_word(const NodeView &internode, int index, int node,
                                     int channel) {  // of ControlOffsets::pushed and taken
  return (static_cast<int64_t>(index) * internode.num_nodes + node) * kMaxChannels + channel;
}
// Credits go back for a quarter of a ring together.
__device__ inline bool is_credited(uint32_t rows, uint32_t slots) { return rows % max(1u, slots / 4) == 0; }

// ---- Givers: my rows for a source's tokens of a channel, to the rank of my node that has the source's index ---------

// The first of the rows for the source from `row` on that belongs to the channel; `rows` or more: none.
__device__ inline int next_row_of(const InternodeCombineParams &p, const int32_t *tokens, int channel, int row,
                                  int rows) {
  for (; row < rows; row += kWarp) {
    const int mine = row + lane_id();
    const bool belongs =
        mine < rows && static_cast<uint32_t>(tokens[mine]) % p.rings.channels == static_cast<uint32_t>(channel);
    const uint32_t found = __ballot_sync(kAllLanes, belongs);
    if (found != 0) return row + __ffs(static_cast<int>(found)) - 1;
  }
  return row;
}

__device__ inline void push_row(const InternodeCombineParams &p, int64_t row, uint8_t *to) {
  copy_row(to, p.c.x + row * p.c.row_bytes, p.c.row_bytes);
  uint32_t *words = row_words(p, to);
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(p.c.recv_src_idx[row]);
  for (int k = lane_id(); k < p.c.num_topk; k += kWarp)
    words[1 + k] = p.c.topk_weights == nullptr ? 0 : __float_as_uint(p.c.topk_weights[row * p.c.num_topk + k]);
}

__device__ inline Outcome serve_pusher(const InternodeCombineParams &p, uint64_t epoch, int stream,
                                       BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  const int source = (stream + team.rank) % team.num_ranks, channel = stream / team.num_ranks;
  RowStream *state = p.lists.pairs + stream;
  if (state->closed != 0) return kDone;
  const int node = p.internode.node_of(source), index = p.internode.index_of(source),
            summer = p.internode.local_rank(index);
  const int first = rows_before(p.c.rank_prefix_matrix, team.num_ranks, source, team.rank);
  const int rows = p.c.rank_prefix_matrix[source * team.num_ranks + team.rank] - first;
  uint8_t *block = team.peers[summer];
  uint64_t *pushed = word_at(block, p.internode.at.pushed, local_word(p.internode, p.internode.index, node, channel));
  const uint32_t taken = read_count(
                     word_at(team.self, p.internode.at.taken, local_word(p.internode, index, node, channel)), epoch),
                 before = state->count;
  uint32_t pushed_rows = before;
  int row = state->at;
  bool last = false;
  while (!last && pushed_rows < before + kSumsAtOnce) {
    row = next_row_of(p, p.c.recv_src_idx + first, channel, row, rows);
    last = row >= rows;
    if (!last && pushed_rows - taken >= p.rings.local_slots) break;
    if (!last) {
      push_row(p, first + row, block + p.rings.local(p.internode.index, node, channel, pushed_rows));
      ++pushed_rows;
      ++row;
    }
    write_count(pushed, epoch, pushed_rows | (last ? kLastRow : 0));
  }
  if (lane_id() == 0) {
    state->at = row;
    state->count = pushed_rows;
    state->closed = last;
  }
  __syncwarp();
  if (last) return kDone;
  if (pushed_rows != before) return kMoved;
  blocked = {summer, static_cast<int64_t>(pushed_rows) - p.rings.local_slots + 1, taken};
  return kBlocked;
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// Rows that belong to one token, in the order in which they are added: in shared memory, one list for each warp.
struct TokenRows {
  const uint8_t **rows;
  int count;
  __device__ void add(const uint8_t *row) {  // by all lanes; null: this lane has none
    const uint32_t having = __ballot_sync(kAllLanes, row != nullptr);
    if (row != nullptr) rows[count + __popc(having & ((1u << lane_id()) - 1))] = row;
    count += __popc(having);
  }
};

__device__ inline void add_pieces(float (&sum)[4][8], const uint8_t *row, uint32_t base, uint32_t bytes) {
  uint4 data[4];
#pragma unroll
  for (int u = 0; u < 4; ++u)
    if (base + 16 * kWarp * u < bytes) data[u] = ptx::ld_stream(row + base + 16 * kWarp * u);
#pragma unroll
  for (int u = 0; u < 4; ++u)
    if (base + 16 * kWarp * u < bytes) add_bf16(sum[u], data[u]);
}

// In FP32, rounded once. Biases come last; weights go where they are wanted.
__device__ inline void sum_rows(const InternodeCombineParams &p, const TokenRows &list, const uint8_t *const (&bias)[2],
                                uint8_t *to, float *weights) {
  const uint32_t bytes = p.c.row_bytes;
  __syncwarp();  // the list
  for (uint32_t base = 16 * lane_id(); base < bytes; base += 16 * kWarp * 4) {
    float sum[4][8] = {};
    for (int i = 0; i < list.count; ++i) add_pieces(sum, list.rows[i], base, bytes);
#pragma unroll 1
    for (int b = 0; b < 2; ++b)
      if (bias[b] != nullptr) add_pieces(sum, bias[b], base, bytes);
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (base + 16 * kWarp * u < bytes) ptx::st_stream(to + base + 16 * kWarp * u, round_bf16(sum[u]));
  }
  for (int k = lane_id(); weights != nullptr && k < p.c.num_topk; k += kWarp) {
    float sum = 0;
    for (int i = 0; i < list.count; ++i)
      sum += __uint_as_float(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(list.rows[i] + bytes) + 1 + k));
    weights[k] = sum;
  }
}

// ---- Sums of a node's rows for the tokens of another node's rank of my index ----------------------------------------

constexpr int kNoToken = 0x7fffffff;

struct NodeRing {
  uint32_t rows;
  bool last;
  const uint8_t *row;
};  // rows that came so far; the next one that was not taken, or null
__device__ inline NodeRing node_ring(const InternodeCombineParams &p, uint64_t epoch, int node, int channel, int index,
                                     uint32_t taken) {
  uint8_t *self = p.c.session.team.self;
  const uint32_t count = count_in(
      ptx::ld_acquire_sys(word_at(self, p.internode.at.pushed, local_word(p.internode, index, node, channel))), epoch);
  const uint32_t rows = count & ~kLastRow;
  return {rows, (count & kLastRow) != 0, rows > taken ? self + p.rings.local(index, node, channel, taken) : nullptr};
}

// The lowest token of all rings' next rows; kNoToken: no more will come; -1: it cannot be told yet, and `blocked` says
// for whom.
__device__ inline int next_token_of_node(const InternodeCombineParams &p, uint64_t epoch, int node, int channel,
                                         const uint32_t *taken, BlockedStream &blocked) {
  int token = kNoToken;
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    NodeRing ring{0, true, nullptr};
    if (index < p.internode.num_peers) ring = node_ring(p, epoch, node, channel, index, taken[index]);
    const uint32_t unknown = __ballot_sync(kAllLanes, ring.row == nullptr && !ring.last);
    if (unknown != 0) {
      const int lane = __ffs(static_cast<int>(unknown)) - 1;
      const uint32_t rows = __shfl_sync(kAllLanes, ring.rows, lane);
      blocked = {p.internode.local_rank(base + lane), static_cast<int64_t>(rows) + 1, rows};
      return -1;
    }
    const int mine = ring.row == nullptr ? kNoToken : token_of(p, ring.row);
    token = min(token, __reduce_min_sync(kAllLanes, mine));
  }
  return token;
}

__device__ inline void send_sum(const InternodeCombineParams &p, uint64_t epoch, int node, int channel, int token,
                                uint32_t number, uint32_t *taken, TokenRows list) {
  const TeamView &team = p.c.session.team;
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint8_t *row =
        index < p.internode.num_peers ? node_ring(p, epoch, node, channel, index, taken[index]).row : nullptr;
    const bool mine = row != nullptr && token_of(p, row) == token;
    list.add(mine ? row : nullptr);
  }
  uint8_t *place = team.self + p.rings.out(node, channel, number);
  uint32_t *words = row_words(p, place);
  sum_rows(p, list, {nullptr, nullptr}, place, reinterpret_cast<float *>(words + 1));
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(token);
  uint64_t *head =
      word_at(team.self, p.internode.at.heads, p.internode.node * kMaxChannels + channel);  // there as here
  put_remote(p.internode, p.internode.partner(node), team.self + p.rings.in(p.internode.node, channel, number), place,
             align_up(p.c.row_bytes + 4u * (1 + p.c.num_topk), 16u), head, tagged(epoch, number + 1));
  __syncwarp();  // all lanes have read the rows
  for (int index = lane_id(); index < p.internode.num_peers; index += kWarp) {
    const uint8_t *row = node_ring(p, epoch, node, channel, index, taken[index]).row;
    if (row == nullptr || token_of(p, row) != token) continue;
    const uint32_t rows = ++taken[index];
    uint64_t *word = word_at(team.peers[p.internode.local_rank(index)], p.internode.at.taken,
                             local_word(p.internode, p.internode.index, node, channel));
    if (is_credited(rows, p.rings.local_slots)) ptx::st_release_sys(word, tagged(epoch, rows));
  }
  __syncwarp();
}

__device__ inline Outcome serve_node_sum(const InternodeCombineParams &p, uint64_t epoch, int stream,
                                         const TokenRows &list, BlockedStream &blocked) {
  const int others = p.internode.num_nodes - 1, channel = stream / others,
            node = stream % others + (stream % others >= p.internode.node);
  RowStream *state = p.lists.there + stream;
  if (state->closed != 0) return kDone;
  uint32_t *taken = p.lists.local_rows + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
  const uint32_t credit =
      read_count(word_at(p.c.session.team.self, p.internode.at.credits, node * kMaxChannels + channel), epoch);
  const uint32_t before = state->count;
  uint32_t sent = before;
  blocked = {p.internode.partner(node), static_cast<int64_t>(sent) + 1, credit};  // for room, or for the last credit
  for (; credit != kAllRows && sent < before + kSumsAtOnce && sent - credit < p.rings.slots; ++sent) {
    const int token = next_token_of_node(p, epoch, node, channel, taken, blocked);
    if (token < 0 || token == kNoToken) break;
    send_sum(p, epoch, node, channel, token, sent, taken, list);
  }
  if (lane_id() == 0) {
    state->count = sent;
    state->closed = credit == kAllRows;
    if (credit == kAllRows)
      atomicAdd(
          reinterpret_cast<unsigned long long *>(&p.c.session.team.scratch->sent_bytes[p.internode.partner(node)]),
          static_cast<unsigned long long>(sent) * p.c.row_bytes);
  }
  __syncwarp();
  return credit == kAllRows ? kDone : sent != before ? kMoved : kBlocked;
}

// ---- Sums of my tokens ----------------------------------------------------------------------------------------------

// What a token's sum has: nodes in ascending order, my own one rank by rank, the others a row each.
struct Part {
  int rank, node;
  bool local;
};  // rank: of my node, or the partner in the other node
__device__ inline Part part_of(const NodeView &internode, int at) {
  if (at >= internode.node && at < internode.node + internode.num_peers)
    return {internode.local_rank(at - internode.node), internode.node, true};
  const int node = at < internode.node ? at : at - internode.num_peers + 1;
  return {internode.partner(node), node, false};
}
__device__ inline bool token_has(const InternodeCombineParams &p, int token, const Part &part) {
  const int32_t *heads = p.c.send_head + static_cast<int64_t>(token) * p.c.session.team.num_ranks;
  if (part.local) return heads[part.rank] >= 0;
  bool has = false;
  for (int i = 0; !has && i < p.internode.num_peers; ++i) has = heads[part.node * p.internode.num_peers + i] >= 0;
  return has;
}
// The part's next row, or null with what came so far in `seen`. Every token that has the part takes one.
__device__ inline const uint8_t *part_row(const InternodeCombineParams &p, uint64_t epoch, const Part &part,
                                          int channel, uint32_t taken, uint32_t &seen) {
  uint8_t *self = p.c.session.team.self;
  const int index = p.internode.index_of(part.rank);
  const uint64_t *word =
      part.local ? word_at(self, p.internode.at.pushed, local_word(p.internode, index, p.internode.node, channel))
                 : word_at(self, p.internode.at.heads, part.node * kMaxChannels + channel);
  seen = count_in(ptx::ld_acquire_sys(word), epoch) & ~kLastRow;
  if (seen <= taken) return nullptr;
  return self +
         (part.local ? p.rings.local(index, p.internode.node, channel, taken) : p.rings.in(part.node, channel, taken));
}

// Lists the token's rows. False: one is not here yet, or is of another token.
__device__ inline bool find_parts(const InternodeCombineParams &p, uint64_t epoch, int channel, int token,
                                  const uint32_t *taken, TokenRows &list, BlockedStream &blocked) {
  const int parts = p.internode.num_peers + p.internode.num_nodes - 1;
  for (int base = 0; base < parts; base += kWarp) {
    const int at = base + lane_id();
    const uint8_t *row = nullptr;
    uint32_t seen = 0;
    Part part{};
    bool has = false;
    if (at < parts) {
      part = part_of(p.internode, at);
      has = token_has(p, token, part);
    }
    if (has) row = part_row(p, epoch, part, channel, taken[at], seen);
    const uint32_t missing = __ballot_sync(kAllLanes, has && row == nullptr);
    if (missing != 0) {
      const int lane = __ffs(static_cast<int>(missing)) - 1;
      const uint32_t here = __shfl_sync(kAllLanes, seen, lane);
      blocked = {__shfl_sync(kAllLanes, part.rank, lane), static_cast<int64_t>(here) + 1, here};
      return false;
    }
    const int its = row == nullptr ? token : token_of(p, row);
    if (its != token)
      report_failure(p.c.session, DK_EINTERNAL, part.rank, DK_FIELD_NONE, token, its, 0);  // not of this handle
    if (__any_sync(kAllLanes, its != token)) return false;
    list.add(row);
  }
  return true;
}

// The rows of the token's parts are not needed any more.
__device__ inline void pass_parts(const InternodeCombineParams &p, uint64_t epoch, int channel, int token,
                                  uint32_t *taken) {
  const TeamView &team = p.c.session.team;
  const int parts = p.internode.num_peers + p.internode.num_nodes - 1;
  __syncwarp();  // all lanes have read the rows
  for (int base = 0; base < parts; base += kWarp) {
    const int at = base + lane_id();
    const Part part = at < parts ? part_of(p.internode, at) : Part{0, 0, false};
    const bool has = at < parts && token_has(p, token, part);
    const uint32_t rows = has ? ++taken[at] : 0;
    if (has && part.local && is_credited(rows, p.rings.local_slots))
      ptx::st_release_sys(word_at(team.peers[part.rank], p.internode.at.taken,
                                  local_word(p.internode, p.internode.index, p.internode.node, channel)),
                          tagged(epoch, rows));
    for (uint32_t left = __ballot_sync(kAllLanes, has && !part.local && is_credited(rows, p.rings.slots)); left != 0;
         left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int rank = __shfl_sync(kAllLanes, part.rank, lane);
      const uint32_t credit = __shfl_sync(kAllLanes, rows, lane);
      signal_remote(p.internode, team, rank,
                    word_at(team.self, p.internode.at.credits, p.internode.node * kMaxChannels + channel),
                    tagged(epoch, credit));
    }
  }
  __syncwarp();
}

__device__ inline void sum_token(const InternodeCombineParams &p, const TokenRows &list, int token) {
  const uint64_t row = static_cast<uint64_t>(token) * p.c.row_bytes;
  const uint8_t *bias[2];
  for (int b = 0; b < 2; ++b)
    bias[b] = p.c.bias[b] == nullptr ? nullptr : reinterpret_cast<const uint8_t *>(p.c.bias[b]) + row;
  float *weights =
      p.c.combined_weights == nullptr ? nullptr : p.c.combined_weights + static_cast<int64_t>(token) * p.c.num_topk;
  sum_rows(p, list, bias, reinterpret_cast<uint8_t *>(p.c.combined_x) + row, weights);
}

__device__ inline Outcome serve_token_sum(const InternodeCombineParams &p, uint64_t epoch, int channel,
                                          const TokenRows &empty, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  RowStream *state = p.lists.tokens + channel;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.token_rows + static_cast<int64_t>(channel) * (p.internode.num_peers + p.internode.num_nodes);
  const int step = static_cast<int>(p.rings.channels), before = state->at;
  int token = before;
  for (; token < p.c.num_tokens && token < before + kSumsAtOnce * step; token += step) {
    TokenRows list = empty;
    if (!find_parts(p, epoch, channel, token, taken, list, blocked)) break;
    sum_token(p, list, token);
    pass_parts(p, epoch, channel, token, taken);
  }
  const bool all = token >= p.c.num_tokens;
  for (int node = 0; all && node < p.internode.num_nodes; ++node)
    if (node != p.internode.node)
      signal_remote(p.internode, team, p.internode.partner(node),
                    word_at(team.self, p.internode.at.credits, p.internode.node * kMaxChannels + channel),
                    tagged(epoch, kAllRows));
  __syncwarp();
  if (lane_id() == 0) {
    state->at = token;
    state->closed = all;
  }
  __syncwarp();
  return all ? kDone : token != before ? kMoved : kBlocked;
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Rows that I give to each rank of my node.
__device__ inline void count_pushed_bytes(const InternodeCombineParams &p) {
  const TeamView &team = p.c.session.team;
  const int32_t *matrix = p.c.rank_prefix_matrix;
  for (int i = threadIdx.x; i < p.internode.num_peers; i += blockDim.x) {
    uint64_t rows = 0;
    for (int source = i; source < team.num_ranks; source += p.internode.num_peers)
      rows += matrix[source * team.num_ranks + team.rank] - rows_before(matrix, team.num_ranks, source, team.rank);
    team.scratch->sent_bytes[p.internode.local_rank(i)] = rows * p.c.row_bytes;
  }
}

__device__ inline void open_nodes(const InternodeCombineParams &p, int first, int step, int count) {
  const int others = p.internode.num_nodes - 1;
  for (int i = first; i < count; i += step) {
    const int channel = i / others, node = i % others + (i % others >= p.internode.node);
    uint32_t *taken =
        p.lists.local_rows + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
    for (int j = lane_id(); j < p.internode.num_peers; j += kWarp) taken[j] = 0;
    if (lane_id() == 0) p.lists.there[i] = {0, 0, 0, 0};
  }
  __syncwarp();
}
__device__ inline void open_tokens(const InternodeCombineParams &p, int first, int step, int count) {
  const int parts = p.internode.num_peers + p.internode.num_nodes;
  for (int i = first; i < count; i += step) {
    for (int j = lane_id(); j < parts; j += kWarp) p.lists.token_rows[static_cast<int64_t>(i) * parts + j] = 0;
    if (lane_id() == 0) p.lists.tokens[i] = {i, 0, 0, 0};
  }
  __syncwarp();
}

__device__ inline void run_combine_roles(const InternodeCombineParams &p, uint64_t epoch, const uint8_t **rows) {
  using Roles = CombineRoles;
  const Session &s = p.c.session;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
            channels = static_cast<int>(p.rings.channels);
  const TokenRows list{rows + warp * (p.internode.num_peers + p.internode.num_nodes), 0};
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks, count = s.team.num_ranks * channels;
    for (int i = first; i < count; i += step)
      if (lane_id() == 0) p.lists.pairs[i] = {0, 0, 0, 0};
    __syncwarp();
    serve(s, first, step, count,
          [&](int stream, BlockedStream &blocked) { return serve_pusher(p, epoch, stream, blocked); });
  } else if (warp < Roles::kSenders + Roles::kNodeSummers) {
    const int first = (warp - Roles::kSenders) * blocks + block, step = Roles::kNodeSummers * blocks,
              count = (p.internode.num_nodes - 1) * channels;
    open_nodes(p, first, step, count);
    serve(s, first, step, count,
          [&](int stream, BlockedStream &blocked) { return serve_node_sum(p, epoch, stream, list, blocked); });
  } else {
    const int first = (warp - Roles::kSenders - Roles::kNodeSummers) * blocks + block,
              step = Roles::kTokenSummers * blocks;
    open_tokens(p, first, step, channels);
    serve(s, first, step, channels,
          [&](int stream, BlockedStream &blocked) { return serve_token_sum(p, epoch, stream, list, blocked); });
  }
}

__global__ void __launch_bounds__(CombineRoles::kThreads, 1)
    internode_combine_kernel(const __grid_constant__ InternodeCombineParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Session &s = p.c.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand = combine_handshake(p.c, epoch);
    if (blockIdx.x == 0) post_messages(s, p.internode, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_messages(s, p.internode, hand)) {
      if (blockIdx.x == 0) count_pushed_bytes(p);
      run_combine_roles(p, epoch, reinterpret_cast<const uint8_t **>(shared));
    }
  }
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.c);
    if (threadIdx.x == 0) s.team.scratch->epoch = epoch;
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deepep::internode
