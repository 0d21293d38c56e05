// at_once_bulk.cuh - the Hopper form of what receives rows that are not so few: bulk copies, of which more bytes are in
// flight than threads have registers for.
#pragma once
#include "cuda/impl/normal/at_once.cuh"

namespace deepep {

// Copies of rows through shared memory, each by a thread: the first lanes of some warps, with a stage each.
constexpr int kCopyWarps = 8, kCopyLanes = 4, kMaxCopiers = kCopyWarps * kCopyLanes;
constexpr uint32_t kCopyPiece = 7168;  // of a row, at most
// Bytes of rows that a block receives, at most: fewer are faster without, unless each goes to several places.
constexpr uint32_t kLeastBulkRows = 64 * 1024;
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
#endif

}  // namespace deepep
