#include "cpu/team/exchange.h"

#include <stddef.h>
#include <string.h>

#include "cpu/runtime/order.h"

namespace dk {

Exchange::Exchange(Op &op)
    : op_(op),
      shrinks_(op.may_shrink),
      number_(op.failed() ? 0 : ++op.team.control().state().calls),
      agreement_(op),
      arrived_(op.team.numbers(kArrivedNumbers)) {
  memset(arrived_, 0, sizeof(int64_t) * static_cast<size_t>(op.team.num_ranks));
  if (shrinks_ && number_) op.team.control().state().messages++;
  fields_[DK_FIELD_OPERATION] = op.op;
}

void Exchange::fill(CallMessage &to, Control &control, const int32_t *rows, const int32_t *experts) const {
  to.ring_slots = slots_;
  to.ring_stride = stride_;
  to.link_slots = link_slots_;
  to.link_queues = link_queues_;
  memcpy(to.fields, fields_, sizeof fields_);
  to.row_limit = row_limit_;
  to.expanded_limit = expanded_limit_;
  to.matrix_hash = matrix_hash_;
  to.refusal = mine_;
  if (shrinks_) to.generation.store(op_.team.control().state().generation.load());
  if (rows) memcpy(control.rows_of(to), rows, row_bytes_);
  if (experts) memcpy(control.experts_of(to), experts, expert_bytes_);
}

void Exchange::post(const int32_t *rows, const int32_t *experts, int num_local_experts) {
  post(rows, experts, num_local_experts, num_local_experts);
}

// num_sent counts of experts go to each rank, from `step` times its number on.
void Exchange::post(const int32_t *rows, const int32_t *experts, int num_sent, int step) {
  Team &team = op_.team;
  row_bytes_ = sizeof(int32_t) * static_cast<size_t>(team.num_ranks);
  expert_bytes_ = sizeof(int32_t) * static_cast<size_t>(num_sent);
  held_up_ = shrinks_ && agreement_.is_held_up();
  if (held_up_ || (shrinks_ && agreement_.look_at_notices())) return;
  message_bytes_ = sizeof(CallMessage) + (rows ? row_bytes_ + expert_bytes_ : 0);
  uint64_t place = (shrinks_ ? team.control().state().messages : number_) & 1;
  for (int peer = 0; peer < team.num_ranks; peer++) {
    if (without(peer)) continue;
    const int32_t *theirs = experts ? experts + static_cast<ptrdiff_t>(peer) * step : nullptr;
    if (!team.is_local(peer)) {
      fill(team.remote().outbox(peer), team.control(), rows, theirs);
      continue;
    }
    Control &control = team.peers[peer].control;
    CallMessage &to = control.call_from(place, team.rank);
    if (shrinks_) to.number.store(0);  // that of a call that never was may be there
    if (shrinks_) before_overwriting();
    fill(to, control, rows, theirs);
    to.number.store(number_);
    op_.ring(peer);
  }
  signal_remote();
}

// Puts the messages to the ranks of other nodes while QP 0 has room. True if one was put.
bool Exchange::signal_remote() {
  int before = next_unsent_;
  while (next_unsent_ < op_.team.num_ranks && put_message(next_unsent_)) next_unsent_++;
  return next_unsent_ != before;
}

bool Exchange::put_message(int peer) {
  Team &team = op_.team;
  if (team.is_local(peer) || without(peer)) return true;
  uint64_t place = (shrinks_ ? team.control().state().messages : number_) & 1;
  CallMessage &there = team.control().call_from(place, team.rank), &from = team.remote().outbox(peer);
  if (shrinks_ && !tell(team, peer)) return false;
  // The words before the body go as signals, which are atomic: a peer polls them before it knows that the message is
  // complete. The number comes last; that of an older message is taken back before.
  const Signal head[] = {{&there.number, 0, DK_SIGNAL_SET}, {&there.generation, from.generation.load(), DK_SIGNAL_SET}};
  for (; shrinks_ && next_word_ < 2; next_word_++)
    if (!team.nic->signal(peer, 0, head[next_word_])) return false;
  constexpr size_t kBegin = offsetof(CallMessage, ring_slots);
  if (!team.nic->put(peer, 0, &there.ring_slots, &from.ring_slots, message_bytes_ - kBegin,
                     {&there.number, number_, DK_SIGNAL_SET}))
    return false;
  next_word_ = 0;
  return true;
}

// Of a rank of another node: to blame only if this rank's own message and ballot have arrived there.
bool Exchange::has_told(int peer) const { return op_.team.is_local(peer) || op_.team.nic->idle(peer, 0); }

// Compares the operation first: fields of different operations need not be comparable. Handles are compared by
// accepted().
bool Exchange::agrees(int peer) {
  CallMessage &theirs = message(peer);
  refused_by_peer_ |= theirs.refusal.code != 0;
  for (int i = 0; i < kNumFields; i++) {
    int field = i == 0 ? int{DK_FIELD_OPERATION} : i;
    if (field == DK_FIELD_EXCHANGE) continue;
    if (theirs.fields[field] == fields_[field] || theirs.fields[field] == kAnyValue || fields_[field] == kAnyValue)
      continue;
    op_.fail(DK_EMISMATCH, peer, static_cast<uint32_t>(field), fields_[field], theirs.fields[field]);
    return false;
  }
  return true;
}

// The peer's message of this call, in either place. Where the peer has masked this rank, it is of a call without this
// one; the peer makes its messages void before it takes the notice back.
bool Exchange::find(int peer) {
  const Control &control = op_.team.control();
  if (control.notice_from(peer).load()) return false;
  uint64_t received = control.call_state(peer).received,
           generation = op_.team.is_local(peer) ? op_.team.peers[peer].control.state().generation.load()
                                                : op_.team.remote().generation_of(peer).load();
  for (uint64_t place = 0; place < 2 && !arrived_[peer]; place++) {
    const CallMessage &there = control.call_from(place, peer);
    uint64_t number = there.number.load();
    if (number > received && there.generation.load() == generation && there.number.load() == number)
      arrived_[peer] = 1 + 2 * static_cast<int64_t>(place);
  }
  return arrived_[peer] != 0;
}

bool Exchange::poll_shrinking() {
  bool changed = left_out() || agreement_.drop_masked() || agreement_.look_at_notices();
  if (held_up_ && !left_out()) post(nullptr, nullptr, 0);  // a barrier's message has no counts
  if (!held_up_ && !left_out() && next_unsent_ < op_.team.num_ranks) changed |= signal_remote();
  all_here_ = !held_up_;
  for (int peer = 0; peer < op_.team.num_ranks && !held_up_ && !agreement_.decided() && !left_out(); peer++) {
    if (!agreement_.has(peer)) continue;
    if (!arrived_[peer]) {
      if (!find(peer)) {
        all_here_ = false;
        continue;
      }
      changed = true;
      if (!agrees(peer)) return true;
    }
    if (peer != op_.team.rank) changed |= agreement_.hear(peer, message(peer).number.load());
  }
  auto number = [this](int peer) { return message(peer).number.load(); };
  if (left_out()) {
    op_.refuse(agreement_.left_out_by(), {DK_ESTATE, DK_FIELD_MASKED, 0, agreement_.left_out_by()});
    return false;
  }
  if (all_here_ && !agreement_.decided()) changed |= agreement_.vote(message(op_.team.rank).number.load(), number);
  if (agreement_.decided() && !number_known_) {
    agreement_.announce(message(op_.team.rank).number.load());
    begin_call();
  }
  bool flushed = agreement_.flush();
  announced_ = agreement_.decided() && flushed;
  return changed;
}

// Once all have decided alike, each comes to the same number.
void Exchange::begin_call() {
  Team &team = op_.team;
  number_known_ = true;
  refused_by_peer_ = false;
  for (int peer = 0; peer < team.num_ranks; peer++) {
    if (without(peer)) {
      if (!team.masked(peer)) mask_peer(team, peer);
      continue;
    }
    uint64_t theirs = message(peer).number.load();
    number_ = max(number_, theirs);
    team.control().call_state(peer).received = theirs;
    refused_by_peer_ |= message(peer).refusal.code != 0;
  }
  team.control().state().calls = number_;
}

bool Exchange::confirmed() {
  after_reading();  // rows
  if (shrinks_ && !op_.failed()) poll_shrinking();
  return !op_.failed() && !op_.refused();
}

bool Exchange::poll() {
  if (shrinks_) return poll_shrinking();
  if (complete()) return false;
  bool sent = next_unsent_ < op_.team.num_ranks && signal_remote();
  int before = num_arrived_;
  for (int peer = 0; peer < op_.team.num_ranks; peer++) {
    if (arrived_[peer]) continue;
    if (message(peer).number.load() != number_) continue;
    if (!agrees(peer)) return true;
    arrived_[peer] = 1;
    num_arrived_++;
  }
  return sent || num_arrived_ != before;
}

// Compares all pairs, also those that this rank is not in: all ranks must refuse the call, or none.
bool Exchange::handles_agree() {
  int known = -1, whole = -1, n = op_.team.num_ranks;
  for (int step = 0; step < n; step++) {
    int r = (op_.team.rank + step) % n;  // this rank first, so that the record says what it has itself
    if (without(r)) continue;
    const CallMessage &theirs = message(r);
    if (theirs.fields[DK_FIELD_EXCHANGE] != kAnyValue && known < 0) known = r;
    if (theirs.matrix_hash && whole < 0) whole = r;
    int64_t expected = known < 0 ? kAnyValue : message(known).fields[DK_FIELD_EXCHANGE],
            seen = theirs.fields[DK_FIELD_EXCHANGE];
    if (known >= 0 && seen != kAnyValue && seen != expected) {
      op_.refuse(r, {DK_EMISMATCH, DK_FIELD_EXCHANGE, expected, seen});
      return false;
    }
    if (whole >= 0 && theirs.matrix_hash && theirs.matrix_hash != message(whole).matrix_hash) {
      op_.refuse(r, {DK_EINVAL, DK_FIELD_PREFIX_MATRIX, whole, INT64_MIN});
      return false;
    }
  }
  return true;
}

bool Exchange::accepted() {
  if (mine_.code) op_.refuse(op_.team.rank, mine_);
  for (int r = 0; r < op_.team.num_ranks && !op_.refused(); r++)
    if (!without(r) && message(r).refusal.code) op_.refuse(r, message(r).refusal);
  return !op_.refused() && handles_agree();
}

bool Exchange::awaits(int peer, Missing &missing) const {
  if (shrinks_ && (without(peer) || agreement_.decided() || left_out())) return false;
  if (held_up_ && !agreement_.holds_up(peer)) return false;
  if (shrinks_ && arrived_[peer])
    return all_here_ && has_told(peer) && agreement_.awaits(peer, message(peer).number.load());
  if (arrived_[peer]) return false;
  missing = {static_cast<int64_t>(number_), static_cast<int64_t>(message(peer).number.load())};
  return true;
}

bool Exchange::wait() {
  auto step = [&] {
    bool progress = poll();
    return (complete() && delivered()) || left_out() ? Poll::done : progress ? Poll::progress : Poll::idle;
  };
  return wait_until(op_, step, [&](int peer, Missing &missing) { return awaits(peer, missing); }) &&
         op_.look_for_obituaries() && accepted();
}

}  // namespace dk
