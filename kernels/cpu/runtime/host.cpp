// Host memory is device memory here, so registering does nothing; dk_host_wait waits for a word that an operation
// writes.
#include "cpu/runtime/futex.h"

namespace dk {
namespace {

constexpr uint64_t kSlice = 5000000;  // the engine sets abort_word without a wake: poll it this often
constexpr int kSpins = 64;

bool gave_up(const dk_status *status) {
  return status &&
         (__atomic_load_n(&status->sticky, __ATOMIC_ACQUIRE) || __atomic_load_n(&status->abort_word, __ATOMIC_ACQUIRE));
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_host_register(dk_host_register_params *p) {
  DK_ENTER(p);
  p->address = 0;
  if (!p->device || !p->host || !p->bytes) return DK_EINVAL;
  p->address = p->host;
  return DK_OK;
}

DK_EXPORT int32_t dk_host_unregister(dk_host_unregister_params *p) {
  DK_ENTER(p);
  return p->device && p->host ? DK_OK : DK_EINVAL;
}

DK_EXPORT int32_t dk_host_wait(dk_host_wait_params *p) {
  DK_ENTER(p);
  if (!p->device || !p->host_word || p->host_word % 8) return DK_EINVAL;
  const uint64_t *word = at<const uint64_t>(p->host_word);
  const dk_status *status = at<const dk_status>(p->host_status);
  uint64_t start = 0, waited = 0;
  for (int spins = 0;; spins++) {
    uint64_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (seen >= p->at_least) return DK_OK;
    if (gave_up(status)) {
      // The operation may have written the word just before it recorded its failure.
      return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= p->at_least ? DK_OK : DK_EABORTED;
    }
    if (spins < kSpins) {
      cpu_relax();
      if (spins > 0 || p->timeout_ns) continue;
    }
    uint64_t now = now_ns();
    if (!start) start = now;
    waited = now - start;
    if (waited >= p->timeout_ns) return DK_ETIMEOUT;
    // Operations wake the low half of the word (little endian).
    sleep_on(*at<Word>(p->host_word), static_cast<uint32_t>(seen), min(kSlice, p->timeout_ns - waited), Scope::process);
  }
}
