// failed_outputs.cuh - what a failed call leaves in its outputs. By the last block.
#pragma once
#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/dispatch_params.cuh"

namespace deepep {

// A failed dispatch leaves rows that name nothing.
__device__ inline void clear_dispatch_outputs(const DispatchParams &p) {
  const int64_t rows = max(p.num_recv_tokens, 0);
  name_nothing(p, 0, rows, threadIdx.x, blockDim.x);
  for (int64_t i = threadIdx.x; p.recv_src_idx() != nullptr && i < rows; i += blockDim.x) p.recv_src_idx()[i] = 0;
}

// A failed combine leaves NaN.
__device__ inline void clear_combine_outputs(const CombineParams &p) {
  const uint64_t chunks = static_cast<uint64_t>(p.num_tokens) * p.row_bytes / 16;
  constexpr uint32_t kNan = 0x7fc07fc0u;
  for (uint64_t i = threadIdx.x; i < chunks; i += blockDim.x)
    reinterpret_cast<uint4 *>(p.combined_x())[i] = {kNan, kNan, kNan, kNan};
  for (int64_t i = threadIdx.x;
       p.combined_topk_weights() != nullptr && i < static_cast<int64_t>(p.num_tokens) * p.num_topk; i += blockDim.x)
    p.combined_topk_weights()[i] = __uint_as_float(0x7fc00000u);
}

}  // namespace deepep
