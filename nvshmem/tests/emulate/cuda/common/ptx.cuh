// ptx.cuh - what kernels take from kernels/cuda/common/ptx.cuh, on the host.
#pragma once
#include "emulate.h"

#define DEEPEP_HAS_BULK_COPY 0
#define DEEPEP_HAS_FP8_INSTRUCTION 0

namespace deepep::ptx {

template <class T> T load(const T *address) { emulate::step(); return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
template <class T> void store(T *address, T value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
inline uint64_t ld_acquire_sys(const uint64_t *address) { return load(address); }
inline uint64_t ld_relaxed_sys(const uint64_t *address) { return load(address); }
inline uint32_t ld_relaxed_sys(const uint32_t *address) { return load(address); }
inline uint32_t ld_relaxed_gpu(const uint32_t *address) { return load(address); }
inline uint64_t ld_relaxed_gpu(const uint64_t *address) { return load(address); }
inline uint32_t ld_acquire_cta(const uint32_t *address) { return load(address); }
inline void st_release_cta(uint32_t *address, uint32_t value) { store(address, value); }
inline void st_relaxed_sys(uint64_t *address, uint64_t value) { store(address, value); }
inline void st_relaxed_sys(uint32_t *address, uint32_t value) { store(address, value); }
inline void st_release_sys(uint64_t *address, uint64_t value) { store(address, value); }
inline void st_release_sys(uint32_t *address, uint32_t value) { store(address, value); }
inline uint32_t atomic_add_acq_rel_gpu(uint32_t *address, uint32_t value) { return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL); }
inline void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline uint4 ld_stream(const void *address) { uint4 v; memcpy(&v, address, sizeof v); return v; }
inline void st_stream(void *address, const uint4 &v) { memcpy(address, &v, sizeof v); }
inline uint4 ld_relaxed_sys_v4(const void *address) { return ld_stream(address); }
inline void st_relaxed_sys_v4(void *address, const uint4 &v) { st_stream(address, v); }
inline void prefetch_l2(const void *) {}
inline void copy_word_async(void *to, const void *from) { memcpy(to, from, 4); }
inline void copy_words_commit() {}
template <int kPending> void copy_words_wait() {}
inline uint64_t global_timer_ns() { return emulate::now_ns(); }
template <int kThreads> void barrier_among(int index) { emulate::meet_some(index, kThreads); }

}  // namespace deepep::ptx
