// queue.cuh - operations of a thread block on one queue pair toward one PE.
// NVSHMEM 3.5.19 and later has handles of queue pairs, and fence and quiet for one of them. Earlier releases choose the
// queue pair by the block's index (NVSHMEM_IBGDA_RC_MAP_BY=cta), and fence and quiet apply to all queue pairs.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

#define DEEPEP_QUEUE_HANDLES (NVSHMEM_VENDOR_VERSION >= 30519)

namespace deepep {

#if DEEPEP_QUEUE_HANDLES
struct Queue {
  nvshmemx_qp_handle_t handle;
  int block;
};

__device__ inline void fence(Queue queue, int pe) { nvshmemx_qp_fence_block(pe, &queue.handle, 1); }
__device__ inline void quiet(Queue queue, int pe) { nvshmemx_qp_quiet_block(pe, &queue.handle, 1); }
__device__ inline void put(Queue queue, int pe, void *to, const void *from, size_t bytes) {
  nvshmemx_qp_uchar_put_nbi_block(static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from), bytes, pe,
                                  queue.handle);
}
__device__ inline void put_signal(Queue queue, int pe, void *to, const void *from, size_t bytes, uint64_t *word,
                                  uint64_t value, int how) {
  nvshmemx_qp_uchar_put_signal_nbi_block(static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from),
                                         bytes, word, value, how, pe, queue.handle);
}
__device__ inline void signal(Queue queue, int pe, uint64_t *word, uint64_t value, int how) {
  if (threadIdx.x != 0) return;
  if (how == NVSHMEM_SIGNAL_ADD)
    nvshmemx_qp_signal_op(word, value, how, pe, queue.handle);
  else
    nvshmemx_qp_uint64_p(word, value, pe,
                         queue.handle);  // by handle there is no atomic set; an aligned word is written whole
}
#else
struct Queue {
  int block;
};

__device__ inline void fence(Queue, int) {
  if (threadIdx.x == 0) nvshmem_fence();
  __syncthreads();
}
__device__ inline void quiet(Queue, int) {
  if (threadIdx.x == 0) nvshmem_quiet();
  __syncthreads();
}
__device__ inline void put(Queue, int pe, void *to, const void *from, size_t bytes) {
  nvshmemx_putmem_nbi_block(to, from, bytes, pe);
}
__device__ inline void put_signal(Queue, int pe, void *to, const void *from, size_t bytes, uint64_t *word,
                                  uint64_t value, int how) {
  nvshmemx_putmem_signal_nbi_block(to, from, bytes, word, value, how, pe);
}
__device__ inline void signal(Queue, int pe, uint64_t *word, uint64_t value, int how) {
  if (threadIdx.x == 0) nvshmemx_signal_op(word, value, how, pe);
}
#endif

}  // namespace deepep
