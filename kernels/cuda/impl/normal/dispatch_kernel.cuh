// dispatch_kernel.cuh - dispatch: rows go to the ranks that hold their experts. Roles by warp: senders of rows, the
// publisher, senders and receivers of metadata, receivers of rows (which copy staged rows to the outputs; a registered
// segment needs none). No role of a block waits for a receiving role of the same block, so a resident grid makes
// progress whatever the order of arrival.
#pragma once
#include "cuda/impl/normal/dispatch_meta.cuh"
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"

namespace deepep {

template <bool kBulk>
struct DispatchRoles {
  static constexpr int kSenders = kBulk ? 4 : 7, kPublishers = 1, kMetaSenders = 4, kMetaReceivers = kBulk ? 4 : 3,
                       kRowReceivers = kBulk ? 7 : 5;
  static constexpr int kMetaSendersAt = kSenders + kPublishers, kMetaReceiversAt = kMetaSendersAt + kMetaSenders;
  static constexpr int kRowReceiversAt = kMetaReceiversAt + kMetaReceivers;
  static constexpr int kWarps = kRowReceiversAt + kRowReceivers, kThreads = kWarps * kWarp;
  // Metadata should leave before the links are full of rows, since its stores queue after those. So warps that would
  // receive send it too: those for rows, where rows arrive straight at their places; all that a block of an expanded
  // dispatch has, where others receive.
  static constexpr int kAllMetaSenders = kMetaSenders + kMetaReceivers + kRowReceivers;
  static int meta_senders(const DispatchParams &p, bool expanded_apart) {
    return expanded_apart ? kAllMetaSenders : kMetaSenders + (p.recv_segment < 0 ? 0 : kRowReceivers);
  }
  __device__ static int meta_sender(const DispatchParams &p, int warp) {  // -1: the warp is none
    if (warp >= kMetaSendersAt && warp < kMetaReceiversAt) return warp - kMetaSendersAt;
    return p.recv_segment >= 0 && warp >= kRowReceiversAt ? kMetaSenders + warp - kRowReceiversAt : -1;
  }
};

// Which blocks send rows and which copy staged rows to the outputs. An SM whose stores queue for the links is slow at
// copying, so where there are enough blocks each does one of the two, and idle senders copy too. Rows of 14 KB gained
// by that with 24 blocks and lost with 20, rows of 7 KB gained with 16. The form without bulk copies gains most: 475
// and 910 us became 280 and 514 with 24 blocks. Senders are warps of all blocks: enough to keep the links full; more
// only make queues longer. Of expanded rows most are written within the GPU: 39 senders took 305 us where metadata took
// 62.
constexpr int kStagedSenders = 32, kDirectSenders = 36, kExpandedSenders = 52;
// Blocks from which on each does one of the two.
__host__ __device__ inline int blocks_apart(const DispatchParams &p) {
  return p.routing == DK_ROUTING_EXPANDED ? 0 : p.row_bytes <= 8192 ? 12 : 24;
}
template <bool kBulk>
struct DispatchSplit {
  static constexpr int kCopiers =
      DispatchRoles<kBulk>::kSenders + DispatchRoles<kBulk>::kMetaSenders + DispatchRoles<kBulk>::kRowReceivers;
  int senders, copiers;  // blocks
  bool apart;
  __host__ __device__ DispatchSplit(bool staged_here, int least, int blocks, int num_ranks) {
    senders = (13 * blocks + 23) / 24;
    apart = staged_here && blocks >= least && (blocks - senders) * kCopiers >= num_ranks;
    if (!apart) senders = blocks;
    copiers = apart ? blocks - senders : staged_here ? blocks : 0;
  }
  __device__ bool sends() const { return static_cast<int>(blockIdx.x) < senders; }
};

// Shared memory of a block, in this order.
template <bool kBulk>
struct DispatchShared {
  uint32_t stages, dests, meta, heads, queues, bytes;
  __host__ __device__ DispatchShared(const DispatchParams &p, uint32_t stage_bytes) {
    const uint32_t num_ranks = p.session.team.num_ranks;
    constexpr uint32_t senders = DispatchRoles<kBulk>::kSenders, stages_each = kBulk ? kSendStages : 1;
    stages = 0;
    dests = kBulk ? align_up<uint32_t>(senders * stages_each * stage_bytes, 128) : 0;
    meta = align_up<uint32_t>(dests + num_ranks * static_cast<uint32_t>(sizeof(DispatchDest)), 16);
    queues = align_up<uint32_t>(meta + p.meta_senders * meta_space_bytes(p), 16);
    heads = queues + senders * static_cast<uint32_t>(sizeof(SendQueue));
    bytes = align_up<uint32_t>(heads + senders * stages_each * num_ranks * 4, 128);
  }
};

// By one warp: a row of a rank that takes no part (any more).
__device__ __noinline__ inline void blank_row(const DispatchParams &p, int64_t row) {
  auto *to = reinterpret_cast<uint4 *>(p.recv_x() + static_cast<uint64_t>(row) * p.row_bytes);
  for (uint32_t i = lane_id(); i < p.row_bytes / 16; i += kWarp) to[i] = {0, 0, 0, 0};
}

// Role of a warp: copies rows of another rank from the ring to their places.
__device__ inline void receive_rows(const DispatchParams &p, uint64_t epoch, int worker, int num_workers) {
  const TeamView &team = p.session.team;
  if (team.num_ranks == 1) return;
  ReceiverShare share = receiver_share(worker, num_workers, team.num_ranks - 1);  // of the others: own rows stay
  share.source += share.source >= team.rank;
  const int before = rows_before(p.rank_prefix_matrix(), team.num_ranks, share.source, team.rank);
  const int rows = p.rank_prefix_matrix()[share.source * team.num_ranks + team.rank] - before;
  const RingShape ring = dispatch_ring(p, false);
  const uint64_t *flags = team.ring_flag(team.rank, kPayload, share.source);
  const uint8_t *rows_here = team.self + team.nvl + ring.payload(share.source, 0);
  bool gone = shrinks(team) && is_without(p.session, share.source);
  for (int row = share.first; row < rows;) {
    // Lanes look at the warp's next 32 rows; the warp copies those before the first that has not arrived.
    const int ahead = row + lane_id() * share.step;
    const RingPlace place = ring_place(ahead, ring.slots);
    uint32_t here = 0;
    const bool good = warp_wait_or_drop<kForRows>(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          here = __ballot_sync(kAllLanes,
                               ahead < rows && ptx::ld_acquire_sys(&flags[place.slot]) == ring_value(epoch, place.lap));
          return (here & 1) != 0 || gone;
        },
        [&] { return lane_id() == 0 ? share.source : -1; }, [&](int) { gone = true; });
    if (!good) return;
    if (gone) {
      for (; row < rows; row += share.step) blank_row(p, static_cast<int64_t>(before) + row);
      return;
    }
    __syncwarp();
    const int end = row + share.step * (here == kAllLanes ? kWarp : __ffs(static_cast<int>(~here)) - 1);
    for (; row < end; row += share.step) {
      const RingPlace at = ring_place(row, ring.slots);
      copy_row(p.recv_x() + (static_cast<uint64_t>(before) + row) * p.row_bytes,
               rows_here + static_cast<uint64_t>(at.slot) * p.row_bytes, p.row_bytes);
      if (row + static_cast<int>(ring.slots) >= rows) continue;
      __syncwarp();
      if (lane_id() == 0) return_credit(team, kPayload, share.source, at.slot, ring_value(epoch, at.lap));
    }
  }
}

// After the block has published all that it sent: the last block of the rank signals every rank, and the first one
// waits for rows that peers write straight to their places.
__device__ inline void announce_and_await_done(const DispatchParams &p, uint64_t epoch) {
  const TeamView &team = p.session.team;
  uint32_t before = 0;
  if (lane_id() == 0) before = ptx::atomic_add_acq_rel_gpu(&team.scratch->blocks_sent, 1);
  before = __shfl_sync(kAllLanes, before, 0);
  __syncwarp();
  if (before == gridDim.x - 1 && !has_failed(p.session)) {
    ptx::fence_acq_rel_sys();
    for (int r = lane_id(); r < team.num_ranks; r += kWarp) ptx::st_relaxed_sys(team.done(r, team.rank), epoch);
  }
  if (blockIdx.x != 0 || p.recv_segment < 0) return;
  for (int r = lane_id(); r < team.num_ranks; r += kWarp) {
    const uint64_t *done = team.done(team.rank, r);
    uint64_t waited;
    const bool good = wait_or_fail(p.session, r, static_cast<int64_t>(epoch), waited, [&](int64_t &seen) {
      seen = static_cast<int64_t>(ptx::ld_acquire_sys(done));
      return seen >= static_cast<int64_t>(epoch);
    });
    team.scratch->wait_ns[r] += waited;
    if (!good) return;
  }
}

// Whether this warp sends rows.
template <bool kBulk>
__device__ inline bool sends_rows(const DispatchParams &p, const DispatchSplit<kBulk> &split) {
  if (warp_id() >= DispatchRoles<kBulk>::kSenders || !split.sends()) return false;
  const int most = p.routing == DK_ROUTING_EXPANDED ? kExpandedSenders
                   : p.recv_segment < 0             ? kStagedSenders
                                                    : kDirectSenders;
  return !kBulk || warp_id() < ceil_div(most, split.senders);
}

template <bool kBulk>
__device__ inline MetaSpace meta_space(const DispatchParams &p, const DispatchShared<kBulk> &at, uint8_t *shared,
                                       int sender) {
  return {shared + at.meta + sender * meta_space_bytes(p), 0};
}

// Before the ranks' messages are here; for run_dispatch_roles. In a team that shrinks the call's number may change.
template <bool kBulk, bool kRouted = false>
__device__ inline int begin_metas(const DispatchParams &p, const DispatchSplit<kBulk> &split, uint64_t epoch,
                                  uint8_t *shared) {
  const int sender = split.sends() ? DispatchRoles<kBulk>::meta_sender(p, warp_id()) : -1;
  if (sender < 0 || shrinks(p.session.team)) return kNoBatch;
  return begin_meta<kRouted>(p, meta_space(p, DispatchShared<kBulk>(p, p.stage_bytes), shared, sender), epoch);
}

// metas: of begin_metas.
template <bool kBulk, bool kRouted = false>
__device__ inline void run_dispatch_roles(const DispatchParams &p, const DispatchSplit<kBulk> &split, uint64_t epoch,
                                          uint8_t *shared, bool staged, RowSender<kBulk, DispatchJob> &rows,
                                          int metas) {
  using Roles = DispatchRoles<kBulk>;
  const DispatchShared<kBulk> at(p, p.stage_bytes);
  const auto *dests = reinterpret_cast<const DispatchDest *>(shared + at.dests);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  const int warp = warp_id(), num_ranks = p.session.team.num_ranks;
  int copier = -1;  // number among the block's copying warps
  const int meta_sender = split.sends() ? Roles::meta_sender(p, warp) : -1;
  if (meta_sender >= 0) {
    send_meta<kBulk, kRouted>(p, dests, meta_space(p, at, shared, meta_sender), epoch, metas);
  } else if (warp < Roles::kSenders) {
    if (sends_rows(p, split)) rows.run(staged);
    __syncwarp();
    if (lane_id() == 0) ptx::st_release_cta(&queues[warp].finished, 1);
    if (!split.sends()) copier = warp;
  } else if (warp < Roles::kMetaSendersAt) {
    publish_rows(queues, Roles::kSenders, num_ranks, [&](int token, int r) {
      const int head = p.send_head()[static_cast<int64_t>(token) * num_ranks + r];
      if (head < 0 || dests[r].direct || is_absent(p, dests[r])) return;
      const RingPlace place = ring_place(head, dests[r].slots);
      ptx::st_relaxed_sys(&dests[r].flags[kPayload][place.slot], ring_value(epoch, place.lap));
    });
    announce_and_await_done(p, epoch);
  } else if (warp < Roles::kMetaReceiversAt) {
    if (!split.sends()) copier = Roles::kSenders + warp - Roles::kMetaSendersAt;
  } else if (warp < Roles::kRowReceiversAt) {
    const int worker = (warp - Roles::kMetaReceiversAt) * gridDim.x + blockIdx.x;
    receive_meta<kRouted>(p, epoch, p.recv_segment >= 0, worker, Roles::kMetaReceivers * gridDim.x);
  } else if (split.copiers > 0 && (!split.apart || !split.sends())) {
    copier = warp - Roles::kRowReceiversAt + (split.apart ? Roles::kSenders + Roles::kMetaSenders : 0);
  }
  const int copiers_each = split.apart ? DispatchSplit<kBulk>::kCopiers : Roles::kRowReceivers,
            first = split.apart ? split.senders : 0;
  if (copier >= 0)
    receive_rows(p, epoch, copier * split.copiers + (static_cast<int>(blockIdx.x) - first),
                 copiers_each * split.copiers);
}

template <bool kBulk>
__device__ inline DispatchJob dispatch_job(const DispatchParams &p, const DispatchShared<kBulk> &at, uint64_t epoch,
                                           uint8_t *shared) {
  auto *heads =
      reinterpret_cast<int32_t *>(shared + at.heads) + warp_id() * (kBulk ? kSendStages : 1) * p.session.team.num_ranks;
  return {p, reinterpret_cast<const DispatchDest *>(shared + at.dests), epoch, heads, static_cast<uint32_t>(epoch % 2)};
}

}  // namespace deepep

namespace deep_ep::intranode {  // V1's names: tools find kernels in traces by them
using namespace deepep;

template <bool kBulk>
__global__ void __launch_bounds__(DispatchRoles<kBulk>::kThreads, 1)
    dispatch(const __grid_constant__ DispatchParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;  // the launcher does not choose this form below 9.0
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.session;
  MatrixEntry early{0, 0};
  if (p.cached()) early = load_matrix_entry(p.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x);
  const WrongCounts wrong = load_wrong_counts(p);
  __shared__ uint64_t next_epoch;
  if (threadIdx.x == 0) next_epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  const DispatchShared<kBulk> at(p, p.stage_bytes);
  auto *dests = reinterpret_cast<DispatchDest *>(shared + at.dests);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  init_queues(queues, DispatchRoles<kBulk>::kSenders, kBulk);
  if (begin(s)) {
    uint64_t epoch = next_epoch;
    const Handshake hand = dispatch_handshake(p, epoch, early, wrong);
    if (blockIdx.x == 0) shrinks(s.team) ? post_to_members(s, hand) : post_handshake(s, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    prepare_dests(p, dests);
    const DispatchSplit<kBulk> split(p.recv_segment < 0, blocks_apart(p), gridDim.x, s.team.num_ranks);
    DispatchJob job = dispatch_job<kBulk>(p, at, epoch, shared);
    auto rows = row_sender<kBulk>(job, queues, shared + at.stages, p.row_bytes, p.stage_bytes);
    if (sends_rows(p, split)) rows.start();
    const int metas = begin_metas<kBulk>(p, split, epoch, shared);
    const bool agreed = shrinks(s.team) ? await_agreement(s, hand, epoch) : await_handshake(s, hand);
    job.epoch = epoch;
    if (agreed && set_up_dests(p, epoch, dests)) {
      const bool staged = __syncthreads_or(threadIdx.x == 0 && [&] {
        bool any = false;
#pragma unroll 1
        for (int r = 0; r < s.team.num_ranks; ++r) any |= !dests[r].direct;
        return any;
      }());
      run_dispatch_roles<kBulk>(p, split, epoch, shared, staged, rows, metas);
      if (shrinks(s.team)) confirm_membership(s);
    } else {
      ptx::copy_words_wait<0>();
      if (sends_rows(p, split)) rows.abandon();
    }
  }
  finish(s, [&](bool failed) {
    if (failed) clear_dispatch_outputs(p);
    forget_bytes(s);
    if (threadIdx.x == 0) {  // resets both copies of the tickets, though one is 0 already
      Scratch *scratch = s.team.scratch;
      scratch->blocks_sent = 0;
      for (int copy = 0; copy < 2; ++copy) scratch->tokens_taken[copy] = scratch->metas_taken[copy] = 0;
      end_epoch(s.team);
      clear_wrong_counts(p);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::intranode
