// emulate.h - kernels on the host (README.md). A lane is a fiber; lanes meet at warp and block operations, and yield
// where they poll. All blocks take turns on one thread. The runner of blocks defines the time and what else happens
// between turns: runtime.cpp for the CUDA library, nvshmem/tests/network.cpp for kernels among nodes. Sources of
// kernels are compiled with this file before all others.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <math.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulate {

struct Index {
  unsigned x;
};

// A warp operation: each lane's value, of this round and, while some lanes still read it, of the last one.
struct Meeting {
  uint64_t values[2][32];
  const char *what;
  uint32_t arrived, round;
};
struct Warp {
  Meeting of[3];           // all lanes, the lower half, the upper half
  uint32_t ready, polled;  // lanes that can run; lanes that had their turn, and poll
  struct {
    uint32_t round;
    uint64_t time;
  } clocks[4];  // the first looks at the clock between two meetings
};
struct Barrier {
  uint32_t waiting[32] = {};  // lanes of each warp
  unsigned arrived = 0;
  uint32_t round = 0, results[2] = {0, 0};
};
struct Copies;  // copies.cpp
struct Lane {
  void *stack_pointer = nullptr;
  Index index{};
  uint32_t turn = 0, loads = 0, polls = 0;  // in this turn: all, and the last ones, of what had been seen before
  struct {
    const void *at;
    uint64_t value;
  } seen[8] = {};
  uint32_t clock_round = 0, clock_looks = 0;
  uint64_t clock = 0;
  std::unique_ptr<Copies> copies;
  Lane();
  ~Lane();
};
// A block that runs, or is going to.
struct Block {
  Block(unsigned threads, size_t shared_bytes, std::function<void()> body);
  ~Block();
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;

  Lane *now = nullptr;
  Index index{}, grid{}, size{};
  std::vector<Warp> warps;
  std::vector<Lane> lanes;
  Barrier barriers[16];  // 0: of all
  const char *name = "";
  int rank = 0;                     // for the runner
  unsigned ended = 0, copying = 0;  // lanes that have ended; lanes with copies in flight
  uint32_t turn = 0, polls = 0;     // polls: how often a lane may load the same value in a turn
  void *scheduler = nullptr;
  size_t shared_bytes;
  std::vector<uint8_t> shared;  // its contents while other blocks run
  char *stacks;
  std::function<void()> body;  // of each lane
};
extern Block *block;  // the one that is running

// Runs all lanes for a while. False: they have ended.
bool run_turn(Block *own);
// With a seed, turns are of random length and begin with a random lane, and lanes yield before some stores. 0: all
// turns are alike.
void set_seed(uint64_t seed);
extern bool at_random;
uint64_t random_bits();
// Memory that a launch gives to its blocks, all that is declared extern __shared__; the rest is found.
void set_dynamic_shared(const std::vector<std::pair<void *, size_t>> &arrays);
size_t dynamic_shared_limit();

uint64_t now_ns();            // defined by the runner
uint64_t clock_ns();          // for a lane: lanes of a warp that read the clock together read the same value
extern uint64_t together_ns;  // the longest time between such reads; far less than any time limit
void step();                  // runs another lane
// Around a load: a lane yields after it has loaded nothing new a few times, or has loaded very often.
inline void before_load() {
  Lane *lane = block->now;
  if (lane->turn == block->turn && (lane->polls >= block->polls || lane->loads >= 64)) step();
  if (lane->turn != block->turn) {
    lane->turn = block->turn;
    lane->loads = lane->polls = 0;
  }
  ++lane->loads;
}
inline void after_load(const void *at, uint64_t value) {
  Lane *lane = block->now;
  auto &seen = lane->seen[reinterpret_cast<uintptr_t>(at) * 0x9e3779b97f4a7c15ull >> 61];
  lane->polls = seen.at == at && seen.value == value ? lane->polls + 1 : 0;
  seen.at = at;
  seen.value = value;
}
inline void before_store() {
  if (at_random && random_bits() % 64 == 0) step();
}
[[noreturn]] void fault(const char *what);  // where a GPU would stop, or fail silently

// Each lane of `mask` brings a value, and gets those of all.
const uint64_t *meet(uint32_t mask, uint64_t value, const char *what);
// A barrier of `lanes` lanes of the block; each gets the values of all, or-ed.
uint32_t meet_block(int barrier, unsigned lanes, uint32_t value);

template <class T>
uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8, "a register or two");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
T from_bits(uint64_t word) {
  T value;
  memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace emulate

// ---- What CUDA has in every kernel ----
#undef __shared__
#define __shared__ thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__
#undef __align__
#define __align__(n) __attribute__((aligned(n)))
#define __CUDACC__ 1
#define threadIdx (emulate::block->now->index)
#define blockIdx (emulate::block->index)
#define gridDim (emulate::block->grid)
#define blockDim (emulate::block->size)

inline int emulated_lane() { return static_cast<int>(threadIdx.x % 32); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulate::from_bits<T>(emulate::meet(mask, emulate::bits(value), "shfl")[lane]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  const uint64_t *all = emulate::meet(mask, emulate::bits(value), "shfl_up");
  return emulated_lane() >= by ? emulate::from_bits<T>(all[emulated_lane() - by]) : value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by) {
  return emulate::from_bits<T>(emulate::meet(mask, emulate::bits(value), "shfl_xor")[emulated_lane() ^ by]);
}
// Lanes of the mask for whose value f returns true.
template <class F>
unsigned emulated_choice(unsigned mask, const uint64_t *all, F f) {
  unsigned chosen = 0;
  for (int i = 0; i < 32; ++i) chosen |= (mask >> i & 1) != 0 && f(all[i]) ? 1u << i : 0;
  return chosen;
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  return emulated_choice(mask, emulate::meet(mask, value, "ballot"), [](uint64_t one) { return one != 0; });
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t mine = emulate::bits(value);
  return emulated_choice(mask, emulate::meet(mask, mine, "match_any"), [=](uint64_t one) { return one == mine; });
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == mask; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::meet(mask, 0, "syncwarp"); }
template <class T, class Better>
T emulated_best(unsigned mask, T value, const char *what, Better better) {
  const uint64_t *all = emulate::meet(mask, emulate::bits(value), what);
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0 && better(emulate::from_bits<T>(all[i]), value)) value = emulate::from_bits<T>(all[i]);
  return value;
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulated_best(mask, value, "reduce_min", [](T a, T b) { return a < b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulated_best(mask, value, "reduce_max", [](T a, T b) { return b < a; });
}
inline int __reduce_add_sync(unsigned mask, int value) {
  const uint64_t *all = emulate::meet(mask, emulate::bits(value), "reduce_add");
  int sum = 0;
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0) sum += emulate::from_bits<int>(all[i]);
  return sum;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  const uint64_t *all = emulate::meet(mask, emulate::bits(value), "reduce_or");
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0) value |= emulate::from_bits<unsigned>(all[i]);
  return value;
}
inline void __syncthreads() { emulate::meet_block(0, emulate::block->size.x, 0); }
inline int __syncthreads_or(int value) {
  return static_cast<int>(emulate::meet_block(0, emulate::block->size.x, value != 0));
}
inline int __syncthreads_and(int value) { return emulate::meet_block(0, emulate::block->size.x, value == 0) == 0; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline float __uint_as_float(unsigned v) { return emulate::from_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return static_cast<unsigned>(emulate::bits(v)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
template <class T>
T atomicAdd(T *at, std::type_identity_t<T> value) {
  return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}
template <class T>
T atomicMax(T *at, std::type_identity_t<T> value) {
  T before = __atomic_load_n(at, __ATOMIC_ACQUIRE);
  while (before < value &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return before;
}
template <class T>
T atomicAnd(T *at, std::type_identity_t<T> value) {
  return __atomic_fetch_and(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicOr(T *at, std::type_identity_t<T> value) {
  return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicExch(T *at, std::type_identity_t<T> value) {
  return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}
template <class T>
T atomicCAS(T *at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
