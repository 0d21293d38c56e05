// rings.h - normal mode among nodes: what is kept in device memory, and the rings of rows. Host and device.
//
// A rank's rows for a node cross once, to the rank of its own index there (its partner): into a ring of the partner's
// block, which all ranks of that node read. Rows of its own node go through such a ring in its own block. In combine a
// rank gives its rows to the rank of its node that has the index of the token's rank; that one adds up the node's rows,
// and its sum crosses. Tokens belong to channels: token % channels. Rows of one pair of ranks and channel keep their
// order, and are one stream.
#pragma once
#include "internode/layout.h"

namespace deepep {

// What a warp keeps of a stream between two looks. The last fields of both modes differ in meaning alone.
struct InternodeStream {
  int32_t at;                 // the next token or row to look at
  uint32_t count;             // rows sent, read, credited
  uint32_t closed, reserved;  // closed: nothing is left to do
};

// Device memory of one team, zeroed once. Arrays follow it: InternodeLists.
struct InternodeState {
  uint32_t rows_taken[2][DK_MAX_RANKS];  // dispatch: rows that came from each rank, by parity of the epoch
};
struct InternodeLists {
  InternodeStream *here, *there, *pairs;  // [N * C]: toward nodes; of nodes; [R * C]: of ranks
  InternodeStream *tokens;                // [C]: combine's sums
  uint32_t *local_rows;                   // [R * C]: combine: rows that sums of other nodes' tokens took of each ring
  uint32_t *token_rows;                   // [C * (P + N)]: likewise the sums of this rank's tokens
};
struct InternodeListSizes {
  uint64_t nodes, ranks, peers, bytes;
  __host__ __device__ InternodeListSizes(uint64_t num_nodes, uint64_t num_peers)
      : nodes(num_nodes * kInternodeChannels),
        ranks(num_nodes * num_peers * kInternodeChannels),
        peers((num_peers + num_nodes) * kInternodeChannels),
        bytes((2 * nodes + ranks + kInternodeChannels) * sizeof(InternodeStream) + 4 * (peers + ranks)) {}
};
__host__ __device__ inline InternodeLists internode_lists(InternodeState *state, const InternodeView &internode) {
  const InternodeListSizes size(internode.num_nodes, internode.num_peers);
  InternodeLists at{};
  at.here = reinterpret_cast<InternodeStream *>(state + 1);
  at.there = at.here + size.nodes;
  at.pairs = at.there + size.nodes;
  at.tokens = at.pairs + size.ranks;
  at.local_rows = reinterpret_cast<uint32_t *>(at.tokens + kInternodeChannels);
  at.token_rows = at.local_rows + size.ranks;
  return at;
}

// The rdma region: rings of rows that come, then places of rows that go, the same for each node and channel. In combine
// the nvl region has a ring for each rank of my node, each node and channel.
constexpr uint32_t kMaxSlots = 64, kMinSlots = 4;  // of a ring; with fewer there are fewer channels
struct InternodeRings {
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
inline InternodeRings internode_rings(const TeamView &team, const InternodeView &internode, uint64_t row_bytes,
                                      bool local) {
  InternodeRings at{};
  at.num_nodes = internode.num_nodes;
  at.rdma = team.rdma;
  at.nvl = team.nvl;
  at.half = team.rdma_bytes / 2 / 128 * 128;
  at.stride = static_cast<uint32_t>(align_up<uint64_t>(row_bytes, 128));
  const uint64_t remote_fit = at.half / internode.num_nodes / at.stride,
                 local_fit = local ? team.nvl_bytes / team.num_ranks / at.stride : remote_fit;
  const uint64_t fit = min(remote_fit, local_fit);
  at.channels = static_cast<uint32_t>(max<uint64_t>(1, min<uint64_t>(kInternodeChannels, fit / kMinSlots)));
  at.slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, remote_fit / at.channels));
  at.local_slots = static_cast<uint32_t>(min<uint64_t>(kMaxSlots, local_fit / at.channels));
  if (fit == 0) at.slots = 0;
  return at;
}

cudaError_t load_remote_normal_kernels();  // all of them, on the current device

}  // namespace deepep
