// dispatch.cuh - libdeepep_nvshmem.so: dispatch with a routing across nodes. Rows take the ways of normal/push_rows.cuh
// and normal/dispatch.cuh, whose roles these are; what belongs to a row, and where a reader puts it, is written here.
// An expanded row crosses once for each node too, and each reader writes it to the place of each of its choices.
#pragma once
#include "cuda/impl/normal/expanded_rows.cuh"
#include "internode/normal/dispatch.cuh"
#include "internode/routed/lanes.cuh"

namespace deepep::internode {

template <bool kExpand>
struct RoutedDispatchParams : InternodeDispatchParams {};

// Words after a row's payload: the token's number among all ranks' (that of recv_src_metadata); for each rank of the
// node the row's number, or -1, as RowWords has it; weights, experts, expanded: the choices' places; scales.
template <bool kExpand>
struct RoutedWords {
  int weights, experts, slots, scales, end;
  __host__ __device__ RoutedWords(const DispatchParams &d, int num_peers)
      : weights(1 + num_peers),
        experts(weights + d.num_topk),
        slots(experts + d.num_topk),
        scales(slots + (kExpand ? d.num_topk : 0)),
        end(scales + d.num_scales) {}
};
template <bool kExpand>
__host__ __device__ inline uint32_t words_bytes(const RoutedDispatchParams<kExpand> &p) {
  return 4u * RoutedWords<kExpand>(p.d, p.internode.num_peers).end;
}

// Lane k has choice k of a row.
struct RowChoice {
  int expert;  // -1: none
  uint32_t weight;
  int slot;
};
template <bool kExpand>
__device__ inline RowChoice load_choice(const DispatchParams &d, int token) {
  RowChoice choice{-1, 0, -1};
  if (lane_id() >= d.num_topk) return choice;
  const int64_t entry = static_cast<int64_t>(token) * d.num_topk + lane_id(),
                expert = load_index(d.topk_idx(), entry, d.index_bytes);
  if (expert >= d.num_experts)  // it counts as -1
    report_refusal(d.session, kNoted, DK_EINVAL, d.session.team.rank, DK_FIELD_TOPK_IDX, d.num_experts, expert);
  else if (expert >= 0)
    choice.expert = static_cast<int>(expert);
  if (d.topk_weights() != nullptr) choice.weight = d.topk_weights()[entry];
  if (kExpand) choice.slot = pointer<const int32_t>(d.dst_slot)[entry];
  return choice;
}
template <bool kExpand>
__device__ inline RowChoice arrived_choice(const DispatchParams &d, const RoutedWords<kExpand> &at,
                                           const uint32_t *words) {
  RowChoice choice{-1, 0, -1};
  if (lane_id() >= d.num_topk) return choice;
  choice.expert = static_cast<int32_t>(ptx::ld_relaxed_sys(words + at.experts + lane_id()));
  choice.weight = ptx::ld_relaxed_sys(words + at.weights + lane_id());
  if (kExpand) choice.slot = static_cast<int32_t>(ptx::ld_relaxed_sys(words + at.slots + lane_id()));
  return choice;
}
template <bool kExpand>
__device__ inline void store_choice_words(const DispatchParams &d, const RoutedWords<kExpand> &at, uint32_t *words,
                                          const RowChoice &choice) {
  if (lane_id() >= d.num_topk) return;
  words[at.weights + lane_id()] = choice.weight;
  words[at.experts + lane_id()] = static_cast<uint32_t>(choice.expert);
  if (kExpand) words[at.slots + lane_id()] = static_cast<uint32_t>(choice.slot);
}

// The expert's number at this rank; -1: another rank's, or none.
__device__ inline int local_expert(const DispatchParams &d, int expert) {
  const int num_local = d.num_experts / d.session.team.num_ranks, mine = expert - d.session.team.rank * num_local;
  return expert >= 0 && mine >= 0 && mine < num_local ? mine : -1;
}

// A row's payload to `ring` (null: not there) and to row `to` of recv_x of each lane, -1: none. Whole warp.
__device__ inline void copy_to_rows(const DispatchParams &d, uint8_t *ring, const uint8_t *from, int64_t to) {
  constexpr int kAtOnce = 4;
  const int chunks = static_cast<int>(d.row_bytes / 16);
  const uint32_t rows = __ballot_sync(kAllLanes, to >= 0);
#pragma unroll 1
  for (int first = 0; first < chunks; first += kWarp * kAtOnce) {
    const int mine = first + lane_id();
    uint4 data[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (mine + u * kWarp < chunks) data[u] = ptx::ld_stream(from + 16ull * (mine + u * kWarp));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (ring != nullptr && mine + u * kWarp < chunks) ptx::st_stream(ring + 16ull * (mine + u * kWarp), data[u]);
#pragma unroll 1
    for (uint32_t left = rows; left != 0; left &= left - 1) {
      uint8_t *row = d.recv_x() + __shfl_sync(kAllLanes, to, __ffs(static_cast<int>(left)) - 1) * d.row_bytes;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (mine + u * kWarp < chunks) ptx::st_stream(row + 16ull * (mine + u * kWarp), data[u]);
    }
  }
}

// Where a row for this rank goes, `row` being its number in the plain layout: lane k's place of choice k, or lane 0's
// row; -1: none. A place outside the outputs is a failure: its sender's handle is wrong.
template <bool kExpand>
__device__ inline int64_t row_of_lane(const DispatchParams &d, const RowChoice &choice, int64_t row, int source) {
  if (!kExpand) return lane_id() == 0 ? row : -1;
  if (local_expert(d, choice.expert) < 0) return -1;
  if (choice.slot >= 0 && choice.slot < d.num_expanded_tokens) return choice.slot;
  report_failure(d.session, DK_EINVAL, source, DK_FIELD_DST_SLOT, d.num_expanded_tokens, choice.slot, 0);
  return -1;
}

// What belongs to a row for this rank besides payload and scales. token: its number among all ranks'.
template <bool kExpand>
__device__ inline void store_choice(const DispatchParams &d, int64_t row, int64_t to, const RowChoice &choice,
                                    int32_t token) {
  const int k = lane_id(), mine = local_expert(d, choice.expert);
  const uint32_t here = __ballot_sync(kAllLanes, mine >= 0);
  const int64_t entry = row * d.num_topk + k;
  if (kExpand && to >= 0 && d.recv_topk_weights() != nullptr) d.recv_topk_weights()[to] = choice.weight;
  if (!kExpand && k < d.num_topk) {
    if (d.recv_topk_weights() != nullptr) d.recv_topk_weights()[entry] = choice.weight;
    if (d.recv_topk_idx() != nullptr && d.index_bytes == 8)
      static_cast<int64_t *>(d.recv_topk_idx())[entry] = mine;
    else if (d.recv_topk_idx() != nullptr)
      static_cast<int32_t *>(d.recv_topk_idx())[entry] = mine;
  }
  if (d.cached() || d.recv_src_metadata == 0) return;
  int32_t *meta = src_metadata(d, row);
  if (kExpand && k < d.num_topk) meta[2 + k] = static_cast<int32_t>(to);
  if (k != 0) return;
  meta[0] = token;
  meta[1] = token / d.num_max_tokens * d.num_topk + last_lane(here);
}

// Scale `which` to the rows of all lanes that have one.
__device__ inline void store_scale(const DispatchParams &d, int64_t to, uint32_t rows, int which, uint32_t scale) {
#pragma unroll 1
  for (uint32_t left = rows; left != 0; left &= left - 1) {
    const int64_t row = __shfl_sync(kAllLanes, to, __ffs(static_cast<int>(left)) - 1);
    if (which < d.num_scales) d.recv_scales()[row * d.recv_scale_token_stride + which * d.recv_scale_stride] = scale;
  }
}

// As send_row() without a routing.
template <bool kExpand>
__device__ inline void send_row(const RoutedDispatchParams<kExpand> &p, int node, int token, uint8_t *place) {
  const DispatchParams &d = p.d;
  const RoutedWords<kExpand> at(d, p.internode.num_peers);
  const int32_t *heads =
      d.send_head() + static_cast<int64_t>(token) * d.session.team.num_ranks + node * p.internode.num_peers;
  auto *words = reinterpret_cast<uint32_t *>(place + d.row_bytes);
  const RowChoice choice = load_choice<kExpand>(d, token);
  copy_payload(place, d.x() + static_cast<uint64_t>(token) * d.row_bytes, d.row_bytes);
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(d.session.team.rank * d.num_max_tokens + token);
#pragma unroll 1
  for (int i = lane_id(); i < p.internode.num_peers; i += kWarp) words[1 + i] = static_cast<uint32_t>(heads[i]);
  store_choice_words(d, at, words, choice);
#pragma unroll 1
  for (int i = lane_id(); i < d.num_scales; i += kWarp)
    words[at.scales + i] = d.scales()[token * d.scale_token_stride + i * d.scale_stride];
}

// A row that has come here. payload: null, where it is in its place.
template <bool kExpand>
__device__ inline void take_row(const RoutedDispatchParams<kExpand> &p, const uint8_t *payload, const uint32_t *words,
                                int64_t row) {
  const DispatchParams &d = p.d;
  const RoutedWords<kExpand> at(d, p.internode.num_peers);
  const RowChoice choice = arrived_choice(d, at, words);
  const auto token = static_cast<int32_t>(ptx::ld_relaxed_sys(words));
  const int64_t to = row_of_lane<kExpand>(d, choice, row, token / d.num_max_tokens);
  if (payload != nullptr) copy_to_rows(d, nullptr, payload, to);
  store_choice<kExpand>(d, row, to, choice, token);
  const uint32_t rows = d.recv_scales() == nullptr ? 0 : __ballot_sync(kAllLanes, to >= 0);
#pragma unroll 1
  for (int first = 0; first < d.num_scales; first += kWarp) {
    const int i = first + lane_id();
    store_scale(d, to, rows, i, i < d.num_scales ? ptx::ld_relaxed_sys(words + at.scales + i) : 0);
  }
}
template <bool kExpand>
__device__ inline void pad_outputs(const RoutedDispatchParams<kExpand> &p, int worker, int workers) {
  if (kExpand && (p.d.flags & DK_DISPATCH_ZERO_PADDING) != 0) write_padding<false>(p.d, worker, workers);
  if (!kExpand && p.d.num_worst_tokens > 0) pad_rows(p.d, worker, workers);
}

}  // namespace deepep::internode
