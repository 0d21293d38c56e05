// put.cuh - libdeepep_nvshmem.so: puts of low latency and masks. transport.cu defines them, since NVSHMEM's device
// headers take long to compile. No operation relies on the order of another, so any queue pair will do: NVSHMEM chooses
// by block, or takes them in turn.
#pragma once
#include <cstdint>

namespace deepep::internode {

// By a whole warp: puts bytes of this rank's block to the same offset of a rank's block, then sets the word there. Each
// lane has written its part of the source before. The source must not change until the rank has answered.
__device__ void put_by_warp(void *to, const void *from, uint32_t bytes, uint64_t *word, uint64_t value, int rank);
// By one thread: sets the word alone.
__device__ void signal_by_thread(uint64_t *word, uint64_t value, int rank);
// By one thread: reads words of a rank's block, which lie there at the offset of `from`, into this rank's. Does not
// wait.
__device__ void get_by_thread(uint64_t *to, const uint64_t *from, int words, int rank);
// By one thread: waits until all puts of this rank are complete; never returns if one of them goes to a lost rank.
__device__ void quiet_by_thread();

}  // namespace deepep::internode
