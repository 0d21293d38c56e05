// program.h - what the C++ examples share: joining a group, waiting for a GPU, and main().
#pragma once
#include <cstdint>
#include <cstdio>

#include "arrays.h"
#include "deepep.hpp"
#include "ranks.h"

// The group of `size` ranks that meet in a folder.
inline deepep_group_options meet(int rank, int size, const char *directory) {
  auto where = deepep::group_options();
  where.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  where.directory = directory;
  where.rank = rank;
  where.size = size;
  return where;
}

// On a GPU calls only launch: the program waits before it reads.
inline void wait_for_calls(deepep::Event &done) {
  done.record();
  done.wait();
}

// Runs one rank; an error of the library becomes its text and exit status 1.
template <one_rank_fn OneRank>
int guarded(int rank, int size, const char *directory) {
  try {
    return OneRank(rank, size, directory);
  } catch (const deepep::Error &error) {
    std::fprintf(stderr, "rank %d: %s: %s\n", rank, error.name(), error.what());
    return 1;
  }
}

// main() of an example of 4 ranks, or of `--ranks N`.
template <one_rank_fn OneRank>
int run_program(int argc, char **argv) {
  return run_ranks(argc, argv, 4, guarded<OneRank>);
}
