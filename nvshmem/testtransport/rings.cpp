// rings.cpp - The worker ends when it has been idle for a while, so that a host which waits for the whole device goes
// on, and is launched again at once, by the thread in which NVSHMEM serves its transports.
#include "rings.h"

#include <cstring>

#include "log.h"

namespace testtransport {
namespace {

constexpr uint64_t kIdleNs = 2000000, kEarlyNs = 3000;

int verdict(cudaError_t error) { return error == cudaSuccess ? 0 : complain("CUDA: %s", cudaGetErrorString(error)); }

uint64_t load(const uint64_t &word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

}  // namespace

int Rings::start(int num_pes, const NicTiming &timing) {
  if (num_pes > kMaxPes) return complain("a NIC is played for at most %d PEs, not %d", kMaxPes, num_pes);
  const size_t ring = kRingSlots * sizeof(Post), bytes = static_cast<size_t>(num_pes) * ring;
  posted_.assign(static_cast<size_t>(num_pes), 0);
  cudaError_t error = load_worker();
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess)
    error = cudaHostAlloc(reinterpret_cast<void **>(&control_), sizeof *control_, cudaHostAllocMapped);
  if (error == cudaSuccess) error = cudaHostAlloc(reinterpret_cast<void **>(&slots_), bytes, cudaHostAllocMapped);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&state_), sizeof *state_);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&kernel_slots_), bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(kernel_slots_, 0, bytes, stream_);
  if (error != cudaSuccess) return verdict(error);
  memset(control_, 0, sizeof *control_);
  memset(static_cast<void *>(slots_), 0, bytes);
  error = measure_tick(&control_->tick_ns, stream_);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  if (error != cudaSuccess) return verdict(error);
  WorkerState state{};
  state.timing = timing;
  // A time that was read may be a tick old: nothing takes effect before its latency has passed all the same.
  if (timing.latency != 0) state.timing.latency += control_->tick_ns * 1000;
  state.num_queues = 2 * num_pes;
  for (int pe = 0; pe < num_pes; ++pe) {
    state.rings[host_queue(pe)] = slots_ + static_cast<size_t>(pe) * kRingSlots;  // one address for host and GPU
    state.rings[kernel_queue(pe)] = kernel_slots_ + static_cast<size_t>(pe) * kRingSlots;
  }
  error = cudaMemcpyAsync(state_, &state, sizeof state, cudaMemcpyHostToDevice, stream_);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  return error == cudaSuccess ? keep_running() : verdict(error);
}

Rings::~Rings() {
  if (control_ != nullptr) (void)pause();
  (void)cudaFree(kernel_slots_);
  (void)cudaFree(state_);
  (void)cudaFreeHost(slots_);
  (void)cudaFreeHost(control_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

int Rings::pause() {
  store(&control_->stop, 1);
  const cudaError_t error = cudaStreamSynchronize(stream_);
  store(&control_->stop, 0);
  store(&control_->running, 0);
  return verdict(error);
}

int Rings::keep_running() {
  if (load(control_->running) != 0) return 0;
  if (load(control_->outside) != 0) return complain("an operation on an address that the heap has not");
  store(&control_->running, ++launches_);
  return verdict(launch_worker({state_, control_, launches_, kIdleNs, kEarlyNs}, stream_));
}

int Rings::check() const {
  const cudaError_t error = cudaStreamQuery(stream_);
  return error == cudaErrorNotReady ? 0 : verdict(error);
}

int Rings::post(int pe, Post post) {
  uint64_t &posted = posted_[static_cast<size_t>(pe)];
  while (posted - load(control_->taken[host_queue(pe)]) >= kRingSlots)
    if (const int failed = keep_running()) return failed;
  Post *slot = slots_ + static_cast<size_t>(pe) * kRingSlots + posted % kRingSlots;
  post.pe = static_cast<uint8_t>(pe);
  memcpy(static_cast<void *>(slot), &post, offsetof(Post, ready));
  store(&slot->ready, posted / kRingSlots + 1);
  ++posted;
  return 0;
}

bool Rings::is_done(int pe) const { return load(control_->done[host_queue(pe)]) == posted_[static_cast<size_t>(pe)]; }

int Rings::add_area(const Area &area) {
  size_t at = 0;
  while (at < areas_.size() && areas_[at] != area.begin) ++at;  // a part that is registered again takes the place
  if (at == kMaxAreas) return complain("the heap has more than %d parts", kMaxAreas);
  if (at == areas_.size()) areas_.push_back(area.begin);
  if (const int failed = pause()) return failed;
  const int count = static_cast<int>(areas_.size());
  cudaError_t error = cudaMemcpyAsync(&state_->areas[at], &area, sizeof area, cudaMemcpyHostToDevice, stream_);
  if (error == cudaSuccess)
    error = cudaMemcpyAsync(&state_->num_areas, &count, sizeof count, cudaMemcpyHostToDevice, stream_);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  return error == cudaSuccess ? keep_running() : verdict(error);
}

int Rings::read(testtransport_nic *out) const {
  const WorkerControl &c = *control_;
  *out = {launches_, load(c.chunks), load(c.arrivals), load(c.late_ns), load(c.latest_ns), c.tick_ns};
  return 0;
}

void Rings::lose(int pe) { store(&control_->lost, load(control_->lost) | uint64_t{1} << pe); }

}  // namespace testtransport
