// host.h - handles, guards and error codes that the host side shares. No kernels here.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "abi/kernels.h"
#include "cuda/layout/team.cuh"

#ifndef DEEPEP_SM90
#define DEEPEP_SM90 1
#endif

// Marks what the shared library exports; -fvisibility=hidden hides everything else.
#define DK_EXPORT extern "C" __attribute__((visibility("default")))

namespace deepep {

struct Team;
struct InternodeTeam;  // launch/internode.h
struct Copies;         // launch/copies.h
struct NormalCopies;   // launch/normal_copies.h
struct Device {
  int ordinal = 0, num_sms = 0, cc_major = 0, cc_minor = 0;
  bool bulk = false;      // use the Hopper kernels
  size_t max_shared = 0;  // dynamic shared memory of a block: 97 KiB of cc 8.6, 8.9 and 12.0, 161 of 8.0, else 225
  bool exports_descriptors = false;
  cudaStream_t service = nullptr;  // for work that belongs to no caller's stream
  cudaDeviceProp properties{};
};

enum class MemoryKind { kVirtual, kRuntime, kImported, kAlias };
struct Memory {
  Device *device = nullptr;
  MemoryKind kind = MemoryKind::kVirtual;
  CUmemGenericAllocationHandle handle = 0;  // of released memory: 0, or its stand-in's
  CUdeviceptr address = 0;
  size_t bytes = 0;
  bool owned = false;  // allocated here
  bool released = false;
};

struct Team {
  Device *device = nullptr;
  TeamView view{};
  int sm_share = 1;
  uint64_t *segments = nullptr;  // device
  void *scratch = nullptr;
  void *peers = nullptr;
  InternodeTeam *internode = nullptr;     // of a team with a transport
  Copies *copies = nullptr;               // of a team with DK_TEAM_LL_COPY
  NormalCopies *normal_copies = nullptr;  // of a team with DK_TEAM_NORMAL_COPY

  // This rank's part of the device's SMs: blocks that wait for each other, or for other ranks' blocks, run together.
  int own_sms() const { return device->num_sms > sm_share ? device->num_sms / sm_share : 1; }
};

// Driver functions, found at run time: the library does not link with libcuda.
struct Driver {
  CUresult (*MemCreate)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
  CUresult (*MemRelease)(CUmemGenericAllocationHandle);
  CUresult (*MemAddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
  CUresult (*MemAddressFree)(CUdeviceptr, size_t);
  CUresult (*MemMap)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
  CUresult (*MemUnmap)(CUdeviceptr, size_t);
  CUresult (*MemSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
  CUresult (*MemGetAllocationGranularity)(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
  CUresult (*MemExportToShareableHandle)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                         unsigned long long);
  CUresult (*MemImportFromShareableHandle)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
  CUresult (*MemRetainAllocationHandle)(CUmemGenericAllocationHandle *, void *);
  CUresult (*GetErrorString)(CUresult, const char **);
};
const Driver *driver();  // null: no usable driver

// Stores a device error in a params struct, clears the runtime's last error, and returns the DK_* code.
template <class P>
int32_t device_failure(P *p, cudaError_t error) {
  p->device_error = static_cast<int32_t>(error);
  (void)cudaGetLastError();
  if (error == cudaErrorMemoryAllocation) return DK_ENOMEM;
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle || error == cudaErrorInvalidDevice)
    return DK_EINVAL;
  if (error == cudaErrorNotSupported) return DK_EUNSUPPORTED;
  return DK_EDEVICE;
}
// Returns the result of the launch before this.
template <class P>
int32_t launched(P *p) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}
template <class P>
int32_t driver_failure(P *p, CUresult result) {
  p->device_error = static_cast<int32_t>(result);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return DK_ENOMEM;
  if (result == CUDA_ERROR_NOT_SUPPORTED) return DK_EUNSUPPORTED;
  if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE) return DK_EINVAL;
  return DK_EDEVICE;
}

// Every function begins with this: the caller's struct is new enough, nothing has failed yet.
#define DK_ENTER(p)                                   \
  do {                                                \
    if ((p) == nullptr) return DK_EINVAL;             \
    if ((p)->size < sizeof(*(p))) return DK_EVERSION; \
    (p)->device_error = 0;                            \
  } while (0)

// Makes a device current, and the caller's again at the end; captures of other threads go on meanwhile.
class OnDevice {
 public:
  // kAnyTime: the guarded code makes only calls that CUDA allows during any capture, such as launches and events.
  enum Calls { kMixed, kAnyTime };
  explicit OnDevice(const Device *device, Calls calls = kMixed) : relaxed_(calls == kMixed) {
    if (relaxed_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device->ordinal) error_ = cudaSetDevice(device->ordinal);
    changed_ = error_ == cudaSuccess && before_ != device->ordinal;
  }
  ~OnDevice() {
    if (changed_) (void)cudaSetDevice(before_);
    if (relaxed_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  OnDevice(const OnDevice &) = delete;
  OnDevice &operator=(const OnDevice &) = delete;
  cudaError_t error() const { return error_; }

 private:
  const bool relaxed_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

template <class T>
T *handle_of(uint64_t value) {
  return reinterpret_cast<T *>(value);
}
inline uint64_t handle_to(const void *p) { return reinterpret_cast<uint64_t>(p); }
inline cudaStream_t stream_of(uint64_t value) { return reinterpret_cast<cudaStream_t>(value); }

// Dynamic shared memory beyond what a kernel gets without opting in.
template <class Kernel>
cudaError_t opt_in(Kernel *kernel, size_t shared) {
  if (shared <= 40 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
}

int32_t cuda_info(dk_info_params *p);  // device.cu; dk_info of this library, and of others that link its objects

// Load every kernel of the library on the current device, so that no first launch has to.
cudaError_t load_normal_kernels(const Device &device);
cudaError_t load_balance_kernels();
cudaError_t load_low_latency_kernels();
cudaError_t load_small_kernels();

// The session of an operation, for its kernels' parameters.
template <class P>
Session session_of(const P *p, uint32_t op, uint32_t phase) {
  return Session{handle_of<Team>(p->team)->view, p->call, p->timeout_ns, op, phase};
}

}  // namespace deepep
