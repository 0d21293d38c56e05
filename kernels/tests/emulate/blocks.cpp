// blocks.cpp - turns of blocks, fibers for their lanes, warp and block operations, and shared memory.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <string>

#include "copies.h"

namespace emulate {

Block *block = nullptr;
bool at_random = false;
uint64_t together_ns = 20000000;

// ---- Fibers: a switch pushes the callee-saved registers and changes the stack pointer ----

extern "C" void emulate_switch(void **from, void *to);
asm(R"(
.text
.globl emulate_switch
.hidden emulate_switch
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

// Stacks of adjacent lanes lie a little more than a power of two apart, so that they do not share cache sets.
constexpr size_t kStack = 32 * 1024 + 320;
constexpr uint64_t kEndOfStack = 0x5ac4ed0f57ac4edull;
constexpr int kPolls = 2, kPasses = 16, kRounds = 8;  // of a lane in a turn; of a block; of a warp in a pass

std::mt19937_64 generator;

std::map<unsigned, std::vector<char *>> stack_pool;  // by lanes; of blocks that have ended

char *take_stacks(unsigned lanes) {
  std::vector<char *> &pool = stack_pool[lanes];
  if (!pool.empty()) {
    char *stacks = pool.back();
    pool.pop_back();
    return stacks;
  }
  void *memory =
      mmap(nullptr, lanes * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("emulate: stacks");
    abort();
  }
  return static_cast<char *>(memory);
}

[[noreturn]] void begin_lane() {
  Block *own = block;
  own->body();
  Lane *lane = own->now;
  end_copies(lane);
  own->warps[lane->index.x / 32].ready &= ~(1u << lane->index.x % 32);
  ++own->ended;
  emulate_switch(&lane->stack_pointer, own->scheduler);
  abort();
}

void make_lane(Block *own, unsigned number) {
  Lane &lane = own->lanes[number];
  lane.index.x = number;
  char *bottom = own->stacks + number * kStack;
  memcpy(bottom, &kEndOfStack, sizeof kEndOfStack);
  auto top = reinterpret_cast<uintptr_t>(bottom + kStack) & ~uintptr_t{15};
  auto *words = reinterpret_cast<void **>(top) - 2;
  *words = reinterpret_cast<void *>(begin_lane);  // as if it had been called: rsp is 8 off a multiple of 16
  lane.stack_pointer = words - 6;
}

// ---- Shared memory: thread-local variables of this library, swapped with the blocks ----

struct Range {
  uint8_t *at;
  size_t bytes;
};
std::vector<Range> fixed, dynamic;
Block *loaded = nullptr;

int find_own_variables(dl_phdr_info *info, size_t, void *) {
  bool here = false;
  const ElfW(Phdr) *own = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) &part = info->dlpi_phdr[i];
    const auto start = info->dlpi_addr + part.p_vaddr, code = reinterpret_cast<ElfW(Addr)>(&find_own_variables);
    here |= part.p_type == PT_LOAD && code >= start && code < start + part.p_memsz;
    if (part.p_type == PT_TLS) own = &part;
  }
  if (!here) return 0;
  if (own == nullptr) return 1;
  auto *at = static_cast<uint8_t *>(info->dlpi_tls_data), *end = at + own->p_memsz;
  for (const Range &array : dynamic) {  // sorted
    if (array.at > at) fixed.push_back({at, static_cast<size_t>(array.at - at)});
    at = array.at + array.bytes;
  }
  if (end > at) fixed.push_back({at, static_cast<size_t>(end - at)});
  return 1;
}

// Calls f(address, bytes) for all shared memory of a block with so much dynamic memory.
template <class F>
void each_range(size_t dynamic_bytes, F f) {
  for (const Range &range : fixed) f(range.at, range.bytes);
  for (const Range &range : dynamic) f(range.at, std::min(range.bytes, dynamic_bytes));
}

void load_shared(Block *own) {
  if (loaded == own) return;
  uint8_t *at;
  if (loaded != nullptr) {
    at = loaded->shared.data();
    each_range(loaded->shared_bytes, [&](uint8_t *range, size_t bytes) {
      memcpy(at, range, bytes);
      at += bytes;
    });
  }
  at = own->shared.data();
  each_range(own->shared_bytes, [&](uint8_t *range, size_t bytes) {
    memcpy(range, at, bytes);
    at += bytes;
  });
  loaded = own;
}

// ---- Turns ----

// Runs the lanes of a warp that can run. False: none could.
bool run_warp(Block *own, Warp *warp, unsigned first_lane, unsigned begin) {
  uint32_t open = warp->ready & ~warp->polled;
  if (open == 0) return false;
  for (int round = 0; round < kRounds && open != 0; ++round) {
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned lane = (i + begin) % 32;
      if (((warp->ready & ~warp->polled) >> lane & 1) == 0) continue;
      own->now = &own->lanes[first_lane + lane];
      emulate_switch(&own->scheduler, own->now->stack_pointer);
    }
    open = warp->ready & ~warp->polled;
  }
  return true;
}

void check_for_deadlock(const Block &own) {
  for (const Warp &warp : own.warps)
    if (warp.ready != 0) return;
  fprintf(stderr, "emulate: block %u of %s stands still:", own.index.x, own.name);
  for (size_t w = 0; w < own.warps.size(); ++w)
    for (int half = 0; half < 3; ++half) {
      const Meeting &meeting = own.warps[w].of[half];
      if (meeting.arrived != 0) fprintf(stderr, " warp %zu: lanes %08x in %s;", w, meeting.arrived, meeting.what);
    }
  for (int i = 0; i < 16; ++i)
    if (own.barriers[i].arrived != 0) fprintf(stderr, " barrier %d: %u lanes;", i, own.barriers[i].arrived);
  fprintf(stderr, " %u of %zu have ended\n", own.ended, own.lanes.size());
  abort();
}

}  // namespace

Block::Block(unsigned threads, size_t dynamic_bytes, std::function<void()> lane_body)
    : warps((threads + 31) / 32),
      lanes(threads),
      shared_bytes(dynamic_bytes),
      stacks(take_stacks(threads)),
      body(std::move(lane_body)) {
  if (fixed.empty()) dl_iterate_phdr(find_own_variables, nullptr);
  size.x = threads;
  for (unsigned i = 0; i < threads; ++i) {
    make_lane(this, i);
    warps[i / 32].ready |= 1u << i % 32;
  }
  size_t bytes = 0;
  each_range(shared_bytes, [&](uint8_t *, size_t some) { bytes += some; });
  shared.resize(bytes);
  uint64_t rubbish = generator();  // shared memory begins with what another block left there
  for (size_t at = 0; at < bytes; ++at, rubbish = rubbish * 6364136223846793005ull + 1)
    shared[at] = static_cast<uint8_t>(rubbish >> 56);
}
Block::~Block() {
  if (loaded == this) loaded = nullptr;
  for (size_t i = 0; i < lanes.size(); ++i)
    if (memcmp(stacks + i * kStack, &kEndOfStack, sizeof kEndOfStack) != 0) {
      fprintf(stderr, "emulate: the stack of a lane of %s is too small\n", name);
      abort();
    }
  stack_pool[size.x].push_back(stacks);
}

void set_seed(uint64_t seed) {
  generator.seed(seed);
  at_random = seed != 0;
}
uint64_t random_bits() { return generator(); }

void set_dynamic_shared(const std::vector<std::pair<void *, size_t>> &arrays) {
  for (const auto &[at, bytes] : arrays) dynamic.push_back({static_cast<uint8_t *>(at), bytes});
  std::sort(dynamic.begin(), dynamic.end(), [](const Range &a, const Range &b) { return a.at < b.at; });
}

bool run_turn(Block *own) {
  if (own->ended == own->lanes.size()) return false;
  load_shared(own);
  block = own;
  const uint64_t chance = at_random ? generator() : 0;
  ++own->turn;
  own->polls = at_random ? 1 + (chance >> 8 & 7) : kPolls;
  for (Warp &warp : own->warps) warp.polled = 0;
  check_for_deadlock(*own);
  bool any = true;
  const int passes = at_random ? 1 + static_cast<int>(chance >> 16 & (kPasses - 1)) : kPasses;
  for (int pass = 0; pass < passes && any; ++pass) {
    any = false;
    for (size_t w = 0; w < own->warps.size(); ++w)
      any |= run_warp(own, &own->warps[w], static_cast<unsigned>(32 * w), static_cast<unsigned>(chance & 31));
  }
  if (own->copying != 0) copy_some(own);
  block = nullptr;
  return own->ended < own->lanes.size();
}

void step() {
  Lane *lane = block->now;
  block->warps[lane->index.x / 32].polled |= 1u << lane->index.x % 32;
  emulate_switch(&lane->stack_pointer, block->scheduler);
}

uint64_t clock_ns() {
  Lane *lane = block->now;
  Warp &warp = block->warps[lane->index.x / 32];
  const uint32_t round = warp.of[0].round + 1;
  if (lane->clock_round != round) {
    lane->clock_round = round;
    lane->clock_looks = 0;
  }
  uint64_t now = now_ns();
  if (const uint32_t look = lane->clock_looks++; look < std::size(warp.clocks)) {
    auto &same = warp.clocks[look];
    if (same.round == round && now - same.time < together_ns)
      now = same.time;
    else {
      same.round = round;
      same.time = now;
    }
  }
  return lane->clock = std::max(now, lane->clock);
}

[[noreturn]] void fault(const char *what) {
  fprintf(stderr, "emulate: %s, block %u thread %u: %s\n", block->name, block->index.x, block->now->index.x, what);
  abort();
}

// ---- Warp and block operations ----

const uint64_t *meet(uint32_t mask, uint64_t value, const char *what) {
  Lane *lane = block->now;
  const uint32_t number = lane->index.x % 32, mine = 1u << number;
  Warp &warp = block->warps[lane->index.x / 32];
  if ((mask & mine) == 0) fault("a lane is not in its own mask");
  if (mask != 0xffffffffu && mask != 0xffffu && mask != 0xffff0000u) fault("a mask that is neither a warp nor a half");
  Meeting &meeting = warp.of[mask == 0xffffffffu ? 0 : mask == 0xffffu ? 1 : 2];
  if (meeting.arrived == 0) meeting.what = what;
  if (meeting.what != what && strcmp(meeting.what, what) != 0)
    fault((std::string("lanes of one warp meet in ") + meeting.what + " and " + what).c_str());
  uint64_t *values = meeting.values[meeting.round % 2];
  values[number] = value;
  meeting.arrived |= mine;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.round;
    warp.ready |= mask;
  } else {
    warp.ready &= ~mine;
    emulate_switch(&lane->stack_pointer, block->scheduler);
  }
  return values;
}

uint32_t meet_block(int number, unsigned lanes, uint32_t value) {
  Lane *lane = block->now;
  Barrier &barrier = block->barriers[number];
  uint32_t &result = barrier.results[barrier.round % 2];
  const uint32_t warp = lane->index.x / 32, mine = 1u << lane->index.x % 32;
  if (barrier.arrived == 0) result = 0;
  result |= value;
  barrier.waiting[warp] |= mine;
  if (++barrier.arrived == lanes) {
    for (size_t w = 0; w < block->warps.size(); ++w) block->warps[w].ready |= std::exchange(barrier.waiting[w], 0);
    barrier.arrived = 0;
    ++barrier.round;
  } else {
    block->warps[warp].ready &= ~mine;
    emulate_switch(&lane->stack_pointer, block->scheduler);
  }
  return result;
}

}  // namespace emulate
