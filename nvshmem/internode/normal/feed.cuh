// feed.cuh - libdeepep_nvshmem.so: the rows of a sum on their way into the shared memory of the warp that adds them.
#pragma once
#include "internode/normal/common.cuh"

namespace deepep::internode {

// Where a block's feeds are in its shared memory, one for each warp that adds rows.
constexpr uint32_t kFeedBytes = 2048;  // of a slot, which has a piece of a row
struct FeedShape {
  uint32_t at, slots, count;  // from the start of shared memory; of a feed, 0: there are none; feeds

  __host__ __device__ uint32_t end() const { return at + count * slots * (kFeedBytes + 8); }
};
// With as many slots as fit into `shared` bytes, of which `used` are taken, up to `most`.
inline FeedShape feed_shape(uint32_t most, int warps, uint64_t used, uint64_t shared) {
  FeedShape feeds{static_cast<uint32_t>(align_up<uint64_t>(used, 128)), most, static_cast<uint32_t>(warps)};
  while (feeds.slots > 0 && feeds.end() > shared) --feeds.slots;
  return feeds.slots > 1 ? feeds : FeedShape{static_cast<uint32_t>(used), 0, 0};  // one slot would wait for each piece
}

// Bulk copies bring the pieces of a sum's rows: the first of each row, then the second ones, as many at a time as there
// are slots. By a whole warp, which takes them in this order.
struct RowFeed {
  uint8_t *pieces = nullptr;
  uint64_t *arrived = nullptr;
  uint32_t slots = 0, slot = 0, parity = 0;  // of the next piece

  // `warp`: among those that add rows.
  __device__ RowFeed(const FeedShape &shape, uint8_t *shared, int warp) : slots(shape.slots) {
    pieces = shared + shape.at + warp * slots * kFeedBytes;
    arrived = reinterpret_cast<uint64_t *>(shared + shape.at + shape.count * slots * kFeedBytes) + warp * slots;
#if DEEPEP_HAS_BULK_COPY
    if (slots == 0) return;
    if (lane_id() == 0) {
      for (uint32_t i = 0; i < slots; ++i) ptx::mbarrier_init(arrived + i, 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
#endif
  }
  __device__ const uint8_t *piece() const { return pieces + slot * kFeedBytes; }
  __device__ uint32_t following(uint32_t at) const { return at + 1 == slots ? 0 : at + 1; }
  // Before a sum: its rows may be what a peer has stored.
  __device__ void begin() const {
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0) ptx::fence_global_before_bulk();
#endif
  }
  // Into a slot whose piece every lane has read.
  __device__ void load(uint32_t into, const uint8_t *from, uint32_t bytes) const {
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() != 0) return;
    ptx::mbarrier_expect(arrived + into, bytes);
    ptx::bulk_load(pieces + into * kFeedBytes, from, bytes, arrived + into);
#endif
  }
  __device__ void wait() const {
#if DEEPEP_HAS_BULK_COPY
    spin_in_block([&] { return ptx::mbarrier_try_wait(arrived + slot, parity); });
#endif
  }
  __device__ void advance() {
    slot = following(slot);
    if (slot == 0) parity ^= 1;
  }
};

}  // namespace deepep::internode
