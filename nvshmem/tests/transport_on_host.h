// transport_on_host.h - for tests of kernels across nodes: what the kernels of masks and of low latency call, over the
// network of network.h.
#pragma once
#include "network.h"

#include "internode/mask.cuh"

namespace deepep::internode {
inline void put_by_warp(void *to, const void *from, uint32_t bytes, uint64_t *word, uint64_t value, int rank) {
  __syncwarp();
  if (lane_id() == 0) emulate::put(to, from, bytes, word, value, rank);
  __syncwarp();
}
inline void signal_by_thread(uint64_t *word, uint64_t value, int rank) {
  emulate::put(nullptr, nullptr, 0, word, value, rank);
}
inline void get_by_thread(uint64_t *to, const uint64_t *from, int words, int rank) {
  emulate::get(to, from, static_cast<size_t>(words), rank);
}
inline void quiet_by_thread() {
  while (emulate::puts_under_way()) emulate::step();
}
}  // namespace deepep::internode
