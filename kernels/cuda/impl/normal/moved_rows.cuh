// moved_rows.cuh - the Hopper form of warps that write expanded rows to their other places as they arrive: a bulk copy
// brings the row into shared memory, others take it to each place. While none has arrived, and at the end, they take
// their turn at the rows that stay at this rank, which senders alone were busy with while movers waited.
#pragma once
#include "cuda/impl/normal/expanded_rows.cuh"

namespace deepep {

// How many rows a source has here, at most.
__device__ inline int most_rows_of_a_source(const DispatchParams &p) {
  const int num_ranks = p.session.team.num_ranks, me = p.session.team.rank;
  int most = 0;
#pragma unroll 1
  for (int r = 0; r < num_ranks; ++r)
    most =
        max(most, p.rank_prefix_matrix()[r * num_ranks + me] - rows_before(p.rank_prefix_matrix(), num_ranks, r, me));
  return most;
}

#if DEEPEP_HAS_BULK_COPY
// The stages and the queue are those of a sending warp, whose block sends nothing.
struct RowMover {
  const DispatchParams &p;
  SendQueue *queue;
  uint8_t *stages;
  int32_t *slots;  // shared, [kSendStages][slots_stride]: a stage's row goes there
  uint32_t slots_stride;
  bool direct;  // rows that arrive are at their first place already
  int loaded = 0, stored = 0;

  __device__ void await_load() {
    const int stage = stored % kSendStages;
    spin_in_block([&] { return ptx::mbarrier_try_wait(&queue->arrived[stage], (stored / kSendStages) & 1); });
    __syncwarp();
  }
  __device__ void store_next() {
    const int stage = stored % kSendStages;
    await_load();
    const int slot = lane_id() < p.num_topk ? slots[stage * slots_stride + lane_id()] : -1;
    const auto at = static_cast<uint32_t>(queue->stage_piece[stage]);
    if (slot >= 0)
      ptx::bulk_store(p.recv_x() + static_cast<int64_t>(slot) * p.row_bytes + at, stages + stage * p.stage_bytes,
                      min(p.stage_bytes, p.row_bytes - at));
    ptx::bulk_commit();  // each lane waits for its own stores
    ++stored;
  }
  // A row that has arrived in the ring, or at its first place, to its other places: lane k has that of choice k, -1:
  // none.
  __device__ void move_arrived(const uint8_t *from, int slot) {
    const uint32_t places = __ballot_sync(kAllLanes, slot >= 0);
    if (direct && places != 0) {
      const int leader = __ffs(static_cast<int>(places)) - 1;
      from = p.recv_x() + static_cast<int64_t>(__shfl_sync(kAllLanes, slot, leader)) * p.row_bytes;
      if (lane_id() == leader) slot = -1;
    }
    move(from, slot);
  }
  // A row to places: lane k has that of choice k, -1: none.
  __device__ void move(const uint8_t *from, int slot) {
    if (__any_sync(kAllLanes, slot >= 0) == 0) return;
    for (uint32_t at = 0; at < p.row_bytes; at += p.stage_bytes) {
      if (loaded - stored == kSendAhead) store_next();
      const int stage = loaded % kSendStages;
      if (lane_id() < p.num_topk) slots[stage * slots_stride + lane_id()] = slot;
      ptx::bulk_wait_read<kSendOutstanding>();
      __syncwarp();  // of all lanes
      if (lane_id() == 0) {
        const uint32_t bytes = min(p.stage_bytes, p.row_bytes - at);
        queue->stage_piece[stage] = static_cast<int32_t>(at);
        ptx::mbarrier_expect(&queue->arrived[stage], bytes);
        ptx::bulk_load(stages + stage * p.stage_bytes, from + at, bytes, &queue->arrived[stage]);
      }
      __syncwarp();
      ++loaded;
    }
  }
  // good: what is loaded is stored.
  __device__ void end(bool good) {
    while (good && stored < loaded) store_next();
    for (; stored < loaded; ++stored) await_load();  // loads into shared memory end before the block does
    ptx::bulk_wait<0>();
    __syncwarp();
  }
};

// The next token with rows that stay here to its places. False: there is none.
__device__ inline bool move_own_row(const DispatchParams &p, RowMover &mover, int32_t limit) {
  const int token = next_own_token(p, mover.queue);
  if (token < 0) return false;
  const int64_t choice = static_cast<int64_t>(token) * p.num_topk + lane_id();
  int slot = -1;
  if (lane_id() < p.num_topk) {
    const int64_t expert =
        load_index(p.topk_idx(), choice, p.index_bytes) - static_cast<int64_t>(p.session.team.rank) * p.meta.num_local;
    if (expert >= 0 && expert < static_cast<int64_t>(p.meta.num_local)) {
      slot = pointer<const int32_t>(p.dst_slot)[choice];
      if (static_cast<uint32_t>(slot) >= static_cast<uint32_t>(limit)) {
        refuse_slot(p, limit, slot);
        slot = -1;
      }
    }
  }
  __syncwarp();
  mover.move(p.x() + static_cast<uint64_t>(token) * p.row_bytes, slot);
  return true;
}

// Role of a warp, where each row of a source has a slot of its own: rows of one other rank, and such as stay here,
// below `limit`.
__device__ inline void move_rows(const DispatchParams &p, uint64_t epoch, RowMover &mover, int worker, int num_workers,
                                 int32_t limit) {
  const TeamView &team = p.session.team;
  const ReceiverShare share = receiver_share(worker, num_workers, team.num_ranks - 1);
  const int source = share.source + (share.source >= team.rank ? 1 : 0);
  const int rows = p.rank_prefix_matrix()[source * team.num_ranks + team.rank] -
                   rows_before(p.rank_prefix_matrix(), team.num_ranks, source, team.rank);
  const RingShape ring = dispatch_ring(p, mover.direct);
  const uint64_t *meta_flags = team.ring_flag(team.rank, kMeta, source),
                 *row_flags = team.ring_flag(team.rank, kPayload, source);
  const uint8_t *metas = team.self + team.nvl + ring.meta(source, 0),
                *staged = team.self + team.nvl + ring.payload(source, 0);
  constexpr int kTogether = 8;
  bool helps = mover.direct;  // there may be rows that stay here
  for (int row = share.first; row < rows;) {
    // Lanes look at the warp's next rows; it moves those before the first that has not arrived.
    const int ahead = row + lane_id() * share.step;
    uint32_t here = 0;
    const bool good = warp_wait_or_fail(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          here = __ballot_sync(kAllLanes, lane_id() < kTogether && ahead < rows &&
                                              ptx::ld_acquire_sys(&meta_flags[ahead]) == ring_value(epoch, 0) &&
                                              ptx::ld_acquire_sys(&row_flags[ahead]) == ring_value(epoch, 0));
          return helps || (here & 1) != 0;
        },
        [&] { return lane_id() == 0 ? source : -1; });
    if (!good) return mover.end(false);
    __syncwarp();
    if ((here & 1) == 0) {
      helps = move_own_row(p, mover, limit);
      continue;
    }
    ptx::fence_global_before_bulk();
    const int count = __ffs(static_cast<int>(~here)) - 1;
    int slots[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      slots[j] = -1;
      if (j >= count || lane_id() >= p.num_topk) continue;
      const uint8_t *meta = metas + static_cast<uint64_t>(row + j * share.step) * p.meta.stride;
      slots[j] = reinterpret_cast<const int32_t *>(meta)[p.meta.numbers_at + lane_id()];
      if (slots[j] >= p.num_expanded_tokens) slots[j] = -1;  // its sender failed
    }
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      int slot = slots[0];
#pragma unroll
      for (int i = 1; i < kTogether; ++i)
        if (i == j) slot = slots[i];
      mover.move_arrived(staged + static_cast<uint64_t>(row + j * share.step) * p.row_bytes, slot);
    }
    row += count * share.step;
  }
  while (helps) helps = move_own_row(p, mover, limit);
  mover.end(true);
}
#endif

}  // namespace deepep
