// matrix.cuh - the matrix of a normal-mode call: [i][j] is the number of rows that ranks 0..i send to rank j.
#pragma once
#include "cuda/common/types.cuh"

namespace deepep {

__device__ inline int rows_before(const int32_t *matrix, int num_ranks, int source, int owner) {
  return source == 0 ? 0 : matrix[(source - 1) * num_ranks + owner];
}

}  // namespace deepep
