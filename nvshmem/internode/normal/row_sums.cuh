// row_sums.cuh - libdeepep_nvshmem.so, combine: a warp adds the rows of a token in FP32, in the order of a list, rounds
// once, and adds their weights. Feeds bring the rows where bulk copies are. With a routing the first rows of a list may
// be a group, which is added and rounded by itself and goes into the sum as one row.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/common/lanes.cuh"
#include "internode/normal/combine_push.cuh"

namespace deepep::internode {

// The rows of one token in the order in which they are added: in shared memory, a list for each warp.
struct TokenRows {
  const uint8_t **rows;
  int count;
  __device__ void add(const uint8_t *row) {  // by a whole warp; null: this lane has none
    const uint32_t having = __ballot_sync(kAllLanes, row != nullptr);
    if (row != nullptr) rows[count + lanes_before(having)] = row;
    count += __popc(having);
  }
};

constexpr int kPieces = 4;  // of 16 bytes, that a lane adds side by side
struct RowPieces {
  uint4 data[kPieces];
};
__device__ __forceinline__ void load_pieces(RowPieces &pieces, const uint8_t *row, uint32_t base, uint32_t bytes) {
#pragma unroll
  for (int u = 0; u < kPieces; ++u)
    if (base + 16 * kWarp * u < bytes) pieces.data[u] = ptx::ld_stream(row + base + 16 * kWarp * u);
}
__device__ __forceinline__ void add_pieces(float (&sum)[kPieces][8], const RowPieces &pieces, uint32_t base,
                                           uint32_t bytes) {
#pragma unroll
  for (int u = 0; u < kPieces; ++u)
    if (base + 16 * kWarp * u < bytes) add_bf16(sum[u], pieces.data[u]);
}

// A row's weights: of this rank's own rows in the caller's array (null: all 0), of others behind the row.
__device__ inline float weight_of(const InternodeCombineParams &p, const uint8_t *row, int k) {
  const uint64_t from = static_cast<uint64_t>(row - p.c.x());
  if (from >= static_cast<uint64_t>(p.c.num_recv_tokens) * p.c.row_bytes)
    return __uint_as_float(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(row + p.c.row_bytes) + 1 + k));
  return p.c.topk_weights() == nullptr ? 0 : p.c.topk_weights()[from / p.c.row_bytes * p.c.num_topk + k];
}

__device__ __forceinline__ void store_sum(uint8_t *to, const float (&sum)[kPieces][8], uint32_t base, uint32_t bytes) {
#pragma unroll
  for (int u = 0; u < kPieces; ++u)
    if (base + 16 * kWarp * u < bytes) ptx::st_stream(to + base + 16 * kWarp * u, round_bf16(sum[u]));
}
// A list's first `count` rows, 0: none; `place`: how many of its rows come before their sum, themselves included.
struct RowGroup {
  int count, place;
};
// When row `at` of the list is next. kGroups: a list may have a group.
template <bool kGroups>
__device__ __forceinline__ void place_group(const RowGroup &group, int at, float (&sum)[kPieces][8],
                                            uint4 (&rounded)[kPieces]) {
  if (!kGroups || group.count == 0) return;
  if (at == group.count) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      rounded[u] = round_bf16(sum[u]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[u][i] = 0;
    }
  }
  if (at == group.place) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u) add_bf16(sum[u], rounded[u]);
  }
}
// The first pieces of the sum that is next: into all slots, which are free. Whole warp.
__device__ inline void start_feed(const RowFeed &feed, const TokenRows &list, uint32_t bytes) {
  __syncwarp();  // all lanes see the list, and have acquired its rows
  feed.begin();
  uint32_t slot = feed.slot, base = 0;
  int row = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < feed.slots && list.count > 0 && base < bytes; ++i, slot = feed.following(slot)) {
    feed.load(slot, list.rows[row] + base, min(kFeedBytes, bytes - base));
    if (++row < list.count) continue;
    row = 0;
    base += kFeedBytes;
  }
}
// After start_feed(). A function of its own, so that its registers do not share a limit with a role's: to spill them
// costs more than the call. Pieces beyond the end of a row are added like the rest, of whatever a slot has, and not
// stored.
template <bool kGroups>
__device__ __noinline__ inline void sum_fed(const uint8_t *const *rows, int count, RowGroup group, RowFeed &in,
                                            uint8_t *to, uint32_t bytes) {
  static_assert(kFeedBytes == 16 * kWarp * kPieces, "a slot has what a warp adds at once");
  RowFeed feed = in;
  int row_ahead = 0;  // the next piece to load
  uint32_t ahead = bytes;
  if (count > 0) {
    row_ahead = static_cast<int>(feed.slots) % count;
    ahead = static_cast<uint32_t>(static_cast<int>(feed.slots) / count) * kFeedBytes;
  }
#pragma unroll 1
  for (uint32_t base = 0; base < bytes; base += kFeedBytes) {
    float sum[kPieces][8] = {};
    uint4 rounded[kPieces];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      place_group<kGroups>(group, i, sum, rounded);
      feed.wait();
      RowPieces row;
#pragma unroll
      for (int u = 0; u < kPieces; ++u) row.data[u] = ptx::ld_shared(feed.piece() + 16 * (u * kWarp + lane_id()));
      __syncwarp();  // all lanes have read the piece
      if (ahead < bytes) {
        feed.load(feed.slot, rows[row_ahead] + ahead, min(kFeedBytes, bytes - ahead));
        if (++row_ahead == count) {
          row_ahead = 0;
          ahead += kFeedBytes;
        }
      }
#pragma unroll
      for (int u = 0; u < kPieces; ++u) add_bf16(sum[u], row.data[u]);
      feed.advance();
    }
    place_group<kGroups>(group, count, sum, rounded);
    store_sum(to, sum, base + 16 * lane_id(), bytes);
  }
  in = feed;
}
// Where there are no feeds: two rows are on their way at a time, and added in turn.
template <bool kGroups>
__device__ __noinline__ inline void sum_loaded(const uint8_t *const *rows, int count, RowGroup group, uint8_t *to,
                                               uint32_t bytes) {
#pragma unroll 1
  for (uint32_t base = 16 * lane_id(); base < bytes; base += 16 * kWarp * kPieces) {
    float sum[kPieces][8] = {};
    uint4 rounded[kPieces];
    RowPieces one, two;
#pragma unroll 1
    for (int i = 0; i < count; i += 2) {
      const bool both = i + 1 < count;
      load_pieces(one, rows[i], base, bytes);
      if (both) load_pieces(two, rows[i + 1], base, bytes);
      place_group<kGroups>(group, i, sum, rounded);
      add_pieces(sum, one, base, bytes);
      if (!both) continue;
      place_group<kGroups>(group, i + 1, sum, rounded);
      add_pieces(sum, two, base, bytes);
    }
    place_group<kGroups>(group, count, sum, rounded);
    store_sum(to, sum, base, bytes);
  }
}
// Adds in FP32 and rounds once; the feed has been started.
template <bool kGroups = false>
__device__ inline void sum_rows(const InternodeCombineParams &p, const TokenRows &list, RowFeed &feed, uint8_t *to,
                                RowGroup group = {0, 0}) {
  const InPhase phase(kPhaseSum);
  if (feed.slots != 0)
    sum_fed<kGroups>(list.rows, list.count, group, feed, to, p.c.row_bytes);
  else
    sum_loaded<kGroups>(list.rows, list.count, group, to, p.c.row_bytes);
}
// Of the first `rows` rows: those after them are biases.
__device__ inline void sum_weights(const InternodeCombineParams &p, const TokenRows &list, int rows, float *weights) {
#pragma unroll 1
  for (int k = lane_id(); k < p.c.num_topk; k += kWarp) {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) sum += weight_of(p, list.rows[i], k);
    weights[k] = sum;
  }
}

}  // namespace deepep::internode
