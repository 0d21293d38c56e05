// nic.h - the model of a NIC: when operations pass the port, and when they take effect. Pure: the caller has the time.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace testtransport {

// In picoseconds: at 50 GB/s a byte takes 20, and a signal's 8 bytes 160.
struct NicTiming {
  uint64_t latency = 0;
  uint64_t byte_1024 = 0;  // of 1024 bytes, 0: any number in no time
  uint64_t post = 0;       // an operation takes the port at least that long
};

struct Passage {
  uint64_t begin, end, due;  // the port serves it from begin to end; it takes effect at due
};

// How long the port serves the next `bytes` of an operation; `first`: they begin it.
__host__ __device__ inline uint64_t port_time(const NicTiming &timing, uint64_t bytes, bool first) {
  const uint64_t wire = (bytes * timing.byte_1024 + 1023) / 1024;
  return first && wire < timing.post ? timing.post : wire;
}

// A rank's way out: one operation after the other, in the order in which they are given to it.
struct NicPort {
  uint64_t free = 0;

  // When it begins to serve what waits since `now` at the latest and takes so long.
  __host__ __device__ uint64_t begin(uint64_t now, uint64_t time) {
    const uint64_t at = free > now ? free : now;
    free = at + time;
    return at;
  }
  // `crossings`: 1, or 2 for what asks a peer and comes back.
  __host__ __device__ Passage pass(const NicTiming &timing, uint64_t now, uint64_t bytes, bool first, int crossings) {
    const uint64_t at = begin(now, port_time(timing, bytes, first));
    return {at, free, free + timing.latency * static_cast<uint64_t>(crossings)};
  }
};

// Which of the queues that have something is served next: each in its turn.
struct RoundRobin {
  uint32_t next = 0;

  // `waiting`: a bit for each queue, not 0.
  __host__ __device__ int pick(uint32_t waiting) {
    const uint32_t later = waiting >> next << next, from = later != 0 ? later : waiting;
    int queue = 0;
    while ((from >> queue & 1) == 0) ++queue;
    next = queue == 31 ? 0 : static_cast<uint32_t>(queue) + 1;
    return queue;
  }
};

}  // namespace testtransport
