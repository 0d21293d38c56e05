// put_words.cuh - libdeepep_nvshmem.so: puts by a warp to a rank that NVSHMEM reaches by stores over NVLink. Its own
// puts by a warp load 16 bytes a lane and store them before they load the next, so a row takes as many round trips to
// memory as it has 512 bytes. Here a lane has kAtOnce words on their way, and puts each by itself.
#pragma once
#include <nvshmem.h>

#include <cstdint>

#include "cuda/common/lanes.cuh"

namespace deepep::internode {

// `bytes` is a multiple of 8, as both addresses are. This warp has written the source, or any thread before a barrier.
__device__ __forceinline__ void put_words(void *to, const void *from, uint64_t bytes, int rank) {
  constexpr uint64_t kAtOnce = 16;
  const auto *source = static_cast<const uint64_t *>(from);
  auto *target = static_cast<uint64_t *>(to);
  const uint64_t words = bytes / 8;
#pragma unroll 1
  for (uint64_t first = lane_id(); first < words; first += kWarp * kAtOnce) {
    uint64_t data[kAtOnce];
#pragma unroll
    for (uint64_t u = 0; u < kAtOnce; ++u)
      if (first + u * kWarp < words) data[u] = source[first + u * kWarp];
#pragma unroll
    for (uint64_t u = 0; u < kAtOnce; ++u)
      if (first + u * kWarp < words) nvshmem_uint64_p(target + first + u * kWarp, data[u], rank);
  }
}

}  // namespace deepep::internode
