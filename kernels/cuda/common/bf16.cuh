// bf16.cuh - eight BF16 numbers in 16 bytes, and their sums in FP32.
#pragma once
#include <cuda_bf16.h>

#include "cuda/common/types.cuh"

namespace deepep {

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline void add_bf16(float (&sum)[8], const uint4 &data) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_low(words[i]);
    sum[2 * i + 1] += bf16_high(words[i]);
  }
}
__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4 &data, float weight) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(bf16_low(words[i]), weight, sum[2 * i]);
    sum[2 * i + 1] = fmaf(bf16_high(words[i]), weight, sum[2 * i + 1]);
  }
}
__device__ inline uint4 round_bf16(const float (&sum)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t *>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace deepep
