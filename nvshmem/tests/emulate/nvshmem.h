/* nvshmem.h - NVSHMEM's device functions on the host, over the network of tests. */
#pragma once
#include "network.h"

#define NVSHMEM_VENDOR_VERSION 30405
#define NVSHMEM_SIGNAL_SET 9
#define NVSHMEM_SIGNAL_ADD 10

// The kernels under test do not call these.
inline void nvshmem_fence() { abort(); }
inline void nvshmem_quiet() { abort(); }
inline void nvshmemx_putmem_nbi_block(void *, const void *, size_t, int) { abort(); }
inline void nvshmemx_putmem_signal_nbi_block(void *, const void *, size_t, uint64_t *, uint64_t, int, int) { abort(); }

inline void nvshmemx_signal_op(uint64_t *word, uint64_t value, int, int pe) {
  emulate::put(nullptr, nullptr, 0, word, value, pe);
}
inline void nvshmemx_putmem_signal_nbi_warp(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value,
                                            int, int pe) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) emulate::put(to, from, bytes, word, value, pe);
  __syncwarp();
}
