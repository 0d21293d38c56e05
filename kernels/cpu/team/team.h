// A team: the ranks of one buffer as one of them sees them.
#pragma once
#include <pthread.h>

#include "cpu/rdma/rdma.h"
#include "cpu/runtime/device.h"
#include "cpu/runtime/heap.h"
#include "cpu/team/control.h"
#include "cpu/team/remote.h"
#include "cpu/team/wire.h"

namespace dk {

// Where the parts of a rank's block are mapped; wire is 0 where it is not mapped.
struct Peer {
  Control control{0, 1};
  RemoteControl remote{0, 1, 1};
  uint64_t wire = 0, rdma = 0;
};

constexpr uint64_t kMaxLinkSlots = 1024;

// This rank's side of its link to a node during a call. Records are counted from the first one of the call.
struct LinkState {
  int64_t sent, done;  // records that were put; of them, those whose source is free again
  int64_t offered;     // dispatch: staged rows that were examined; combine: records that were filled
  // Records that have arrived from the node; of them, those that were used, and those that were credited.
  int64_t seen, consumed, credited;
  uint64_t posted[kMaxLinkSlots];  // by slot: Nic::posted() after the put
  int64_t source[kMaxLinkSlots];   // by slot: the sender's number of the row that the record was put from
};

// What this rank has put to a remote rank of what that rank cannot load here (wait.h: tell).
struct Told {
  uint64_t generation, lifts, notice, notice_wanted;
};

constexpr int kScratch = 10;

struct Team {
  Device *const device;
  const int32_t rank, num_ranks, num_nvl_peers;
  const int32_t node_size;  // of a node as links count them: num_nvl_peers, or 1
  const uint32_t flags;
  const uint64_t rdma_bytes;
  const WireRegion wire;
  dk_status *const status;
  dk_stats_page *const stats;
  Nic *nic;                                             // null: no rank is beyond loads and stores
  pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;  // one operation at a time
  std::atomic<uint32_t> failed{0};                      // 1: an operation has taken the right to write status->failure
  std::atomic<bool> released{false};                    // the blocks are gone: operations leave at once
  OwnedArray<Peer> peers;
  OwnedArray<int64_t> scratch;     // kScratch numbers for each rank, for the operation that is running
  OwnedArray<int32_t> experts;     // two numbers for each local expert, likewise
  OwnedArray<int32_t> matrix;      // the rank_prefix_matrix of the running operation, where no caller can change it
  OwnedArray<Arrival> arrivals;    // by rank: messages of the low-latency call that is being received
  OwnedArray<uint64_t> doorbells;  // bit by rank: to be rung
  OwnedArray<LinkState> links;     // by node; null: every rank is local
  OwnedArray<Told> told;           // by rank, likewise

  // Null: no memory. The engine has mapped and zeroed the blocks; only process-local state is allocated.
  static Owned<Team> make(const dk_team_create_params &p);
  explicit Team(const dk_team_create_params &p);
  ~Team();
  // What the last operation has left in process-local state is forgotten, and `transport` takes the place of the nic.
  void start_anew(Nic *transport);

  Control &control() { return peers[rank].control; }
  RemoteControl &remote() { return peers[rank].remote; }
  // Whether the rank's block is mapped. If not, only `nic` reaches it, and peers[rank] must not be used.
  bool is_local(int peer) const { return peers[peer].wire != 0; }
  bool spans_nodes() const { return links != nullptr; }
  // Nodes as links count them. In a team that shrinks rows between nodes go straight from rank to rank, so that a rank
  // that is lost takes no rows of others with it: there each rank is a node of its own, and its own forwarder.
  int node(int peer) const { return peer / node_size; }
  int index(int peer) const { return peer % node_size; }
  int num_nodes() const { return (num_ranks + node_size - 1) / node_size; }
  int my_node() const { return node(rank); }
  int first_local() const { return my_node() * node_size; }  // first rank of my node, if the team spans nodes
  int partner(int in_node) const { return in_node * node_size + index(rank); }  // the rank of my index on that node
  bool has_link(int to_node) const { return !is_local(partner(to_node)); }
  // The rank of my node that forwards rows from and to `peer`: the one of the same index; `peer` itself if it is local.
  int forwarder(int peer) const { return is_local(peer) ? peer : first_local() + index(peer); }
  FailureRecord &failure_record_of(int peer) {
    return is_local(peer) ? peers[peer].control.failure_record() : remote().failure_record_from(peer);
  }
  bool shrinks() const { return flags & DK_TEAM_SHRINK; }
  bool masked(int peer) { return control().peer_state(peer).masked != 0; }
  int64_t *numbers(int which) { return scratch.get() + which * num_ranks; }
  int32_t *expert_rows() { return experts.get(); }
};

}  // namespace dk
