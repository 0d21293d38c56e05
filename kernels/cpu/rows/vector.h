// Vectors of a compile-time width, with the compiler's vector types. Included by impl.h, once for each width.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Sanitizers do not see streaming stores, so their builds store as usual.
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DK_STREAMING 1
#endif

constexpr size_t kWidth = DK_ROWS_WIDTH;  // bytes of a vector
constexpr size_t kLanes = kWidth / 4;

typedef float Floats __attribute__((vector_size(kWidth)));
typedef uint32_t Words __attribute__((vector_size(kWidth)));
typedef int32_t Ints __attribute__((vector_size(kWidth)));
typedef uint16_t Halves __attribute__((vector_size(kWidth / 2)));

template <class V>
inline V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void *p, V v) {
  memcpy(p, &v, sizeof v);
}

inline Floats floats(float x) { return Floats{} + x; }
inline Words words(uint32_t x) { return Words{} + x; }
template <class To, class From>
inline To bits_as(From v) {
  return (To)v;  // a vector cast keeps the bits
}
inline Floats as_floats(Words v) { return bits_as<Floats>(v); }
inline Words as_words(Floats v) { return bits_as<Words>(v); }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }

// mask lanes are all ones or all zeros
inline Words choose(Ints mask, Words yes, Words no) {
  Words m = bits_as<Words>(mask);
  return (yes & m) | (no & ~m);
}
inline Floats choose(Ints mask, Floats yes, Floats no) { return as_floats(choose(mask, as_words(yes), as_words(no))); }

// Adjacent channels of BF16 as two vectors: those at even and those at odd positions. Splitting and joining them needs
// no shuffles.
struct Pair {
  Floats even, odd;
};
constexpr size_t kPair = 2 * kLanes;  // channels
inline Pair load_pair(const uint16_t *p) {
  Words both = load<Words>(p);
  return {as_floats(both << 16), as_floats(both & 0xffff0000)};
}

// BF16 magnitudes as integers order like the numbers; NaN is above infinity.
typedef int16_t Shorts __attribute__((vector_size(kWidth)));
inline Shorts greater(Shorts a, Shorts b) { return a > b ? a : b; }
inline int greatest_lane(Shorts v) {
  int16_t lanes[kWidth / 2], found = INT16_MIN;
  memcpy(lanes, &v, sizeof v);
  for (size_t half = kWidth / 4; half >= 8; half /= 2)
    for (size_t i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  for (size_t i = 0; i < 8; i++) found = lanes[i] > found ? lanes[i] : found;
  return found;
}

#if defined(DK_STREAMING)
// 16 bytes at a time, or 32 where the address allows; the write-combining buffers join them to lines.
inline void stream_vector(void *p, const void *from) {
#if DK_ROWS_WIDTH >= 64
  _mm512_stream_si512(static_cast<__m512i *>(p), _mm512_loadu_si512(from));
#elif DK_ROWS_WIDTH >= 32
  _mm256_stream_si256(static_cast<__m256i *>(p), _mm256_loadu_si256(static_cast<const __m256i *>(from)));
#else
  _mm_stream_si128(static_cast<__m128i *>(p), _mm_loadu_si128(static_cast<const __m128i *>(from)));
#endif
}
#endif
inline bool can_stream(const void *p) {
#if defined(DK_STREAMING)
  return reinterpret_cast<uintptr_t>(p) % kWidth == 0;
#else
  (void)p;
  return false;
#endif
}

}  // namespace
