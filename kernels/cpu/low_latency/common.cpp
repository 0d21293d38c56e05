#include "cpu/low_latency/common.h"

#include <string.h>

#include "cpu/runtime/order.h"

namespace dk {

uint64_t slot_address(const Team &team, int owner, Kind kind, uint64_t epoch) {
  return team.peers[owner].wire + team.wire.slot_offset[kind][epoch & 1];
}

// ---- Send half ----

bool SendHalf::has_credit(int peer) const {
  uint64_t given = team_.control().credit(kind_, peer).value.load();
  return max(given, team_.control().peer_state(peer).credit_floor[kind_]) + 2 >= epoch_;
}

bool SendHalf::begin() {
  if (op_.failed()) return false;
  RankState &state = team_.control().state();
  epoch_ = state.epoch[kind_] + 1;
  if (!has_credit(team_.rank)) {  // only a later receive half of this rank could free the slot
    op_.fail(DK_EINVAL, team_.rank, DK_FIELD_OPERATION, 2, 3);
    return false;
  }
  auto poll = [this] {
    for (int peer = 0; peer < team_.num_ranks; peer++)
      if ((!team_.masked(peer) && !has_credit(peer)) || !puts_completed(peer)) return Poll::idle;
    return Poll::done;
  };
  auto awaits = [this](int peer, Missing &missing) {
    missing = {static_cast<int64_t>(epoch_) - 2,
               static_cast<int64_t>(team_.control().credit(kind_, peer).value.load())};
    return !team_.masked(peer) && (!has_credit(peer) || !puts_completed(peer));
  };
  if (!wait_until(op_, poll, awaits)) return false;
  state.writing[kind_].store(epoch_);
  before_overwriting();
  remote_.begin(epoch_);
  return true;
}

// All but the epoch.
void SendHalf::fill(SendMessage &to, int32_t num_tokens) const {
  const RankState &state = team_.control().state();
  to.since_clean = state.since_clean[kind_];
  to.rows_in_rdma = in_rdma_;
  to.rows_offset = offset_;
  to.rows_stride = stride_;
  to.cleans = state.cleans.load();
  to.num_tokens = refusal_.code ? 0 : num_tokens;
  to.refusal = refusal_;
  memcpy(to.fields, fields_, sizeof fields_);
}

void SendHalf::post(int peer, int32_t num_tokens) {
  if (is_remote(team_, peer)) {
    fill(remote_.message(peer), num_tokens);
    return remote_.end(peer);
  }
  SendMessage &to = team_.peers[peer].control.send_from(kind_, epoch_ & 1, team_.rank);
  to.epoch.store(0);  // a reader of a partly written message polls again
  before_overwriting();
  fill(to, num_tokens);
  to.epoch.store(epoch_);
  op_.ring(peer);
}

void SendHalf::finish(int32_t num_tokens, uint32_t ticket) {
  RankState &state = team_.control().state();
  state.epoch[kind_] = epoch_;
  state.since_clean[kind_]++;
  for (int peer = 0; peer < team_.num_ranks && !op_.failed(); peer++)
    if (!team_.masked(peer)) post(peer, num_tokens);
  op_.ring_now();
  Ticket &left = state.tickets[ticket];
  left = {};
  left.epoch = epoch_;
  left.since_clean = state.since_clean[kind_];
  left.cleans = state.cleans.load();
  left.kind = kind_;
  left.open = 1;
}

// ---- Receive half ----

RecvHalf::RecvHalf(Op &op, Kind kind, uint32_t ticket)
    : op_(op),
      team_(op.team),
      kind_(kind),
      start_ns_(now_ns()),
      arrived_(op.team.numbers(0)),
      epoch_(op.team.numbers(1)),
      waited_(op.team.numbers(2)) {
  memset(arrived_, 0, sizeof(int64_t) * static_cast<size_t>(team_.num_ranks));
  memset(waited_, 0, sizeof(int64_t) * static_cast<size_t>(team_.num_ranks));
  Ticket &left = team_.control().state().tickets[ticket];
  if (op.failed()) return;
  if (!left.open || left.kind != static_cast<uint32_t>(kind)) {
    op.fail(DK_EINVAL, team_.rank, DK_FIELD_OPERATION);
    return;
  }
  ticket_ = left;
  left.open = 0;
  if (op.phase == DK_PHASE_RECV) op.resume_from(ticket_);
}

uint64_t RecvHalf::slot(int peer) const {
  uint64_t epoch = static_cast<uint64_t>(epoch_[peer]);
  return is_remote(team_, peer) ? mirror_address(team_, kind_, epoch, peer) : slot_address(team_, peer, kind_, epoch);
}

uint32_t RecvHalf::cleans_of(int peer) const {
  if (is_remote(team_, peer)) return static_cast<uint32_t>(remote_peer(team_, peer).cleans.load());
  return team_.peers[peer].control.state().cleans;
}

// Copies the peer's message of this call, which is in either of its slots. False: not arrived yet.
bool RecvHalf::find(int peer, Arrival &message) const {
  for (uint64_t slot = 0; slot < 2; slot++) {
    const SendMessage &there = team_.control().send_from(kind_, slot, peer);
    uint64_t epoch = message.epoch = there.epoch.load();
    if (epoch == 0) continue;
    message.since_clean = there.since_clean.load();
    message.cleans = there.cleans.load();
    bool same_clean = message.cleans == ticket_.cleans;
    // If the numbers of cleans differ, the epochs decide: they must be equal, and newer than the last unmask. A message
    // from before a clean that the peer has done since belongs to a call that this rank never made.
    bool matches = same_clean
                       ? message.since_clean == ticket_.since_clean
                       : epoch == ticket_.epoch && epoch > team_.control().peer_state(peer).seen_at_clean[kind_] &&
                             (message.cleans > ticket_.cleans || cleans_of(peer) < ticket_.cleans);
    if (!matches || there.epoch.load() != epoch) continue;
    message.copy(there);
    after_reading();
    if (there.epoch.load() == epoch) return true;
  }
  return false;
}

// Both of the peer's messages are of later calls: it has masked this rank and moved on.
bool RecvHalf::has_moved_on(int peer) const {
  for (uint64_t slot = 0; slot < 2; slot++) {
    SendMessage &message = team_.control().send_from(kind_, slot, peer);
    if (message.epoch.load() == 0 || message.cleans != ticket_.cleans || message.since_clean <= ticket_.since_clean)
      return false;
  }
  return true;
}

bool RecvHalf::agrees(int peer, const Arrival &message) {
  for (int field = 1; field < kNumFields; field++) {
    if (message.fields[field] == fields_[field]) continue;
    op_.fail(DK_EMISMATCH, peer, static_cast<uint32_t>(field), fields_[field], message.fields[field]);
    return false;
  }
  return true;
}

bool RecvHalf::poll() {
  bool found = false;
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    if (settled(peer)) continue;
    Arrival &message = team_.arrivals[peer];
    if (!find(peer, message)) {
      if (!op_.may_shrink || peer == team_.rank || !has_moved_on(peer)) continue;
      mask_peer(team_, peer);
      found = true;
      continue;
    }
    if (!agrees(peer, message)) return true;
    if (is_remote(team_, peer) && !rows_arrived(team_, kind_, peer, message)) continue;
    epoch_[peer] = static_cast<int64_t>(message.epoch);
    arrived_[peer] = 1;
    waited_[peer] = static_cast<int64_t>(now_ns() - start_ns_);
    found = true;
  }
  return found;
}

bool RecvHalf::all_settled() const {
  for (int peer = 0; peer < team_.num_ranks; peer++)
    if (!settled(peer)) return false;
  return true;
}

bool RecvHalf::accepted() {
  for (int step = 0; step < team_.num_ranks && !op_.refused(); step++) {
    int peer = (team_.rank + step) % team_.num_ranks;
    if (has_arrived(peer) && message(peer).refusal.code) op_.refuse(peer, message(peer).refusal);
  }
  return !op_.refused();
}

bool RecvHalf::awaits(int peer, Missing &missing) const {
  uint64_t newest = 0;
  for (uint64_t slot = 0; slot < 2; slot++)
    newest = max(newest, team_.control().send_from(kind_, slot, peer).epoch.load());
  missing = {static_cast<int64_t>(ticket_.epoch), static_cast<int64_t>(newest)};
  return !settled(peer);
}

bool RecvHalf::intact(int peer) {
  uint64_t epoch = static_cast<uint64_t>(epoch_[peer]);
  after_reading();
  if (is_remote(team_, peer)) return remote_peer(team_, peer).arrival[kind_][epoch & 1].writing.load() == epoch;
  return team_.peers[peer].control.state().writing[kind_].load() < epoch + 2;
}

// A credit covers all epochs up to its value, so a call that is received before an older one gives none yet.
void RecvHalf::give_credits() {
  bool older_open = false;
  for (const Ticket &other : team_.control().state().tickets)
    older_open |=
        other.open && other.kind == ticket_.kind && other.cleans == ticket_.cleans && other.epoch < ticket_.epoch;
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    uint64_t &early = team_.control().peer_state(peer).read_early[kind_];
    uint64_t epoch = max(early, arrived_[peer] ? static_cast<uint64_t>(epoch_[peer]) : 0);
    early = older_open ? epoch : 0;
    if (older_open || !epoch) continue;
    if (is_remote(team_, peer)) {
      give_remote_credit(op_, kind_, peer, epoch);
      continue;
    }
    team_.peers[peer].control.credit(kind_, team_.rank).value.store(epoch);
    op_.ring(peer);
  }
}

void RecvHalf::add_waits(uint64_t wait_stats) const {
  if (!wait_stats) return;
  for (int peer = 0; peer < team_.num_ranks; peer++)
    at<uint64_t>(wait_stats)[peer] += static_cast<uint64_t>(waited_[peer]);
}

// ---- Cleaning ----

static void raise_credit_floor(Team &team, int peer) {
  for (int kind = 0; kind < 2; kind++)
    team.control().peer_state(peer).credit_floor[kind] = team.control().state().epoch[kind];
}

void ignore_past_sends_of(Team &team, int peer) {
  raise_credit_floor(team, peer);
  PeerState &state = team.control().peer_state(peer);
  for (uint64_t slot = 0; slot < 2; slot++) {
    for (int kind = 0; kind < 2; kind++) {
      uint64_t epoch = team.control().send_from(static_cast<Kind>(kind), slot, peer).epoch.load();
      state.seen_at_clean[kind] = max(state.seen_at_clean[kind], epoch);
    }
    state.clean_seen = max(state.clean_seen, team.control().clean_from(peer, slot).count.load());
  }
}

void restart_counts(Op &op, uint32_t cleans) {
  Team &team = op.team;
  RankState &state = team.control().state();
  state.cleans = cleans;
  state.since_clean[kDispatch] = state.since_clean[kCombine] = 0;
  for (int peer = 0; peer < team.num_ranks; peer++) {
    raise_credit_floor(team, peer);
    put_clean_count(op, peer);
  }
}

}  // namespace dk
