// dispatch.cuh - libdeepep_nvshmem.so: rows to ranks of other nodes and of this one. Senders fill rings of other nodes,
// readers copy rows out of rings, fill that of their own node and store this rank's own rows at their places, relays
// report to the sender what all readers of a ring have read. Each warp serves its share of streams.
#pragma once
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/dispatch_row.cuh"

namespace deepep::internode {

constexpr int kRowsRead = 8;  // of a stream in one turn of a reader

__device__ inline int rows_between(const DispatchParams &d, int source, int reader) {
  const int num_ranks = d.session.team.num_ranks;
  return d.rank_prefix_matrix()[source * num_ranks + reader] -
         rows_before(d.rank_prefix_matrix(), num_ranks, source, reader);
}

// ---- Senders: a stream is a channel's rows for another node---------------------------------------------------------

// A stream's next tokens: those of its channel; where rows are pushed, the next few that no other stream has taken, so
// that the slower of two sends less.
struct TokenRange {
  int token, end;  // end: of a share

  __device__ int step(const InternodeDispatchParams &p) const {
    return p.shape.share != 0 ? 1 : static_cast<int>(p.rings.channels);
  }
  // False: no token is left.
  __device__ bool any(const InternodeDispatchParams &p, uint64_t epoch, int node) {
    if (token >= p.d.num_tokens) return false;
    if (p.shape.share == 0) {
      end = p.d.num_tokens;
    } else if (token >= end) {
      uint32_t first = 0;
      if (lane_id() == 0)
        first = atomicAdd(&p.state->tokens_taken[epoch % 2][node], static_cast<uint32_t>(p.shape.share));
      token = min(static_cast<int>(__shfl_sync(kAllLanes, first, 0)), p.d.num_tokens);
      end = min(token + p.shape.share, p.d.num_tokens);
    }
    return token < end;
  }
  // Which of the next 32, from `token` on, go to the node.
  __device__ uint32_t that_go_to(const InternodeDispatchParams &p, int node) const {
    const int num_ranks = p.d.session.team.num_ranks, mine = token + lane_id() * step(p);
    const int32_t *heads = p.d.send_head() + static_cast<int64_t>(mine) * num_ranks + node * p.internode.num_peers;
    bool goes = false;
    for (int i = 0; mine < end && !goes && i < p.internode.num_peers; ++i) goes = heads[i] >= 0;
    return __ballot_sync(kAllLanes, goes);
  }
  __device__ void skip(const InternodeDispatchParams &p, int first) { token = min(first + kWarp * step(p), end); }
};

// What a sender's turn leaves: the next token and the rows put into the ring so far.
struct SentRows {
  TokenRange tokens;
  uint32_t count;
};

// To another node: rows of neighbouring places of the ring, as one put or by stores.
template <class Params>
__device__ inline SentRows send_piece(const Params &p, uint64_t epoch, int node, int channel, SentRows from,
                                      uint32_t credit) {
  const TeamView &team = p.d.session.team;
  const uint32_t slots = p.rings.slots,
                 end = from.count + min(min(p.rings.piece, slots - from.count % slots), slots - (from.count - credit));
  const int partner = p.internode.partner(node);
  const uint32_t words = align_up(words_bytes(p), 16u);
  uint8_t *block = p.internode.blocks[partner];  // null: a NIC serves it
  const auto staged = [&](uint32_t row) { return team.self + p.rings.out(node, channel, row); };
  const auto there = [&](uint8_t *in, uint32_t row) { return in + p.rings.in(p.internode.node, channel, row); };
  SentRows now = from;
  while (now.count < end && now.tokens.any(p, epoch, node)) {
    const int first = now.tokens.token, step = now.tokens.step(p);
    uint32_t found = now.tokens.that_go_to(p, node);
    for (; found != 0 && now.count < end; found &= found - 1) {
      const int token = first + (__ffs(static_cast<int>(found)) - 1) * step;
      const InPhase phase(block == nullptr ? kPhaseStage : kPhasePut);
      send_row(p, node, token, block == nullptr ? staged(now.count) : there(block, now.count), -1);
      now.tokens.token = token + step;
      ++now.count;
    }
    if (found == 0) now.tokens.skip(p, first);
  }
  if (now.count == from.count) return now;
  const InPhase phase(kPhasePut);
  uint64_t *head = word_at(team.self, p.internode.at.heads, p.internode.node * kMaxChannels + channel);  // in any block
  if (block == nullptr)
    put_remote(p.internode, partner, there(team.self, from.count), staged(from.count),
               static_cast<uint64_t>(now.count - from.count - 1) * p.rings.stride + p.d.row_bytes + words, head,
               tagged(epoch, now.count));
  else
    set_word(p.internode, team, partner, head, tagged(epoch, now.count));
  return now;
}

// To this node: rows for this rank to their places, rows for its other ranks into the ring. -1 instead of a token: a
// row's number is out of range.
template <class Params>
__device__ inline SentRows send_near(const Params &p, uint64_t epoch, int channel, SentRows from, uint32_t credit) {
  const TeamView &team = p.d.session.team;
  const int node = p.internode.node, step = from.tokens.step(p), expected = rows_between(p.d, team.rank, team.rank);
  const int64_t before = rows_before(p.d.rank_prefix_matrix(), team.num_ranks, team.rank, team.rank);
  const InPhase phase(kPhaseCopy);
  SentRows now = from;
  uint32_t rows = 0, taken = 0;
  bool full = false;
  while (!full && rows < p.rings.piece && now.tokens.any(p, epoch, node)) {
    const int first = now.tokens.token;
    uint32_t found = now.tokens.that_go_to(p, node);
    for (; found != 0 && rows < p.rings.piece; found &= found - 1) {
      const int token = first + (__ffs(static_cast<int>(found)) - 1) * step;
      const int32_t *heads = p.d.send_head() + static_cast<int64_t>(token) * team.num_ranks;
      bool others = false;
#pragma unroll 1
      for (int i = lane_id(); i < p.internode.num_peers; i += kWarp)
        others |= i != p.internode.index && heads[p.internode.local_rank(i)] >= 0;
      others = __any_sync(kAllLanes, others) && credit != kAllRows;
      full = others && now.count - credit >= p.rings.slots;
      if (full) break;
      const int own = heads[team.rank];
      if (own >= expected) {
        if (lane_id() == 0) report_failure(p.d.session, DK_EINVAL, team.rank, DK_FIELD_SEND_HEAD, expected - 1, own, 0);
        __syncwarp();
        return {{-1, 0}, now.count};
      }
      send_row(p, node, token, others ? team.self + p.rings.in(node, channel, now.count) : nullptr,
               own < 0 ? -1 : before + own);
      taken += own >= 0;
      ++rows;
      now.tokens.token = token + step;
      now.count += others;
    }
    if (found == 0) now.tokens.skip(p, first);
  }
  if (now.count != from.count)
    write_count(word_at(team.self, p.internode.at.heads, node * kMaxChannels + channel), epoch, now.count);
  if (taken > 0 && lane_id() == 0) atomicAdd(&p.state->rows_taken[epoch % 2][team.rank], taken);
  return now;
}

// Of the readers of a ring in this rank's block: the one that has read least. Each lane may ask for another ring; who
// writes to a ring's places next fences first.
struct SlowestReader {
  uint32_t rows;
  int index;
};
__device__ inline SlowestReader slowest_reader(const InternodeDispatchParams &p, uint64_t epoch, int node,
                                               int channel) {
  const uint64_t *tails = word_at(p.d.session.team.self, p.internode.at.tails,
                                  (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers);
  SlowestReader slowest{kAllRows, 0};
#pragma unroll 1
  for (int i = 0; i < p.internode.num_peers; ++i) {
    const uint32_t rows = count_in(ptx::ld_relaxed_sys(tails + i), epoch);
    if (rows < slowest.rows) slowest = {rows, i};
  }
  return slowest;
}

// Streams of one node come after those of another.
__device__ inline int node_of_stream(const InternodeDispatchParams &p, int stream) {
  const int after = stream / static_cast<int>(p.rings.channels) + 1;
  return (p.internode.node + after) % p.internode.num_nodes;
}

template <class Params>
__device__ inline Outcome serve_sender(const Params &p, uint64_t epoch, int stream, BlockedStream &blocked) {
  const int node = node_of_stream(p, stream), channel = stream % static_cast<int>(p.rings.channels);
  RowStream *state = p.lists.to_nodes + stream;
  if (state->closed != 0) return kDone;
  const SentRows before{{state->at, static_cast<int>(state->opened)}, state->count};
  const uint32_t credit =
      read_count(word_at(p.d.session.team.self, p.internode.at.credits, node * kMaxChannels + channel), epoch);
  const bool all = credit == kAllRows;
  const SentRows now = all ? before : send_piece(p, epoch, node, channel, before, credit);
  __syncwarp();
  if (lane_id() == 0) {
    *state = {now.tokens.token, now.count, all, static_cast<uint32_t>(now.tokens.end)};
    if (all)
      add_to(&p.d.session.team.scratch->sent_bytes[p.internode.partner(node)],
             static_cast<uint64_t>(now.count) * (p.d.row_bytes + 4ull * p.d.num_scales));
  }
  __syncwarp();
  if (all) return kDone;
  if (now.tokens.token != before.tokens.token) return kMoved;
  blocked = {p.internode.partner(node), static_cast<int64_t>(now.count) + 1, credit};
  return kBlocked;
}

// ---- Relays: credits for a ring in this rank's block, to the rank that fills it -------------------------------------

// Each lane has one of the streams first, first + step, ... of `count`: a warp sees at once what all their readers have
// read.
__device__ inline Outcome advance_relays(const InternodeDispatchParams &p, uint64_t epoch, int first, int step,
                                         int count, BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int stream = first + lane_id() * step, node = stream % p.internode.num_nodes,
            channel = stream / p.internode.num_nodes;
  RowStream *state = p.lists.from_nodes + stream;
  bool open = stream < count && state->closed == 0, posts = false;
  SlowestReader slowest{0, 0};
  if (open) {
    slowest = slowest_reader(p, epoch, node, channel);
    posts = slowest.rows == kAllRows || slowest.rows - state->count >= max(1u, p.rings.slots / 2);
  }
  const uint32_t posting = __ballot_sync(kAllLanes, posts);
  if (posts) {
    ptx::fence_acq_rel_sys();
    if (node == p.internode.node)
      ptx::st_release_sys(word_at(team.self, p.internode.at.credits, node * kMaxChannels + channel),
                          tagged(epoch, slowest.rows));
  }
  for (uint32_t left = __ballot_sync(kAllLanes, posts && node != p.internode.node); left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const uint32_t rows = __shfl_sync(kAllLanes, slowest.rows, lane);
    signal_remote(p.internode, team, p.internode.partner(__shfl_sync(kAllLanes, node, lane)),
                  word_at(team.self, p.internode.at.credits,
                          p.internode.node * kMaxChannels + __shfl_sync(kAllLanes, channel, lane)),
                  tagged(epoch, rows));
  }
  if (posts) {
    state->count = slowest.rows;
    state->closed = slowest.rows == kAllRows;
    open = slowest.rows != kAllRows;
  }
  const uint32_t waiting = __ballot_sync(kAllLanes, open);
  if (posting != 0) return waiting == 0 ? kDone : kMoved;
  if (waiting == 0) return kDone;
  const int lane = __ffs(static_cast<int>(waiting)) - 1, from = __shfl_sync(kAllLanes, node, lane);
  const uint32_t rows = __shfl_sync(kAllLanes, slowest.rows, lane),
                 here = read_count(word_at(team.self, p.internode.at.heads,
                                           from * kMaxChannels + __shfl_sync(kAllLanes, channel, lane)),
                                   epoch);
  if (rows < here)
    blocked = {p.internode.local_rank(__shfl_sync(kAllLanes, slowest.index, lane)), here, rows};
  else
    blocked = {p.internode.partner(from), static_cast<int64_t>(here) + 1, here};
  return kBlocked;
}

__device__ inline void serve_relays(const InternodeDispatchParams &p, uint64_t epoch, int first, int step, int count) {
  serve_streams(p.d.session, kRoleRelay, first, kWarp * step, count, [&](int stream, BlockedStream &blocked) {
    return advance_relays(p, epoch, stream, step, count, blocked);
  });
}

// ---- Readers: a stream is a channel's rows from a source to this rank -----------------------------------------------

// Takes those of a ring's next rows that are for this rank: take(i, row) has row i, which becomes `row` of the outputs.
// words_of(i): its words. Returns how many they are; -1: a row's number is out of range.
template <class Params, class WordsOf, class Take>
__device__ inline int take_rows(const Params &p, int source, uint32_t rows, WordsOf words_of, Take take) {
  const TeamView &team = p.d.session.team;
  const int expected = rows_between(p.d, source, team.rank);
  const int64_t before = rows_before(p.d.rank_prefix_matrix(), team.num_ranks, source, team.rank);
  const auto mine_at = static_cast<uint32_t>(lane_id());
  const int number =
      mine_at < rows ? static_cast<int>(ptx::ld_relaxed_sys(words_of(mine_at) + 1 + p.internode.index)) : -1;
  if (__any_sync(kAllLanes, number >= expected)) {
    const int wrong = __reduce_max_sync(kAllLanes, number);
    if (lane_id() == 0) report_failure(p.d.session, DK_EINVAL, source, DK_FIELD_SEND_HEAD, expected - 1, wrong, 0);
    __syncwarp();
    return -1;
  }
  const uint32_t mine = __ballot_sync(kAllLanes, number >= 0);
  for (uint32_t left = mine; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    take(static_cast<uint32_t>(lane), before + __shfl_sync(kAllLanes, number, lane));
  }
  return __popc(mine);
}

// A channel's rows for this node: those for this rank are stored, its other ranks read theirs.
template <class Params>
__device__ inline Outcome serve_near(const Params &p, uint64_t epoch, int channel, RowStream *state,
                                     BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int node = p.internode.node, expected = rows_between(p.d, team.rank, team.rank);
  const int64_t ring = static_cast<int64_t>(node) * kMaxChannels + channel;
  if (state->opened == 0)  // the ring has none for this rank
    write_count(word_at(team.self, p.internode.at.tails, ring * p.internode.num_peers + p.internode.index), epoch,
                kAllRows);
  const SentRows before{{state->at, 0}, state->count};
  const uint32_t credit = read_count(word_at(team.self, p.internode.at.credits, ring), epoch);
  const SentRows now = before.tokens.token < p.d.num_tokens ? send_near(p, epoch, channel, before, credit) : before;
  if (now.tokens.token < 0) return kBlocked;
  uint32_t stored = 0;  // of all channels
  if (lane_id() == 0) stored = ptx::ld_relaxed_gpu(&p.state->rows_taken[epoch % 2][team.rank]);
  stored = __shfl_sync(kAllLanes, stored, 0);
  const bool all =
      credit == kAllRows && now.tokens.token >= p.d.num_tokens && stored >= static_cast<uint32_t>(expected);
  __syncwarp();
  if (lane_id() == 0) *state = {now.tokens.token, now.count, all, 1};
  __syncwarp();
  if (all) return kDone;
  if (now.tokens.token != before.tokens.token) return kMoved;
  blocked = {p.internode.local_rank(slowest_reader(p, epoch, node, channel).index), expected, stored};
  return kBlocked;
}

// Streams of one source come after those of another; the first are this rank's own.
template <class Params>
__device__ inline Outcome serve_reader(const Params &p, uint64_t epoch, int stream, BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int channels = static_cast<int>(p.rings.channels), channel = stream % channels,
            source = (team.rank + stream / channels) % team.num_ranks, node = p.internode.node_of(source);
  RowStream *state = p.lists.by_rank + stream;
  if (state->closed != 0) return kDone;
  if (source == team.rank) return serve_near(p, epoch, channel, state, blocked);
  uint8_t *block = team.peers[p.internode.local_rank(p.internode.index_of(source))];
  uint64_t *tail =
      word_at(block, p.internode.at.tails,
              (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers + p.internode.index);
  uint32_t *taken = &p.state->rows_taken[epoch % 2][source];
  const uint32_t expected = rows_between(p.d, source, team.rank), read = state->count;
  uint32_t so_far = 0, here = 0;
  if (lane_id() == 0) so_far = ptx::ld_relaxed_gpu(taken);
  so_far = __shfl_sync(kAllLanes, so_far, 0);
  if (so_far < expected) here = read_count(word_at(block, p.internode.at.heads, node * kMaxChannels + channel), epoch);
  if (so_far < expected && here <= read) {
    blocked = {source, static_cast<int64_t>(read) + 1, here};
    return kBlocked;
  }
  const uint32_t rows = so_far < expected ? min<uint32_t>(here - read, kRowsRead) : 0;
  if (rows > 0) {
    const InPhase phase(kPhaseCopy);
    const auto place = [&](uint32_t i) { return block + p.rings.in(node, channel, read + i); };
    const int mine = take_rows(
        p, source, rows, [&](uint32_t i) { return reinterpret_cast<const uint32_t *>(place(i) + p.d.row_bytes); },
        [&](uint32_t i, int64_t row) { take_row(p, place(i), row); });
    if (mine < 0) return kBlocked;
    if (lane_id() == 0) so_far = mine + (mine > 0 ? atomicAdd(taken, static_cast<uint32_t>(mine)) : so_far);
    so_far = __shfl_sync(kAllLanes, so_far, 0);
  }
  const bool all = so_far >= expected;
  write_count(tail, epoch, all ? kAllRows : read + rows);
  if (lane_id() == 0) {
    state->count = read + rows;
    state->closed = all;
  }
  __syncwarp();
  return all ? kDone : kMoved;
}

// Worst-case mode: rows past the received ones get index -1 and weight 0.
__device__ inline void pad_rows(const DispatchParams &d, int worker, int workers) {
  const int num_ranks = d.session.team.num_ranks;
  const int64_t arrived = d.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + d.session.team.rank];
  const int64_t end = static_cast<int64_t>(d.num_worst_tokens) * d.num_topk;
#pragma unroll 1
  for (int64_t i = arrived * d.num_topk + worker * kWarp + lane_id(); i < end;
       i += static_cast<int64_t>(workers) * kWarp) {
    if (d.recv_topk_weights() != nullptr) d.recv_topk_weights()[i] = 0;
    if (d.recv_topk_idx() == nullptr) continue;
    if (d.index_bytes == 8)
      static_cast<int64_t *>(d.recv_topk_idx())[i] = -1;
    else
      static_cast<int32_t *>(d.recv_topk_idx())[i] = -1;
  }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

// False: a rank's output has no room for the rows that the matrix gives it.
__device__ inline bool has_room_everywhere(const InternodeDispatchParams &p, uint64_t epoch) {
  const Session &s = p.d.session;
  const int num_ranks = s.team.num_ranks;
  bool good = true;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const int limit = message_from(s, p.internode, epoch, r)->handshake.row_limit,
              arriving = p.d.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + r];
    if (limit < 0 || arriving <= limit) continue;
    if (blockIdx.x == 0) report_refusal(s, kVoid, DK_EINVAL, r, DK_FIELD_WORST_TOKENS, limit, arriving);
    good = false;
  }
  return __syncthreads_or(!good) == 0;
}

// Statistics: rows that ranks of this node read from this rank's block, its own and those of partners.
__device__ inline void count_bytes_in_node(const InternodeDispatchParams &p) {
  const TeamView &team = p.d.session.team;
  for (int i = threadIdx.x; i < p.internode.num_peers; i += blockDim.x) {
    const int reader = p.internode.local_rank(i);
    uint64_t rows = rows_between(p.d, team.rank, reader);
#pragma unroll 1
    for (int node = 0; node < p.internode.num_nodes; ++node)
      if (node != p.internode.node && reader != team.rank) rows += rows_between(p.d, p.internode.partner(node), reader);
    team.scratch->sent_bytes[reader] = rows * (p.d.row_bytes + 4ull * p.d.num_scales);
  }
}

// Streams begin at their channel's first token.
__device__ inline void reset_streams(RowStream *streams, int first, int step, int count, int channels) {
#pragma unroll 1
  for (int i = first; i < count; i += step)
    if (lane_id() == 0) streams[i] = {i % channels, 0, 0, 0};
  __syncwarp();
}

__device__ inline void run_dispatch_roles(const InternodeDispatchParams &p, uint64_t epoch) {
  using Roles = DispatchRoles;
  const Session &s = p.d.session;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int channels = static_cast<int>(p.rings.channels), from_nodes = p.internode.num_nodes * channels,
            to_nodes = from_nodes - channels, of_ranks = s.team.num_ranks * channels;
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks;
    reset_streams(p.lists.to_nodes, first, step, to_nodes, channels);
    serve_streams(s, kRoleSender, first, step, to_nodes,
                  [&](int stream, BlockedStream &blocked) { return serve_sender(p, epoch, stream, blocked); });
  } else if (warp < Roles::kSenders + Roles::kRelays) {
    const int first = (warp - Roles::kSenders) * blocks + block, step = Roles::kRelays * blocks;
    reset_streams(p.lists.from_nodes, first, step, from_nodes, channels);
    serve_relays(p, epoch, first, step, from_nodes);
  } else {
    const int first = (warp - Roles::kSenders - Roles::kRelays) * blocks + block, step = Roles::kReaders * blocks;
    reset_streams(p.lists.by_rank, first, step, of_ranks, channels);
    serve_streams(s, kRoleReader, first, step, of_ranks,
                  [&](int stream, BlockedStream &blocked) { return serve_reader(p, epoch, stream, blocked); });
    if (p.d.num_worst_tokens > 0) pad_rows(p.d, first, step);
  }
}

}  // namespace deepep::internode
