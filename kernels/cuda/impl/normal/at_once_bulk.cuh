// at_once_bulk.cuh - the Hopper forms of what receives few rows: bulk copies, of which more bytes are in flight than
// threads have registers for.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/at_once.cuh"

namespace deepep {

// Copies of rows through shared memory, each by a thread: the first lanes of some warps, with a stage each.
constexpr int kCopyWarps = 8, kCopyLanes = 4, kMaxCopiers = kCopyWarps * kCopyLanes;
constexpr uint32_t kCopyPiece = 7168;  // of a row, at most
// Groups of warps add pieces of terms, each from a stage. An SM's bulk copies of 2 KB bring 27 GB/s however many are in
// flight, of 3.5 KB 42, and 16 of 7 KB more than 100.
constexpr int kGroups = 4, kGroupThreads = kAtOnceThreads / kGroups;
constexpr int kTermChunks = 4;  // 16 bytes each, of a thread
constexpr uint32_t kMaxTermBytes = 16 * kGroupThreads * kTermChunks, kLeastTermBytes = 2048, kTermStages = 4;
// What a group takes of a row at a time: the row in equal parts, as many as there are groups for the block's items.
inline uint32_t term_bytes_for(uint32_t row_bytes, uint32_t items) {
  uint32_t parts = ceil_div(row_bytes, kMaxTermBytes);
  while (items * parts < kGroups && row_bytes / (parts + 1) >= kLeastTermBytes) ++parts;
  return align_up(ceil_div(row_bytes, parts), 16u);
}

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

// The sums of a block's items, rows of row_bytes each. A group takes pieces in turn; the terms of the next ones are on
// their way to its stages. Job: num_terms(item); term(item, t), the row; begin(item, chunk, sum) and end(item, chunk,
// sum), of 16 bytes.
template <class Job>
struct TermSums {
  const Job &job;
  int items, groups;
  uint32_t row_bytes, piece_bytes;
  uint8_t *stages;                                   // of the group
  uint64_t *arrived;                                 // likewise, one for each stage
  int next_unit = 0, next_item = 0, next_term = 0;   // to load, by the group's first thread
  uint32_t loaded = 0, used = 0;                     // stages, modulo their number

  __device__ static int group() { return static_cast<int>(threadIdx.x) / kGroupThreads; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kGroupThreads; }
  __device__ int pieces() const { return static_cast<int>(ceil_div(row_bytes, piece_bytes)); }
  __device__ uint32_t size_at(uint32_t from) const { return min(piece_bytes, row_bytes - from); }
  __device__ void seek(int unit) {
    next_unit = unit;
    next_item = unit / pieces();
    next_term = 0;
  }
  __device__ void load_ahead() {
    while (loaded - used < kTermStages && next_item < items) {
      if (next_term >= job.num_terms(next_item)) {
        seek(next_unit + groups);
        continue;
      }
      const uint32_t from = (next_unit - next_item * pieces()) * piece_bytes, stage = loaded % kTermStages;
      ptx::mbarrier_expect(&arrived[stage], size_at(from));
      ptx::bulk_load(stages + stage * piece_bytes, job.term(next_item, next_term) + from, size_at(from),
                     &arrived[stage]);
      ++next_term;
      ++loaded;
    }
  }
  __device__ void add_term(float (&sum)[kTermChunks][8], int chunks) {
    const uint32_t stage = used % kTermStages;
    spin_in_block([&] { return ptx::mbarrier_try_wait(&arrived[stage], used / kTermStages & 1); });
    const auto *from = reinterpret_cast<const uint4 *>(stages + stage * piece_bytes) + thread();
    uint4 data[kTermChunks] = {};
#pragma unroll
    for (int u = 0; u < kTermChunks; ++u)
      if (thread() + u * kGroupThreads < chunks) data[u] = from[u * kGroupThreads];
    ptx::barrier_among<kGroupThreads>(1 + group());  // all have read the stage before it is filled again
    ++used;
    if (thread() == 0) load_ahead();
#pragma unroll
    for (int u = 0; u < kTermChunks; ++u) add_bf16(sum[u], data[u]);
  }
  // Whole group, the first ones.
  __device__ void run() {
    if (thread() == 0) {
      seek(group());
      ptx::fence_before_bulk();
      load_ahead();
    }
    for (int unit = group(); unit < items * pieces(); unit += groups) {
      const int item = unit / pieces();
      const uint32_t from = (unit - item * pieces()) * piece_bytes;
      const int chunks = static_cast<int>(size_at(from) / 16), first = static_cast<int>(from / 16) + thread();
      float sum[kTermChunks][8] = {};
#pragma unroll
      for (int u = 0; u < kTermChunks; ++u)
        if (thread() + u * kGroupThreads < chunks) job.begin(item, first + u * kGroupThreads, sum[u]);
      for (int t = job.num_terms(item); t > 0; --t) add_term(sum, chunks);
#pragma unroll
      for (int u = 0; u < kTermChunks; ++u)
        if (thread() + u * kGroupThreads < chunks) job.end(item, first + u * kGroupThreads, sum[u]);
    }
  }
};
#endif

}  // namespace deepep
