// Doorbells: how a rank or a NIC wakes a rank that may sleep in another process.
#pragma once
#include "cpu/runtime/futex.h"

namespace dk {

// Peers ring it after they have written something that this rank may be waiting for.
struct alignas(kLine) Doorbell {
  Word count, sleepers;

  // A rank that is about to sleep adds itself to `sleepers`, polls once more, and sleeps while `count` stays the same.
  void ring() {
    if (sleepers.load() == 0) return;
    count.fetch_add(1);
    wake_all(count, Scope::machine);
  }
};
static_assert(sizeof(Doorbell) == kLine, "it shares its line with nothing");

}  // namespace dk
