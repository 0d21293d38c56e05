// dispatch.cuh - libdeepep_nvshmem.so: dispatch between nodes: its senders, which fill rings of other nodes, and what
// its roles share. Each warp serves its share of streams.
#pragma once
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/dispatch_row.cuh"

namespace deepep::internode {

__device__ inline int rows_between(const DispatchParams &d, int source, int reader) {
  const int num_ranks = d.session.team.num_ranks;
  return d.rank_prefix_matrix()[source * num_ranks + reader] -
         rows_before(d.rank_prefix_matrix(), num_ranks, source, reader);
}

// ---- Senders: a stream is a channel's rows for another node ---------------------------------------------------------

// A stream's next tokens: a few that no other stream has taken, so that the slower of two sends less.
struct TokenRange {
  int token, end;  // end: of a share

  // False: no token is left.
  __device__ bool any(const InternodeDispatchParams &p, uint64_t epoch, int node) {
    if (token >= p.d.num_tokens) return false;
    if (token >= end) {
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
    const int num_ranks = p.d.session.team.num_ranks, mine = token + lane_id();
    const int32_t *heads = p.d.send_head() + static_cast<int64_t>(mine) * num_ranks + node * p.internode.num_peers;
    bool goes = false;
    for (int i = 0; mine < end && !goes && i < p.internode.num_peers; ++i) goes = heads[i] >= 0;
    return __ballot_sync(kAllLanes, goes);
  }
  __device__ void skip(int first) { token = min(first + kWarp, end); }
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
  const uint32_t end = from.count + piece_room(p.rings, from.count, credit);
  const int partner = p.internode.partner(node);
  const uint32_t words = align_up(words_bytes(p), 16u);
  uint8_t *block = p.internode.blocks[partner];  // null: a NIC serves it
  const auto staged = [&](uint32_t row) { return team.self + p.rings.out(node, channel, row); };
  const auto there = [&](uint8_t *in, uint32_t row) { return in + p.rings.in(p.internode.node, channel, row); };
  SentRows now = from;
  while (now.count < end && now.tokens.any(p, epoch, node)) {
    const int first = now.tokens.token;
    uint32_t found = now.tokens.that_go_to(p, node);
    for (; found != 0 && now.count < end; found &= found - 1) {
      const int token = first + __ffs(static_cast<int>(found)) - 1;
      const InPhase phase(block == nullptr ? kPhaseStage : kPhasePut);
      send_row(p, node, token, block == nullptr ? staged(now.count) : there(block, now.count));
      now.tokens.token = token + 1;
      ++now.count;
    }
    if (found == 0) now.tokens.skip(first);
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

// ---- Readers --------------------------------------------------------------------------------------------------------

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

__device__ inline void pad_outputs(const InternodeDispatchParams &p, int worker, int workers) {
  if (p.d.num_worst_tokens > 0) pad_rows(p.d, worker, workers);
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

// Statistics: rows that this rank brings to ranks of its node, its own and those of partners.
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

// Streams of a channel begin at the token of its number: with fewer tokens than channels, some take none.
__device__ inline void reset_streams(RowStream *streams, int first, int step, int count, int channels) {
#pragma unroll 1
  for (int i = first; i < count; i += step)
    if (lane_id() == 0) streams[i] = {i % channels, 0, 0, 0};
  __syncwarp();
}

}  // namespace deepep::internode
