// Data that its writer may overwrite while a reader reads it. The writer first stores a word that says so; the reader
// reads that word last, and drops what it has read. Sequentially consistent accesses of the word are enough on x86-64
// alone: on aarch64 plain stores after its store may become visible before it, and plain loads before its load may
// happen after it.
#pragma once
#include <atomic>

namespace dk {

#if defined(__SANITIZE_THREAD__)
#pragma GCC diagnostic ignored "-Wtsan"  // gcc's TSan does not know fences
#endif
inline void before_overwriting() { std::atomic_thread_fence(std::memory_order_release); }  // after the word's store
inline void after_reading() { std::atomic_thread_fence(std::memory_order_acquire); }       // before the word's load

}  // namespace dk
