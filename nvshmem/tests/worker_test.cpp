// worker_test.cpp - the kernel that plays a NIC, run on the host lane by lane (kernels/tests/emulate), with its rings,
// and posters that are the host or kernels. Time is the emulator's, a microsecond a turn of a block.
//   worker_test [SEED [CASES]]
#include "network.h"

template <class T>
T atomicAdd_system(T *at, std::type_identity_t<T> value) {
  return atomicAdd(at, value);
}
template <class T>
T atomicAnd_system(T *at, std::type_identity_t<T> value) {
  return atomicAnd(at, value);
}
template <class T>
T atomicOr_system(T *at, std::type_identity_t<T> value) {
  return atomicOr(at, value);
}
template <class T>
T atomicXor_system(T *at, std::type_identity_t<T> value) {
  return __atomic_fetch_xor(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicExch_system(T *at, std::type_identity_t<T> value) {
  return atomicExch(at, value);
}
template <class T>
T atomicCAS_system(T *at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return atomicCAS(at, expected, value);
}

#include <algorithm>
#include <cstdio>
#include <random>

#include "testtransport/post.cuh"
#include "testtransport/rings.h"
#include "testtransport/worker.cuh"

using namespace testtransport;

// ---- Stand-ins for CUDA ----

extern "C" {
cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned) {
  *at = aligned_alloc(64, (bytes + 63) / 64 * 64);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
cudaError_t cudaFree(void *at) {
  free(at);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *at) { return cudaFree(at); }
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t) {
  memset(at, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "no error"; }
}

namespace testtransport {
static WorkerParams launched;
static uint64_t seed;
cudaError_t load_worker() { return cudaSuccess; }
cudaError_t measure_tick(uint64_t *ns, cudaStream_t) {
  *ns = 1;
  return cudaSuccess;
}
cudaError_t launch_worker(const WorkerParams &params, cudaStream_t) {
  launched = params;
  launched.idle_ns = 200000;
  if (seed % 2 != 0) launched.early_ns = 0;  // copies that are always late
  return cudaSuccess;
}
}  // namespace testtransport

namespace {

std::mt19937_64 random_number;
uint64_t pick(uint64_t low, uint64_t high) { return low + random_number() % (high - low + 1); }

#define EXPECT(what)                                                                                      \
  do {                                                                                                    \
    if (!(what)) printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #what), fflush(stdout), quick_exit(1); \
  } while (0)

constexpr uint64_t kLatencyNs = 200000, kByteNs = 5;  // slow: a turn of all blocks takes microseconds
const NicTiming kTiming{kLatencyNs * 1000, 1024 * kByteNs * 1000, 1000000};

void work_as_block() {
  static __shared__ WorkerShared shared;
  work(launched, shared);
}

// Runs the worker, and a poster: lane 0 of a warp that is the host, or all lanes of a block that is a kernel.
void run(const std::function<void()> &host, const std::function<void()> &kernel) {
  emulate::run(
      3, [](int rank) { return rank == 0 ? kWorkerBlocks : 1; }, kWorkerThreads,
      [&](int rank) {
        if (rank == 0) return work_as_block();
        if (rank == 1 && threadIdx.x == 0) host();
        if (rank == 2) kernel();
      });
}
void stop() { __atomic_store_n(&launched.control->stop, 1, __ATOMIC_RELEASE); }

template <class F>
void wait_until(F holds) {
  while (!holds()) emulate::step();
}

Post put_of(void *to, const void *from, size_t bytes) {
  Post post{};
  post.target = reinterpret_cast<uint64_t>(to);
  post.source = reinterpret_cast<uint64_t>(from);
  post.bytes = static_cast<uint32_t>(bytes);
  return post;
}
Post word_of(void *word, int bytes, Atomic what, uint64_t value) {
  Post post{};
  post.word = reinterpret_cast<uint64_t>(word);
  post.word_bytes = static_cast<uint8_t>(bytes);
  post.atomic = static_cast<uint8_t>(what);
  post.value = value;
  return post;
}

struct Message {
  int pe;
  size_t bytes;
  std::vector<uint8_t> from, to;
  uint64_t posted_ns = 0, seen_ns = 0, passed_before = 0;  // bytes that the port passes first
  alignas(8) uint64_t word = 0;
  bool there() const { return memcmp(from.data(), to.data(), bytes) == 0; }
};

// The host posts puts of any size and place, each followed by a signal, toward two PEs. False: something was late.
bool host_posts() {
  Rings rings;
  EXPECT(rings.start(3, kTiming) == 0);
  std::vector<Message> all(pick(1, 20));
  for (Message &m : all) {
    m.pe = static_cast<int>(pick(1, 2));
    m.bytes = pick(0, 3) == 0 ? pick(1, 100) : pick(1, 30000);
    m.from.resize(m.bytes + 64);
    m.to.assign(m.bytes + 64, 0);
    for (uint8_t &byte : m.from) byte = static_cast<uint8_t>(random_number() | 1);
  }
  const size_t shift = pick(0, 2) == 0 ? pick(0, 15) : 0;  // most are aligned
  uint64_t first = 0, last = 0, sent = 0;
  run(
      [&] {
        first = emulate::now_ns();
        for (Message &m : all) {
          EXPECT(rings.post(m.pe, put_of(m.to.data() + shift, m.from.data() + shift, m.bytes)) == 0);
          m.posted_ns = emulate::now_ns();
          EXPECT(rings.post(m.pe, word_of(&m.word, 8, Atomic::kSignalSet, 7)) == 0);
          sent += m.bytes + 8;
        }
        bool open = true;
        wait_until([&] {
          open = false;
          uint64_t of_pe[3] = {};
          for (Message &m : all) {
            of_pe[m.pe] += m.bytes + 8;
            const bool seen = __atomic_load_n(&m.word, __ATOMIC_ACQUIRE) == 7;
            open |= !seen;
            if (!seen || m.seen_ns != 0) continue;
            m.seen_ns = emulate::now_ns();
            EXPECT(memcmp(m.from.data() + shift, m.to.data() + shift, m.bytes) == 0);
            EXPECT(m.seen_ns >= first + of_pe[m.pe] * kByteNs + kLatencyNs && m.seen_ns >= m.posted_ns + kLatencyNs);
          }
          return !open;
        });
        last = emulate::now_ns();
        wait_until([&] { return rings.is_done(1) && rings.is_done(2); });
        stop();
      },
      [] {});
  for (const Message &m : all) EXPECT(m.to[m.bytes + shift] == 0 && (shift == 0 || m.to[shift - 1] == 0));
  EXPECT(last >= first + sent * kByteNs + kLatencyNs);
  EXPECT(launched.control->running == 0 && launched.control->outside == 0);
  return last <= first + sent * kByteNs * 5 / 4 + kLatencyNs * 2 + all.size() * 8000;
}

// What waits toward one PE does not keep another PE's from the port. False: something was late.
bool peers_share_the_port() {
  Rings rings;
  EXPECT(rings.start(3, kTiming) == 0);
  std::vector<uint8_t> from(200000, 1), to(200000), more(8000);
  uint64_t many = 0, one = 0, alone = 0, first = 0, one_at = 0, many_at = 0, alone_at = 0;
  run(
      [&] {
        first = emulate::now_ns();
        rings.post(0, word_of(&alone, 8, Atomic::kSet, 1));
        rings.post(1, put_of(to.data(), from.data(), from.size()));
        rings.post(1, word_of(&many, 8, Atomic::kSet, 1));
        rings.post(2, put_of(more.data(), from.data(), more.size()));
        rings.post(2, word_of(&one, 8, Atomic::kSet, 1));
        wait_until([&] {
          if (alone_at == 0 && __atomic_load_n(&alone, __ATOMIC_ACQUIRE) != 0) alone_at = emulate::now_ns();
          if (one_at == 0 && __atomic_load_n(&one, __ATOMIC_ACQUIRE) != 0) one_at = emulate::now_ns();
          if (many_at == 0 && __atomic_load_n(&many, __ATOMIC_ACQUIRE) != 0) many_at = emulate::now_ns();
          return alone_at != 0 && one_at != 0 && many_at != 0;
        });
        stop();
      },
      [] {});
  EXPECT(alone_at >= first + kLatencyNs);
  EXPECT(std::max(one_at, many_at) >= first + (from.size() + more.size()) * kByteNs + kLatencyNs);
  EXPECT(many_at >= first + from.size() * kByteNs + kLatencyNs);
  return alone_at < first + kLatencyNs * 3 / 2 && one_at < many_at &&
         one_at < first + (more.size() + 5 * kChunk) * kByteNs + 2 * kLatencyNs;
}

// A put of several chunks counts as one post. False: something was late.
bool a_long_put_is_one_post() {
  constexpr uint64_t kPostNs = 300000;
  Rings rings;
  EXPECT(rings.start(2, {kLatencyNs * 1000, 1024 * 10, kPostNs * 1000}) == 0);  // a byte takes 10 ps
  std::vector<uint8_t> from(3 * kChunk, 1), to(from.size());
  uint64_t word = 0, first = 0, last = 0;
  run(
      [&] {
        first = emulate::now_ns();
        rings.post(1, put_of(to.data(), from.data(), from.size()));
        rings.post(1, word_of(&word, 8, Atomic::kSet, 1));
        wait_until([&] { return __atomic_load_n(&word, __ATOMIC_ACQUIRE) != 0; });
        last = emulate::now_ns();
        stop();
      },
      [] {});
  EXPECT(from == to && last >= first + 2 * kPostNs + kLatencyNs);
  return last < first + 3 * kPostNs + kLatencyNs;
}

// What is late may be so because other processes have the cores, but not time and again.
template <class F>
void soon_in_time(F test) {
  int tries = 20;
  while (!test()) EXPECT(--tries > 0);
}

// Lanes of a kernel post by the addresses of their own heap, which has several parts; the host posts meanwhile.
void kernels_post() {
  Rings rings;
  EXPECT(rings.start(2, {kLatencyNs * 1000, 0, 0}) == 0);
  constexpr size_t kPart = 20480, kParts = 3;
  alignas(16) static uint8_t mine[kParts][kPart], theirs[kParts][kPart + 64];  // theirs: not contiguous
  memset(theirs, 0, sizeof theirs);
  for (auto &part : mine)
    for (uint8_t &byte : part) byte = static_cast<uint8_t>(random_number());
  for (size_t i = 0; i < kParts; ++i) {
    Area area{reinterpret_cast<uint64_t>(mine[i]), kPart, {}};
    area.shift[1] = theirs[i] - mine[i];
    EXPECT(rings.add_area(area) == 0);
  }
  static uint8_t source[kPart * 2];
  for (size_t i = 0; i < sizeof source; ++i) source[i] = static_cast<uint8_t>(random_number());
  const size_t at = pick(0, kPart / 16) * 16, bytes = pick(1, kPart / 16) * 16;
  const unsigned posters = static_cast<unsigned>(pick(1, 64));
  auto *word = reinterpret_cast<uint64_t *>(mine[2]) + 600;
  auto *word_there = reinterpret_cast<uint64_t *>(theirs[2]) + 600;
  uint64_t first = 0, host_word = 0, got[4] = {1, 2, 3, 4};
  unsigned posted = 0;
  run(
      [&] {
        rings.post(1, word_of(&host_word, 4, Atomic::kAdd, 5));
        rings.post(1, word_of(&host_word, 4, Atomic::kAdd, 6));
        wait_until([&] { return __atomic_load_n(&posted, __ATOMIC_ACQUIRE) == posters + 1; });
        stop();
      },
      [&] {
        if (threadIdx.x == 0) {
          first = emulate::now_ns();
          post_put(rings.state(), 1, mine[0] + at, source, bytes, word, 99);
          wait_for_posts(rings.state());
          EXPECT(*word_there == 99 && emulate::now_ns() >= first + kLatencyNs);
          const uint64_t asked = emulate::now_ns();
          post_get(rings.state(), 1, got, word, 8);
          wait_for_posts(rings.state());
          EXPECT(got[0] == 99 && got[1] == 2 && emulate::now_ns() >= asked + 2 * kLatencyNs);
          __atomic_fetch_add(&posted, 1, __ATOMIC_RELEASE);
        } else if (threadIdx.x <= posters) {
          Post one = word_of(reinterpret_cast<uint64_t *>(mine[2]) + 1000, 8, Atomic::kSignalAdd, threadIdx.x);
          one.flags = kSymmetric;
          one.pe = 1;
          for (int i = 0; i < 100; ++i) post(rings.state(), one);
          __atomic_fetch_add(&posted, 1, __ATOMIC_RELEASE);
        }
      });
  for (size_t i = 0; i < bytes; ++i) EXPECT(theirs[(at + i) / kPart][(at + i) % kPart] == source[i]);
  EXPECT(host_word == 11);
  EXPECT(reinterpret_cast<uint64_t *>(theirs[2])[1000] == 100ull * posters * (posters + 1) / 2);
  EXPECT(launched.control->outside == 0);
}

// Values of each width, atomics with results, a lost peer, an address outside the heap; and a second launch goes on.
void words_and_losses() {
  Rings rings;
  EXPECT(rings.start(3, {1000, 1000, 0}) == 0);
  uint64_t words[6] = {~0ull, 10, 20, 30, 0, 0}, results[4] = {}, after = 0;
  run(
      [&] {
        rings.post(1, word_of(&words[0], 1, Atomic::kSet, 0));
        Post fetch = word_of(&words[1], 8, Atomic::kFetchAdd, 5);
        fetch.target = reinterpret_cast<uint64_t>(results);
        fetch.result_flag = 77;
        fetch.flags = kReturns | kHasResult;
        rings.post(1, fetch);
        Post swap = word_of(&words[2], 4, Atomic::kCompareSwap, 21);
        swap.source = 20;
        swap.target = reinterpret_cast<uint64_t>(results + 2);
        swap.result_flag = 78;
        swap.flags = kReturns | kHasResult;
        rings.post(1, swap);
        for (uint64_t i = 1; i <= 40; ++i) rings.post(1, word_of(&words[3], 8, Atomic::kSignalSet, i));
        wait_until([&] { return rings.is_done(1); });
        rings.lose(2);
        const uint64_t lost_at = emulate::now_ns();
        wait_until([&] { return emulate::now_ns() > lost_at + 100000; });  // the worker has read it
        rings.post(2, word_of(&words[4], 8, Atomic::kSet, 1));
        rings.post(1, word_of(&words[5], 8, Atomic::kSet, 1));
        wait_until([&] { return rings.is_done(1) && rings.is_done(2); });
        stop();
      },
      [] {});
  EXPECT(words[0] == ~0xffull && words[1] == 15 && results[0] == 10 && results[1] == 77);
  EXPECT(words[2] == 21 && results[2] == 20 && results[3] == 78 && words[3] == 40 && words[4] == 0 && words[5] == 1);
  EXPECT(launched.control->running == 0);
  __atomic_store_n(&launched.control->stop, 0, __ATOMIC_RELEASE);
  const uint64_t before = launched.launch;
  EXPECT(rings.keep_running() == 0 && launched.launch == before + 1 && rings.keep_running() == 0 &&
         launched.launch == before + 1);
  std::vector<uint8_t> from(50000, 3), to(50000);
  run(  // without a stop: it ends by itself
      [&] {
        rings.post(0, put_of(to.data(), from.data(), from.size()));
        rings.post(0, word_of(&after, 8, Atomic::kSet, 1));
        Post wrong = word_of(&after, 8, Atomic::kSet, 2);
        wrong.flags = kSymmetric;
        rings.post(1, wrong);
      },
      [] {});
  EXPECT(after == 1 && to == from && rings.is_done(0) && rings.is_done(1) && launched.control->running == 0);
  EXPECT(launched.control->outside == 1 && rings.keep_running() != 0);
}

}  // namespace

int main(int argc, char **argv) {
  const uint64_t first = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1,
                 count = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  for (seed = first; seed < first + count; ++seed) {
    random_number.seed(seed);
    emulate::set_seed(seed);
    emulate::start_network({seed, false}, {});
    soon_in_time(host_posts);
    soon_in_time(peers_share_the_port);
    soon_in_time(a_long_put_is_one_post);
    kernels_post();
    words_and_losses();
    emulate::stop_network();
    fflush(stderr);
    printf("seed %llu: ok\n", static_cast<unsigned long long>(seed));
  }
  return 0;
}
