// dispatch_dest.cuh - where dispatch's rows for each rank go, and waits for room there.
#pragma once
#include "cuda/impl/normal/dispatch_params.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "cuda/sync/agreement.cuh"

namespace deepep {

// One for each rank, in shared memory.
struct DispatchDest {
  uint8_t *rows;  // place of this rank's first row there, or slot 0 of its ring; before the handshake the nvl region
  uint8_t *meta;  // slot 0 of the ring
  uint64_t *flags[2];
  const uint64_t *credits[2];  // here
  uint32_t slots, row_stride, meta_stride, direct;
  int32_t first_row, num_rows, arriving;  // this rank's rows there; all ranks' rows there
  int32_t limit;                          // expanded rows: of the outputs there
  int32_t absent;                         // in a team that shrinks: the rank takes no part, num_rows is 0
};
__device__ inline bool is_absent(const DispatchParams &p, const DispatchDest &dest) {
  return shrinks(p.session.team) && *static_cast<const volatile int32_t *>(&dest.absent) != 0;
}
// Rows for the rank are not sent (any more).
__device__ inline void drop_dest(const DispatchDest *dests, int r) {
  auto *dest = const_cast<DispatchDest *>(dests) + r;
  *static_cast<volatile int32_t *>(&dest->absent) = 1;
  *static_cast<volatile int32_t *>(&dest->num_rows) = 0;
}

// Before the handshake, by the whole block: all of a destination that does not need the peer's message, which is in
// flight meanwhile.
__device__ inline void prepare_dests(const DispatchParams &p, DispatchDest *dests) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    DispatchDest dest{};
    dest.first_row = rows_before(p.rank_prefix_matrix(), num_ranks, me, r);
    dest.num_rows = p.rank_prefix_matrix()[me * num_ranks + r] - dest.first_row;
    dest.arriving = p.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + r];
    dest.rows = team.peers[r] + team.nvl;
    for (int part = 0; part < 2; ++part) {
      dest.flags[part] = team.ring_flag(r, static_cast<RingPart>(part), me);
      dest.credits[part] = team.ring_credit(me, static_cast<RingPart>(part), r);
    }
    dests[r] = dest;
    if (blockIdx.x == 0)
      team.scratch->sent_bytes[r] = static_cast<uint64_t>(dest.num_rows) * (p.row_bytes + 4ull * p.num_scales);
  }
}

// After the handshake, by the same threads. False: some rank has no room for its rows.
__device__ inline bool set_up_dests(const DispatchParams &p, uint64_t epoch, DispatchDest *dests) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  bool good = true, crowded = false;  // every rank sees that some rank has no room, and refuses the call
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    DispatchDest &dest = dests[r];
    if (shrinks(team) && is_without(p.session, r)) {
      dest.slots = 1;
      drop_dest(dests, r);
      continue;
    }
    const HandshakeMessage *from = message_from(team, epoch, r);
    uint8_t *nvl = dest.rows;
    dest.direct = from->segment >= 0;
    const RingShape ring = dispatch_ring(p, dest.direct);
    dest.slots = ring.slots;
    dest.row_stride = dest.direct ? p.row_bytes : ring.payload_stride;
    dest.meta_stride = ring.meta_stride;
    dest.meta = nvl + ring.meta(me, 0);
    dest.rows = nvl + ring.payload(me, 0);
    if (from->segment == kPulled) {
      dest.rows =
          r == me ? p.recv_x() + static_cast<uint64_t>(dest.first_row) * p.row_bytes : team.self + team.outbox(r);
    } else if (dest.direct) {
      const uint64_t segment = team.segments[r * DK_MAX_SEGMENTS + from->segment];
      dest.rows =
          pointer<uint8_t>(segment) + from->segment_offset + static_cast<uint64_t>(dest.first_row) * p.row_bytes;
      good &= segment != 0;
    } else if (r == me && p.routing != DK_ROUTING_EXPANDED) {  // rows that stay need no ring
      dest.rows = p.recv_x() + static_cast<uint64_t>(dest.first_row) * p.row_bytes;
      dest.row_stride = p.row_bytes;
      dest.direct = 1;
    }
    if (from->row_limit >= 0 && dest.arriving > from->row_limit) {
      if (blockIdx.x == 0)
        report_refusal(p.session, kVoid, DK_EINVAL, r, DK_FIELD_WORST_TOKENS, from->row_limit, dest.arriving);
      crowded = true;
    } else if (!good) {
      report_failure(p.session, DK_EINTERNAL, r, DK_FIELD_NONE, from->segment, 0, 0);
    }
  }
  return __syncthreads_or(!good || crowded) == 0;
}

// A rank of this lane's whose ring has no room yet for the row of one of `tokens` tokens; -1: all have room. kFlagged:
// rows have flags, which the ring counts, also where they go straight to their places; but for this rank's own.
template <bool kFlagged = false>
__device__ inline int rank_without_room(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch,
                                        RingPart part, const int32_t *heads, int tokens = 1) {
  const int num_ranks = p.session.team.num_ranks;
  for (int i = lane_id(); i < tokens * num_ranks; i += kWarp) {
    const int head = heads[i], r = tokens == 1 ? i : i % num_ranks;
    const auto place_there = static_cast<uint32_t>(head);
    if (place_there >= static_cast<uint32_t>(dests[r].num_rows) || place_there < dests[r].slots ||
        (part == kPayload && (kFlagged ? r == p.session.team.rank : dests[r].direct != 0)))
      continue;
    const RingPlace place = ring_place(head, dests[r].slots);
    if (ptx::ld_acquire_sys(&dests[r].credits[part][place.slot]) != ring_value(epoch, place.lap - 1)) return r;
  }
  return -1;
}
template <bool kFlagged = false>
__device__ inline bool await_ring_room(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch,
                                       RingPart part, const int32_t *heads, int tokens = 1) {
  int missing = -1;
  const bool good = warp_wait_or_drop<kForRoom>(
      p.session, static_cast<int64_t>(epoch),
      [&] {
        missing = rank_without_room<kFlagged>(p, dests, epoch, part, heads, tokens);
        return __all_sync(kAllLanes, missing < 0) != 0;
      },
      [&] { return missing; }, [&](int peer) { drop_dest(dests, peer); });
  __syncwarp();
  return good;
}

}  // namespace deepep
