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
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMalloc(void **at, size_t bytes) {
  *at = aligned_alloc(64, (bytes + 63) / 64 * 64);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned) { return cudaMalloc(at, bytes); }
cudaError_t cudaFree(void *at) {
  free(at);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *at) { return cudaFree(at); }
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t) {
  memset(at, value, bytes);
  return cudaSuccess;
}
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

// In place of the worker: does what the host has posted, at once. worker_test.cpp has the worker itself.
static std::vector<Post> done_posts;
static int launches = 0;
static cudaError_t worker_error = cudaSuccess;
cudaError_t load_worker() { return cudaSuccess; }
cudaError_t measure_tick(uint64_t *ns, cudaStream_t) {
  *ns = 32;
  return cudaSuccess;
}
cudaError_t launch_worker(const WorkerParams &p, cudaStream_t) {
  ++launches;
  for (int q = 0; q < p.state->num_queues; q += 2) {
    uint64_t &head = p.state->heads[q];
    for (const Post *slot; (slot = p.state->rings[q] + head % kRingSlots)->ready == head / kRingSlots + 1; ++head) {
      done_posts.push_back(*slot);
      memcpy(reinterpret_cast<void *>(slot->target), reinterpret_cast<const void *>(slot->source), slot->bytes);
    }
    p.control->taken[q] = p.control->done[q] = head;
  }
  p.control->running = 0;
  return worker_error;
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

Settings nic_of(const char *text) {
  Settings s;
  if (!parse_settings(text, &s)) printf("%s was refused\n", text);
  return s;
}

bool a_port_has_a_rate_a_post_rate_and_a_latency(bool good = true) {
  const NicTiming t = nic_of("nic:2:50:4").timing;  // 20 ps a byte, 250 ns an operation
  NicPort port;
  const Passage idle = port.pass(t, 7000000, 50000, true, 1);
  EXPECT(idle.begin == 7000000 && idle.end == 8000000 && idle.due == 10000000);
  const Passage behind = port.pass(t, 7500000, 50000, true, 1);
  EXPECT(behind.begin == 8000000 && behind.end == 9000000 && behind.due == 11000000);
  const Passage small = port.pass(t, 9000000, 8, true, 1), next = port.pass(t, 9000000, 8, true, 2);
  EXPECT(small.end == 9250000 && next.begin == 9250000 && next.due == 9500000 + 2 * 2000000);
  const Passage rest = port.pass(t, 0, 8, false, 1);  // of an operation that has begun
  EXPECT(rest.end == 9500000 + 160);
  const NicTiming free = nic_of("nic:0:0").timing;
  for (int i = 0; i < 1000; ++i) EXPECT(port.pass(free, 20000000, 1 << 20, true, 1).due == 20000000);
  uint64_t sent = 0, first = 0;
  NicPort steady;
  const NicTiming slow = nic_of("nic:1.5:12.5").timing;
  for (int i = 1; i <= 10000; ++i) {
    sent += static_cast<uint64_t>(i);
    const Passage one = steady.pass(slow, 1000, static_cast<uint64_t>(i), true, 1);
    if (i == 1) first = one.begin;
    EXPECT(one.due == one.end + 1500000 && one.end - first >= sent * 80 && one.end - first <= sent * 80 + 10000);
  }
  return good;
}

bool queues_take_turns(bool good = true) {
  RoundRobin turn;
  int served[32] = {};
  for (int i = 0; i < 300; ++i) ++served[turn.pick(0x80000005u)];
  EXPECT(served[0] == 100 && served[2] == 100 && served[31] == 100);
  EXPECT(turn.pick(0x10) == 4 && turn.pick(0x10) == 4 && turn.pick(0x11) == 0 && turn.pick(0x11) == 4);
  return good;
}

bool a_nic_gets_what_is_posted(bool good = true) {
  std::vector<char> from(5000, 7), to(5000, 0);
  launches = 0;
  done_posts.clear();
  Wire wire(0, 3, nic_of("nic:2:50"));
  EXPECT(wire.start() == 0 && launches == 1 && wire.worker() != nullptr);
  EXPECT(wire.worker()->timing.latency == 2032000 && wire.worker()->num_queues == 6);  // a tick of the clock longer
  Work put;
  put.target = to.data();
  put.source = from.data();
  put.bytes = from.size();
  EXPECT(wire.post(1, put) == 0 && wire.fence(1) == 0 && wire.post(1, atomic(9)) == 0);
  Work fetch = atomic(3);
  uint64_t result[2] = {};
  fetch.atomic = Atomic::kFetchAdd;
  fetch.result = result;
  fetch.result_flag = 55;
  EXPECT(wire.post(2, fetch) == 0);
  EXPECT(to != from && done_posts.empty());  // it waits for the worker
  EXPECT(wire.quiet(1) == 0 && to == from && done_posts.size() == 3 && launches == 2);
  if (done_posts.size() == 3) {
    const Post &copied = done_posts[0], &added = done_posts[1], &fetched = done_posts[2];
    EXPECT(copied.pe == 1 && copied.bytes == 5000 && copied.word_bytes == 0 && copied.flags == 0);
    EXPECT(added.pe == 1 && added.value == 9 && added.word_bytes == 8 && added.bytes == 0);
    EXPECT(fetched.pe == 2 && fetched.flags == (kReturns | kHasResult) && fetched.result_flag == 55 &&
           fetched.target == reinterpret_cast<uint64_t>(result));
  }
  testtransport_counts counts{};
  EXPECT(wire.count(1, &counts) == 0 && counts.puts == 1 && counts.atomics == 1 && counts.fences == 1 &&
         counts.bytes == 5008);
  for (uint32_t i = 0; i < 3 * kRingSlots; ++i) EXPECT(wire.post(1, atomic(i)) == 0);  // the worker makes room
  EXPECT(wire.lose(1) == 0 && wire.post(1, put) == 0 && wire.quiet(1) == 0);
  EXPECT(done_posts.size() == 3 + 3 * kRingSlots && wire.count(1, &counts) == 0 && counts.dropped == 1);
  testtransport_nic nic{};
  EXPECT(wire.read_nic(&nic) == 0 && nic.tick_ns == 32 && nic.launches == static_cast<uint64_t>(launches));
  worker_error = cudaErrorLaunchFailure;
  EXPECT(wire.progress() != 0);
  worker_error = cudaSuccess;
  Wire too_many(0, kMaxPes + 1, nic_of("nic:2:50"));
  EXPECT(too_many.start() != 0);
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
  EXPECT(parse_settings("nic:2:50", &s) && s.nic && s.timing.latency == 2000000 && s.timing.byte_1024 == 20480 &&
         s.timing.post == 0);
  EXPECT(parse_settings("nic:0.5:12.5:100", &s) && s.timing.latency == 500000 && s.timing.byte_1024 == 81920 &&
         s.timing.post == 10000);
  EXPECT(parse_settings("nic:0:0:0", &s) && s.nic && s.timing.latency + s.timing.byte_1024 + s.timing.post == 0);
  for (const char *wrong : {"nic", "nic:", "nic:2", "nic:2:", "nic:2:50:", "nic:2:50:1:1", "nic:-2:50", "nic:2:inf",
                            "nic:2:50 ", "nic:1e9:50", "nic:2:0.0001", "nic: 2:50", "nic:nan:50", "7:nic"})
    EXPECT(!parse_settings(wrong, &s) && !s.nic);
  return good;
}

}  // namespace

int main() {
  bool (*const tests[])(bool) = {at_once_in_order,
                                 fences_hold_and_nothing_else,
                                 nothing_before_its_time,
                                 due_work_goes_by_itself,
                                 puts_come_in_pieces_last_one_first,
                                 a_lost_peer_takes_nothing,
                                 a_port_has_a_rate_a_post_rate_and_a_latency,
                                 queues_take_turns,
                                 a_nic_gets_what_is_posted,
                                 settings_are_checked};
  int passed = 0;
  for (const auto test : tests) test(true) ? ++passed : ++failures;
  printf("%d passed, %d failed\n", passed, failures);
  return failures != 0;
}
