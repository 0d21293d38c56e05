// put.cuh - puts of low latency, compiled in transport.cu: NVSHMEM's device headers take long to compile,
// so one file reads them. Each operation stands for itself, so any queue pair serves: NVSHMEM takes that of the block,
// or one after the other.
#pragma once
#include <cstdint>

namespace deepep::internode {

// By a whole warp: bytes of the own block to the same place of a rank's, then the word. All of the source has been
// written, as seen by each lane. It stays as it is until something that comes back says that the word was seen.
__device__ void put_by_warp(void *to, const void *from, uint32_t bytes, uint64_t *word, uint64_t value, int rank);
// By one thread: the word alone.
__device__ void signal_by_thread(uint64_t *word, uint64_t value, int rank);
// By one thread: until all that this rank has put, to whomever, is there. For ever if that is to a rank that is lost.
__device__ void quiet_by_thread();

}  // namespace deepep::internode
