// dispatch.cuh - libdeepep_nvshmem.so: rows to ranks of other nodes and of this one. Senders fill rings, readers copy
// rows out of them, relays report to the sender what all readers of a ring have read. Each warp serves its share of
// streams.
#pragma once
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/common.cuh"
#include "internode/normal/rings.h"

namespace deepep::internode {

struct InternodeDispatchParams {
  DispatchParams d;
  NodeView internode;
  RowRings rings;
  StreamLists lists;
  NormalState *state;
};

struct DispatchRoles {
  static constexpr int kSenders = 4, kRelays = 1, kReaders = 7;
  static constexpr int kWarps = kSenders + kRelays + kReaders, kThreads = kWarps * kWarp;
};
constexpr int kRowsAtOnce = 4;  // of a stream in one turn of a warp

// Words after a row's payload: the token; for each rank of the node the row's number among this sender's rows for it,
// or -1; weights, experts, scales.
struct RowWords {
  int numbers, weights, experts, scales, end;
  __host__ __device__ RowWords(const DispatchParams &d, int num_peers)
      : numbers(1),
        weights(numbers + num_peers),
        experts(weights + d.num_topk),
        scales(experts + d.num_topk),
        end(scales + d.num_scales) {}
};

__device__ inline int rows_between(const DispatchParams &d, int source, int reader) {
  const int num_ranks = d.session.team.num_ranks;
  return d.rank_prefix_matrix()[source * num_ranks + reader] -
         rows_before(d.rank_prefix_matrix(), num_ranks, source, reader);
}

// ---- Senders: a stream is a channel's rows for a node ---------------------------------------------------------------

// The first of the channel's tokens from `token` on that goes to the node; num_tokens or more: none.
__device__ inline int next_token_for(const InternodeDispatchParams &p, int node, int token) {
  const int num_ranks = p.d.session.team.num_ranks, step = static_cast<int>(p.rings.channels);
  for (; token < p.d.num_tokens; token += kWarp * step) {
    const int mine = token + lane_id() * step;
    bool goes = false;
    const int32_t *heads = p.d.send_head() + static_cast<int64_t>(mine) * num_ranks + node * p.internode.num_peers;
    for (int i = 0; mine < p.d.num_tokens && !goes && i < p.internode.num_peers; ++i) goes = heads[i] >= 0;
    const uint32_t found = __ballot_sync(kAllLanes, goes);
    if (found != 0) return token + (__ffs(static_cast<int>(found)) - 1) * step;
  }
  return token;
}

__device__ inline void fill_row(const InternodeDispatchParams &p, int node, int token, uint8_t *row) {
  const DispatchParams &d = p.d;
  const RowWords at(d, p.internode.num_peers);
  copy_row(row, d.x() + static_cast<uint64_t>(token) * d.row_bytes, d.row_bytes);
  auto *words = reinterpret_cast<uint32_t *>(row + d.row_bytes);
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(token);
  const int32_t *heads =
      d.send_head() + static_cast<int64_t>(token) * d.session.team.num_ranks + node * p.internode.num_peers;
  for (int i = lane_id(); i < p.internode.num_peers; i += kWarp)
    words[at.numbers + i] = static_cast<uint32_t>(heads[i]);
  for (int k = lane_id(); k < d.num_topk; k += kWarp) {
    const int64_t entry = static_cast<int64_t>(token) * d.num_topk + k,
                  expert = load_index(d.topk_idx(), entry, d.index_bytes);
    if (expert < -1 || expert >= d.num_experts)  // it counts as -1
      report_refusal(d.session, kNoted, DK_EINVAL, d.session.team.rank, DK_FIELD_TOPK_IDX, d.num_experts, expert);
    words[at.weights + k] = d.topk_weights() == nullptr ? 0 : d.topk_weights()[entry];
    words[at.experts + k] = expert >= 0 && expert < d.num_experts ? static_cast<uint32_t>(expert) : 0xffffffffu;
  }
  for (int i = lane_id(); i < d.num_scales; i += kWarp)
    words[at.scales + i] = d.scales()[token * d.scale_token_stride + i * d.scale_stride];
}

__device__ inline void send_row(const InternodeDispatchParams &p, uint64_t epoch, int node, int channel, int token,
                                uint32_t number) {
  const TeamView &team = p.d.session.team;
  const bool is_local = node == p.internode.node;
  uint8_t *row = team.self + (is_local ? p.rings.in(node, channel, number) : p.rings.out(node, channel, number));
  fill_row(p, node, token, row);
  uint64_t *head =
      word_at(team.self, p.internode.at.heads, p.internode.node * kMaxChannels + channel);  // in either block
  const uint32_t bytes = align_up(p.d.row_bytes + 4u * RowWords(p.d, p.internode.num_peers).end, 16u);
  if (is_local)
    write_count(head, epoch, number + 1);
  else
    put_remote(p.internode, p.internode.partner(node), team.self + p.rings.in(p.internode.node, channel, number), row,
               bytes, head, tagged(epoch, number + 1));
}

// Of the readers of a ring in this rank's block: the one that has read least.
struct SlowestReader {
  uint32_t rows;
  int index;
};
__device__ inline SlowestReader slowest_reader(const InternodeDispatchParams &p, uint64_t epoch, int node,
                                               int channel) {
  uint32_t rows = kAllRows;
  int index = 0;
  for (int i = lane_id(); i < p.internode.num_peers; i += kWarp) {
    const uint64_t *tail = word_at(p.d.session.team.self, p.internode.at.tails,
                                   (static_cast<int64_t>(node) * kMaxChannels + channel) * p.internode.num_peers + i);
    const uint32_t here = count_in(ptx::ld_acquire_sys(tail), epoch);
    if (here < rows) {
      rows = here;
      index = i;
    }
  }
  const uint32_t fewest = __reduce_min_sync(kAllLanes, rows);
  const int lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, rows == fewest))) - 1;
  __syncwarp();
  return {fewest, __shfl_sync(kAllLanes, index, lane)};
}

__device__ inline Outcome serve_sender(const InternodeDispatchParams &p, uint64_t epoch, int stream,
                                       BlockedStream &blocked) {
  const int node = stream % p.internode.num_nodes, channel = stream / p.internode.num_nodes;
  RowStream *state = p.lists.to_nodes + stream;
  if (state->closed != 0) return kDone;
  int token = state->at;
  const uint32_t before = state->count;
  const uint32_t credit =
      read_count(word_at(p.d.session.team.self, p.internode.at.credits, node * kMaxChannels + channel), epoch);
  uint32_t sent = before;
  for (; credit != kAllRows && sent < before + kRowsAtOnce && sent - credit < p.rings.slots; ++sent) {
    token = next_token_for(p, node, token);
    if (token >= p.d.num_tokens) break;
    send_row(p, epoch, node, channel, token, sent);
    token += static_cast<int>(p.rings.channels);
  }
  __syncwarp();
  if (lane_id() == 0) {
    state->at = token;
    state->count = sent;
    state->closed = credit == kAllRows;
    if (credit == kAllRows && node != p.internode.node)
      atomicAdd(
          reinterpret_cast<unsigned long long *>(&p.d.session.team.scratch->sent_bytes[p.internode.partner(node)]),
          static_cast<unsigned long long>(sent) * (p.d.row_bytes + 4ull * p.d.num_scales));
  }
  __syncwarp();
  if (credit == kAllRows) return kDone;
  if (sent != before) return kMoved;
  blocked = {p.internode.partner(node), static_cast<int64_t>(sent) + 1, credit};
  if (node == p.internode.node) blocked.peer = p.internode.local_rank(slowest_reader(p, epoch, node, channel).index);
  return kBlocked;
}

// ---- Relays: credits for a ring in this rank's block, to the rank that fills it -------------------------------------

__device__ inline Outcome serve_relay(const InternodeDispatchParams &p, uint64_t epoch, int stream,
                                      BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int node = stream % p.internode.num_nodes, channel = stream / p.internode.num_nodes;
  RowStream *state = p.lists.from_nodes + stream;
  if (state->closed != 0) return kDone;
  const SlowestReader slowest = slowest_reader(p, epoch, node, channel);
  const bool all = slowest.rows == kAllRows;
  if (all || slowest.rows - state->count >= max(1u, p.rings.slots / 4)) {
    uint64_t *credit =
        word_at(team.self, p.internode.at.credits, p.internode.node * kMaxChannels + channel);  // in either block
    if (node == p.internode.node)
      write_count(credit, epoch, slowest.rows);
    else
      signal_remote(p.internode, team, p.internode.partner(node), credit, tagged(epoch, slowest.rows));
    __syncwarp();
    if (lane_id() == 0) {
      state->count = slowest.rows;
      state->closed = all;
    }
    __syncwarp();
    return all ? kDone : kMoved;
  }
  const uint32_t here = read_count(word_at(team.self, p.internode.at.heads, node * kMaxChannels + channel), epoch);
  if (slowest.rows < here)
    blocked = {p.internode.local_rank(slowest.index), here, slowest.rows};
  else
    blocked = {p.internode.partner(node), static_cast<int64_t>(here) + 1, here};
  return kBlocked;
}

// ---- Readers: a stream is a channel's rows from a source to this rank -----------------------------------------------

__device__ inline void take_row(const InternodeDispatchParams &p, const uint8_t *from, int64_t row) {
  const DispatchParams &d = p.d;
  const RowWords at(d, p.internode.num_peers);
  copy_row(d.recv_x() + row * d.row_bytes, from, d.row_bytes);
  const auto *words = reinterpret_cast<const uint32_t *>(from + d.row_bytes);
  if (lane_id() == 0 && d.recv_src_idx() != nullptr)
    d.recv_src_idx()[row] = static_cast<int32_t>(ptx::ld_relaxed_sys(words));
  const int num_local = d.num_experts / d.session.team.num_ranks;
  for (int k = lane_id(); k < d.num_topk; k += kWarp) {
    const int expert = static_cast<int>(ptx::ld_relaxed_sys(words + at.experts + k)),
              mine = expert - d.session.team.rank * num_local;
    const bool local = expert >= 0 && mine >= 0 && mine < num_local;
    const int64_t entry = row * d.num_topk + k;
    if (d.recv_topk_weights() != nullptr)
      d.recv_topk_weights()[entry] = local ? ptx::ld_relaxed_sys(words + at.weights + k) : 0;
    if (d.recv_topk_idx() == nullptr) continue;
    if (d.index_bytes == 8)
      static_cast<int64_t *>(d.recv_topk_idx())[entry] = local ? mine : -1;
    else
      static_cast<int32_t *>(d.recv_topk_idx())[entry] = local ? mine : -1;
  }
  for (int i = lane_id(); d.recv_scales() != nullptr && i < d.num_scales; i += kWarp)
    d.recv_scales()[row * d.num_scales + i] = ptx::ld_relaxed_sys(words + at.scales + i);
}

// Copies those of rows [first, first + rows) of a ring that are for this rank to their places. Returns how many; -1: a
// row's number is out of range.
__device__ inline int take_rows(const InternodeDispatchParams &p, const uint8_t *block, int source, int channel,
                                uint32_t first, uint32_t rows) {
  const TeamView &team = p.d.session.team;
  const int node = p.internode.node_of(source), expected = rows_between(p.d, source, team.rank);
  const int64_t before = rows_before(p.d.rank_prefix_matrix(), team.num_ranks, source, team.rank);
  int number = -1;
  if (static_cast<uint32_t>(lane_id()) < rows) {
    const uint8_t *row = block + p.rings.in(node, channel, first + lane_id());
    number = static_cast<int>(
        ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(row + p.d.row_bytes) + 1 + p.internode.index));
  }
  if (__any_sync(kAllLanes, number >= expected)) {
    const int wrong = __reduce_max_sync(kAllLanes, number);
    if (lane_id() == 0) report_failure(p.d.session, DK_EINVAL, source, DK_FIELD_SEND_HEAD, expected - 1, wrong, 0);
    __syncwarp();
    return -1;
  }
  const uint32_t mine = __ballot_sync(kAllLanes, number >= 0);
  for (uint32_t left = mine; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    take_row(p, block + p.rings.in(node, channel, first + lane), before + __shfl_sync(kAllLanes, number, lane));
  }
  return __popc(mine);
}

__device__ inline Outcome serve_reader(const InternodeDispatchParams &p, uint64_t epoch, int stream,
                                       BlockedStream &blocked) {
  const TeamView &team = p.d.session.team;
  const int source = (stream + team.rank) % team.num_ranks, channel = stream / team.num_ranks,
            node = p.internode.node_of(source);
  RowStream *state = p.lists.by_rank + stream;
  if (state->closed != 0) return kDone;
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
  const uint32_t rows = so_far < expected ? min<uint32_t>(here - read, 2 * kRowsAtOnce) : 0;
  if (rows > 0) {
    const int mine = take_rows(p, block, source, channel, read, rows);
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
    for (int node = 0; node < p.internode.num_nodes; ++node)
      if (node != p.internode.node && reader != team.rank) rows += rows_between(p.d, p.internode.partner(node), reader);
    team.scratch->sent_bytes[reader] = rows * (p.d.row_bytes + 4ull * p.d.num_scales);
  }
}

__device__ inline void reset_streams(RowStream *streams, int first, int step, int count, int per_channel,
                                     bool at_channel) {
  for (int i = first; i < count; i += step)
    if (lane_id() == 0) streams[i] = {at_channel ? i / per_channel : 0, 0, 0, 0};
  __syncwarp();
}

__device__ inline void run_dispatch_roles(const InternodeDispatchParams &p, uint64_t epoch) {
  using Roles = DispatchRoles;
  const Session &s = p.d.session;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int to_nodes = p.internode.num_nodes * static_cast<int>(p.rings.channels),
            of_ranks = s.team.num_ranks * static_cast<int>(p.rings.channels);
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks;
    reset_streams(p.lists.to_nodes, first, step, to_nodes, p.internode.num_nodes, true);
    serve_streams(s, first, step, to_nodes,
                  [&](int stream, BlockedStream &blocked) { return serve_sender(p, epoch, stream, blocked); });
  } else if (warp < Roles::kSenders + Roles::kRelays) {
    const int first = (warp - Roles::kSenders) * blocks + block, step = Roles::kRelays * blocks;
    reset_streams(p.lists.from_nodes, first, step, to_nodes, p.internode.num_nodes, false);
    serve_streams(s, first, step, to_nodes,
                  [&](int stream, BlockedStream &blocked) { return serve_relay(p, epoch, stream, blocked); });
  } else {
    const int first = (warp - Roles::kSenders - Roles::kRelays) * blocks + block, step = Roles::kReaders * blocks;
    reset_streams(p.lists.by_rank, first, step, of_ranks, s.team.num_ranks, false);
    serve_streams(s, first, step, of_ranks,
                  [&](int stream, BlockedStream &blocked) { return serve_reader(p, epoch, stream, blocked); });
    if (p.d.num_worst_tokens > 0) pad_rows(p.d, first, step);
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(DispatchRoles::kThreads, 1)
    dispatch_with_notify(const __grid_constant__ InternodeDispatchParams p) {
  const Session &s = p.d.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand =
        dispatch_handshake(p.d, epoch, load_matrix_entry(p.d.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x),
                           load_wrong_counts(p.d));  // with `segment`, which kernels across nodes do not use
    if (blockIdx.x == 0) post_messages(s, p.internode, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_messages(s, p.internode, hand) && has_room_everywhere(p, epoch)) {
      if (blockIdx.x == 0) count_bytes_in_node(p);
      run_dispatch_roles(p, epoch);
    }
  }
  finish(s, [&](bool failed) {
    if (failed) clear_dispatch_outputs(p.d);
    for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) p.state->rows_taken[epoch % 2][r] = 0;
    if (threadIdx.x == 0) {
      s.team.scratch->epoch = epoch;
      clear_wrong_counts(p.d);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
