#include "cpu/exchange.h"

#include <string.h>

namespace dk {

Exchange::Exchange(Op &op)
    : op_(op), number_(op.failed() ? 0 : ++op.team.control().own().calls), arrived_(op.team.numbers(kArrivedNumbers)) {
  memset(arrived_, 0, sizeof(int64_t) * static_cast<size_t>(op.team.num_ranks));
  fields_[DK_FIELD_OPERATION] = op.op;
}

void Exchange::post(const int32_t *rows, const int32_t *experts, int num_local_experts) {
  Team &team = op_.team;
  size_t row_bytes = sizeof(int32_t) * static_cast<size_t>(team.num_ranks);
  size_t expert_bytes = sizeof(int32_t) * static_cast<size_t>(num_local_experts);
  for (int peer = 0; peer < team.num_ranks; peer++) {
    Control &control = team.peers[peer].control;
    CallMessage &to = control.call_from(number_ & 1, team.rank);
    to.ring_slots = slots_;
    to.ring_stride = stride_;
    memcpy(to.fields, fields_, sizeof fields_);
    if (rows) memcpy(control.rows_of(to), rows, row_bytes);
    if (experts) memcpy(control.experts_of(to), experts + static_cast<ptrdiff_t>(peer) * num_local_experts, expert_bytes);
    to.number.store(number_);
    op_.ring(peer);
  }
}

// The operation first: fields of different operations need not be comparable.
bool Exchange::agrees(int peer) {
  CallMessage &theirs = message(peer);
  for (int i = 0; i < kNumFields; i++) {
    int field = i == 0 ? int{DK_FIELD_OPERATION} : i;
    if (theirs.fields[field] == fields_[field] || theirs.fields[field] == kAnyValue || fields_[field] == kAnyValue) continue;
    op_.fail(DK_EMISMATCH, peer, static_cast<uint32_t>(field), fields_[field], theirs.fields[field]);
    return false;
  }
  return true;
}

bool Exchange::look() {
  if (complete()) return false;
  int before = num_arrived_;
  for (int peer = 0; peer < op_.team.num_ranks; peer++) {
    if (arrived_[peer]) continue;
    bool skipped = skip_masked && op_.team.masked(peer);
    if (!skipped && message(peer).number.load() != number_) continue;
    if (!skipped && !agrees(peer)) return true;
    arrived_[peer] = 1;
    num_arrived_++;
  }
  return num_arrived_ != before;
}

}  // namespace dk
