// routed_dispatch_kernel.cuh - dispatch where the handle keeps the routing. In the plain layout the roles are those of
// dispatch_kernel.cuh. Expanded rows cross a link once for each rank: straight to the place of their first choice, or
// through the ring; the receiving warps write them to their other places.
#pragma once
#include "cuda/impl/normal/dispatch_kernel.cuh"
#include "cuda/impl/normal/moved_rows.cuh"

namespace deepep {

template <bool kBulk, bool kExpand, bool kShrinks>
__device__ inline auto routed_job(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch, int32_t *heads,
                                  bool shares_own, SendQueue *queues) {
  if constexpr (kExpand)
    return ExpandedJob<kBulk && !kShrinks>{
        {p, dests, epoch, heads, static_cast<uint32_t>(epoch % 2)}, shares_own, queues + warp_id()};
  else
    return DispatchJob{p, dests, epoch, heads, static_cast<uint32_t>(epoch % 2)};
}

// As DispatchShared, whose last part is longer here.
template <bool kBulk, bool kExpand>
struct RoutedShared : DispatchShared<kBulk> {
  uint32_t head_words;  // of a stage
  __host__ __device__ RoutedShared(const DispatchParams &p, uint32_t stage_bytes)
      : DispatchShared<kBulk>(p, stage_bytes), head_words(kExpand ? expanded_head_words(p) : p.session.team.num_ranks) {
    const uint32_t stages = DispatchRoles<kBulk>::kSenders * (kBulk ? kSendStages : 1);
    this->bytes = align_up<uint32_t>(this->heads + stages * head_words * 4, 128);
  }
};

// With expanded rows every warp that does not send receives; where there are enough blocks, some do nothing else. With
// bulk copies the latter's first warps move rows, and the others, those of all blocks, receive metadata: scattered
// scales take an SM longer than rows do. But not where rings are so small that slots are used again: there each warp
// takes both of its rows, since a slot is free once both have been read; nor in a team that shrinks, where one warp
// must find out that a source is lost.
template <bool kBulk>
struct ExpandedSplit : DispatchSplit<kBulk> {
  using Roles = DispatchRoles<kBulk>;
  static constexpr int kApart = Roles::kWarps - Roles::kPublishers,
                       kBeside = Roles::kMetaReceivers + Roles::kRowReceivers;
  __device__ explicit ExpandedSplit(const DispatchParams &p)
      : DispatchSplit<kBulk>(true, blocks_apart(p), gridDim.x, p.session.team.num_ranks) {}
  __device__ int workers() const { return this->copiers * (this->apart ? kApart : kBeside); }
  // This warp's number among the receiving ones; -1: it is none.
  __device__ int worker() const {
    const int warp = warp_id(), block = static_cast<int>(blockIdx.x) - (this->apart ? this->senders : 0);
    if (block < 0 || (warp >= Roles::kSenders && warp < Roles::kMetaSendersAt)) return -1;
    const int among = warp < Roles::kSenders ? warp : warp - Roles::kPublishers;
    if (!this->apart && warp < Roles::kMetaReceiversAt) return -1;
    return (this->apart ? among : warp - Roles::kMetaReceiversAt) * this->copiers + block;
  }
  __device__ bool moves(const DispatchParams &p) const {
    const int num_ranks = p.session.team.num_ranks;
    return kBulk && this->apart && num_ranks > 1 && this->copiers * Roles::kSenders >= num_ranks &&
           most_rows_of_a_source(p) <= static_cast<int>(dispatch_ring(p, p.recv_segment >= 0).slots);
  }
};

template <bool kBulk, bool kShrinks>
__device__ inline void publish_expanded(const DispatchParams &p, const DispatchDest *dests, SendQueue *queues,
                                        uint64_t epoch) {
  const int num_ranks = p.session.team.num_ranks;
  publish_rows(queues, DispatchRoles<kBulk>::kSenders, num_ranks, [&](int token, int r) {
    if (token >= p.num_tokens) return;  // it stays here
    const int head = p.send_head()[static_cast<int64_t>(token) * num_ranks + r];
    if (head < 0 || r == p.session.team.rank || (kShrinks && is_absent(p, dests[r]))) return;
    const RingPlace place = ring_place(head, dests[r].slots);
    ptx::st_relaxed_sys(&dests[r].flags[kPayload][place.slot], ring_value(epoch, place.lap));
  });
}

template <bool kBulk, bool kShrinks>
__device__ inline void run_expanded_roles(const DispatchParams &p, const ExpandedSplit<kBulk> &split, bool moves,
                                          uint64_t epoch, uint8_t *shared,
                                          RowSender<kBulk, ExpandedJob<kBulk && !kShrinks>> &rows) {
  using Roles = DispatchRoles<kBulk>;
  const RoutedShared<kBulk, true> at(p, p.stage_bytes);
  const auto *dests = reinterpret_cast<const DispatchDest *>(shared + at.dests);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  const int warp = warp_id(), worker = split.worker();
  if (warp < Roles::kSenders) {
    if (sends_rows(p, split)) rows.run(true);
    __syncwarp();
    if (lane_id() == 0) ptx::st_release_cta(&queues[warp].finished, 1);
  } else if (warp < Roles::kMetaSendersAt) {
    publish_expanded<kBulk, kShrinks>(p, dests, queues, epoch);
  } else if (warp < Roles::kMetaSendersAt + static_cast<int>(p.meta_senders) && split.sends()) {
    send_meta<kBulk, true>(p, dests, {shared + at.meta + (warp - Roles::kMetaSendersAt) * meta_space_bytes(p), 0},
                           epoch);
  }
  if constexpr (kShrinks) {
    if (worker >= 0) receive_expanded<true, true>(p, epoch, worker, split.workers());
    return;
  }
  if (!moves) {
    if (worker >= 0) receive_expanded<true, false>(p, epoch, worker, split.workers());
    return;
  }
  if (warp >= Roles::kMetaSendersAt) {
    const int receiver = (warp - Roles::kMetaSendersAt) * gridDim.x + blockIdx.x,
              receivers = Roles::kAllMetaSenders * gridDim.x;
    if (!gathers_scales(p))
      receive_expanded<false, false>(p, epoch, receiver, receivers);
    else if (receive_expanded<false, false, true>(p, epoch, receiver, receivers))
      gather_scales(p, receiver, receivers);
  }
  if (worker < 0 || warp >= Roles::kSenders) return;
#if DEEPEP_HAS_BULK_COPY
  RowMover mover{p,
                 queues + warp,
                 shared + at.stages + static_cast<uint64_t>(warp) * kSendStages * p.stage_bytes,
                 rows.job.heads,
                 at.head_words,
                 p.recv_segment >= 0};
  move_rows(p, epoch, mover, worker, Roles::kSenders * split.copiers, dests[p.session.team.rank].limit);
#endif
}

template <bool kBulk>
__device__ inline void run_routed_roles(const DispatchParams &p, const DispatchSplit<kBulk> &split, uint64_t epoch,
                                        uint8_t *shared, RowSender<kBulk, DispatchJob> &rows, int metas) {
  const DispatchShared<kBulk> at(p, p.stage_bytes);
  const auto *dests = reinterpret_cast<const DispatchDest *>(shared + at.dests);
  bool staged = false;
#pragma unroll 1
  for (int r = 0; r < p.session.team.num_ranks; ++r) staged |= !dests[r].direct;
  run_dispatch_roles<kBulk, true>(p, split, epoch, shared, staged, rows, metas);
}

template <bool kBulk, bool kExpand, bool kShrinks>
__device__ inline void dispatch_with_routing(const DispatchParams &p, uint8_t *shared) {
  const Session &s = p.session;
  MatrixEntry early{0, 0};
  if (p.cached()) early = load_matrix_entry(p.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x);
  const WrongCounts wrong = load_wrong_counts(p);
  __shared__ uint64_t next_epoch;
  if (threadIdx.x == 0) next_epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  const RoutedShared<kBulk, kExpand> at(p, p.stage_bytes);
  auto *dests = reinterpret_cast<DispatchDest *>(shared + at.dests);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  init_queues(queues, DispatchRoles<kBulk>::kSenders, kBulk);
  if (begin(s)) {
    uint64_t epoch = next_epoch;
    const Handshake hand = dispatch_handshake(p, epoch, early, wrong);
    if (blockIdx.x == 0) post_to_peers<kShrinks>(s, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    prepare_dests(p, dests);
    const ExpandedSplit<kBulk> expanded_split(p);
    const DispatchSplit<kBulk> plain_split(p.recv_segment < 0, blocks_apart(p), gridDim.x, s.team.num_ranks);
    const DispatchSplit<kBulk> &split = kExpand ? expanded_split : plain_split;
    auto *heads =
        reinterpret_cast<int32_t *>(shared + at.heads) + warp_id() * (kBulk ? kSendStages : 1) * at.head_words;
    const bool moves = kExpand && kBulk && !kShrinks && expanded_split.moves(p);
    auto job = routed_job<kBulk, kExpand, kShrinks>(p, dests, epoch, heads, moves && p.recv_segment >= 0, queues);
    auto rows = row_sender<kBulk>(job, queues, shared + at.stages, p.row_bytes, p.stage_bytes);
    if (sends_rows(p, split)) rows.start();
    int metas = kNoBatch;
    if constexpr (!kExpand && !kShrinks) metas = begin_metas<kBulk, true>(p, plain_split, epoch, shared);
    const bool agreed = await_peers<kShrinks>(s, hand, epoch);
    if (kShrinks) job.epoch = epoch;
    if (agreed && set_up_dests(p, epoch, dests)) {
      if constexpr (kExpand) {
        set_up_expanded_dests<kShrinks>(p, epoch, dests);
        run_expanded_roles<kBulk, kShrinks>(p, expanded_split, moves, epoch, shared, rows);
      } else {
        __syncthreads();
        run_routed_roles<kBulk>(p, plain_split, epoch, shared, rows, metas);
      }
      if constexpr (kShrinks) confirm_membership(s);
    } else {
      ptx::copy_words_wait<0>();
      if (sends_rows(p, split)) rows.abandon();
    }
  }
  finish(s, [&](bool failed) {
    if (failed && kExpand) clear_expanded_outputs(p);
    if (failed && !kExpand) clear_dispatch_outputs(p);
    if (!failed && kExpand && kShrinks)
      zero_unnamed_rows(p, reinterpret_cast<uint32_t *>(shared), static_cast<int>((kBulk ? at.dests : at.bytes) / 4));
    if constexpr (kShrinks) forget_bytes(s);
    if (threadIdx.x == 0) {  // resets both copies of the tickets, though one is 0 already
      Scratch *scratch = s.team.scratch;
      scratch->blocks_sent = scratch->own_rows_taken = scratch->metas_spread = 0;
      for (int copy = 0; copy < 2; ++copy) scratch->tokens_taken[copy] = scratch->metas_taken[copy] = 0;
      if constexpr (kShrinks)
        end_epoch(s.team);
      else
        end_epoch_of(s.team, scratch->epoch + 1);
      clear_wrong_counts(p);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deepep

namespace deep_ep::intranode {
using namespace deepep;

template <bool kBulk, bool kShrinks>
__global__ void __launch_bounds__(DispatchRoles<kBulk>::kThreads, 1)
    dispatch_routed(const __grid_constant__ DispatchParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;  // the launcher does not choose this form below 9.0
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  dispatch_with_routing<kBulk, false, kShrinks>(p, shared);
}

template <bool kBulk, bool kShrinks>
__global__ void __launch_bounds__(DispatchRoles<kBulk>::kThreads, 1)
    dispatch_expanded(const __grid_constant__ DispatchParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  dispatch_with_routing<kBulk, true, kShrinks>(p, shared);
}

}  // namespace deep_ep::intranode
