// runtime.cpp - the functions of the CUDA runtime that kernels/cuda/launch calls: devices, streams, events, copies.
// Only the functions that the library calls exist here.
#include <atomic>
#include <cstdio>
#include <set>

#include "gpu.h"
#include "launch.h"

namespace emulate {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;

std::mutex lock;
std::map<const void *, size_t> allowed_shared;  // by kernel
std::set<std::shared_ptr<Event> *> events;

// KiB of shared memory of an SM; a block gets 1 less (CUDA C++ Programming Guide, technical specifications).
const std::map<int, int> shared_of_cc = {{80, 164}, {89, 100}, {90, 228}, {100, 228}, {103, 228}, {120, 100}};

Settings read_settings() {
  Settings s;
  const char *text = getenv("DEEPEP_EMULATE");
  const std::map<std::string, int *> names = {
      {"devices", &s.devices}, {"sms", &s.sms}, {"cc", &s.cc}, {"seed", &s.seed}, {"driver", &s.driver}};
  for (std::string rest = text == nullptr ? "" : text; !rest.empty();) {
    const std::string one = rest.substr(0, rest.find(','));
    rest = one.size() == rest.size() ? "" : rest.substr(one.size() + 1);
    const auto found = names.find(one.substr(0, one.find('=')));
    if (found == names.end() || sscanf(one.c_str() + found->first.size(), "=%d", found->second) != 1) {
      fprintf(stderr,
              "DEEPEP_EMULATE: %s is given, allowed are devices=N, sms=N, cc=80 (89, 90, 100, 103, 120), seed=N, "
              "driver=12040\n",
              one.c_str());
      exit(2);
    }
  }
  if (s.devices < 1 || s.sms < 1 || s.sms > 256 || !shared_of_cc.count(s.cc)) {
    fprintf(stderr, "DEEPEP_EMULATE=%s cannot be\n", text);
    exit(2);
  }
  return s;
}

std::shared_ptr<Event> *find_event(cudaEvent_t event) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = events.find(reinterpret_cast<std::shared_ptr<Event> *>(event));
  return found == events.end() ? nullptr : *found;
}
// A kernel is named after the type of its parameters: "... P = {const deepep::BarrierParams&} ..."
std::string name_of(const std::string &signature) {
  const size_t at = signature.find("P = {"), end = signature.find('}', at);
  if (at == std::string::npos || end == std::string::npos) return "a kernel";
  const size_t space = signature.rfind("::", end);
  const std::string type = signature.substr(space == std::string::npos || space < at ? at + 5 : space + 2,
                                            end - std::max(at + 5, space + 2));
  return type.substr(0, type.find_first_of("&*"));
}
size_t max_shared() { return static_cast<size_t>(shared_of_sm()) - 1024; }

}  // namespace

double shared_of_sm() { return shared_of_cc.at(settings().cc) * 1024.0; }
double threads_of_sm() { return shared_of_cc.at(settings().cc) == 100 ? 1536 : 2048; }
const Settings &settings() {
  static const Settings all = read_settings();
  return all;
}
cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
int current_device() { return device_of_thread; }

cudaError_t allow_shared(const void *kernel, cudaFuncAttribute what, int bytes) {
  if (what != cudaFuncAttributeMaxDynamicSharedMemorySize || bytes < 0 || static_cast<size_t>(bytes) > max_shared())
    return failed(cudaErrorInvalidValue);
  const std::lock_guard<std::mutex> guard(lock);
  allowed_shared[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

void launch_blocks(const void *function, const char *signature, int grid, int threads, size_t shared,
                   cudaStream_t stream, std::function<void()> body) {
  size_t allowed = 48 * 1024;
  {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = allowed_shared.find(function);
    if (found != allowed_shared.end()) allowed = std::max(allowed, found->second);
  }
  if (grid < 1 || threads < 1 || threads > 1024 || shared > allowed) {
    (void)failed(cudaErrorInvalidConfiguration);
    return;
  }
  auto kernel = std::make_shared<Kernel>();
  kernel->name = name_of(signature);
  kernel->grid = grid;
  kernel->threads = threads;
  kernel->shared = shared;
  kernel->body = std::move(body);
  (void)failed(Gpu::get().enqueue(stream, {nullptr, kernel, nullptr}));
}

}  // namespace emulate

using namespace emulate;

// ---- Devices and errors ----

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the emulated device";
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = settings().driver;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
  if (settings().driver < CUDART_VERSION) return failed(cudaErrorInsufficientDriver);
  *count = settings().devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return failed(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  if (device < 0 || device >= settings().devices) return failed(cudaErrorInvalidDevice);
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "emulated GPU");
  memcpy(&properties->uuid, "emulated device", 15);
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->totalGlobalMem = 8ull << 30;
  properties->multiProcessorCount = settings().sms;
  properties->major = settings().cc / 10;
  properties->minor = settings().cc % 10;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin) return failed(cudaErrorInvalidValue);
  *value = static_cast<int>(max_shared());
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Gpu::get().synchronize_device(current_device());
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }

// ---- Streams and events ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = Gpu::get().create_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return failed(Gpu::get().close_stream(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return failed(Gpu::get().query(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return failed(Gpu::get().synchronize(stream)); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto *found = find_event(event);
  return failed(found == nullptr ? cudaErrorInvalidResourceHandle : Gpu::get().wait_for(*found, stream));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  auto *one = new std::shared_ptr<Event>(new Event);
  const std::lock_guard<std::mutex> guard(lock);
  events.insert(one);
  *event = reinterpret_cast<cudaEvent_t>(one);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  auto *found = find_event(event);
  if (found == nullptr) return failed(cudaErrorInvalidResourceHandle);
  const std::lock_guard<std::mutex> guard(lock);
  events.erase(found);
  delete found;  // streams that wait for it hold a reference
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto *found = find_event(event);
  return failed(found == nullptr ? cudaErrorInvalidResourceHandle : Gpu::get().record(*found, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto *found = find_event(event);
  return failed(found == nullptr ? cudaErrorInvalidResourceHandle : Gpu::get().query(*found));
}

// ---- Copies ----

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return failed(Gpu::get().enqueue(stream, {[=] { memcpy(to, from, bytes); }, nullptr, nullptr}));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return failed(cudaErrorInvalidPitchValue);
  const auto copy = [=] {
    for (size_t row = 0; row < height; ++row)
      memcpy(static_cast<uint8_t *>(to) + row * to_pitch, static_cast<const uint8_t *>(from) + row * from_pitch, width);
  };
  return failed(Gpu::get().enqueue(stream, {copy, nullptr, nullptr}));
}
