// low_latency_timeline.cu - where a low-latency call spends its time inside, from a library built with
// -DDEEPEP_TIMELINE.
#include "cuda/impl/low_latency/timeline.cuh"
#include "low_latency.h"

using namespace deepep;

namespace {

constexpr int kCalls = 64, kBlocks = 192;
const char *const kNames[kNumMarks] = {"begin",          "begun",          "slots empty",  "first row out",
                                       "counts out",     "all sent",       "counts known", "last header",
                                       "last row taken", "last block out", "end"};

double median(std::vector<double> &all) {
  if (all.empty()) return NAN;
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

// One operation's marks of the last kCalls calls: time since the block's begin, in ns by the ratio of both clocks.
void show(const uint64_t *marks, const char *what) {
  auto at = [&](int call, int block, int mark) { return marks[(call * kBlocks + block) * kNumMarks + mark]; };
  double cycles = 0, ns = 0;
  int blocks = 0;
  while (blocks < kBlocks && at(0, blocks, kMarkClockEnd) != 0) ++blocks;
  if (blocks == 0) return;
  for (int call = 0; call < kCalls; ++call)
    for (int block = 0; block < blocks; ++block) {
      cycles += at(call, block, kMarkRecorded) - at(call, block, kMarkBegin);
      ns += at(call, block, kMarkClockEnd) - at(call, block, kMarkClockBegin);
    }
  const double rate = ns / cycles;
  std::vector<double> spread, whole;
  for (int call = 0; call < kCalls; ++call) {
    uint64_t first = ~0ull, last = 0, end = 0;
    for (int block = 0; block < blocks; ++block) {
      first = std::min(first, at(call, block, kMarkClockBegin));
      last = std::max(last, at(call, block, kMarkClockBegin));
      end = std::max(end, at(call, block, kMarkClockEnd));
    }
    spread.push_back(last - first);
    whole.push_back(end - first);
  }
  printf("%s: %d blocks, %.3f ns a cycle; first block's begin to last block's begin %.0f ns, to the last end %.0f ns\n",
         what, blocks, rate, median(spread), median(whole));
  for (int mark = 1; mark <= kMarkRecorded; ++mark) {
    std::vector<double> middle, greatest, control_block;
    for (int call = 0; call < kCalls; ++call) {
      std::vector<double> one;
      for (int block = 0; block < blocks; ++block)
        if (at(call, block, mark) != 0) {
          one.push_back((at(call, block, mark) - at(call, block, kMarkBegin)) * rate);
          if (block == blocks - 1) control_block.push_back(one.back());
        }
      if (one.empty()) continue;
      middle.push_back(median(one));
      greatest.push_back(one.back());
    }
    if (!middle.empty())
      printf("  %-16s median block %6.0f ns, latest block %6.0f ns, control block %6.0f ns\n", kNames[mark],
             median(middle), median(greatest), median(control_block));
  }
}

void show_both(Rank &rank, const char *what) {
  using Read = uint64_t (*)(uint64_t *);
  auto read = reinterpret_cast<Read>(dlsym(g_library, "dk_timeline"));
  if (read == nullptr) {
    fprintf(stderr, "the library is not built with -DDEEPEP_TIMELINE\n");
    _exit(2);
  }
  std::vector<uint64_t> marks(read(nullptr));
  if (read(marks.data()) == 0) {
    fprintf(stderr, "cannot read the timeline\n");
    _exit(3);
  }
  for (int r = 0; r < rank.world->shape.ranks; ++r) {
    if (r == rank.rank && (r == 0 || r == 1)) {
      printf("-- %s, rank %d\n", what, r);
      show(marks.data(), "dispatch");
      show(marks.data() + marks.size() / 2, "combine");
      fflush(stdout);
    }
    rank.meet();
  }
}

}  // namespace

void timeline_low_latency(Rank &rank) {
  const Shape &s = rank.world->shape;
  const Routing routing(s, std::min(s.tokens, s.max_tokens), 1, false);
  LowLatency a = prepare(s, rank.rank, routing, false);
  CHECK_CUDA(cudaMemset(a.y, 0, static_cast<size_t>(a.L) * a.R * a.B * a.H * 2));
  CHECK_CUDA(cudaDeviceSynchronize());
  rank.meet();
  auto alone = [&](const char *what, auto call) {  // each after a barrier, as the times are taken
    measure(rank, 150, false, call);
    show_both(rank, what);
  };
  alone("FP8, then sums, each after a barrier", [&] {
    dispatch(rank, a, DK_FORMAT_FP8, 0, true);
    rank.barrier();
    combine(rank, a, 0, a.y);
  });
  alone("BF16, then each row, each after a barrier", [&] {
    dispatch(rank, a, DK_FORMAT_BF16, 0, true);
    rank.barrier();
    combine(rank, a, DK_LL_UNREDUCED, a.y);
  });
  alone("LogFMT", [&] {
    dispatch(rank, a, DK_FORMAT_FP8, 0, true);
    rank.barrier();
    combine(rank, a, DK_LL_LOGFMT, a.y);
  });
  alone("receiving halves, after their rows have come", [&] {
    dispatch(rank, a, DK_FORMAT_FP8, 0, true, DK_PHASE_SEND, 0);
    rank.barrier();
    dispatch(rank, a, DK_FORMAT_FP8, 0, true, DK_PHASE_RECV, 0);
    combine(rank, a, DK_LL_UNREDUCED, a.y, DK_PHASE_SEND, 0);
    rank.barrier();
    combine(rank, a, DK_LL_UNREDUCED, a.y, DK_PHASE_RECV, 0);
  });
  measure(rank, 10, false, [&] {
    for (int i = 0; i < 40; ++i) {
      dispatch(rank, a, DK_FORMAT_FP8, 0, true);
      combine(rank, a, 0, a.y);
    }
  });
  show_both(rank, "FP8 and sums by turns, back to back");
}
