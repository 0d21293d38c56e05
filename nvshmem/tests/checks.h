// checks.h - for tests of kernels across nodes: what is random, what is expected, numbers of BF16, arrays in files.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

inline std::mt19937_64 random_number;
inline int pick(int low, int high) {
  return low + static_cast<int>(random_number() % static_cast<uint64_t>(high - low + 1));
}
inline bool toss() { return pick(0, 1) == 1; }
// Of a row; now and then more than a warp copies or adds at once.
inline int pick_hidden() { return 8 * (pick(0, 5) == 0 ? pick(129, 400) : pick(1, 40)); }

inline uint8_t *aligned(std::vector<uint8_t> &memory) {
  return reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(memory.data()) + 4095) & ~uintptr_t{4095});
}

[[noreturn]] inline void wrong(const char *what, int rank, int64_t at, double got, double want) {
  fprintf(stderr, "rank %d: %s[%lld] is %g instead of %g\n", rank, what, static_cast<long long>(at), got, want);
  quick_exit(1);
}
inline void check(bool good, const char *what, int rank, int64_t at, double got, double want) {
  if (!good) wrong(what, rank, at, got, want);
}

inline uint16_t to_bf16(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// For the CPU engine's comparison: a line of its name, the rank and its bytes, then these.
template <class T>
void dump_array(FILE *file, const char *name, int rank, const std::vector<T> &array) {
  fprintf(file, "%s %d %zu\n", name, rank, array.size() * sizeof(T));
  fwrite(array.data(), sizeof(T), array.size(), file);
}
