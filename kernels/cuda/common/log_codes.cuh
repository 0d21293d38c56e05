// log_codes.cuh - the codes of LogFMT-10: a sign and 9 bits of magnitude, codes 1 to 511 evenly spaced in log2 between
// a block's lowest and highest magnitude, rounded to nearest in linear value; code 0 is zero.
#pragma once
#include "cuda/common/ptx.cuh"
#include "cuda/common/types.cuh"

namespace deepep {

// Of a block: bits of the BF16 of least and of greatest magnitude, without signs.
struct BlockRange {
  uint32_t low, high;
};
__device__ __forceinline__ BlockRange range_of_chunk(const uint4 &data) {  // of 8 channels
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
  BlockRange range{0x7fff, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = words[i] & 0x7fff, b = words[i] >> 16 & 0x7fff;
    range.low = min(range.low, min(a, b));
    range.high = max(range.high, max(a, b));
  }
  return range;
}
// Other blocks stay BF16: LogFMT would not serve them.
__device__ __forceinline__ bool is_log_coded(const BlockRange &range) {
  return range.high < 0x3f80 && range.low != range.high && __uint_as_float(range.high << 16) >= 0x1p-90f;
}

struct LogRange {
  float lowest, first, step;
};
__device__ __forceinline__ LogRange log_range(const BlockRange &bits) {
  const float high = __uint_as_float(bits.high << 16), low = __uint_as_float(bits.low << 16);
  LogRange range;
  range.lowest = fmaxf(low, __fmul_rn(high, 0x1p-32f));
  range.first = ptx::log2(range.lowest);
  range.step = __fmul_rn(__fsub_rn(ptx::log2(high), range.first), 1.0f / 510);
  return range;
}

// What encoding a block's magnitudes needs. A value is rounded to the nearer of two codes' values; the midpoint lies at
// the same part of the step in log2 for all codes of a block, so that a code is one logarithm, scaled and rounded.
// Numbers become integers, and integers numbers, by their bits: the unit for logarithms would do that too, and is what
// the kernel waits for.
struct LogEncoder {
  float lowest, first, per_step, bias;
};
__device__ __forceinline__ LogEncoder log_encoder(const LogRange &range) {
  LogEncoder encoder;
  encoder.lowest = range.lowest;
  encoder.first = range.first;
  encoder.per_step = ptx::reciprocal(range.step);
  encoder.bias = 1.5f - ptx::log2(fmaf(0.5f, ptx::exp2(range.step), 0.5f)) * encoder.per_step;
  return encoder;
}
__device__ __forceinline__ uint32_t log_encode(const LogEncoder &encoder, uint32_t bf16) {
  const uint32_t sign = bf16 >> 15 << 9;
  const float magnitude = __uint_as_float((bf16 & 0x7fff) << 16);
  if (magnitude + magnitude < encoder.lowest) return sign;  // nearer to zero than to code 1
  const float place = fmaf(ptx::log2(fmaxf(magnitude, encoder.lowest)) - encoder.first, encoder.per_step, encoder.bias);
  constexpr float kUnits = 0x1.8p23f;  // a float of this size has whole units
  return sign | (__float_as_uint(fminf(fmaxf(place, 1.0f), 511.0f) + kUnits) & 511);
}
// The first 8 codes: those of 8 channels.
template <int kCodes>
__device__ __forceinline__ void log_encode_chunk(const LogRange &range, const uint4 &data, uint32_t (&codes)[kCodes]) {
  const LogEncoder encoder = log_encoder(range);
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[2 * i] = log_encode(encoder, words[i] & 0xffff);
    codes[2 * i + 1] = log_encode(encoder, words[i] >> 16);
  }
}
__device__ __forceinline__ float log_decode(const LogRange &range, uint32_t code) {
  const float scale = 512 * range.step, base = range.first - 513 * range.step;  // once for a block
  const float units = __uint_as_float(0x3f800000u | (code & 511) << 14);        // 1 + magnitude / 512
  const uint32_t bits = __float_as_uint(ptx::exp2(fmaf(units, scale, base)));
  return __uint_as_float((code & 511) == 0 ? 0 : bits | (code & 512) << 22);
}

}  // namespace deepep
