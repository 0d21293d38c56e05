// layout.h - libdeepep_nvshmem.so: what a rank's block holds besides what the CUDA library puts there, for teams whose
// ranks are on several nodes. Host and device.
//
// A rank reaches the ranks of its node by loads and stores, the others by NVSHMEM's puts, or by stores where all of
// them are reached over NVLink; either way the sender writes into the receiver's block, and a rank polls its own block
// alone. Blocks are symmetric: the sender of a put names the receiver's object by the address of the same object in its
// own block.
//   control region: control.cuh's | ControlOffsets | low latency's outbox       wire region: as on one node
// Words that a peer writes during a call are tagged (epoch << 32 | count), so no word is ever reset.
#pragma once
#include <vector>

#include "cuda/launch/host.h"
#include "internode/low_latency/team.h"

namespace deepep::internode {

// Streams of rows between two ranks; each keeps its order. A call has as many as its warps send one by one; see
// channels_for(). kFixedChannels: of a call whose ranks have different numbers of blocks.
constexpr int kMaxChannels = 256, kFixedChannels = 140;

// Offsets from the start of the block, for R ranks on N nodes of P ranks, with C = kMaxChannels. "Partner": the rank of
// another node that has the same index in its node as this rank in its own.
struct ControlOffsets {
  uint64_t arrived;  // uint64[2][R]: the epoch of each rank's newest message, by parity; the sender writes it
  uint64_t inbox;    // [2][R] messages: HandshakeMessage, then counts
  uint64_t outbox;   // [2][R] sources of messages to ranks of other nodes
  uint64_t heads;    // uint64[N][C]: rows that the partner has put into the ring of its node and channel; it writes
  uint64_t credits;  // uint64[N][C]: rows sent to the partner whose ring places it has released; it writes
  uint64_t pushed;   // uint64[P][N][C]: rows of, or for, a node that a rank of this node pushed here; it writes
  uint64_t taken;    // uint64[P][N][C]: rows pushed to a rank of this node that it has read; it writes
  uint64_t blank;    // 64 bytes without meaning, source and target of signal_remote()'s put
  uint64_t end;
  uint32_t message_bytes;
};
__host__ __device__ inline ControlOffsets control_offsets(uint64_t start, uint64_t num_ranks, uint64_t num_nvl_peers) {
  const uint64_t nodes = num_ranks / num_nvl_peers;
  ControlOffsets at{};
  at.message_bytes =
      align_up<uint32_t>(sizeof(HandshakeMessage) + counts_words(static_cast<uint32_t>(num_ranks)) * 4, 64);
  auto place = [end = start](uint64_t bytes) mutable {
    const uint64_t here = end;
    end += align_up<uint64_t>(bytes, 128);
    return here;
  };
  at.arrived = place(2 * num_ranks * 8);
  at.inbox = place(2 * num_ranks * at.message_bytes);
  at.outbox = place(2 * num_ranks * at.message_bytes);
  at.heads = place(nodes * kMaxChannels * 8);
  at.credits = place(nodes * kMaxChannels * 8);
  at.pushed = place(num_ranks * kMaxChannels * 8);
  at.taken = place(num_ranks * kMaxChannels * 8);
  at.blank = place(64);
  at.end = align_up<uint64_t>(place(0), 4096);
  return at;
}

// What kernels get besides the session: the team as nodes.
struct NodeView {
  ControlOffsets at;
  uint64_t low_latency_outbox;     // from the start of the block, kLowLatencyOutboxBytes
  int32_t num_nodes, node, index;  // of the team; this rank's node; this rank's index in it
  int32_t num_peers;               // ranks of a node
  int32_t num_queues;              // handles of queue pairs, where NVSHMEM has them
  const int *queues;               // device
  bool puts_are_stores;            // over NVLink, to every rank that puts go to
  uint8_t *const *blocks;          // device, [R]: those into which kernels store; null: puts go there

  __host__ __device__ int node_of(int rank) const { return rank / num_peers; }
  __host__ __device__ int index_of(int rank) const { return rank % num_peers; }
  __host__ __device__ bool is_local(int rank) const { return node_of(rank) == node; }
  __host__ __device__ int local_rank(int at_index) const { return node * num_peers + at_index; }
  __host__ __device__ int partner(int at_node) const { return at_node * num_peers + index; }
};

bool transport_reaches(uint64_t transport, int rank);          // transport.cu
bool transport_stores(uint64_t transport);                     // all its puts are stores over NVLink
uint8_t *transport_block(uint64_t transport, int rank);        // then: where a rank's block is mapped
const std::vector<int> &transport_queues(uint64_t transport);  // handles; none where NVSHMEM has no such thing

}  // namespace deepep::internode

namespace deepep {

namespace internode {
struct ShrinkView;  // shrink_layout.h
}
struct InternodeTeam {
  internode::NodeView view{};
  void *state = nullptr;       // device: internode::NormalState
  int *queues = nullptr;       // device
  uint8_t **blocks = nullptr;  // device
  internode::LowLatencyTeam *low_latency = nullptr;
  internode::ShrinkView *shrink = nullptr;  // null: normal mode does not shrink
};

}  // namespace deepep
