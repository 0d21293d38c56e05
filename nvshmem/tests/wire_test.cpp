// wire_test.cpp - the plugin's queues over plain memory, with stand-ins for CUDA that run at once on the host: checks
// the order in which operations take effect. Last line: "N passed, N failed".
#include "testtransport/wire.h"

#include <cstdio>
#include <cstring>
#include <set>

using namespace testtransport;

static std::vector<size_t> pieces;  // sizes of copies, in order

extern "C" {
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  memcpy(to, from, bytes);
  pieces.push_back(bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "no error"; }
}

namespace testtransport {
static std::vector<uint64_t> seen;  // values of atomics, in the order of their effect
cudaError_t load_wire_kernels() { return cudaSuccess; }
cudaError_t enqueue_atomic(const Work &work, cudaStream_t) {
  seen.push_back(work.value);
  return cudaSuccess;
}
}  // namespace testtransport

namespace {

int failures = 0;
#define EXPECT(what)                                                                     \
  do {                                                                                   \
    if (!(what)) printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #what), good = false; \
  } while (0)

Work atomic(uint64_t value) {
  Work work;
  work.what = What::kAtomic;
  work.atomic = Atomic::kAdd;
  work.bytes = 8;
  work.value = value;
  return work;
}

Settings late(uint64_t seed, int queues = 4) { return Settings{seed, 1000000000ull, queues}; }

// Posts groups of `size` values with a fence between groups, then quiet. Returns the order in which they took effect.
std::vector<uint64_t> effects(const Settings &settings, int pe, int groups, int size) {
  seen.clear();
  Wire wire(0, 3, settings);
  for (int group = 0; group < groups; ++group) {
    if (group != 0) wire.fence(pe);
    for (int i = 0; i < size; ++i) wire.post(pe, atomic(static_cast<uint64_t>(group * size + i)));
  }
  wire.quiet(pe);
  return seen;
}

bool in_order(const std::vector<uint64_t> &values) {
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i] != i) return false;
  return true;
}

bool at_once_in_order(bool good = true) {
  EXPECT(in_order(effects(Settings{}, 1, 4, 8)));
  EXPECT(in_order(effects(late(5), 0, 1, 32)));     // toward its own PE without a fence
  EXPECT(in_order(effects(late(5, 1), 1, 1, 32)));  // one queue keeps its order
  return good;
}

bool fences_hold_and_nothing_else(bool good = true) {
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const std::vector<uint64_t> values = effects(late(seed), 1, 4, 8);
    EXPECT(values.size() == 32);
    for (size_t i = 0; i < values.size(); ++i) EXPECT(values[i] / 8 == i / 8);
    EXPECT(std::set<uint64_t>(values.begin(), values.end()).size() == 32);
    EXPECT(values == effects(late(seed), 1, 4, 8));  // equal seeds, equal order
    orders.insert(values);
  }
  EXPECT(orders.size() > 45 && orders.count({}) == 0);
  return good;
}

bool nothing_before_its_time(bool good = true) {
  seen.clear();
  Wire wire(0, 3, late(3));
  for (uint64_t i = 0; i < 8; ++i) {
    wire.post(1, atomic(i));
    wire.post(2, atomic(100 + i));
  }
  for (int i = 0; i < 20; ++i) wire.progress();
  EXPECT(seen.size() < 4);  // up to a second each
  wire.quiet(2);
  size_t second = 0;
  for (const uint64_t value : seen) second += value >= 100;
  EXPECT(second == 8 && seen.size() < 12);  // those of the other PE are still queued
  testtransport_counts counts{};
  EXPECT(wire.count(2, &counts) == 0 && counts.atomics == 8 && counts.quiets == 1 && counts.bytes == 64 &&
         counts.overtaken > 0);
  EXPECT(wire.count(3, &counts) != 0 && wire.count(-1, &counts) != 0);
  return good;
}

bool due_work_goes_by_itself(bool good = true) {
  seen.clear();
  Wire wire(0, 2, Settings{9, 1000, 4});  // a microsecond
  for (uint64_t i = 0; i < 16; ++i) wire.post(1, atomic(i));
  for (int i = 0; i < 1000000 && seen.size() < 16; ++i) wire.progress();
  EXPECT(seen.size() == 16);
  return good;
}

bool puts_come_in_pieces_last_one_first(bool good = true) {
  std::vector<char> from(5000), to(5000, 0);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7);
  Wire wire(0, 2, Settings{});
  Work put;
  put.target = to.data();
  put.source = from.data();
  put.bytes = from.size();
  pieces.clear();
  wire.post(1, put);
  EXPECT(to == from && pieces.size() == 3 && pieces[0] < pieces[1]);
  put.bytes = 100;
  pieces.clear();
  wire.post(1, put);
  EXPECT(pieces.size() == 1);
  return good;
}

bool a_lost_peer_takes_nothing(bool good = true) {
  seen.clear();
  Wire wire(0, 3, late(4));
  for (uint64_t i = 0; i < 6; ++i) wire.post(1, atomic(i));
  EXPECT(wire.lose(1) == 0 && wire.lose(0) != 0 && wire.lose(3) != 0);
  wire.post(1, atomic(7));
  wire.post(2, atomic(8));
  wire.quiet(1);
  wire.quiet(2);
  testtransport_counts counts{};
  EXPECT(seen == std::vector<uint64_t>{8} && wire.count(1, &counts) == 0 && counts.dropped == 7);
  return good;
}

bool settings_are_checked(bool good = true) {
  Settings s;
  EXPECT(parse_settings(nullptr, &s) && s.max_delay_ns == 0);
  EXPECT(parse_settings("7", &s) && s.seed == 7 && s.max_delay_ns == 0);
  EXPECT(parse_settings("7:300", &s) && s.max_delay_ns == 300000 && s.num_queues == 4);
  EXPECT(parse_settings("7:300:2", &s) && s.num_queues == 2);
  for (const char *wrong : {"x", "7:", "7:a", "7:1:0", "7:1:2:3", "-1", "7:1:2000", "7 "})
    EXPECT(!parse_settings(wrong, &s));
  return good;
}

}  // namespace

int main() {
  bool (*const tests[])(bool) = {at_once_in_order,        fences_hold_and_nothing_else,       nothing_before_its_time,
                                 due_work_goes_by_itself, puts_come_in_pieces_last_one_first, a_lost_peer_takes_nothing,
                                 settings_are_checked};
  int passed = 0;
  for (const auto test : tests) test(true) ? ++passed : ++failures;
  printf("%d passed, %d failed\n", passed, failures);
  return failures != 0;
}
