// copy_row.cuh - copies a row from one place to another.
#pragma once
#include "cuda/common/ptx.cuh"

namespace deepep {

// By a warp, through registers; `bytes` is a multiple of 16.
__device__ inline void copy_row(uint8_t *to, const uint8_t *from, uint32_t bytes) {
  constexpr int kUnroll = 8;
  const int chunks = static_cast<int>(bytes / 16);
  for (int first = lane_id(); first < chunks; first += kWarp * kUnroll) {
    uint4 data[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (first + u * kWarp < chunks) data[u] = ptx::ld_stream(from + 16ull * (first + u * kWarp));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (first + u * kWarp < chunks) ptx::st_stream(to + 16ull * (first + u * kWarp), data[u]);
  }
}

}  // namespace deepep
