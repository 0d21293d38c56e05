// routed_meta.cuh - what arrives of a row's metadata where the handle keeps the routing.
#pragma once
#include "cuda/impl/normal/dispatch_dest.cuh"

namespace deepep {

__device__ inline bool expanded(const DispatchParams &p) { return p.routing == DK_ROUTING_EXPANDED; }
__device__ inline int32_t *src_metadata(const DispatchParams &p, int64_t row) {
  return pointer<int32_t>(p.recv_src_metadata) + row * (p.num_topk + 2);
}

// Nothing goes after a notify that was refused, with what is wrong in topk_idx.
__device__ __noinline__ inline bool goes_somewhere(const DispatchParams &p, int64_t token) {
  const int num_ranks = p.session.team.num_ranks;
  for (int r = 0; r < num_ranks; ++r)
    if (p.send_head()[token * num_ranks + r] >= 0) return true;
  return false;
}

// Copies `each` entries of every row to consecutive places, a lane for each entry, four loads in flight. No divisions
// in the loop: most of this runs once in a kernel, and takes as long as its instructions take to be fetched.
template <class T, class Load, class Store>
__device__ inline void move_entries(int rows, int each, Load load, Store store) {
  constexpr int kUnroll = 4;
  const int n = rows * each, step_row = kWarp / each, step_at = kWarp % each;
  int row = lane_id() / each, at = lane_id() % each;
#pragma unroll 1
  for (int base = lane_id(); base < n; base += kWarp * kUnroll) {
    T value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWarp < n) value[u] = load(row, at);
      row += step_row;
      at += step_at;
      if (at >= each) {
        at -= each;
        ++row;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (base + u * kWarp < n) store(base + u * kWarp, value[u]);
  }
}

// Rows of one source in the plain layout: `rows` rows, found by at(row), to the outputs from final_row on.
template <class At>
__device__ inline void spread_routed(const DispatchParams &p, int source, int rows, int64_t final_row, At at) {
  const int scales = p.num_scales, topk = p.num_topk;
  auto word_at = [&](int row, int word) { return reinterpret_cast<const uint32_t *>(at(row))[word]; };
  auto number_at = [&](int row, int k) {
    return word_at(row, p.meta.numbers_at + (k >> p.meta.shift)) >> (16 * (k & p.meta.shift)) & p.meta.none;
  };
  if (p.recv_scales() != nullptr && p.recv_scale_stride == 1) {
    move_entries<uint32_t>(rows, scales, word_at, [&](int i, uint32_t v) {
      p.recv_scales()[(final_row + i / scales) * p.recv_scale_token_stride + i % scales] = v;
    });
  } else if (p.recv_scales() != nullptr && lane_id() < rows) {  // by columns: rows are next to each other
    constexpr int kUnroll = 4;                                  // loads in flight
    uint32_t *to = p.recv_scales() + (final_row + lane_id()) * p.recv_scale_token_stride;
#pragma unroll 1
    for (int base = 0; base < scales; base += 4 * kUnroll) {
      uint4 four[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (base + 4 * u < scales) four[u] = ptx::ld_stream(at(lane_id()) + 4 * base + 16 * u);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t values[4] = {four[u].x, four[u].y, four[u].z, four[u].w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (base + 4 * u + i < scales) to[(base + 4 * u + i) * p.recv_scale_stride] = values[i];
      }
    }
  }
  __syncwarp();
  const int64_t first = final_row * topk;
  if (p.recv_topk_weights() != nullptr)
    move_entries<uint32_t>(
        rows, topk, [&](int row, int k) { return word_at(row, scales + k); },
        [&](int i, uint32_t v) { p.recv_topk_weights()[first + i] = v; });
  if (p.recv_topk_idx() != nullptr)
    move_entries<uint32_t>(rows, topk, number_at, [&](int i, uint32_t number) {
      const int64_t index = number == p.meta.none ? -1 : static_cast<int64_t>(number);
      if (p.index_bytes == 8)
        static_cast<int64_t *>(p.recv_topk_idx())[first + i] = index;
      else
        static_cast<int32_t *>(p.recv_topk_idx())[first + i] = static_cast<int32_t>(index);
    });
  if (p.recv_src_metadata == 0 || p.cached() || lane_id() >= rows) return;
  int last = -1;
#pragma unroll 4
  for (int k = 0; k < topk; ++k)
    if (number_at(lane_id(), k) != p.meta.none) last = k;
  int32_t *to = src_metadata(p, final_row + lane_id());
  to[0] = source * p.num_max_tokens + static_cast<int32_t>(word_at(lane_id(), p.meta.source_at));
  to[1] = source * topk + last;
}

// By one warp: rows of a rank that takes no part (any more), in the plain layout, name no expert. first: the number of
// the first one among that rank's.
__device__ __noinline__ inline void blank_routed(const DispatchParams &p, int source, int64_t final_row, int first,
                                                 int rows) {
  for (int i = lane_id(); p.recv_scales() != nullptr && i < rows * p.num_scales; i += kWarp)
    p.recv_scales()[(final_row + i % rows) * p.recv_scale_token_stride + i / rows * p.recv_scale_stride] = 0;
  for (int i = lane_id(); i < rows * p.num_topk; i += kWarp) {
    const int64_t to = final_row * p.num_topk + i;
    for (int w = 0; p.recv_topk_idx() != nullptr && w < p.index_words(); ++w)
      static_cast<uint32_t *>(p.recv_topk_idx())[to * p.index_words() + w] = 0xffffffffu;
    if (p.recv_topk_weights() != nullptr) p.recv_topk_weights()[to] = 0;
  }
  for (int i = lane_id(); p.recv_src_metadata != 0 && !p.cached() && i < rows; i += kWarp) {
    int32_t *to = src_metadata(p, final_row + i);
    to[0] = source * p.num_max_tokens + first + i;
    to[1] = source * p.num_topk;
  }
  __syncwarp();
}

// A slot of this rank's handle that lies outside the outputs of a rank. Flags have been promised, so the team fails.
__device__ __noinline__ inline void refuse_slot(const DispatchParams &p, int32_t limit, int32_t slot) {
  report_failure(p.session, DK_EINVAL, p.session.team.rank, DK_FIELD_DST_SLOT, limit, slot, 0);
}

constexpr int kExpandChunk = 5;  // rows that a receiving warp takes together

// Whole warp: the metadata of `count` expanded rows, found by at(row), to the outputs of all their places. first: the
// number of the first one in the plain layout. slots[j]: lane k gets the place of choice k of row j, -1: none. All
// rows' loads are in flight together: rows that waited for each in turn took 8 us each. kGather: in place of scales the
// first column gets where the metadata is, for gather_scales.
template <bool kGather, class At>
__device__ inline void spread_expanded(const DispatchParams &p, int source, int64_t first, int count, At at,
                                       int (&slots)[kExpandChunk]) {
  const int lane = lane_id(), topk = p.num_topk;
  const auto word = [&](int j, int which, bool wanted) {
    return wanted && j < count ? reinterpret_cast<const uint32_t *>(at(j))[which] : 0;
  };
  const bool weighs = p.recv_topk_weights() != nullptr, names = !p.cached() && p.recv_src_metadata != 0;
  uint32_t weights[kExpandChunk];
#pragma unroll
  for (int j = 0; j < kExpandChunk; ++j) {
    slots[j] = static_cast<int>(word(j, p.meta.numbers_at + lane, lane < topk));
    weights[j] = word(j, p.num_scales + lane, weighs && lane < topk);
  }
  const uint32_t token = names && lane < count ? reinterpret_cast<const uint32_t *>(at(lane))[p.meta.source_at] : 0;
  int last = -1;
#pragma unroll
  for (int j = 0; j < kExpandChunk; ++j) {
    if (lane >= topk || j >= count || slots[j] >= p.num_expanded_tokens) slots[j] = -1;  // too large: its sender failed
    if (weighs && slots[j] >= 0) p.recv_topk_weights()[slots[j]] = weights[j];
    const uint32_t here = __ballot_sync(kAllLanes, slots[j] >= 0);
    if (lane == j) last = 63 - __clzll(static_cast<long long>(here));
    if (names && j < count && lane < topk) src_metadata(p, first + j)[2 + lane] = slots[j];
  }
  if (names && lane < count) {
    int32_t *to = src_metadata(p, first + lane);
    to[0] = source * p.num_max_tokens + static_cast<int32_t>(token);
    to[1] = source * topk + last;
  }
  if (p.recv_scales() == nullptr) return;
  if constexpr (kGather) {
#pragma unroll
    for (int j = 0; j < kExpandChunk; ++j)
      if (slots[j] >= 0)
        p.recv_scales()[slots[j]] = static_cast<uint32_t>((at(j) - (p.session.team.self + p.session.team.nvl)) / 16);
  } else {
    for (int base = 0; base < p.num_scales; base += kWarp) {
      const int which = base + lane;
      const bool mine = which < p.num_scales;
      uint32_t scales[kExpandChunk];
#pragma unroll
      for (int j = 0; j < kExpandChunk; ++j) scales[j] = word(j, which, mine);
#pragma unroll
      for (int j = 0; j < kExpandChunk; ++j)
        for (uint32_t left = __ballot_sync(kAllLanes, slots[j] >= 0); left != 0; left &= left - 1) {
          const int64_t slot = __shfl_sync(kAllLanes, slots[j], __ffs(static_cast<int>(left)) - 1);
          if (mine) p.recv_scales()[slot * p.recv_scale_token_stride + which * p.recv_scale_stride] = scales[j];
        }
    }
  }
}

}  // namespace deepep
