// lanes.cuh - sets of a warp's lanes, a bit for each.
#pragma once
#include "cuda/common/types.cuh"

namespace deepep {

// Lanes with the same key, in the order of which they count; 0 for a key below 0.
__device__ inline uint32_t same_key(int key) {
  const uint32_t lanes = __match_any_sync(kAllLanes, key < 0 ? 0x80000000u | lane_id() : static_cast<uint32_t>(key));
  return key < 0 ? 0 : lanes;
}
__device__ inline bool is_first(uint32_t lanes) {
  return lanes != 0 && __ffs(static_cast<int>(lanes)) - 1 == lane_id();
}
__device__ inline bool is_last(uint32_t lanes) { return (lanes >> lane_id()) == 1; }
__device__ inline int lanes_before(uint32_t lanes) { return __popc(lanes & ((1u << lane_id()) - 1)); }

}  // namespace deepep
