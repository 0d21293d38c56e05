// nodes.cu - normal mode across nodes: times, the bytes of rows that a rank sends to other nodes by time, and where
// warps spend their time, of a library built with -DDEEPEP_TIMELINE.
#include "internode/normal/timeline.cuh"
#include "normal_ops.h"

using deepep::internode::kNumPhases;
using deepep::internode::kNumRoles;
using deepep::internode::RoleTimes;

namespace {

const char *const kRoles[kNumRoles] = {"send", "read", "push", "sum for a node", "sum of a token"};
const char *const kPhases[kNumPhases] = {"stage", "put", "copy", "sum", "signal"};

// Of this rank's tokens: rows that cross, one for each other node that has one of the token's experts.
int64_t rows_to_other_nodes(const Rank &rank, const Routing &routing) {
  const int peers = routing.ranks / rank.world->shape.nodes;
  int64_t rows = 0;
  for (int node = 0; node < rank.world->shape.nodes; ++node)
    if (node != rank.rank / peers) rows += routing.rows_to_node(rank.rank, node, peers);
  return rows;
}

using ReadTimes = uint64_t (*)(RoleTimes *);
ReadTimes reader() { return reinterpret_cast<ReadTimes>(dlsym(g_library, "dk_role_times")); }

// Times of both operations since they were last read, of `calls` calls of one of them.
void show_roles(const Rank &rank, int op, int calls) {
  if (reader() == nullptr) return;
  RoleTimes times[2][kNumRoles];
  if (reader()(&times[0][0]) != sizeof times) {
    fprintf(stderr, "the library's timeline has another layout\n");
    _exit(3);
  }
  if (rank.rank != 0 || calls == 0) return;
  int khz = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, rank.device_ordinal));
  const double us = 1e3 / khz;  // of a cycle
  for (int role = 0; role < kNumRoles; ++role) {
    const RoleTimes &one = times[op][role];
    if (one.warps == 0) continue;
    printf(
        "    %-15s %3llu warps, begin at %5.1f us, first move at %5.1f, last ends at %6.1f, %6.1f each, longest %6.1f; "
        "each:",
        kRoles[role], one.warps / calls, one.began * us / one.warps, one.moved * us / one.warps, one.last * us,
        one.all * us / one.warps, one.longest * us);
    double rest = one.all * us / one.warps;
    for (int phase = 0; phase < kNumPhases; ++phase) {
      const double mine = one.phases[phase] * us / one.warps;
      rest -= mine;
      if (mine > 0) printf(" %s %.1f,", kPhases[phase], mine);
    }
    printf(" rest %.1f\n", rest);
  }
  fflush(stdout);
}

}  // namespace

void time_nodes(Rank &rank, const std::vector<int> &sms) {
  const Shape &s = rank.world->shape;
  const Routing routing(s, s.tokens, 1, false);
  Arrays a = prepare_counted(rank, routing, s.hidden);
  rank.register_segment(2ull * s.ranks * s.tokens * s.hidden);
  const int64_t crossing = rows_to_other_nodes(rank, routing);
  auto timed = [&](const char *what, int num_sms, double row_bytes, int op, auto call) {
    const OwnTime before = own_time(rank, op);
    show_roles(rank, 0, 0);  // forgets what was before
    const Timing t = measure(rank, s.iterations, true, call);
    const OwnTime after = own_time(rank, op);
    if (rank.rank == 0)
      printf("%-14s sms %3d  median %8.1f us  p99 %8.1f us  in-kernel mean %8.1f us  to other nodes %6.1f GB/s\n", what,
             num_sms, t.median, t.p99, mean_us(before, after), crossing * row_bytes / t.median / 1e3);
    fflush(stdout);
    show_roles(rank, op == DK_OP_COMBINE, static_cast<int>(after.calls - before.calls));
  };
  if (rank.rank == 0)
    printf("%d nodes of %d ranks; rank 0 gets %d rows and sends %lld to other nodes\n", s.nodes, s.ranks / s.nodes,
           a.rows, static_cast<long long>(crossing));
  for (int n : sms) {
    auto rows_of = [&](const char *what, uint64_t row_bytes, int scales, bool direct) {
      timed(what, n, static_cast<double>(row_bytes) + 4 * scales, DK_OP_DISPATCH,
            [&] { dispatch(rank, a, routing, row_bytes, scales, -1, 0, n, direct); });
    };
    rows_of("dispatch BF16", 2 * s.hidden, 0, true);
    rows_of("staged", 2 * s.hidden, 0, false);
    rows_of("dispatch FP8", s.hidden, s.hidden / 128, true);
    rows_of("staged", s.hidden, s.hidden / 128, false);
    timed("combine BF16", n, 2.0 * s.hidden, DK_OP_COMBINE, [&] { combine(rank, a, routing, n, false); });
  }
  release(rank, a);
}
