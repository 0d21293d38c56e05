// library.h - a kernel library opened by its path, and one rank of a team on top of it.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "abi/kernels.h"

#define CHECK_CUDA(call)                                                                         \
  do {                                                                                           \
    const cudaError_t error_ = (call);                                                           \
    if (error_ != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      _exit(3);                                                                                  \
    }                                                                                            \
  } while (0)

extern void *g_library;

// Calls dk_NAME with a params struct; anything but `allowed` or success ends the program.
template <class P>
int32_t call_library(const char *name, P &params) {
  using Function = int32_t (*)(P *);
  auto function = reinterpret_cast<Function>(dlsym(g_library, name));
  if (function == nullptr) {
    fprintf(stderr, "no %s in the library\n", name);
    _exit(3);
  }
  params.size = sizeof params;
  return function(&params);
}
#define DK(name, params)                                                                               \
  do {                                                                                                 \
    const int32_t code_ = call_library("dk_" #name, params);                                           \
    if (code_ != DK_OK) {                                                                              \
      fprintf(stderr, "%s:%d: dk_" #name " returned %d, device error %d\n", __FILE__, __LINE__, code_, \
              (params).device_error);                                                                  \
      _exit(3);                                                                                        \
    }                                                                                                  \
  } while (0)

constexpr int kMaxBenchRanks = 64, kBenchSamples = 1024;

struct Shape {
  int ranks = 4, nodes = 1, devices = 1, tokens = 4096, hidden = 7168, topk = 8, experts = 256, iterations = 30,
      max_tokens = 128;
  uint32_t isa = 0;
  uint64_t nvl_bytes = 512ull << 20, rdma_bytes = 0;
  bool share_by_descriptor = true, keep_stats = true, copies = false, shrink = false;
  double zipf = 0, timeout_s = 5;
  const char *plugin = nullptr;  // NVSHMEM's test transport, which joins the nodes

  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
};

// Ranks of several nodes are processes, which share this page; of one node threads.
struct SharedPage {
  pthread_barrier_t barrier;
  double samples[kMaxBenchRanks];  // [rank]
  double many[kMaxBenchRanks][kBenchSamples];
  uint8_t transport_id[DK_TRANSPORT_ID_BYTES];
};

struct World {
  Shape shape;
  SharedPage *shared;
  std::vector<int> descriptors;  // [rank] of the block now being shared
  std::vector<std::vector<uint8_t>> blobs;

  double slowest() const {
    double most = shared->samples[0];
    for (int r = 1; r < shape.ranks; ++r) most = shared->samples[r] > most ? shared->samples[r] : most;
    return most;
  }
};

struct Rank {
  World *world;
  int rank, device_ordinal;
  uint64_t device, block, team, stream, status_device, stats_device;
  dk_block_sizes_params sizes;
  std::vector<uint64_t> peers;
  dk_status *status;
  dk_stats_page *stats;
  uint64_t calls = 0;
  uint64_t segment = 0, segment_bytes = 0, transport = 0;
  std::vector<uint64_t> peer_segments;

  void meet() { pthread_barrier_wait(&world->shared->barrier); }
  uint64_t nvl_offset() const { return sizes.control_bytes + sizes.wire_bytes; }
  uint64_t rdma_offset() const { return nvl_offset() + sizes.nvl_bytes; }
  uint64_t segment_offset() const { return (rdma_offset() + sizes.rdma_bytes + 4095) / 4096 * 4096; }
  std::vector<uint64_t> allocate_shared(uint64_t bytes);
  std::vector<uint64_t> allocate_in_heap(uint64_t bytes);
  void open_transport(uint64_t bytes);
  void open(World *w, int r);
  void register_segment(uint64_t bytes);
  template <class P>
  void header(P &p, int num_sms = 0) {
    p.team = team;
    p.stream = stream;
    p.call = ++calls;
    p.timeout_ns = world->shape.timeout_ns();
    p.num_sms = num_sms;
  }
  void barrier() {
    dk_barrier_params p{};
    header(p);
    DK(barrier, p);
  }
  void sync() {
    CHECK_CUDA(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream)));
    if (status->sticky != 0) {
      const dk_failure &f = status->failure;
      fprintf(
          stderr,
          "rank %d failed: code %u op %u phase %u peer %d field %u call %llu expected %lld seen %lld waited %llu ns\n",
          rank, f.code, f.op, f.phase, f.peer, f.field, (unsigned long long)f.call, (long long)f.expected,
          (long long)f.seen, (unsigned long long)f.waited_ns);
      _exit(4);
    }
  }
};
