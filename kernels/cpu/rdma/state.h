// State of the software NIC that posting threads and the NIC's thread share.
#pragma once
#include <pthread.h>
#include <sys/types.h>

#include "cpu/rdma/rdma.h"
#include "cpu/runtime/doorbell.h"
#include "cpu/runtime/heap.h"

namespace dk {

struct Work {
  uint64_t dst, src, bytes;  // addresses in this process: the NIC has the peer's block mapped
  uint64_t word, value;
  uint32_t op;
  uint64_t source_sum;  // checksum of the source when it was posted; LATE only
};

// Delays of a queue under LATE. Only the thread uses it.
struct Delay {
  static constexpr int kMaxPieces = 4;
  uint64_t due, done_due;  // earliest time of the next piece, of the next completion
  uint64_t cuts[kMaxPieces + 1];
  int pieces, next, first;              // of the operation in progress; 0 pieces: none
  int remaining;                        // operations until the queue draws again whether it is deferred
  bool drawn, deferred, done_deferred;  // deferred: only after all other work is done
  bool active;                          // listed in NicState::active
};

struct alignas(kLine) Queue {
  std::atomic<uint64_t> posted, bytes, max_queued;  // written under NicState::posting
  Work *ring;
  int32_t peer, created;
  std::atomic<int32_t> broken;
  alignas(kLine) std::atomic<uint64_t> completed;  // the thread writes this and the rest
  uint64_t executed;
  Delay delay;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  uint64_t below(uint64_t n) { return next() % n; }

 private:
  uint64_t state_;
};

struct NicState {
  int32_t rank, num_ranks, num_qps, num_peers;
  uint64_t depth, mask, block_bytes, my_block, num_queues;
  uint32_t flags;
  pid_t owner;
  Random random;  // only the thread uses it

  OwnedArray<int32_t> slots;                // by rank: index among the peers; -1: not a peer
  OwnedArray<uint64_t> blocks;              // by slot
  OwnedArray<std::atomic<uint32_t>> lost;   // by slot
  OwnedArray<uint64_t> ringing;             // bit by slot: doorbells to ring; only the thread uses it
  OwnedArray<Queue> queues;                 // [peer slot][QP]
  Work *rings = nullptr;                    // mapped, not allocated: untouched pages of deep queues cost nothing
  OwnedArray<std::atomic<uint64_t>> ready;  // bit by queue: something was posted
  OwnedArray<int32_t> active;               // queues with delayed work (LATE)
  uint64_t num_words;                       // of `ready`

  pthread_mutex_t posting = PTHREAD_MUTEX_INITIALIZER;
  pthread_t thread;
  Word doorbell{0};  // the thread sleeps on it
  std::atomic<bool> asleep{false}, ending{false};
  Word completions{0};  // threads that wait for completions sleep on it
  std::atomic<uint32_t> waiters{0};
  std::atomic<uint64_t> doorbell_offset{0};  // offset in a block + 1; 0: none

  explicit NicState(const dk_transport_open_params &p);
  ~NicState();

  Queue &queue(int peer, int qp) const { return queues[static_cast<uint64_t>(slots[peer] * num_qps + qp)]; }
  Work &work(const Queue &q, uint64_t number) const { return q.ring[number & mask]; }
  bool is_down(const Queue &q) const { return lost[slots[q.peer]].load() || q.broken.load(); }
};

// thread.cpp
int start_thread(NicState &nic);  // returns errno
void stop_thread(NicState &nic);
void notify_thread(NicState &nic, const Queue &q);  // wakes the thread for a queue
// Called by the thread alone:
void carry_out_signal(NicState &nic, const Queue &q, const Work &work);
void complete(NicState &nic, Queue &q, uint64_t until);
bool drop_if_down(NicState &nic, Queue &q);     // completes all that was posted, if the queue is down
void ring_doorbells(NicState &nic, bool mine);  // of peers that were signalled, and this rank's
void sleep_until_posted(NicState &nic, uint64_t nanoseconds);

// delay.cpp
void serve_late(NicState &nic);
uint64_t sum_of(const void *bytes, uint64_t count);

}  // namespace dk
