// The row kernels for the vector width DK_ROWS_WIDTH. Included by rows_baseline.cpp, rows_avx2.cpp, rows_avx512.cpp.
#pragma once
#include "cpu/rows_fp8.h"
#include "cpu/rows_logfmt.h"
#include "cpu/rows_vector.h"

namespace {

void finish_stream() {
#if defined(DK_STREAMING)
  _mm_sfence();
#endif
}

void copy(void *dst, const void *src, size_t bytes, bool stream) {
#if defined(DK_STREAMING)
  uint8_t *to = static_cast<uint8_t *>(dst);
  const uint8_t *from = static_cast<const uint8_t *>(src);
  size_t head = (kWidth - reinterpret_cast<uintptr_t>(to) % kWidth) % kWidth;
  if (stream && bytes >= 256 + head) {
    memcpy(to, from, head);
    size_t i = head;
    for (; i + 4 * kWidth <= bytes; i += 4 * kWidth)
      for (size_t v = 0; v < 4; v++) stream_vector(to + i + v * kWidth, from + i + v * kWidth);
    memcpy(to + i, from + i, bytes - i);
    return;
  }
#endif
  (void)stream;
  memcpy(dst, src, bytes);
}

// Stores 2 * kLanes channels.
inline void store_channels(uint16_t *dst, Floats first, Floats second, bool stream) {
  Halves both[2] = {to_bf16(first), to_bf16(second)};
#if defined(DK_STREAMING)
  if (stream) return stream_vector(dst, both);
#endif
  (void)stream;
  memcpy(dst, both, sizeof both);
}

inline uint16_t bf16_scalar(float x) { return to_bf16(floats(x))[0]; }
inline float scalar_bf16(uint16_t bits) { return bf16_value(bits); }

void sum(uint16_t *dst, const uint16_t *const *rows, int count, size_t elements, bool stream) {
  constexpr size_t step = 2 * kLanes;
  stream = stream && can_stream(dst);
  size_t i = 0;
  for (; i + 2 * step <= elements; i += 2 * step) {
    Floats acc[4];
    for (size_t v = 0; v < 4; v++) acc[v] = from_bf16(rows[0] + i + v * kLanes);
    for (int r = 1; r < count; r++)
      for (size_t v = 0; v < 4; v++) acc[v] += from_bf16(rows[r] + i + v * kLanes);
    store_channels(dst + i, acc[0], acc[1], stream);
    store_channels(dst + i + step, acc[2], acc[3], stream);
  }
  for (; i < elements; i++) {
    float acc = scalar_bf16(rows[0][i]);
    for (int r = 1; r < count; r++) acc += scalar_bf16(rows[r][i]);
    dst[i] = bf16_scalar(acc);
  }
}

void weighted_sum(uint16_t *dst, const uint16_t *const *rows, const float *weights, int count, size_t elements) {
  constexpr size_t step = 2 * kLanes;
  size_t i = 0;
  for (; i + 2 * step <= elements; i += 2 * step) {
    Floats acc[4] = {};
    for (int r = 0; r < count; r++) {
      Floats w = floats(weights[r]);
      for (size_t v = 0; v < 4; v++) acc[v] += w * from_bf16(rows[r] + i + v * kLanes);
    }
    store_channels(dst + i, acc[0], acc[1], false);
    store_channels(dst + i + step, acc[2], acc[3], false);
  }
  for (; i < elements; i++) {
    float acc = 0;
    for (int r = 0; r < count; r++) acc += weights[r] * scalar_bf16(rows[r][i]);
    dst[i] = bf16_scalar(acc);
  }
}

void store_bf16(uint16_t *dst, const float *acc, size_t elements) {
  size_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) store(dst + i, to_bf16(load<Floats>(acc + i)));
  for (; i < elements; i++) dst[i] = bf16_scalar(acc[i]);
}

}  // namespace

#define DK_ROW_KERNELS(name) \
  { name, copy, finish_stream, sum, weighted_sum, cast_fp8, logfmt_encode, logfmt_add, store_bf16 }
