// A team: the ranks of one buffer as one of them sees them, and where the parts of their blocks lie.
#pragma once
#include <pthread.h>

#include "cpu/rdma/rdma.h"
#include "cpu/runtime/device.h"
#include "cpu/team/control.h"
#include "cpu/team/remote.h"

namespace dk {

// The wire region: staging of normal mode (as large as the nvl region that was asked for), what goes with its rows,
// then the low-latency slots. Staging is never in the nvl or rdma region, so callers may overwrite those at any time.
struct WireRegion {
  uint64_t rows_offset, rows_bytes;            // normal mode: rows
  uint64_t extras_offset, extras_bytes;        // normal mode: indices, weights, sources
  uint64_t slot_offset[2][2], slot_bytes[2];   // low latency: [kind][slot], bytes by kind
  uint64_t remote_offset;                      // low latency with remote ranks: RemotePeer of each rank (remote.h)
  uint64_t mirror_offset[2], mirror_bytes[2];  // and by kind: mirrors [slot][rank], bytes of each; 0: no rank is remote
  uint64_t link_in_offset,
      link_out_offset;  // normal mode among nodes: rings [node] of what comes from there, goes there
  uint64_t link_bytes;  // of each; 0: one node
  uint64_t total;

  WireRegion(int num_ranks, int num_nvl_peers, uint64_t nvl_bytes, uint64_t rdma_bytes, uint32_t flags);
};

// Room of the low-latency formats for a shape.
struct LowLatencyShape {
  uint64_t num_ranks, num_max_tokens, hidden, num_experts;

  template <class P>
  explicit LowLatencyShape(const P &p, int ranks)
      : num_ranks(static_cast<uint64_t>(ranks)),
        num_max_tokens(static_cast<uint64_t>(p.num_max_tokens)),
        hidden(static_cast<uint64_t>(p.hidden)),
        num_experts(static_cast<uint64_t>(p.num_experts)) {}

  uint64_t local_experts() const { return num_experts / num_ranks; }
  uint64_t recv_rows() const { return num_ranks * num_max_tokens; }  // of one local expert
  uint64_t zero_copy_bytes() const { return round_up(num_experts * num_max_tokens * hidden * 2, 128); }
  uint64_t rdma_bytes() const { return 2 * zero_copy_bytes(); }
  // A slot of dispatch: indices int32[B,K], weights float[B,K], rows. A slot of combine: a range for each (rank, local
  // expert), a cursor for each expert, sources int32 of each row, rows.
  uint64_t dispatch_row_bytes() const { return hidden * 2; }  // FP8 with its scales is smaller
  uint64_t dispatch_rows_at(int num_topk) const {
    return round_up(num_max_tokens * static_cast<uint64_t>(num_topk) * 8, kLine);
  }
  uint64_t dispatch_slot_bytes(int num_topk) const {
    return dispatch_rows_at(num_topk) + num_max_tokens * dispatch_row_bytes();
  }
  uint64_t combine_row_bytes(bool logfmt) const { return logfmt ? round_up(logfmt_row_bytes(hidden), 16) : hidden * 2; }
  uint64_t combine_cursors_at() const { return num_experts * 16; }
  uint64_t combine_sources_at() const { return num_experts * 20; }
  uint64_t combine_rows_at() const { return round_up(combine_sources_at() + num_experts * num_max_tokens * 4, kLine); }
  uint64_t combine_slot_bytes(bool logfmt) const {
    return combine_rows_at() + num_experts * num_max_tokens * combine_row_bytes(logfmt);
  }
  // A mirror of dispatch is like the slot. One of combine holds the part of one rank: ranges, sources, rows.
  uint64_t mirror_sources_at() const { return local_experts() * 16; }
  uint64_t mirror_rows_at() const {
    return round_up(mirror_sources_at() + local_experts() * num_max_tokens * 4, kLine);
  }
};

struct Peer {
  Control control;
  RemoteControl remote;
  uint64_t wire, rdma;
};

struct LinkState;

struct Team {
  Device *device;
  int32_t rank, num_ranks, num_nvl_peers;
  uint32_t flags;
  uint64_t rdma_bytes;
  WireRegion wire;
  dk_status *status;
  dk_stats_page *stats;
  pthread_mutex_t running;       // one operation at a time
  std::atomic<uint32_t> failed;  // somebody has the right to write status->failure
  uint64_t *doorbells;           // bit by rank: to be rung
  int64_t *scratch;              // kScratch numbers for each rank, for the operation that is running
  Peer *peers;
  Nic *nic;          // null: no rank is beyond loads and stores
  LinkState *links;  // by node; null: every rank is local

  Control &control() { return peers[rank].control; }
  RemoteControl &remote() { return peers[rank].remote; }
  // Whether the rank's block is mapped. If not, only `nic` reaches it, and nothing of peers[rank] may be touched.
  bool is_local(int peer) const { return peers[peer].wire != 0; }
  bool spans_nodes() const { return links != nullptr; }
  int node(int peer) const { return peer / num_nvl_peers; }
  int index(int peer) const { return peer % num_nvl_peers; }
  int num_nodes() const { return (num_ranks + num_nvl_peers - 1) / num_nvl_peers; }
  int own_node() const { return node(rank); }
  int first_local() const { return own_node() * num_nvl_peers; }  // if it spans nodes: the first rank of mine
  int partner(int in_node) const { return in_node * num_nvl_peers + index(rank); }  // the rank of my index there
  // The rank of my node that rows from or to that rank come through: the one of its index; itself if it is local.
  int forwarder(int peer) const { return is_local(peer) ? peer : first_local() + index(peer); }
  FailureRecord &failure_record_of(int peer) {
    return is_local(peer) ? peers[peer].control.failure_record() : remote().failure_record_from(peer);
  }
  bool shrinks() const { return flags & DK_TEAM_SHRINK; }
  bool masked(int peer) { return control().peer_state(peer).masked != 0; }
  int64_t *numbers(int which) { return scratch + which * num_ranks; }
};
constexpr int kScratch = 8;

}  // namespace dk
