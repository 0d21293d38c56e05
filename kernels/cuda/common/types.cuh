// types.cuh - small helpers of host and device.
#pragma once
#include <cstdint>

namespace deepep {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

template <class T>
__host__ __device__ constexpr T align_up(T value, T to) {
  return (value + to - 1) / to * to;
}
template <class T>
__host__ __device__ constexpr T ceil_div(T value, T by) {
  return (value + by - 1) / by;
}
template <class T>
__host__ __device__ constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
__host__ __device__ constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// The interface has addresses as 64-bit integers.
template <class T>
__host__ __device__ inline T *pointer(uint64_t address) {
  return reinterpret_cast<T *>(address);
}

// Division by a number that the host knows: exact while n * by < 2^32.
struct Divisor {
  uint32_t by, magic;
  __host__ __device__ Divisor() : by(1), magic(0) {}
  __host__ explicit Divisor(uint32_t n) : by(n), magic(n == 1 ? 0 : static_cast<uint32_t>((1ull << 32) / n + 1)) {}
#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int n) const {
    return by == 1 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), magic));
  }
#endif
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) & (kWarp - 1); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// Top-k entries are int32 or int64.
__device__ __forceinline__ int64_t load_index(const void *base, int64_t at, int index_bytes) {
  return index_bytes == 8 ? static_cast<const int64_t *>(base)[at] : static_cast<const int32_t *>(base)[at];
}

}  // namespace deepep
