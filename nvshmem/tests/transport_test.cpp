// transport_test.cpp - libdeepep_nvshmem.so among processes of one machine with GPUs.
//   transport_test LIBRARY [--ranks N] [--hosts N] [--gpus N] [--plugin FILE] [--seconds N] [--lose] [--restart]
// hosts > 1: ranks are split evenly into hosts that only the plugin connects. --lose (with --plugin): at the end the
// last rank is cut off. --restart: ends NVSHMEM and starts it again. The last line has the number of processes that
// failed.
#include <cstring>

#include "ranks.h"

namespace {

bool parse(int argc, char **argv, Options *o) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--lose")
      o->lose = true;
    else if (name == "--restart")
      o->restart = true;
    else if (name[0] != '-' && o->library == nullptr)
      o->library = argv[i];
    else if (i + 1 == argc)
      return false;
    else if (name == "--plugin")
      o->plugin = argv[++i];
    else if (name == "--ranks")
      o->ranks = atoi(argv[++i]);
    else if (name == "--hosts")
      o->hosts = atoi(argv[++i]);
    else if (name == "--gpus")
      o->gpus = atoi(argv[++i]);
    else if (name == "--seconds")
      o->seconds = atoi(argv[++i]);
    else
      return false;
  }
  return o->library != nullptr && o->ranks >= 2 && o->ranks <= kMaxRanks && o->hosts >= 1 && o->ranks % o->hosts == 0 &&
         o->gpus >= 1 && o->seconds >= 1 && (o->plugin != nullptr || (o->hosts == 1 && !o->lose));
}

}  // namespace

int main(int argc, char **argv) {
  Options options;
  if (!parse(argc, argv, &options)) {
    fprintf(stderr,
            "usage: transport_test LIBRARY [--ranks 2..%d] [--hosts N] [--gpus N] [--plugin FILE] [--seconds N] "
            "[--lose] [--restart]\n"
            "hosts divide the ranks; more than one, and --lose, need --plugin\n",
            kMaxRanks);
    return 2;
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // a kernel load would wait for a kernel that waits for NVSHMEM's proxy
  const int failed = run_ranks(options);
  printf("transport_test: %d ranks on %d hosts: %s\n", options.ranks, options.hosts,
         failed == 0 ? "all passed" : "FAILED");
  return failed == 0 ? 0 : 1;
}
