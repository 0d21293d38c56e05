// combine_push.cuh - libdeepep_nvshmem.so: combine's parameters, and how rows get from their experts' rank to the
// collector inside the node: pushers store them into its rings.
#pragma once
#include "cuda/common/lanes.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/common.cuh"
#include "internode/normal/feed.cuh"
#include "internode/normal/rings.h"
#include "internode/normal/turns.cuh"

namespace deepep::internode {

// Fewer warps than dispatch has, since their registers are what a sum needs.
struct CombineRoles {
  static constexpr int kWarps = 20, kThreads = kWarps * kWarp;
};
constexpr int kSumsAtOnce = 4;  // rows or tokens of a stream in one turn of a warp
// A warp that sums tokens pushes first: its first rows come after many turns of pushers and sums for nodes.
constexpr int kTurnsOfHelp = 3;

// How many of a block's warps push rows and sum for nodes; the others sum tokens.
struct CombineShape {
  int pushers, node_sums;
  __host__ __device__ int sums() const { return CombineRoles::kWarps - pushers; }  // warps that sum
  __host__ __device__ int token_sums() const { return sums() - node_sums; }
};
// Where puts are stores fewer warps sum for nodes and more push; a rank that is its node has nobody to push to. A
// channel is what a warp sums for a node, so that as many at least sum tokens: with fewer some would have two channels,
// and all wait for them.
constexpr CombineShape kPuttingShape{4, 8}, kStoringShape{5, 7}, kAloneShape{0, 10};

struct InternodeCombineParams {
  CombineParams c;
  NodeView internode;
  CombineShape shape;
  FeedShape feeds;  // of sums for other nodes, then of those of tokens
  RowRings rings;
  StreamLists lists;
};

// After a row's payload: the token, then its weights.
__device__ inline uint32_t *row_words(const InternodeCombineParams &p, uint8_t *row) {
  return reinterpret_cast<uint32_t *>(row + p.c.row_bytes);
}
__host__ __device__ inline uint32_t words_bytes(const InternodeCombineParams &p) { return 4u * (1 + p.c.num_topk); }

inline RowRings sum_rings(const InternodeCombineParams &p, int most) {
  return row_rings(p.c.session.team, p.internode, static_cast<uint64_t>(p.c.row_bytes) + words_bytes(p), most, true);
}
// Shared memory of a block: a list for each warp that sums, of all rows that a sum may have and two biases.
__host__ __device__ inline uint32_t list_length(const NodeView &internode) {
  return internode.num_peers + internode.num_nodes + 1;
}
inline uint64_t list_bytes(const NodeView &internode, const CombineShape &shape) {
  return sizeof(void *) * shape.sums() * list_length(internode);
}
// A block's warps and shared memory. room: bytes of it that bulk copies may fill, 0: there are none. Returns the bytes
// that are needed.
inline uint64_t shape_combine(InternodeCombineParams &p, int blocks, uint64_t room) {
  constexpr uint32_t kMostSlots = 3;
  const bool alone = p.internode.num_peers == 1;
  p.shape = alone ? kAloneShape : p.internode.puts_are_stores ? kStoringShape : kPuttingShape;
  const uint64_t used = list_bytes(p.internode, p.shape);
  p.feeds = feed_shape(kMostSlots, p.shape.sums(), used, room);
  p.rings = sum_rings(p, channels_for(p.internode, blocks, p.shape.node_sums));
  return p.feeds.slots != 0 ? p.feeds.end() : used;
}

// The parameters of a call and, where ranks do not agree on its channels, those with as many as all have.
struct CombineChoice {
  InternodeCombineParams params[2];
};
inline CombineChoice combine_choice(const InternodeCombineParams &p) {
  CombineChoice choice{{p, p}};
  choice.params[1].rings = sum_rings(p, kFixedChannels);
  return choice;
}

// ---- Pushers: a stream is a channel's rows for tokens of a source ---------------------------------------------------

// The rows of this rank for tokens of a source.
struct OwnRows {
  const int32_t *tokens;
  int first, count;
  __device__ int token(int row) const { return tokens[row]; }
};
__device__ inline OwnRows own_rows(const InternodeCombineParams &p, int source) {
  const TeamView &team = p.c.session.team;
  const int first = rows_before(p.c.rank_prefix_matrix(), team.num_ranks, source, team.rank);
  return {p.c.recv_src_idx() + first, first, p.c.rank_prefix_matrix()[source * team.num_ranks + team.rank] - first};
}

// The first of the rows from `row` on whose token belongs to the channel; rows.count or more: none.
template <int kUnroll = 8, class Rows>
__device__ inline int next_row_of(const InternodeCombineParams &p, const Rows &rows, int channel, int row) {
  for (; row < rows.count; row += kUnroll * kWarp) {
    int token[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int mine = row + u * kWarp + lane_id();
      token[u] = mine < rows.count ? rows.token(mine) : 0;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool belongs = row + u * kWarp + lane_id() < rows.count &&
                           static_cast<uint32_t>(token[u]) % p.rings.channels == static_cast<uint32_t>(channel);
      const uint32_t found = __ballot_sync(kAllLanes, belongs);
      if (found != 0) return row + u * kWarp + __ffs(static_cast<int>(found)) - 1;
    }
  }
  return row;
}

__device__ inline void push_row(const InternodeCombineParams &p, int64_t row, uint8_t *to) {
  const CombineParams &c = p.c;
  const bool weighs = c.topk_weights() != nullptr;
  const int32_t token = lane_id() == 0 ? c.recv_src_idx()[row] : 0;
  const float weight = weighs && lane_id() < c.num_topk ? c.topk_weights()[row * c.num_topk + lane_id()] : 0;
  copy_payload(to, c.x() + row * c.row_bytes, c.row_bytes);
  uint32_t *words = row_words(p, to);
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(token);
  if (lane_id() < c.num_topk) words[1 + lane_id()] = __float_as_uint(weight);
  for (int k = kWarp + lane_id(); k < c.num_topk; k += kWarp)
    words[1 + k] = weighs ? __float_as_uint(c.topk_weights()[row * c.num_topk + k]) : 0;
}

// Rows for tokens of the rank of `node` that has the index; its collector here has it too.
struct PushStream {
  int index, node, channel;
};
// The next of a stream's rows, of `count`, into the collector's ring. next(row): the first of the stream from `row` on;
// push(row, place): false, if it cannot be. at: the rows that have been pushed, and below them the number of the next
// row to look at.
template <class Next, class Push>
__device__ inline Outcome push_stream(const InternodeCombineParams &p, uint64_t epoch, const PushStream &stream,
                                      int count, uint64_t &at, BlockedStream &blocked, Next next, Push push) {
  const TeamView &team = p.c.session.team;
  const int me = p.internode.index, collector = p.internode.local_rank(stream.index);
  uint8_t *block = team.peers[collector];
  uint64_t *pushed = word_at(block, p.internode.at.pushed, push_index(p.internode, me, stream.node, stream.channel));
  const uint32_t taken = read_count(
      word_at(team.self, p.internode.at.taken, push_index(p.internode, stream.index, stream.node, stream.channel)),
      epoch);
  const auto before = static_cast<uint32_t>(at >> 32);
  uint32_t rows = before;
  int row = static_cast<int>(static_cast<uint32_t>(at));
  bool last = false;
  const InPhase phase(kPhaseCopy);
  while (!last && rows < before + kSumsAtOnce) {
    row = next(row);
    last = row >= count;
    if (last || rows - taken >= p.rings.local_slots) break;
    if (!push(row, block + p.rings.local(me, stream.node, stream.channel, rows))) return kBlocked;
    ++rows;
    ++row;
  }
  if (last || rows != before) write_count(pushed, epoch, rows | (last ? kLastRow : 0));
  at = static_cast<uint64_t>(rows) << 32 | static_cast<uint32_t>(row);
  if (last) return kDone;
  if (rows != before) return kMoved;
  blocked = {collector, static_cast<int64_t>(rows) - p.rings.local_slots + 1, taken};
  return kBlocked;
}
__device__ inline Outcome serve_pusher(const InternodeCombineParams &p, uint64_t epoch, int stream, uint64_t &at,
                                       BlockedStream &blocked) {
  // Of all ranks but those of this one's index, whose rows it adds where they are.
  const int others = p.internode.num_peers - 1, sources = others * p.internode.num_nodes, channel = stream / sources,
            index = (p.internode.index + 1 + stream % others) % p.internode.num_peers,
            node = (p.internode.node + 1 + stream % sources / others) % p.internode.num_nodes;
  const OwnRows rows = own_rows(p, node * p.internode.num_peers + index);
  return push_stream(
      p, epoch, {index, node, channel}, rows.count, at, blocked,
      [&](int row) { return next_row_of(p, rows, channel, row); },
      [&](int row, uint8_t *place) {
        push_row(p, rows.first + row, place);
        return true;
      });
}

}  // namespace deepep::internode
