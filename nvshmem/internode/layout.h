// layout.h - teams whose ranks are several nodes: what lies where in a block besides what one node needs. Host and
// device.
//
// A rank reaches those of its node by loads and stores, the others by NVSHMEM's puts. Whatever a rank is told, by
// either, lies in its own block. A peer's object is named by the address of the same object in the own block.
//   control | control of one node | InternodeControl | low latency's        wire | of one node | low latency's
// Words that a peer writes during a call are tagged: (epoch << 32 | count), so nothing is ever reset.
#pragma once
#include <vector>

#include "cuda/launch/host.h"
#include "internode/low_latency/team.h"

namespace deepep {

constexpr int kInternodeChannels = 32;  // at most: rows of a pair of ranks travel on so many streams, each in order

// From the start of the block. R ranks, N nodes of P ranks, C = kInternodeChannels.
struct InternodeControl {
  uint64_t arrived;  // uint64[2][R]: the epoch of each rank's newest message, by its parity
  uint64_t inbox;    // [2][R] messages: HandshakeMessage, then counts
  uint64_t outbox;   // [2][R] sources of messages to ranks of other nodes
  uint64_t
      heads;  // uint64[N][C]: rows that came into the ring of a node and channel. Written by the rank of my index there
  uint64_t credits;  // uint64[N][C]: rows of mine that the rank of my index there needs no more. Written by it
  uint64_t tails;    // uint64[N][C][P]: dispatch: rows of the ring that a rank of my node has read. Written by it
  uint64_t pushed;   // uint64[P][N][C]: combine: rows that a rank of my node pushed here for a node. Written by it
  uint64_t taken;  // uint64[P][N][C]: combine: rows that I pushed to a rank of my node and that it took. Written by it
  uint64_t blank;  // 64 bytes that puts may overwrite: see signal_remote()
  uint64_t end;
  uint32_t message_bytes;
};
__host__ __device__ inline InternodeControl internode_control(uint64_t start, uint64_t num_ranks,
                                                              uint64_t num_nvl_peers) {
  const uint64_t nodes = num_ranks / num_nvl_peers;
  InternodeControl at{};
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
  at.heads = place(nodes * kInternodeChannels * 8);
  at.credits = place(nodes * kInternodeChannels * 8);
  at.tails = place(num_ranks * kInternodeChannels * 8);
  at.pushed = place(num_ranks * kInternodeChannels * 8);
  at.taken = place(num_ranks * kInternodeChannels * 8);
  at.blank = place(64);
  at.end = align_up<uint64_t>(place(0), 4096);
  return at;
}

// What kernels are told besides the session. Device memory of `state` is this rank's own, zeroed once.
struct InternodeView {
  InternodeControl at;
  uint64_t ll_control, ll_wire, ll_wire_bytes;  // low latency's parts, from the start of the block
  int32_t num_nodes, node, index;               // nodes; mine; my index in it
  int32_t num_peers;                            // ranks of a node
  int32_t num_queues;                           // handles of queue pairs, where NVSHMEM has them
  const int *queues;                            // device

  __host__ __device__ int node_of(int rank) const { return rank / num_peers; }
  __host__ __device__ int index_of(int rank) const { return rank % num_peers; }
  __host__ __device__ bool is_local(int rank) const { return node_of(rank) == node; }
  __host__ __device__ int local_rank(int at_index) const { return node * num_peers + at_index; }
  __host__ __device__ int partner(int at_node) const {
    return at_node * num_peers + index;
  }  // the rank of my index there
};

struct InternodeTeam {
  InternodeView view{};
  void *state = nullptr;  // device: InternodeState of normal mode
  int *queues = nullptr;  // device
  InternodeLowLatency *ll = nullptr;
};

bool transport_reaches(uint64_t transport, int rank);          // transport.cu
const std::vector<int> &transport_queues(uint64_t transport);  // handles; none where NVSHMEM has no such thing

}  // namespace deepep
