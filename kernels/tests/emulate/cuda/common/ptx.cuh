// ptx.cuh - what kernels take from kernels/cuda/common/ptx.cuh, on the host.
#pragma once
#include "copies.h"

#define DEEPEP_HAS_BULK_COPY 1
#define DEEPEP_HAS_FP8_INSTRUCTION 0

namespace deepep::ptx {

template <class T>
void check_alignment(const T *address, size_t bytes) {
  if (emulate::bits(address) % bytes != 0) emulate::fault("a misaligned address");
}
template <class T>
T load(const T *address) {
  check_alignment(address, sizeof(T));
  emulate::before_load();
  const T value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  emulate::after_load(address, value);
  return value;
}
template <class T>
void store(T *address, T value) {
  check_alignment(address, sizeof(T));
  emulate::before_store();
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline uint64_t ld_acquire_sys(const uint64_t *address) { return load(address); }
inline uint64_t ld_relaxed_sys(const uint64_t *address) { return load(address); }
inline uint32_t ld_relaxed_sys(const uint32_t *address) { return load(address); }
inline uint32_t ld_relaxed_gpu(const uint32_t *address) { return load(address); }
inline uint32_t ld_acquire_gpu(const uint32_t *address) { return load(address); }
inline uint64_t ld_relaxed_gpu(const uint64_t *address) { return load(address); }
inline uint32_t ld_acquire_cta(const uint32_t *address) { return load(address); }
inline void st_release_cta(uint32_t *address, uint32_t value) { store(address, value); }
inline void st_relaxed_sys(uint64_t *address, uint64_t value) { store(address, value); }
inline void st_relaxed_sys(uint32_t *address, uint32_t value) { store(address, value); }
inline void st_release_sys(uint64_t *address, uint64_t value) { store(address, value); }
inline void st_release_sys(uint32_t *address, uint32_t value) { store(address, value); }
inline void st_relaxed_sys_pair(uint64_t *address, uint64_t first, uint64_t second) {
  check_alignment(address, 16);
  store(address, first);
  store(address + 1, second);
}
inline void ld_relaxed_sys_pair(const uint64_t *address, uint64_t &first, uint64_t &second) {
  check_alignment(address, 16);
  emulate::before_load();
  first = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  second = __atomic_load_n(address + 1, __ATOMIC_ACQUIRE);
  emulate::after_load(address, first ^ second);
}
inline uint32_t atomic_add_acq_rel_gpu(uint32_t *address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline uint64_t atomic_add_acq_rel_gpu(uint64_t *address, uint64_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline uint64_t atomic_add_relaxed_gpu(uint64_t *address, uint64_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline void atomic_or_relaxed_gpu(uint64_t *address, uint64_t value) {
  __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline uint4 ld_stream(const void *address) {
  check_alignment(address, 16);
  uint4 v;
  memcpy(&v, address, sizeof v);
  return v;
}
inline void st_stream(void *address, const uint4 &v) {
  check_alignment(address, 16);
  emulate::before_store();
  memcpy(address, &v, sizeof v);
}
inline uint4 ld_relaxed_sys_v4(const void *address) {
  emulate::before_load();
  const uint4 v = ld_stream(address);
  emulate::after_load(address, static_cast<uint64_t>(v.x) << 32 | (v.y ^ v.z ^ v.w));
  return v;
}
inline void st_relaxed_sys_v4(void *address, const uint4 &v) { st_stream(address, v); }
inline void copy_word_async(void *shared, const void *global) { emulate::copy_word(shared, global); }
inline void copy_words_commit() { emulate::commit_words(); }
template <int kPending>
void copy_words_wait() {
  emulate::wait_for_words(kPending);
}
inline float log2(float x) { return log2f(x); }
inline float exp2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1 / x; }
inline float fma_saturated(float a, float b, float c) {
  const float y = fmaf(a, b, c);
  return y > 0 ? fminf(y, 1) : 0;
}
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline uint64_t global_timer_ns() { return emulate::clock_ns(); }
template <int kThreads>
void barrier_among(int index) {
  emulate::meet_block(index, kThreads, 0);
}
template <int kThreads>
bool barrier_or_among(int index, bool value) {
  return emulate::meet_block(index, kThreads, value) != 0;
}

inline void mbarrier_init(uint64_t *barrier, uint32_t arrivals) { emulate::init_barrier(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_expect(uint64_t *barrier, uint32_t bytes) { emulate::arrive_expecting(barrier, bytes); }
inline bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity) { return emulate::try_barrier(barrier, parity); }
inline uint4 ld_shared(const void *shared) { return *static_cast<const uint4 *>(shared); }
inline void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
  emulate::bulk_load(shared, global, bytes, barrier);
}
inline void bulk_store(void *global, const void *shared, uint32_t bytes) { emulate::bulk_store(global, shared, bytes); }
inline void bulk_commit() { emulate::commit_bulk(); }
template <int kPending>
void bulk_wait_read() {
  emulate::wait_for_bulk(kPending, true);
}
template <int kPending>
void bulk_wait() {
  emulate::wait_for_bulk(kPending, false);
}
inline void fence_shared_before_bulk() {}
inline void fence_global_before_bulk() {}

}  // namespace deepep::ptx
