// low_latency_times.cu - times of the low-latency calls: by events around a call after a barrier of all ranks, inside
// the kernels by their own clocks, and a call's share of a graph that holds many. Every figure is the slowest rank's;
// median and 99th percentile.
#include <string>

#include "low_latency.h"

namespace {

struct Times {
  double median = NAN, p99 = NAN, inside = NAN, inside_p99 = NAN;
};

// Each rank's samples, then the greatest of the ranks for each call; the same answer on every rank.
std::vector<double> greatest_of_ranks(Rank &rank, const std::vector<double> &mine) {
  auto &all = rank.world->shared->many;
  std::vector<double> greatest;
  while (greatest.size() < mine.size()) {
    const size_t first = greatest.size(), count = std::min<size_t>(mine.size() - first, kBenchSamples);
    std::copy_n(mine.begin() + first, count, all[rank.rank]);
    rank.meet();
    for (size_t i = 0; i < count; ++i) {
      greatest.push_back(all[0][i]);
      for (int r = 1; r < rank.world->shape.ranks; ++r) greatest.back() = std::max(greatest.back(), all[r][i]);
    }
    rank.meet();
  }
  return greatest;
}

// Times what `call` enqueues, `iterations` times. Time inside: of the operations `ops`, of one kernel each, or two
// halves. A later kernel writes a call's count to the page, at the latest in the next round.
template <class B, class F, class A>
Times time_calls(Rank &rank, int iterations, const std::vector<int> &ops, B before, F call, A after) {
  constexpr int kWarmup = 5;
  EventPair events(rank);
  std::vector<double> outside, inside;
  for (int i = 0; i < iterations + kWarmup; ++i) {
    rank.meet();
    const double us = events.time(before, call, after);
    if (i < kWarmup) continue;
    outside.push_back(us);
    double own = 0;
    for (int op : ops) own += *static_cast<volatile uint64_t *>(&rank.stats->ops[op].last_ns) / 1e3;
    if (i > kWarmup && !ops.empty()) inside.push_back(own);
  }
  const auto [median, p99] = median_and_p99(greatest_of_ranks(rank, outside));
  const auto [own, own_p99] = median_and_p99(greatest_of_ranks(rank, inside));
  return {median, p99, own, own_p99};
}

template <class F>
Times time_calls(Rank &rank, int iterations, const std::vector<int> &ops, F call) {
  return time_calls(rank, iterations, ops, [] {}, call, [] {});
}

// A call's share of a graph of 20 calls, launched repeatedly.
template <class F>
Times time_graph(Rank &rank, int replays, F call) {
  constexpr int kCalls = 20;
  cudaStream_t stream = reinterpret_cast<cudaStream_t>(rank.stream);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  rank.meet();
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kCalls; ++i) call();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const Times t = time_calls(rank, replays, {}, [&] { CHECK_CUDA(cudaGraphLaunch(exec, stream)); });
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return {t.median / kCalls, t.p99 / kCalls};
}

void release(LowLatency &a) {
  for (void *p :
       {(void *)a.idx, (void *)a.weights, (void *)a.x, (void *)a.y, (void *)a.combined, (void *)a.recv_x,
        (void *)a.scales, (void *)a.count, (void *)a.src_info, (void *)a.stats, (void *)a.range, (void *)a.wait_stats})
    CHECK_CUDA(cudaFree(p));
}
LowLatency prepare_quiet(Rank &rank, const Shape &s) {
  LowLatency a = prepare(s, rank.rank, Routing(s, s.max_tokens, 1, false), false);
  const size_t rows = static_cast<size_t>(a.L) * a.R * a.B, row = 2ull * a.H;
  auto some = make_rows(rank.rank, 64, a.H, false);
  for (uint16_t &value : some)  // / 16: LogFMT codes blocks below 1, and takes longer for those than for others
    if ((value & 0x7fff) > 4 << 7) value -= 4 << 7;
  for (size_t first = 0; first < rows; first += 64)
    CHECK_CUDA(cudaMemcpy(reinterpret_cast<uint8_t *>(a.y) + first * row, some.data(),
                          std::min<size_t>(64, rows - first) * row, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaDeviceSynchronize());
  rank.meet();
  return a;
}

// One shape: lines "csv,ranks,tokens,hidden,zipf,operation,median,p99,inside,inside_p99" in microseconds.
void sweep_point(Rank &rank, const Shape &s) {
  LowLatency a = prepare_quiet(rank, s);
  auto show = [&](const char *what, Times t) {
    if (rank.rank == 0) {
      printf("csv,%d,%d,%d,%g,%s,%.2f,%.2f,%.2f,%.2f\n", s.ranks, s.max_tokens, s.hidden, s.zipf, what, t.median, t.p99,
             t.inside, t.inside_p99);
      fflush(stdout);
    }
  };
  constexpr int kCalls = 200, kReplays = 15;
  show("dispatch_fp8",
       time_calls(rank, kCalls, {DK_OP_LL_DISPATCH}, [&] { dispatch(rank, a, DK_FORMAT_FP8, 0, true); }));
  show("combine", time_calls(rank, kCalls, {DK_OP_LL_COMBINE}, [&] { combine(rank, a, 0, a.y); }));
  show("dispatch_bf16",
       time_calls(rank, kCalls, {DK_OP_LL_DISPATCH}, [&] { dispatch(rank, a, DK_FORMAT_BF16, 0, true); }));
  show("graph_dispatch_fp8", time_graph(rank, kReplays, [&] { dispatch(rank, a, DK_FORMAT_FP8, 0, true); }));
  show("graph_round", time_graph(rank, kReplays, [&] {
         dispatch(rank, a, DK_FORMAT_FP8, 0, true);
         combine(rank, a, 0, a.y);
       }));
  rank.meet();
  release(a);
}

}  // namespace

void time_low_latency(Rank &rank) {
  const Shape &s = rank.world->shape;
  LowLatency a = prepare_quiet(rank, s);
  const int iterations = std::max(1000, s.iterations * 10);
  auto show = [&](const char *what, Times t) {
    if (rank.rank == 0) {
      printf("%-44s median %7.1f us  p99 %7.1f us  inside %7.1f us  p99 %7.1f us\n", what, t.median, t.p99, t.inside,
             t.inside_p99);
      fflush(stdout);
    }
  };
  const std::vector<int> dispatches{DK_OP_LL_DISPATCH}, combines{DK_OP_LL_COMBINE},
      both{DK_OP_LL_DISPATCH, DK_OP_LL_COMBINE};
  auto fp8 = [&] { dispatch(rank, a, DK_FORMAT_FP8, 0, true); };
  auto bf16 = [&] { dispatch(rank, a, DK_FORMAT_BF16, 0, true); };
  auto sums = [&] { combine(rank, a, 0, a.y); };
  auto unweighted = [&] { dispatch(rank, a, DK_FORMAT_FP8, 0, false); };
  show("LL dispatch FP8", time_calls(rank, iterations, dispatches, unweighted));
  show("LL combine, sums, weights now", time_calls(rank, iterations, combines, sums));
  show("LL dispatch FP8 with weights", time_calls(rank, iterations, dispatches, fp8));
  show("LL dispatch BF16", time_calls(rank, iterations, dispatches, bf16));
  show("LL combine, sums", time_calls(rank, iterations, combines, sums));
  show("LL combine, each row", time_calls(rank, iterations, combines, [&] { combine(rank, a, DK_LL_UNREDUCED, a.y); }));
  show("LL combine, LogFMT", time_calls(rank, iterations, combines, [&] { combine(rank, a, DK_LL_LOGFMT, a.y); }));
  show("LL dispatch FP8 + combine, sums", time_calls(rank, iterations, both, [&] {
         fp8();
         sums();
       }));
  const auto halves = [&](const std::string &what, const std::vector<int> &op, auto half) {
    const auto send = [&] { half(DK_PHASE_SEND); };
    const auto receive = [&] { half(DK_PHASE_RECV); };
    const auto nothing = [] {};
    const auto both_halves = [&] {
      send();
      receive();
    };
    show((what + " in halves").c_str(), time_calls(rank, iterations, op, both_halves));
    show((what + ", sending half").c_str(), time_calls(rank, iterations, {}, nothing, send, receive));
    show((what + ", receiving half").c_str(), time_calls(rank, iterations, {}, send, receive, nothing));
  };
  const auto combine_of = [&](uint32_t flags) {
    return [&, flags](uint32_t phase) { combine(rank, a, flags, a.y, phase, 1); };
  };
  halves("LL dispatch FP8", dispatches, [&](uint32_t phase) { dispatch(rank, a, DK_FORMAT_FP8, 0, true, phase, 0); });
  halves("LL combine, sums", combines, combine_of(0));
  halves("LL combine, LogFMT sums", combines, combine_of(DK_LL_LOGFMT));
  halves("LL combine, each row", combines, combine_of(DK_LL_UNREDUCED));
  halves("LL combine, each row, LogFMT", combines, combine_of(DK_LL_UNREDUCED | DK_LL_LOGFMT));
  show("graph: dispatch FP8", time_graph(rank, 60, fp8));
  show("graph: dispatch BF16", time_graph(rank, 60, bf16));
  fp8();
  show("graph: combine, sums", time_graph(rank, 60, sums));
  show("graph: dispatch FP8 + combine", time_graph(rank, 60, [&] {
         fp8();
         sums();
       }));
  show("graph: the same, weights now", time_graph(rank, 60, [&] {
         unweighted();
         sums();
       }));
  rank.meet();
  release(a);
}

// Tokens 1 to max_tokens at the given hidden size, hidden 2048 to 8192 at 128 tokens, skewed routing.
void sweep_low_latency(Rank &rank) {
  Shape s = rank.world->shape;
  const int max_tokens = s.max_tokens, hidden = s.hidden;
  for (int tokens = 1; tokens <= max_tokens; tokens *= 2) {
    s.max_tokens = tokens;
    sweep_point(rank, s);
  }
  s.max_tokens = std::min(max_tokens, 128);
  for (int other : {2048, 3072, 4096, 5120, 6144, 8192})
    if (other <= hidden || s.max_tokens * other <= max_tokens * hidden) {
      s.hidden = other;
      sweep_point(rank, s);
    }
  s.hidden = hidden;
  for (double zipf : {0.5, 1.0}) {
    s.zipf = zipf;
    sweep_point(rank, s);
  }
}
