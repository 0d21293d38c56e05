#include "cpu/link.h"

namespace dk {
namespace {

constexpr uint64_t kCachedBytes = 4 << 20;  // of the rings of all links together

}  // namespace

LinkPlan plan_link(const Team &team, uint64_t row_bytes, int32_t max_rows, int32_t num_sms) {
  if (!team.spans_nodes()) return {0, 0};
  uint64_t cached = kCachedBytes / static_cast<uint64_t>(team.num_nodes()) / row_bytes + 1;
  uint64_t channels = num_sms > 0 ? static_cast<uint64_t>(max_of(1, num_sms / 2)) : kMaxLinkQueues;
  return {max_of<uint64_t>(max_rows > 0 ? static_cast<uint64_t>(max_rows) : 0, cached),
          min_of<uint64_t>(min_of<uint64_t>(channels, kMaxLinkQueues), static_cast<uint64_t>(team.nic->num_qps()))};
}

// ---- Out ----

LinkOut::LinkOut(Op &op, const Exchange &exchange, const LinkShape &shape, const LinkPlan &plan, int node)
    : team_(op.team), state_(op.team.links[node]), call_(exchange.number()), record_bytes_(shape.record_bytes()), stride_(shape.stride()),
      slots_(shape.slots(op.team, plan.slots)), queues_(plan.queues), node_(node), peer_(op.team.partner(node)) {}

void LinkOut::begin(Team &team) {
  for (int node = 0; node < team.num_nodes() && team.spans_nodes(); node++) {
    LinkState &state = team.links[node];
    state.sent = state.done = state.credited = 0;
  }
}

// Puts of one QP complete in their order, those of different ones do not: places are given back in the order of the records.
void LinkOut::retire() {
  while (state_.done < state_.sent) {
    uint64_t record = static_cast<uint64_t>(state_.done);
    if (team_.nic->completed(peer_, static_cast<int>(record % queues_)) < state_.posted[record % slots_]) return;
    state_.done++;
  }
}

bool LinkOut::has_credit() const { return state_.sent - static_cast<int64_t>(credit()) < static_cast<int64_t>(slots_); }

uint8_t *LinkOut::place() {
  if (!has_credit()) return nullptr;
  if (state_.sent - state_.done == static_cast<int64_t>(slots_)) retire();
  if (state_.sent - state_.done == static_cast<int64_t>(slots_)) return nullptr;
  uint64_t ring = team_.peers[team_.rank].wire + team_.wire.link_out_offset + static_cast<uint64_t>(node_) * team_.wire.link_bytes;
  return at<uint8_t>(ring + static_cast<uint64_t>(state_.sent) % slots_ * stride_);
}

bool LinkOut::send(const void *record, int64_t source) {
  if (!has_credit()) return false;
  if (state_.sent - state_.done == static_cast<int64_t>(slots_)) retire();
  if (state_.sent - state_.done == static_cast<int64_t>(slots_)) return false;
  uint64_t number = static_cast<uint64_t>(state_.sent), place = number % slots_;
  int queue = static_cast<int>(number % queues_), mine = team_.own_node();
  uint64_t ring = team_.peers[team_.rank].wire + team_.wire.link_in_offset + static_cast<uint64_t>(mine) * team_.wire.link_bytes;
  Signal head = {&team_.far().link_head(mine, queue), Cursor::pack(call_, number / queues_ + 1), DK_SIGNAL_SET};
  if (!team_.nic->put(peer_, queue, at<void>(ring + place * stride_), record, record_bytes_, head)) return false;
  state_.posted[place] = team_.nic->posted(peer_, queue);
  state_.source[place] = source;
  state_.sent++;
  return true;
}

int64_t LinkOut::oldest_source(int64_t none) {
  retire();
  return state_.done < state_.sent ? state_.source[static_cast<uint64_t>(state_.done) % slots_] : none;
}

Missing LinkOut::missing() const { return {state_.sent - static_cast<int64_t>(slots_) + 1, static_cast<int64_t>(credit())}; }

// ---- In ----

LinkIn::LinkIn(Team &team, const Exchange &exchange, const LinkShape &shape, int source)
    : team_(team), shape_(shape), call_(exchange.number()), node_(team.node(source)), gate_(team.gate(source)) {
  const CallMessage &message = exchange.message(source);
  slots_ = shape.slots(team, message.link_slots);
  queues_ = max_of<uint64_t>(1, min_of<uint64_t>(message.link_queues, kMaxLinkQueues));
  ring_ = team.peers[gate_].wire + team.wire.link_in_offset + static_cast<uint64_t>(node_) * team.wire.link_bytes;
}

// Record n is there if its QP has brought more than n / Q.
int64_t LinkIn::arrived() const {
  const FarControl &far = team_.peers[gate_].far;
  uint64_t records = UINT64_MAX;
  for (uint64_t queue = 0; queue < queues_; queue++) {
    uint64_t here = Cursor::unpack(far.link_head(node_, static_cast<int>(queue)).load(), call_);
    records = min_of(records, here * queues_ + queue);
  }
  return static_cast<int64_t>(records);
}

// Not for each record: a quarter of the ring at a time, so that the sender does not run dry.
bool LinkIn::give_credit(int64_t records) {
  LinkState &state = team_.links[node_];
  if (records - state.credited < max_of<int64_t>(1, static_cast<int64_t>(slots_ / 4))) return false;
  Signal credit = {&team_.far().link_credit(team_.own_node()), Cursor::pack(call_, static_cast<uint64_t>(records)), DK_SIGNAL_SET};
  if (!team_.nic->signal(team_.partner(node_), 0, credit)) return false;
  state.credited = records;
  return true;
}

}  // namespace dk
