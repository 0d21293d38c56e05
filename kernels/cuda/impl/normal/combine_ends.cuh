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
enum Absence { kLeftOut = 1, kGivenUp = 2 };
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
    drop_end(dests, r, kLeftOut);
    drop_end(sources, r, kLeftOut);
  }
  __syncthreads();
}

__host__ __device__ inline RingShape combine_ring(const CombineParams &p) {
  return ring_shape(p.session.team.nvl_bytes, p.session.team.num_ranks, p.slot_bytes, p.num_topk * 4);
}

// By the whole block, while the peers' messages are in flight. kPushed: rows may cross by copies.
template <bool kPushed = false>
__device__ inline void set_up_combine(const CombineParams &p, CombineDest *dests, CombineSource *sources) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  const RingShape &ring = p.ring;
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
    if (kPushed && p.pushes() && r != me) dests[r].num_rows = 0;
  }
  __syncthreads();
}

// A source whose rows are all in an inbox has no flags: its kernel, and so its message, came behind its copies. Weights
// follow the rows there.
__device__ __forceinline__ bool is_pushed(const CombineSource &source) { return source.flags == nullptr; }

// By the whole block, once all ranks' messages are here: who has pushed its rows, and into which inbox, says its
// message.
__device__ inline void find_pushed_rows(const CombineParams &p, uint64_t epoch, CombineSource *sources) {
  const TeamView &team = p.session.team;
  for (int r = threadIdx.x; r < team.num_ranks; r += blockDim.x) {
    const int which = team.handshake(team.rank, epoch % kHandshakeCopies, r)->segment - 1;
    if (r == team.rank || which < 0 || which > 1) continue;
    sources[r].rows = team.self + team.inbox(r, which);
    sources[r].meta = sources[r].rows + static_cast<uint64_t>(sources[r].num_rows) * p.row_bytes;
    sources[r].flags = nullptr;
  }
  __syncthreads();
}

// By the last block. Copies of a rank whose combine has failed may go on to the inbox that this rank has just read:
// that rank says so before, and this one's combine fails, too. True: it has failed.
__device__ inline bool share_failures(const CombineParams &p, bool begun) {
  const Session &s = p.session;
  const TeamView &team = s.team;
  bool bad = false;
  for (int r = threadIdx.x; r < team.num_ranks && begun; r += blockDim.x) {
    const uint64_t code = r == team.rank ? 0 : ptx::ld_acquire_sys(team.notice(team.rank, r));
    if (code == 0) continue;
    report_failure(s, DK_EABORTED, r, DK_FIELD_NONE, static_cast<int64_t>(code), DK_OP_COMBINE, 0);
    bad = true;
  }
  bad = __syncthreads_or(bad || has_failed(s)) != 0;
  if (bad && threadIdx.x == 0) team.scratch->failed = 1;
  for (int r = threadIdx.x; r < team.num_ranks && bad && (begun || p.captured == 0); r += blockDim.x)
    ptx::st_release_sys(team.notice(r, team.rank), static_cast<uint64_t>(ptx::ld_relaxed_gpu(&team.scratch->sticky)));
  return bad;
}

}  // namespace deepep
