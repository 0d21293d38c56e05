// row_places.cuh - libdeepep_nvshmem.so: dispatch between nodes: the rings of a call, and where a node's ranks want
// rows.
#pragma once
#include "internode/normal/dispatch.cuh"

namespace deepep::internode {

// Where puts are stores fewer warps send and more push.
constexpr DispatchShape kPuttingDispatch{9, 11, 8}, kStoringDispatch{6, 12, 8};

// Of a slot of a ring whose rows' payloads are staged there.
template <class Params>
__host__ __device__ inline uint32_t payload_at(const Params &p) {
  return align_up(words_bytes(p), 16u);
}

// Two sets of rings: with as many channels as the call's warps send, and fixed ones, for nodes of any size.
template <class Params>
struct DispatchChoice {
  Params params[2];
};
// Of parameters without rings. The latter rings have room for staged payloads; with slots 0 a region is too small.
template <class Params>
inline DispatchChoice<Params> dispatch_choice(Params p, int blocks) {
  const TeamView &team = p.d.session.team;
  const uint64_t bytes = p.d.row_bytes + words_bytes(p);
  p.shape = p.internode.puts_are_stores ? kStoringDispatch : kPuttingDispatch;
  DispatchChoice<Params> choice{{p, p}};
  for (const bool fixed : {false, true}) {
    Params &one = choice.params[fixed];
    const int channels = fixed ? kFixedChannels : channels_for(p.internode, blocks, p.shape.senders);
    one.rings = row_rings(team, p.internode, bytes, channels, fixed);
    // A warp that sends takes tokens some seven times.
    one.shape.share = max(1, min(kWarp, p.d.num_tokens / static_cast<int>(7 * one.rings.channels)));
    one.words = word_rings(team, one.rings, payload_at(p));
    one.staged = word_rings(team, one.rings, payload_at(p) + p.d.row_bytes);
  }
  return choice;
}

// Where a source's rows for a rank of this node go: the first of them, and how many there are.
struct RowsThere {
  uint8_t *first;  // null: into the ring there
  int32_t count;   // 0: none
};

// Whether peers can store a rank's rows at their places in its outputs, from what its handshake says.
template <class Params>
__device__ inline bool has_places(const Params &, int segment) {
  return segment >= 0;
}

// Whole block, after the handshake: whether all ranks have the same rings, with room for the payloads of ranks that
// have no places for them, and a lane can look after each rank of a node. All ranks see alike.
template <class Params>
__device__ inline bool agree_on_rings(const Params &p, uint64_t epoch) {
  const Session &s = p.d.session;
  bool good = p.internode.num_peers <= kWarp && p.words.slots != 0 &&
              agree_on_channels(s, p.internode, epoch, p.rings.channels);
  if (p.internode.num_peers > 1 && p.staged.slots == 0)
    for (int r = threadIdx.x; good && r < s.team.num_ranks; r += blockDim.x)
      good = has_places(p, message_from(s, p.internode, epoch, r)->handshake.segment);
  return __syncthreads_and(good) != 0;
}

// Whole block: fills a table for this rank's rows, as its node's, and its partners', by node and reader. Returns
// whether payloads are staged in this node.
template <class Params>
__device__ inline bool find_places(const Params &p, uint64_t epoch, RowsThere *there) {
  const Session &s = p.d.session;
  const TeamView &team = s.team;
  const int num_ranks = team.num_ranks, num_peers = p.internode.num_peers;
  bool stages = num_peers > 1 && !has_places(p, p.d.recv_segment) &&
                p.d.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + team.rank] > 0;
  for (int i = threadIdx.x; i < num_ranks; i += blockDim.x) {
    const int source = p.internode.partner(i / num_peers), reader = p.internode.local_rank(i % num_peers),
              before = rows_before(p.d.rank_prefix_matrix(), num_ranks, source, reader);
    there[i] = {p.d.recv_x(), rows_between(p.d, source, reader)};
    if (reader != team.rank) {
      const HandshakeMessage &message = message_from(s, p.internode, epoch, reader)->handshake;
      if (!has_places(p, message.segment)) {
        there[i].first = nullptr;
        stages |= there[i].count > 0;
        continue;
      }
      const uint64_t segment =
          message.segment < DK_MAX_SEGMENTS ? team.segments[reader * DK_MAX_SEGMENTS + message.segment] : 0;
      there[i].first = pointer<uint8_t>(segment + (message.segment_offset & ((1ull << kChannelsAt) - 1)));
      if (segment == 0 && there[i].count > 0) {
        report_failure(s, DK_EINTERNAL, reader, DK_FIELD_NONE, message.segment, 0, 0);
        there[i].count = 0;
      }
    }
    there[i].first += static_cast<int64_t>(before) * p.d.row_bytes;
  }
  return __syncthreads_or(stages) != 0;
}

}  // namespace deepep::internode
