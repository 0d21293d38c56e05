// A collective call of normal mode: every rank tells every other what it was called with, and looks at what they say
// before it takes anything from them. A rank's message of call n+1 also says that it is done with call n, so that
// staging of call n may be overwritten. Two generations of messages suffice, because nobody ends a call without
// everybody's message. Ranks of other nodes are told by puts. What a call puts has arrived before the call ends: its
// sources are free for the next one, and a rank may go away after its last call without holding anybody up.
#pragma once
#include "cpu/team/wait.h"

namespace dk {

class Exchange {
 public:
  explicit Exchange(Op &op);  // begins call number n
  uint64_t number() const { return number_; }

  void set_field(int field, int64_t value) { fields_[field] = value; }
  void set_ring(uint64_t slots, uint64_t stride) {
    slots_ = slots;
    stride_ = stride;
  }
  void set_link(uint64_t slots, uint64_t queues) {
    link_slots_ = slots;
    link_queues_ = queues;
  }
  // rows: int32[R], to each rank; experts: int32[E], split among the ranks that hold them. Both may be null.
  void post(const int32_t *rows, const int32_t *experts, int num_local_experts);

  // True if something has happened since the last look: a message has come, or gone. One that disagrees ends the
  // operation.
  bool poll();
  bool complete() const { return num_arrived_ == op_.team.num_ranks && next_unsent_ == op_.team.num_ranks; }
  // Whether all that was put has arrived. Nobody is awaited for that: a peer that has failed meanwhile is no reason to
  // fail too.
  bool delivered() const { return !op_.team.spans_nodes() || op_.team.nic->idle(); }
  // A call that is nothing but its exchange.
  bool wait();
  bool awaits(int peer, Missing &missing) const;
  bool arrived(int peer) const { return arrived_[peer] != 0; }
  CallMessage &message(int peer) const { return op_.team.control().call_from(number_ & 1, peer); }

  // Masked ranks count as arrived (barrier of a team that shrinks).
  bool skip_masked = false;

 private:
  bool agrees(int peer);
  void fill(CallMessage &to, Control &control, const int32_t *rows, const int32_t *experts) const;
  bool signal_remote();

  Op &op_;
  const uint64_t number_;
  int64_t *arrived_;
  int num_arrived_ = 0, next_unsent_ = 0;
  size_t message_bytes_ = 0, row_bytes_ = 0, expert_bytes_ = 0;
  uint64_t slots_ = 0, stride_ = 0, link_slots_ = 0, link_queues_ = 0;
  int64_t fields_[kNumFields] = {};
};

constexpr int64_t kAnyValue = -1;              // of a field that this rank does not care about
constexpr int kArrivedNumbers = kScratch - 1;  // the exchange's place in Team::numbers

}  // namespace dk
