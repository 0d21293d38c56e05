// lanes.cuh - libdeepep_nvshmem.so: sets of lanes where lane k has choice k of a token.
#pragma once
#include "cuda/common/ptx.cuh"
#include "cuda/common/types.cuh"

namespace deepep::internode {

__device__ inline int last_lane(uint32_t lanes) { return 63 - __clzll(static_cast<long long>(lanes)); }  // -1: none

// Whole warp: the lanes with this one's value; 0 for a value below 0.
__device__ inline uint32_t same_value(int value) {
  const uint32_t lanes =
      __match_any_sync(kAllLanes, value < 0 ? 0x80000000u | lane_id() : static_cast<uint32_t>(value));
  return value < 0 ? 0 : lanes;
}

__device__ inline const uint8_t *from_lane(const uint8_t *address, int lane) {
  return reinterpret_cast<const uint8_t *>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(address), lane));
}

}  // namespace deepep::internode
