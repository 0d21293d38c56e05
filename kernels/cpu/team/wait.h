// The only way to wait for peers: poll, else spin briefly, yield, and sleep on the doorbell.
#pragma once
#include "cpu/team/op.h"

namespace dk {

enum class Poll { done, progress, idle };

// What a wait is for: messages of peers, or work of this rank's own NIC toward them. What is queued for a lost peer
// counts as done, and toward a peer that only takes no part any more, as after Release, the NIC goes on.
enum class Awaited { messages, own_nic };

struct Missing {  // what a peer has not sent yet, for the failure record
  int64_t expected = 0, seen = 0;
};

// One wait, from the last progress to the next.
class Waiter {
 public:
  Waiter(Op &op, Awaited what);
  void begin();  // no progress: wakes the peers that this operation has written to
  void end();    // progress
  enum class PeerCheck { keep_waiting, poll_again, stop_waiting };
  // stop_waiting: the peer was masked, or is not to be blamed yet, or the operation has failed. A peer may have written
  // the awaited word just before it failed or died, so the first check says poll_again, and only the second gives the
  // peer up.
  PeerCheck check_peer(int peer);
  bool more_to_blame(int peer, int than) const;
  void spin_or_sleep(int first, const Missing &missing);

 private:
  uint64_t awake() const;
  void excuse_stall(uint64_t stall);
  bool is_crossed_with(int peer, uint64_t waited);
  void tell_other_nodes(int awaited);
  int culprit(int first);
  void announce();
  void retract();
  void give_up_on(int peer, int32_t code);

  Op &op_;
  const Awaited what_;
  Doorbell &doorbell_;
  uint64_t since_ = 0, now_ = 0;       // since_: later by the time in which this rank did not run
  uint64_t told_ = 0, delivered_ = 0;  // when other nodes were told last; the NIC's count at the first time
  uint64_t crossed_ = 0;               // the peer's stamp when the two waits were first seen to be crossed
  int awaited_ = -1, suspect_ = -1, rounds_ = 0, stalls_ = 0, spins_, yields_;
  uint32_t seen_ = 0;
  bool announced_ = false;
};

// Leaves the peer out of this rank's calls, and tells it so where its block is mapped; takes it back.
void mask_peer(Team &team, int peer);
void unmask_peer(Team &team, int peer);
// A remote rank's copies of this rank's generation and lifts, and its notice that it is masked, are brought up to date
// by puts on QP 0, before the messages that this rank puts next. False: no room now; the next call goes on.
bool tell(Team &team, int peer);
void tell_all(Team &team);

// Calls poll() until it returns done; false: the operation failed, and the failure is recorded. poll does all work that
// is possible now. awaits(peer, Missing &) returns whether poll needs that peer. The time limit counts from the last
// progress, less the time in which this rank did not run. With op.may_shrink a peer that is dead, failed or late is
// masked, and poll has to go on without it.
template <class PollFn, class AwaitsFn>
bool wait_until(Op &op, PollFn poll, AwaitsFn awaits, Awaited what = Awaited::messages) {
  Waiter waiter(op, what);
  while (!op.aborted()) {
    Poll found = poll();
    if (op.failed()) break;
    if (found != Poll::idle) {
      waiter.end();
      if (found == Poll::done) return true;
      continue;
    }
    waiter.begin();
    int first = -1;
    Missing missing;
    bool changed = false;
    for (int peer = 0; peer < op.team.num_ranks && !op.failed(); peer++) {
      Missing here;
      if (peer == op.team.rank || !awaits(peer, here)) continue;
      Waiter::PeerCheck check = waiter.check_peer(peer);
      changed |= check != Waiter::PeerCheck::keep_waiting;
      if (check == Waiter::PeerCheck::poll_again) break;
      if (check == Waiter::PeerCheck::stop_waiting) continue;
      if (first < 0 || waiter.more_to_blame(peer, first)) {
        first = peer;
        missing = here;
      }
    }
    if (!op.failed() && !changed) waiter.spin_or_sleep(first, missing);
  }
  waiter.end();
  return false;
}

}  // namespace dk
