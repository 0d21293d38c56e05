// A collective call of normal mode: every rank sends its arguments to every other rank and compares the ones it
// receives before it reads their rows. A rank's message of call n+1 also means that it has finished call n, so its
// peers may overwrite the staging of call n. Two generations of messages suffice, because no rank ends a call before it
// has received all messages. Messages to other nodes are puts. A call ends only after its puts have completed: their
// sources are free for the next call, and a rank may leave after its last call without delaying its peers.
//
// In a team that shrinks the exchange goes on without ranks that do not come, and all ranks agree which these are
// (agreement.h). Ranks that missed calls come back with smaller numbers: a message belongs to the call if it is newer
// than the peer's last one that did and the peer has not made it void, and the call gets the greatest number of all.
#pragma once
#include "cpu/team/agreement.h"

namespace dk {

constexpr int64_t kAnyValue = -1;  // of a field that this rank does not compare

class Exchange {
 public:
  explicit Exchange(Op &op);                   // takes the next call number
  uint64_t number() const { return number_; }  // in a team that shrinks, valid once complete

  void set_field(int field, int64_t value) { fields_[field] = value; }
  void set_ring(uint64_t slots, uint64_t stride) {
    slots_ = slots;
    stride_ = stride;
  }
  void set_link(uint64_t slots, uint64_t queues) {
    link_slots_ = slots;
    link_queues_ = queues;
  }
  // The handle of this call, as this rank has it. exchange: the number of its exchange of counts, 0: not known.
  void set_handle(uint64_t exchange, uint64_t matrix_hash) {
    bool known =
        exchange && !(shrinks_ && op_.team.control().state().generation.load());  // ranks count apart after that
    fields_[DK_FIELD_EXCHANGE] = known ? static_cast<int64_t>(exchange) : kAnyValue;
    matrix_hash_ = matrix_hash;
  }
  void set_row_limit(int64_t rows) { row_limit_ = rows; }
  void set_expanded_limit(int64_t rows) { expanded_limit_ = rows; }
  // This rank's arguments are wrong: the exchange still takes place, and every rank refuses the call.
  void refuse(const Refusal &why) {
    if (!mine_.code) mine_ = why;
  }
  // rows: int32[R], to each rank; experts: int32[E], split among the ranks that hold them. Both may be null.
  void post(const int32_t *rows, const int32_t *experts, int num_local_experts);
  // The same with all counts for every rank.
  void post_all(const int32_t *rows, const int32_t *experts, int num_experts) { post(rows, experts, num_experts, 0); }

  // True if a message was received or sent since the last poll. The operation fails if a received message disagrees
  // with this rank's.
  bool poll();
  bool complete() const {
    return (shrinks_ ? agreement_.decided() && announced_ : num_arrived_ == op_.team.num_ranks) &&
           next_unsent_ == op_.team.num_ranks;
  }
  // Whether the rank takes no part in this call, or not any more: it is masked.
  bool without(int peer) const { return shrinks_ && !agreement_.has(peer); }
  bool shrinks() const { return shrinks_; }
  // After the last row: false, with the refusal recorded, if a rank went on without this one, whose rows may be
  // others'.
  bool confirmed();
  // Whether all puts have completed. awaits() names no peer for that: a peer that fails meanwhile does not fail this
  // rank's call.
  bool delivered() const { return !op_.team.spans_nodes() || op_.team.nic->idle(); }
  // A rank refuses the call, as far as known: no rank moves a row then, and the call ends with the exchange.
  bool refused() const { return mine_.code || refused_by_peer_; }
  // This rank takes no part in the call, which it has refused.
  bool left_out() const { return agreement_.left_out_by() >= 0; }
  // Once the exchange is complete: false, with the refusal recorded, if a rank refuses the call or the ranks' handles
  // differ. Every rank comes to the same result, for all have the same messages.
  bool accepted();
  // For a call that only exchanges messages: waits for all of them. False: the call failed or was refused.
  bool wait();
  bool awaits(int peer, Missing &missing) const;
  // Whether rows of the peer may be read.
  bool arrived(int peer) const { return arrived_[peer] != 0 && (!shrinks_ || agreement_.decided()); }
  CallMessage &message(int peer) const {
    return op_.team.control().call_from(shrinks_ ? static_cast<uint64_t>(arrived_[peer]) / 2 : number_ & 1, peer);
  }

 private:
  void post(const int32_t *rows, const int32_t *experts, int num_sent, int step);
  bool agrees(int peer);
  bool handles_agree();
  bool poll_shrinking();
  bool find(int peer);
  void begin_call();
  bool put_message(int peer);
  bool has_told(int peer) const;
  void fill(CallMessage &to, Control &control, const int32_t *rows, const int32_t *experts) const;
  bool signal_remote();

  Op &op_;
  const bool shrinks_;
  uint64_t number_;
  Agreement agreement_;
  int64_t *arrived_;  // by peer, 1; in a team that shrinks, 1 + 2 * the place of the message
  int num_arrived_ = 0, next_unsent_ = 0;
  size_t message_bytes_ = 0, row_bytes_ = 0, expert_bytes_ = 0;
  uint64_t slots_ = 0, stride_ = 0, link_slots_ = 0, link_queues_ = 0;
  int64_t fields_[kNumFields] = {}, row_limit_ = -1, expanded_limit_ = -1;
  uint64_t matrix_hash_ = 0;
  Refusal mine_;
  bool refused_by_peer_ = false, number_known_ = false, all_here_ = false, announced_ = false;
  int next_word_ = 0;     // of the message that is being put: the next of its words before the body
  bool held_up_ = false;  // this rank's message is not posted yet: a rank masks this one
};

constexpr int kArrivedNumbers = kScratch - 1;  // the exchange's array in Team::numbers

}  // namespace dk
