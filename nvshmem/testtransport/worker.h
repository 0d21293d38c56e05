// worker.h - what the host, kernels that post by themselves, and the worker have in common. The worker is a kernel that
// plays the NIC: it takes operations from rings, one for each peer and kind of poster, passes them through the model's
// port, copies, and lets words and completions appear when they are due.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "interface.h"
#include "nic.h"

namespace testtransport {

constexpr int kMaxPes = 8, kMaxQueues = 2 * kMaxPes, kMaxAreas = 32;
constexpr uint32_t kRingSlots = 4096;
constexpr int kWorkerThreads = 1024, kWorkerBlocks = 3;  // one keeps the time, the others copy

// An operation: a copy, then an operation on a word; either may be absent.
struct alignas(16) Post {
  uint64_t target, source;  // of the copy; of an atomic: where its result goes, the operand of a comparison
  uint64_t word, value;
  uint64_t result_flag;  // follows the result
  uint32_t bytes;
  uint8_t atomic, word_bytes;  // word_bytes 0: no word
  uint8_t flags, pe;
  uint64_t pad;
  uint64_t ready;  // the ring's lap, from 1; written last
};
static_assert(sizeof(Post) == 64, "four loads of 16 bytes");
enum PostFlags : uint8_t {
  kSymmetric = 1,  // target and word are named by the poster's own addresses
  kReturns = 2,    // asks the peer: two crossings
  kHasResult = 4
};

// Queues of a PE: what the host posts, and what kernels post.
__host__ __device__ constexpr int host_queue(int pe) { return 2 * pe; }
__host__ __device__ constexpr int kernel_queue(int pe) { return 2 * pe + 1; }

// A part of the symmetric heap, where it lies for the poster, and how far from there each PE's is mapped.
struct Area {
  uint64_t begin, bytes;
  int64_t shift[kMaxPes];
};

// In host memory that the GPU reads and writes.
struct WorkerControl {
  uint64_t stop;  // the host: do what is posted, then end
  uint64_t lost;  // the host: a bit for each PE toward which nothing goes any more
  uint64_t running;
  uint64_t taken[kMaxQueues], done[kMaxQueues];   // operations, from the start
  uint64_t tick_ns;                               // of the GPU's clock: so much later than it says it may be
  uint64_t outside;                               // operations dropped, since the heap has no such address
  uint64_t chunks, arrivals, late_ns, latest_ns;  // see testtransport_nic
};

// A copy for one warp of those that copy. Each half is one access and has the tag.
struct alignas(16) Mail {
  uint64_t source;
  uint32_t bytes, tag;
  uint64_t target;
  uint32_t begin_ns, tag_too;  // begin_ns: the low bits of the clock
};
constexpr uint32_t kWindow = 128;  // chunks under way

struct WorkerState {  // device memory
  Mail mail[kWindow];
  uint32_t moved[kWindow];
  uint64_t ended;  // the launch that has
  // Kept between launches. Times: picoseconds since `origin`, a time of %globaltimer.
  uint64_t origin;
  NicPort port;
  RoundRobin turn;
  uint64_t chunks, heads[kMaxQueues];
  // What the host sets before a launch.
  NicTiming timing;
  int num_queues, num_areas;
  Post *rings[kMaxQueues];
  Area areas[kMaxAreas];
  // Kernels that post: the next ticket, how many have been taken, how many are done.
  uint64_t tickets[kMaxQueues], taken[kMaxQueues], done[kMaxQueues];
};

struct WorkerParams {
  WorkerState *state;
  WorkerControl *control;
  uint64_t launch;    // from 1
  uint64_t idle_ns;   // the worker ends after so long without work
  uint64_t early_ns;  // bytes may be written so long before they are due: a copy is complete later than it began
};

}  // namespace testtransport
