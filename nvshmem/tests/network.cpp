// network.cpp - runs blocks and the network between ranks in turns.
#include "network.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>

namespace emulate {

namespace {

struct Operation {
  const uint8_t *from;
  uint8_t *to;
  size_t bytes;
  uint64_t *word;  // of a signal
  uint64_t value, fences;
  int sender, receiver, block;
};
struct Pipe {  // operations toward a rank, of one queue pair or of all
  std::deque<Operation> waiting;
  uint64_t fences = 0;
};

std::map<std::pair<uint64_t, uint64_t>, Pipe> pipes;  // (from, to), queue pair
std::vector<uint8_t *> bases, stored;
Network network;
std::mt19937_64 random_number;
std::vector<size_t> put_sizes;
std::function<Life(int rank)> life_of;
std::function<void(int from, int to, const void *word, const void *bytes)> seen_put;
std::function<bool(int from, int to, int block, const void *word, uint64_t value)> is_held;

bool may_go(const Operation &op) {
  return !is_held || op.word == nullptr || !is_held(op.sender, op.receiver, op.block, op.word, op.value);
}

void take_effect(const Operation &op) {
  if (op.bytes != 0) memcpy(op.to, op.from, op.bytes);  // the source is read at delivery
  if (op.word != nullptr) __atomic_store_n(op.word, op.value, __ATOMIC_RELEASE);
}

// Delivers an operation of a random pipe: the oldest; if only fences order them, a random one before the next fence.
bool carry_one() {
  std::vector<Pipe *> open;
  for (auto &[key, pipe] : pipes)
    if (!pipe.waiting.empty() && may_go(pipe.waiting.front())) open.push_back(&pipe);
  if (open.empty()) return false;
  Pipe &pipe = *open[random_number() % open.size()];
  size_t free = 1;
  if (network.fences_alone)
    while (free < pipe.waiting.size() && pipe.waiting[free].fences == pipe.waiting[0].fences) ++free;
  const auto which = pipe.waiting.begin() + static_cast<ptrdiff_t>(random_number() % free);
  if (!may_go(*which)) return true;
  const Operation op = *which;
  pipe.waiting.erase(which);
  take_effect(op);
  return true;
}

// What lies at a rank where `address` lies here.
void *at_rank(const void *address, int pe) {
  const ptrdiff_t there = bases[static_cast<size_t>(pe)] - bases[static_cast<size_t>(block->rank)];
  return const_cast<uint8_t *>(static_cast<const uint8_t *>(address)) + there;
}

}  // namespace

void put(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value, int pe) {
  const int me = block->rank;
  if (seen_put) seen_put(me, pe, word, bytes == 0 ? nullptr : to);
  auto *there = static_cast<uint8_t *>(at_rank(to, pe));
  auto *word_there = static_cast<uint64_t *>(at_rank(word, pe));
  if (network.stores) {
    put_sizes.push_back(bytes);
    take_effect({static_cast<const uint8_t *>(from), there, bytes, word_there, value, 0, me, pe, 0});
    return;
  }
  Pipe &pipe = pipes[{static_cast<uint64_t>(me) << 32 | static_cast<uint64_t>(pe),
                      network.fences_alone ? 0 : block->index.x + 1}];
  // In two parts, of whole words.
  const size_t words = bytes / 8, first = words > 1 ? random_number() % words * 8 : 0;
  for (const auto &[at, end] : {std::pair<size_t, size_t>{0, first}, {first, bytes}})
    if (end != at)
      pipe.waiting.push_back({static_cast<const uint8_t *>(from) + at, there + at, end - at, nullptr, 0, pipe.fences,
                              me, pe, static_cast<int>(block->index.x)});
  if (bytes != 0) ++pipe.fences;
  put_sizes.push_back(bytes);
  pipe.waiting.push_back(
      {nullptr, nullptr, 0, word_there, value, pipe.fences, me, pe, static_cast<int>(block->index.x)});
}

void get(uint64_t *to, const uint64_t *from, size_t words, int pe) {
  const int me = block->rank;
  Pipe &pipe = pipes[{static_cast<uint64_t>(me) << 32 | static_cast<uint64_t>(pe),
                      network.fences_alone ? 0 : block->index.x + 1}];
  pipe.waiting.push_back({static_cast<const uint8_t *>(at_rank(from, pe)), reinterpret_cast<uint8_t *>(to), words * 8,
                          nullptr, 0, pipe.fences, me, pe, static_cast<int>(block->index.x)});
}

size_t puts_since(size_t at_least) {
  const auto count = std::count_if(put_sizes.begin(), put_sizes.end(), [&](size_t bytes) { return bytes >= at_least; });
  put_sizes.clear();
  return static_cast<size_t>(count);
}
bool puts_under_way() {
  for (const auto &[key, pipe] : pipes)
    if (static_cast<int>(key.first >> 32) == block->rank && !pipe.waiting.empty()) return true;
  return false;
}
size_t rows_under_way() {
  size_t rows = 0;
  for (const auto &[key, pipe] : pipes)
    for (const Operation &op : pipe.waiting) rows += op.bytes > 16;
  return rows;
}

// ---- Turns ----

namespace {
uint64_t time_ns;
}
uint64_t now_ns() { return time_ns; }

void run(int ranks, const std::function<int(int)> &grid, int threads, const std::function<void(int)> &body) {
  std::vector<std::unique_ptr<Block>> blocks;
  together_ns = 20000;  // emulated time passes slowly
  for (int rank = 0; rank < ranks; ++rank)
    for (int i = 0; i < grid(rank); ++i) {
      auto one = std::make_unique<Block>(static_cast<unsigned>(threads), 0, [&body, rank] { body(rank); });
      one->index.x = static_cast<unsigned>(i);
      one->grid.x = static_cast<unsigned>(grid(rank));
      one->rank = rank;
      one->name = "a kernel across nodes";
      blocks.push_back(std::move(one));
    }
  for (bool open = true; open;) {
    open = false;
    for (const auto &one : blocks) {
      const Life life = life_of ? life_of(one->rank) : Life::runs;
      if (life == Life::is_dead) continue;
      if (life == Life::runs && !run_turn(one.get())) continue;
      open = true;
      time_ns += 1000;
      for (uint64_t n = random_number() % 8; n > 0; --n) carry_one();
    }
  }
}

void watch(std::function<Life(int rank)> life,
           std::function<void(int from, int to, const void *word, const void *bytes)> on_put) {
  life_of = std::move(life);
  seen_put = std::move(on_put);
}
void hold(std::function<bool(int from, int to, int block, const void *word, uint64_t value)> held) {
  is_held = std::move(held);
}

uint8_t *const *stored_blocks() { return stored.data(); }
void start_network(const Network &how, const std::vector<uint8_t *> &blocks) {
  network = how;
  bases = blocks;
  stored = how.stores ? blocks : std::vector<uint8_t *>(blocks.size());
  random_number.seed(how.seed);
}
void stop_network() {
  is_held = nullptr;
  while (carry_one()) {
  }
  pipes.clear();
}

}  // namespace emulate
