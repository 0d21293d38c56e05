#include "cpu/team/wait.h"

#include <sched.h>

#include "cpu/runtime/order.h"

namespace dk {
namespace {

constexpr uint64_t kSlice = 10000000;      // the engine sets abort_word and dead[] without a wake: poll them this often
constexpr uint64_t kAwake = 1000000000;    // a rank whose heartbeat is younger is waiting itself
constexpr uint64_t kCrossed = 2000000000;  // two ranks that wait for each other for so long wait for ever
constexpr uint64_t kStall = 200000000;     // a rank that has not polled for so long did not run
constexpr int kStalls = 8;                 // of a wait: more than these count as time waited
constexpr uint64_t kTelling = 50000000;    // between two words to other nodes of whom this rank waits for
constexpr int kPauses = 16;                // in a spin
constexpr int kSpinsAlone = 200, kYieldsAlone = 20;  // a core for each rank: about 30 us before sleeping
constexpr int kSpinsShared = 2, kYieldsShared = 12;  // ranks share cores: the awaited rank may need this one

// How old a word is. It may be newer than `now`: the reader may have been interrupted since it took the time.
uint64_t age(uint64_t stamp, uint64_t now) { return now > stamp ? now - stamp : 0; }

// Whom a rank of another node waits for, as it puts it into every other node: microseconds, then the rank, plus 1.
uint64_t pack_wait(int rank, uint64_t now) { return now / 1000 << 16 | static_cast<uint64_t>(rank + 1); }
int waits_for(uint64_t packed, uint64_t now, uint64_t awake) {
  return age(packed >> 16, now / 1000) <= awake / 1000 ? static_cast<int>(packed & 0xffff) - 1 : -1;
}

// The rank that `peer` waits for, or that it blamed when it failed; -1: it does not wait, or its last word of that is
// older than `awake`: it does not run, or its words do not arrive.
int awaited_by(Team &team, int peer, uint64_t now, uint64_t awake) {
  FailureRecord &failure_record = team.failure_record_of(peer);
  if (!team.is_local(peer)) {
    int awaited = waits_for(team.remote().wait_of(peer).load(), now, awake);
    return awaited < 0 && failure_record.set.load() ? failure_record.failure.peer : awaited;
  }
  Heartbeat &heartbeat = team.peers[peer].control.heartbeat();
  int awaited = heartbeat.awaiting.load() - 1;
  if (awaited < 0) return failure_record.set.load() ? failure_record.failure.peer : -1;
  return age(heartbeat.stamp_ns.load(), now) > awake ? -1 : awaited;
}

// "Waits for rank r", followed from peer to peer.
struct Chain {
  enum Kind { ends, circles, comes_back } kind;  // at a rank that does not wait; elsewhere; to this rank
  int last;                                      // rank of the chain, before this one
};
Chain follow(Team &team, int peer, uint64_t now, uint64_t awake) {
  for (int hops = 0; hops < team.num_ranks; hops++) {
    int next = awaited_by(team, peer, now, awake);
    if (next < 0 || next >= team.num_ranks) return {Chain::ends, peer};
    if (next == team.rank) return {Chain::comes_back, peer};
    peer = next;
  }
  return {Chain::circles, peer};
}

// The last rank of a chain is late. Where the chain runs in a circle the network is cut: words of another node's ranks
// have arrived, so it is a rank of this node, for which one of another node waits, that does not get through.
int find_culprit(Team &team, int peer, uint64_t now, uint64_t awake) {
  Chain chain = follow(team, peer, now, awake);
  if (chain.kind == Chain::ends) return chain.last;
  int at = chain.kind == Chain::comes_back ? peer : chain.last;  // on the circle
  for (int hops = 0; hops < team.num_ranks && at >= 0 && at != team.rank; hops++) {
    int next = awaited_by(team, at, now, awake);
    if (next >= 0 && next != team.rank && !team.is_local(at) && team.is_local(next)) return next;
    at = next;
  }
  return chain.last;
}

}  // namespace

Waiter::Waiter(Op &op, Awaited what) : op_(op), what_(what), doorbell_(op.team.control().doorbell()) {
  bool alone = op.team.num_ranks <= op.team.device->cores;
  spins_ = alone ? kSpinsAlone : kSpinsShared;
  yields_ = alone ? kYieldsAlone : kYieldsShared;
}

// How old a rank's word may be that it waits itself.
uint64_t Waiter::awake() const { return min(kAwake, op_.timeout_ns / 2); }

void Waiter::begin() {
  op_.ring_now();
  uint64_t before = now_;
  now_ = now_ns();
  if (!since_)
    since_ = now_;
  else if (now_ - before >= min(kStall, op_.timeout_ns / 4))
    excuse_stall(now_ - before);
}

// This rank did not run, perhaps its whole host: the time says nothing about its peers, which may just begin to run
// again too. They have time to say that they wait themselves.
void Waiter::excuse_stall(uint64_t stall) {
  if (stalls_ == kStalls) return;
  stalls_++;
  since_ += stall;
  uint64_t most = op_.timeout_ns - awake();
  if (now_ - since_ > most) since_ = now_ - most;
}

void Waiter::end() {
  if (announced_) retract();
  if (since_) op_.waited(awaited_, now_ns() - since_);
  since_ = told_ = crossed_ = 0;
  awaited_ = suspect_ = -1;
  rounds_ = stalls_ = 0;
  op_.team.control().heartbeat().awaiting.store(0, std::memory_order_relaxed);
}

void Waiter::give_up_on(int peer, int32_t code) {
  uint64_t waited = now_ - since_;
  if (op_.may_shrink)
    mask_peer(op_.team, peer);
  else if (!op_.adopt_failure_of(peer, waited))  // also of a rank that has left, because of that
    op_.fail(code, peer, DK_FIELD_NONE, 0, 0, waited);
}

Waiter::PeerCheck Waiter::check_peer(int peer) {
  Team &team = op_.team;
  bool sends = what_ == Awaited::messages;
  bool dead = sends && __atomic_load_n(&team.status->dead[peer], __ATOMIC_ACQUIRE),
       failed = sends && team.failure_record_of(peer).set.load();
  bool late = op_.may_shrink && now_ - since_ >= op_.timeout_ns;
  if (!dead && !failed && !late) return PeerCheck::keep_waiting;
  // A rank that itself waits for another one will mask that one at about this deadline: it has as long again.
  if (!dead && !failed && now_ - since_ < 2 * op_.timeout_ns && awaited_by(team, peer, now_, awake()) >= 0) {
    sched_yield();
    return PeerCheck::stop_waiting;
  }
  if (suspect_ != peer) {
    suspect_ = peer;
    return PeerCheck::poll_again;
  }
  give_up_on(peer, dead ? DK_EPEERDEAD : DK_OK);
  return PeerCheck::stop_waiting;
}

// Of several awaited peers the one to blame is one that does not wait itself, else one that does not wait for this
// rank. Others follow this rank's word of it, so it is chosen before the deadline; not before is_crossed_with() has
// looked.
bool Waiter::more_to_blame(int peer, int than) const {
  if (now_ - since_ < op_.timeout_ns / 8 * 5) return false;
  auto excuse = [this](int rank) {
    if (awaited_by(op_.team, rank, now_, awake()) < 0) return 0;
    return follow(op_.team, rank, now_, awake()).kind == Chain::comes_back ? 2 : 1;
  };
  return excuse(peer) < excuse(than);
}

// Both ranks wait for each other, in different operations, and one rank runs one operation at a time: none can go on.
// The peer has to say so twice: it may have been stopped just before it would have seen what this rank sent.
bool Waiter::is_crossed_with(int peer, uint64_t waited) {
  uint64_t enough = min(kCrossed, op_.timeout_ns / 2);
  if (peer < 0 || waited < enough || op_.may_shrink || !op_.team.is_local(peer)) return false;
  Heartbeat &theirs = op_.team.peers[peer].control.heartbeat();
  uint64_t since = theirs.since_ns.load(), stamp = theirs.stamp_ns.load();
  if (theirs.awaiting.load() != op_.team.rank + 1 || theirs.op.load() == op_.op || stamp < since + enough) return false;
  if (!crossed_) crossed_ = stamp;
  return stamp > crossed_;
}

// A wait that lasts is told to the ranks of other nodes, which cannot read this rank's heartbeat.
void Waiter::tell_other_nodes(int awaited) {
  Team &team = op_.team;
  if (!team.spans_nodes() || now_ - max(since_, told_) < kTelling) return;
  if (!told_) delivered_ = team.nic->delivered();
  told_ = now_;
  Signal word = {&team.remote().wait_of(team.rank), pack_wait(awaited, now_), DK_SIGNAL_SET};
  for (int peer = 0; peer < team.num_ranks; peer++)
    if (!team.is_local(peer)) team.nic->signal(peer, 0, word);  // without room in the QP: the next time
}

// The rank to blame at the deadline: this one, if its own NIC has not delivered anything since the wait was told.
int Waiter::culprit(int first) {
  Team &team = op_.team;
  if (told_ && !team.nic->idle() && team.nic->delivered() == delivered_) return team.rank;
  return first < 0 ? -1 : find_culprit(team, first, now_, awake());
}

void Waiter::spin_or_sleep(int first, const Missing &missing) {
  uint64_t waited = now_ - since_;
  if (awaited_ < 0) awaited_ = first;
  Heartbeat &heartbeat = op_.team.control().heartbeat();
  heartbeat.awaiting.store(first + 1, std::memory_order_relaxed);
  heartbeat.since_ns.store(since_, std::memory_order_relaxed);
  heartbeat.stamp_ns.store(now_, std::memory_order_release);  // last: it vouches for the other two
  tell_other_nodes(first);
  if (is_crossed_with(first, waited)) {
    uint32_t theirs = op_.team.peers[first].control.heartbeat().op.load();
    op_.fail(DK_EMISMATCH, first, DK_FIELD_OPERATION, op_.op, theirs, waited);
    return;
  }
  if (waited >= op_.timeout_ns) {
    op_.fail(DK_ETIMEOUT, culprit(first), DK_FIELD_NONE, missing.expected, missing.seen, waited);
    return;
  }
  if (announced_) {
    sleep_on(doorbell_.count, seen_, min(kSlice, op_.timeout_ns - waited), Scope::machine);
    retract();
    return;
  }
  if (rounds_ < spins_) {
    for (int i = 0; i < kPauses; i++) cpu_relax();
  } else if (rounds_ < spins_ + yields_) {
    sched_yield();
  } else {
    announce();
  }
  rounds_++;
}

// The next poll happens with `sleepers` raised, so a write between that poll and the sleep rings the doorbell.
void Waiter::announce() {
  doorbell_.sleepers.fetch_add(1);
  seen_ = doorbell_.count.load();
  announced_ = true;
}

void Waiter::retract() {
  doorbell_.sleepers.fetch_sub(1);
  announced_ = false;
}

// The notice comes before anything that this rank does without the peer, such as using its staging again.
void mask_peer(Team &team, int peer) {
  team.control().peer_state(peer).masked = 1;
  if (peer == team.rank) return;
  if (!team.is_local(peer)) {
    team.told[peer].notice_wanted = team.remote().lifts_of(peer).load() + 1;
    tell(team, peer);
    return;
  }
  const Control &theirs = team.peers[peer].control;
  theirs.notice_from(team.rank).store(theirs.state().lifts.load() + 1);
  before_overwriting();
  theirs.doorbell().ring();
}

void unmask_peer(Team &team, int peer) {
  team.control().peer_state(peer).masked = 0;
  if (team.is_local(peer)) {
    team.peers[peer].control.notice_from(team.rank).store(0);
    return;
  }
  team.told[peer].notice_wanted = 0;
  tell(team, peer);
}

bool tell(Team &team, int peer) {
  if (!team.told || team.is_local(peer)) return true;
  auto put = [&](std::atomic<uint64_t> &word, uint64_t value, uint64_t &last) {
    if (last != value && !team.nic->signal(peer, 0, {&word, value, DK_SIGNAL_SET})) return false;
    last = value;
    return true;
  };
  const RankState &state = team.control().state();
  Told &told = team.told[peer];
  return put(team.remote().generation_of(team.rank), state.generation.load(), told.generation) &&
         put(team.remote().lifts_of(team.rank), state.lifts.load(), told.lifts) &&
         put(team.control().notice_from(team.rank), told.notice_wanted, told.notice);
}

void tell_all(Team &team) {
  for (int peer = 0; team.told && peer < team.num_ranks; peer++) tell(team, peer);
}

}  // namespace dk
