// ring.cuh - staging of rows in the nvl region: one ring for each source rank, its flags and credits in the wire
// region. A slot holds a row's payload and, apart from it, its metadata; each part has a flag of its own, since
// different warps write them. A flag is the epoch and the lap around the ring, so no kernel resets one, and a replayed
// graph needs no host.
#pragma once
#include "cuda/common/types.cuh"

namespace deepep {

constexpr uint64_t kRingFlags = 65536;  // of all sources together
__host__ __device__ inline uint32_t ring_flags_per_source(uint32_t num_ranks) {
  return max(64u, static_cast<uint32_t>(kRingFlags / num_ranks));
}

enum RingPart { kPayload = 0, kMeta = 1 };

// Flags (written by the source, read by the owner) and credits (the other way round), both indexed by the other rank.
struct RingFlags {
  uint32_t per_source;
  uint64_t flags[2], credits[2], bytes;  // from the start of the wire region
};
__host__ __device__ inline RingFlags ring_flags(uint32_t num_ranks) {
  RingFlags at{};
  at.per_source = ring_flags_per_source(num_ranks);
  const uint64_t one = static_cast<uint64_t>(num_ranks) * at.per_source * 8;
  at.flags[kPayload] = 0;
  at.flags[kMeta] = one;
  at.credits[kPayload] = 2 * one;
  at.credits[kMeta] = 3 * one;
  at.bytes = align_up<uint64_t>(4 * one, 4096);
  return at;
}

struct RingShape {
  uint32_t slots, payload_stride, meta_stride;
  uint64_t source_stride;  // from one source's ring to the next
  __host__ __device__ uint64_t payload(uint32_t source, uint32_t slot) const {
    return source * source_stride + static_cast<uint64_t>(slot) * payload_stride;
  }
  __host__ __device__ uint64_t meta(uint32_t source, uint32_t slot) const {
    return source * source_stride + static_cast<uint64_t>(slots) * payload_stride +
           static_cast<uint64_t>(slot) * meta_stride;
  }
};
__host__ __device__ inline RingShape ring_shape(uint64_t nvl_bytes, uint32_t num_ranks, uint32_t payload_bytes,
                                                uint32_t meta_bytes) {
  RingShape shape{};
  shape.payload_stride = align_up(payload_bytes, 16u);
  shape.meta_stride = align_up(meta_bytes, 16u);
  shape.source_stride = nvl_bytes / num_ranks / 128 * 128;
  const uint64_t row = static_cast<uint64_t>(shape.payload_stride) + shape.meta_stride;
  const uint64_t fit = row == 0 ? kRingFlags : shape.source_stride / row;
  shape.slots = static_cast<uint32_t>(min<uint64_t>(fit, ring_flags_per_source(num_ranks)));
  return shape;
}

// Where row n of a pair of ranks lies, and the value of its flag once it is there.
struct RingPlace {
  uint32_t slot, lap;
};
__host__ __device__ inline RingPlace ring_place(uint32_t row, uint32_t slots) {
  return row < slots ? RingPlace{row, 0} : RingPlace{row % slots, row / slots};
}
__host__ __device__ inline uint64_t ring_value(uint64_t epoch, uint32_t lap) { return epoch << 24 | (lap + 1); }

}  // namespace deepep
