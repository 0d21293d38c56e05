#include "cpu/normal/link.h"

namespace dk {
namespace {

constexpr uint64_t kCachedBytes = 4 << 20;  // bytes of the rings of all links together
constexpr uint64_t kBatchBytes = 64 << 10;

}  // namespace

LinkPlan plan_link(const Team &team, const Record &record, int32_t send_chunk, int32_t recv_chunk, int32_t num_sms) {
  if (!team.spans_nodes()) return {0, 0, 0};
  uint64_t cached = kCachedBytes / static_cast<uint64_t>(team.num_nodes()) / record.stride() + 1;
  int channels = num_sms > 0 ? max(1, num_sms / 2) : kMaxLinkQueues;
  return {max(static_cast<uint64_t>(max(recv_chunk, 0)), cached),
          static_cast<uint64_t>(min(min(channels, kMaxLinkQueues), team.nic->num_qps())),
          max<int64_t>(max(send_chunk, 1), static_cast<int64_t>(kBatchBytes / record.stride()))};
}

uint64_t link_room(const Team &team, const Record &record) {
  return min(team.wire.link_bytes / record.stride(), kMaxLinkSlots);
}

static uint64_t slots_for(const Team &team, const Record &record, uint64_t wanted) {
  return max<uint64_t>(1, min(wanted, link_room(team, record)));
}

void begin_links(Team &team) {
  for (int node = 0; team.spans_nodes() && node < team.num_nodes(); node++) {
    LinkState &state = team.links[node];
    state.sent = state.done = state.offered = state.seen = state.consumed = state.credited = 0;
  }
}

// ---- Out ----

LinkOut::LinkOut(Team &team, const Exchange &exchange, const Record &record, const LinkPlan &plan, int node)
    : team_(team),
      state_(team.links[node]),
      call_(exchange.number()),
      record_bytes_(record.bytes()),
      stride_(record.stride()),
      slots_(slots_for(team, record, plan.slots)),
      queues_(plan.queues),
      node_(node),
      peer_(team.partner(node)) {}

// Puts complete in order on one QP but not across QPs; slots become free in the order of the records.
void LinkOut::retire() {
  while (state_.done < state_.sent) {
    uint64_t record = static_cast<uint64_t>(state_.done);
    if (team_.nic->completed(peer_, static_cast<int>(record % queues_)) < state_.posted[record % slots_]) return;
    state_.done++;
  }
}

// A record needs a slot here and the slot of the same number at the partner.
bool LinkOut::has_room() {
  int64_t slots = static_cast<int64_t>(slots_);
  if (state_.sent - static_cast<int64_t>(credit()) >= slots) return false;
  if (state_.sent - state_.done == slots) retire();
  return state_.sent - state_.done < slots;
}

uint8_t *LinkOut::next_slot() {
  if (!has_room()) return nullptr;
  uint64_t ring =
      team_.peers[team_.rank].wire + team_.wire.link_out_offset + static_cast<uint64_t>(node_) * team_.wire.link_bytes;
  return at<uint8_t>(ring + static_cast<uint64_t>(state_.sent) % slots_ * stride_);
}

bool LinkOut::send(const void *record, int64_t source) {
  if (!has_room()) return false;
  uint64_t number = static_cast<uint64_t>(state_.sent), slot = number % slots_;
  int queue = static_cast<int>(number % queues_), mine = team_.my_node();
  uint64_t ring =
      team_.peers[team_.rank].wire + team_.wire.link_in_offset + static_cast<uint64_t>(mine) * team_.wire.link_bytes;
  Signal head = {&team_.remote().link_head(mine, queue), Cursor::pack(call_, number / queues_ + 1), DK_SIGNAL_SET};
  if (!team_.nic->put(peer_, queue, at<void>(ring + slot * stride_), record, record_bytes_, head)) return false;
  state_.posted[slot] = team_.nic->posted(peer_, queue);
  state_.source[slot] = source;
  state_.sent++;
  return true;
}

int64_t LinkOut::oldest_source(int64_t none) {
  retire();
  return state_.done < state_.sent ? state_.source[static_cast<uint64_t>(state_.done) % slots_] : none;
}

Missing LinkOut::missing() const {
  return {state_.sent - static_cast<int64_t>(slots_) + 1, static_cast<int64_t>(credit())};
}

// ---- In ----

LinkIn::LinkIn(Team &team, const Exchange &exchange, const Record &record, int source)
    : team_(team),
      call_(exchange.number()),
      stride_(record.stride()),
      extra_at_(record.extra_at()),
      node_(team.node(source)),
      forwarder_(team.forwarder(source)) {
  const CallMessage &message = exchange.message(source);
  slots_ = slots_for(team, record, message.link_slots);
  queues_ = max<uint64_t>(1, min<uint64_t>(message.link_queues, kMaxLinkQueues));
  ring_ = team.peers[forwarder_].wire + team.wire.link_in_offset + static_cast<uint64_t>(node_) * team.wire.link_bytes;
}

// Record n has arrived if its QP has carried more than n / Q records.
int64_t LinkIn::arrived() const {
  const RemoteControl &remote = team_.peers[forwarder_].remote;
  uint64_t records = UINT64_MAX;
  for (uint64_t queue = 0; queue < queues_; queue++) {
    uint64_t here = Cursor::unpack(remote.link_head(node_, static_cast<int>(queue)).load(), call_);
    records = min(records, here * queues_ + queue);
  }
  return static_cast<int64_t>(records);
}

// Credits a quarter of the ring at a time: often enough that the sender does not run out of slots.
bool LinkIn::give_credit(int64_t records) {
  LinkState &state = team_.links[node_];
  if (records - state.credited < max<int64_t>(1, static_cast<int64_t>(slots_ / 4))) return false;
  Signal credit = {&team_.remote().link_credit(team_.my_node()), Cursor::pack(call_, static_cast<uint64_t>(records)),
                   DK_SIGNAL_SET};
  if (!team_.nic->signal(team_.partner(node_), 0, credit)) return false;
  state.credited = records;
  return true;
}

}  // namespace dk
