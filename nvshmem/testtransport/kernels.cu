// kernels.cu - executes atomics, and puts of a value, by one thread of the GPU; launches the worker.
#include "wire.h"
#include "worker.cuh"

namespace testtransport {
namespace {

struct AtomicParams {
  void *target;
  Atomic what;
  int bytes;
  unsigned long long value, compare, flag;
  volatile unsigned long long *result;
};

__global__ void atomic_kernel(const __grid_constant__ AtomicParams p) {
  __threadfence_system();  // after what precedes it on the stream
  const unsigned long long old = apply_word(p.target, p.what, p.bytes, p.value, p.compare);
  __threadfence_system();
  if (p.result == nullptr) return;
  p.result[0] = old;
  __threadfence_system();
  p.result[1] = p.flag;
  __threadfence_system();
}

__global__ void __launch_bounds__(kWorkerThreads, 1) worker_kernel(const __grid_constant__ WorkerParams p) {
  __shared__ WorkerShared shared;
  work(p, shared);
}

// The least step of the clock that is seen in a while.
__global__ void tick_kernel(uint64_t *ns) {
  uint64_t least = ~uint64_t{0}, last = ptx::global_timer_ns();
  for (int changes = 0; changes < 32;) {
    const uint64_t now = ptx::global_timer_ns();
    if (now == last) continue;
    if (++changes > 1 && now - last < least) least = now - last;
    last = now;
  }
  *ns = least;
}

}  // namespace

cudaError_t load_worker() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, worker_kernel);
}

cudaError_t measure_tick(uint64_t *ns, cudaStream_t stream) {
  tick_kernel<<<1, 1, 0, stream>>>(ns);
  return cudaGetLastError();
}

cudaError_t launch_worker(const WorkerParams &params, cudaStream_t stream) {
  worker_kernel<<<kWorkerBlocks, kWorkerThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t load_wire_kernels() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, atomic_kernel);
}

cudaError_t enqueue_atomic(const Work &work, cudaStream_t stream) {
  const AtomicParams p{work.target,
                       work.atomic,
                       static_cast<int>(work.bytes),
                       work.value,
                       work.compare,
                       work.result_flag,
                       static_cast<volatile unsigned long long *>(work.result)};
  atomic_kernel<<<1, 1, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace testtransport
