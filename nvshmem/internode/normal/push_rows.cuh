// push_rows.cuh - libdeepep_nvshmem.so: dispatch that pushes rows inside a node. Pushers, which have a row here, theirs
// or one that a partner has sent, store its payload at its places in outputs that lie in row segments, and what belongs
// to it into rings at the other ranks, whose readers take that; a payload for an output elsewhere lies in the ring too.
// So nobody reads over NVLink. Senders are those of dispatch.cuh; a ring that a partner fills is read by this rank
// alone, whose pushers report what they have read.
#pragma once
#include "internode/normal/row_places.cuh"

namespace deepep::internode {

constexpr int kRowsPushed = 8, kRowsRead = 8;  // of a stream in one turn
constexpr int kChunksAtOnce = 8;               // that a lane loads before it stores them

// A payload to the lanes' places, null: none. Whole warp; `bytes` is a multiple of 16.
template <int kLists>
__device__ inline void copy_to_places(uint8_t *const (&places)[kLists], const uint8_t *from, uint32_t bytes) {
  const int chunks = static_cast<int>(bytes / 16);
  uint32_t lanes[kLists];
#pragma unroll
  for (int list = 0; list < kLists; ++list) lanes[list] = __ballot_sync(kAllLanes, places[list] != nullptr);
#pragma unroll 1
  for (int first = 0; first < chunks; first += kWarp * kChunksAtOnce) {
    const int mine = first + lane_id();
    uint4 data[kChunksAtOnce];
#pragma unroll
    for (int u = 0; u < kChunksAtOnce; ++u)
      if (mine + u * kWarp < chunks) data[u] = ptx::ld_stream(from + 16ull * (mine + u * kWarp));
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
#pragma unroll 1
      for (uint32_t left = lanes[list]; left != 0; left &= left - 1) {
        auto *to = reinterpret_cast<uint8_t *>(
            __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(places[list]), __ffs(static_cast<int>(left)) - 1));
#pragma unroll
        for (int u = 0; u < kChunksAtOnce; ++u)
          if (mine + u * kWarp < chunks) ptx::st_stream(to + 16ull * (mine + u * kWarp), data[u]);
      }
    }
  }
}

// ---- Pushers: a stream is a channel's rows of this rank, or of a partner, for this node -----------------------------

// A pusher's turn for 32 ranks of the node, or fewer: what lane i knows of rank base + i.
struct PushTurn {
  int node, channel;  // of the source
  int base, self;     // self: the lane of this rank; of another turn's, if it is none of these
  RowsThere there;
  uint8_t *ring;            // of this rank's rows there; null: there is no such rank
  uint32_t pushed, before;  // rows in it, now and when the turn began
  int64_t before_own;       // this rank's rows of sources before this one

  __device__ const WordRings &rings(const InternodeDispatchParams &p) const {
    return there.first != nullptr ? p.words : p.staged;
  }
  // The next row's in the ring there.
  __device__ uint8_t *next_slot(const InternodeDispatchParams &p) {
    return ring + static_cast<uint64_t>(pushed++ % rings(p).slots) * rings(p).stride;
  }
  // Of the payload of a row with that slot (null: this rank's); null: its number is out of range.
  template <class Params>
  __device__ uint8_t *place(const Params &p, int number, uint8_t *slot) const {
    if (there.first == nullptr) return slot + payload_at(p);
    return number < there.count ? there.first + static_cast<int64_t>(number) * p.d.row_bytes : nullptr;
  }
};
__device__ inline uint32_t *words_pushed(const InternodeDispatchParams &p, int node, int channel) {
  return p.lists.words_pushed + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
}
__device__ inline PushTurn begin_turn(const InternodeDispatchParams &p, const RowsThere *there, int node, int channel,
                                      int base) {
  const TeamView &team = p.d.session.team;
  PushTurn turn{node, channel, base, p.internode.index - base, {nullptr, 0}, nullptr, 0, 0, 0};
  turn.before_own = rows_before(p.d.rank_prefix_matrix(), team.num_ranks, p.internode.partner(node), team.rank);
  const int i = base + lane_id();
  if (i >= p.internode.num_peers) return turn;
  turn.there = there[node * p.internode.num_peers + i];
  turn.ring = team.peers[p.internode.local_rank(i)] + turn.rings(p).at(p.internode.index, node, channel, 0);
  turn.pushed = turn.before = words_pushed(p, node, channel)[i];
  return turn;
}

// How many more rows the rings of a turn have room for; of the least, the rank and what it has read.
struct RingRoom {
  uint32_t rows, read;
  int index;
};
__device__ inline RingRoom room_of(const InternodeDispatchParams &p, uint64_t epoch, const PushTurn &turn) {
  uint32_t read = 0, room = kAllRows;
  if (turn.ring != nullptr && lane_id() != turn.self) {
    read =
        count_in(ptx::ld_acquire_sys(word_at(p.d.session.team.self, p.internode.at.taken,
                                             push_index(p.internode, turn.base + lane_id(), turn.node, turn.channel))),
                 epoch);
    room = turn.rings(p).slots - (turn.pushed - read);
  }
  __syncwarp();
  const uint32_t least = __reduce_min_sync(kAllLanes, room);
  const int lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, room == least))) - 1;
  return {least, __shfl_sync(kAllLanes, read, lane), turn.base + lane};
}

// A row's number at each rank of the turn, or -1: of one of this rank's tokens; of a row that a partner has sent.
__device__ inline int own_number(const InternodeDispatchParams &p, const PushTurn &turn, int token) {
  const int32_t *heads = p.d.send_head() + static_cast<int64_t>(token) * p.d.session.team.num_ranks;
  return turn.ring == nullptr ? -1 : heads[p.internode.local_rank(turn.base + lane_id())];
}
__device__ inline int arrived_number(const PushTurn &turn, const uint32_t *words) {
  return turn.ring == nullptr ? -1 : static_cast<int>(ptx::ld_relaxed_sys(words + 1 + turn.base + lane_id()));
}
// Of a row's numbers that at this rank; -1: none, or the turn is of others. False: it is out of range.
__device__ inline bool find_own(const InternodeDispatchParams &p, const PushTurn &turn, int number, int &own) {
  own = __shfl_sync(kAllLanes, number, turn.self & (kWarp - 1));
  const int expected = __shfl_sync(kAllLanes, turn.there.count, turn.self & (kWarp - 1));
  if (turn.self < 0 || turn.self >= kWarp) own = -1;
  if (own < expected) return true;
  if (lane_id() == 0)
    report_failure(p.d.session, DK_EINVAL, p.internode.partner(turn.node), DK_FIELD_SEND_HEAD, expected - 1, own, 0);
  __syncwarp();
  return false;
}

// What belongs to a row besides its payload. Lane i: its number at the turn's rank i, or -1, and the first extras.
struct RowMeta {
  int token, number;
  RowExtras extras;
};
// Of one of this rank's tokens.
struct OwnMeta {
  static constexpr bool kChecked = false;  // whether its experts have been
  int token;
  __device__ RowExtras extras(const InternodeDispatchParams &p, int first) const {
    return load_extras(p.d, token, first);
  }
  __device__ RowMeta load(const InternodeDispatchParams &p, const PushTurn &turn) const {
    return {token, own_number(p, turn, token), extras(p, 0)};
  }
};
// Of a row that a partner has sent: its words.
struct ArrivedMeta {
  static constexpr bool kChecked = true;
  const uint32_t *words;
  __device__ RowExtras extras(const InternodeDispatchParams &p, int first) const {
    return load_arrived_extras(p.d, RowWords(p.d, p.internode.num_peers), words, first);
  }
  __device__ RowMeta load(const InternodeDispatchParams &p, const PushTurn &turn) const {
    return {static_cast<int>(ptx::ld_relaxed_sys(words)), arrived_number(turn, words), extras(p, 0)};
  }
};

// A row to those of the turn's ranks that it is for. How many these are; -1: its number at this rank is out of range.
// Another rank's is looked at there.
template <class Meta>
__device__ inline int push_row(const InternodeDispatchParams &p, PushTurn &turn, const uint8_t *payload,
                               const Meta &from) {
  const DispatchParams &d = p.d;
  const RowWords at(d, p.internode.num_peers);
  const int i = lane_id();
  RowMeta meta = from.load(p, turn);
  int own;
  if (!find_own(p, turn, meta.number, own)) return -1;
  uint8_t *ring = nullptr, *place = nullptr;
  if (meta.number >= 0 && i != turn.self) ring = turn.next_slot(p);
  if (meta.number >= 0) place = turn.place(p, meta.number, ring);
  const uint32_t rings = __ballot_sync(kAllLanes, ring != nullptr);
  const int64_t row = own + turn.before_own;
  if (i == 0 && own >= 0 && d.recv_src_idx() != nullptr) d.recv_src_idx()[row] = meta.token;
#pragma unroll 1
  for (int first = 0; first == 0 || has_extras(d, first); first += kWarp) {
    if (first != 0) meta.extras = from.extras(p, first);
    if (!Meta::kChecked) check_expert(d, meta.extras);
#pragma unroll 1
    for (uint32_t left = rings; left != 0; left &= left - 1) {
      auto *words = reinterpret_cast<uint32_t *>(
          __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(ring), __ffs(static_cast<int>(left)) - 1));
      if (first == 0 && i == 0) words[0] = static_cast<uint32_t>(meta.token);
      if (first == 0 && turn.ring != nullptr) words[at.numbers + turn.base + i] = static_cast<uint32_t>(meta.number);
      store_words(d, at, words, meta.extras, first);
    }
    if (own >= 0) store_extras(d, row, meta.extras, first);
  }
  copy_to_places({place}, payload, d.row_bytes);
  return __popc(__ballot_sync(kAllLanes, meta.number >= 0));
}

__device__ inline int push_own(const InternodeDispatchParams &p, PushTurn &turn, int token) {
  return push_row(p, turn, p.d.x() + static_cast<uint64_t>(token) * p.d.row_bytes, OwnMeta{token});
}
__device__ inline int push_arrived(const InternodeDispatchParams &p, PushTurn &turn, const uint8_t *row) {
  return push_row(p, turn, row, ArrivedMeta{reinterpret_cast<const uint32_t *>(row + p.d.row_bytes)});
}
// A row of a ring here, with its payload if it is staged there.
__device__ inline void take_pushed(const InternodeDispatchParams &p, const uint8_t *slot, bool staged, int64_t row) {
  take_words(p, reinterpret_cast<const uint32_t *>(slot), row, [&] {
    if (staged) copy_payload(p.d.recv_x() + row * p.d.row_bytes, slot + payload_at(p), p.d.row_bytes);
  });
}

// Rings' counts, released after the rows' payloads.
__device__ inline void end_turn(const InternodeDispatchParams &p, uint64_t epoch, const PushTurn &turn) {
  __syncwarp();
  const int i = turn.base + lane_id();
  if (turn.pushed != turn.before) {
    ptx::st_release_sys(word_at(p.d.session.team.peers[p.internode.local_rank(i)], p.internode.at.pushed,
                                push_index(p.internode, p.internode.index, turn.node, turn.channel)),
                        tagged(epoch, turn.pushed));
    words_pushed(p, turn.node, turn.channel)[i] = turn.pushed;
  }
  __syncwarp();
}

// Counts rows of a source that are in their places now. Returns how many are.
__device__ inline uint32_t count_placed(const InternodeDispatchParams &p, uint64_t epoch, int source, uint32_t rows) {
  uint32_t now = 0;
  if (lane_id() == 0) now = rows + atomicAdd(&p.state->rows_taken[epoch % 2][source], rows);
  return __shfl_sync(kAllLanes, now, 0);
}

// Streams of this rank's rows come first.
__device__ inline int node_pushed(const InternodeDispatchParams &p, int stream) {
  return (p.internode.node + stream / static_cast<int>(p.rings.channels)) % p.internode.num_nodes;
}

// The next of this rank's tokens for its own node.
struct NextToken {
  TokenRange tokens;
  int first, token;
  uint32_t found;  // of the 32 tokens from `first` on that are left

  // False: there is none.
  __device__ bool find(const InternodeDispatchParams &p, uint64_t epoch) {
    while (found == 0 && tokens.any(p, epoch, p.internode.node)) {
      first = tokens.token;
      found = tokens.that_go_to(p, p.internode.node);
      if (found == 0) tokens.skip(first);
    }
    if (found == 0) return false;
    token = first + __ffs(static_cast<int>(found)) - 1;
    tokens.token = token + 1;
    found &= found - 1;
    return true;
  }
};

// Of a source that this rank pushes on: rows for ranks of the node after the first 32.
__device__ inline uint32_t rows_of_later_groups(const InternodeDispatchParams &p, const RowsThere *there, int node) {
  int rows = 0;
  for (int i = kWarp + lane_id(); i < p.internode.num_peers; i += kWarp)
    rows += there[node * p.internode.num_peers + i].count;
  return static_cast<uint32_t>(__reduce_add_sync(kAllLanes, rows));
}

// kWide: nodes may have more ranks than a warp has lanes; the first 32 are served first.
// A partner's rows are those in its ring; RowStream::at is how many of them it knows to be read. This rank's are its
// tokens'.
template <bool kWide, class Params>
__device__ inline Outcome serve_pusher(const Params &p, uint64_t epoch, const RowsThere *there, int stream,
                                       BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int channels = static_cast<int>(p.rings.channels), channel = stream % channels, node = node_pushed(p, stream),
            source = p.internode.partner(node);
  const bool own = source == team.rank;
  RowStream *state = p.lists.from_nodes + stream;
  if (state->closed != 0) return kDone;
  PushTurn turn = begin_turn(p, there, node, channel, 0);
  uint32_t expected = static_cast<uint32_t>(__reduce_add_sync(kAllLanes, turn.there.count)), so_far = 0,
           most = kRowsPushed;
  if constexpr (kWide) expected += rows_of_later_groups(p, there, node);
  const uint32_t read = state->count;
  if (!own) {
    if (lane_id() == 0) so_far = ptx::ld_relaxed_gpu(&p.state->rows_taken[epoch % 2][source]);
    so_far = __shfl_sync(kAllLanes, so_far, 0);
    const uint32_t here =
        so_far < expected ? read_count(word_at(team.self, p.internode.at.heads, node * kMaxChannels + channel), epoch)
                          : read;
    blocked = {source, static_cast<int64_t>(read) + 1, here};
    if (so_far < expected && here <= read) return kBlocked;
    most = min(most, here - read);
  }
  RingRoom room = room_of(p, epoch, turn);
  if constexpr (kWide)
    for (int base = kWarp; base < p.internode.num_peers; base += kWarp) {
      const RingRoom other = room_of(p, epoch, begin_turn(p, there, node, channel, base));
      if (other.rows < room.rows) room = other;
    }
  if (room.rows == 0 && (own || most != 0)) {
    blocked = {p.internode.local_rank(room.index), static_cast<int64_t>(room.read) + 1, room.read};
    return kBlocked;
  }
  most = min(most, room.rows);
  const auto arrived = [&](uint32_t i) { return team.self + p.rings.in(node, channel, read + i); };
  NextToken next{{state->at, static_cast<int>(state->opened)}, 0, 0, 0};
  uint32_t rows = 0, placed = 0;
  int token = 0;  // lane i: of this turn's row i
  bool last = false;
  for (; rows < most; ++rows) {
    const InPhase phase(kPhaseCopy);
    int ranks = 0;
    if (own) {
      last = !next.find(p, epoch);
      if (last) break;
      if (kWide && lane_id() == static_cast<int>(rows)) token = next.token;
      ranks = push_own(p, turn, next.token);
    } else {
      ranks = push_arrived(p, turn, arrived(rows));
    }
    if (ranks < 0) return kBlocked;
    placed += static_cast<uint32_t>(ranks);
  }
  end_turn(p, epoch, turn);
  if constexpr (kWide)
    for (int base = kWarp; base < p.internode.num_peers; base += kWarp) {
      turn = begin_turn(p, there, node, channel, base);
      for (uint32_t i = 0; i < rows; ++i) {
        const int mine = __shfl_sync(kAllLanes, token, static_cast<int>(i)),
                  ranks = own ? push_own(p, turn, mine) : push_arrived(p, turn, arrived(i));
        if (ranks < 0) return kBlocked;
        placed += static_cast<uint32_t>(ranks);
      }
      end_turn(p, epoch, turn);
    }
  if (!own) last = placed == 0 ? so_far >= expected : count_placed(p, epoch, source, placed) >= expected;
  const auto told = static_cast<uint32_t>(state->at);
  const bool tells = !own && (last || read + rows - told >= max(1u, p.rings.slots / 2));
  if (tells) {
    const InPhase phase(kPhaseSignal);
    signal_remote(p.internode, team, source,
                  word_at(team.self, p.internode.at.credits, p.internode.node * kMaxChannels + channel),
                  tagged(epoch, last ? kAllRows : read + rows));
  }
  __syncwarp();
  if (lane_id() == 0) {
    state->count = read + rows;
    if (own) {
      state->at = next.tokens.token;
      state->opened = static_cast<uint32_t>(next.tokens.end);
    }
    if (tells) state->at = static_cast<int32_t>(read + rows);
    state->closed = last;
  }
  __syncwarp();
  return last ? kDone : kMoved;
}

// ---- Readers: a stream is a channel's rows that another rank of this node has pushed here ---------------------------

template <class Params>
__device__ inline Outcome serve_pushed(const Params &p, uint64_t epoch, int stream, BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int channels = static_cast<int>(p.rings.channels), channel = stream % channels, which = stream / channels,
            others = p.internode.num_peers - 1, node = (p.internode.node + which / others) % p.internode.num_nodes,
            index = (p.internode.index + 1 + which % others) % p.internode.num_peers,
            source = node * p.internode.num_peers + index;
  RowStream *state = p.lists.by_rank + stream;
  if (state->closed != 0) return kDone;
  const bool staged = !has_places(p, p.d.recv_segment);
  const WordRings &rings = staged ? p.staged : p.words;
  const int64_t ring = push_index(p.internode, index, node, channel);
  const uint32_t expected = rows_between(p.d, source, team.rank), read = state->count;
  uint32_t so_far = 0, here = read;
  if (lane_id() == 0) so_far = ptx::ld_relaxed_gpu(&p.state->rows_taken[epoch % 2][source]);
  so_far = __shfl_sync(kAllLanes, so_far, 0);
  if (so_far < expected) here = read_count(word_at(team.self, p.internode.at.pushed, ring), epoch);
  if (so_far < expected && here <= read) {
    blocked = {source, static_cast<int64_t>(read) + 1, here};
    return kBlocked;
  }
  const uint32_t rows = so_far < expected ? min<uint32_t>(here - read, kRowsRead) : 0;
  if (rows > 0) {
    const InPhase phase(kPhaseCopy);
    const auto slot = [&](uint32_t i) { return team.self + rings.at(index, node, channel, read + i); };
    const int mine = take_rows(
        p, source, rows, [&](uint32_t i) { return reinterpret_cast<const uint32_t *>(slot(i)); },
        [&](uint32_t i, int64_t row) { take_pushed(p, slot(i), staged, row); });
    if (mine < 0) return kBlocked;
    so_far = count_placed(p, epoch, source, static_cast<uint32_t>(mine));
    const uint32_t half = max(1u, rings.slots / 2);
    if (read / half != (read + rows) / half)
      write_count(word_at(team.peers[p.internode.local_rank(index)], p.internode.at.taken,
                          push_index(p.internode, p.internode.index, node, channel)),
                  epoch, read + rows);
  }
  const bool all = so_far >= expected;
  if (lane_id() == 0) {
    state->count = read + rows;
    state->closed = all;
  }
  __syncwarp();
  return all ? kDone : kMoved;
}

}  // namespace deepep::internode
