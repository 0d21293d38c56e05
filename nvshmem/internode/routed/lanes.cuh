// lanes.cuh - libdeepep_nvshmem.so: sets of lanes where lane k has choice k of a token.
#pragma once
#include "cuda/common/lanes.cuh"
#include "cuda/common/ptx.cuh"

namespace deepep::internode {

__device__ inline int last_lane(uint32_t lanes) { return 63 - __clzll(static_cast<long long>(lanes)); }  // -1: none

template <class T>
__device__ inline T *from_lane(T *address, int lane) {
  return reinterpret_cast<T *>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(address), lane));
}

}  // namespace deepep::internode
