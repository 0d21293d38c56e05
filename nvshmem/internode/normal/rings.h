// rings.h - libdeepep_nvshmem.so, normal mode across nodes: rings of rows, and what is kept in device memory. Host and
// device.
//
// A rank sends its rows for a node once, to its partner there: into a ring in the partner's block. The partner pushes
// them to their places in its node, or into rings of its ranks. In combine a rank pushes its rows to the rank of its
// node that has the same index as the token's rank (the collector); that one sums the node's rows and sends the sum to
// the token's rank. Tokens belong to channels: token % channels. The rows of a pair of ranks and a channel are a
// stream, which keeps its order.
#pragma once
#include "internode/layout.h"

namespace deepep::internode {

// What a warp keeps of a stream between two of its turns.
struct RowStream {
  int32_t at;               // the next token or row
  uint32_t count;           // rows sent, read or credited so far
  uint32_t closed, opened;  // nothing is left to do; what is done once has been done, or TokenRange::end
};

// Device memory of one team, zeroed once. The arrays of StreamLists follow it.
struct NormalState {
  // Dispatch, by parity of the epoch: rows received from each rank; of a partner whose rows this rank pushes on, all
  // that are in their places.
  uint32_t rows_taken[2][DK_MAX_RANKS];
  // Likewise, by node: of the tokens that streams share, those that one of them has taken (TokenRange).
  uint32_t tokens_taken[2][DK_MAX_RANKS];
};
struct StreamLists {
  RowStream *to_nodes, *from_nodes, *by_rank;  // [N * C], [N * C], [R * C]
  RowStream *tokens;                           // [C]: combine's sums of this rank's tokens
  uint64_t *pushes;                            // [1 + R * C]: combine: the pushers' TurnQueue
  uint32_t *node_rows_taken;                   // [R * C]: combine: rows that sums for other nodes took of each ring
  uint32_t *words_pushed;                      // [R * C]: dispatch, there: rows whose words are in each ring
  uint32_t *token_rows_taken;                  // [C * (P + N)]: combine: likewise sums of this rank's tokens
};
struct StreamListSizes {
  uint64_t nodes, ranks, peers, bytes;
  __host__ __device__ StreamListSizes(uint64_t num_nodes, uint64_t num_peers)
      : nodes(num_nodes * kMaxChannels),
        ranks(num_nodes * num_peers * kMaxChannels),
        peers((num_peers + num_nodes) * kMaxChannels),
        bytes((2 * nodes + ranks + kMaxChannels) * sizeof(RowStream) + 8 * (1 + ranks) + 4 * (peers + ranks)) {}
};
__host__ __device__ inline StreamLists stream_lists(NormalState *state, const NodeView &internode) {
  const StreamListSizes size(internode.num_nodes, internode.num_peers);
  StreamLists at{};
  at.to_nodes = reinterpret_cast<RowStream *>(state + 1);
  at.from_nodes = at.to_nodes + size.nodes;
  at.by_rank = at.from_nodes + size.nodes;
  at.tokens = at.by_rank + size.ranks;
  at.pushes = reinterpret_cast<uint64_t *>(at.tokens + kMaxChannels);
  at.node_rows_taken = at.words_pushed = reinterpret_cast<uint32_t *>(at.pushes + 1 + size.ranks);
  at.token_rows_taken = at.node_rows_taken + size.ranks;
  return at;
}

// The rdma region: a ring of received rows for each node and channel, then as many rings of staged rows. In combine the
// nvl region has a ring for each rank of this node, each node and channel.
constexpr uint32_t kMaxSlots = 64;  // of a ring
// Of a put: enough to pay for its fences, no more than a warp stages while others send.
constexpr uint32_t kPieceBytes = 48 * 1024, kLeastPieceBytes = 36 * 1024, kMaxPieceRows = 8;
struct RowRings {
  uint64_t rdma, half, nvl;  // of received rows and of the nvl region, from the start of the block; to staged rows
  uint32_t stride, channels, slots, local_slots, num_nodes, piece;  // piece: rows of a put

  __host__ __device__ uint64_t in(int node, int channel, uint32_t row) const {
    return rdma + ((static_cast<uint64_t>(node) * channels + channel) * slots + row % slots) * stride;
  }
  __host__ __device__ uint64_t out(int node, int channel, uint32_t row) const { return half + in(node, channel, row); }
  // In a collector's block: the ring of its node's rank with this index, with rows for `node`.
  __host__ __device__ uint64_t local(int index, int node, int channel, uint32_t row) const {
    const uint64_t ring = (static_cast<uint64_t>(index) * num_nodes + node) * channels + channel;
    return nvl + (ring * local_slots + row % local_slots) * stride;
  }
};
// Of a dispatch that pushes rows: the nvl region has a ring of their words, which a row's ring has after its payload,
// and of their payloads where these do not go to their places, for each rank of this node that pushes, each node and
// channel.
struct WordRings {
  uint64_t nvl;                                 // from the start of the block
  uint32_t stride, slots, channels, num_nodes;  // slots 0: no room

  __host__ __device__ uint64_t at(int index, int node, int channel, uint32_t row) const {
    const uint64_t ring = (static_cast<uint64_t>(index) * num_nodes + node) * channels + channel;
    return nvl + (ring * slots + row % slots) * stride;
  }
};
inline WordRings word_rings(const TeamView &team, const RowRings &rows, uint32_t bytes) {
  WordRings at{team.nvl, align_up(bytes, 16u), 0, rows.channels, rows.num_nodes};
  at.slots =
      static_cast<uint32_t>(min<uint64_t>(kMaxSlots, team.nvl_bytes / team.num_ranks / rows.channels / at.stride));
  return at;
}
inline uint32_t piece_rows(uint32_t bytes, uint32_t stride) { return min(kMaxPieceRows, bytes / stride + 1); }
inline uint32_t piece_of(const RowRings &at) {  // two fit into a ring
  return min(piece_rows(kPieceBytes, at.stride), max(1u, at.slots / 2));
}
// How many rows the next piece may have, after so many rows, of which so many are read: its places are neighbours.
__host__ __device__ inline uint32_t piece_room(const RowRings &at, uint32_t rows, uint32_t read) {
  return min(min(at.piece, at.slots - rows % at.slots), at.slots - (rows - read));
}
// Channels of a call with so many blocks, of which each has `senders` warps: these send a stream each, or two or three,
// where nodes are many and channels would be few.
inline int channels_for(const NodeView &internode, int blocks, int senders) {
  constexpr int kFewest = 60;
  const int warps = blocks * senders, others = max(1, internode.num_nodes - 1),
            streams = (kFewest * others + warps - 1) / warps;
  return min(kMaxChannels, warps * streams / others);
}
// At most `most` channels. local: with rings of rows in the nvl region too. slots is 0 if a region is too small for a
// row.
inline RowRings row_rings(const TeamView &team, const NodeView &internode, uint64_t row_bytes, int most, bool local) {
  RowRings at{};
  at.num_nodes = internode.num_nodes;
  at.rdma = team.rdma;
  at.nvl = team.nvl;
  at.half = team.rdma_bytes / 2 / 128 * 128;
  at.stride = static_cast<uint32_t>(align_up<uint64_t>(row_bytes, 128));
  const uint64_t rdma_rows = at.half / internode.num_nodes / at.stride,
                 nvl_rows = local ? team.nvl_bytes / team.num_ranks / at.stride : rdma_rows;
  const uint64_t fit = min(rdma_rows, nvl_rows);
  // A ring has room for two pieces, one on its way while the other is read, or there are fewer channels.
  const uint32_t least = 2 * piece_rows(kLeastPieceBytes, at.stride);
  at.channels = static_cast<uint32_t>(max<uint64_t>(1, min<uint64_t>(most, fit / least)));
  at.slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, rdma_rows / at.channels));
  at.piece = piece_of(at);
  if (at.slots > at.piece) at.slots -= at.slots % at.piece;  // or a piece ends where the ring does
  at.local_slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, nvl_rows / at.channels));
  if (fit == 0) at.slots = 0;
  return at;
}

cudaError_t load_normal_kernels();             // all of them, on the current device
cudaError_t prepare_normal(const Team *team);  // on the current device: what their launches rely on

}  // namespace deepep::internode
