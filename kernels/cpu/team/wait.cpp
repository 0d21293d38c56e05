#include "cpu/team/wait.h"

#include <sched.h>

namespace dk {
namespace {

constexpr uint64_t kSlice = 10000000;      // the engine sets abort_word and dead[] without a wake: poll them this often
constexpr uint64_t kAwake = 1000000000;    // a rank whose heartbeat is younger is waiting itself
constexpr uint64_t kCrossed = 2000000000;  // two ranks that wait for each other for so long wait for ever
constexpr int kPauses = 16;                // in a spin
constexpr int kSpinsAlone = 200, kYieldsAlone = 20;  // a core for each rank: about 30 us before sleeping
constexpr int kSpinsShared = 2, kYieldsShared = 12;  // ranks share cores: the awaited rank may need this one

// The rank that `peer` waits for, or that it blamed when it failed; -1: it does not wait, or is on another node, where
// heartbeats cannot be read.
int awaited_by(Team &team, int peer, uint64_t now) {
  int awaited = team.is_local(peer) ? team.peers[peer].control.heartbeat().awaiting.load() - 1 : -1;
  if (awaited < 0) {
    FailureRecord &failure_record = team.failure_record_of(peer);
    return failure_record.set.load() ? failure_record.failure.peer : -1;
  }
  return now - team.peers[peer].control.heartbeat().stamp_ns.load() > kAwake ? -1 : awaited;
}

// Follows "waits for rank r" from peer to peer: the last one in the chain is late.
int find_culprit(Team &team, int peer, uint64_t now) {
  int culprit = peer;
  for (int hops = 0; hops < team.num_ranks; hops++) {
    int next = awaited_by(team, culprit, now);
    if (next < 0 || next == team.rank || next >= team.num_ranks) break;
    culprit = next;
  }
  return culprit;
}

}  // namespace

Waiter::Waiter(Op &op) : op_(op), doorbell_(op.team.control().doorbell()) {
  bool alone = op.team.num_ranks <= op.team.device->cores;
  spins_ = alone ? kSpinsAlone : kSpinsShared;
  yields_ = alone ? kYieldsAlone : kYieldsShared;
}

void Waiter::begin() {
  op_.ring_now();
  now_ = now_ns();
  if (!since_) since_ = now_;
}

void Waiter::end() {
  if (announced_) retract();
  if (since_) op_.waited(awaited_, now_ns() - since_);
  since_ = 0;
  awaited_ = suspect_ = -1;
  rounds_ = 0;
  op_.team.control().heartbeat().awaiting.store(0, std::memory_order_relaxed);
}

void Waiter::give_up_on(int peer, int32_t code) {
  uint64_t waited = now_ - since_;
  if (op_.may_shrink)
    mask_peer(op_.team, peer);
  else if (code || !op_.adopt_failure_of(peer, waited))
    op_.fail(code, peer, DK_FIELD_NONE, 0, 0, waited);
}

Waiter::PeerCheck Waiter::check_peer(int peer) {
  Team &team = op_.team;
  bool dead = __atomic_load_n(&team.status->dead[peer], __ATOMIC_ACQUIRE),
       failed = team.failure_record_of(peer).set.load();
  bool late = op_.may_shrink && now_ - since_ >= op_.timeout_ns;
  if (!dead && !failed && !late) return PeerCheck::keep_waiting;
  // A rank that itself waits for another one will mask that one at about this deadline: it has as long again.
  if (!dead && !failed && now_ - since_ < 2 * op_.timeout_ns && awaited_by(team, peer, now_) >= 0) {
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

// At the deadline, the peer to blame is one that does not wait for others itself.
bool Waiter::more_to_blame(int peer, int than) const {
  if (now_ - since_ < op_.timeout_ns) return false;
  return awaited_by(op_.team, than, now_) >= 0 && awaited_by(op_.team, peer, now_) < 0;
}

// Both ranks wait for each other, in different operations, and one rank runs one operation at a time: none can go on.
bool Waiter::is_crossed_with(int peer, uint64_t waited) const {
  uint64_t enough = min(kCrossed, op_.timeout_ns / 2);
  if (peer < 0 || waited < enough || op_.may_shrink || !op_.team.is_local(peer)) return false;
  Heartbeat &theirs = op_.team.peers[peer].control.heartbeat();
  uint64_t since = theirs.since_ns.load();
  return theirs.awaiting.load() == op_.team.rank + 1 && now_ - theirs.stamp_ns.load() <= kAwake &&
         theirs.op.load() != op_.op && since < now_ && now_ - since >= enough;
}

void Waiter::spin_or_sleep(int first, const Missing &missing) {
  uint64_t waited = now_ - since_;
  if (awaited_ < 0) awaited_ = first;
  Heartbeat &heartbeat = op_.team.control().heartbeat();
  heartbeat.awaiting.store(first + 1, std::memory_order_relaxed);
  heartbeat.since_ns.store(since_, std::memory_order_relaxed);
  heartbeat.stamp_ns.store(now_, std::memory_order_relaxed);
  if (is_crossed_with(first, waited)) {
    uint32_t theirs = op_.team.peers[first].control.heartbeat().op.load();
    op_.fail(DK_EMISMATCH, first, DK_FIELD_OPERATION, op_.op, theirs, waited);
    return;
  }
  if (waited >= op_.timeout_ns) {
    int culprit = first < 0 ? -1 : find_culprit(op_.team, first, now_);
    op_.fail(DK_ETIMEOUT, culprit, DK_FIELD_NONE, missing.expected, missing.seen, waited);
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

void mask_peer(Team &team, int peer) { team.control().peer_state(peer).masked = 1; }

}  // namespace dk
