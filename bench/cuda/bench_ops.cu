// bench_ops.cu - checks and times the operations of a CUDA kernel library, one thread a rank, beside an all-pairs push
// measured in the same run. Several ranks may share a GPU (checks only: they then share its SMs).
//
//   nvcc -std=c++17 -O2 -arch=sm_90 -Ikernels -o build/bin/bench_ops bench/cuda/*.cu
//   bench_ops LIBRARY [ranks=4] [devices=4] [tokens=4096] [hidden=7168] [topk=8] [experts=256] [sms=16,20,24]
//             [iterations=30] [isa=0] [nvl_mb=512]
//             [mode=check|normalcheck|llcheck|normal|routed|sweep|ll|llsweep|lltimeline|host|times|all]
//             [max_tokens=128] [zipf=0] [local=0] [stats=1]
//
// mode=sweep: lines of CSV for pictures, normal mode with tokens up to tokens=N.
// Logical bytes of a dispatch: rows that arrive at any rank, self included, times the bytes of a row. Times are medians
// and 99th percentiles of the maximum over ranks, by events around the call after a barrier kernel; an event pair
// around nothing measures about 3 us.
#include <string>

#include "modes.h"

namespace {

World g_world;
std::string g_mode = "check";
std::vector<int> g_sms{0};

void *run_rank(void *argument) {
  Rank rank;
  rank.open(&g_world, static_cast<int>(reinterpret_cast<intptr_t>(argument)));
  if (g_mode == "check" || g_mode == "all" || g_mode == "normalcheck") check_normal(rank);
  if (g_mode == "llcheck" || g_mode == "check" || g_mode == "all") check_low_latency(rank);
  if (g_mode == "normal" || g_mode == "times" || g_mode == "all") time_normal(rank, g_sms);
  if (g_mode == "routed" || g_mode == "all") time_routed(rank, g_sms);
  if (g_mode == "sweep") sweep_normal(rank);
  if (g_mode == "llsweep") sweep_low_latency(rank);
  if (g_mode == "lltimeline") timeline_low_latency(rank);
  if (g_mode == "host") time_host(rank);
  if (g_mode == "ll" || g_mode == "times" || g_mode == "all") time_low_latency(rank);
  rank.meet();
  return nullptr;
}

void parse(int argc, char **argv) {
  Shape &s = g_world.shape;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t at = argument.find('=');
    if (at == std::string::npos) {
      fprintf(stderr, "not NAME=VALUE: %s\n", argv[i]);
      exit(2);
    }
    const std::string name = argument.substr(0, at), value = argument.substr(at + 1);
    const double number = atof(value.c_str());
    if (name == "ranks")
      s.ranks = number;
    else if (name == "devices")
      s.devices = number;
    else if (name == "tokens")
      s.tokens = number;
    else if (name == "hidden")
      s.hidden = number;
    else if (name == "topk")
      s.topk = number;
    else if (name == "experts")
      s.experts = number;
    else if (name == "iterations")
      s.iterations = number;
    else if (name == "isa")
      s.isa = number;
    else if (name == "nvl_mb")
      s.nvl_bytes = static_cast<uint64_t>(number * (1 << 20));
    else if (name == "max_tokens")
      s.max_tokens = number;
    else if (name == "zipf")
      s.zipf = number;
    else if (name == "local")
      s.share_by_descriptor = number == 0;
    else if (name == "stats")
      s.keep_stats = number != 0;
    else if (name == "mode")
      g_mode = value;
    else if (name == "sms") {
      g_sms.clear();
      for (size_t from = 0; from < value.size();) {
        const size_t comma = std::min(value.find(',', from), value.size());
        g_sms.push_back(atoi(value.substr(from, comma - from).c_str()));
        from = comma + 1;
      }
    } else {
      fprintf(stderr, "unknown option %s\n", name.c_str());
      exit(2);
    }
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: bench_ops LIBRARY [name=value ...]; see the head of bench_ops.cu\n");
    return 2;
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // ranks of one GPU must not share a hardware queue
  // A kernel that is loaded at its first launch waits for other ranks' kernels to end.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  g_library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (g_library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  parse(argc, argv);
  Shape &s = g_world.shape;
  dk_ll_layout_params layout{};
  layout.num_ranks = s.ranks;
  layout.num_max_tokens = s.max_tokens;
  layout.hidden = s.hidden;
  layout.num_experts = s.experts;
  if (g_mode != "normal" && g_mode != "normalcheck" && g_mode != "routed" && g_mode != "sweep" && s.hidden % 128 == 0) {
    DK(ll_layout, layout);
    s.rdma_bytes = layout.rdma_bytes;
  }
  pthread_barrier_init(&g_world.barrier, nullptr, s.ranks);
  g_world.descriptors.resize(s.ranks);
  g_world.blobs.resize(s.ranks);
  g_world.samples.resize(s.ranks);
  std::vector<pthread_t> threads(s.ranks);
  for (int r = 0; r < s.ranks; ++r)
    pthread_create(&threads[r], nullptr, run_rank, reinterpret_cast<void *>(static_cast<intptr_t>(r)));
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  printf("done: %s ranks=%d devices=%d tokens=%d hidden=%d isa=%u\n", g_mode.c_str(), s.ranks, s.devices, s.tokens,
         s.hidden, s.isa);
  fflush(stdout);
  _exit(0);
}
