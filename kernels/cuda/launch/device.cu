// device.cu - the library, devices, streams, events, copies.
#include <time.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "cuda/common/types.cuh"
#include "cuda/launch/internode.h"
#include "cuda/layout/low_latency.cuh"
#include "cuda_build_id.h"

namespace deepep {
namespace {

// Of the toolkit's major version (CUDA Toolkit release notes); the doctor has the same numbers.
constexpr const char *kOldestDriver = CUDART_VERSION >= 13000   ? "580"
                                      : CUDART_VERSION >= 12000 ? "525.60.13"
                                                                : "450.80.02";

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}
void sleep_ns(long ns) {
  const timespec t{0, ns};
  nanosleep(&t, nullptr);
}

cudaError_t open_device(Device *device, int ordinal, uint32_t isa) {
  device->ordinal = ordinal;
  const OnDevice on(device);
  if (on.error() != cudaSuccess) return on.error();
  cudaError_t error = cudaFree(nullptr);  // makes the context
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&device->properties, ordinal);
  if (error != cudaSuccess) return error;
  device->num_sms = device->properties.multiProcessorCount;  // of the MIG slice or partition that this process sees
  device->cc_major = device->properties.major;
  device->cc_minor = device->properties.minor;
  device->bulk = DEEPEP_SM90 && isa != 80 && device->cc_major >= 9;
  device->exports_descriptors = driver() != nullptr;
  int max_shared = 0;
  error = cudaDeviceGetAttribute(&max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  if (error != cudaSuccess) return error;
  device->max_shared = static_cast<size_t>(max_shared) - 2048;  // static shared memory comes on top
  error = cudaStreamCreateWithFlags(&device->service, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = load_normal_kernels(*device);
  if (error == cudaSuccess) error = load_balance_kernels();
  if (error == cudaSuccess) error = load_small_kernels();
  if (error == cudaSuccess) error = load_low_latency_kernels();
  if (error == cudaSuccess) error = load_internode_kernels();
  return error;
}

}  // namespace

int32_t cuda_info(dk_info_params *p) {
  DK_ENTER(p);
  p->abi_version = DK_ABI_VERSION;
  p->caps = DK_CAP_GRAPH | DK_CAP_PEER_ROWS | DK_CAP_LL_COPY | DK_CAP_NORMAL_COPY | DK_CAP_ROUTED_SHRINK |
            DK_CAP_AT_ONCE | (DEEPEP_SM90 ? DK_CAP_SM90 | DK_CAP_FP8_HARDWARE : 0);
  p->num_devices = 0;
  p->reserved0 = 0;
  snprintf(p->kind, sizeof p->kind, "cuda");
  snprintf(p->build, sizeof p->build, "cuda-%s", DK_BUILD_ID);
  p->reason[0] = 0;
  p->max_ll_topk = kMaxTopk;
  p->max_ll_tokens = kMaxLowLatencyTokens;
  p->max_ll_local_experts = kMaxLocalExperts;
  p->reserved1 = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    p->device_error = static_cast<int32_t>(error);
    (void)cudaGetLastError();
    int driver = 0;  // the newest CUDA that it supports; 0: there is none
    if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0) {
      snprintf(p->reason, sizeof p->reason,
               "no CUDA device can be used: the driver supports CUDA %d.%d, this library is built with CUDA %d.%d and "
               "needs driver %s or later (error %d)",
               driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, kOldestDriver,
               static_cast<int>(error));
      return DK_OK;
    }
    snprintf(p->reason, sizeof p->reason, "no CUDA device can be used: %s (error %d)", cudaGetErrorString(error),
             static_cast<int>(error));
    return DK_OK;
  }
  p->num_devices = count;
  if (count == 0) snprintf(p->reason, sizeof p->reason, "no CUDA device is visible");
  return DK_OK;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_device_open(dk_device_open_params *p) {
  DK_ENTER(p);
  p->device = 0;
  if (p->ordinal < -1 || (p->isa != 0 && p->isa != 80 && p->isa != 90)) return DK_EINVAL;
  int ordinal = p->ordinal;
  if (ordinal < 0) {
    const cudaError_t error = cudaGetDevice(&ordinal);
    if (error != cudaSuccess) return device_failure(p, error);
  }
  auto *device = new (std::nothrow) Device;
  if (device == nullptr) return DK_ENOMEM;
  cudaError_t error = open_device(device, ordinal, p->isa);
  size_t free_bytes = 0, total_bytes = 0;
  if (error == cudaSuccess) {
    const OnDevice on(device);
    error = cudaMemGetInfo(&free_bytes, &total_bytes);
  }
  if (error != cudaSuccess || (p->isa == 90 && !device->bulk)) {
    delete device;
    return error != cudaSuccess ? device_failure(p, error) : static_cast<int32_t>(DK_EUNSUPPORTED);
  }
  p->device = handle_to(device);
  p->out_ordinal = ordinal;
  p->num_sms = device->num_sms;
  p->cc_major = device->cc_major;
  p->cc_minor = device->cc_minor;
  p->total_bytes = total_bytes;
  p->free_bytes = free_bytes;
  memcpy(p->uuid, &device->properties.uuid, sizeof p->uuid);
  snprintf(p->name, sizeof p->name, "%.63s", device->properties.name);
  snprintf(p->isa_name, sizeof p->isa_name, device->bulk ? "sm_90" : "sm_80");
  return DK_OK;
}

DK_EXPORT int32_t dk_device_close(dk_device_close_params *p) {
  DK_ENTER(p);
  auto *device = handle_of<Device>(p->device);
  if (device == nullptr) return DK_EINVAL;
  {
    const OnDevice on(device);
    (void)cudaStreamDestroy(device->service);
    (void)cudaGetLastError();
  }
  delete device;
  return DK_OK;
}

DK_EXPORT int32_t dk_stream_create(dk_stream_create_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device));
  int least_priority = 0, greatest_priority = 0;
  cudaStream_t stream = nullptr;
  cudaError_t error = on.error();
  if (error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(&least_priority, &greatest_priority);
  if (error == cudaSuccess)
    error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                         p->high_priority ? greatest_priority : least_priority);
  if (error != cudaSuccess) return device_failure(p, error);
  p->stream = handle_to(stream);
  return DK_OK;
}

DK_EXPORT int32_t dk_stream_destroy(dk_stream_destroy_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device));
  const cudaError_t error = cudaStreamDestroy(stream_of(p->stream));
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_stream_query(dk_stream_query_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device), p->idle == -1 ? OnDevice::kAnyTime : OnDevice::kMixed);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream_of(p->stream), &status);
  if (error != cudaSuccess) return device_failure(p, error);
  p->capturing = status != cudaStreamCaptureStatusNone;
  if (p->idle == -1) return DK_OK;  // saves a CUDA call
  p->idle = 0;
  if (p->capturing) return DK_OK;
  error = cudaStreamQuery(stream_of(p->stream));
  if (error != cudaSuccess && error != cudaErrorNotReady) return device_failure(p, error);
  (void)cudaGetLastError();
  p->idle = error == cudaSuccess;
  return DK_OK;
}

DK_EXPORT int32_t dk_event_create(dk_event_create_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device));
  cudaEvent_t event = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return device_failure(p, error);
  p->event = handle_to(event);
  return DK_OK;
}

DK_EXPORT int32_t dk_event_destroy(dk_event_destroy_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device));
  const cudaError_t error = cudaEventDestroy(reinterpret_cast<cudaEvent_t>(p->event));
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_event_record(dk_event_record_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device), OnDevice::kAnyTime);
  const cudaError_t error = cudaEventRecord(reinterpret_cast<cudaEvent_t>(p->event), stream_of(p->stream));
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_stream_wait_event(dk_stream_wait_event_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device), OnDevice::kAnyTime);
  const cudaError_t error = cudaStreamWaitEvent(stream_of(p->stream), reinterpret_cast<cudaEvent_t>(p->event), 0);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_event_wait(dk_event_wait_params *p) {
  DK_ENTER(p);
  auto *device = handle_of<Device>(p->device);
  const OnDevice on(device);
  const uint64_t end = now_ns() + p->timeout_ns;
  for (uint32_t looks = 0;; ++looks) {
    const cudaError_t error = cudaEventQuery(reinterpret_cast<cudaEvent_t>(p->event));
    if (error == cudaSuccess) return DK_OK;
    if (error != cudaErrorNotReady) return device_failure(p, error);
    (void)cudaGetLastError();
    if (p->timeout_ns == 0 || now_ns() >= end) return DK_ETIMEOUT;
    if (looks > 200) sleep_ns(looks > 2000 ? 100000 : 10000);
  }
}

DK_EXPORT int32_t dk_copy(dk_copy_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device));
  const cudaError_t error =
      cudaMemcpyAsync(pointer<void>(p->dst), pointer<void>(p->src), p->bytes, cudaMemcpyDefault, stream_of(p->stream));
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_fill(dk_fill_params *p) {
  DK_ENTER(p);
  const OnDevice on(handle_of<Device>(p->device));
  const cudaError_t error =
      cudaMemsetAsync(pointer<void>(p->dst), static_cast<int>(p->value & 0xff), p->bytes, stream_of(p->stream));
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_host_wait(dk_host_wait_params *p) {
  DK_ENTER(p);
  const auto *word = pointer<const uint64_t>(p->host_word);
  const auto *status = pointer<const dk_status>(p->host_status);
  if (word == nullptr) return DK_EINVAL;
  const uint64_t end = now_ns() + p->timeout_ns;
  for (uint32_t looks = 0;; ++looks) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) >= p->at_least) return DK_OK;
    if (status != nullptr && (__atomic_load_n(&status->sticky, __ATOMIC_ACQUIRE) != 0 ||
                              __atomic_load_n(&status->abort_word, __ATOMIC_ACQUIRE) != 0))
      return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= p->at_least ? DK_OK : DK_EABORTED;
    if (looks % 64 == 63 && now_ns() >= end) return DK_ETIMEOUT;
    if (looks < 20000)
      relax();
    else
      sleep_ns(20000);
  }
}
