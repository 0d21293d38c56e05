// combine_push.cuh - libdeepep_nvshmem.so, combine with a routing across nodes: what a record of a ring is, and how
// records get to the collector of their node (combine.cuh): warps of all roles push them.
#pragma once
#include "cuda/impl/normal/expanded_sums.cuh"
#include "internode/normal/combine.cuh"
#include "internode/routed/lanes.cuh"

namespace deepep::internode {

struct RoutedCombineParams : InternodeCombineParams {
  uint32_t header_bytes = 0;  // of a record
  int32_t most_records = 0;   // of a token from another node
};

// A record of a ring: a header, then a row; with DK_COMBINE_UNREDUCED the rows of the token's choices. Weights: K; in
// a node's sum K for each of its ranks, of those that have the token.
struct RecordHeader {
  int32_t token, last_choice, rows, reserved;
};
__host__ __device__ inline bool are_apart(const dk_combine_params &p) {
  return (p.flags & (DK_COMBINE_UNREDUCED | DK_COMBINE_APART)) != 0;
}
// Then a record has a row of each choice at its rank.
__host__ __device__ inline bool sends_choices(const dk_combine_params &p) {
  return p.routing == DK_ROUTING_EXPANDED && (p.flags & DK_COMBINE_UNREDUCED) != 0;
}
__host__ __device__ inline uint32_t record_header_bytes(const dk_combine_params &p, int num_peers) {
  return align_up<uint32_t>(sizeof(RecordHeader) + 4u * p.num_topk * (are_apart(p) ? 1 : num_peers), 16);
}
// Of a token from another node.
__host__ __device__ inline int most_records(const dk_combine_params &p, int num_peers) {
  return are_apart(p) ? min(p.num_topk, num_peers) : 1;
}
__device__ inline const RecordHeader *header_of(const uint8_t *record) {
  return reinterpret_cast<const RecordHeader *>(record);
}
__device__ inline uint32_t *weights_in(uint8_t *record) { return reinterpret_cast<uint32_t *>(record) + 4; }
__device__ inline int load_word(const int32_t *word) {
  return static_cast<int>(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(word)));
}
__device__ inline uint32_t load_weight(const uint32_t *weights, int at) {
  return weights == nullptr ? 0 : ptx::ld_relaxed_sys(weights + at);
}

// Channels: as many as warps of 24 SMs sum one by one. Where ranks of a node push to each other, fewer, so that their
// rings hold two turns of rows.
constexpr int kPushedChannels = 180, kAloneChannels = 240;
// All records of a token lie in the ring of its node together; a ring has room for twice as many, or there are fewer
// channels. slots is 0 if a region is too small.
inline RowRings record_rings(const TeamView &team, const NodeView &internode, uint64_t record_bytes, uint32_t most,
                             bool pushes) {
  RowRings at = row_rings(team, internode, record_bytes, pushes ? kPushedChannels : kAloneChannels, true);
  if (at.slots == 0 || most <= 1) return at;
  const uint64_t rows = at.half / internode.num_nodes / at.stride, local = team.nvl_bytes / team.num_ranks / at.stride;
  at.channels = static_cast<uint32_t>(max<uint64_t>(1, min<uint64_t>(at.channels, rows / (2 * most))));
  at.slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, rows / at.channels));
  at.piece = piece_of(at);
  if (at.slots > at.piece && at.slots - at.slots % at.piece >= most) at.slots -= at.slots % at.piece;
  at.local_slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, local / at.channels));
  if (at.slots < most) at.slots = 0;
  return at;
}

// A rank's own rows of the plain layout are added where the caller has them. Expanded ones are added and rounded before
// they are a row, which needs a place.
__host__ __device__ inline bool own_in_place(const dk_combine_params &p) { return p.routing != DK_ROUTING_EXPANDED; }

// Shared memory of a warp: rows by choice, and in the order of the sum, with two biases.
struct SumLists {
  const uint8_t *by_choice[kWarp], *rows[kWarp + 2];
};
// A block's warps, shared memory and rings; what it knows of the call is set. room: as in shape_combine(). Returns the
// bytes of shared memory.
inline uint64_t shape_records(RoutedCombineParams &p, uint64_t room) {
  constexpr CombineShape kShape{4, 8};
  constexpr uint32_t kMostSlots = 3;
  const NodeView &internode = p.internode;
  p.header_bytes = record_header_bytes(p.c, internode.num_peers);
  p.most_records = most_records(p.c, internode.num_peers);
  const bool pushes = internode.num_peers > 1 || !own_in_place(p.c);
  p.shape = pushes ? kShape : kAloneShape;
  p.rings = record_rings(p.c.session.team, internode, p.header_bytes + p.c.slot_bytes,
                         static_cast<uint32_t>(p.most_records), pushes);
  const uint64_t used = sizeof(SumLists) * CombineRoles::kWarps;
  p.feeds = feed_shape(kMostSlots, CombineRoles::kWarps, used, room);
  return p.feeds.slots != 0 ? p.feeds.end() : used;
}

// ---- Pushers: a stream is a channel's rows for tokens of a source ---------------------------------------------------

// The rows of this rank for tokens of a source, as recv_src_metadata names them.
struct NamedRows {
  const int32_t *numbers;
  int first, count, words, before;  // before: the number of the source's token 0
  __device__ int token(int row) const { return numbers[static_cast<int64_t>(row) * words] - before; }
  __device__ int last_choice(int row) const { return numbers[static_cast<int64_t>(row) * words + 1] % (words - 2); }
};
__device__ inline NamedRows named_rows(const RoutedCombineParams &p, int source) {
  const TeamView &team = p.c.session.team;
  const int first = rows_before(p.c.rank_prefix_matrix(), team.num_ranks, source, team.rank), words = p.c.num_topk + 2;
  return {pointer<const int32_t>(p.c.recv_src_metadata) + static_cast<int64_t>(first) * words, first,
          p.c.rank_prefix_matrix()[source * team.num_ranks + team.rank] - first, words, source * p.c.num_max_tokens};
}

// Expanded: the sum of a row's terms, or the terms, to `payload`, each by sum(terms, which, place); their weights.
// Returns the rows there.
template <class Sum>
__device__ inline int push_terms(const CombineParams &c, int row, uint8_t *payload, uint32_t *weights, Sum sum) {
  const Terms terms = checked_terms(c, load_slot(c, row));
  each_sum(c, terms, payload, [&](uint32_t which, uint8_t *to) { sum(terms, which, to); });
  if (lane_id() < c.num_topk)
    weights[lane_id()] =
        c.topk_weights() == nullptr || terms.slot < 0 ? 0 : __float_as_uint(c.topk_weights()[terms.slot]);
  if ((c.flags & DK_COMBINE_UNREDUCED) == 0) return 1;
  return terms.wrong ? c.num_topk : __popc(terms.here);
}
// A row that cannot be.
__device__ inline void write_nan(uint8_t *to, uint32_t bytes) {
#pragma unroll 1
  for (uint32_t at = 16 * lane_id(); at < bytes; at += 16 * kWarp)
    ptx::st_stream(to + at, uint4{kNanPair, kNanPair, kNanPair, kNanPair});
}

__device__ inline void write_header(const NamedRows &rows, int row, int count, uint8_t *to) {
  if (lane_id() == 0) *reinterpret_cast<RecordHeader *>(to) = {rows.token(row), rows.last_choice(row), count, 0};
}
// A record of a row of the plain layout, and of one of the expanded layout.
__device__ inline void push_plain(const RoutedCombineParams &p, const NamedRows &rows, int row, uint8_t *to) {
  const CombineParams &c = p.c;
  const int64_t x_row = static_cast<int64_t>(rows.first) + row;
  copy_payload(to + p.header_bytes, c.x() + x_row * c.row_bytes, c.row_bytes);
  if (lane_id() < c.num_topk)
    weights_in(to)[lane_id()] =
        c.topk_weights() == nullptr ? 0 : __float_as_uint(c.topk_weights()[x_row * c.num_topk + lane_id()]);
  write_header(rows, row, 1, to);
}
__device__ inline void push_expanded(const RoutedCombineParams &p, const NamedRows &rows, int row, uint8_t *to,
                                     SumLists &lists, RowFeed &feed) {
  const CombineParams &c = p.c;
  const auto sum = [&](const Terms &terms, uint32_t which, uint8_t *place) {
    if (terms.wrong) return write_nan(place, c.row_bytes);
    TokenRows list{lists.rows, 0};
    list.add((which >> lane_id() & 1) == 0 ? nullptr : c.x() + static_cast<int64_t>(terms.slot) * c.row_bytes);
    start_feed(feed, list, c.row_bytes);
    sum_rows(p, list, feed, place);
    __syncwarp();  // all lanes have read the list
  };
  write_header(rows, row, push_terms(c, rows.first + row, to + p.header_bytes, weights_in(to), sum), to);
}

// False: what recv_src_metadata says of the row cannot be; the team fails.
__device__ inline bool is_named_well(const RoutedCombineParams &p, const NamedRows &rows, int row) {
  const int token = rows.token(row), last = rows.last_choice(row);
  if (token >= 0 && token < p.c.num_max_tokens && last >= 0) return true;
  if (lane_id() == 0)
    report_failure(p.c.session, DK_EINVAL, p.c.session.team.rank, DK_FIELD_SRC_METADATA, rows.before,
                   last < 0 ? last : rows.before + token, 0);
  __syncwarp();
  return false;
}

template <bool kExpand>
__device__ inline Outcome serve_record_pusher(const RoutedCombineParams &p, uint64_t epoch, int stream, uint64_t &at,
                                              SumLists &lists, RowFeed &feed, BlockedStream &blocked) {
  const int num_peers = p.internode.num_peers, left_out = own_in_place(p.c), sources_in_node = num_peers - left_out,
            sources = sources_in_node * p.internode.num_nodes, channel = stream / sources,
            index = (p.internode.index + left_out + stream % sources_in_node) % num_peers,
            node = (p.internode.node + 1 + stream % sources / sources_in_node) % p.internode.num_nodes;
  const NamedRows rows = named_rows(p, node * num_peers + index);
  return push_stream(
      p, epoch, {index, node, channel}, rows.count, at, blocked,
      [&](int row) { return next_row_of<4>(p, rows, channel, row); },
      [&](int row, uint8_t *place) {
        if (!is_named_well(p, rows, row)) return false;
        if constexpr (kExpand)
          push_expanded(p, rows, row, place, lists, feed);
        else
          push_plain(p, rows, row, place);
        return true;
      });
}

// All warps push: those of this role always, others while their own streams wait.
__device__ inline TurnQueue record_pushes(const RoutedCombineParams &p) {
  const int sources = p.c.session.team.num_ranks - (own_in_place(p.c) ? p.internode.num_nodes : 0);
  return {p.lists.pushes, sources * static_cast<int>(p.rings.channels)};
}
// One turn of a warp of another role; kDone: all streams are closed. A function of its own, so that its registers do
// not share a limit with the role's.
template <bool kExpand>
__device__ __noinline__ inline Outcome help_to_push(const RoutedCombineParams &p, uint64_t epoch, SumLists &lists,
                                                    RowFeed &feed) {
  const TurnQueue queue = record_pushes(p);
  int closed = 0;
  StreamTurn turn = take_turn(queue, closed);
  if (closed == queue.count) return kDone;
  if (turn.stream < 0) return kBlocked;
  BlockedStream blocked{-1, 0, 0};
  const Outcome outcome = serve_record_pusher<kExpand>(p, epoch, turn.stream, turn.at, lists, feed, blocked);
  end_turn(queue, turn, outcome == kDone);
  return outcome == kBlocked ? kBlocked : kMoved;
}

}  // namespace deepep::internode
