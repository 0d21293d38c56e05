// The wire region of a rank's block: where its parts lie, and the room that the low-latency formats take in it.
#pragma once
#include "cpu/rows/rows.h"
#include "cpu/team/control.h"
#include "cpu/team/remote.h"

namespace dk {

inline int nodes_of(int num_ranks, int num_nvl_peers) { return (num_ranks + num_nvl_peers - 1) / num_nvl_peers; }
// Nodes as links count them: in a team that shrinks each rank is one (Team::node).
inline int links_of(int num_ranks, int num_nvl_peers, uint32_t flags) {
  int nodes = nodes_of(num_ranks, num_nvl_peers);
  return nodes > 1 && flags & DK_TEAM_SHRINK ? num_ranks : nodes;
}

// The wire region: staged rows of normal mode (as many bytes as the nvl region), their extras, the low-latency slots,
// mirrors and links. Staging is never in the nvl or rdma region, so callers may overwrite those at any time.
struct WireRegion {
  uint64_t rows_offset, rows_bytes;            // normal mode: rows
  uint64_t extras_offset, extras_bytes;        // normal mode: indices, weights, sources
  uint64_t slot_offset[2][2], slot_bytes[2];   // low latency: [kind][slot], bytes by kind
  uint64_t remote_offset;                      // low latency with remote ranks: RemotePeer of each rank (mirror.h)
  uint64_t mirror_offset[2], mirror_bytes[2];  // and by kind: mirrors [slot][rank], bytes of each; 0: no rank is remote
  // Normal mode among nodes: by node, the ring of records that come from there, and of those that go there.
  uint64_t link_in_offset, link_out_offset;
  uint64_t link_bytes;  // of each; 0: one node
  uint64_t total;
  uint64_t part[DK_MAX_WIRE_PARTS];  // the offsets above, ascending, without empty parts
  uint32_t num_parts = 0;

  WireRegion(int num_ranks, int num_nvl_peers, uint64_t nvl_bytes, uint64_t rdma_bytes, uint32_t flags);
};

// Sizes and positions of the low-latency formats for a shape.
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
  // A mirror of dispatch is laid out like the slot. A mirror of combine holds one rank's part: ranges, sources, rows.
  uint64_t mirror_sources_at() const { return local_experts() * 16; }
  uint64_t mirror_rows_at() const {
    return round_up(mirror_sources_at() + local_experts() * num_max_tokens * 4, kLine);
  }
};

uint64_t control_bytes_for(int num_ranks, int num_nvl_peers, uint32_t flags);

}  // namespace dk
