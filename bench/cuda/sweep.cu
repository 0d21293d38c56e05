// sweep.cu - normal mode over SMs, tokens, hidden and routings: one line of CSV for each operation at each point.
#include "normal_ops.h"

namespace {

constexpr int kIterations = 5;  // of a point, after three that warm up

struct Point {
  const char *sweep, *routing;
  int tokens, hidden, sms;
};

// Rows that cross links: the maximum over ranks of rows sent and of rows received.
int max_rows(const Routing &routing) {
  std::vector<int> out(routing.ranks), in(routing.ranks);
  for (int from = 0; from < routing.ranks; ++from)
    for (int t = 0; t < routing.tokens; ++t)
      for (int to = 0; to < routing.ranks; ++to)
        if (to != from && routing.goes(from, t, to)) {
          ++out[from];
          ++in[to];
        }
  return std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end()));
}

double slowest(Rank &rank, double mine) {
  rank.world->shared->samples[rank.rank] = mine;
  rank.meet();
  const double most = rank.world->slowest();
  rank.meet();
  return most;
}

void header() {
  printf("csv,sweep,isa,ranks,tokens,hidden,routing,sms,operation,link_bytes,median_us,worst_us,in_kernel_us\n");
}

struct Sweep {
  Rank &rank;
  Point at;
  const Routing &routing;
  const Arrays &arrays;
  int rows;

  template <class F>
  void timed(const char *operation, double row_bytes, int op, F call) const {
    const OwnTime before = own_time(rank, op);
    const Timing t = measure(rank, kIterations, true, call);
    const double own = slowest(rank, mean_us(before, own_time(rank, op)));
    if (rank.rank != 0) return;
    printf("csv,%s,%u,%d,%d,%d,%s,%d,%s,%.0f,%.1f,%.1f,%.1f\n", at.sweep, rank.world->shape.isa, routing.ranks,
           at.tokens, at.hidden, at.routing, at.sms, operation, rows * row_bytes, t.median, t.p99, own);
    fflush(stdout);
  }
  void dispatches(const char *operation, int row_bytes, int scales, bool direct) const {
    timed(operation, row_bytes + 4 * scales, DK_OP_DISPATCH,
          [&] { dispatch(rank, arrays, routing, row_bytes, scales, -1, 0, at.sms, direct); });
  }
  void operations() const {
    const int h = at.hidden, scales = h / 128;
    dispatches("dispatch_fp8", h, scales, true);
    dispatches("dispatch_bf16", 2 * h, 0, true);
    dispatches("dispatch_fp8_staged", h, scales, false);
    dispatches("dispatch_bf16_staged", 2 * h, 0, false);
    timed("combine_bf16", 2 * h, DK_OP_COMBINE, [&] { combine(rank, arrays, routing, at.sms, false); });
  }
};

// All operations at one number of tokens, with each number of SMs.
void sweep_sms(Rank &rank, Point at, const Routing &routing, const std::vector<int> &sms) {
  Arrays arrays = prepare_counted(rank, routing, at.hidden);
  Sweep sweep{rank, at, routing, arrays, max_rows(routing)};
  if (sms.size() == 1) {
    sweep.timed("layout", 0, DK_OP_LAYOUT, [&] { layout(rank, arrays, routing); });
    sweep.timed("notify", 0, DK_OP_NOTIFY, [&] { notify(rank, arrays, routing, at.hidden, at.hidden / 128); });
  }
  for (int n : sms) {
    sweep.at.sms = n;
    sweep.operations();
  }
  rank.meet();
  release(rank, arrays);
}

}  // namespace

void sweep_normal(Rank &rank) {
  const Shape s = rank.world->shape;
  rank.register_segment(2ull * s.ranks * s.tokens * s.hidden);  // s.tokens: the most that are swept
  if (rank.rank == 0) header();
  auto uniform = [&](int tokens) { return Routing(s, tokens, 1, false); };
  const int base = std::min(4096, s.tokens), sms = 16;
  sweep_sms(rank, {"sms", "uniform", base, s.hidden, 0}, uniform(base), {2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64});
  for (int hidden : {2048, 4096, 7168})
    if (hidden <= s.hidden) sweep_sms(rank, {"hidden", "uniform", base, hidden, sms}, uniform(base), {sms});
  Shape skewed = s;
  skewed.zipf = 1;
  sweep_sms(rank, {"routing", "zipf", base, s.hidden, sms}, Routing(skewed, base, 1, false), {sms});
  Routing hot = uniform(base);
  hot.send_all_to(0);
  sweep_sms(rank, {"routing", "hot", base, s.hidden, sms}, hot, {sms});
  for (int tokens = 64; tokens <= s.tokens; tokens *= 2)
    sweep_sms(rank, {"tokens", "uniform", tokens, s.hidden, sms}, uniform(tokens), {sms});
}
