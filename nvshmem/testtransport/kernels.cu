// kernels.cu - executes atomics, and puts of a value, by one thread of the GPU.
#include "wire.h"

namespace testtransport {
namespace {

struct AtomicParams {
  void *target;
  Atomic what;
  int bytes;
  unsigned long long value, compare, flag;
  volatile unsigned long long *result;
};

template <class T>
__device__ T apply(T *word, Atomic what, T value, T compare) {
  switch (what) {
    case Atomic::kIncrement:
    case Atomic::kFetchIncrement: return atomicAdd_system(word, T(1));
    case Atomic::kAdd:
    case Atomic::kSignalAdd:
    case Atomic::kFetchAdd: return atomicAdd_system(word, value);
    case Atomic::kAnd:
    case Atomic::kFetchAnd: return atomicAnd_system(word, value);
    case Atomic::kOr:
    case Atomic::kFetchOr: return atomicOr_system(word, value);
    case Atomic::kXor:
    case Atomic::kFetchXor: return atomicXor_system(word, value);
    case Atomic::kFetch: return atomicAdd_system(word, T(0));
    case Atomic::kCompareSwap: return atomicCAS_system(word, compare, value);
    default: return atomicExch_system(word, value);  // set, signal, swap
  }
}

__global__ void atomic_kernel(const __grid_constant__ AtomicParams p) {
  __threadfence_system();  // after what precedes it on the stream
  unsigned long long old = 0;
  if (p.bytes == 8)
    old = apply(static_cast<unsigned long long *>(p.target), p.what, p.value, p.compare);
  else if (p.bytes == 4)
    old = apply(static_cast<unsigned *>(p.target), p.what, static_cast<unsigned>(p.value),
                static_cast<unsigned>(p.compare));
  else if (p.bytes == 2)
    *static_cast<volatile unsigned short *>(p.target) = static_cast<unsigned short>(p.value);
  else
    *static_cast<volatile unsigned char *>(p.target) = static_cast<unsigned char>(p.value);
  __threadfence_system();
  if (p.result == nullptr) return;
  p.result[0] = old;
  __threadfence_system();
  p.result[1] = p.flag;
  __threadfence_system();
}

}  // namespace

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
