// Software RDMA: what a NIC does for a rank, done by a thread. It keeps no more promises than queue pairs do (see the transport
// section of kernels.h), and breaks all others on purpose, by a seed.
#pragma once
#include <stdint.h>

#include "abi/kernels.h"

namespace dk {

struct Signal {
  void *word = nullptr;  // 64-bit, aligned; in symmetric terms, like every destination
  uint64_t value = 0;
  uint32_t op = DK_SIGNAL_NONE;
};

// Destinations are given as addresses in this rank's own block: the same place of the peer's block is meant.
// The posting functions never wait. One thread posts at a time (the operation that runs).
class Nic {
 public:
  static int32_t open(const dk_transport_open_params &p, Nic **out);
  static void close(Nic *nic);  // drops what is queued

  int num_qps() const;
  bool reaches(int peer) const;
  // False: no room in the QP now; nothing was posted. A lost peer takes everything and delivers nothing.
  bool put(int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal = {});
  bool signal(int peer, int qp, Signal signal) { return put(peer, qp, nullptr, nullptr, 0, signal); }
  // Operations posted on, and completed by, a QP so far: a source is free once completed() has reached what posted() was
  // after its put.
  uint64_t posted(int peer, int qp) const;
  uint64_t completed(int peer, int qp) const;
  bool idle(int peer, int qp) const { return completed(peer, qp) == posted(peer, qp); }
  bool idle() const;  // all of them
  bool lost(int peer) const;
  void lose(int peer);

  // Where a rank's Bell lies in the blocks (see control.h): a peer's is rung when something was signalled there, this rank's
  // own when an operation completed, so that nobody sleeps through either.
  void set_bell(void *own_bell);

 private:
  Nic();
  ~Nic();
  struct State;
  State *state_;
};

}  // namespace dk
