// gpu.cpp - streams in order, kernels of different streams concurrently, their blocks in turn.
#include "gpu.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

// What kernels declare extern __shared__.
namespace deep_ep::intranode {
alignas(128) thread_local uint8_t shared[232448];
}
namespace deep_ep::internode_ll {
alignas(128) thread_local uint8_t memory[48 * 1024];
}
namespace deepep {
alignas(128) thread_local uint32_t counts[24 * 1024];
}

namespace emulate {
namespace {

// A query of a stream or an event blocks so long if it is not done: callers poll.
constexpr std::chrono::microseconds kLook{1000};
constexpr int64_t kClockOffset = 77777777777777;  // the device's clock is not the host's

}  // namespace

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec * 1000000000 + t.tv_nsec + kClockOffset);
}

Gpu &Gpu::get() {
  static Gpu *gpu = new Gpu;  // never deleted: its thread may still run when the process exits
  return *gpu;
}

Gpu::Gpu() : free_sms_(static_cast<size_t>(settings().devices), settings().sms) {
  std::thread([this] { serve(); }).detach();
}

// ---- The host's side ----

Stream *Gpu::find(cudaStream_t stream) {
  if (stream == nullptr) {
    Stream *&own = default_streams_[current_device()];
    if (own == nullptr) {
      own = new Stream{current_device()};
      streams_[own].reset(own);
    }
    return own;
  }
  const auto found = streams_.find(reinterpret_cast<Stream *>(stream));
  return found == streams_.end() || found->second->closed ? nullptr : found->second.get();
}

cudaStream_t Gpu::create_stream() {
  const std::lock_guard<std::mutex> lock(lock_);
  auto *stream = new Stream{current_device()};
  streams_[stream].reset(stream);
  return reinterpret_cast<cudaStream_t>(stream);
}

cudaError_t Gpu::close_stream(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(lock_);
  Stream *own = stream == nullptr ? nullptr : find(stream);
  if (own == nullptr) return cudaErrorInvalidResourceHandle;
  own->closed = true;  // goes with the last of its work
  work_.notify_one();
  return cudaSuccess;
}

cudaError_t Gpu::enqueue(cudaStream_t stream, Operation operation) {
  const std::lock_guard<std::mutex> lock(lock_);
  Stream *own = find(stream);
  if (own == nullptr) return cudaErrorInvalidResourceHandle;
  if (operation.kernel != nullptr) {
    Kernel &kernel = *operation.kernel;
    kernel.device = own->device;
    kernel.sms = std::max(kernel.threads / threads_of_sm(), static_cast<double>(kernel.shared) / shared_of_sm());
  }
  own->queue.push_back(std::move(operation));
  work_.notify_one();
  return cudaSuccess;
}

cudaError_t Gpu::record(const std::shared_ptr<Event> &event, cudaStream_t stream) {
  std::unique_lock<std::mutex> lock(lock_);
  if (find(stream) == nullptr) return cudaErrorInvalidResourceHandle;
  const uint64_t number = ++event->issued;
  lock.unlock();
  return enqueue(stream, {[event, number] { event->reached = std::max(event->reached, number); }, nullptr, nullptr});
}

cudaError_t Gpu::wait_for(const std::shared_ptr<Event> &event, cudaStream_t stream) {
  std::unique_lock<std::mutex> lock(lock_);
  const uint64_t until = event->issued;
  lock.unlock();
  return enqueue(stream, {nullptr, nullptr, event, until});
}

cudaError_t Gpu::query(const std::shared_ptr<Event> &event) {
  std::unique_lock<std::mutex> lock(lock_);
  return progress_.wait_for(lock, kLook, [&] { return event->reached == event->issued; }) ? cudaSuccess
                                                                                          : cudaErrorNotReady;
}

cudaError_t Gpu::query(cudaStream_t stream) {
  std::unique_lock<std::mutex> lock(lock_);
  const Stream *own = find(stream);
  if (own == nullptr) return cudaErrorInvalidResourceHandle;
  return progress_.wait_for(lock, kLook, [&] { return own->queue.empty(); }) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t Gpu::synchronize(cudaStream_t stream) {
  std::unique_lock<std::mutex> lock(lock_);
  const Stream *own = find(stream);
  if (own == nullptr) return cudaErrorInvalidResourceHandle;
  progress_.wait(lock, [&] { return own->queue.empty(); });
  return cudaSuccess;
}

void Gpu::synchronize_device(int device) {
  std::unique_lock<std::mutex> lock(lock_);
  progress_.wait(lock, [&] {
    return std::all_of(streams_.begin(), streams_.end(),
                       [&](const auto &one) { return one.second->device != device || one.second->queue.empty(); });
  });
}

// ---- The device's side ----

// Completes the stream's first operation if it can be; starts a kernel. True: something ended. The lock is held.
bool Gpu::advance(Stream *stream) {
  bool moved = false;
  for (; !stream->queue.empty(); stream->queue.pop_front(), moved = true) {
    Operation &first = stream->queue.front();
    if (first.call) first.call();
    if (first.event != nullptr && first.event->reached < first.until) break;
    if (first.kernel == nullptr || first.kernel->done) continue;
    if (std::find(running_.begin(), running_.end(), first.kernel) == running_.end()) running_.push_back(first.kernel);
    break;
  }
  return moved;
}

// Starts as many blocks as the device has room for.
void Gpu::begin_blocks(Kernel *kernel) {
  double &room = free_sms_[static_cast<size_t>(kernel->device)];
  for (; kernel->begun < kernel->grid && room >= kernel->sms; ++kernel->begun, room -= kernel->sms) {
    auto one = std::make_unique<Block>(static_cast<unsigned>(kernel->threads), kernel->shared, kernel->body);
    one->index.x = static_cast<unsigned>(kernel->begun);
    one->grid.x = static_cast<unsigned>(kernel->grid);
    one->name = kernel->name.c_str();
    kernel->blocks.push_back(std::move(one));
  }
}

void Gpu::run_blocks(Kernel *kernel) {
  for (auto at = kernel->blocks.begin(); at != kernel->blocks.end();) {
    const bool held_up = settings().seed != 0 && random_bits() % 4 == 0;
    if (held_up || run_turn(at->get())) {
      ++at;
      continue;
    }
    at = kernel->blocks.erase(at);
    free_sms_[static_cast<size_t>(kernel->device)] += kernel->sms;
  }
}

void Gpu::serve() {
  using deep_ep::internode_ll::memory, deep_ep::intranode::shared;
  set_dynamic_shared({{shared, sizeof shared}, {memory, sizeof memory}, {deepep::counts, sizeof deepep::counts}});
  set_seed(static_cast<uint64_t>(settings().seed));
  std::unique_lock<std::mutex> lock(lock_);
  for (;;) {
    bool moved = false;
    for (auto at = streams_.begin(); at != streams_.end();) {
      moved |= advance(at->second.get());
      at = at->second->closed && at->second->queue.empty() ? streams_.erase(at) : std::next(at);
    }
    if (moved) {
      progress_.notify_all();
      continue;  // another stream may have waited for an event
    }
    if (running_.empty()) {
      work_.wait(lock);
      continue;
    }
    lock.unlock();
    for (const auto &kernel : running_) {
      begin_blocks(kernel.get());
      run_blocks(kernel.get());
    }
    std::this_thread::yield();
    lock.lock();
    running_.remove_if(
        [](const auto &kernel) { return kernel->done = kernel->begun == kernel->grid && kernel->blocks.empty(); });
  }
}

}  // namespace emulate
