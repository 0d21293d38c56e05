// combine.cuh - libdeepep_nvshmem.so: rows back to their tokens' ranks. Pushers copy rows to the collector, the rank of
// their node that has the same index as the token's rank. A collector sums a node's rows of a token and sends the sum
// to the token's rank, which sums what it received. A rank's own rows are added where they are. Each warp has one of
// these roles and serves its share of streams; those that sum tokens help to push at first.
#pragma once
#include "cuda/common/lanes.cuh"
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/row_sums.cuh"

namespace deepep::internode {

__device__ inline int token_of(const InternodeCombineParams &p, const uint8_t *row) {
  return static_cast<int>(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(row + p.c.row_bytes)));
}
// A reader posts credits for half a ring at a time.
__device__ inline bool posts_credit(uint32_t rows, uint32_t slots) { return rows % max(1u, slots / 2) == 0; }

// ---- Collectors: a stream is a channel's sums for the partner in another node ---------------------------------------

constexpr int kNoToken = 0x7fffffff;

// A collector's source of rows for a node and channel: a ring that a rank of its node pushes to, or its own rows.
// token: of the next row, kNoToken: there is none. known: that is so until it is taken.
struct NextRow {
  const uint8_t *row;
  int token;
  uint32_t pushed;  // so far
  bool known;
};
// taken: rows taken of the ring; of the own rows the number of the next one.
__device__ inline NextRow next_pushed_row(const InternodeCombineParams &p, uint64_t epoch, int node, int channel,
                                          int index, uint32_t taken, const OwnRows &own) {
  if (index == p.internode.index) {
    if (taken >= static_cast<uint32_t>(own.count)) return {nullptr, kNoToken, taken, true};
    return {p.c.x() + (own.first + static_cast<int64_t>(taken)) * p.c.row_bytes, own.tokens[taken], taken, true};
  }
  uint8_t *self = p.c.session.team.self;
  const uint32_t count = count_in(
      ptx::ld_acquire_sys(word_at(self, p.internode.at.pushed, push_index(p.internode, index, node, channel))), epoch);
  const uint32_t rows = count & ~kLastRow;
  if (rows <= taken) return {nullptr, kNoToken, rows, (count & kLastRow) != 0};
  const uint8_t *row = self + p.rings.local(index, node, channel, taken);
  return {row, token_of(p, row), rows, true};
}

// The lowest token among the next rows of all sources; kNoToken: all rows have been taken; -1: a ring is empty and its
// rank may push more rows (`blocked`). first: [out] this lane's of the first 32 sources.
__device__ inline int next_token_of_node(const InternodeCombineParams &p, uint64_t epoch, int node, int channel,
                                         const uint32_t *taken, const OwnRows &own, NextRow &first,
                                         BlockedStream &blocked) {
  int token = kNoToken;
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    NextRow next{nullptr, kNoToken, 0, true};
    if (index < p.internode.num_peers) next = next_pushed_row(p, epoch, node, channel, index, taken[index], own);
    if (base == 0) first = next;
    const uint32_t unknown = __ballot_sync(kAllLanes, !next.known);
    if (unknown != 0) {
      const int lane = __ffs(static_cast<int>(unknown)) - 1;
      const uint32_t rows = __shfl_sync(kAllLanes, next.pushed, lane);
      blocked = {p.internode.local_rank(base + lane), static_cast<int64_t>(rows) + 1, rows};
      return -1;
    }
    token = min(token, __reduce_min_sync(kAllLanes, next.token));
  }
  return token;
}

// Sums the token's rows into `place`, and takes them. first: as next_token_of_node() has found it.
__device__ inline void sum_for_node(const InternodeCombineParams &p, uint64_t epoch, int node, int channel, int token,
                                    const NextRow &first, uint8_t *place, uint32_t *taken, const OwnRows &own,
                                    TokenRows list, RowFeed &feed) {
  const TeamView &team = p.c.session.team;
  uint32_t credits = 0;  // bit i: posted to rank 32 * i + this lane's number of the node
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    NextRow next = first;
    if (base != 0) next = {nullptr, kNoToken, 0, true};
    if (base != 0 && index < p.internode.num_peers)
      next = next_pushed_row(p, epoch, node, channel, index, taken[index], own);
    const bool mine = next.row != nullptr && next.token == token;
    if (mine && index != p.internode.index && posts_credit(++taken[index], p.rings.local_slots))
      credits |= 1u << (base / kWarp);
    list.add(mine ? next.row : nullptr);
  }
  start_feed(feed, list, p.c.row_bytes);
  // While the pieces come: the rest of the row, and which of the own rows is next.
  uint32_t *words = row_words(p, place);
  sum_weights(p, list, list.count, reinterpret_cast<float *>(words + 1));
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(token);
  const uint32_t at = taken[p.internode.index];
  __syncwarp();
  if (at < static_cast<uint32_t>(own.count) && own.tokens[at] == token) {
    const int next = next_row_of(p, own, channel, static_cast<int>(at) + 1);
    if (lane_id() == 0) taken[p.internode.index] = static_cast<uint32_t>(next);
  }
  sum_rows(p, list, feed, place);
  __syncwarp();  // all lanes have read the rows
  for (int index = lane_id(); credits != 0; index += kWarp, credits >>= 1)
    if ((credits & 1) != 0)
      ptx::st_release_sys(word_at(team.peers[p.internode.local_rank(index)], p.internode.at.taken,
                                  push_index(p.internode, p.internode.index, node, channel)),
                          tagged(epoch, taken[index]));
  __syncwarp();
}

__device__ inline Outcome serve_node_sum(const InternodeCombineParams &p, uint64_t epoch, int stream,
                                         const TokenRows &list, RowFeed &feed, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  const int others = p.internode.num_nodes - 1, channel = stream / others,
            node = stream % others + (stream % others >= p.internode.node);
  RowStream *state = p.lists.from_nodes + stream;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.node_rows_taken + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
  const OwnRows own = own_rows(p, p.internode.partner(node));
  if (state->opened == 0) {
    const int first = next_row_of(p, own, channel, 0);
    if (lane_id() == 0) taken[p.internode.index] = static_cast<uint32_t>(first);
    __syncwarp();
  }
  const uint32_t credit = read_count(word_at(team.self, p.internode.at.credits, node * kMaxChannels + channel), epoch);
  const uint32_t before = state->count, slots = p.rings.slots;
  // A piece: sums in neighbouring places of the ring.
  const uint32_t end =
      credit == kAllRows ? before : before + min(min(p.rings.piece, slots - before % slots), slots - (before - credit));
  const int partner = p.internode.partner(node);
  const uint32_t last_row = align_up(p.c.row_bytes + words_bytes(p), 16u);
  uint8_t *there = p.internode.blocks[partner];  // where sums are stored, null: a NIC serves it
  uint32_t sent = before;
  // It waits for room or for the last credit, unless next_token_of_node() says otherwise.
  blocked = {p.internode.partner(node), static_cast<int64_t>(sent) + 1, credit};
  for (; sent < end; ++sent) {
    NextRow first{};
    const int token = next_token_of_node(p, epoch, node, channel, taken, own, first, blocked);
    if (token < 0 || token == kNoToken) break;
    uint8_t *place = there == nullptr ? team.self + p.rings.out(node, channel, sent)
                                      : there + p.rings.in(p.internode.node, channel, sent);
    sum_for_node(p, epoch, node, channel, token, first, place, taken, own, list, feed);
  }
  if (sent != before) {
    const InPhase phase(kPhasePut);
    uint64_t *head =
        word_at(team.self, p.internode.at.heads, p.internode.node * kMaxChannels + channel);  // in either block
    if (there == nullptr)
      put_remote(p.internode, partner, team.self + p.rings.in(p.internode.node, channel, before),
                 team.self + p.rings.out(node, channel, before),
                 static_cast<uint64_t>(sent - before - 1) * p.rings.stride + last_row, head, tagged(epoch, sent));
    else
      set_word(p.internode, team, partner, head, tagged(epoch, sent));
  }
  __syncwarp();
  if (lane_id() == 0) {
    state->opened = 1;
    state->count = sent;
    state->closed = credit == kAllRows;
    if (credit == kAllRows)
      add_to(&team.scratch->sent_bytes[p.internode.partner(node)], static_cast<uint64_t>(sent) * p.c.row_bytes);
  }
  __syncwarp();
  return credit == kAllRows ? kDone : sent != before ? kMoved : kBlocked;
}

// ---- Sums of this rank's tokens: a stream is a channel --------------------------------------------------------------

// A row that a token's sum may have: nodes in ascending order, of this node a row of each rank, of another node the
// partner's sum.
struct SumPart {
  int rank, node;  // the rank that writes the row, and its node
  bool local;
};
__device__ inline SumPart sum_part(const NodeView &internode, int at) {
  if (at >= internode.node && at < internode.node + internode.num_peers)
    return {internode.local_rank(at - internode.node), internode.node, true};
  const int node = at < internode.node ? at : at - internode.num_peers + 1;
  return {internode.partner(node), node, false};
}
__device__ inline bool has_part(const InternodeCombineParams &p, int token, const SumPart &part) {
  const int32_t *heads = p.c.send_head() + static_cast<int64_t>(token) * p.c.session.team.num_ranks;
  if (part.local) return heads[part.rank] >= 0;
  bool has = false;
  for (int i = 0; !has && i < p.internode.num_peers; ++i) has = heads[part.node * p.internode.num_peers + i] >= 0;
  return has;
}
// Of another rank's part the next row, or null; `seen`: rows that have arrived. Each token that has the part takes one.
__device__ inline const uint8_t *next_row(const InternodeCombineParams &p, uint64_t epoch, const SumPart &part,
                                          int channel, uint32_t taken, uint32_t &seen) {
  uint8_t *self = p.c.session.team.self;
  const int index = p.internode.index_of(part.rank);
  const uint64_t *word =
      part.local ? word_at(self, p.internode.at.pushed, push_index(p.internode, index, p.internode.node, channel))
                 : word_at(self, p.internode.at.heads, part.node * kMaxChannels + channel);
  seen = count_in(ptx::ld_acquire_sys(word), epoch) & ~kLastRow;
  if (seen <= taken) return nullptr;
  return self +
         (part.local ? p.rings.local(index, p.internode.node, channel, taken) : p.rings.in(part.node, channel, taken));
}

// This rank's own row of the token, where the caller has it; null: the handle gives the token none.
__device__ inline const uint8_t *own_row(const InternodeCombineParams &p, const OwnRows &own, int token) {
  const TeamView &team = p.c.session.team;
  const int number = p.c.send_head()[static_cast<int64_t>(token) * team.num_ranks + team.rank];
  if (number >= own.count || own.tokens[number] != token) return nullptr;
  return p.c.x() + (own.first + static_cast<int64_t>(number)) * p.c.row_bytes;
}

// Lists the token's rows. False: one has not arrived yet, or belongs to another token, which is a failure. parts: [out]
// bit i: the token has part 32 * i + this lane's number.
__device__ inline bool find_rows(const InternodeCombineParams &p, uint64_t epoch, int channel, int token,
                                 const uint32_t *taken, const OwnRows &own, TokenRows &list, uint32_t &parts,
                                 BlockedStream &blocked) {
  const int count = p.internode.num_peers + p.internode.num_nodes - 1, me = p.c.session.team.rank;
  parts = 0;
  for (int base = 0; base < count; base += kWarp) {
    const int at = base + lane_id();
    const uint8_t *row = nullptr;
    uint32_t seen = 0;
    SumPart part{};
    bool has = false;
    if (at < count) {
      part = sum_part(p.internode, at);
      has = has_part(p, token, part);
    }
    int its = token;
    if (has && part.rank == me) {
      row = own_row(p, own, token);
      if (row == nullptr) its = -1;
    } else if (has) {
      row = next_row(p, epoch, part, channel, taken[at], seen);
      if (row != nullptr) its = token_of(p, row);
    }
    if (its != token)
      report_failure(p.c.session, DK_EINVAL, part.rank, DK_FIELD_SRC_IDX, token, its, 0);  // not of this handle
    if (__any_sync(kAllLanes, its != token)) return false;
    const uint32_t missing = __ballot_sync(kAllLanes, has && row == nullptr);
    if (missing != 0) {
      const int lane = __ffs(static_cast<int>(missing)) - 1;
      const uint32_t here = __shfl_sync(kAllLanes, seen, lane);
      blocked = {__shfl_sync(kAllLanes, part.rank, lane), static_cast<int64_t>(here) + 1, here};
      return false;
    }
    if (has) parts |= 1u << (base / kWarp);
    list.add(row);
  }
  return true;
}

// Counts the token's rows as taken, and posts credits for them.
__device__ inline void release_parts(const InternodeCombineParams &p, uint64_t epoch, int channel, uint32_t parts,
                                     uint32_t *taken) {
  const TeamView &team = p.c.session.team;
  const int count = p.internode.num_peers + p.internode.num_nodes - 1;
  __syncwarp();  // all lanes have read the rows
  for (int base = 0; base < count; base += kWarp) {
    const int at = base + lane_id();
    const SumPart part = at < count ? sum_part(p.internode, at) : SumPart{0, 0, false};
    const bool has = (parts >> (base / kWarp) & 1) != 0 && part.rank != team.rank;
    const uint32_t rows = has ? ++taken[at] : 0;
    if (has && part.local && posts_credit(rows, p.rings.local_slots))
      ptx::st_release_sys(word_at(team.peers[part.rank], p.internode.at.taken,
                                  push_index(p.internode, p.internode.index, p.internode.node, channel)),
                          tagged(epoch, rows));
    for (uint32_t left = __ballot_sync(kAllLanes, has && !part.local && posts_credit(rows, p.rings.slots)); left != 0;
         left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int rank = __shfl_sync(kAllLanes, part.rank, lane);
      const uint32_t credit = __shfl_sync(kAllLanes, rows, lane);
      const InPhase phase(kPhaseSignal);
      signal_remote(p.internode, team, rank,
                    word_at(team.self, p.internode.at.credits, p.internode.node * kMaxChannels + channel),
                    tagged(epoch, credit));
    }
  }
  __syncwarp();
}

__device__ inline void sum_token(const InternodeCombineParams &p, TokenRows list, RowFeed &feed, int token) {
  const uint64_t row = static_cast<uint64_t>(token) * p.c.row_bytes;
  const int weighted = list.count;
  for (int b = 0; b < 2; ++b)
    if (p.c.bias(b) != nullptr) list.add(lane_id() == 0 ? p.c.bias(b) + row : nullptr);
  float *weights = p.c.combined_topk_weights() == nullptr
                       ? nullptr
                       : p.c.combined_topk_weights() + static_cast<int64_t>(token) * p.c.num_topk;
  start_feed(feed, list, p.c.row_bytes);
  if (weights != nullptr) sum_weights(p, list, weighted, weights);
  sum_rows(p, list, feed, p.c.combined_x() + row);
}

__device__ inline Outcome serve_token_sum(const InternodeCombineParams &p, uint64_t epoch, int channel,
                                          const TokenRows &empty, RowFeed &feed, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  RowStream *state = p.lists.tokens + channel;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.token_rows_taken + static_cast<int64_t>(channel) * (p.internode.num_peers + p.internode.num_nodes);
  const OwnRows own = own_rows(p, team.rank);
  const int step = static_cast<int>(p.rings.channels), before = state->at;
  int token = before;
  for (; token < p.c.num_tokens && token < before + kSumsAtOnce * step; token += step) {
    TokenRows list = empty;
    uint32_t parts = 0;
    if (!find_rows(p, epoch, channel, token, taken, own, list, parts, blocked)) break;
    sum_token(p, list, feed, token);
    release_parts(p, epoch, channel, parts, taken);
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

// Statistics: rows of this rank that each rank of its node adds.
__device__ inline void count_pushed_bytes(const InternodeCombineParams &p) {
  const TeamView &team = p.c.session.team;
  const int32_t *matrix = p.c.rank_prefix_matrix();
  for (int i = threadIdx.x; i < p.internode.num_peers; i += blockDim.x) {
    uint64_t rows = 0;
    for (int source = i; source < team.num_ranks; source += p.internode.num_peers)
      rows += matrix[source * team.num_ranks + team.rank] - rows_before(matrix, team.num_ranks, source, team.rank);
    team.scratch->sent_bytes[p.internode.local_rank(i)] = rows * p.c.row_bytes;
  }
}

__device__ inline void reset_node_sums(const InternodeCombineParams &p, int first, int step, int count) {
  const int others = p.internode.num_nodes - 1;
  for (int i = first; i < count; i += step) {
    const int channel = i / others, node = i % others + (i % others >= p.internode.node);
    uint32_t *taken =
        p.lists.node_rows_taken + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
#pragma unroll 1
    for (int j = lane_id(); j < p.internode.num_peers; j += kWarp) taken[j] = 0;
    if (lane_id() == 0) p.lists.from_nodes[i] = {0, 0, 0, 0};
  }
  __syncwarp();
}
__device__ inline void reset_token_sums(const InternodeCombineParams &p, int first, int step, int count) {
  const int parts = p.internode.num_peers + p.internode.num_nodes;
  for (int i = first; i < count; i += step) {
#pragma unroll 1
    for (int j = lane_id(); j < parts; j += kWarp) p.lists.token_rows_taken[static_cast<int64_t>(i) * parts + j] = 0;
    if (lane_id() == 0) p.lists.tokens[i] = {i, 0, 0, 0};
  }
  __syncwarp();
}

__device__ inline void run_combine_roles(const InternodeCombineParams &p, uint64_t epoch, uint8_t *shared) {
  const Session &s = p.c.session;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
            channels = static_cast<int>(p.rings.channels);
  int warp = warp_id();  // then: among those of its role
  const bool pushes = warp < p.shape.pushers, sums_tokens = warp >= p.shape.pushers + p.shape.node_sums;
  if (pushes || (sums_tokens && p.shape.pushers != 0)) {
    const TurnQueue queue{p.lists.pushes, (s.team.num_ranks - p.internode.num_nodes) * channels};
    serve_in_turn(
        s, kRolePusher, queue, pushes ? -1 : kTurnsOfHelp,
        [&](int stream, uint64_t &at, BlockedStream &blocked) { return serve_pusher(p, epoch, stream, at, blocked); });
  }
  if (pushes) return;
  warp -= p.shape.pushers;
  const TokenRows list{reinterpret_cast<const uint8_t **>(shared) + warp * list_length(p.internode), 0};
  RowFeed feed(p.feeds, shared, warp);
  if (warp < p.shape.node_sums) {
    const int first = warp * blocks + block, step = p.shape.node_sums * blocks,
              count = (p.internode.num_nodes - 1) * channels;
    reset_node_sums(p, first, step, count);
    serve_streams(s, kRoleNodeSum, first, step, count, [&](int stream, BlockedStream &blocked) {
      return serve_node_sum(p, epoch, stream, list, feed, blocked);
    });
    return;
  }
  warp -= p.shape.node_sums;
  const int first = warp * blocks + block, step = p.shape.token_sums() * blocks;
  reset_token_sums(p, first, step, channels);
  serve_streams(s, kRoleTokenSum, first, step, channels, [&](int stream, BlockedStream &blocked) {
    return serve_token_sum(p, epoch, stream, list, feed, blocked);
  });
}

}  // namespace deepep::internode

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(CombineRoles::kThreads, 1)
    combine_with_notify(const __grid_constant__ CombineChoice choice) {
  const InternodeCombineParams &p = choice.params[0];
  extern __shared__ __align__(16) uint8_t shared[];
  const Session &s = p.c.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  begin_role_times();
  if (begin(s)) {
    Handshake hand =
        combine_handshake(p.c, epoch, load_matrix_entry(p.c.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x));
    add_channels(hand, p.rings.channels);
    if (blockIdx.x == 0) post_messages(s, p.internode, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_messages(s, p.internode, hand)) {
      if (blockIdx.x == 0) count_pushed_bytes(p);
      // By a number, so that the roles' code is there once.
      const int which = __syncthreads_and(agree_on_channels(s, p.internode, epoch, p.rings.channels)) != 0 ? 0 : 1;
      run_combine_roles(choice.params[which], epoch, shared);
    }
  }
  end_role_times(1);
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.c);
    const int streams = s.team.num_ranks * static_cast<int>(max(p.rings.channels, choice.params[1].rings.channels));
    for (int i = threadIdx.x; i <= streams; i += blockDim.x) p.lists.pushes[i] = 0;
    if (threadIdx.x == 0) s.team.scratch->epoch = epoch;
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
