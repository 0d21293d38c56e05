// ranks.h - the processes of a test: their options, shared page and functions, and how they fail.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "abi/kernels.h"
#include "testtransport/testtransport.h"

struct Options {
  const char *library = nullptr, *plugin = nullptr;  // plugin: of the transport to ranks of other hosts
  int ranks = 2, hosts = 1, gpus = 1, seconds = 20;
  bool lose = false, restart = false;
};

constexpr int kMaxRanks = 16;
constexpr int kQueues = 4;

struct SharedPage {  // shared by the processes of a test
  std::atomic<int> arrived, round, failed;
  uint8_t id[DK_TRANSPORT_ID_BYTES];
};

// The functions under test, found by dlsym.
struct Functions {
  int32_t (*info)(dk_info_params *);
  int32_t (*device_open)(dk_device_open_params *);
  int32_t (*device_close)(dk_device_close_params *);
  int32_t (*unique_id)(dk_transport_unique_id_params *);
  int32_t (*attach)(dk_transport_attach_params *);
  int32_t (*detach)(dk_transport_detach_params *);
  int32_t (*alloc)(dk_transport_alloc_params *);
  int32_t (*free)(dk_transport_free_params *);
  int32_t (*open)(dk_transport_open_params *);
  int32_t (*close)(dk_transport_close_params *);
  int32_t (*put)(dk_transport_put_params *);
  int32_t (*quiet)(dk_transport_quiet_params *);
  int32_t (*query)(dk_transport_query_params *);
  int32_t (*lose)(dk_transport_lose_params *);
};

struct Rank {
  const Options *options;
  SharedPage *page;
  int index = 0, host = 0;
  Functions call{};
  int (*count)(int, testtransport_counts *) = nullptr;  // of the plugin
  int (*drop)(int) = nullptr;
  uint64_t device = 0, attachment = 0, mem = 0, bytes = 0, transport = 0;
  uint8_t *block = nullptr;
  std::vector<uint64_t> reach;
  std::vector<int32_t> peers;
  cudaStream_t stream = nullptr;  // of operations
  cudaStream_t looks = nullptr;   // of copies that look at memory

  int ranks() const { return options->ranks; }
  int host_of(int rank) const { return rank / (options->ranks / options->hosts); }
  void meet();  // a barrier of all ranks
};

template <class P>
P make_params() {
  P p{};
  p.size = sizeof p;
  return p;
}

[[noreturn]] void fail(const Rank &me, const char *format, ...) __attribute__((format(printf, 2, 3)));
double now_ms();
void check(const Rank &me, cudaError_t error, const char *what);
void must(const Rank &me, int32_t code, const char *what, const char *reason = "");

struct Case {
  const char *name;
  std::function<void(Rank &)> run;
};
std::vector<Case> cases_of(const Options &options);

// Runs the cases in options.ranks processes; returns the number of failures and prints a line for each case.
int run_ranks(const Options &options);
