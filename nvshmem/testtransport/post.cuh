// post.cuh - operations that kernels post to the worker by themselves, as they would to a NIC
// (libdeepep_nvshmem_wire.so).
#pragma once
#include "cuda/common/ptx.cuh"
#include "worker.h"

namespace testtransport {

// By one thread; what it names may be read from now on. Waits while the ring is full.
__device__ inline void post(WorkerState *worker, const Post &post) {
  namespace ptx = deepep::ptx;
  const int q = kernel_queue(post.pe);
  const uint64_t ticket = atomicAdd(reinterpret_cast<unsigned long long *>(&worker->tickets[q]), 1ull);
  while (ticket - ptx::ld_relaxed_sys(&worker->taken[q]) >= kRingSlots) {
  }
  Post *slot = worker->rings[q] + ticket % kRingSlots;
  for (int i = 0; i < 3; ++i)
    ptx::st_relaxed_sys_v4(reinterpret_cast<uint4 *>(slot) + i, reinterpret_cast<const uint4 *>(&post)[i]);
  ptx::st_release_sys(&slot->ready, ticket / kRingSlots + 1);
}

__device__ inline void post_put(WorkerState *worker, int pe, void *to, const void *from, uint64_t bytes, uint64_t *word,
                                uint64_t value) {
  Post one{};
  one.target = reinterpret_cast<uint64_t>(to);
  one.source = reinterpret_cast<uint64_t>(from);
  one.bytes = static_cast<uint32_t>(bytes);
  one.word = reinterpret_cast<uint64_t>(word);
  one.value = value;
  one.atomic = static_cast<uint8_t>(Atomic::kSignalSet);
  one.word_bytes = 8;
  one.flags = kSymmetric;
  one.pe = static_cast<uint8_t>(pe);
  post(worker, one);
}

__device__ inline void post_get(WorkerState *worker, int pe, void *to, const void *from, uint64_t bytes) {
  Post one{};
  one.target = reinterpret_cast<uint64_t>(to);
  one.source = reinterpret_cast<uint64_t>(from);
  one.bytes = static_cast<uint32_t>(bytes);
  one.flags = kSymmetric | kReturns;
  one.pe = static_cast<uint8_t>(pe);
  post(worker, one);
}

// Until all that this rank's kernels have posted is complete.
__device__ inline void wait_for_posts(WorkerState *worker) {
  namespace ptx = deepep::ptx;
  for (int pe = 0; 2 * pe < worker->num_queues; ++pe) {
    const uint64_t posted = ptx::ld_relaxed_sys(&worker->tickets[kernel_queue(pe)]);
    while (ptx::ld_acquire_sys(&worker->done[kernel_queue(pe)]) < posted) {
    }
  }
}

}  // namespace testtransport
