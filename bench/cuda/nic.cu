// nic.cu - calls across nodes beside what the rate and the latency of the network alone allow, as the test transport's
// NIC has them: bytes of rows that a rank sends to other nodes / rate + crossings that follow each other * latency.
// Without a limit (nic:0:0) the times are the limit of whoever serves the posts.
#include "low_latency.h"
#include "normal_ops.h"
#include "testtransport/testtransport.h"

namespace {

struct Network {
  double latency_us = 0, gb_per_s = 0;
  bool is_limited() const { return gb_per_s > 0; }
};
Network network() {
  Network n;
  const char *text = getenv("DEEPEP_TESTTRANSPORT");
  if (text != nullptr) (void)sscanf(text, "nic:%lf:%lf", &n.latency_us, &n.gb_per_s);
  return n;
}

// What the rank that sends the most to other nodes sends in a call.
struct Crossing {
  int64_t rows = 0;
  double bytes = 0;
  int trips = 0;  // crossings, each of which begins when the one before has ended
};

class Table {
 public:
  Table(Rank &rank) : rank_(rank), network_(network()) {
    if (rank.rank != 0) return;
    const Shape &s = rank.world->shape;
    printf("%d nodes of %d ranks, DEEPEP_TESTTRANSPORT=%s; the slowest rank, %d calls\n", s.nodes, s.ranks / s.nodes,
           getenv("DEEPEP_TESTTRANSPORT") == nullptr ? "" : getenv("DEEPEP_TESTTRANSPORT"), s.iterations);
    printf("%-30s %9s %9s %7s %8s %8s %9s %8s %6s\n", "call", "median us", "p99 us", "rows", "MB", "GB/s", "rows/us",
           "bound us", "ratio");
    fflush(stdout);
  }
  void row(const char *call, const Timing &t, const Crossing &c, int calls = 1) const {
    if (rank_.rank != 0) return;
    const double us = t.median / calls, bound = c.bytes / network_.gb_per_s / 1e3 + c.trips * network_.latency_us;
    printf("%-30s %9.1f %9.1f %7lld %8.3f %8.1f %9.2f", call, us, t.p99 / calls, static_cast<long long>(c.rows),
           c.bytes / 1e6, c.bytes / us / 1e3, c.rows / us);
    if (network_.is_limited())
      printf(" %8.1f %6.2f\n", bound, us / bound);
    else
      printf(" %8s %6s\n", "-", "-");
    fflush(stdout);
  }

 private:
  Rank &rank_;
  Network network_;
};

template <class F>
Crossing most(const Routing &routing, double row_bytes, int trips, F rows_of) {
  Crossing c;
  for (int r = 0; r < routing.ranks; ++r) c.rows = std::max<int64_t>(c.rows, rows_of(r));
  c.bytes = c.rows * row_bytes;
  c.trips = trips;
  return c;
}

void time_normal_mode(Rank &rank, const Table &table, const std::vector<int> &sms) {
  const Shape &s = rank.world->shape;
  const int peers = s.ranks / s.nodes;
  const Routing routing(s, s.tokens, 1, false);
  Arrays a = prepare_counted(rank, routing, s.hidden);
  auto sent = [&](int from) {
    int64_t rows = 0;
    for (int node = 0; node < s.nodes; ++node)
      if (node != from / peers) rows += routing.rows_to_node(from, node, peers);
    return rows;
  };
  auto returned = [&](int from) {  // a sum for each token of a rank with this index on another node
    int64_t rows = 0;
    for (int r = from % peers; r < s.ranks; r += peers)
      if (r != from) rows += routing.rows_to_node(r, from / peers, peers);
    return rows;
  };
  constexpr int kTrips = 2;  // rows go there, credits come back: a call ends with the last credit
  for (int n : sms) {
    char name[64];
    auto dispatched = [&](const char *what, uint64_t row_bytes, int scales) {
      snprintf(name, sizeof name, "dispatch %s, %d SMs", what, n);
      const Timing t =
          measure(rank, s.iterations, true, [&] { dispatch(rank, a, routing, row_bytes, scales, -1, 0, n, false); });
      table.row(name, t, most(routing, row_bytes + 4.0 * scales, kTrips, sent));
    };
    dispatched("FP8", s.hidden, s.hidden / 128);
    dispatched("BF16", 2 * s.hidden, 0);
    snprintf(name, sizeof name, "combine BF16, %d SMs", n);
    const Timing t = measure(rank, s.iterations, true, [&] { combine(rank, a, routing, n, false); });
    table.row(name, t, most(routing, 2.0 * s.hidden, kTrips, returned));
  }
  release(rank, a);
}

void time_low_latency_mode(Rank &rank, const Table &table) {
  const Shape &s = rank.world->shape;
  const int peers = s.ranks / s.nodes;
  const Routing routing(s, s.max_tokens, 1, false);
  LowLatency a = prepare(s, rank.rank, routing, false);
  int sms = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank.device_ordinal));
  a.num_sms = std::min(std::max(32, s.max_tokens) + 1, sms - 4);  // the NIC takes 3
  auto sent = [&](int from) {
    int64_t rows = 0;
    for (int r = 0; r < s.ranks; ++r)
      for (int t = 0; t < routing.tokens && r / peers != from / peers; ++t) rows += routing.goes(from, t, r);
    return rows;
  };
  auto returned = [&](int from) {  // a sum for each token with experts of this rank
    int64_t rows = 0;
    for (int r = 0; r < s.ranks; ++r)
      for (int t = 0; t < routing.tokens && r / peers != from / peers; ++t) rows += routing.goes(r, t, from);
    return rows;
  };
  const double fp8 = s.hidden + 4.0 * (s.hidden / 128), bf16 = 2.0 * s.hidden;
  const Crossing there8 = most(routing, fp8, 1, sent), there16 = most(routing, bf16, 1, sent),
                 back = most(routing, bf16, 2, returned);  // after the weights
  const int iterations = std::max(s.iterations, 100);
  auto dispatch8 = [&] { dispatch(rank, a, DK_FORMAT_FP8, 0, false); };
  auto combine16 = [&] { combine(rank, a, 0, a.y); };
  table.row("LL dispatch FP8", measure(rank, iterations, false, dispatch8), there8);
  table.row("LL combine BF16", measure(rank, iterations, false, combine16), back);
  table.row("LL dispatch BF16", measure(rank, iterations, false, [&] { dispatch(rank, a, DK_FORMAT_BF16, 0, false); }),
            there16);
  constexpr int kInARow = 10;
  const Crossing both{there8.rows + back.rows, there8.bytes + back.bytes, there8.trips + back.trips};
  dispatch8();
  table.row("LL FP8 + BF16, 10 in a row",
            measure(rank, s.iterations, false,
                    [&] {
                      for (int i = 0; i < kInARow; ++i) {
                        dispatch8();
                        combine16();
                      }
                    }),
            both, kInARow);
}

void show_worker(const Rank &rank) {
  using Read = int (*)(testtransport_nic *);
  const auto read = reinterpret_cast<Read>(dlsym(RTLD_DEFAULT, "testtransport_read_nic"));
  testtransport_nic n{};
  usleep(20000);  // it counts when it has been idle
  if (rank.rank != 0 || read == nullptr || read(&n) != 0) return;
  printf(
      "the NIC of rank 0: %llu launches, %llu chunks, the GPU's clock ticks every %llu ns; words and completions came "
      "%.2f us after they were due on average, %.2f at most\n",
      static_cast<unsigned long long>(n.launches), static_cast<unsigned long long>(n.chunks),
      static_cast<unsigned long long>(n.tick_ns), n.late_ns / 1e3 / std::max<double>(n.arrivals, 1), n.latest_ns / 1e3);
  fflush(stdout);
}

}  // namespace

void time_nic(Rank &rank, const std::vector<int> &sms) {
  const Table table(rank);
  time_low_latency_mode(rank, table);
  time_normal_mode(rank, table, sms);
  rank.meet();
  show_worker(rank);
}
