// Software RDMA: what a NIC does for a rank, done by a thread. It keeps no more promises than queue pairs do (see the
// transport section of kernels.h), and breaks all others on purpose, by a seed.
#pragma once
#include <stdint.h>

#include "abi/kernels.h"

namespace dk {

struct Signal {
  void *word = nullptr;  // 64-bit, aligned; in symmetric terms, like every destination
  uint64_t value = 0;
  uint32_t op = DK_SIGNAL_NONE;
};

struct QueueCounts {
  uint64_t posted, completed, bytes, max_queued;
  int32_t created;
};

// Destinations are given as addresses in this rank's own block: the same place of the peer's block is meant. They, like
// peer and QP numbers, are the caller's promise: dk_transport_put is where strangers are checked. The posting functions
// never wait, and never do the work on the calling thread.
class Nic {
 public:
  explicit Nic(struct NicState *state) : state_(state) {}
  static int32_t open(const dk_transport_open_params &p, Nic **out, int32_t *error);
  static void close(Nic *nic);  // drops what is queued

  int num_qps() const;
  bool reaches(int peer) const;
  // False: no room in the QP now; nothing was posted. A lost peer takes everything: nothing is counted or delivered.
  bool put(int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal = {});
  bool signal(int peer, int qp, Signal signal) { return put(peer, qp, nullptr, nullptr, 0, signal); }
  // Operations posted on, and completed by, a QP so far: a source is free once completed() has reached what posted()
  // was after its put.
  uint64_t posted(int peer, int qp) const;
  uint64_t completed(int peer, int qp) const;
  bool idle(int peer, int qp) const { return completed(peer, qp) == posted(peer, qp); }
  bool idle() const;  // all of them
  bool lost(int peer) const;
  void lose(int peer);

  // Where a rank's Doorbell lies in the blocks (see control.h): a peer's is rung when something was signalled there,
  // this rank's own when an operation completed, so that nobody sleeps through either. Null: nobody is to be woken any
  // more.
  void set_doorbell(void *doorbell);

  // For the functions of the interface.
  int32_t rank() const;
  int num_ranks() const;
  uint64_t block_bytes() const;
  void *block() const;  // this rank's own
  bool forked() const;  // in a child of the process that opened it, where no thread serves it
  QueueCounts counts(int peer, int qp) const;
  // Sleeps until room for an operation, or until `until` operations are completed. A lost peer ends both.
  bool wait_for_room(int peer, int qp, uint64_t deadline_ns);
  bool wait_until_completed(int peer, int qp, uint64_t until, uint64_t deadline_ns);
  // A QP that lost an operation in the middle takes everything from then on, like one to a lost peer.
  void break_qp(int peer, int qp, int32_t code);
  int32_t broken(int peer, int qp) const;  // the code; 0: well

 private:
  struct NicState *state_;
};

}  // namespace dk
