// wire.cuh - libdeepep_nvshmem_wire.so: kernels post their puts to the test transport's worker, as they would to a NIC,
// and not to NVSHMEM's proxy. Nothing else includes it.
#pragma once
#include "testtransport/post.cuh"

namespace deepep::internode {

extern __device__ testtransport::WorkerState *wire_worker;  // null: the plugin plays no NIC

// By a whole warp. False: it is NVSHMEM's.
__device__ inline bool put_by_wire(int rank, void *to, const void *from, uint64_t bytes, uint64_t *word,
                                   uint64_t value) {
  if (wire_worker == nullptr) return false;
  __syncwarp();
  if (threadIdx.x % 32 == 0) testtransport::post_put(wire_worker, rank, to, from, bytes, word, value);
  __syncwarp();
  return true;
}

}  // namespace deepep::internode
