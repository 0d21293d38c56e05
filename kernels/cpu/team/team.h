// A team: the ranks of one buffer as one of them sees them, and where the parts of their blocks lie.
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

// What this rank remembers of its link to a node during a call.
struct LinkState {
  int64_t sent, done;  // records put; of them, from the first on, those whose source is free again
  int64_t offered;     // dispatch: staged rows that were looked at; combine: records that are filled
  int64_t seen, consumed,
      credited;                    // records that came from there; of them, those that were used up, and are given back
  uint64_t posted[kMaxLinkSlots];  // by place: Nic::posted() after the put
  int64_t source[kMaxLinkSlots];   // by place: the sender's own number for where the record lay
};

constexpr int kScratch = 8;

struct Team {
  Device *const device;
  const int32_t rank, num_ranks, num_nvl_peers;
  const uint32_t flags;
  const uint64_t rdma_bytes;
  const WireRegion wire;
  dk_status *const status;
  dk_stats_page *const stats;
  Nic *const nic;                                       // null: no rank is beyond loads and stores
  pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;  // one operation at a time
  std::atomic<uint32_t> failed{0};                      // 1: an operation has taken the right to write status->failure
  OwnedArray<Peer> peers;
  OwnedArray<int64_t> scratch;     // kScratch numbers for each rank, for the operation that is running
  OwnedArray<uint64_t> doorbells;  // bit by rank: to be rung
  OwnedArray<LinkState> links;     // by node; null: every rank is local

  // Null: no memory. The blocks are mapped and zeroed: only this rank's own memory of its peers is to be made.
  static Owned<Team> make(const dk_team_create_params &p);
  explicit Team(const dk_team_create_params &p);
  ~Team();

  Control &control() { return peers[rank].control; }
  RemoteControl &remote() { return peers[rank].remote; }
  // Whether the rank's block is mapped. If not, only `nic` reaches it, and nothing of peers[rank] may be touched.
  bool is_local(int peer) const { return peers[peer].wire != 0; }
  bool spans_nodes() const { return links != nullptr; }
  int node(int peer) const { return peer / num_nvl_peers; }
  int index(int peer) const { return peer % num_nvl_peers; }
  int num_nodes() const { return (num_ranks + num_nvl_peers - 1) / num_nvl_peers; }
  int my_node() const { return node(rank); }
  int first_local() const { return my_node() * num_nvl_peers; }  // if it spans nodes: the first rank of mine
  int partner(int in_node) const { return in_node * num_nvl_peers + index(rank); }  // the rank of my index there
  // The rank of my node that rows from or to that rank come through: the one of its index; itself if it is local.
  int forwarder(int peer) const { return is_local(peer) ? peer : first_local() + index(peer); }
  FailureRecord &failure_record_of(int peer) {
    return is_local(peer) ? peers[peer].control.failure_record() : remote().failure_record_from(peer);
  }
  bool shrinks() const { return flags & DK_TEAM_SHRINK; }
  bool masked(int peer) { return control().peer_state(peer).masked != 0; }
  int64_t *numbers(int which) { return scratch.get() + which * num_ranks; }
};

}  // namespace dk
