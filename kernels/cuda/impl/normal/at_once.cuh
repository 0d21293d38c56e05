// at_once.cuh - what the kernels for few rows have in common. With a routing a rank's rows go to the rings before any
// rank has answered; each block sends some, and then one flag for all of them to every rank, which waits for the flags
// of all blocks. So nothing is waited for row by row, and the receiving side copies or sums with all its threads.
#pragma once
#include "cuda/impl/normal/handshake.cuh"

namespace deepep {

constexpr int kAtOnceThreads = 512, kAtOnceWarps = kAtOnceThreads / kWarp, kAtOnceBlocks = 64;
// Each lane has a rank. More rows at a receiver are faster straight at their places.
constexpr uint32_t kAtOnceRanks = kWarp, kAtOnceRows = DK_AT_ONCE_ROWS,
                   kAtOnceTerms = 8192;  // the last: choices of all rows

// Where there are enough blocks, the first one has no rows: it does what each rank does once, which holds up no row.
constexpr int kFewBlocks = 8;
__host__ __device__ __forceinline__ int row_blocks_of(int blocks) { return blocks > kFewBlocks ? blocks - 1 : blocks; }
__device__ __forceinline__ int row_blocks() { return row_blocks_of(static_cast<int>(gridDim.x)); }
// This block's number among those with rows; -1: it has none.
__device__ __forceinline__ int row_block() { return static_cast<int>(blockIdx.x) - (gridDim.x > kFewBlocks ? 1 : 0); }
// The block's item i of items that are dealt out in turn, and how many of `all` it has.
__device__ __forceinline__ int item_at(int i) { return i * row_blocks() + row_block(); }
__device__ __forceinline__ int num_items(int all) {
  return row_block() < 0 || row_block() >= all ? 0 : (all - row_block() + row_blocks() - 1) / row_blocks();
}

// While the other warps send, the last one waits for the ranks' messages.
constexpr int kSendingThreads = kAtOnceThreads - kWarp;
__device__ __forceinline__ bool is_control() { return warp_id() == kAtOnceWarps - 1; }

// Whole block: waits until rows may come to all ranks. With a routing once no rank reads any more what came before. In
// V1 the nvl region is the caller's between calls: there once all ranks have begun this one, so their messages are
// here, too. False: the call moves no rows.
__device__ inline bool await_room(const Session &s, const Handshake &hand, uint64_t finished, bool routed) {
  return routed ? await_finished(s, hand.epoch, finished) : await_handshake(s, hand);
}

// All warps but the last one: what they have stored for the block's peers is there. The first warp is busy with that
// for some 2 us. Each rank waits for the flags of the largest grid: the first block with rows stores those of blocks
// that this grid lacks.
__device__ inline void announce_rows(const Session &s, uint64_t epoch) {
  const int r = static_cast<int>(threadIdx.x);
  ptx::barrier_among<kSendingThreads>(1);
  if (row_block() < 0 || r >= s.team.num_ranks) return;
  uint64_t *flags = s.team.ring_flag(r, kPayload, s.team.rank);
  ptx::fence_acq_rel_sys();
  ptx::st_relaxed_sys(flags + row_block(), ring_value(epoch, 0));
  for (int b = row_blocks(); row_block() == 0 && b < kAtOnceBlocks; ++b)
    ptx::st_relaxed_sys(flags + b, ring_value(epoch, 0));
}
// Whole block: waits for the rows of all blocks of all ranks. `good`: of this thread until now. False: some thread's is
// false, or the team failed.
__device__ inline bool await_rows(const Session &s, uint64_t epoch, bool good) {
  for (int i = threadIdx.x; good && i < s.team.num_ranks * kAtOnceBlocks; i += kAtOnceThreads) {
    const int source = i / kAtOnceBlocks;
    const uint64_t *flag = s.team.ring_flag(s.team.rank, kPayload, source) + i % kAtOnceBlocks;
    uint64_t waited = 0;
    good = wait_or_fail(s, source, static_cast<int64_t>(epoch), waited, [&](int64_t &seen) {
      const uint64_t value = ptx::ld_acquire_sys(flag);
      seen = static_cast<int64_t>(value >> 24);
      return value == ring_value(epoch, 0);
    });
  }
  return __syncthreads_or(!good) == 0;
}

// Whole block, as finish() of session.cuh: here each block's last warp has loaded what the kernel is counted with by
// the time that it knows whether its block is the last one. last(failed): the rest, by that block.
template <class Last>
__device__ inline void finish_at_once(const Session &s, Last last) {
  CountLoads loads{};
  uint64_t start = 0;
  if (warp_id() == kAtOnceWarps - 1) {
    loads = load_counts(s, nullptr);
    start = load_fresh(&s.team.scratch->start_ns);
  }
  finish(s, [&](bool failed) {
    last(failed);
    if (warp_id() != kAtOnceWarps - 1) return;
    count_peers(s, load_peers(s));
    record_loaded(s, loads, start, nullptr, true, failed);
  });
}

// An item of a block, and which of its parts (16 bytes, words, choices): `number` counts the parts of all its items.
struct Chunk {
  int item, at;
};
__device__ __forceinline__ Chunk chunk_at(int number, const Divisor &parts) {
  Chunk chunk{parts.quotient(number), 0};
  chunk.at = number - chunk.item * static_cast<int>(parts.by);
  if (chunk.at < 0) {  // of large numbers the quotient may be one too many
    --chunk.item;
    chunk.at += static_cast<int>(parts.by);
  }
  return chunk;
}

}  // namespace deepep
