// combine_ends.cuh - the ends of combine's rings: where this rank sends rows, and where its peers' rows arrive.
#pragma once
#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "cuda/sync/agreement.cuh"

namespace deepep {

struct CombineDest {
  uint8_t *rows, *meta;  // slot 0 of this rank's ring there
  uint64_t *flags;
  const uint64_t *credits;      // here
  int32_t first_row, num_rows;  // of x
  int32_t absent, reserved;     // in a team that shrinks: the rank takes no part
};
struct CombineSource {
  const uint8_t *rows, *meta;  // slot 0 of the source's ring here
  const uint64_t *flags;
  uint64_t *credits;  // there
  int32_t num_rows;
  int32_t absent;  // in a team that shrinks: the rank takes no part, or is not waited for any more
};
enum Absence { kAbsent = 1, kGivenUp = 2 };
template <class End>
__device__ inline int absence_of(const CombineParams &p, const End &end) {
  return shrinks(p.session.team) ? *static_cast<const volatile int32_t *>(&end.absent) : 0;
}
template <class End>
__device__ inline void drop_end(const End *ends, int r, Absence how) {
  *static_cast<volatile int32_t *>(&const_cast<End *>(ends)[r].absent) = how;
}
// After the agreement, by the whole block.
__device__ inline void drop_absent(const CombineParams &p, const CombineDest *dests, const CombineSource *sources) {
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += blockDim.x) {
    if (!is_without(p.session, r)) continue;
    drop_end(dests, r, kAbsent);
    drop_end(sources, r, kAbsent);
  }
  __syncthreads();
}

__host__ __device__ inline RingShape combine_ring(const CombineParams &p) {
  return ring_shape(p.session.team.nvl_bytes, p.session.team.num_ranks, p.slot_bytes, p.num_topk * 4);
}

// By the whole block, while the peers' messages are in flight.
__device__ inline void set_up_combine(const CombineParams &p, CombineDest *dests, CombineSource *sources) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  const RingShape ring = combine_ring(p);
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const int32_t *matrix = p.rank_prefix_matrix();
    uint8_t *there = team.peers[r] + team.nvl, *here = team.self + team.nvl;
    const int first = rows_before(matrix, num_ranks, r, me);
    dests[r] = {there + ring.payload(me, 0),
                there + ring.meta(me, 0),
                team.ring_flag(r, kPayload, me),
                team.ring_credit(me, kPayload, r),
                first,
                matrix[r * num_ranks + me] - first,
                0,
                0};
    sources[r] = {here + ring.payload(r, 0),
                  here + ring.meta(r, 0),
                  team.ring_flag(me, kPayload, r),
                  team.ring_credit(r, kPayload, me),
                  matrix[me * num_ranks + r] - rows_before(matrix, num_ranks, me, r),
                  0};
    if (blockIdx.x == 0) team.scratch->sent_bytes[r] = static_cast<uint64_t>(dests[r].num_rows) * p.row_bytes;
  }
  __syncthreads();
}

}  // namespace deepep
