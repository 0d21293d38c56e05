// routed_combine_kernel.cuh - combine where the handle keeps the routing: as combine_kernel.cuh, but sums have the
// order of the token's choices, and expanded rows are added before they are sent.
#pragma once
#include "cuda/impl/normal/bulk_sums.cuh"
#include "cuda/impl/normal/combine_kernel.cuh"
#include "cuda/impl/normal/routed_sums.cuh"

namespace deepep {

// 16 warps: summing warps need the registers that more would leave them none of, and have more loads in flight instead.
template <bool kBulk>
struct RoutedRoles : CombineRoles<kBulk> {
  static constexpr int kWarps = 16, kThreads = kWarps * kWarp, kReducers = kWarps - CombineRoles<kBulk>::kReducersAt;
};

// Summing before sending reads each expanded row, twice what crosses the links: more warps send than in the plain form.
template <bool kBulk>
struct ExpandedRoles {
  static constexpr int kSenders = kBulk ? 9 : 8, kPublishers = 1, kReducers = kBulk ? 5 : 7;
  static constexpr int kReducersAt = kSenders + kPublishers;
  static constexpr int kWarps = kReducersAt + kReducers, kThreads = kWarps * kWarp;
};
template <bool kBulk>
struct ExpandedShared {
  static constexpr uint32_t kSumming = ExpandedRoles<kBulk>::kWarps - ExpandedRoles<kBulk>::kPublishers;
  uint32_t stages, arrived, dests, sources, queues, words, bytes;
  __host__ __device__ explicit ExpandedShared(const CombineParams &p) {
    constexpr uint32_t senders = ExpandedRoles<kBulk>::kSenders;
    const uint32_t num_ranks = p.session.team.num_ranks;
    stages = kBulk ? kSumming * kTermsAhead * kTermPiece : 0;
    arrived = stages + (kBulk ? senders * kSumStages * kTermPiece : 0);
    dests = arrived + (kBulk ? align_up<uint32_t>(kSumming * kTermsAhead * 8, 16) : 0);
    sources = dests + num_ranks * static_cast<uint32_t>(sizeof(CombineDest));
    queues = align_up<uint32_t>(sources + num_ranks * static_cast<uint32_t>(sizeof(CombineSource)), 16);
    words = queues + senders * static_cast<uint32_t>(sizeof(SendQueue));
    bytes = align_up<uint32_t>(words + kSumming * (kBulk ? 2 : 1) * 4 * reducer_words(p), 128);
  }
};

template <bool kShrinks>
using RoutedJob = std::conditional_t<kShrinks, MaskedCombineJob, CombineJob>;
template <bool kShrinks>
__device__ inline RoutedJob<kShrinks> routed_combine_job(const CombineParams &p, const CombineDest *dests,
                                                         uint64_t epoch) {
  if constexpr (kShrinks)
    return {combine_job(p, dests, epoch), static_cast<uint32_t>(epoch % 2)};
  else
    return combine_job(p, dests, epoch);
}

template <bool kShrinks>
__device__ inline void publish_combine_rows(const CombineParams &p, uint64_t epoch, const CombineDest *dests,
                                            SendQueue *queues, int num_queues) {
  const CombineJob job{p, dests, epoch, -1, 0};
  publish_rows(queues, num_queues, 1, [&](int row, int) {
    const int r = job.dest_of(row);
    if (kShrinks && absence_of(p, dests[r])) return;
    const RingPlace place = job.place_of(row, r);
    ptx::st_relaxed_sys(&dests[r].flags[place.slot], ring_value(epoch, place.lap));
  });
}

// As run_combine_roles, with the sums of routed_sums.cuh.
template <bool kBulk, bool kShrinks>
__device__ inline void run_ordered_roles(const CombineParams &p, uint64_t epoch, uint8_t *shared,
                                         RowSender<kBulk, RoutedJob<kShrinks>> &rows) {
  using Roles = RoutedRoles<kBulk>;
  const CombineShared<kBulk> at(p.session.team.num_ranks, p.stage_bytes);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  const int warp = warp_id();
  if (warp < p.senders) {
    rows.run(true);
    __syncwarp();
    if (lane_id() == 0) ptx::st_release_cta(&queues[warp].finished, 1);
  } else if (warp == Roles::kSenders) {
    publish_combine_rows<kShrinks>(p, epoch, reinterpret_cast<const CombineDest *>(shared + at.dests), queues,
                                   p.senders);
  } else {
    const int reducer = warp > Roles::kSenders ? warp - Roles::kReducersAt : Roles::kReducers + warp;
    reduce_routed<3, kShrinks>(p, epoch, reinterpret_cast<const CombineSource *>(shared + at.sources),
                               reinterpret_cast<int32_t *>(shared + at.bytes) + reducer * reducer_words(p));
  }
}

// Senders reduce, too, in the end.
template <bool kBulk, bool kShrinks>
__device__ inline void run_expanded_roles(const CombineParams &p, uint64_t epoch, uint8_t *shared,
                                          const CombineDest *dests, const CombineSource *sources) {
  using Roles = ExpandedRoles<kBulk>;
  using Job = RoutedJob<kShrinks>;
  const ExpandedShared<kBulk> at(p);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  const int warp = warp_id(), summing = warp < Roles::kSenders ? warp : warp - Roles::kPublishers;
  const bool sends = warp < Roles::kSenders;
  if (warp == Roles::kSenders) {
    publish_combine_rows<kShrinks>(p, epoch, dests, queues, Roles::kSenders);
    return;
  }
  auto *words = reinterpret_cast<int32_t *>(shared + at.words) + summing * (kBulk ? 2 : 1) * reducer_words(p);
  const auto finish_sending = [&] {
    __syncwarp();
    if (lane_id() == 0) ptx::st_release_cta(&queues[warp].finished, 1);
  };
  if constexpr (!kBulk) {
    if (sends) {
      Job job = routed_combine_job<kShrinks>(p, dests, epoch);
      TermSender<false, Job>{job, queues + warp}.run();
      finish_sending();
    }
    reduce_routed<2, kShrinks>(p, epoch, sources, words);
  } else {
#if DEEPEP_HAS_BULK_COPY
    TermPieces pieces{shared + summing * kTermsAhead * kTermPiece,
                      reinterpret_cast<uint64_t *>(shared + at.arrived) + summing * kTermsAhead};
    pieces.init();
    if (sends) {
      Job job = routed_combine_job<kShrinks>(p, dests, epoch);
      TermSender<true, Job>{job, queues + warp, pieces, shared + at.stages + warp * kSumStages * kTermPiece}.run();
      finish_sending();
    }
    const int each = piece_chunks(p, sources, p.ring, p.piece_chunks);
    TermReducer<kShrinks>{p, epoch, sources, pieces, words, each}.run();
#endif
  }
}

// After a sum's kernel: tickets, epoch, statistics.
template <bool kShrinks>
__device__ inline void end_routed_combine(const CombineParams &p, uint64_t epoch, bool failed) {
  const Session &s = p.session;
  if (failed) clear_combine_outputs(p);
  if constexpr (kShrinks) forget_bytes(s);
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    s.team.scratch->rows_taken[epoch % 2][r] = 0;
    if (kShrinks) s.team.scratch->rows_taken[(epoch + 1) % 2][r] = 0;  // rows were taken before the agreement
  }
  if (threadIdx.x == 0) {
    s.team.scratch->tokens_taken[epoch % 2] = 0;
    if constexpr (kShrinks)
      end_epoch(s.team);
    else
      end_epoch_of(s.team, epoch);
  }
  record_kernel(s, nullptr, true, failed);
}

}  // namespace deepep

namespace deep_ep::intranode {
using namespace deepep;

// Rows in the plain layout.
template <bool kBulk, bool kShrinks>
__global__ void __launch_bounds__(RoutedRoles<kBulk>::kThreads, 1)
    combine_routed(const __grid_constant__ CombineParams p) {
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
  if (begin(s)) {
    const Handshake hand = combine_handshake(p, epoch, early);
    if (blockIdx.x == 0) post_to_peers<kShrinks>(s, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    auto *dests = reinterpret_cast<CombineDest *>(shared + at.dests);
    auto *sources = reinterpret_cast<CombineSource *>(shared + at.sources);
    set_up_combine(p, dests, sources);
    RoutedJob<kShrinks> job = routed_combine_job<kShrinks>(p, dests, epoch);
    auto rows = row_sender<kBulk>(job, queues, shared + at.stages, p.row_bytes, p.stage_bytes);
    const bool sends = warp_id() < p.senders && (hand.mine.flags & kHandshakeRefused) == 0;
    if (sends) rows.start();
    const bool agreed = await_peers<kShrinks>(s, hand, epoch);
    if (kShrinks) job.epoch = epoch;
    if constexpr (kShrinks) drop_absent(p, dests, sources);
    if (agreed)
      run_ordered_roles<kBulk, kShrinks>(p, epoch, shared, rows);
    else if (sends)
      rows.abandon();
    if (kShrinks && agreed) confirm_membership(s);
  }
  finish(s, [&](bool failed) { end_routed_combine<kShrinks>(p, epoch, failed); });
}

template <bool kBulk, bool kShrinks>
__global__ void __launch_bounds__(ExpandedRoles<kBulk>::kThreads, 1)
    combine_expanded(const __grid_constant__ CombineParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;
#endif
  using Roles = ExpandedRoles<kBulk>;
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.session;
  const MatrixEntry early = load_matrix_entry(p.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x);
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  const ExpandedShared<kBulk> at(p);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  init_queues(queues, Roles::kSenders, false);
  if (begin(s)) {
    const Handshake hand = combine_handshake(p, epoch, early);
    if (blockIdx.x == 0) post_to_peers<kShrinks>(s, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    auto *dests = reinterpret_cast<CombineDest *>(shared + at.dests);
    auto *sources = reinterpret_cast<CombineSource *>(shared + at.sources);
    set_up_combine(p, dests, sources);
    const bool agreed = await_peers<kShrinks>(s, hand, epoch);
    if constexpr (kShrinks) drop_absent(p, dests, sources);
    if (agreed) run_expanded_roles<kBulk, kShrinks>(p, epoch, shared, dests, sources);
    if (kShrinks && agreed) confirm_membership(s);
  }
  finish(s, [&](bool failed) { end_routed_combine<kShrinks>(p, epoch, failed); });
}

}  // namespace deep_ep::intranode
