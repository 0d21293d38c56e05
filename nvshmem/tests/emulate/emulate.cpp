// emulate.cpp - fibers, and the network between ranks.
#include "emulate.h"

#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <semaphore>
#include <thread>

namespace emulate {

thread_local Block *block = nullptr;

// ---- Fibers: registers that a call keeps go on the stack, and the stacks are changed ----

extern "C" void emulate_switch(void **from, void *to);
asm(R"(
.text
.globl emulate_switch
.type emulate_switch, @function
emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulate_switch, .-emulate_switch
)");

namespace {

constexpr size_t kStack = 32 * 1024;
constexpr int kPasses = 8; // of all lanes of a block, in its turn

[[noreturn]] void begin_lane() {
  Block *own = block;
  own->body();
  own->now->done = true;
  emulate_switch(&own->now->stack_pointer, own->scheduler);
  abort();
}

void make_lane(Lane *lane, unsigned number) {
  lane->index.x = number;
  lane->stack.resize(kStack);
  auto top = reinterpret_cast<uintptr_t>(lane->stack.data() + kStack) & ~uintptr_t{15};
  auto *words = reinterpret_cast<void **>(top) - 2;
  *words = reinterpret_cast<void *>(begin_lane); // as if it had been called: rsp is 8 off a multiple of 16
  words -= 6;
  lane->stack_pointer = words;
}

// One block runs at a time: a run is the same every time.
std::vector<std::unique_ptr<std::binary_semaphore>> turns; // one for each block
std::vector<bool> ended;
uint64_t time_ns;

void pass_on(size_t from) {
  for (size_t i = 1; i <= turns.size(); ++i) {
    const size_t next = (from + i) % turns.size();
    if (ended[next]) continue;
    turns[next]->release();
    return;
  }
}

void run_block(Block *own, size_t number) {
  block = own;
  for (unsigned i = 0; i < own->lanes.size(); ++i) make_lane(&own->lanes[i], i);
  for (bool open = true; open;) {
    turns[number]->acquire();
    for (int pass = 0; pass < kPasses && open; ++pass) {
      open = false;
      for (Lane &lane : own->lanes) {
        if (lane.done) continue;
        open = true;
        own->now = &lane;
        emulate_switch(&own->scheduler, lane.stack_pointer);
      }
    }
    ended[number] = !open;
    time_ns += 1000;
    carry_some();
    pass_on(number);
  }
}

}  // namespace

uint64_t now_ns() { return time_ns; }

void step() { emulate_switch(&block->now->stack_pointer, block->scheduler); }

const uint64_t *meet(uint64_t value, const char *what) {
  Lane &lane = *block->now;
  Warp &warp = block->warps[lane.index.x / 32];
  const unsigned at = lane.meetings % 2, all = 32 * (lane.meetings / 2 + 1);
  ++lane.meetings;
  if (warp.arrived[at] % 32 == 0) warp.place[at] = what;
  if (strcmp(static_cast<const char *>(warp.place[at]), what) != 0) {
    fprintf(stderr, "rank %d block %u thread %u: lanes of one warp meet in %s and %s\n", block->rank, block->index.x, lane.index.x,
            static_cast<const char *>(warp.place[at]), what);
    abort();
  }
  warp.values[at][lane.index.x % 32] = value;
  ++warp.arrived[at];
  while (warp.arrived[at] < all) step();
  return warp.values[at];
}

bool meet_block(bool value) {
  Lane &lane = *block->now;
  const unsigned at = lane.block_meetings % 2, size = static_cast<unsigned>(block->lanes.size()), all = size * (lane.block_meetings / 2 + 1);
  ++lane.block_meetings;
  if (block->arrived[at] % size == 0) block->any[at] = false;
  block->any[at] |= value;
  ++block->arrived[at];
  while (block->arrived[at] < all) step();
  return block->any[at];
}

void meet_some(int index, unsigned lanes) {
  Lane &lane = *block->now;
  const unsigned all = lanes * ++lane.some_meetings[index];
  ++block->some_arrived[index];
  while (block->some_arrived[index] < all) step();
}

void run(int ranks, const std::function<int(int)> &grid, int threads, const std::function<void(int)> &body) {
  std::vector<Block> blocks;
  for (int rank = 0; rank < ranks; ++rank)
    for (int i = 0; i < grid(rank); ++i) {
      Block one;
      one.lanes.resize(static_cast<size_t>(threads)), one.warps.resize(static_cast<size_t>(threads / 32));
      one.index.x = static_cast<unsigned>(i), one.grid.x = static_cast<unsigned>(grid(rank)), one.size.x = static_cast<unsigned>(threads);
      one.rank = rank, one.body = [&body, rank] { body(rank); };
      blocks.push_back(std::move(one));
    }
  std::vector<std::thread> running;
  turns.clear(), ended.assign(blocks.size(), false);
  for (size_t i = 0; i < blocks.size(); ++i) turns.push_back(std::make_unique<std::binary_semaphore>(0));
  for (size_t i = 0; i < blocks.size(); ++i) running.emplace_back(run_block, &blocks[i], i);
  turns[0]->release();
  for (std::thread &one : running) one.join();
}

// ---- Network ----

namespace {

struct Operation {
  const uint8_t *from;
  uint8_t *to;
  size_t bytes;
  uint64_t *word; // of a signal
  uint64_t value, fences;
};
struct Pipe { std::deque<Operation> waiting; uint64_t fences = 0; }; // toward a rank: of a queue pair, or of all

std::map<std::pair<uint64_t, uint64_t>, Pipe> pipes; // (from, to), queue pair
std::vector<uint8_t *> bases;
Network network;
std::mt19937_64 random_number;

void take_effect(const Operation &op) {
  if (op.bytes != 0) memcpy(op.to, op.from, op.bytes); // now, not when it was posted
  if (op.word != nullptr) __atomic_store_n(op.word, op.value, __ATOMIC_RELEASE);
}

// One operation of a random pipe; with fences alone a random one of those that no fence holds back.
bool carry_one() {
  std::vector<Pipe *> open;
  for (auto &[key, pipe] : pipes)
    if (!pipe.waiting.empty()) open.push_back(&pipe);
  if (open.empty()) return false;
  Pipe &pipe = *open[random_number() % open.size()];
  size_t free = 1;
  if (network.fences_alone)
    while (free < pipe.waiting.size() && pipe.waiting[free].fences == pipe.waiting[0].fences) ++free;
  const auto which = pipe.waiting.begin() + static_cast<ptrdiff_t>(random_number() % free);
  const Operation op = *which;
  pipe.waiting.erase(which);
  take_effect(op);
  return true;
}

}  // namespace

void put(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value, int pe) {
  const int me = block->rank;
  const ptrdiff_t there = bases[static_cast<size_t>(pe)] - bases[static_cast<size_t>(me)];
  Pipe &pipe = pipes[{static_cast<uint64_t>(me) << 32 | static_cast<uint64_t>(pe), network.fences_alone ? 0 : block->index.x + 1}];
  if (bytes != 0) pipe.waiting.push_back({static_cast<const uint8_t *>(from), static_cast<uint8_t *>(to) + there, bytes, nullptr, 0, pipe.fences});
  if (bytes != 0) ++pipe.fences;
  pipe.waiting.push_back({nullptr, nullptr, 0, reinterpret_cast<uint64_t *>(reinterpret_cast<uint8_t *>(word) + there), value, pipe.fences});
}

size_t rows_under_way() {
  size_t rows = 0;
  for (const auto &[key, pipe] : pipes)
    for (const Operation &op : pipe.waiting) rows += op.bytes > 16;
  return rows;
}

void carry_some() {
  for (uint64_t n = random_number() % 8; n > 0; --n) carry_one();
}

void start_network(const Network &how, const std::vector<uint8_t *> &blocks) {
  network = how, bases = blocks;
  random_number.seed(how.seed);
}
void stop_network() {
  while (carry_one()) {}
  pipes.clear();
}

}  // namespace emulate
