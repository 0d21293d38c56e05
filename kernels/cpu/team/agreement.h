// Which ranks take part in a collective call of a team that shrinks. Each rank begins with those that it has not
// masked, drops those that die, are late or are dropped by others, and posts the ranks that it counts in (its ballot)
// once it has the message of each of them. It decides when all of them have posted the same ballot; a rank that has
// decided says so, and the others that it counts in decide alike. Ballots only lose ranks until then, so two ranks that
// count each other in decide alike, whatever is late or dies when (RATIONALE).
// A rank that another has masked takes no part, and says so at once; but in a barrier, where ranks meet after they have
// lifted masks, it waits and says nothing, for the other may not have come as far yet.
#pragma once
#include "cpu/team/wait.h"

namespace dk {

class Exchange;

class Agreement {
 public:
  explicit Agreement(Op &op);

  // Whether the rank is counted in; once decided, and not masked since: it takes part.
  bool has(int peer) const { return ranks_.has(peer); }
  bool decided() const { return decided_; }
  // The rank that has masked this one, -1: none. Then this rank takes no part.
  int left_out_by() const { return left_out_by_; }

  // Each of these returns whether something has changed. `number` of a peer: the number of its message of this call.
  bool drop_masked();  // ranks that this rank has masked meanwhile
  bool look_at_notices();
  // In a barrier: a rank masks this one since this rank has lifted masks, and may take it back.
  bool is_held_up() const;
  bool holds_up(int peer) const { return patient_ && leaves_out(peer); }
  bool hear(int peer, uint64_t number);
  // Once the messages of all that are counted in are here: posts the ballot with this rank's number, and decides once
  // all have posted the same. number(peer): of its message.
  template <class Number>
  bool vote(uint64_t mine, Number number);
  // Whether the peer's ballot differs from this rank's.
  bool awaits(int peer, uint64_t number) const;
  void announce(uint64_t mine) { post(mine); }  // the decision
  // Ballots to ranks of other nodes are put as their QPs have room. False: not all have gone to ranks that take part.
  bool flush();

 private:
  struct Vote {
    RankSet ranks;
    bool decided;
  };
  bool read(int peer, uint64_t number, Vote &vote) const;
  void post(uint64_t number);
  bool put_ballot(int peer);
  void leave(int peer);
  bool leaves_out(int peer) const;

  Op &op_;
  Team &team_;
  const bool patient_;             // waits for a rank that masks this one
  RankSet ranks_, told_, posted_;  // counted in; whom this rank tells; its newest ballot
  uint64_t revision_ = 0, version_ = 0;
  RankSet unsent_;                   // remote ranks that the newest ballot has not gone to
  uint8_t next_word_[DK_MAX_RANKS];  // of them: the next of its words
  int left_out_by_ = -1;
  bool decided_ = false;
};

template <class Number>
bool Agreement::vote(uint64_t mine, Number number) {
  bool progress = false;
  if (!revision_ || !(posted_ == ranks_)) {
    post(mine);
    progress = true;
  }
  for (int peer = 0; peer < team_.num_ranks && !decided_; peer++)
    if (peer != team_.rank && has(peer) && awaits(peer, number(peer))) return progress;
  decided_ = true;
  return true;
}

}  // namespace dk
