// rings.h - normal mode among nodes: what is kept in device memory, and the rings of rows. Host and device.
//
// A rank's rows for a node cross once, to the rank of its own index there (its partner): into a ring of the partner's
// block, which all ranks of that node read. Rows of its own node go through such a ring in its own block. In combine a
// rank gives its rows to the rank of its node that has the index of the token's rank; that one adds up the node's rows,
// and its sum crosses. Tokens belong to channels: token % channels. Rows of one pair of ranks and channel keep their
// order, and are one stream.
#pragma once
#include "internode/layout.h"

namespace deepep::internode {

// What a warp keeps of a stream between two looks. The last fields of both modes differ in meaning alone.
struct RowStream {
  int32_t at;                 // the next token or row to look at
  uint32_t count;             // rows sent, read, credited
  uint32_t closed, reserved;  // closed: nothing is left to do
};

// Device memory of one team, zeroed once. Arrays follow it: StreamLists.
struct NormalState {
  uint32_t rows_taken[2][DK_MAX_RANKS];  // dispatch: rows that came from each rank, by parity of the epoch
};
struct StreamLists {
  RowStream *here, *there, *pairs;  // [N * C]: toward nodes; of nodes; [R * C]: of ranks
  RowStream *tokens;                // [C]: combine's sums
  uint32_t *local_rows;             // [R * C]: combine: rows that sums of other nodes' tokens took of each ring
  uint32_t *token_rows;             // [C * (P + N)]: likewise the sums of this rank's tokens
};
struct StreamListSizes {
  uint64_t nodes, ranks, peers, bytes;
  __host__ __device__ StreamListSizes(uint64_t num_nodes, uint64_t num_peers)
      : nodes(num_nodes * kMaxChannels),
        ranks(num_nodes * num_peers * kMaxChannels),
        peers((num_peers + num_nodes) * kMaxChannels),
        bytes((2 * nodes + ranks + kMaxChannels) * sizeof(RowStream) + 4 * (peers + ranks)) {}
};
__host__ __device__ inline StreamLists stream_lists(NormalState *state, const NodeView &internode) {
  const StreamListSizes size(internode.num_nodes, internode.num_peers);
  StreamLists at{};
  at.here = reinterpret_cast<RowStream *>(state + 1);
  at.there = at.here + size.nodes;
  at.pairs = at.there + size.nodes;
  at.tokens = at.pairs + size.ranks;
  at.local_rows = reinterpret_cast<uint32_t *>(at.tokens + kMaxChannels);
  at.token_rows = at.local_rows + size.ranks;
  return at;
}

// The rdma region: rings of rows that come, then places of rows that go, the same for each node and channel. In combine
// the nvl region has a ring for each rank of my node, each node and channel.
constexpr uint32_t kMaxSlots = 64, kMinSlots = 4;  // of a ring; with fewer there are fewer channels
struct RowRings {
  uint64_t rdma, half, nvl;  // from the start of the block
  uint32_t stride, channels, slots, local_slots, num_nodes, reserved;

  __host__ __device__ uint64_t in(int node, int channel, uint32_t row) const {
    return rdma + ((static_cast<uint64_t>(node) * channels + channel) * slots + row % slots) * stride;
  }
  __host__ __device__ uint64_t out(int node, int channel, uint32_t row) const { return half + in(node, channel, row); }
  // Of the rank of an index in the ring's node, with rows for `node`.
  __host__ __device__ uint64_t local(int index, int node, int channel, uint32_t row) const {
    const uint64_t ring = (static_cast<uint64_t>(index) * num_nodes + node) * channels + channel;
    return nvl + (ring * local_slots + row % local_slots) * stride;
  }
};
// slots == 0: no row fits. local: with rings in the nvl region.
inline RowRings row_rings(const TeamView &team, const NodeView &internode, uint64_t row_bytes, bool local) {
  RowRings at{};
  at.num_nodes = internode.num_nodes;
  at.rdma = team.rdma;
  at.nvl = team.nvl;
  at.half = team.rdma_bytes / 2 / 128 * 128;
  at.stride = static_cast<uint32_t>(align_up<uint64_t>(row_bytes, 128));
  const uint64_t rdma_rows = at.half / internode.num_nodes / at.stride,
                 nvl_rows = local ? team.nvl_bytes / team.num_ranks / at.stride : rdma_rows;
  const uint64_t fit = min(rdma_rows, nvl_rows);
  at.channels = static_cast<uint32_t>(max<uint64_t>(1, min<uint64_t>(kMaxChannels, fit / kMinSlots)));
  at.slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, rdma_rows / at.channels));
  at.local_slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, nvl_rows / at.channels));
  if (fit == 0) at.slots = 0;
  return at;
}

cudaError_t load_normal_kernels();  // all of them, on the current device

}  // namespace deepep::internode
