// fp4.cuh - BF16 to e2m1 with an e4m3 scale for each 16 channels. No result is the code of -0 and no scale is negative,
// so no word of either is ever 0x88888888.
#pragma once
#include "cuda/common/fp8.cuh"

namespace deepep {

constexpr int kFp4Channels = 16;  // of one scale
constexpr uint32_t kNeverFp4 = 0x88888888u;

__device__ __forceinline__ float from_e4m3(uint32_t code) {  // of 0 to 0x7f
  if (code < 8) return static_cast<float>(code) * 0.001953125f;
  return __uint_as_float(code == 0x7f ? 0x7fc00000u : (code << 20) + (120u << 23));
}
// The greatest magnitude of two channels and of what came before, as the bits of BF16: NaN is above infinity.
__device__ __forceinline__ uint32_t greatest_bits(uint32_t so_far, uint32_t pair) {
  return max(so_far, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
}
// To nearest even: the borders lie halfway between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. NaN becomes 6.
__device__ __forceinline__ uint32_t cast_e2m1(uint32_t channel, float inverse) {
  const float a = __fmul_rn(__uint_as_float((channel & 0x7fffu) << 16), inverse);
  const uint32_t code = static_cast<uint32_t>(!(a <= 0.25f)) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) +
                        !(a <= 2.5f) + !(a < 3.5f) + !(a <= 5.0f);
  return code == 0 ? 0 : code | (channel >> 12 & 8u);
}
// Eight words of BF16 (16 channels) to 8 bytes; `scale` gets their e4m3 code.
__device__ __forceinline__ uint2 cast_fp4_sixteen(const uint4 &a, const uint4 &b, float factor, uint32_t &scale) {
  uint32_t bits = 0;
  for (uint32_t pair : {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}) bits = greatest_bits(bits, pair);
  const float wanted = __fmul_rn(factor, __fdiv_rn(__uint_as_float(bits << 16), 6.0f));
  scale = cast_e4m3_four(wanted < 0 ? 0 : wanted, 0, 0, 0) & 0x7f;
  if (scale == 0) return {0, 0};
  const float inverse = __fdiv_rn(factor, from_e4m3(scale));
  auto two = [&](uint32_t pair) { return cast_e2m1(pair & 0xffffu, inverse) | cast_e2m1(pair >> 16, inverse) << 4; };
  auto eight = [&](const uint4 &v) { return two(v.x) | two(v.y) << 8 | two(v.z) << 16 | two(v.w) << 24; };
  return {eight(a), eight(b)};
}
// 32 channels (two blocks) to 16 bytes, and two scales in the lower half of `scales`.
__device__ __forceinline__ uint4 cast_fp4_piece(const uint8_t *x, float factor, uint32_t &scales) {
  uint32_t low, high;
  const uint2 first = cast_fp4_sixteen(ptx::ld_stream(x), ptx::ld_stream(x + 16), factor, low);
  const uint2 second = cast_fp4_sixteen(ptx::ld_stream(x + 32), ptx::ld_stream(x + 48), factor, high);
  scales = low | high << 8;
  return {first.x, first.y, second.x, second.y};
}
__device__ __forceinline__ float fp4_factor(const uint8_t *x_scales) {
  return x_scales != nullptr ? *reinterpret_cast<const float *>(x_scales) : 1.0f;
}

}  // namespace deepep
