// BF16 to E2M1 with an E4M3 scale for each 16 channels. No result is the code of -0, and no scale is negative.
#pragma once
#include "cpu/rows/fp8.h"

namespace {

inline float from_e4m3(uint32_t code) {  // of 0 to 0x7f
  if (code < 8) return static_cast<float>(code) / 512;
  uint32_t bits = code == 0x7f ? 0x7fc00000 : (code << 20) + (120u << 23);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The scale of a block whose greatest magnitude is amax (NaN if the block has one).
inline uint32_t fp4_scale(float amax, float factor) {
  float wanted = factor * (amax / 6.0f);
  return to_e4m3(floats(wanted < 0 ? 0 : wanted))[0] & 0x7f;
}

// NaN compares as the greatest magnitude.
inline float amax_of_sixteen(const uint16_t *src) {
  uint16_t found = 0;
  for (int i = 0; i < dk::kFp4Channels; i++) {
    uint16_t magnitude = src[i] & 0x7fff;
    found = magnitude > found ? magnitude : found;
  }
  uint32_t bits = static_cast<uint32_t>(found) << 16;
  float amax;
  memcpy(&amax, &bits, sizeof amax);
  return amax;
}

// To nearest even: the borders lie halfway between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. NaN becomes 6.
inline uint32_t to_e2m1(uint16_t channel, float inverse) {
  uint32_t bits = static_cast<uint32_t>(channel & 0x7fff) << 16;
  float a;
  memcpy(&a, &bits, sizeof a);
  a *= inverse;
  uint32_t code = static_cast<uint32_t>(!(a <= 0.25f)) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) +
                  !(a < 3.5f) + !(a <= 5.0f);
  return code == 0 ? 0 : code | (channel >> 12 & 8);
}

void cast_fp4(uint8_t *dst, uint8_t *scales, const uint16_t *src, size_t blocks, float factor) {
  for (size_t b = 0; b < blocks; b++, src += dk::kFp4Channels, dst += dk::kFp4Channels / 2) {
    uint32_t scale = fp4_scale(amax_of_sixteen(src), factor);
    scales[b] = static_cast<uint8_t>(scale);
    if (scale == 0) {
      memset(dst, 0, dk::kFp4Channels / 2);
      continue;
    }
    float inverse = factor / from_e4m3(scale);
    for (int i = 0; i < dk::kFp4Channels; i += 2)
      dst[i / 2] = static_cast<uint8_t>(to_e2m1(src[i], inverse) | to_e2m1(src[i + 1], inverse) << 4);
  }
}

}  // namespace
