// network.h - for tests of kernels across nodes: all ranks in one process, and between them a network that keeps only
// the order of a queue pair, or of fences. Time is counted in turns of blocks, so runs repeat exactly.
#pragma once
#include "emulate.h"

namespace emulate {

// A put with a signal, by a lane of the running rank.
void put(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value, int pe);

// Reads words of a rank, which lie there where `from` lies here. In order with puts as another put is.
void get(uint64_t *to, const uint64_t *from, size_t words, int pe);

struct Network {
  uint64_t seed;
  bool fences_alone;
  bool stores = false;  // puts take effect at once, as stores over NVLink do

  const char *keeps() const { return stores ? "all order" : fences_alone ? "order of fences" : "order of queue pairs"; }
};
void start_network(const Network &how, const std::vector<uint8_t *> &blocks);
uint8_t *const *stored_blocks();  // of all ranks; null where puts are not stores
// And tells ranks' views of nodes of it.
template <class Rank>
void start_network(const Network &how, std::vector<Rank> &ranks, const std::vector<uint8_t *> &blocks) {
  start_network(how, blocks);
  for (Rank &r : ranks) {
    r.internode.puts_are_stores = how.stores;
    r.internode.blocks = stored_blocks();
  }
}
void stop_network();                 // delivers everything first
bool puts_under_way();               // of the running rank, not delivered yet
size_t rows_under_way();             // puts of more than 16 bytes, not delivered yet
size_t puts_since(size_t at_least);  // puts of so many bytes and more, since the last call
// While a kernel runs: whether a rank goes on now, pauses, or has ended for ever. Called before each turn of a block.
enum class Life { runs, pauses, is_dead };
// on_put: of a put, also where its bytes go; null: it has none.
void watch(std::function<Life(int rank)> life,
           std::function<void(int from, int to, const void *word, const void *bytes)> on_put);
// Whether the network holds back a signal, put by that thread block, and what its queue pair has after it. Asked again
// and again. Network::fences_alone: what lies between the same fences may pass it.
void hold(std::function<bool(int from, int to, int block, const void *word, uint64_t value)> held);
// Runs body() in every lane of a grid of each rank, all ranks at once.
void run(int ranks, const std::function<int(int rank)> &grid, int threads, const std::function<void(int rank)> &body);

}  // namespace emulate
