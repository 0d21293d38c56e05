// modes.h - the modes of bench_ops.
#pragma once
#include "routing.h"

void check_normal(Rank &rank);
void check_low_latency(Rank &rank);
void time_normal(Rank &rank, const std::vector<int> &sms);
void time_routed(Rank &rank, const std::vector<int> &sms);
void sweep_normal(Rank &rank);
void time_low_latency(Rank &rank);
void sweep_low_latency(Rank &rank);
void timeline_low_latency(Rank &rank);
void time_host(Rank &rank);
void time_nodes(Rank &rank, const std::vector<int> &sms);
void time_nic(Rank &rank, const std::vector<int> &sms);
void time_overlap(Rank &rank);

template <class T>
T *device_array(size_t count) {
  void *p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T)));
  CHECK_CUDA(cudaMemset(p, 0xee, std::max<size_t>(count, 1) * sizeof(T)));
  CHECK_CUDA(cudaDeviceSynchronize());
  return static_cast<T *>(p);
}
template <class T>
T *to_device(const std::vector<T> &host) {
  T *p = device_array<T>(host.size());
  if (!host.empty()) CHECK_CUDA(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T>
std::vector<T> to_host(const T *p, size_t count) {
  std::vector<T> host(count);
  if (count != 0) CHECK_CUDA(cudaMemcpy(host.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}
template <class T>
uint64_t as_address(T *p) {
  return reinterpret_cast<uint64_t>(p);
}

// Time that an operation has spent in its kernels so far. The next kernel, a barrier, writes the newest call's count to
// the page.
struct OwnTime {
  uint64_t calls, ns;
};
inline OwnTime own_time(Rank &rank, int op) {
  rank.barrier();
  rank.sync();
  return {rank.stats->ops[op].calls, rank.stats->ops[op].total_ns};
}
inline double mean_us(const OwnTime &before, const OwnTime &after) {
  return after.calls == before.calls ? 0 : (after.ns - before.ns) / 1e3 / (after.calls - before.calls);
}

// Times what is enqueued between two events.
class EventPair {
 public:
  explicit EventPair(Rank &rank) : rank_(rank), stream_(reinterpret_cast<cudaStream_t>(rank.stream)) {
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  ~EventPair() {
    CHECK_CUDA(cudaEventDestroy(begin_));
    CHECK_CUDA(cudaEventDestroy(end_));
  }
  EventPair(const EventPair &) = delete;
  EventPair &operator=(const EventPair &) = delete;

  // In microseconds: `call`, which follows `before` and a barrier of all ranks; `after` is enqueued behind it.
  template <class B, class F, class A>
  double time(B before, F call, A after) {
    before();
    rank_.barrier();
    CHECK_CUDA(cudaEventRecord(begin_, stream_));
    call();
    CHECK_CUDA(cudaEventRecord(end_, stream_));
    after();
    rank_.sync();
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1000;
  }
  template <class F>
  double time(F call) {
    return time([] {}, call, [] {});
  }

 private:
  Rank &rank_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

struct Timing {
  double median, p99;
};
inline Timing median_and_p99(std::vector<double> all) {
  if (all.empty()) return {NAN, NAN};
  std::sort(all.begin(), all.end());
  return {all[all.size() / 2], all[all.size() * 99 / 100]};
}
// Times what `call` enqueues: median and 99th percentile of the maximum over ranks, in microseconds.
template <class F>
Timing measure(Rank &rank, int iterations, bool cold, F call) {
  cudaStream_t stream = reinterpret_cast<cudaStream_t>(rank.stream);
  EventPair events(rank);
  static thread_local uint8_t *flush = nullptr;
  constexpr size_t kFlush = 192u << 20;
  if (cold && flush == nullptr) flush = device_array<uint8_t>(kFlush);
  rank.meet();
  std::vector<double> all;
  for (int i = 0; i < iterations + 3; ++i) {
    if (cold) CHECK_CUDA(cudaMemsetAsync(flush, i, kFlush, stream));
    rank.world->shared->samples[rank.rank] = events.time(call);
    rank.meet();
    const double slowest = rank.world->slowest();
    if (i >= 3) all.push_back(slowest);
    rank.meet();
  }
  return median_and_p99(std::move(all));
}
