// bench_ops.cu - checks and times the operations of a CUDA kernel library, one thread a rank, beside an all-pairs push
// measured in the same run. Several ranks may share a GPU (checks only: they then share its SMs). With nodes=N the
// ranks are processes on N nodes, for libdeepep_nvshmem.so.
//
//   nvcc -std=c++17 -O2 -arch=sm_90 -Ikernels -Invshmem -o build/bin/bench_ops bench/cuda/*.cu
//   bench_ops LIBRARY [ranks=4] [devices=4] [tokens=4096] [hidden=7168] [topk=8] [experts=256] [sms=16,20,24]
//             [iterations=30] [isa=0] [nvl_mb=512] [rdma_mb=84] [nodes=1]
//             [mode=check|normalcheck|llcheck|normal|routed|sweep|ll|llsweep|lltimeline|host|overlap|times|all|nodes|nic]
//             [max_tokens=128] [zipf=0] [local=0] [stats=1] [copies=0] [shrink=0] [plugin=FILE] [timeout_s=5]
//
// timeout_s: how long a rank waits for the others; more of it under compute-sanitizer.
//
// copies=1: rows of low-latency dispatch's send halves cross by copy engines (DK_TEAM_LL_COPY).
//
// mode=nodes, nodes=2: normal mode across nodes; mode=ll, lltimeline, llcheck and normalcheck work there too. Each
// process needs libnvshmem_host.so.3 in LD_LIBRARY_PATH. Of a library built with -DDEEPEP_TIMELINE it also says where
// warps spend their time, by role.
//
// mode=nic, nodes=2: normal mode and low latency beside what the rate and the latency of DEEPEP_TESTTRANSPORT=nic:...
// allow. plugin=FILE: each node is a host of its own, which only NVSHMEM's test transport joins to the others.
//
// mode=sweep: lines of CSV for pictures, normal mode with tokens up to tokens=N.
//
// Logical bytes of a dispatch: rows that arrive at any rank, self included, times the bytes of a row. Times are medians
// and 99th percentiles of the maximum over ranks, by events around the call after a barrier kernel; an event pair
// around nothing measures about 3 us.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

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
  if (g_mode == "nodes") time_nodes(rank, g_sms);
  if (g_mode == "nic") time_nic(rank, g_sms);
  if (g_mode == "overlap") time_overlap(rank);
  if (g_mode == "ll" || g_mode == "times" || g_mode == "all") time_low_latency(rank);
  rank.meet();
  return nullptr;
}

bool is_low_latency_mode() { return g_mode == "ll" || g_mode == "llcheck" || g_mode == "lltimeline"; }
int tokens_of_mode() { return is_low_latency_mode() ? g_world.shape.max_tokens : g_world.shape.tokens; }

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
    else if (name == "nodes")
      s.nodes = number;
    else if (name == "rdma_mb")
      s.rdma_bytes = static_cast<uint64_t>(number * (1 << 20));
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
    else if (name == "timeout_s")
      s.timeout_s = number;
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
    else if (name == "copies")
      s.copies = number != 0;
    else if (name == "shrink")
      s.shrink = number != 0;
    else if (name == "plugin")
      s.plugin = argv[i] + at + 1;
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

void make_shared_page() {
  void *page = mmap(nullptr, sizeof(SharedPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    perror("mmap");
    exit(2);
  }
  g_world.shared = static_cast<SharedPage *>(page);
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&g_world.shared->barrier, &attributes, g_world.shape.ranks);
}

void open_library(const char *path) {
  g_library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (g_library != nullptr) return;
  fprintf(stderr, "%s\n", dlerror());
  exit(2);
}

// NVSHMEM takes processes with different host names for different hosts, and finds the plugin by its soname.
void enter_node(int node) {
  const Shape &s = g_world.shape;
  if (s.plugin == nullptr) return;
  const std::string name = "bench-node" + std::to_string(node);
  if (unshare(CLONE_NEWUTS) != 0 || sethostname(name.c_str(), name.size()) != 0) {
    if (s.nodes != s.ranks) {
      fprintf(stderr, "no host name of its own: unshare(CLONE_NEWUTS) and sethostname need CAP_SYS_ADMIN\n");
      _exit(2);
    }
    setenv("NVSHMEM_DISABLE_P2P", "1", 1);  // has the effect of a host for each rank
  }
  setenv("NVSHMEM_REMOTE_TRANSPORT", "ibdevx", 1);
  if (dlopen(s.plugin, RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
  fprintf(stderr, "%s\n", dlerror());
  _exit(2);
}

// A process for each rank, forked before CUDA is used. If one fails, the others are ended: they would wait for it.
[[noreturn]] void run_processes(const char *path) {
  std::vector<pid_t> pids;
  for (int r = 0; r < g_world.shape.ranks; ++r) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
      enter_node(r / (g_world.shape.ranks / g_world.shape.nodes));
      open_library(path);
      run_rank(reinterpret_cast<void *>(static_cast<intptr_t>(r)));
      fflush(stdout);
      _exit(0);
    }
    pids.push_back(pid);
  }
  int failed = 0;
  for (size_t left = pids.size(); left > 0; --left) {
    int how = 0;
    const pid_t ended = wait(&how);
    if (WIFEXITED(how) && WEXITSTATUS(how) == 0) continue;
    if (failed++ == 0)
      for (const pid_t pid : pids)
        if (pid != ended) kill(pid, SIGTERM);
  }
  const Shape &s = g_world.shape;
  printf("%s: %s ranks=%d nodes=%d devices=%d tokens=%d hidden=%d\n", failed == 0 ? "done" : "FAILED", g_mode.c_str(),
         s.ranks, s.nodes, s.devices, tokens_of_mode(), s.hidden);
  exit(failed == 0 ? 0 : 4);
}

// The library is asked in a process of its own: one that has used CUDA cannot fork.
void make_room_for_low_latency(const char *path) {
  Shape &s = g_world.shape;
  int ends[2];
  if (pipe(ends) != 0) exit(2);
  const pid_t pid = fork();
  if (pid == 0) {
    open_library(path);
    dk_ll_layout_params layout{};
    layout.num_ranks = s.ranks;
    layout.num_max_tokens = s.max_tokens;
    layout.hidden = s.hidden;
    layout.num_experts = s.experts;
    layout.num_nvl_peers = s.ranks / s.nodes;
    DK(ll_layout, layout);
    _exit(write(ends[1], &layout.rdma_bytes, sizeof layout.rdma_bytes) == sizeof layout.rdma_bytes ? 0 : 2);
  }
  close(ends[1]);
  uint64_t bytes = 0;
  if (read(ends[0], &bytes, sizeof bytes) != sizeof bytes) exit(2);
  close(ends[0]);
  waitpid(pid, nullptr, 0);
  s.rdma_bytes = std::max(s.rdma_bytes, bytes);
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
  parse(argc, argv);
  Shape &s = g_world.shape;
  if (s.ranks < 1 || s.ranks > kMaxBenchRanks || s.nodes < 1 || s.ranks % s.nodes != 0 ||
      (s.nodes > 1 && g_mode != "nodes" && g_mode != "nic" && g_mode != "normalcheck" && !is_low_latency_mode()) ||
      (s.nodes == 1 && (g_mode == "nodes" || g_mode == "nic" || s.plugin != nullptr))) {
    fprintf(stderr,
            "ranks: 1 to %d, a multiple of nodes; nodes=N is for mode=nodes, nic, normalcheck, ll, llcheck and "
            "lltimeline\n",
            kMaxBenchRanks);
    return 2;
  }
  make_shared_page();
  if (s.nodes > 1) {
    if (s.rdma_bytes == 0) s.rdma_bytes = 84u << 20;  // V1's hint for 20 SMs and BF16 rows of 7168
    if (g_mode == "nic" || is_low_latency_mode()) make_room_for_low_latency(argv[1]);
    run_processes(argv[1]);
  }
  open_library(argv[1]);
  dk_ll_layout_params layout{};
  layout.num_ranks = s.ranks;
  layout.num_max_tokens = s.max_tokens;
  layout.hidden = s.hidden;
  layout.num_experts = s.experts;
  if (s.nodes == 1 && g_mode != "normal" && g_mode != "normalcheck" && g_mode != "routed" && g_mode != "sweep" &&
      s.hidden % 128 == 0) {
    DK(ll_layout, layout);
    s.rdma_bytes = layout.rdma_bytes;
  }
  g_world.descriptors.resize(s.ranks);
  g_world.blobs.resize(s.ranks);
  std::vector<pthread_t> threads(s.ranks);
  for (int r = 0; r < s.ranks; ++r)
    pthread_create(&threads[r], nullptr, run_rank, reinterpret_cast<void *>(static_cast<intptr_t>(r)));
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  printf("done: %s ranks=%d devices=%d tokens=%d hidden=%d isa=%u\n", g_mode.c_str(), s.ranks, s.devices,
         tokens_of_mode(), s.hidden, s.isa);
  fflush(stdout);
  _exit(0);
}
