// Small things that every file of the library uses: rounding, handles, the check at the head of every entry point.
//
// The chapters of this library, in the order in which they may include each other (a test compares):
//   rows         arithmetic on rows, one table of functions per instruction set
//   runtime      device, memory, streams, events, futexes
//   rdma         the software NIC
//   team         blocks of a team's ranks, operations, how they wait and fail
//   normal, low_latency    the two modes; neither includes the other
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "abi/kernels.h"

// The symbols that the shared library exports. -fvisibility=hidden hides all others.
#define DK_EXPORT extern "C" __attribute__((visibility("default")))

// First line of every dk_* function: the caller's struct must be at least as large as this library's.
#define DK_ENTER(p)                                   \
  do {                                                \
    if (!(p)) return DK_EINVAL;                       \
    if ((p)->size < sizeof(*(p))) return DK_EVERSION; \
    (p)->device_error = 0;                            \
  } while (0)

namespace dk {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kLine = 64;

constexpr uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
// Limits that dk_info reports.
constexpr int kMaxTopk = 128, kMaxTokens = 1 << 24;
constexpr uint64_t kMaxExperts = 65536;

template <class T>
constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// Of numbers in the caller's memory, which may be any: the sum wraps around.
inline int32_t plus(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

template <class T>
T *at(uint64_t address) {
  return reinterpret_cast<T *>(static_cast<uintptr_t>(address));
}
inline uint64_t address_of(const void *p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

}  // namespace dk
