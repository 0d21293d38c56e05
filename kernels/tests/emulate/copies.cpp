// copies.cpp - asynchronous copies: of four bytes to shared memory, and bulk copies (Hopper) with mbarriers.
#include "copies.h"

#include <deque>

namespace emulate {

struct Copies {
  struct Copy {
    uint8_t *to;
    const uint8_t *from;
    uint32_t bytes;
    uint64_t *barrier;            // of a load
    std::vector<uint8_t> read{};  // of a store: what it read, once it did
    bool has_read = false, done = false;
  };
  struct Groups {
    std::deque<std::vector<Copy>> committed;
    std::vector<Copy> open;
  };
  Groups words, stores;
  std::vector<Copy> loads;
};

Lane::Lane() = default;
Lane::~Lane() = default;

namespace {

// The content of an mbarrier's word.
struct Counter {
  uint8_t phase, arrivals, pending, mark;
  int32_t bytes;  // still to come
};
static_assert(sizeof(Counter) == 8, "one word");
constexpr uint8_t kMark = 0x6d;

Counter read_counter(const uint64_t *word) {
  const auto counter = from_bits<Counter>(*word);
  if (counter.mark != kMark) fault("a barrier that was not initialized");
  return counter;
}
void write_counter(uint64_t *word, Counter counter) {
  if (counter.pending == 0 && counter.bytes == 0) {
    counter.phase ^= 1;
    counter.pending = counter.arrivals;
  }
  *word = bits(counter);
}

Copies &copies_of(Lane *lane) {
  if (!lane->copies) {
    lane->copies = std::make_unique<Copies>();
    ++block->copying;
  }
  return *lane->copies;
}
void check_bulk(const void *a, const void *b, uint32_t bytes) {
  if (bits(a) % 16 != 0 || bits(b) % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    fault("a bulk copy that is not of multiples of 16 bytes");
}

void finish_load(const Copies::Copy &copy) {
  memcpy(copy.to, copy.from, copy.bytes);
  Counter counter = read_counter(copy.barrier);
  counter.bytes -= static_cast<int32_t>(copy.bytes);
  write_counter(copy.barrier, counter);
}
void read_source(Copies::Copy *copy) {
  if (copy->has_read) return;
  copy->read.assign(copy->from, copy->from + copy->bytes);
  copy->has_read = true;
}
void finish_store(Copies::Copy *copy) {
  if (copy->done) return;
  read_source(copy);
  memcpy(copy->to, copy->read.data(), copy->bytes);
  copy->done = true;
}
bool chance() { return (random_bits() & 1) != 0; }

void copy_some_of(Copies *copies) {
  for (auto at = copies->loads.begin(); at != copies->loads.end();) {
    if (!chance()) {
      ++at;
      continue;
    }
    finish_load(*at);
    at = copies->loads.erase(at);
  }
  auto hurry = [](std::vector<Copies::Copy> &group) {
    for (Copies::Copy &copy : group)
      if (chance()) copy.has_read ? finish_store(&copy) : read_source(&copy);
  };
  for (auto &group : copies->stores.committed) hurry(group);
  hurry(copies->stores.open);
}

}  // namespace

void copy_word(void *shared, const void *global) {
  copies_of(block->now)
      .words.open.push_back({static_cast<uint8_t *>(shared), static_cast<const uint8_t *>(global), 4, nullptr});
}
void commit_words() {
  Copies::Groups &words = copies_of(block->now).words;
  words.committed.push_back(std::move(words.open));
  words.open.clear();
}
void wait_for_words(int pending) {
  auto &groups = copies_of(block->now).words.committed;
  for (; groups.size() > static_cast<size_t>(pending); groups.pop_front())
    for (const Copies::Copy &copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
}

void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
  check_bulk(shared, global, bytes);
  copies_of(block->now)
      .loads.push_back({static_cast<uint8_t *>(shared), static_cast<const uint8_t *>(global), bytes, barrier});
}
void bulk_store(void *global, const void *shared, uint32_t bytes) {
  check_bulk(global, shared, bytes);
  copies_of(block->now)
      .stores.open.push_back({static_cast<uint8_t *>(global), static_cast<const uint8_t *>(shared), bytes, nullptr});
}
void commit_bulk() {
  Copies::Groups &stores = copies_of(block->now).stores;
  stores.committed.push_back(std::move(stores.open));
  stores.open.clear();
}
void wait_for_bulk(int pending, bool read_alone) {
  auto &groups = copies_of(block->now).stores.committed;
  const size_t complete =
      groups.size() > static_cast<size_t>(pending) ? groups.size() - static_cast<size_t>(pending) : 0;
  for (size_t i = 0; i < complete; ++i)
    for (Copies::Copy &copy : groups[i]) read_alone ? read_source(&copy) : finish_store(&copy);
  while (!groups.empty()) {
    for (const Copies::Copy &copy : groups.front())
      if (!copy.done) return;
    groups.pop_front();
  }
}

void init_barrier(uint64_t *word, uint32_t arrivals) {
  *word = bits(Counter{0, static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), kMark, 0});
}
void arrive_expecting(uint64_t *word, uint32_t bytes) {
  Counter counter = read_counter(word);
  if (counter.pending == 0) fault("more arrive at a barrier than it is for");
  --counter.pending;
  counter.bytes += static_cast<int32_t>(bytes);
  write_counter(word, counter);
}
bool try_barrier(const uint64_t *word, uint32_t parity) {
  if (read_counter(word).phase != parity) return true;
  step();
  return false;
}

void copy_some(Block *own) {
  for (Lane &lane : own->lanes)
    if (lane.copies) copy_some_of(lane.copies.get());
}
void end_copies(Lane *lane) {
  Copies *copies = lane->copies.get();
  if (copies == nullptr) return;
  bool words = !copies->words.open.empty();
  for (const auto &group : copies->words.committed) words |= !group.empty();
  if (words || !copies->loads.empty() || !copies->stores.open.empty()) fault("a lane ends while it copies");
  for (auto &group : copies->stores.committed)
    for (Copies::Copy &copy : group) {
      if (!copy.has_read) fault("a lane ends while a bulk copy reads shared memory");
      finish_store(&copy);
    }
}

}  // namespace emulate
