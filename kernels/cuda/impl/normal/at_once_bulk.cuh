// at_once_bulk.cuh - the Hopper forms of what receives few rows: bulk copies, of which more bytes are in flight than
// threads have registers for.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/at_once.cuh"

namespace deepep {

// Copies of rows through shared memory, each by a thread: the first lanes of some warps, with a stage each.
constexpr int kCopyWarps = 8, kCopyLanes = 4, kMaxCopiers = kCopyWarps * kCopyLanes;
constexpr uint32_t kCopyPiece = 7168;  // of a row, at most
// Pieces of terms that a warp adds, each from a stage of its own.
constexpr int kTermChunks = 4;  // 16 bytes each, of a lane
constexpr uint32_t kTermBytes = 16 * kWarp * kTermChunks, kMaxTermStages = 8;

#if DEEPEP_HAS_BULK_COPY
// A thread's stage.
struct CopyStage {
  uint8_t *bytes;
  uint64_t *arrived;
  uint32_t phase = 0;

  __device__ void load(const uint8_t *from, uint32_t size) {
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_expect(arrived, size);
    ptx::bulk_load(bytes, from, size, arrived);
    spin_in_block([&] { return ptx::mbarrier_try_wait(arrived, phase); });
    phase ^= 1;
  }
};

// The sums of a block's items, rows of row_bytes each. A warp takes pieces in turn, the first warps of `warps`; the
// terms of the next ones are on their way to its stages. Job: num_terms(item); term(item, t), the row; begin(item,
// chunk, sum) and end(item, chunk, sum), of 16 bytes.
template <class Job>
struct TermSums {
  const Job &job;
  int items, warps;
  uint32_t row_bytes;
  uint8_t *stages;    // of the warp
  uint64_t *arrived;  // likewise, one for each stage
  int num_stages;
  int next_unit = 0, next_item = 0, next_term = 0;  // to load
  int loaded = 0, load_at = 0, use_at = 0;
  uint32_t phase = 0;

  __device__ int pieces() const { return static_cast<int>(ceil_div(row_bytes, kTermBytes)); }
  __device__ void seek(int unit) {
    next_unit = unit;
    next_item = unit / pieces();
    next_term = 0;
  }
  __device__ void load_ahead() {
    while (loaded < num_stages && next_item < items) {
      if (next_term >= job.num_terms(next_item)) {
        seek(next_unit + warps);
        continue;
      }
      if (lane_id() == 0) {
        const uint32_t from = (next_unit - next_item * pieces()) * kTermBytes, bytes = min(kTermBytes, row_bytes - from);
        ptx::mbarrier_expect(&arrived[load_at], bytes);
        ptx::bulk_load(stages + load_at * kTermBytes, job.term(next_item, next_term) + from, bytes, &arrived[load_at]);
      }
      ++next_term;
      ++loaded;
      load_at = load_at + 1 == num_stages ? 0 : load_at + 1;
    }
  }
  __device__ void add_term(float (&sum)[kTermChunks][8]) {
    spin_in_block([&] { return ptx::mbarrier_try_wait(&arrived[use_at], phase); });
    // Beyond the row's end lies what was there before; its sums go nowhere.
    const auto *stage = reinterpret_cast<const uint4 *>(stages + use_at * kTermBytes) + lane_id();
    uint4 data[kTermChunks];
#pragma unroll
    for (int u = 0; u < kTermChunks; ++u) data[u] = stage[u * kWarp];
#pragma unroll
    for (int u = 0; u < kTermChunks; ++u) add_bf16(sum[u], data[u]);
    __syncwarp();  // all lanes have read the stage before it is filled again
    --loaded;
    if (++use_at == num_stages) {
      use_at = 0;
      phase ^= 1;
    }
  }
  // Whole warp.
  __device__ void run(int warp) {
    const int each = pieces(), chunks = static_cast<int>(row_bytes / 16);
    seek(warp);
    ptx::fence_before_bulk();
    load_ahead();
    for (int unit = warp; unit < items * each; unit += warps) {
      const int item = unit / each, first = (unit - item * each) * kWarp * kTermChunks + lane_id();
      float sum[kTermChunks][8] = {};
#pragma unroll
      for (int u = 0; u < kTermChunks; ++u)
        if (first + u * kWarp < chunks) job.begin(item, first + u * kWarp, sum[u]);
      for (int t = job.num_terms(item); t > 0; --t) {
        add_term(sum);
        load_ahead();
      }
#pragma unroll
      for (int u = 0; u < kTermChunks; ++u)
        if (first + u * kWarp < chunks) job.end(item, first + u * kWarp, sum[u]);
    }
  }
};
#endif

}  // namespace deepep
