// LogFMT-10: a sign and 9 bits of magnitude, evenly spaced in log2 between the smallest and the greatest magnitude of
// 128 channels.
#pragma once
#include "cpu/rows/rows.h"
#include "cpu/rows/vector.h"

namespace {

constexpr size_t kBlock = dk::kScaleChannels;
constexpr size_t kBlockStride = 2 * kBlock;  // bytes between blocks on the wire
constexpr uint16_t kStaysBf16 = 0x8000;      // a flag in the sign bit of the greatest magnitude

// log2 of normal positive numbers, to about 1e-7: the exponent and a series in (m-1)/(m+1) for m near 1.
inline Floats log2_of(Floats x) {
  Words u = as_words(x);
  Words shifted = u - 0x3f3504f3;  // sqrt(1/2): m lies in [sqrt(1/2), sqrt(2))
  Ints exponent = bits_as<Ints>(shifted) >> 23;
  Words e = bits_as<Words>(exponent);
  Floats m = as_floats(u - (e << 23));
  Floats s = (m - 1.0f) / (m + 1.0f), q = s * s;
  Floats series = 1.0f + q * (1.0f / 3 + q * (1.0f / 5 + q * (1.0f / 7 + q * (1.0f / 9))));
  return to_floats(exponent) + s * series * 2.885390082f;
}

// 2^x for -126 <= x <= 127.
inline Floats exp2_of(Floats x) {
  Floats magic = floats(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = (x + magic) - magic, f = (x - n) * 0.693147181f;
  Floats p =
      1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
  Ints exponent = to_ints(n) << 23;
  return as_floats(as_words(p) + bits_as<Words>(exponent));
}

inline float log2_scalar(float x) { return log2_of(floats(x))[0]; }

struct Range {
  uint16_t smallest, greatest;  // BF16 magnitudes
  float first, step, lowest;    // log2 of code 1, log2 between codes, value of code 1
};

inline float bf16_value(uint16_t bits) {
  uint32_t u = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Both sides derive the codes' values from the two magnitudes in the header.
inline Range make_range(uint16_t smallest, uint16_t greatest) {
  Range r = {smallest, greatest, 0, 0, 0};
  float floor_value = bf16_value(greatest) * 0x1p-32f, low = bf16_value(smallest);
  r.lowest = low > floor_value ? low : floor_value;
  r.first = log2_scalar(r.lowest);
  r.step = (log2_scalar(bf16_value(greatest)) - r.first) / 510.0f;
  return r;
}

inline Floats code_value(const Range &r, Floats code) {
  return exp2_of(floats(r.first) + (code - 1.0f) * floats(r.step));
}

inline void magnitudes(const uint16_t *src, uint16_t *smallest, uint16_t *greatest) {
  Shorts most = {}, inverted = {};
  for (size_t i = 0; i < kBlock; i += kPair) {
    Shorts a = load<Shorts>(src + i) & 0x7fff;
    most = greater(most, a);
    inverted = greater(inverted, 0x7fff - a);
  }
  *greatest = static_cast<uint16_t>(greatest_lane(most));
  *smallest = static_cast<uint16_t>(0x7fff - greatest_lane(inverted));
}

// 10-bit codes. A value is rounded to the nearer of two codes' values; the midpoint lies at the fraction `turn` of the
// step in log2, which is the same for all codes of a block.
inline Words encode_lanes(const Range &r, float per_step, float turn, Floats value) {
  Words u = as_words(value), sign = (u >> 31) << 9;
  Floats a = as_floats(u & 0x7fffffff);
  Floats at_least = choose(a < floats(r.lowest), floats(r.lowest), a);
  Floats place = (log2_of(at_least) - floats(r.first)) * floats(per_step);
  Ints below = to_ints(place);
  below = below > 509 ? Ints{} + 509 : below;
  Ints code = below + 1 - (place - to_floats(below) > floats(turn));  // a mask lane is -1
  code = (a + a < floats(r.lowest)) ? Ints{} : code;                  // nearer to zero than to code 1
  return bits_as<Words>(code) | sign;
}

// The 2-bit tops of 128 channels: byte i holds those of channels i, 32 + i, 64 + i and 96 + i.
typedef uint8_t Tops __attribute__((vector_size(16)));  // 16 of their 32 bytes

inline void encode_block(uint8_t *dst, const Range &r, const uint16_t *src) {
  uint8_t tops[kBlock];
  float ratio = exp2_of(floats(r.step))[0], per_step = 1.0f / r.step,
        turn = log2_scalar((1.0f + ratio) * 0.5f) * per_step;
  for (size_t i = 0; i < kBlock; i += kPair) {
    Pair x = load_pair(src + i);
    Words even = encode_lanes(r, per_step, turn, x.even), odd = encode_lanes(r, per_step, turn, x.odd);
    store(dst + i, __builtin_convertvector((even & 0xff) | (odd & 0xff) << 8, Halves));
    store(tops + i, __builtin_convertvector(even >> 8 | (odd >> 8) << 8, Halves));
  }
  for (size_t i = 0; i < 32; i += sizeof(Tops)) {
    Tops low = load<Tops>(tops + i) | load<Tops>(tops + 32 + i) << 2,
         high = load<Tops>(tops + 64 + i) | load<Tops>(tops + 96 + i) << 2;
    store(dst + kBlock + i, low | high << 4);
  }
}

void logfmt_encode(uint8_t *dst, const uint16_t *src, size_t blocks) {
  uint8_t *body = dst + 4 * blocks;
  for (size_t b = 0; b < blocks; b++, src += kBlock, body += kBlockStride) {
    uint16_t range[2];
    magnitudes(src, &range[0], &range[1]);
    // The greatest is 1 or more (infinity and NaN too), all are equal, or the range would reach denormal numbers.
    bool stays = range[1] >= 0x3f80 || range[0] == range[1] || bf16_value(range[1]) < 0x1p-90f;
    if (stays) {
      range[1] |= kStaysBf16;
      memcpy(body, src, kBlockStride);
    } else {
      encode_block(body, make_range(range[0], range[1]), src);
    }
    memcpy(dst + 4 * b, range, 4);
  }
}

inline Floats decode_lanes(const Range &r, Words low, Words top) {
  Words magnitude = low | (top & 1) << 8;
  Words value = as_words(code_value(r, to_floats(bits_as<Ints>(magnitude))));
  return as_floats(choose(magnitude == 0, Words{}, value) | (top >> 1) << 31);
}

// Sums are stored as pairs: kLanes channels at even positions, then those at odd positions.
inline void add_pair(float *acc, float weight, const Pair &value) {
  store(acc, load<Floats>(acc) + floats(weight) * value.even);
  store(acc + kLanes, load<Floats>(acc + kLanes) + floats(weight) * value.odd);
}

inline void add_block(float *acc, const uint8_t *src, const Range &r, float weight) {
  uint8_t tops[kBlock];
  for (size_t i = 0; i < 32; i += sizeof(Tops)) {
    Tops packed = load<Tops>(src + kBlock + i);
    for (size_t part = 0; part < 4; part++, packed >>= 2) store(tops + 32 * part + i, packed & 3);
  }
  for (size_t i = 0; i < kBlock; i += kPair) {
    Words low = __builtin_convertvector(load<Halves>(src + i), Words),
          top = __builtin_convertvector(load<Halves>(tops + i), Words);
    add_pair(acc + i, weight, {decode_lanes(r, low & 0xff, top & 0xff), decode_lanes(r, low >> 8, top >> 8)});
  }
}

void logfmt_add(float *acc, const uint8_t *row, float weight, size_t blocks, size_t first, size_t count) {
  const uint8_t *body = row + 4 * blocks + first * kBlockStride;
  for (size_t b = first; b < first + count; b++, acc += kBlock, body += kBlockStride) {
    uint16_t range[2];
    memcpy(range, row + 4 * b, 4);
    if (!(range[1] & kStaysBf16)) {
      add_block(acc, body, make_range(range[0], range[1]), weight);
      continue;
    }
    for (size_t i = 0; i < kBlock; i += kPair)
      add_pair(acc + i, weight, load_pair(reinterpret_cast<const uint16_t *>(body) + i));
  }
}

}  // namespace
