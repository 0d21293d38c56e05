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
// Both in one word, so that one maximum joins two ranges: the greatest, and above it what the least lacks to 0x7fff.
__device__ __forceinline__ uint32_t packed_range_of_chunk(const uint4 &data) {  // of 8 channels
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
  uint32_t high = 0, lack = 0;  // of the lower and of the upper channels
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high = ptx::max_u16x2(high, words[i] & kMagnitudes);
    lack = ptx::max_u16x2(lack, ~words[i] & kMagnitudes);
  }
  return ptx::max_u16x2((high & 0xffff) | lack << 16, high >> 16 | (lack & 0xffff0000));
}
__device__ __forceinline__ BlockRange unpack_range(uint32_t packed) {
  return {0x7fff - (packed >> 16), packed & 0xffff};
}
// On the wire: 30 bits.
__device__ __forceinline__ uint32_t range_word(const BlockRange &range) { return range.high << 15 | range.low; }
__device__ __forceinline__ BlockRange range_of_word(uint32_t word) { return {word & 0x7fff, word >> 15 & 0x7fff}; }
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
struct alignas(16) LogEncoder {
  float half_lowest, first, scale, shift;  // scaled and shifted, code 1 is 0 and code 511 is 1
};
__device__ __forceinline__ LogEncoder log_encoder(const LogRange &range) {
  constexpr float kSteps = 510;
  const float per_step = ptx::reciprocal(range.step),
              midpoint = ptx::log2(fmaf(0.5f, ptx::exp2(range.step), 0.5f)) * per_step;
  return {0.5f * range.lowest, range.first, per_step * (1 / kSteps), (0.5f - midpoint) * (1 / kSteps)};
}
__device__ __forceinline__ uint32_t log_encode(const LogEncoder &encoder, uint32_t bf16) {
  const uint32_t sign = bf16 >> 6 & 512;
  const float magnitude = __uint_as_float((bf16 & 0x7fff) << 16);
  const float place = ptx::fma_saturated(ptx::log2(magnitude) - encoder.first, encoder.scale, encoder.shift);
  constexpr float kUnits = 0x1.8p23f;  // a float of this size has whole units
  const uint32_t code = __float_as_uint(fmaf(place, 510.0f, kUnits + 1)) & 511;
  return sign | (magnitude < encoder.half_lowest ? 0 : code);  // or it is nearer to zero than to code 1
}
// The first 8 codes: those of 8 channels.
template <int kCodes>
__device__ __forceinline__ void log_encode_chunk(const LogEncoder &encoder, const uint4 &data,
                                                 uint32_t (&codes)[kCodes]) {
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
