// combine_job.cuh - the rows of x for all ranks, as send_rows.cuh takes them.
#pragma once
#include "cuda/impl/normal/combine_ends.cuh"
#include "cuda/impl/normal/send_rows.cuh"

namespace deepep {

struct CombineJob {
  static constexpr bool kByLanes = false;
  const CombineParams &p;
  const CombineDest *dests;
  uint64_t epoch;
  int dest;         // the rank whose rows this warp takes; -1: all ranks', in turn
  int tickets;      // how many there are
  int ticket = -1;  // lane 0: taken one ahead

  // Rows are named by their index in x: the destination follows from it.
  __device__ uint32_t take() const {
    return atomicAdd(&p.session.team.scratch->rows_taken[epoch % 2][max(dest, 0)], 1u);
  }
  __device__ void start() {
    if (lane_id() == 0) ticket = static_cast<int>(take());
  }
  __device__ int next() {
    const int num_ranks = p.session.team.num_ranks;
    for (;;) {
      const int n = __shfl_sync(kAllLanes, ticket, 0);
      if (n >= tickets) return -1;
      if (lane_id() == 0) ticket = static_cast<int>(take());
      const int r = dest < 0 ? (n + p.session.team.rank) % num_ranks : dest, at = dest < 0 ? n / num_ranks : n;
      if (at < dests[r].num_rows) return dests[r].first_row + at;
    }
  }
  __device__ int dest_of(int row) const {
    int r = 0;
    while (row >= dests[r].first_row + dests[r].num_rows) ++r;
    return r;
  }
  __device__ RingPlace place_of(int row, int r) const { return ring_place(row - dests[r].first_row, p.ring.slots); }
  __device__ void prefetch(int, int) const {}
  __device__ const uint8_t *source(int row) const { return p.x() + static_cast<uint64_t>(row) * p.row_bytes; }
  __device__ bool has_room(int row) const {
    const int r = dest_of(row);
    const RingPlace place = place_of(row, r);
    return place.lap == 0 || ptx::ld_acquire_sys(&dests[r].credits[place.slot]) == ring_value(epoch, place.lap - 1);
  }
  __device__ bool room(int, int row) const { return __all_sync(kAllLanes, has_room(row)) != 0; }
  __device__ bool await_room(int, int row) const {
    const bool good = warp_wait_or_fail(
        p.session, static_cast<int64_t>(epoch), [&] { return __all_sync(kAllLanes, has_room(row)) != 0; },
        [&] { return lane_id() == 0 ? dest_of(row) : -1; });
    __syncwarp();
    return good;
  }
  __device__ void extra(int, int row) const {
    const int r = dest_of(row);
    auto *to =
        reinterpret_cast<float *>(dests[r].meta + static_cast<uint64_t>(place_of(row, r).slot) * p.ring.meta_stride);
#pragma unroll 1
    for (int k = lane_id(); k < p.num_topk; k += kWarp)
      to[k] = p.topk_weights() == nullptr ? 0 : p.topk_weights()[static_cast<int64_t>(row) * p.num_topk + k];
  }
  template <class F>
  __device__ void each(int, int row, F f) const {
    const int r = dest_of(row);
    f(dests[r].rows + static_cast<uint64_t>(place_of(row, r).slot) * p.ring.payload_stride);
  }
};

// Rows go to all destinations in turn, so that a token's rows from all ranks arrive together, unless some ring is too
// small for all its rows: a row that waits for room must not delay rows to others, so each destination then has warps
// of its own.
__device__ inline CombineJob combine_job(const CombineParams &p, const CombineDest *dests, uint64_t epoch) {
  const int num_ranks = p.session.team.num_ranks, worker = warp_id() * gridDim.x + blockIdx.x;
  int longest = 0;
#pragma unroll 1
  for (int r = 0; r < num_ranks; ++r) longest = max(longest, dests[r].num_rows);
  const bool roomy = longest <= static_cast<int>(p.ring.slots);
  const int dest = (worker + p.session.team.rank) % num_ranks;
  return {p, dests, epoch, roomy ? -1 : dest, roomy ? longest * num_ranks : dests[dest].num_rows};
}

// The job of the kernel that may go on without ranks: in a team that shrinks, rows for ranks that take no part are not
// sent. Rows that are being loaded when a rank is lost go into its ring, where nobody looks for them.
struct MaskedCombineJob : CombineJob {
  uint32_t copy;  // of the tickets, which are taken before the ranks agree on the number of the call

  __device__ uint32_t take() const { return atomicAdd(&p.session.team.scratch->rows_taken[copy][max(dest, 0)], 1u); }
  __device__ void start() {
    if (lane_id() == 0) ticket = static_cast<int>(take());
  }
  __device__ int next() {
    const int num_ranks = p.session.team.num_ranks;
    for (;;) {
      const int n = __shfl_sync(kAllLanes, ticket, 0);
      if (n >= tickets) return -1;
      if (lane_id() == 0) ticket = static_cast<int>(take());
      const int r = dest < 0 ? (n + p.session.team.rank) % num_ranks : dest, at = dest < 0 ? n / num_ranks : n;
      if (at < dests[r].num_rows && !absence_of(p, dests[r])) return dests[r].first_row + at;
    }
  }
  __device__ bool has_room(int row) const { return CombineJob::has_room(row) || absence_of(p, dests[dest_of(row)]); }
  __device__ bool room(int, int row) const { return __all_sync(kAllLanes, has_room(row)) != 0; }
  __device__ bool await_room(int, int row) const {
    const bool good = warp_wait_or_drop<kForRoom>(
        p.session, static_cast<int64_t>(epoch), [&] { return __all_sync(kAllLanes, has_room(row)) != 0; },
        [&] { return lane_id() == 0 ? dest_of(row) : -1; }, [&](int peer) { drop_end(dests, peer, kLeftOut); });
    __syncwarp();
    return good;
  }
};

}  // namespace deepep
