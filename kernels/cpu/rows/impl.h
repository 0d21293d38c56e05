// The row kernels for the vector width DK_ROWS_WIDTH. Included by baseline.cpp, avx2.cpp and avx512.cpp.
#pragma once
#include "cpu/rows/fp4.h"
#include "cpu/rows/fp8.h"
#include "cpu/rows/logfmt.h"
#include "cpu/rows/vector.h"

namespace {

void finish_stream() {
#if defined(DK_STREAMING)
  _mm_sfence();
#endif
}

// memmove, which costs the same: a caller's output may lie over its input.
void copy(void *dst, const void *src, size_t bytes, bool stream) {
#if defined(DK_STREAMING)
  uint8_t *to = static_cast<uint8_t *>(dst);
  const uint8_t *from = static_cast<const uint8_t *>(src);
  size_t head = (kWidth - reinterpret_cast<uintptr_t>(to) % kWidth) % kWidth;
  if (stream && bytes >= 256 + head) {
    memmove(to, from, head);
    size_t i = head;
    for (; i + 4 * kWidth <= bytes; i += 4 * kWidth)
      for (size_t v = 0; v < 4; v++) stream_vector(to + i + v * kWidth, from + i + v * kWidth);
    memmove(to + i, from + i, bytes - i);
    return;
  }
#endif
  (void)stream;
  memmove(dst, src, bytes);
}

// To BF16 in the upper half of each lane, to nearest even; NaN stays NaN.
inline Words round_to_bf16(Floats value) {
  Words u = as_words(value);
  Ints is_nan = (u & 0x7fffffff) > words(0x7f800000);
  return choose(is_nan, u | 0x400000, u + 0x7fff + ((u >> 16) & 1));
}
inline uint16_t round_scalar(float x) { return static_cast<uint16_t>(round_to_bf16(floats(x))[0] >> 16); }

inline void store_pair(uint16_t *dst, const Pair &value, bool stream) {
  Words both = (round_to_bf16(value.even) >> 16) | (round_to_bf16(value.odd) & 0xffff0000);
#if defined(DK_STREAMING)
  if (stream) return stream_vector(dst, &both);
#endif
  (void)stream;
  store(dst, both);
}

constexpr size_t kStep = 4;  // pairs at once

void sum(uint16_t *dst, const uint16_t *const *rows, int count, size_t elements, bool stream) {
  stream = stream && can_stream(dst);
  size_t i = 0;
  for (; i + kStep * kPair <= elements; i += kStep * kPair) {
    Pair acc[kStep];
#pragma GCC unroll 4
    for (size_t v = 0; v < kStep; v++) acc[v] = load_pair(rows[0] + i + v * kPair);
    for (int r = 1; r < count; r++) {
      const uint16_t *row = rows[r] + i;
#pragma GCC unroll 4
      for (size_t v = 0; v < kStep; v++) {
        Pair more = load_pair(row + v * kPair);
        acc[v].even += more.even;
        acc[v].odd += more.odd;
      }
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < kStep; v++) store_pair(dst + i + v * kPair, acc[v], stream);
  }
  for (; i < elements; i++) {
    float acc = bf16_value(rows[0][i]);
    for (int r = 1; r < count; r++) acc += bf16_value(rows[r][i]);
    dst[i] = round_scalar(acc);
  }
}

void weighted_sum(uint16_t *dst, const uint16_t *const *rows, const float *weights, int count, size_t elements) {
  size_t i = 0;
  for (; i + kStep * kPair <= elements; i += kStep * kPair) {
    Pair acc[kStep] = {};
    for (int r = 0; r < count; r++) {
      const uint16_t *row = rows[r] + i;
      Floats w = floats(weights[r]);
#pragma GCC unroll 4
      for (size_t v = 0; v < kStep; v++) {
        Pair more = load_pair(row + v * kPair);
        acc[v].even += w * more.even;
        acc[v].odd += w * more.odd;
      }
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < kStep; v++) store_pair(dst + i + v * kPair, acc[v], false);
  }
  for (; i < elements; i++) {
    float acc = 0;
    for (int r = 0; r < count; r++) acc += weights[r] * bf16_value(rows[r][i]);
    dst[i] = round_scalar(acc);
  }
}

void store_sums(uint16_t *dst, const float *acc, size_t blocks) {
  for (size_t i = 0; i < blocks * dk::kScaleChannels; i += kPair)
    store_pair(dst + i, {load<Floats>(acc + i), load<Floats>(acc + i + kLanes)}, false);
}

}  // namespace

#define DK_ROW_KERNELS(name) \
  {name, copy, finish_stream, sum, weighted_sum, cast_fp8, cast_fp4, logfmt_encode, logfmt_add, store_sums}
