#include "cpu/team/op.h"

namespace dk {

Op::Op(Team *owner, uint32_t op_, uint32_t phase_, uint64_t call, uint64_t timeout)
    : team(*owner), op(op_), phase(phase_), timeout_ns(timeout), call_(call), start_ns_(now_ns()) {
  pthread_mutex_lock(&team.running);
  if (team.released.load()) {
    failed_ = true;
    return;
  }
  Heartbeat &heartbeat = team.control().heartbeat();
  heartbeat.awaiting.store(0, std::memory_order_relaxed);
  heartbeat.op.store(op, std::memory_order_relaxed);
  heartbeat.stamp_ns.store(start_ns_, std::memory_order_relaxed);
  failed_ = __atomic_load_n(&team.status->sticky, __ATOMIC_ACQUIRE) != 0;
  aborted();
}

Op::~Op() {
  ring_now();
  if (team.stats) {
    dk_trace_record trace = {call_, start_ns_, now_ns() - start_ns_, op, phase};
    record_call(*team.stats, trace, trace.duration_ns + earlier_ns_, waited_ns_, bytes_, failed_ || refused_,
                counts_ || failed_ || refused_);
  }
  __atomic_fetch_add(&team.status->progress, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&team.running);
}

void Op::fail(int32_t code, int peer, uint32_t field, int64_t expected, int64_t seen, uint64_t waited_ns) {
  if (failed_) return;
  failed_ = true;
  dk_failure failure = {
      static_cast<uint32_t>(code), op, phase, team.rank, peer, field, call_, expected, seen, waited_ns};
  if (team.failed.exchange(1) == 0) publish_failure(failure);
}

// Entries are in use until the engine has raised them. One operation of a team runs at a time, so nobody else writes.
void Op::refuse(int peer, const Refusal &why) {
  if (failed_ || refused_) return;
  refused_ = true;
  if (why.field == DK_FIELD_CANCELLED && peer == team.rank) return;  // the engine has told its caller
  for (dk_failure &entry : team.status->refusals) {
    if (__atomic_load_n(&entry.code, __ATOMIC_ACQUIRE)) continue;
    entry = {0, op, phase, team.rank, peer, why.field, call_, why.expected, why.seen, 0};
    __atomic_store_n(&entry.code, why.code, __ATOMIC_RELEASE);
    __atomic_store_n(&team.status->refused, 1, __ATOMIC_RELEASE);
    return;
  }
}

// `code` last, then `sticky`: a thread that loads either with acquire sees the other fields.
void Op::publish_failure(const dk_failure &failure) {
  dk_failure &to = team.status->failure;
  to.op = failure.op;
  to.phase = failure.phase;
  to.rank = failure.rank;
  to.peer = failure.peer;
  to.field = failure.field;
  to.call = failure.call;
  to.expected = failure.expected;
  to.seen = failure.seen;
  to.waited_ns = failure.waited_ns;
  __atomic_store_n(&to.code, failure.code, __ATOMIC_RELEASE);
  __atomic_store_n(&team.status->sticky, failure.code, __ATOMIC_RELEASE);
  FailureRecord &failure_record = team.control().failure_record();
  failure_record.failure = failure;
  if (blamed_for_) {  // peers that look here blame this rank too, not the one that has told it
    failure_record.failure.code = blamed_for_;
    failure_record.failure.peer = team.rank;
  }
  failure_record.set.store(1);
  for (int i = 0; i < team.num_ranks; i++) ring(i);
  ring_now();
  if (team.spans_nodes()) signal_remote(failure_record);
}

// Puts the failure to the ranks of other nodes, on any QP with room. A peer whose QPs stay full for 50 ms runs into its
// own deadline.
void Op::signal_remote(const FailureRecord &failure_record) {
  constexpr uint64_t kPatience = 50000000;
  uint64_t end = now_ns() + kPatience;
  FailureRecord &there = team.remote().failure_record_from(team.rank);
  for (int step = 1; step < team.num_ranks; step++) {
    int peer = (team.rank + step) % team.num_ranks, qp = 0;
    if (team.is_local(peer)) continue;
    while (!team.nic->put(peer, qp, &there.failure, &failure_record.failure, sizeof failure_record.failure,
                          {&there.set, 1, DK_SIGNAL_SET}) &&
           now_ns() < end)
      qp = (qp + 1) % team.nic->num_qps();
  }
}

bool Op::aborted() {
  if (failed_) return true;
  uint32_t code = __atomic_load_n(&team.status->abort_word, __ATOMIC_ACQUIRE);
  if (code) fail(static_cast<int32_t>(code), __atomic_load_n(&team.status->abort_rank, __ATOMIC_RELAXED));
  return code != 0;
}

// If the peer blames a third rank, so does this rank. If it blames this rank, a mismatch is reported with the two
// values swapped, and any other failure as an abort by the peer.
bool Op::adopt_failure_of(int peer, uint64_t waited_ns) {
  FailureRecord &failure_record = team.failure_record_of(peer);
  if (!failure_record.set.load()) return false;
  const dk_failure &theirs = failure_record.failure;
  int32_t code = static_cast<int32_t>(theirs.code);
  if (theirs.peer >= 0 && theirs.peer != team.rank)
    fail(code, theirs.peer, theirs.field, theirs.expected, theirs.seen, waited_ns);
  else if (code == DK_EMISMATCH && theirs.peer == team.rank)
    fail(code, peer, theirs.field, theirs.seen, theirs.expected, waited_ns);
  else {
    if (theirs.peer == team.rank) blamed_for_ = theirs.code;
    fail(DK_EABORTED, peer, DK_FIELD_NONE, code, theirs.op, waited_ns);
  }
  return true;
}

bool Op::look_for_obituaries() {
  for (int peer = 0; peer < team.num_ranks && !failed_ && !may_shrink; peer++) {
    if (peer == team.rank) continue;
    FailureRecord &theirs = team.failure_record_of(peer);
    if (theirs.set.load() && theirs.failure.op == op && theirs.failure.call == call_) adopt_failure_of(peer, 0);
  }
  return !failed_;
}

void Op::ring_now() {
  for (int w = 0; w * 64 < team.num_ranks; w++) {
    uint64_t bits = team.doorbells[w];
    team.doorbells[w] = 0;
    for (; bits; bits &= bits - 1) {
      int peer = w * 64 + __builtin_ctzll(bits);
      if (peer == team.rank || !team.is_local(peer)) continue;  // the NIC rings for remote ranks
      team.peers[peer].control.doorbell().ring();
    }
  }
}

void Op::sent(int peer, uint64_t bytes) {
  bytes_ += bytes;
  if (team.stats) add_peer_bytes(*team.stats, op, peer, bytes);
}

void Op::waited(int peer, uint64_t ns) {
  waited_ns_ += ns;
  if (team.stats && peer >= 0) add_peer_wait(*team.stats, op, peer, ns);
}

void Op::save_to(Ticket &ticket) {
  ticket.spent_ns = now_ns() - start_ns_;
  ticket.waited_ns = waited_ns_;
  ticket.bytes = bytes_;
  counts_ = false;
}

void Op::resume_from(const Ticket &ticket) {
  earlier_ns_ = ticket.spent_ns;
  waited_ns_ += ticket.waited_ns;
  bytes_ += ticket.bytes;
}

}  // namespace dk
