// fp8.cuh - BF16 to e4m3 with a scale for each 128 channels. A NaN becomes 0x7f, so no word of four results is ever
// 0xffffffff.
#pragma once
#include <cfloat>

#include "cuda/common/bf16.cuh"
#include "cuda/common/ptx.cuh"

namespace deepep {

struct Fp8Scale {
  float scale, inverse;
};
// amax: the block's maximum magnitude, without NaNs.
__device__ __forceinline__ Fp8Scale fp8_scale(float amax, bool round_up) {
  amax = amax > FLT_MAX ? FLT_MAX : amax;  // infinity saturates, the scale stays finite
  amax = amax < 1e-4f ? 1e-4f : amax;
  Fp8Scale s{__fdiv_rn(amax, 448.0f), __fdiv_rn(448.0f, amax)};
  if (round_up) {
    s.scale = __uint_as_float((__float_as_uint(s.scale) + 0x7fffffu) & 0x7f800000u);
    s.inverse = __fdiv_rn(1.0f, s.scale);
  }
  return s;
}

#if !DEEPEP_HAS_FP8_INSTRUCTION
// Saturating, to nearest even.
__device__ __forceinline__ uint32_t cast_e4m3(float value) {
  const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  magnitude = magnitude > 0x43e00000u ? 0x43e00000u : magnitude;  // 448
  if (magnitude < 0x3c800000u)  // below 2^-6 a step is 2^-9, the last bit of a float near 2^14: the addition rounds
    return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - __float_as_uint(16384.0f));
  return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3));
}
#endif
__device__ __forceinline__ uint32_t cast_e4m3_four(float a, float b, float c, float d) {
#if DEEPEP_HAS_FP8_INSTRUCTION
  return ptx::cast_e4m3_pair(a, b) | ptx::cast_e4m3_pair(c, d) << 16;
#else
  return cast_e4m3(a) | cast_e4m3(b) << 8 | cast_e4m3(c) << 16 | cast_e4m3(d) << 24;
#endif
}

// The maximum of so_far and the magnitudes of two channels; a NaN does not count.
__device__ __forceinline__ float greatest_magnitude(float so_far, uint32_t pair) {
  return fmaxf(so_far, fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair))));
}
// The scale of a block of 128 channels that 8 neighbouring lanes hold, 16 channels each. By whole warps.
__device__ __forceinline__ Fp8Scale fp8_scale_of_eight(const uint4 &a, const uint4 &b, bool round_up) {
  float amax = 0;
  for (uint32_t pair : {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}) amax = greatest_magnitude(amax, pair);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
  return fp8_scale(amax, round_up);
}
// Eight words of BF16 (16 channels) to 16 bytes.
__device__ __forceinline__ uint4 cast_sixteen(const uint4 &a, const uint4 &b, float inverse) {
  auto four = [&](uint32_t low, uint32_t high) {
    return cast_e4m3_four(__fmul_rn(bf16_low(low), inverse), __fmul_rn(bf16_high(low), inverse),
                          __fmul_rn(bf16_low(high), inverse), __fmul_rn(bf16_high(high), inverse));
  };
  return {four(a.x, a.y), four(a.z, a.w), four(b.x, b.y), four(b.z, b.w)};
}

}  // namespace deepep
