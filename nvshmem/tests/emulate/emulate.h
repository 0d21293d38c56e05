// emulate.h - kernels on the host: a thread for each block, in it a fiber for each lane; lanes meet in what warps and blocks do
// together. All ranks are in one process. Puts go through a network that keeps no order but that of a queue pair, or of fences.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace emulate {

struct Index { unsigned x; };
struct Warp {
  uint64_t values[2][32];
  const void *place[2]; // what the lanes do together
  unsigned arrived[2];
};
struct Block;
struct Lane {
  void *stack_pointer = nullptr;
  std::vector<char> stack;
  Index index{};
  unsigned meetings = 0, block_meetings = 0, some_meetings[16] = {};
  bool done = false;
};
struct Block {
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  unsigned arrived[2] = {0, 0};
  bool any[2] = {false, false};
  unsigned some_arrived[16] = {}; // at named barriers
  Index index{}, grid{}, size{};
  int rank = 0;
  void *scheduler = nullptr;
  Lane *now = nullptr;
  std::function<void()> body;
};
extern thread_local Block *block;

uint64_t now_ns();
void step();                       // another lane has its turn
// All lanes of the warp come with a value and leave with everybody's.
const uint64_t *meet(uint64_t value, const char *what);
bool meet_block(bool value);
void meet_some(int index, unsigned lanes); // at a named barrier
// A put with a signal, by a lane of the running rank.
void put(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value, int pe);

struct Network { uint64_t seed; bool fences_alone; };
void start_network(const Network &how, const std::vector<uint8_t *> &blocks);
void stop_network();               // after all is delivered
void carry_some();                 // some operations take effect
size_t rows_under_way();           // puts of more than 16 bytes that did not take effect yet
// Runs body() in every lane of a grid of each rank, all ranks at once.
void run(int ranks, const std::function<int(int rank)> &grid, int threads, const std::function<void(int rank)> &body);

template <class T> uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8, "a register or two");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  return word;
}
template <class T> T from_bits(uint64_t word) {
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
template <class T> T __shfl_sync(unsigned, T value, int lane) { return emulate::from_bits<T>(emulate::meet(emulate::bits(value), "shfl")[lane]); }
template <class T> T __shfl_up_sync(unsigned, T value, int by) {
  const uint64_t *all = emulate::meet(emulate::bits(value), "shfl_up");
  return emulated_lane() >= by ? emulate::from_bits<T>(all[emulated_lane() - by]) : value;
}
template <class T> T __shfl_xor_sync(unsigned, T value, int by) {
  return emulate::from_bits<T>(emulate::meet(emulate::bits(value), "shfl_xor")[emulated_lane() ^ by]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t *all = emulate::meet(value, "ballot");
  unsigned found = 0;
  for (int i = 0; i < 32; ++i) found |= all[i] != 0 ? 1u << i : 0;
  return found;
}
template <class T> unsigned __match_any_sync(unsigned, T value) {
  const uint64_t *all = emulate::meet(emulate::bits(value), "match_any");
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= all[i] == emulate::bits(value) ? 1u << i : 0;
  return same;
}
inline bool __any_sync(unsigned m, bool value) { return __ballot_sync(m, value) != 0; }
inline bool __all_sync(unsigned m, bool value) { return __ballot_sync(m, value) == 0xffffffffu; }
inline void __syncwarp(unsigned = 0xffffffffu) { emulate::meet(0, "syncwarp"); }
template <class T> T __reduce_min_sync(unsigned, T value) {
  const uint64_t *all = emulate::meet(emulate::bits(value), "reduce_min");
  T best = emulate::from_bits<T>(all[0]);
  for (int i = 1; i < 32; ++i) best = emulate::from_bits<T>(all[i]) < best ? emulate::from_bits<T>(all[i]) : best;
  return best;
}
template <class T> T __reduce_max_sync(unsigned, T value) {
  const uint64_t *all = emulate::meet(emulate::bits(value), "reduce_max");
  T best = emulate::from_bits<T>(all[0]);
  for (int i = 1; i < 32; ++i) best = best < emulate::from_bits<T>(all[i]) ? emulate::from_bits<T>(all[i]) : best;
  return best;
}
inline void __syncthreads() { emulate::meet_block(false); }
inline int __syncthreads_or(int value) { return emulate::meet_block(value != 0); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline float __uint_as_float(unsigned v) { return emulate::from_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return static_cast<unsigned>(emulate::bits(v)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T> T atomicAdd(T *at, T value) { return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL); }
template <class T> T atomicExch(T *at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL); }
template <class T> T atomicCAS(T *at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
