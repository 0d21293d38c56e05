// shrink_dispatch.cuh - libdeepep_nvshmem.so: dispatch with a routing of a team that shrinks across nodes. Rows go from
// rank to rank, by the senders and readers of normal/shrink_dispatch.cuh; what belongs to a row, and where a reader
// puts it, is as in dispatch.cuh. Rows of a lost rank become zeros that name no expert.
#pragma once
#include "cuda/impl/normal/routed_meta.cuh"
#include "internode/normal/shrink_dispatch.cuh"
#include "internode/routed/dispatch.cuh"

namespace deepep::internode {

template <bool kExpand>
struct RoutedShrinkDispatchParams : ShrinkDispatchParams {};

template <bool kExpand>
__host__ __device__ inline uint32_t pair_bytes(const RoutedShrinkDispatchParams<kExpand> &p) {
  return p.d.row_bytes + 4u * RoutedWords<kExpand>(p.d, 0).end;
}

template <bool kExpand>
__device__ inline void send_pair_row(const RoutedShrinkDispatchParams<kExpand> &p, int token, uint8_t *place,
                                     int64_t own) {
  const DispatchParams &d = p.d;
  const RoutedWords<kExpand> at(d, 0);
  const RowChoice choice = load_choice<kExpand>(d, token);
  const int32_t number = d.session.team.rank * d.num_max_tokens + token;
  const int64_t to = place != nullptr ? -1 : row_of_lane<kExpand>(d, choice, own, d.session.team.rank);
  auto *words = reinterpret_cast<uint32_t *>(place + d.row_bytes);
  copy_to_rows(d, place, d.x() + static_cast<uint64_t>(token) * d.row_bytes, to);
  if (place == nullptr) {
    store_choice<kExpand>(d, own, to, choice, number);
  } else {
    if (lane_id() == 0) words[0] = static_cast<uint32_t>(number);
    store_choice_words(d, at, words, choice);
  }
  const uint32_t rows = d.recv_scales() == nullptr ? 0 : __ballot_sync(kAllLanes, to >= 0);
#pragma unroll 1
  for (int first = 0; first < d.num_scales; first += kWarp) {
    const int i = first + lane_id();
    const uint32_t scale = i < d.num_scales ? d.scales()[token * d.scale_token_stride + i * d.scale_stride] : 0;
    if (place != nullptr && i < d.num_scales) words[at.scales + i] = scale;
    store_scale(d, to, rows, i, scale);
  }
}

template <bool kExpand>
__device__ inline void take_pair_row(const RoutedShrinkDispatchParams<kExpand> &p, const uint8_t *from, int64_t row) {
  const DispatchParams &d = p.d;
  const RoutedWords<kExpand> at(d, 0);
  const auto *words = reinterpret_cast<const uint32_t *>(from + d.row_bytes);
  const RowChoice choice = arrived_choice(d, at, words);
  const auto token = static_cast<int32_t>(ptx::ld_relaxed_sys(words));
  const int64_t to = row_of_lane<kExpand>(d, choice, row, token / d.num_max_tokens);
  copy_to_rows(d, nullptr, from, to);
  store_choice<kExpand>(d, row, to, choice, token);
  const uint32_t rows = d.recv_scales() == nullptr ? 0 : __ballot_sync(kAllLanes, to >= 0);
#pragma unroll 1
  for (int first = 0; first < d.num_scales; first += kWarp) {
    const int i = first + lane_id();
    store_scale(d, to, rows, i, i < d.num_scales ? ptx::ld_relaxed_sys(words + at.scales + i) : 0);
  }
}

// Expanded: which places the row would have had only a handle of before says. zero_unnamed_rows() finds the others.
template <bool kExpand>
__device__ inline void blank_pair_row(const RoutedShrinkDispatchParams<kExpand> &p, int source, const PairRows &rows,
                                      int number) {
  if constexpr (kExpand) {
    blank_expanded(p.d, source, number, rows.count, 1);
  } else {
    const int64_t row = static_cast<int64_t>(rows.first) + number;
    zero_recv_row(p.d, row);
    blank_routed(p.d, source, row, number, 1);
  }
}

template <bool kExpand>
__device__ inline void pad_pair_rows(const RoutedShrinkDispatchParams<kExpand> &p, int worker, int workers) {
  if (kExpand && (p.d.flags & DK_DISPATCH_ZERO_PADDING) != 0) write_padding<true>(p.d, worker, workers);
  if (!kExpand && p.d.num_worst_tokens > 0) pad_rows(p.d, worker, workers);
}

constexpr int kNamedWords = 1024;  // of 32 rows each, at which zero_unnamed_rows() looks together

}  // namespace deepep::internode

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

template <bool kExpand>
__global__ void __launch_bounds__(ShrinkDispatchRoles::kThreads, 1)
    dispatch_routed_shrinking(const __grid_constant__ RoutedShrinkDispatchParams<kExpand> p) {
  __shared__ uint32_t named[kExpand ? kNamedWords : 1];
  const Session &s = p.d.session;
  const PutPost by{s, p.internode, p.shrink};
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand = dispatch_handshake(
        p.d, epoch, load_matrix_entry(p.d.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x), load_wrong_counts(p.d));
    if (blockIdx.x == 0) post_to_members(by, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_agreement(s, hand, epoch, by) && (kExpand || members_have_room(p, by))) {
      run_pair_roles(p, by, epoch);
      confirm_membership(s);
    }
  }
  finish(s, [&](bool failed) {
    if (failed && kExpand) clear_expanded_outputs(p.d);
    if (failed && !kExpand) clear_dispatch_outputs(p.d);
    if (!failed && kExpand) zero_unnamed_rows(p.d, named, kNamedWords);
    forget_bytes(s);
    if (threadIdx.x == 0) {
      end_epoch(s.team);
      clear_wrong_counts(p.d);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
