// dispatch_row.cuh - libdeepep_nvshmem.so: dispatch's parameters, and what belongs to a row besides its payload: words
// after it in a ring, at the sender from the caller's tensors, at the receiver to its outputs.
#pragma once
#include "internode/normal/common.cuh"
#include "internode/normal/rings.h"

namespace deepep::internode {

struct DispatchRoles {
  static constexpr int kWarps = 24, kThreads = kWarps * kWarp;
};
// How many of a block's warps send rows and push them; the others read.
struct DispatchShape {
  int senders, pushers, staging_pushers;  // the latter where payloads are staged in this node
  int share = 1;                          // tokens that a stream takes at a time
};

struct InternodeDispatchParams {
  DispatchParams d;
  NodeView internode;
  RowRings rings;
  StreamLists lists;
  NormalState *state;
  WordRings words{}, staged{};  // the latter with payloads
  DispatchShape shape{};
};

// Words after a row's payload: the token; for each rank of the node the row's number among this sender's rows for it,
// or -1; weights, experts, scales.
struct RowWords {
  int numbers, weights, experts, scales, end;
  __host__ __device__ RowWords(const DispatchParams &d, int num_peers)
      : numbers(1),
        weights(numbers + num_peers),
        experts(weights + d.num_topk),
        scales(experts + d.num_topk),
        end(scales + d.num_scales) {}
};

// ---- At the sender --------------------------------------------------------------------------------------------------

// What a lane carries of a row besides the payload, loaded before it: an index and a weight, two scales.
struct RowExtras {
  int64_t expert;
  uint32_t weight, scales[2];
};
__device__ inline RowExtras load_extras(const DispatchParams &d, int token, int first) {
  RowExtras extras{-1, 0, {}};
  const int k = first + lane_id();
  const int64_t entry = static_cast<int64_t>(token) * d.num_topk + k;
  if (k < d.num_topk) extras.expert = load_index(d.topk_idx(), entry, d.index_bytes);
  if (k < d.num_topk && d.topk_weights() != nullptr) extras.weight = d.topk_weights()[entry];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = 2 * first + u * kWarp + lane_id();
    if (i < d.num_scales) extras.scales[u] = d.scales()[token * d.scale_token_stride + i * d.scale_stride];
  }
  return extras;
}

// Stores a row's extras at its place in this rank's outputs.
__device__ inline void store_extras(const DispatchParams &d, int64_t row, const RowExtras &extras, int first) {
  const int num_local = d.num_experts / d.session.team.num_ranks, k = first + lane_id();
  if (k < d.num_topk) {
    const int64_t mine = extras.expert - static_cast<int64_t>(d.session.team.rank) * num_local,
                  entry = row * d.num_topk + k;
    const bool local = extras.expert >= 0 && mine >= 0 && mine < num_local;
    if (d.recv_topk_weights() != nullptr) d.recv_topk_weights()[entry] = local ? extras.weight : 0;
    if (d.recv_topk_idx() != nullptr && d.index_bytes == 8)
      static_cast<int64_t *>(d.recv_topk_idx())[entry] = local ? mine : -1;
    else if (d.recv_topk_idx() != nullptr)
      static_cast<int32_t *>(d.recv_topk_idx())[entry] = local ? static_cast<int32_t>(mine) : -1;
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = 2 * first + u * kWarp + lane_id();
    if (i < d.num_scales && d.recv_scales() != nullptr) d.recv_scales()[row * d.num_scales + i] = extras.scales[u];
  }
}

// Lanes take extras from `first` on, 32 indices and 64 scales at a time.
__device__ inline bool has_extras(const DispatchParams &d, int first) {
  return first < d.num_topk || 2 * first < d.num_scales;
}

// An expert that is none counts as -1.
__device__ inline void check_expert(const DispatchParams &d, RowExtras &extras) {
  if (extras.expert >= -1 && extras.expert < d.num_experts) return;
  report_refusal(d.session, kNoted, DK_EINVAL, d.session.team.rank, DK_FIELD_TOPK_IDX, d.num_experts, extras.expert);
  extras.expert = -1;
}

// Stores extras among a row's words.
__device__ inline void store_words(const DispatchParams &d, const RowWords &at, uint32_t *words,
                                   const RowExtras &extras, int first) {
  const int k = first + lane_id();
  if (k < d.num_topk) {
    words[at.weights + k] = extras.weight;
    words[at.experts + k] = static_cast<uint32_t>(extras.expert);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = 2 * first + u * kWarp + lane_id();
    if (i < d.num_scales) words[at.scales + i] = extras.scales[u];
  }
}

// Copies a token's row into a ring's place for the node.
__device__ inline void send_row(const InternodeDispatchParams &p, int node, int token, uint8_t *place) {
  const DispatchParams &d = p.d;
  const RowWords at(d, p.internode.num_peers);
  const int32_t *heads =
      d.send_head() + static_cast<int64_t>(token) * d.session.team.num_ranks + node * p.internode.num_peers;
  auto *words = reinterpret_cast<uint32_t *>(place + d.row_bytes);
  const auto head = static_cast<uint32_t>(lane_id() < p.internode.num_peers ? heads[lane_id()] : -1);
  RowExtras extras = load_extras(d, token, 0);
  copy_payload(place, d.x() + static_cast<uint64_t>(token) * d.row_bytes, d.row_bytes);
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(token);
  if (lane_id() < p.internode.num_peers) words[at.numbers + lane_id()] = head;
#pragma unroll 1
  for (int i = kWarp + lane_id(); i < p.internode.num_peers; i += kWarp)
    words[at.numbers + i] = static_cast<uint32_t>(heads[i]);
#pragma unroll 1
  for (int first = 0; first == 0 || has_extras(d, first); first += kWarp) {
    if (first != 0) extras = load_extras(d, token, first);
    check_expert(d, extras);
    store_words(d, at, words, extras, first);
  }
}

// What crosses after a row's payload. Parameters of another kind have this and a send_row() of their own.
__host__ __device__ inline uint32_t words_bytes(const InternodeDispatchParams &p) {
  return 4u * RowWords(p.d, p.internode.num_peers).end;
}

// ---- At the receiver ------------------------------------------------------------------------------------------------

__device__ inline RowExtras load_arrived_extras(const DispatchParams &d, const RowWords &at, const uint32_t *words,
                                                int first) {
  RowExtras extras{-1, 0, {}};
  const int k = first + lane_id();
  if (k < d.num_topk) {
    extras.expert = static_cast<int32_t>(ptx::ld_relaxed_sys(words + at.experts + k));
    extras.weight = ptx::ld_relaxed_sys(words + at.weights + k);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int i = 2 * first + u * kWarp + lane_id();
    if (i < d.num_scales) extras.scales[u] = ptx::ld_relaxed_sys(words + at.scales + i);
  }
  return extras;
}

// Stores what belongs to row `row` besides its payload, which copy() moves meanwhile.
template <class Copy>
__device__ inline void take_words(const InternodeDispatchParams &p, const uint32_t *words, int64_t row, Copy copy) {
  const DispatchParams &d = p.d;
  const RowWords at(d, p.internode.num_peers);
  const auto token = static_cast<int32_t>(ptx::ld_relaxed_sys(words));
  RowExtras extras = load_arrived_extras(d, at, words, 0);
  copy();
  if (lane_id() == 0 && d.recv_src_idx() != nullptr) d.recv_src_idx()[row] = token;
#pragma unroll 1
  for (int first = 0; first == 0 || has_extras(d, first); first += kWarp) {
    if (first != 0) extras = load_arrived_extras(d, at, words, first);
    store_extras(d, row, extras, first);
  }
}

}  // namespace deepep::internode
