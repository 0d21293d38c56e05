// host_times.cu - the host's cost of a low-latency call in the kernel library, beside that of the CUDA calls that it
// makes: CPU time from call to return. The host makes eight calls, then waits for the device, so that no queue fills.
#include <time.h>

#include "low_latency.h"

namespace {

struct Words {  // about as large as the parameters of a low-latency kernel
  uint64_t word[110];
};
__global__ void nothing() {}
__global__ void nothing_of(const __grid_constant__ Words words) {
  if (words.word[0] == 1) __trap();
}

double now_us() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

template <class F>
void show(Rank &rank, const char *what, F call) {
  constexpr int kBurst = 8, kBursts = 400, kWarmup = 20;
  std::vector<double> all;
  for (int burst = 0; burst < kBursts + kWarmup; ++burst) {
    for (int i = 0; i < kBurst; ++i) {
      const double start = now_us();
      call();
      if (burst >= kWarmup) all.push_back(now_us() - start);
    }
    rank.sync();
  }
  const auto [median, p99] = median_and_p99(std::move(all));
  if (rank.rank == 0) printf("host: %-40s median %6.2f us  p99 %6.2f us\n", what, median, p99);
}

}  // namespace

void time_host(Rank &rank) {
  const Shape &s = rank.world->shape;
  LowLatency a = prepare(s, rank.rank, Routing(s, s.max_tokens, 1, false), false);
  const auto stream = reinterpret_cast<cudaStream_t>(rank.stream);
  cudaEvent_t event;
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const Words words{};
  show(rank, "clock alone", [] {});
  show(rank, "launch, no argument", [&] { nothing<<<1, 32, 0, stream>>>(); });
  show(rank, "launch, 880 bytes", [&] { nothing_of<<<129, 512, 0, stream>>>(words); });
  show(rank, "launch, 880 bytes, 20 KB shared", [&] { nothing_of<<<129, 512, 20 << 10, stream>>>(words); });
  show(rank, "cudaEventRecord", [&] { CHECK_CUDA(cudaEventRecord(event, stream)); });
  show(rank, "launch and cudaEventRecord", [&] {
    nothing_of<<<129, 512, 0, stream>>>(words);
    CHECK_CUDA(cudaEventRecord(event, stream));
  });
  show(rank, "cudaStreamIsCapturing", [&] {
    cudaStreamCaptureStatus status;
    CHECK_CUDA(cudaStreamIsCapturing(stream, &status));
  });
  show(rank, "cudaGetDevice", [&] {
    int device;
    CHECK_CUDA(cudaGetDevice(&device));
  });
  show(rank, "dk_stream_query", [&] {
    dk_stream_query_params p{};
    p.device = rank.device;
    p.stream = rank.stream;
    p.idle = -1;
    DK(stream_query, p);
  });
  show(rank, "dk_ll_dispatch", [&] { dispatch(rank, a, DK_FORMAT_FP8, 0, false); });
  show(rank, "dk_ll_combine", [&] { combine(rank, a, 0, a.y); });
}
