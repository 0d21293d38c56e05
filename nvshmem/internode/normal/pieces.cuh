// pieces.cuh - libdeepep_nvshmem.so: the end of a piece: rows in neighbouring places of a ring that cross to another
// node together.
#pragma once
#include "internode/normal/common.cuh"
#include "internode/normal/rings.h"

namespace deepep::internode {

// Whole warp. Rows `first` up to `end` of the channel's ring of the node are in their places: at the node's partner, or
// staged, where a NIC serves it, which puts them there. The last one has `last_bytes`. The partner learns of them.
__device__ inline void end_piece(const NodeView &internode, const TeamView &team, const RowRings &rings, uint64_t epoch,
                                 int node, int channel, uint32_t first, uint32_t end, uint32_t last_bytes) {
  const InPhase phase(kPhasePut);
  const int partner = internode.partner(node);
  uint64_t *head = word_at(team.self, internode.at.heads, internode.node * kMaxChannels + channel);  // in any block
  if (internode.blocks[partner] == nullptr)
    put_remote(internode, partner, team.self + rings.in(internode.node, channel, first),
               team.self + rings.out(node, channel, first),
               static_cast<uint64_t>(end - first - 1) * rings.stride + last_bytes, head, tagged(epoch, end));
  else
    set_word(internode, team, partner, head, tagged(epoch, end));
}

}  // namespace deepep::internode
