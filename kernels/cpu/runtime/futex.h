// Sleeping until a word changes, and the clock of all deadlines.
#pragma once
#include <atomic>

#include "cpu/runtime/base.h"

namespace dk {

using Word = std::atomic<uint32_t>;

enum class Scope { process, machine };  // threads of this process may wake, or of any process that maps the word

// Sleeps while `word` holds `seen`, at most `nanoseconds`. May return early.
void sleep_on(Word &word, uint32_t seen, uint64_t nanoseconds, Scope scope);
void wake_all(Word &word, Scope scope);

uint64_t now_ns();  // CLOCK_MONOTONIC

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // about as long as x86's pause; yield does nothing on most processors
#endif
}

}  // namespace dk
