// push_rows.cuh - libdeepep_nvshmem.so: dispatch where the outputs of a node's ranks lie in row segments. Pushers,
// which have a row here, theirs or one that a partner has sent, store its payload at its places in the node, and what
// belongs to it into rings at the other ranks, whose readers take that. So nobody reads over NVLink. Senders are those
// of dispatch.cuh; a ring that a partner fills is read by this rank alone, whose pushers report what they have read.
#pragma once
#include "internode/normal/dispatch.cuh"

namespace deepep::internode {

// Where puts are stores fewer warps send and more push.
constexpr PushShape kPuttingPushShape{9, 11}, kStoringPushShape{6, 12};
constexpr int kRowsPushed = 8;    // of a stream in one turn
constexpr int kChunksAtOnce = 8;  // that a lane loads before it stores them

// A call's parameters where it pushes rows, of those where it does not.
inline InternodeDispatchParams pushing_params(const InternodeDispatchParams &p, int blocks) {
  const TeamView &team = p.d.session.team;
  const uint64_t bytes = p.d.row_bytes + words_bytes(p);
  InternodeDispatchParams pushing = p;
  pushing.shape = p.internode.puts_are_stores ? kStoringPushShape : kPuttingPushShape;
  const int channels = channels_for(p.internode, blocks, pushing.shape.senders);
  pushing.rings = row_rings(team, p.internode, bytes, channels, false);
  // A warp that sends takes tokens some seven times.
  pushing.shape.share = max(1, min(kWarp, p.d.num_tokens / static_cast<int>(7 * pushing.rings.channels)));
  pushing.words = word_rings(team, p.internode, pushing.rings, words_bytes(p));
  return pushing;
}

// Where a source's rows for a rank of this node go: the first of them, and how many there are.
struct RowsThere {
  uint8_t *first;
  int32_t count;  // 0: none
};

// Whole block, after the handshake: whether rows are pushed, as all ranks see alike: their rings are as many, and every
// rank's outputs lie in a row segment, or it gets no rows. Then it fills a table for this rank's rows, as its node's,
// and its partners', by node and reader.
__device__ inline bool find_places(const InternodeDispatchParams &p, uint64_t epoch, RowsThere *there) {
  const Session &s = p.d.session;
  const TeamView &team = s.team;
  const int num_ranks = team.num_ranks, num_peers = p.internode.num_peers;
  bool pushes = p.words.slots != 0 && agree_on_channels(s, p.internode, epoch, p.rings.channels);
  for (int r = threadIdx.x; pushes && num_peers > 1 && r < num_ranks; r += blockDim.x)
    pushes = message_from(s, p.internode, epoch, r)->handshake.segment >= 0 ||
             p.d.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + r] == 0;
  if (__syncthreads_and(pushes) == 0) return false;
  for (int i = threadIdx.x; i < num_ranks; i += blockDim.x) {
    const int source = p.internode.partner(i / num_peers), reader = p.internode.local_rank(i % num_peers),
              before = rows_before(p.d.rank_prefix_matrix(), num_ranks, source, reader);
    there[i] = {p.d.recv_x(), rows_between(p.d, source, reader)};
    if (reader != team.rank && there[i].count > 0) {
      const HandshakeMessage &message = message_from(s, p.internode, epoch, reader)->handshake;
      const bool placed = message.segment >= 0 && message.segment < DK_MAX_SEGMENTS;
      const uint64_t segment = placed ? team.segments[reader * DK_MAX_SEGMENTS + message.segment] : 0;
      there[i].first = pointer<uint8_t>(segment + (message.segment_offset & ((1ull << kChannelsAt) - 1)));
      if (segment == 0) {
        report_failure(s, DK_EINTERNAL, reader, DK_FIELD_NONE, message.segment, 0, 0);
        there[i].count = 0;
      }
    }
    there[i].first += static_cast<int64_t>(before) * p.d.row_bytes;
  }
  __syncthreads();
  return true;
}

// A payload to the lanes' places, null: none. Whole warp; `bytes` is a multiple of 16.
__device__ inline void copy_to_places(uint8_t *place, const uint8_t *from, uint32_t bytes) {
  const int chunks = static_cast<int>(bytes / 16);
  const uint32_t lanes = __ballot_sync(kAllLanes, place != nullptr);
#pragma unroll 1
  for (int first = 0; first < chunks; first += kWarp * kChunksAtOnce) {
    const int mine = first + lane_id();
    uint4 data[kChunksAtOnce];
#pragma unroll
    for (int u = 0; u < kChunksAtOnce; ++u)
      if (mine + u * kWarp < chunks) data[u] = ptx::ld_stream(from + 16ull * (mine + u * kWarp));
#pragma unroll 1
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      auto *to = reinterpret_cast<uint8_t *>(
          __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(place), __ffs(static_cast<int>(left)) - 1));
#pragma unroll
      for (int u = 0; u < kChunksAtOnce; ++u)
        if (mine + u * kWarp < chunks) ptx::st_stream(to + 16ull * (mine + u * kWarp), data[u]);
    }
  }
}

// ---- Pushers: a stream is a channel's rows of this rank, or of a partner, for this node -----------------------------

// A pusher's turn: what lane i knows of rank i of the node.
struct PushTurn {
  int node, channel;  // of the source
  RowsThere there;
  uint8_t *block;
  uint32_t pushed, before;  // rows whose words are in the ring there, now and when the turn began
  int64_t before_own;       // this rank's rows of sources before this one
};
__device__ inline uint32_t *words_pushed(const InternodeDispatchParams &p, int node, int channel) {
  return p.lists.words_pushed + (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers;
}
__device__ inline PushTurn begin_turn(const InternodeDispatchParams &p, const RowsThere *there, int node, int channel) {
  const TeamView &team = p.d.session.team;
  PushTurn turn{node, channel, {nullptr, 0}, nullptr, 0, 0, 0};
  turn.before_own = rows_before(p.d.rank_prefix_matrix(), team.num_ranks, p.internode.partner(node), team.rank);
  const int i = lane_id();
  if (i >= p.internode.num_peers) return turn;
  turn.there = there[node * p.internode.num_peers + i];
  turn.block = team.peers[p.internode.local_rank(i)];
  turn.pushed = turn.before = words_pushed(p, node, channel)[i];
  return turn;
}

// How many more rows all rings have room for; of the least, the rank and what it has read.
struct RingRoom {
  uint32_t rows, read;
  int index;
};
__device__ inline RingRoom room_of(const InternodeDispatchParams &p, uint64_t epoch, const PushTurn &turn) {
  const int i = lane_id();
  uint32_t read = 0, room = kAllRows;
  if (i < p.internode.num_peers && i != p.internode.index) {
    read = count_in(ptx::ld_acquire_sys(word_at(p.d.session.team.self, p.internode.at.taken,
                                                push_index(p.internode, i, turn.node, turn.channel))),
                    epoch);
    room = p.words.slots - (turn.pushed - read);
  }
  __syncwarp();
  const uint32_t least = __reduce_min_sync(kAllLanes, room);
  const int lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, room == least))) - 1;
  return {least, __shfl_sync(kAllLanes, read, lane), lane};
}

// What belongs to a row besides its payload. Lane i: its number at rank i of the node, or -1, and the first extras.
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
  __device__ RowMeta load(const InternodeDispatchParams &p) const {
    const int32_t *heads = p.d.send_head() + static_cast<int64_t>(token) * p.d.session.team.num_ranks;
    return {token, lane_id() < p.internode.num_peers ? heads[p.internode.local_rank(lane_id())] : -1, extras(p, 0)};
  }
};
// Of a row that a partner has sent: its words.
struct ArrivedMeta {
  static constexpr bool kChecked = true;
  const uint32_t *words;
  __device__ RowExtras extras(const InternodeDispatchParams &p, int first) const {
    return load_arrived_extras(p.d, RowWords(p.d, p.internode.num_peers), words, first);
  }
  __device__ RowMeta load(const InternodeDispatchParams &p) const {
    return {static_cast<int>(ptx::ld_relaxed_sys(words)),
            lane_id() < p.internode.num_peers ? static_cast<int>(ptx::ld_relaxed_sys(words + 1 + lane_id())) : -1,
            extras(p, 0)};
  }
};

// A row to the ranks that it is for. How many these are; -1: its number at this rank is out of range. Another rank's is
// looked at there.
template <class Meta>
__device__ inline int push_row(const InternodeDispatchParams &p, PushTurn &turn, const uint8_t *payload,
                               const Meta &from) {
  const DispatchParams &d = p.d;
  const RowWords at(d, p.internode.num_peers);
  const int i = lane_id();
  RowMeta meta = from.load(p);
  const int own = __shfl_sync(kAllLanes, meta.number, p.internode.index),
            expected = __shfl_sync(kAllLanes, turn.there.count, p.internode.index);
  if (own >= expected) {
    if (i == 0)
      report_failure(d.session, DK_EINVAL, p.internode.partner(turn.node), DK_FIELD_SEND_HEAD, expected - 1, own, 0);
    __syncwarp();
    return -1;
  }
  uint8_t *ring = nullptr, *place = nullptr;
  if (meta.number >= 0 && i != p.internode.index)
    ring = turn.block + p.words.at(p.internode.index, turn.node, turn.channel, turn.pushed++);
  if (meta.number >= 0 && meta.number < turn.there.count)
    place = turn.there.first + static_cast<int64_t>(meta.number) * d.row_bytes;
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
      if (first == 0 && i < p.internode.num_peers) words[at.numbers + i] = static_cast<uint32_t>(meta.number);
      store_words(d, at, words, meta.extras, first);
    }
    if (own >= 0) store_extras(d, row, meta.extras, first);
  }
  copy_to_places(place, payload, d.row_bytes);
  return __popc(__ballot_sync(kAllLanes, meta.number >= 0));
}

// Rings' counts, released after the rows' payloads.
__device__ inline void end_turn(const InternodeDispatchParams &p, uint64_t epoch, const PushTurn &turn) {
  __syncwarp();
  if (turn.pushed != turn.before) {
    ptx::st_release_sys(
        word_at(turn.block, p.internode.at.pushed, push_index(p.internode, p.internode.index, turn.node, turn.channel)),
        tagged(epoch, turn.pushed));
    words_pushed(p, turn.node, turn.channel)[lane_id()] = turn.pushed;
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
      if (found == 0) tokens.skip(p, first);
    }
    if (found == 0) return false;
    token = first + (__ffs(static_cast<int>(found)) - 1) * tokens.step(p);
    tokens.token = token + tokens.step(p);
    found &= found - 1;
    return true;
  }
};

// A partner's rows are those in its ring; RowStream::at is how many of them it knows to be read. This rank's are its
// tokens'.
__device__ inline Outcome serve_pusher(const InternodeDispatchParams &p, uint64_t epoch, const RowsThere *there,
                                       int stream, BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int channels = static_cast<int>(p.rings.channels), channel = stream % channels, node = node_pushed(p, stream),
            source = p.internode.partner(node);
  const bool own = source == team.rank;
  RowStream *state = p.lists.from_nodes + stream;
  if (state->closed != 0) return kDone;
  PushTurn turn = begin_turn(p, there, node, channel);
  const auto expected = static_cast<uint32_t>(__reduce_add_sync(kAllLanes, turn.there.count));
  const uint32_t read = state->count;
  uint32_t so_far = 0, most = kRowsPushed;
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
  const RingRoom room = room_of(p, epoch, turn);
  if (room.rows == 0 && (own || most != 0)) {
    blocked = {p.internode.local_rank(room.index), static_cast<int64_t>(room.read) + 1, room.read};
    return kBlocked;
  }
  most = min(most, room.rows);
  NextToken next{{state->at, static_cast<int>(state->opened)}, 0, 0, 0};
  uint32_t rows = 0, placed = 0;
  bool last = false;
  for (; rows < most; ++rows) {
    const InPhase phase(kPhaseCopy);
    int ranks = 0;
    if (own) {
      last = !next.find(p, epoch);
      if (last) break;
      ranks = push_row(p, turn, p.d.x() + static_cast<uint64_t>(next.token) * p.d.row_bytes, OwnMeta{next.token});
    } else {
      const uint8_t *row = team.self + p.rings.in(node, channel, read + rows);
      ranks = push_row(p, turn, row, ArrivedMeta{reinterpret_cast<const uint32_t *>(row + p.d.row_bytes)});
    }
    if (ranks < 0) return kBlocked;
    placed += static_cast<uint32_t>(ranks);
  }
  end_turn(p, epoch, turn);
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

// ---- Readers: a stream is the words of a channel's rows that another rank of this node has pushed here --------------

__device__ inline Outcome serve_words(const InternodeDispatchParams &p, uint64_t epoch, int stream,
                                      BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int channels = static_cast<int>(p.rings.channels), channel = stream % channels, which = stream / channels,
            others = p.internode.num_peers - 1, node = (p.internode.node + which / others) % p.internode.num_nodes,
            index = (p.internode.index + 1 + which % others) % p.internode.num_peers,
            source = node * p.internode.num_peers + index;
  RowStream *state = p.lists.by_rank + stream;
  if (state->closed != 0) return kDone;
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
    const auto words_of = [&](uint32_t i) {
      return reinterpret_cast<const uint32_t *>(team.self + p.words.at(index, node, channel, read + i));
    };
    const int mine =
        take_rows(p, source, rows, words_of, [&](uint32_t i, int64_t row) { take_words(p, words_of(i), row, [] {}); });
    if (mine < 0) return kBlocked;
    so_far = count_placed(p, epoch, source, static_cast<uint32_t>(mine));
    const uint32_t half = max(1u, p.words.slots / 2);
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

// ---- All of them ----------------------------------------------------------------------------------------------------

// Those of this rank's rows begin at their channel's first token.
__device__ inline void reset_pushers(const InternodeDispatchParams &p, int first, int step, int count) {
  const int channels = static_cast<int>(p.rings.channels);
#pragma unroll 1
  for (int i = first; i < count; i += step) {
    if (lane_id() == 0) p.lists.from_nodes[i] = {i < channels ? i : 0, 0, 0, 0};
    if (lane_id() < p.internode.num_peers) words_pushed(p, node_pushed(p, i), i % channels)[lane_id()] = 0;
  }
  __syncwarp();
}

// As run_dispatch_roles().
__device__ inline void run_push_roles(const InternodeDispatchParams &p, uint64_t epoch, const RowsThere *there) {
  const Session &s = p.d.session;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int channels = static_cast<int>(p.rings.channels), from_nodes = p.internode.num_nodes * channels,
            to_nodes = from_nodes - channels, of_others = (p.internode.num_peers - 1) * from_nodes;
  if (warp < p.shape.senders) {
    const int first = warp * blocks + block, step = p.shape.senders * blocks;
    reset_streams(p.lists.to_nodes, first, step, to_nodes, channels);
    serve_streams(s, kRoleSender, first, step, to_nodes,
                  [&](int stream, BlockedStream &blocked) { return serve_sender(p, epoch, stream, blocked); });
  } else if (warp < p.shape.senders + p.shape.pushers) {
    const int first = (warp - p.shape.senders) * blocks + block, step = p.shape.pushers * blocks;
    reset_pushers(p, first, step, from_nodes);
    serve_streams(s, kRolePusher, first, step, from_nodes,
                  [&](int stream, BlockedStream &blocked) { return serve_pusher(p, epoch, there, stream, blocked); });
  } else {
    const int first = (warp - p.shape.senders - p.shape.pushers) * blocks + block, step = p.shape.readers() * blocks;
    reset_streams(p.lists.by_rank, first, step, of_others, channels);
    serve_streams(s, kRoleReader, first, step, of_others,
                  [&](int stream, BlockedStream &blocked) { return serve_words(p, epoch, stream, blocked); });
    if (p.d.num_worst_tokens > 0) pad_rows(p.d, first, step);
  }
}

}  // namespace deepep::internode
