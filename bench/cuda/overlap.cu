// overlap.cu - low-latency dispatch and combine in halves with a kernel between them that leaves the other SMs free, in
// graphs: how much of the transfer it hides. With copies=1 rows cross by copy engines. Each line is a call's share of a
// graph of calls less the time of the kernel between; the slowest rank's median. First the rows that replays leave are
// compared with those of a whole call; of a combine with copies=0, whose halves round less often, with eager halves.
#include <functional>
#include <string>

#include "low_latency.h"

namespace {

__global__ void spin(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - start < ns);
}
__global__ void count_different(const uint4 *a, const uint4 *b, size_t chunks, unsigned long long *different) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < chunks; i += size_t{gridDim.x} * blockDim.x)
    if (a[i].x != b[i].x || a[i].y != b[i].y || a[i].z != b[i].z || a[i].w != b[i].w) atomicAdd(different, 1ull);
}

struct Graph {
  cudaGraphExec_t exec = nullptr;
  template <class F>
  Graph(Rank &rank, int calls, F call) {
    auto stream = reinterpret_cast<cudaStream_t>(rank.stream);
    cudaGraph_t graph;
    rank.meet();
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) call();
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() { CHECK_CUDA(cudaGraphExecDestroy(exec)); }
  void launch(Rank &rank) const { CHECK_CUDA(cudaGraphLaunch(exec, reinterpret_cast<cudaStream_t>(rank.stream))); }
};

double slowest(Rank &rank, double mine) {
  static double all[DK_MAX_RANKS];
  all[rank.rank] = mine;
  rank.meet();
  const double greatest = *std::max_element(all, all + rank.world->shape.ranks);
  rank.meet();
  return greatest;
}
template <class F>
double time_graph(Rank &rank, F call) {
  constexpr int kCalls = 20, kReplays = 30;
  const Graph graph(rank, kCalls, call);
  EventPair events(rank);
  std::vector<double> samples;
  for (int i = 0; i < kReplays; ++i) {
    rank.meet();
    const double us = events.time([] {}, [&] { graph.launch(rank); }, [] {});
    if (i >= 5) samples.push_back(us / kCalls);
  }
  return slowest(rank, median_and_p99(samples).median);
}

// Half a call: DK_PHASE_*.
using Half = std::function<void(uint32_t)>;

// Whether `bytes` at `at` are the same after replays as after `expect()`. An odd number of calls in a graph: the slots
// of replays alternate against those of whole calls.
uint64_t compare(Rank &rank, uint8_t *at, size_t bytes, const std::function<void()> &expect, const Half &half) {
  const size_t chunks = bytes / 16;
  auto stream = reinterpret_cast<cudaStream_t>(rank.stream);
  uint8_t *expected = device_array<uint8_t>(bytes);
  unsigned long long *different = device_array<unsigned long long>(1), result = 0;
  CHECK_CUDA(cudaMemset(different, 0, 8));
  CHECK_CUDA(cudaMemset(at, 0xee, bytes));
  CHECK_CUDA(cudaDeviceSynchronize());
  expect();
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaMemcpy(expected, at, bytes, cudaMemcpyDeviceToDevice));
  const Graph graph(rank, 3, [&] {
    half(DK_PHASE_SEND);
    half(DK_PHASE_RECV);
  });
  for (int replay = 0; replay < 200; ++replay) {
    if (replay % 50 == 0) {
      CHECK_CUDA(cudaStreamSynchronize(stream));
      CHECK_CUDA(cudaMemset(at, 0xee, bytes));
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    graph.launch(rank);
    if (replay % 50 != 49) continue;
    count_different<<<256, 256, 0, stream>>>(reinterpret_cast<const uint4 *>(at),
                                             reinterpret_cast<const uint4 *>(expected), chunks, different);
  }
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaMemcpy(&result, different, 8, cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaFree(expected));
  CHECK_CUDA(cudaFree(different));
  return result;
}

void show(Rank &rank, const char *name, const Half &half) {
  auto stream = reinterpret_cast<cudaStream_t>(rank.stream);
  const double whole = time_graph(rank, [&] { half(DK_PHASE_BOTH); });
  if (rank.rank == 0) printf("LL %-26s whole %19.1f us\n", name, whole);
  for (const int us : {0, 5, 10, 20, 40}) {
    const auto between = [&] {
      if (us > 0) spin<<<1, 32, 0, stream>>>(1000ull * us);
    };
    const double both = time_graph(rank, [&] {
      half(DK_PHASE_SEND);
      between();
      half(DK_PHASE_RECV);
    });
    const double alone = us == 0 ? 0 : time_graph(rank, between);
    if (rank.rank == 0)
      printf("LL %-26s halves, %2d us between %6.1f us, less the kernel between %6.1f\n", name, us, both, both - alone);
  }
  fflush(stdout);
}
// How long the send half keeps the caller's stream, with time enough for the rest before the next one.
void show_send(Rank &rank, const char *name, const Half &half) {
  EventPair events(rank);
  std::vector<double> samples;
  for (int i = 0; i < 30; ++i) {
    rank.meet();
    const double us = events.time([] {}, [&] { half(DK_PHASE_SEND); }, [] {});
    half(DK_PHASE_RECV);
    rank.sync();
    if (i >= 5) samples.push_back(us);
  }
  const double longest = slowest(rank, median_and_p99(samples).median);
  if (rank.rank == 0) printf("LL %-26s send half %15.1f us\n", name, longest);
}

void tell(Rank &rank, const char *name, uint64_t different) {
  const double any = slowest(rank, static_cast<double>(different));
  if (rank.rank == 0) printf("LL %-26s replays %s\n", name, any == 0 ? "ok" : "DIFFER");
}

}  // namespace

void time_overlap(Rank &rank) {
  const Shape &s = rank.world->shape;
  LowLatency a = prepare(s, rank.rank, Routing(s, s.max_tokens, 1, false), false);
  rank.meet();
  for (const bool fp8 : {true, false}) {
    const int format = fp8 ? DK_FORMAT_FP8 : DK_FORMAT_BF16;
    const char *name = fp8 ? "dispatch FP8" : "dispatch BF16";
    const size_t bytes = size_t{1} * a.L * a.R * a.B * a.H * (fp8 ? 1 : 2);
    const Half half = [&](uint32_t phase) { dispatch(rank, a, format, 0, true, phase, 0); };
    tell(rank, name, compare(rank, a.recv_x, bytes, [&] { half(DK_PHASE_BOTH); }, half));
    show(rank, name, half);
  }
  const struct {
    const char *name;
    bool weights;  // come with the dispatch
    uint32_t flags;
  } combines[] = {{"combine", false, 0}, {"combine, weights known", true, 0}, {"combine LogFMT", false, DK_LL_LOGFMT}};
  for (const auto &c : combines) {
    const Half half = [&](uint32_t phase) { combine(rank, a, c.flags, a.recv_x, phase, 2); };
    dispatch(rank, a, DK_FORMAT_BF16, 0, c.weights);
    rank.sync();
    const auto expect = [&] {
      if (s.copies) return half(DK_PHASE_BOTH);
      half(DK_PHASE_SEND);
      half(DK_PHASE_RECV);
    };
    const size_t bytes = size_t{2} * a.tokens * a.H;
    tell(rank, c.name, compare(rank, reinterpret_cast<uint8_t *>(a.combined), bytes, expect, half));
    show(rank, c.name, half);
    show_send(rank, c.name, half);
  }
  rank.meet();
}
