// dispatch_job.cuh - the rows of this rank's tokens, as send_rows.cuh takes them.
#pragma once
#include "cuda/impl/normal/dispatch_dest.cuh"
#include "cuda/impl/normal/send_rows.cuh"

namespace deepep {

struct DispatchJob {
  static constexpr bool kByLanes = false;
  const DispatchParams &p;
  const DispatchDest *dests;
  uint64_t epoch;
  int32_t *heads;   // shared: [stages][R]
  uint32_t copy;    // of the tickets
  int ticket = -1;  // lane 0: taken one ahead

  __device__ uint32_t *counter() const { return &p.session.team.scratch->tokens_taken[copy]; }
  __device__ void start() {
    if (lane_id() == 0) ticket = static_cast<int>(atomicAdd(counter(), 1u));
  }
  __device__ int next() {
    const int token = __shfl_sync(kAllLanes, ticket, 0);
    if (token >= p.num_tokens) return -1;
    if (lane_id() == 0) ticket = static_cast<int>(atomicAdd(counter(), 1u));
    return token;
  }
  __device__ void prefetch(int stage, int token) {
    const int num_ranks = p.session.team.num_ranks;
#pragma unroll 1
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      ptx::copy_word_async(&heads[stage * num_ranks + r], &p.send_head()[static_cast<int64_t>(token) * num_ranks + r]);
  }
  __device__ const uint8_t *source(int token) const { return p.x() + static_cast<uint64_t>(token) * p.row_bytes; }
  __device__ const int32_t *heads_of(int stage) const { return heads + stage * p.session.team.num_ranks; }
  __device__ bool room(int stage, int) const {
    return __all_sync(kAllLanes, rank_without_room(p, dests, epoch, kPayload, heads_of(stage)) < 0) != 0;
  }
  __device__ bool await_room(int stage, int) const {
    return await_ring_room(p, dests, epoch, kPayload, heads_of(stage));
  }
  __device__ void extra(int, int) const {}
  // The row has no place there. Its flags have been promised, so the peer waits in vain: the team fails.
  __device__ __noinline__ void refuse_head(int r, int head) const {
    report_failure(p.session, DK_EINVAL, p.session.team.rank, DK_FIELD_SEND_HEAD, dests[r].num_rows - 1, head, 0);
  }
  template <class F>
  __device__ void each(int stage, int, F f) const {
    for (int r = 0; r < p.session.team.num_ranks; ++r) {
      const int head = heads_of(stage)[r];
      if (static_cast<uint32_t>(head) >= static_cast<uint32_t>(dests[r].num_rows)) {
        if (head >= 0 && !is_absent(p, dests[r])) refuse_head(r, head);
        continue;
      }
      const uint32_t slot = dests[r].direct ? static_cast<uint32_t>(head) : ring_place(head, dests[r].slots).slot;
      f(dests[r].rows + static_cast<uint64_t>(slot) * dests[r].row_stride);
    }
  }
};

}  // namespace deepep
