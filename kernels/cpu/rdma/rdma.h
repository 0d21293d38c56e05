// Software RDMA: a thread does what a NIC does for a rank. It keeps the guarantees of queue pairs (see the transport
// section of kernels.h) and no others: every order that they do not promise is drawn from a seed.
#pragma once
#include <stdint.h>

#include "abi/kernels.h"

namespace dk {

struct Signal {
  void *word = nullptr;  // 64 bits, aligned; given in this rank's own block, like every destination
  uint64_t value = 0;
  uint32_t op = DK_SIGNAL_NONE;
};

struct QueueCounts {
  uint64_t posted, completed, bytes, max_queued;
  int32_t created;
};

// A destination is an address in this rank's block and means the same offset in the peer's block. Destinations, peers
// and QP numbers are not checked here: dk_transport_put checks those of other callers. The posting functions never
// wait, and never do the work on the calling thread.
class Nic {
 public:
  explicit Nic(struct NicState *state) : state_(state) {}
  static int32_t open(const dk_transport_open_params &p, Nic **out, int32_t *error);
  static void close(Nic *nic);  // drops queued operations

  int num_qps() const;
  bool reaches(int peer) const;
  // False: no room in the QP now; nothing was posted. Operations to a lost peer return true and are dropped.
  bool put(int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal = {});
  bool signal(int peer, int qp, Signal signal) { return put(peer, qp, nullptr, nullptr, 0, signal); }
  // Operations posted on, and completed by, a QP so far: a source is free once completed() has reached the value of
  // posted() after its put.
  uint64_t posted(int peer, int qp) const;
  uint64_t completed(int peer, int qp) const;
  bool idle(int peer, int qp) const { return completed(peer, qp) == posted(peer, qp); }
  bool idle(int peer) const;   // all QPs toward the peer
  bool idle() const;           // all of them
  uint64_t delivered() const;  // operations that have completed on all QPs
  bool lost(int peer) const;
  void lose(int peer);

  // The Doorbell of this rank's block; peers' lie at the same offset of theirs. The NIC rings a peer's after a signal
  // to it, and this rank's after a completion. Null: it rings none.
  void set_doorbell(void *doorbell);

  // For the functions of kernels.h.
  int32_t rank() const;
  int num_ranks() const;
  uint64_t block_bytes() const;
  void *block() const;  // of this rank
  bool forked() const;  // in a forked child, where no thread serves it
  QueueCounts counts(int peer, int qp) const;
  // Sleep until there is room for an operation, or until `until` operations are completed. A lost peer ends both.
  bool wait_for_room(int peer, int qp, uint64_t deadline_ns);
  bool wait_until_completed(int peer, int qp, uint64_t until, uint64_t deadline_ns);
  // A QP that lost an operation drops all later ones, like a QP to a lost peer.
  void break_qp(int peer, int qp, int32_t code);
  int32_t broken(int peer, int qp) const;  // the code; 0: not broken

 private:
  struct NicState *state_;
};

}  // namespace dk
