// matrix.cuh - the matrix of a normal-mode call: [i][j] is the number of rows that ranks 0..i send to rank j.
#pragma once
#include "cuda/common/types.cuh"

namespace deepep {

__host__ __device__ inline int rows_before(const int32_t *matrix, int num_ranks, int source, int owner) {
  return source == 0 ? 0 : matrix[(source - 1) * num_ranks + owner];
}

// An entry's part of the matrix's hash, which is the sum of all.
__host__ __device__ inline uint32_t matrix_hash(int32_t rows, int i) {
  const uint32_t mixed = (static_cast<uint32_t>(rows) ^ static_cast<uint32_t>(i) * 0x9e3779b9u) * 0x85ebca6bu;
  return mixed ^ mixed >> 15;
}

}  // namespace deepep
