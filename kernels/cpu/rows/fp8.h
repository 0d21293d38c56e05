// BF16 to E4M3 with a scale for each 128 channels.
#pragma once
#include <float.h>

#include "cpu/rows/rows.h"
#include "cpu/rows/vector.h"

namespace {

// Codes in the low byte of each lane. Saturating, to nearest even; NaN becomes NaN (0x7f).
inline Words to_e4m3(Floats value) {
  Words u = as_words(value), sign = (u >> 24) & 0x80, a = u & 0x7fffffff;
  Ints is_nan = a > words(0x7f800000);
  a = choose(a > words(0x43e00000), words(0x43e00000), a);  // 448
  Words normal = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120u << 3);
  // Below 2^-6 a step is 2^-9, which is the last bit of a float near 2^14: the addition rounds.
  Words small = as_words(as_floats(a) + floats(16384.0f)) - as_words(floats(16384.0f));
  Words code = choose(a < words(0x3c800000), small, normal);
  return choose(is_nan, words(0x7f), code) | sign;
}

// Greatest magnitude as float bits. NaN is ignored, so that one channel does not spoil the scale of the others.
inline uint32_t amax_bits(const uint16_t *src) {
  Shorts found = {};
  for (size_t i = 0; i < dk::kScaleChannels; i += kPair) {
    Shorts a = load<Shorts>(src + i) & 0x7fff;
    found = greater(found, a > 0x7f80 ? Shorts{} : a);
  }
  return static_cast<uint32_t>(greatest_lane(found)) << 16;
}

inline float clamp_amax(uint32_t bits) {
  if (bits >= 0x7f800000) return FLT_MAX;  // infinity: it saturates, the scale stays finite
  float amax;
  memcpy(&amax, &bits, 4);
  return amax < 1e-4f ? 1e-4f : amax;
}

inline float up_to_power_of_two(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fffff) & 0x7f800000;
  memcpy(&x, &bits, 4);
  return x;
}

void cast_fp8(uint8_t *dst, float *scales, const uint16_t *src, size_t blocks, bool round_scale) {
  for (size_t b = 0; b < blocks; b++, src += dk::kScaleChannels, dst += dk::kScaleChannels) {
    float amax = clamp_amax(amax_bits(src));
    float scale = amax / 448.0f, inverse = 448.0f / amax;
    if (round_scale) {
      scale = up_to_power_of_two(scale);
      inverse = 1.0f / scale;
    }
    scales[b] = scale;
    for (size_t i = 0; i < dk::kScaleChannels; i += kPair) {
      Pair x = load_pair(src + i);
      Words two = to_e4m3(x.even * floats(inverse)) | to_e4m3(x.odd * floats(inverse)) << 8;
      store(dst + i, __builtin_convertvector(two, Halves));
    }
  }
}

}  // namespace
