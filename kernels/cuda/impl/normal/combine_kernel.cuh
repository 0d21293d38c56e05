// combine_kernel.cuh - combine: senders push rows of x back to their tokens' ranks, in the order of the tokens there;
// reducing warps take tokens by tickets and sum in FP32 in the order of ranks. kPushed, in a team with
// DK_TEAM_NORMAL_COPY: copies before the kernel may have brought all rows of a rank but its own.
#pragma once
#include "cuda/impl/normal/combine_job.cuh"
#include "cuda/impl/normal/combine_sums.cuh"
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"

namespace deepep {

// kSenders is the maximum; with many blocks fewer warps send and the others sum: 60 to 72 senders in all keep the links
// full, and each one less shortens the queues. With 24 blocks 3 senders of 4 took 473 us and 4 took 498, with 16 blocks
// 562 and 472.
constexpr int kCombineSenders = 60;
template <bool kBulk>
struct CombineRoles {
  static constexpr int kSenders = kBulk ? 4 : 8, kPublishers = 1, kReducers = kBulk ? 15 : 11;
  static constexpr int kReducersAt = kSenders + kPublishers;
  static constexpr int kWarps = kReducersAt + kReducers, kThreads = kWarps * kWarp;
  static int senders(int blocks, int num_ranks) {  // each rank needs one, see combine_job
    return kBulk ? min(kSenders, max(ceil_div(kCombineSenders, blocks), ceil_div(num_ranks, blocks))) : kSenders;
  }
};

template <bool kBulk>
struct CombineShared {
  uint32_t stages, dests, sources, queues, bytes;
  __host__ __device__ CombineShared(uint32_t num_ranks, uint32_t stage_bytes) {
    constexpr uint32_t senders = CombineRoles<kBulk>::kSenders, stages_each = kBulk ? kSendStages : 1;
    stages = 0;
    dests = kBulk ? align_up<uint32_t>(senders * stages_each * stage_bytes, 128) : 0;
    sources = dests + num_ranks * static_cast<uint32_t>(sizeof(CombineDest));
    queues = align_up<uint32_t>(sources + num_ranks * static_cast<uint32_t>(sizeof(CombineSource)), 16);
    bytes = align_up<uint32_t>(queues + senders * static_cast<uint32_t>(sizeof(SendQueue)), 128);
  }
};

template <bool kBulk, bool kPushed>
__device__ inline void run_combine_roles(const CombineParams &p, uint64_t epoch, uint8_t *shared, int32_t *slots,
                                         RowSender<kBulk, MaskedCombineJob> &rows) {
  using Roles = CombineRoles<kBulk>;
  const CombineShared<kBulk> at(p.session.team.num_ranks, p.stage_bytes);
  const auto *dests = reinterpret_cast<const CombineDest *>(shared + at.dests);
  const auto *sources = reinterpret_cast<const CombineSource *>(shared + at.sources);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  const int warp = warp_id(), num_ranks = p.session.team.num_ranks;
  if (warp < p.senders) {
    rows.run(true);
    __syncwarp();
    if (lane_id() == 0) ptx::st_release_cta(&queues[warp].finished, 1);
  } else if (warp == Roles::kSenders) {
    const CombineJob job{p, dests, epoch, -1, 0};
    publish_rows(queues, p.senders, 1, [&](int row, int) {
      const int r = job.dest_of(row);
      if (absence_of(p, dests[r])) return;
      const RingPlace place = job.place_of(row, r);
      ptx::st_relaxed_sys(&dests[r].flags[place.slot], ring_value(epoch, place.lap));
    });
  } else {
    reduce_tokens<kPushed>(
        p, epoch, sources,
        slots + (warp > Roles::kSenders ? warp - Roles::kReducersAt : Roles::kReducers + warp) * num_ranks);
  }
}

}  // namespace deepep

namespace deep_ep::intranode {  // V1's names: tools find kernels in traces by them
using namespace deepep;

template <bool kBulk, bool kPushed>
__global__ void __launch_bounds__(CombineRoles<kBulk>::kThreads, 1) combine(const __grid_constant__ CombineParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;  // the launcher does not choose this form below 9.0
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.session;
  const MatrixEntry early = load_matrix_entry(p.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x);
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  const CombineShared<kBulk> at(s.team.num_ranks, p.stage_bytes);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  init_queues(queues, p.senders, kBulk);
  const bool begun = begin(s);
  if (begun) {
    const Handshake hand = combine_handshake<kPushed>(p, epoch, early);
    if (blockIdx.x == 0) shrinks(s.team) ? post_to_members(s, hand) : post_handshake(s, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    auto *dests = reinterpret_cast<CombineDest *>(shared + at.dests);
    auto *sources = reinterpret_cast<CombineSource *>(shared + at.sources);
    set_up_combine<kPushed>(p, dests, sources);
    MaskedCombineJob job{combine_job(p, dests, epoch), static_cast<uint32_t>(epoch % 2)};
    auto rows = row_sender<kBulk>(job, queues, shared + at.stages, p.row_bytes, p.stage_bytes);
    const bool sends = warp_id() < p.senders && (hand.mine.flags & kHandshakeRefused) == 0;
    if (sends) rows.start();
    const bool agreed = shrinks(s.team) ? await_agreement(s, hand, epoch) : await_handshake(s, hand);
    job.epoch = epoch;
    if (shrinks(s.team)) drop_absent(p, dests, sources);
    if (kPushed && agreed) find_pushed_rows(p, epoch, sources);
    if (agreed)
      run_combine_roles<kBulk, kPushed>(p, epoch, shared, reinterpret_cast<int32_t *>(shared + at.bytes), rows);
    else if (sends)
      rows.abandon();
    if (agreed && shrinks(s.team)) confirm_membership(s);
  }
  finish(s, [&](bool failed) {
    if (kPushed) failed |= share_failures(p, begun);
    if (failed) clear_combine_outputs(p);
    forget_bytes(s);
    for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
      s.team.scratch->rows_taken[epoch % 2][r] = 0;
      if (shrinks(s.team)) s.team.scratch->rows_taken[(epoch + 1) % 2][r] = 0;  // rows were taken before the agreement
    }
    if (threadIdx.x == 0) {
      s.team.scratch->tokens_taken[epoch % 2] = 0;
      end_epoch(s.team);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::intranode
