// combine.cuh - libdeepep_nvshmem.so: combine with a routing across nodes. Rows take the way of normal/combine.cuh:
// warps push them, or the sums of expanded rows, to the collector of their node, which sends one sum for a token, or
// each rank's row by itself; the token's rank adds what came. Sums have the order of the token's choices: biases, then
// ranks at their last choice; where nodes add their ranks' rows, nodes at theirs.
#pragma once
#include "internode/routed/combine_push.cuh"

namespace deepep::internode {

// A row with what belongs to it: a record's, or one of this rank's own. row null: none. weights: K, null: all 0.
struct Record {
  const uint8_t *row;
  const uint32_t *weights;
};
__device__ inline Record record_at(const RoutedCombineParams &p, uint8_t *place) {
  return {place + p.header_bytes, weights_in(place)};
}
__device__ inline const RecordHeader *header_of(const RoutedCombineParams &p, const Record &record) {
  return header_of(record.row - p.header_bytes);
}
__device__ inline Record own_record(const RoutedCombineParams &p, const NamedRows &own, int row) {
  const int64_t at = static_cast<int64_t>(own.first) + row;
  const auto *weights = reinterpret_cast<const uint32_t *>(p.c.topk_weights());
  return {p.c.x() + at * p.c.row_bytes, weights == nullptr ? nullptr : weights + at * p.c.num_topk};
}

// ---- Collectors: a stream is a channel's records for the partner in another node ------------------------------------

struct NextRecord {
  Record record;
  int token;        // kNoToken: there is none
  uint32_t pushed;  // so far
  bool known;       // that is so until it is taken
};
// taken: records taken of the ring; of own rows in place the number of the next one.
__device__ inline NextRecord next_record(const RoutedCombineParams &p, uint64_t epoch, int node, int channel, int index,
                                         uint32_t taken, const NamedRows &own) {
  if (index >= p.internode.num_peers) return {{nullptr, nullptr}, kNoToken, 0, true};
  if (index == p.internode.index && own_in_place(p.c)) {
    const int row = static_cast<int>(taken);
    if (row >= own.count) return {{nullptr, nullptr}, kNoToken, taken, true};
    return {own_record(p, own, row), own.token(row), taken, true};
  }
  uint8_t *self = p.c.session.team.self;
  const uint32_t count = count_in(
      ptx::ld_acquire_sys(word_at(self, p.internode.at.pushed, push_index(p.internode, index, node, channel))), epoch);
  const uint32_t rows = count & ~kLastRow;
  if (rows <= taken) return {{nullptr, nullptr}, kNoToken, rows, (count & kLastRow) != 0};
  const Record record = record_at(p, self + p.rings.local(index, node, channel, taken));
  return {record, load_word(&header_of(p, record)->token), rows, true};
}
// The first own row from `row` on that is of the channel becomes the next one. Whole warp.
__device__ inline void find_own_row(const RoutedCombineParams &p, const NamedRows &own, int channel, int row,
                                    uint32_t *taken) {
  row = next_row_of<4>(p, own, channel, row);
  if (row < own.count) is_named_well(p, own, row);  // else the team fails
  __syncwarp();                                     // all lanes have read which one it was
  if (lane_id() == 0) taken[p.internode.index] = static_cast<uint32_t>(row);
  __syncwarp();
}

// The lowest token among the next records of all ranks of this node; kNoToken: all have been taken; -1: a ring is empty
// and its rank may push more (`blocked`).
__device__ inline int next_record_token(const RoutedCombineParams &p, uint64_t epoch, int node, int channel,
                                        const uint32_t *taken, const NamedRows &own, BlockedStream &blocked) {
  int token = kNoToken;
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint32_t so_far = index < p.internode.num_peers ? taken[index] : 0;
    const NextRecord next = next_record(p, epoch, node, channel, index, so_far, own);
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

// By the lanes that took a record: for half a ring at a time, a credit for the ring of rank `index` of this node.
__device__ inline void post_taken(const RoutedCombineParams &p, uint64_t epoch, int node, int channel, int index,
                                  uint32_t taken) {
  if (!posts_credit(taken, p.rings.local_slots)) return;
  ptx::st_release_sys(word_at(p.c.session.team.peers[p.internode.local_rank(index)], p.internode.at.taken,
                              push_index(p.internode, p.internode.index, node, channel)),
                      tagged(epoch, taken));
}

// Sums the node's rows of the token into `place`, and takes them. Returns the payload's bytes.
__device__ inline uint32_t sum_records(const RoutedCombineParams &p, uint64_t epoch, int node, int channel, int token,
                                       uint8_t *place, uint32_t *taken, const NamedRows &own, SumLists &lists,
                                       RowFeed &feed) {
  const int num_topk = p.c.num_topk;
  uint32_t having = 0;  // bit i: this lane took a record of the node's rank in turn i
  bool took_own = false;
  lists.by_choice[lane_id()] = nullptr;
  __syncwarp();
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint32_t so_far = index < p.internode.num_peers ? taken[index] : 0;
    const NextRecord next = next_record(p, epoch, node, channel, index, so_far, own);
    const bool mine = next.record.row != nullptr && next.token == token,
               is_own = mine && index == p.internode.index && own_in_place(p.c);
    int last = -1;
    if (is_own) last = own.last_choice(static_cast<int>(so_far));
    if (mine && !is_own) last = load_word(&header_of(p, next.record)->last_choice);
    if (last >= 0 && last < num_topk) lists.by_choice[last] = next.record.row;
    if (mine && !is_own) having |= 1u << (base / kWarp);
    took_own |= is_own;
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kAllLanes, mine); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const uint32_t *weights = from_lane(next.record.weights, lane);
      if (lane_id() < num_topk)
        weights_in(place)[(base + lane) * num_topk + lane_id()] = load_weight(weights, lane_id());
    }
  }
  __syncwarp();
  TokenRows list{lists.rows, 0};
  const uint8_t *row = lists.by_choice[lane_id()];
  const uint32_t rows = __ballot_sync(kAllLanes, row != nullptr);
  list.add(row);
  start_feed(feed, list, p.c.row_bytes);
  if (lane_id() == 0) *reinterpret_cast<RecordHeader *>(place) = {token, last_lane(rows), 1, 0};
  if (__any_sync(kAllLanes, took_own))
    find_own_row(p, own, channel, static_cast<int>(taken[p.internode.index]) + 1, taken);
  sum_rows(p, list, feed, place + p.header_bytes);
  __syncwarp();  // all lanes have read the rows
  for (int index = lane_id(); having != 0; index += kWarp, having >>= 1)
    if ((having & 1) != 0) post_taken(p, epoch, node, channel, index, ++taken[index]);
  __syncwarp();
  return p.c.row_bytes;
}

// Copies the record of the first rank of the node that has the token, and takes it. Returns the payload's bytes.
__device__ inline uint32_t copy_record(const RoutedCombineParams &p, uint64_t epoch, int node, int channel, int token,
                                       uint8_t *place, uint32_t *taken, const NamedRows &own) {
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint32_t so_far = index < p.internode.num_peers ? taken[index] : 0;
    const NextRecord next = next_record(p, epoch, node, channel, index, so_far, own);
    const uint32_t having = __ballot_sync(kAllLanes, next.record.row != nullptr && next.token == token);
    if (having == 0) continue;
    const int lane = __ffs(static_cast<int>(having)) - 1;
    if (base + lane == p.internode.index && own_in_place(p.c)) {
      const int row = static_cast<int>(taken[p.internode.index]);
      push_plain(p, own, row, place);
      find_own_row(p, own, channel, row + 1, taken);
      return p.c.row_bytes;
    }
    const uint8_t *record = from_lane(next.record.row, lane) - p.header_bytes;
    const int rows = load_word(&header_of(record)->rows);
    const uint32_t bytes =
        static_cast<uint32_t>(max(0, min(rows, static_cast<int>(p.c.slot_bytes / p.c.row_bytes)))) * p.c.row_bytes;
    copy_payload(place, record, p.header_bytes + bytes);
    __syncwarp();  // all lanes have read the record
    if (lane_id() == lane) post_taken(p, epoch, node, channel, index, ++taken[index]);
    __syncwarp();
    return bytes;
  }
  return 0;
}

__device__ inline Outcome serve_records(const RoutedCombineParams &p, uint64_t epoch, int stream, SumLists &lists,
                                        RowFeed &feed, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  const int others = p.internode.num_nodes - 1, channel = stream / others,
            node = stream % others + (stream % others >= p.internode.node);
  RowStream *state = p.lists.from_nodes + stream;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.node_rows_taken + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
  const NamedRows own = named_rows(p, p.internode.partner(node));
  if (state->opened == 0 && own_in_place(p.c)) find_own_row(p, own, channel, 0, taken);
  const uint32_t credit = read_count(word_at(team.self, p.internode.at.credits, node * kMaxChannels + channel), epoch);
  const uint32_t before = state->count;
  const uint32_t end = credit == kAllRows ? before : before + piece_room(p.rings, before, credit);
  const int partner = p.internode.partner(node);
  uint8_t *there = p.internode.blocks[partner];  // where records are stored, null: a NIC serves it
  uint32_t sent = before, last_bytes = 0;
  // It waits for room or for the last credit, unless next_record_token() says otherwise.
  blocked = {partner, static_cast<int64_t>(sent) + 1, credit};
  for (; sent < end; ++sent) {
    const int token = next_record_token(p, epoch, node, channel, taken, own, blocked);
    if (token < 0 || token == kNoToken) break;
    uint8_t *place = there == nullptr ? team.self + p.rings.out(node, channel, sent)
                                      : there + p.rings.in(p.internode.node, channel, sent);
    last_bytes = are_apart(p.c) ? copy_record(p, epoch, node, channel, token, place, taken, own)
                                : sum_records(p, epoch, node, channel, token, place, taken, own, lists, feed);
  }
  if (sent != before) {
    const InPhase phase(kPhasePut);
    uint64_t *head =
        word_at(team.self, p.internode.at.heads, p.internode.node * kMaxChannels + channel);  // in either block
    if (there == nullptr)
      put_remote(p.internode, partner, team.self + p.rings.in(p.internode.node, channel, before),
                 team.self + p.rings.out(node, channel, before),
                 static_cast<uint64_t>(sent - before - 1) * p.rings.stride + p.header_bytes + last_bytes, head,
                 tagged(epoch, sent));
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

// A token's choices: lane k has choice k.
struct TokenChoices {
  int rank, node;             // of the choice; -1: none
  uint32_t of_rank, of_node;  // the choices of its rank, and of its node
  bool is_local;
  bool takes;  // this lane takes the record of its rank, or of its node
  int number;  // which of the node's records that is
};
__device__ inline TokenChoices load_choices(const RoutedCombineParams &p, int token) {
  const CombineParams &c = p.c;
  const TeamView &team = c.session.team;
  TokenChoices t{-1, -1, 0, 0, false, false, 0};
  if (lane_id() < c.num_topk) {
    const int64_t expert = load_index(pointer<const void>(c.topk_idx),
                                      static_cast<int64_t>(token) * c.num_topk + lane_id(), c.index_bytes);
    if (expert >= c.num_experts)
      report_refusal(c.session, kVoid, DK_EINVAL, team.rank, DK_FIELD_TOPK_IDX, c.num_experts, expert);
    else if (expert >= 0)
      t.rank = static_cast<int>(expert) / (c.num_experts / team.num_ranks);
    if (t.rank >= 0 && c.send_head()[static_cast<int64_t>(token) * team.num_ranks + t.rank] < 0) t.rank = -1;
  }
  if (t.rank >= 0) t.node = p.internode.node_of(t.rank);
  t.is_local = t.rank >= 0 && t.node == p.internode.node;
  t.of_rank = same_key(t.rank);
  t.of_node = same_key(t.node);
  const bool last_of_rank = t.rank >= 0 && lane_id() == last_lane(t.of_rank), by_rank = t.is_local || are_apart(c);
  t.takes = by_rank ? last_of_rank : t.node >= 0 && lane_id() == last_lane(t.of_node);
  if (!are_apart(c)) return t;
  const uint32_t lasts = __ballot_sync(kAllLanes, last_of_rank);
#pragma unroll 1
  for (uint32_t left = lasts; left != 0; left &= left - 1) {  // records of a node come by rank
    const int lane = __ffs(static_cast<int>(left)) - 1, other = __shfl_sync(kAllLanes, t.rank, lane);
    if (!t.is_local && t.rank > other && p.internode.node_of(other) == t.node) ++t.number;
  }
  return t;
}

// The counter of the records of this lane's rank, or node, that were taken, among those of the channel.
__device__ inline int part_of(const NodeView &internode, const TokenChoices &t) {
  return t.is_local ? internode.index_of(t.rank) : internode.num_peers + t.node;
}

// A lane's record; row null: it takes none. False: one has not come yet (`blocked`), or is another token's: a failure.
__device__ inline bool find_records(const RoutedCombineParams &p, uint64_t epoch, int channel, int token,
                                    const TokenChoices &t, const uint32_t *taken, const NamedRows &own, Record &record,
                                    BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  record = {nullptr, nullptr};
  uint32_t seen = 0, wanted = 0;
  const int peer = t.is_local ? t.rank : t.takes ? p.internode.partner(t.node) : -1;
  int its = token, rows = 1;
  if (t.takes && t.rank == team.rank && own_in_place(p.c)) {
    const int row = p.c.send_head()[static_cast<int64_t>(token) * team.num_ranks + team.rank];
    its = row < own.count ? own.token(row) : -1;
    record = own_record(p, own, min(row, own.count - 1));
  } else if (t.takes) {
    const int index = p.internode.index_of(t.rank);
    const uint64_t *word = t.is_local ? word_at(team.self, p.internode.at.pushed,
                                                push_index(p.internode, index, p.internode.node, channel))
                                      : word_at(team.self, p.internode.at.heads, t.node * kMaxChannels + channel);
    const uint32_t at = taken[part_of(p.internode, t)] + t.number;
    wanted = at + 1;
    seen = count_in(ptx::ld_acquire_sys(word), epoch) & ~kLastRow;
    if (seen >= wanted) {
      record = record_at(p, team.self + (t.is_local ? p.rings.local(index, p.internode.node, channel, at)
                                                    : p.rings.in(t.node, channel, at)));
      its = load_word(&header_of(p, record)->token);
      rows = load_word(&header_of(p, record)->rows);
    }
  }
  const bool lacks = record.row != nullptr && (p.c.flags & DK_COMBINE_UNREDUCED) != 0 &&
                     p.c.routing == DK_ROUTING_EXPANDED && rows < __popc(t.of_rank),
             wrong = its != token || lacks;  // not of this handle
  if (wrong) report_failure(p.c.session, DK_EINVAL, peer, DK_FIELD_SRC_METADATA, token, lacks ? -1 : its, 0);
  if (__any_sync(kAllLanes, wrong)) return false;
  const uint32_t missing = __ballot_sync(kAllLanes, t.takes && record.row == nullptr);
  if (missing == 0) return true;
  const int lane = __ffs(static_cast<int>(missing)) - 1;
  const uint32_t needed = __shfl_sync(kAllLanes, wanted, lane), here = __shfl_sync(kAllLanes, seen, lane);
  blocked = {__shfl_sync(kAllLanes, peer, lane), static_cast<int64_t>(needed), here};
  return false;
}

// Lists the rows in the order of the sum. Where nodes add their ranks' rows, those of this one are a group, which goes
// in at the last choice of them all.
__device__ inline RowGroup order_records(const RoutedCombineParams &p, const TokenChoices &t, const uint8_t *row,
                                         const uint8_t *const (&bias)[2], TokenRows &list) {
  const uint32_t all = __ballot_sync(kAllLanes, t.takes),
                 here = are_apart(p.c) ? 0 : __ballot_sync(kAllLanes, t.takes && t.is_local);
  const bool groups = __popc(here) > 1, is_grouped = groups && t.is_local;
  if (groups) list.add(is_grouped ? row : nullptr);
  RowGroup group{list.count, 0};
  for (int b = 0; b < 2; ++b)
    if (bias[b] != nullptr) list.add(lane_id() == 0 ? bias[b] : nullptr);
  if (sends_choices(p.c)) {
    const uint8_t *first = from_lane(row, max(0, last_lane(t.of_rank)));
    list.add(t.rank < 0 ? nullptr : first + static_cast<uint64_t>(lanes_before(t.of_rank)) * p.c.row_bytes);
    return group;
  }
  if (groups) group.place = list.count + __popc(all & ~here & ((1u << last_lane(here)) - 1));
  list.add(is_grouped ? nullptr : row);
  return group;
}

// Each choice's weight, as its rank has sent it.
__device__ inline void take_weights(const RoutedCombineParams &p, const TokenChoices &t, const uint32_t *weights,
                                    int token) {
  const bool by_rank = t.is_local || are_apart(p.c);
  const uint32_t *from = from_lane(weights, max(0, last_lane(by_rank ? t.of_rank : t.of_node)));
  if (p.c.combined_topk_weights() == nullptr || lane_id() >= p.c.num_topk) return;
  float weight = 0;
  if (t.rank >= 0) {
    const int part = by_rank ? 0 : p.internode.index_of(t.rank);
    weight = __uint_as_float(load_weight(from, part * p.c.num_topk + lane_id()));
  }
  p.c.combined_topk_weights()[static_cast<int64_t>(token) * p.c.num_topk + lane_id()] = weight;
}

// Counts the token's records as taken, and posts credits for them.
__device__ inline void release_records(const RoutedCombineParams &p, uint64_t epoch, int channel, const TokenChoices &t,
                                       uint32_t *taken) {
  const TeamView &team = p.c.session.team;
  // Of a ring that a token's records fill, a credit may be held back only for so many that the next token's fit.
  const uint32_t step = max(1u, min(p.rings.slots / 2, p.rings.slots - static_cast<uint32_t>(p.most_records) + 1));
  const uint32_t all = __ballot_sync(kAllLanes, t.takes);
  __syncwarp();                                                          // all lanes have read the records
  const bool ends = t.takes && lane_id() == last_lane(t.of_node & all);  // one lane for all records of a node
  uint32_t rows = 0, before = 0;
  const bool in_place = t.rank == team.rank && own_in_place(p.c);  // and nobody waits for it
  if (t.takes && t.is_local && !in_place) {
    const int index = p.internode.index_of(t.rank);
    post_taken(p, epoch, p.internode.node, channel, index, ++taken[index]);
  } else if (ends && !in_place) {
    uint32_t *counter = taken + part_of(p.internode, t);
    before = *counter;
    *counter = rows = before + static_cast<uint32_t>(__popc(t.of_node & all));
  }
  for (uint32_t left = __ballot_sync(kAllLanes, ends && !t.is_local && rows / step != before / step); left != 0;
       left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int node = __shfl_sync(kAllLanes, t.node, lane);
    const uint32_t credit = __shfl_sync(kAllLanes, rows, lane);
    const InPhase phase(kPhaseSignal);
    signal_remote(p.internode, team, p.internode.partner(node),
                  word_at(team.self, p.internode.at.credits, p.internode.node * kMaxChannels + channel),
                  tagged(epoch, credit));
  }
  __syncwarp();
}

__device__ inline bool sum_routed_token(const RoutedCombineParams &p, uint64_t epoch, int channel, int token,
                                        uint32_t *taken, const NamedRows &own, SumLists &lists, RowFeed &feed,
                                        BlockedStream &blocked) {
  const TokenChoices t = load_choices(p, token);
  Record record;
  if (!find_records(p, epoch, channel, token, t, taken, own, record, blocked)) return false;
  const uint64_t row = static_cast<uint64_t>(token) * p.c.row_bytes;
  const uint8_t *bias[2];
  for (int b = 0; b < 2; ++b) bias[b] = p.c.bias(b) == nullptr ? nullptr : p.c.bias(b) + row;
  TokenRows list{lists.rows, 0};
  const RowGroup group = order_records(p, t, record.row, bias, list);
  start_feed(feed, list, p.c.row_bytes);
  take_weights(p, t, record.weights, token);
  sum_rows<true>(p, list, feed, p.c.combined_x() + row, group);
  release_records(p, epoch, channel, t, taken);
  return true;
}

__device__ inline Outcome serve_routed_tokens(const RoutedCombineParams &p, uint64_t epoch, int channel,
                                              SumLists &lists, RowFeed &feed, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  RowStream *state = p.lists.tokens + channel;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.token_rows_taken + static_cast<int64_t>(channel) * (p.internode.num_peers + p.internode.num_nodes);
  const NamedRows own = named_rows(p, team.rank);
  const int step = static_cast<int>(p.rings.channels), before = state->at;
  int token = before;
  for (; token < p.c.num_tokens && token < before + kSumsAtOnce * step; token += step)
    if (!sum_routed_token(p, epoch, channel, token, taken, own, lists, feed, blocked)) break;
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

// As run_combine_roles().
template <bool kExpand>
__device__ inline void run_routed_combine(const RoutedCombineParams &p, uint64_t epoch, uint8_t *shared) {
  const Session &s = p.c.session;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
            channels = static_cast<int>(p.rings.channels);
  int warp = warp_id();  // then: among those of its role
  SumLists &lists = reinterpret_cast<SumLists *>(shared)[warp];
  RowFeed feed(p.feeds, shared, warp);
  if (warp < p.shape.pushers) {
    serve_in_turn(s, kRolePusher, record_pushes(p), -1, [&](int stream, uint64_t &at, BlockedStream &blocked) {
      return serve_record_pusher<kExpand>(p, epoch, stream, at, lists, feed, blocked);
    });
    return;
  }
  warp -= p.shape.pushers;
  bool pushes = true;
  const auto or_push = [&](Outcome outcome) {
    if (outcome != kBlocked || !pushes) return outcome;
    const Outcome pushed = help_to_push<kExpand>(p, epoch, lists, feed);
    pushes = pushed != kDone;
    return pushed == kMoved ? kMoved : kBlocked;
  };
  if (warp < p.shape.node_sums) {
    const int first = warp * blocks + block, step = p.shape.node_sums * blocks,
              count = (p.internode.num_nodes - 1) * channels;
    reset_node_sums(p, first, step, count);
    serve_streams(s, kRoleNodeSum, first, step, count, [&](int stream, BlockedStream &blocked) {
      return or_push(serve_records(p, epoch, stream, lists, feed, blocked));
    });
    return;
  }
  warp -= p.shape.node_sums;
  const int first = warp * blocks + block, step = p.shape.token_sums() * blocks;
  reset_token_sums(p, first, step, channels);
  serve_streams(s, kRoleTokenSum, first, step, channels, [&](int stream, BlockedStream &blocked) {
    return or_push(serve_routed_tokens(p, epoch, stream, lists, feed, blocked));
  });
}

}  // namespace deepep::internode

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

template <bool kExpand>
__global__ void __launch_bounds__(CombineRoles::kThreads, 1)
    combine_routed(const __grid_constant__ RoutedCombineParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Session &s = p.c.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  begin_role_times();
  if (begin(s)) {
    const Handshake hand =
        combine_handshake(p.c, epoch, load_matrix_entry(p.c.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x));
    if (blockIdx.x == 0) post_messages(s, p.internode, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_messages(s, p.internode, hand)) {
      if (blockIdx.x == 0) count_pushed_bytes(p);
      run_routed_combine<kExpand>(p, epoch, shared);
    }
  }
  end_role_times(1);
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.c);
    const int streams = record_pushes(p).count;
    for (int i = threadIdx.x; i <= streams; i += blockDim.x) p.lists.pushes[i] = 0;
    if (threadIdx.x == 0) s.team.scratch->epoch = epoch;
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
