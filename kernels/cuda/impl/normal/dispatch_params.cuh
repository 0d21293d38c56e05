// dispatch_params.cuh - the parameters of dispatch, and the shape of a row's metadata.
#pragma once
#include "cuda/layout/team.cuh"

namespace deepep {

// Metadata of so many tokens is one ticket, with one system fence for all of them; fewer tokens where the block's
// buffers would exceed kMetaBuffers.
constexpr uint32_t kMetaBatch = 16, kMetaBatchOfMany = 8;  // the latter where more warps send metadata
constexpr uint32_t kMetaSlots = 2;                         // buffers of a warp for rows in flight to ranks
constexpr uint32_t kMetaBuffers = 96 * 1024;

// Words of a row's metadata: scales, weights from num_scales on, the experts' numbers at the receiver, the token's
// number. An expert's number takes half a word, or a word where there are too many experts; all ones: another rank's
// expert. The host derives this, since threads would have to divide each time.
struct MetaShape {
  int32_t shift;             // 1: two numbers in a word, else 0
  uint32_t num_local, none;  // experts of a rank; the number of another rank's expert
  int32_t numbers_at, source_at, words;
  int32_t slots_at;        // expanded, as rows are loaded: where each choice goes, which takes the numbers' place
  uint32_t stride;         // bytes
  uint32_t common_stride;  // as rows are loaded: scales, weights, experts, with room for what is made of them
};

// In place of the number of a segment: the receiver brings its rows by copies.
constexpr int32_t kPulled = DK_MAX_SEGMENTS;

// The arguments of a call, and what the launcher derives from them; arguments that the call does not use are 0. A
// function hides the address of the same name and returns it as a typed pointer.
struct DispatchParams : dk_dispatch_params {
  Session session{};
  MetaShape meta{};
  uint32_t row_bytes = 0, stage_bytes = 0;
  uint32_t meta_senders = 0;  // warps of a block that send metadata
  uint32_t meta_rows = 0;     // metadata of so many tokens is sent together
  // This rank's rows stay in its peers' outboxes, from where copies bring them (launch/normal_copies.h). The host has
  // made these by a matrix with this hash, by which so many rows arrive here.
  uint32_t pulled_hash = 0;
  int32_t pulled_rows = 0;

  __host__ __device__ bool cached() const { return (flags & DK_DISPATCH_CACHED) != 0; }
  __host__ __device__ bool pulls() const { return recv_segment == kPulled; }
  __host__ __device__ bool has_weights() const { return num_topk > 0 && dk_dispatch_params::topk_weights != 0; }
  __host__ __device__ int index_words() const { return index_bytes / 4; }  // as the caller has them
  __device__ const uint8_t *x() const { return pointer<const uint8_t>(dk_dispatch_params::x); }
  __device__ const uint32_t *scales() const { return pointer<const uint32_t>(dk_dispatch_params::scales); }
  __device__ const void *topk_idx() const { return pointer<const void>(dk_dispatch_params::topk_idx); }
  __device__ const uint32_t *topk_weights() const { return pointer<const uint32_t>(dk_dispatch_params::topk_weights); }
  __device__ const int32_t *rank_prefix_matrix() const {
    return pointer<const int32_t>(dk_dispatch_params::rank_prefix_matrix);
  }
  __device__ const int32_t *send_head() const { return pointer<const int32_t>(dk_dispatch_params::send_head); }
  __device__ uint8_t *recv_x() const { return pointer<uint8_t>(dk_dispatch_params::recv_x); }
  __device__ uint32_t *recv_scales() const { return pointer<uint32_t>(dk_dispatch_params::recv_scales); }
  __device__ void *recv_topk_idx() const { return pointer<void>(dk_dispatch_params::recv_topk_idx); }
  __device__ uint32_t *recv_topk_weights() const { return pointer<uint32_t>(dk_dispatch_params::recv_topk_weights); }
  __device__ int32_t *recv_src_idx() const { return pointer<int32_t>(dk_dispatch_params::recv_src_idx); }
};

inline MetaShape meta_shape(const DispatchParams &p) {
  MetaShape meta{};
  const bool expanded = p.routing == DK_ROUTING_EXPANDED;
  meta.num_local = p.num_experts / p.session.team.num_ranks;
  meta.shift = meta.num_local < 0xffff && !expanded ? 1 : 0;
  meta.none = meta.shift == 1 ? 0xffffu : 0xffffffffu;
  meta.numbers_at = p.num_scales + p.num_topk;
  meta.source_at = meta.numbers_at + ceil_div(p.num_topk, 1 + meta.shift);
  meta.words = meta.source_at + (p.cached() ? 0 : 1);
  meta.stride = align_up(4u * meta.words, 16u);
  meta.slots_at = meta.numbers_at + p.num_topk * p.index_words();
  meta.common_stride = max(meta.stride, align_up(4u * (meta.slots_at + (expanded ? p.num_topk : 0)), 16u));
  return meta;
}

// By threads `first` of `step`: received rows [from, to) name no expert: index -1, weight 0.
__device__ inline void name_nothing(const DispatchParams &p, int64_t from, int64_t to, int64_t first, int64_t step) {
  for (int64_t i = from * p.num_topk + first; i < to * p.num_topk; i += step) {
    for (int w = 0; p.recv_topk_idx() != nullptr && w < p.index_words(); ++w)
      static_cast<uint32_t *>(p.recv_topk_idx())[i * p.index_words() + w] = 0xffffffffu;
    if (p.recv_topk_weights() != nullptr) p.recv_topk_weights()[i] = 0;
  }
}

__host__ __device__ inline RingShape dispatch_ring(const DispatchParams &p, bool direct) {
  return ring_shape(p.session.team.nvl_bytes, p.session.team.num_ranks, direct ? 0 : p.row_bytes, p.meta.words * 4);
}

}  // namespace deepep
