// far_normal.h - what normal mode among nodes keeps in device memory, and room for its rings. Host and device.
#pragma once
#include "far.h"

namespace deepep {

// Device memory of one team, zeroed once. What a stream's warp keeps between two looks lies in `streams`.
struct FarState {
  uint32_t rows_taken[2][DK_MAX_RANKS]; // dispatch: rows that came from each rank, by parity of the epoch
};

cudaError_t load_far_normal_kernels(); // all of them, on the current device

}  // namespace deepep
