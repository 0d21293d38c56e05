#include "cpu/runtime/futex.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace dk {

static int operation(int op, Scope scope) { return scope == Scope::process ? op | FUTEX_PRIVATE_FLAG : op; }

void sleep_on(Word &word, uint32_t seen, uint64_t nanoseconds, Scope scope) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(nanoseconds / 1000000000u);
  limit.tv_nsec = static_cast<long>(nanoseconds % 1000000000u);
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), operation(FUTEX_WAIT, scope), seen, &limit, nullptr, 0);
}

void wake_all(Word &word, Scope scope) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), operation(FUTEX_WAKE, scope), INT_MAX, nullptr, nullptr, 0);
}

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace dk
