// combine.cuh - libdeepep_nvshmem.so: combine with a routing across nodes. Rows take the way of normal/combine.cuh, a
// rank's own ones too: pushers copy them, or the sums of expanded rows, to the collector of their node, which sends one
// sum for a token, or each rank's row by itself; the token's rank adds what came. Sums have the order of the token's
// choices: biases, then ranks at their last choice; where nodes add their ranks' rows, nodes at theirs.
#pragma once
#include "internode/routed/combine_push.cuh"

namespace deepep::internode {

// ---- Sums -----------------------------------------------------------------------------------------------------------

// The rows of a sum, and among them those that are added and rounded by themselves first: count 0 or 1: none.
struct SumOrder {
  int count, group_first, group_count;
};

constexpr int kSumPieces = 2, kRowsAhead = 4;  // of 16 bytes that a lane adds side by side; rows on their way
__device__ __forceinline__ void add_rows(float (&sum)[kSumPieces][8], const uint8_t *const *rows, int count,
                                         uint32_t base, uint32_t bytes) {
#pragma unroll 1
  for (int i = 0; i < count; i += kRowsAhead) {
    uint4 data[kRowsAhead][kSumPieces];
#pragma unroll
    for (int n = 0; n < kRowsAhead; ++n)
#pragma unroll
      for (int u = 0; u < kSumPieces; ++u)
        if (i + n < count && base + 16 * kWarp * u < bytes)
          data[n][u] = ptx::ld_stream(rows[i + n] + base + 16 * kWarp * u);
#pragma unroll
    for (int n = 0; n < kRowsAhead; ++n)
#pragma unroll
      for (int u = 0; u < kSumPieces; ++u)
        if (i + n < count && base + 16 * kWarp * u < bytes) add_bf16(sum[u], data[n][u]);
  }
}

// Whole warp: biases (null: none), then the rows, in FP32, rounded once.
__device__ inline void sum_in_order(const RoutedCombineParams &p, const uint8_t *const *rows, const SumOrder &order,
                                    const uint8_t *const (&bias)[2], uint8_t *to) {
  const uint32_t bytes = p.c.row_bytes;
  const int before = order.group_count > 1 ? order.group_first : order.count,
            after = order.group_count > 1 ? order.group_first + order.group_count : order.count;
  const InPhase phase(kPhaseSum);
  __syncwarp();  // all lanes see the list
#pragma unroll 1
  for (uint32_t base = 16 * lane_id(); base < bytes; base += 16 * kWarp * kSumPieces) {
    uint4 group[kSumPieces];
    if (after > before) {
      float sum[kSumPieces][8] = {};
      add_rows(sum, rows + before, after - before, base, bytes);
#pragma unroll
      for (int u = 0; u < kSumPieces; ++u) group[u] = round_bf16(sum[u]);
    }
    float sum[kSumPieces][8] = {};
#pragma unroll 1
    for (int b = 0; b < 2; ++b)
      if (bias[b] != nullptr) add_rows(sum, &bias[b], 1, base, bytes);
    add_rows(sum, rows, before, base, bytes);
#pragma unroll
    for (int u = 0; u < kSumPieces; ++u)
      if (after > before) add_bf16(sum[u], group[u]);
    add_rows(sum, rows + after, order.count - after, base, bytes);
#pragma unroll
    for (int u = 0; u < kSumPieces; ++u)
      if (base + 16 * kWarp * u < bytes) ptx::st_stream(to + base + 16 * kWarp * u, round_bf16(sum[u]));
  }
}

// ---- Collectors: a stream is a channel's records for the partner in another node ------------------------------------

struct NextRecord {
  const uint8_t *record;
  int token;        // kNoToken: there is none
  uint32_t pushed;  // so far
  bool known;       // that is so until it is taken
};
__device__ inline NextRecord next_record(const RoutedCombineParams &p, uint64_t epoch, int node, int channel, int index,
                                         uint32_t taken) {
  if (index >= p.internode.num_peers) return {nullptr, kNoToken, 0, true};
  uint8_t *self = p.c.session.team.self;
  const uint32_t count = count_in(
      ptx::ld_acquire_sys(word_at(self, p.internode.at.pushed, push_index(p.internode, index, node, channel))), epoch);
  const uint32_t rows = count & ~kLastRow;
  if (rows <= taken) return {nullptr, kNoToken, rows, (count & kLastRow) != 0};
  const uint8_t *record = self + p.rings.local(index, node, channel, taken);
  return {record, load_word(&header_of(record)->token), rows, true};
}

// The lowest token among the next records of all ranks of this node; kNoToken: all have been taken; -1: a ring is empty
// and its rank may push more (`blocked`).
__device__ inline int next_record_token(const RoutedCombineParams &p, uint64_t epoch, int node, int channel,
                                        const uint32_t *taken, BlockedStream &blocked) {
  int token = kNoToken;
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint32_t so_far = index < p.internode.num_peers ? taken[index] : 0;
    const NextRecord next = next_record(p, epoch, node, channel, index, so_far);
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
                                       uint8_t *place, uint32_t *taken, SumLists &lists) {
  const int num_topk = p.c.num_topk;
  uint32_t having = 0;  // bit i: this lane's rank of the node in turn i has the token
  lists.by_choice[lane_id()] = nullptr;
  __syncwarp();
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint32_t so_far = index < p.internode.num_peers ? taken[index] : 0;
    const NextRecord next = next_record(p, epoch, node, channel, index, so_far);
    const bool mine = next.record != nullptr && next.token == token;
    const int last = mine ? load_word(&header_of(next.record)->last_choice) : -1;
    if (last >= 0 && last < num_topk) lists.by_choice[last] = next.record + p.header_bytes;
    if (mine) having |= 1u << (base / kWarp);
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kAllLanes, mine); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const uint8_t *record = from_lane(next.record, lane);
      if (lane_id() < num_topk)
        weights_in(place)[(base + lane) * num_topk + lane_id()] = load_weight(record, lane_id());
    }
  }
  __syncwarp();
  const uint8_t *row = lists.by_choice[lane_id()];
  const uint32_t rows = __ballot_sync(kAllLanes, row != nullptr);
  if (row != nullptr) lists.rows[lanes_before(rows)] = row;
  sum_in_order(p, lists.rows, {__popc(rows), 0, 0}, {nullptr, nullptr}, place + p.header_bytes);
  if (lane_id() == 0) *reinterpret_cast<RecordHeader *>(place) = {token, last_lane(rows), 1, 0};
  __syncwarp();  // all lanes have read the rows
  for (int index = lane_id(); having != 0; index += kWarp, having >>= 1)
    if ((having & 1) != 0) post_taken(p, epoch, node, channel, index, ++taken[index]);
  __syncwarp();
  return p.c.row_bytes;
}

// Copies the record of the first rank of the node that has the token, and takes it. Returns the payload's bytes.
__device__ inline uint32_t copy_record(const RoutedCombineParams &p, uint64_t epoch, int node, int channel, int token,
                                       uint8_t *place, uint32_t *taken) {
  for (int base = 0; base < p.internode.num_peers; base += kWarp) {
    const int index = base + lane_id();
    const uint32_t so_far = index < p.internode.num_peers ? taken[index] : 0;
    const NextRecord next = next_record(p, epoch, node, channel, index, so_far);
    const uint32_t having = __ballot_sync(kAllLanes, next.record != nullptr && next.token == token);
    if (having == 0) continue;
    const int lane = __ffs(static_cast<int>(having)) - 1;
    const uint8_t *record = from_lane(next.record, lane);
    const int rows = load_word(&header_of(record)->rows);
    const uint32_t bytes =
        static_cast<uint32_t>(max(0, min(rows, static_cast<int>(p.c.slot_bytes / p.c.row_bytes)))) * p.c.row_bytes;
    copy_payload(place, nullptr, record, p.header_bytes + bytes);
    __syncwarp();  // all lanes have read the record
    if (lane_id() == lane) post_taken(p, epoch, node, channel, index, ++taken[index]);
    __syncwarp();
    return bytes;
  }
  return 0;
}

__device__ inline Outcome serve_records(const RoutedCombineParams &p, uint64_t epoch, int stream, SumLists &lists,
                                        BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  const int others = p.internode.num_nodes - 1, channel = stream / others,
            node = stream % others + (stream % others >= p.internode.node);
  RowStream *state = p.lists.from_nodes + stream;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.node_rows_taken + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
  const uint32_t credit = read_count(word_at(team.self, p.internode.at.credits, node * kMaxChannels + channel), epoch);
  const uint32_t before = state->count, slots = p.rings.slots;
  const uint32_t end =
      credit == kAllRows ? before : before + min(min(p.rings.piece, slots - before % slots), slots - (before - credit));
  const int partner = p.internode.partner(node);
  uint8_t *there = p.internode.blocks[partner];  // where records are stored, null: a NIC serves it
  uint32_t sent = before, last_bytes = 0;
  // It waits for room or for the last credit, unless next_record_token() says otherwise.
  blocked = {partner, static_cast<int64_t>(sent) + 1, credit};
  for (; sent < end; ++sent) {
    const int token = next_record_token(p, epoch, node, channel, taken, blocked);
    if (token < 0 || token == kNoToken) break;
    uint8_t *place = there == nullptr ? team.self + p.rings.out(node, channel, sent)
                                      : there + p.rings.in(p.internode.node, channel, sent);
    last_bytes = are_apart(p.c) ? copy_record(p, epoch, node, channel, token, place, taken)
                                : sum_records(p, epoch, node, channel, token, place, taken, lists);
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

// A lane's record; null: it takes none. False: one has not come yet (`blocked`), or is another token's: a failure.
__device__ inline bool find_records(const RoutedCombineParams &p, uint64_t epoch, int channel, int token,
                                    const TokenChoices &t, const uint32_t *taken, const uint8_t *&record,
                                    BlockedStream &blocked) {
  uint8_t *self = p.c.session.team.self;
  record = nullptr;
  uint32_t seen = 0, wanted = 0;
  const int peer = t.is_local ? t.rank : t.takes ? p.internode.partner(t.node) : -1;
  if (t.takes) {
    const int index = p.internode.index_of(t.rank);
    const uint64_t *word =
        t.is_local ? word_at(self, p.internode.at.pushed, push_index(p.internode, index, p.internode.node, channel))
                   : word_at(self, p.internode.at.heads, t.node * kMaxChannels + channel);
    const uint32_t at = taken[part_of(p.internode, t)] + t.number;
    wanted = at + 1;
    seen = count_in(ptx::ld_acquire_sys(word), epoch) & ~kLastRow;
    if (seen >= wanted)
      record =
          self + (t.is_local ? p.rings.local(index, p.internode.node, channel, at) : p.rings.in(t.node, channel, at));
  }
  bool wrong = false;
  if (record != nullptr) {
    const int its = load_word(&header_of(record)->token), rows = load_word(&header_of(record)->rows);
    const bool lacks =
        (p.c.flags & DK_COMBINE_UNREDUCED) != 0 && p.c.routing == DK_ROUTING_EXPANDED && rows < __popc(t.of_rank);
    wrong = its != token || lacks;  // not of this handle
    if (wrong) report_failure(p.c.session, DK_EINVAL, peer, DK_FIELD_SRC_METADATA, token, lacks ? -1 : its, 0);
  }
  if (__any_sync(kAllLanes, wrong)) return false;
  const uint32_t missing = __ballot_sync(kAllLanes, t.takes && record == nullptr);
  if (missing == 0) return true;
  const int lane = __ffs(static_cast<int>(missing)) - 1;
  const uint32_t needed = __shfl_sync(kAllLanes, wanted, lane), here = __shfl_sync(kAllLanes, seen, lane);
  blocked = {__shfl_sync(kAllLanes, peer, lane), static_cast<int64_t>(needed), here};
  return false;
}

// Lists the rows in the order of the sum. Where nodes add their ranks' rows, those of this one come together, at the
// last choice of them all.
__device__ inline SumOrder order_records(const RoutedCombineParams &p, const TokenChoices &t, const uint8_t *record,
                                         const uint8_t **rows) {
  const uint32_t below = (1u << lane_id()) - 1;
  const uint8_t *payload = record == nullptr ? nullptr : record + p.header_bytes;
  if ((p.c.flags & DK_COMBINE_UNREDUCED) != 0 && p.c.routing == DK_ROUTING_EXPANDED) {  // a row of each choice
    const uint8_t *first = from_lane(payload, max(0, last_lane(t.of_rank)));
    const uint32_t all = __ballot_sync(kAllLanes, t.rank >= 0);
    if (t.rank >= 0)
      rows[__popc(all & below)] = first + static_cast<uint64_t>(__popc(t.of_rank & below)) * p.c.row_bytes;
    return {__popc(all), 0, 0};
  }
  const uint32_t all = __ballot_sync(kAllLanes, t.takes);
  if (are_apart(p.c)) {
    if (t.takes) rows[__popc(all & below)] = payload;
    return {__popc(all), 0, 0};
  }
  const uint32_t here = __ballot_sync(kAllLanes, t.takes && t.is_local), others = all & ~here;
  const int place = last_lane(here), first = here == 0 ? 0 : __popc(others & ((1u << place) - 1));
  if (t.takes && t.is_local) rows[first + __popc(here & below)] = payload;
  if (t.takes && !t.is_local) rows[__popc(others & below) + (place < lane_id() ? __popc(here) : 0)] = payload;
  return {__popc(all), first, __popc(here)};
}

// Each choice's weight, as its rank has sent it.
__device__ inline void take_weights(const RoutedCombineParams &p, const TokenChoices &t, const uint8_t *record,
                                    int token) {
  const bool by_rank = t.is_local || are_apart(p.c);
  const uint8_t *from = from_lane(record, max(0, last_lane(by_rank ? t.of_rank : t.of_node)));
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
  if (t.takes && t.is_local) {
    const int index = p.internode.index_of(t.rank);
    post_taken(p, epoch, p.internode.node, channel, index, ++taken[index]);
  } else if (ends) {
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
                                        uint32_t *taken, SumLists &lists, BlockedStream &blocked) {
  const TokenChoices t = load_choices(p, token);
  const uint8_t *record;
  if (!find_records(p, epoch, channel, token, t, taken, record, blocked)) return false;
  const SumOrder order = order_records(p, t, record, lists.rows);
  const uint64_t row = static_cast<uint64_t>(token) * p.c.row_bytes;
  const uint8_t *bias[2];
  for (int b = 0; b < 2; ++b) bias[b] = p.c.bias(b) == nullptr ? nullptr : p.c.bias(b) + row;
  sum_in_order(p, lists.rows, order, bias, p.c.combined_x() + row);
  take_weights(p, t, record, token);
  release_records(p, epoch, channel, t, taken);
  return true;
}

__device__ inline Outcome serve_routed_tokens(const RoutedCombineParams &p, uint64_t epoch, int channel,
                                              SumLists &lists, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  RowStream *state = p.lists.tokens + channel;
  if (state->closed != 0) return kDone;
  uint32_t *taken =
      p.lists.token_rows_taken + static_cast<int64_t>(channel) * (p.internode.num_peers + p.internode.num_nodes);
  const int step = static_cast<int>(p.rings.channels), before = state->at;
  int token = before;
  for (; token < p.c.num_tokens && token < before + kSumsAtOnce * step; token += step)
    if (!sum_routed_token(p, epoch, channel, token, taken, lists, blocked)) break;
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

struct RoutedCombineRoles {
  static constexpr int kSenders = 4, kNodeCollectors = 10, kTokenCollectors = 10;
  static constexpr int kWarps = kSenders + kNodeCollectors + kTokenCollectors, kThreads = kWarps * kWarp;
};

// As run_combine_roles().
template <bool kExpand>
__device__ inline void run_routed_combine(const RoutedCombineParams &p, uint64_t epoch) {
  using Roles = RoutedCombineRoles;
  __shared__ SumLists lists_of_warps[Roles::kWarps];
  const Session &s = p.c.session;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
            channels = static_cast<int>(p.rings.channels);
  SumLists &lists = lists_of_warps[warp];
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks, count = s.team.num_ranks * channels;
#pragma unroll 1
    for (int i = first; i < count; i += step)
      if (lane_id() == 0) p.lists.by_rank[i] = {0, 0, 0, 0};
    __syncwarp();
    serve_streams(s, kRolePusher, first, step, count, [&](int stream, BlockedStream &blocked) {
      return serve_record_pusher<kExpand>(p, epoch, stream, blocked);
    });
  } else if (warp < Roles::kSenders + Roles::kNodeCollectors) {
    const int first = (warp - Roles::kSenders) * blocks + block, step = Roles::kNodeCollectors * blocks,
              count = (p.internode.num_nodes - 1) * channels;
    reset_node_sums(p, first, step, count);
    serve_streams(s, kRoleNodeSum, first, step, count,
                  [&](int stream, BlockedStream &blocked) { return serve_records(p, epoch, stream, lists, blocked); });
  } else {
    const int first = (warp - Roles::kSenders - Roles::kNodeCollectors) * blocks + block,
              step = Roles::kTokenCollectors * blocks;
    reset_token_sums(p, first, step, channels);
    serve_streams(s, kRoleTokenSum, first, step, channels, [&](int stream, BlockedStream &blocked) {
      return serve_routed_tokens(p, epoch, stream, lists, blocked);
    });
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

template <bool kExpand>
__global__ void __launch_bounds__(RoutedCombineRoles::kThreads, 1)
    combine_routed(const __grid_constant__ RoutedCombineParams p) {
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
      run_routed_combine<kExpand>(p, epoch);
    }
  }
  end_role_times(1);
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.c);
    if (threadIdx.x == 0) s.team.scratch->epoch = epoch;
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
