// log_codes.cuh - the codes of LogFMT-10: a sign and 9 bits of magnitude, codes 1 to 511 evenly spaced in log2 between
// a block's least and greatest magnitude, rounded to nearest in linear value; code 0 is zero.
#pragma once
#include "cuda/common/types.cuh"

namespace deepep {

struct LogRange {
  float lowest, first, step;
};
__device__ __forceinline__ LogRange log_range(uint32_t min_bits, uint32_t greatest_bits) {
  const float high = __uint_as_float(greatest_bits << 16), low = __uint_as_float(min_bits << 16);
  LogRange range;
  range.lowest = fmaxf(low, __fmul_rn(high, 0x1p-32f));
  range.first = log2f(range.lowest);
  range.step = __fdiv_rn(__fsub_rn(log2f(high), range.first), 510.0f);
  return range;
}
__device__ __forceinline__ float code_value(const LogRange &range, int code) {
  return exp2f(fmaf(static_cast<float>(code - 1), range.step, range.first));
}
__device__ __forceinline__ uint32_t log_encode(const LogRange &range, uint32_t bf16) {
  const uint32_t sign = bf16 >> 15 << 9;
  const float magnitude = __uint_as_float((bf16 & 0x7fff) << 16);
  if (magnitude + magnitude < range.lowest) return sign;  // nearer to zero than to code 1
  const int below =
      min(max(static_cast<int>((log2f(fmaxf(magnitude, range.lowest)) - range.first) / range.step) + 1, 1), 510);
  const float low = code_value(range, below), high = code_value(range, below + 1);
  return sign | static_cast<uint32_t>(magnitude - low <= high - magnitude ? below : below + 1);
}
__device__ __forceinline__ float log_decode(const LogRange &range, uint32_t code) {
  const uint32_t magnitude = code & 511;
  const float value = magnitude == 0 ? 0.0f : code_value(range, static_cast<int>(magnitude));
  return (code >> 9 & 1) != 0 ? -value : value;
}

}  // namespace deepep
