#include "cpu/low_latency/remote.h"

#include <string.h>

namespace dk {
namespace {

constexpr int kMessageQp = 0;  // messages, credits and cleans, which keep their order

template <class Each>
void for_each_bit(const uint64_t *words, Each each) {
  for (int w = 0; w < kRemoteQps / 64; w++)
    for (uint64_t bits = words[w]; bits; bits &= bits - 1) each(w * 64 + __builtin_ctzll(bits));
}

bool all_completed(const Team &team, int peer, const RemoteSent &sent) {
  bool completed = true;
  for_each_bit(sent.message.qps,
               [&](int qp) { completed = completed && team.nic->completed(peer, qp) >= sent.posted[qp]; });
  return completed;
}

// Until no peer is left toward which puts are under way.
template <class UnderWay>
bool wait_for_own_puts(Op &op, UnderWay under_way) {
  Team &team = op.team;
  auto poll = [&] {
    for (int peer = 0; peer < team.num_ranks; peer++)
      if (under_way(peer)) return Poll::idle;
    return Poll::done;
  };
  auto awaits = [&](int peer, Missing &) { return under_way(peer) && !team.masked(peer); };
  return poll() == Poll::done || wait_until(op, poll, awaits, Awaited::own_nic);
}

}  // namespace

static_assert(sizeof(SendMessage{}.qps) * 8 == kRemoteQps, "a bit each");

RemotePeer &remote_peer(const Team &team, int peer) {
  return at<RemotePeer>(team.peers[team.rank].wire + team.wire.remote_offset)[peer];
}

uint64_t mirror_address(const Team &team, Kind kind, uint64_t epoch, int peer) {
  uint64_t number = (epoch & 1) * static_cast<uint64_t>(team.num_ranks) + static_cast<uint64_t>(peer);
  return team.peers[team.rank].wire + team.wire.mirror_offset[kind] + number * team.wire.mirror_bytes[kind];
}

bool post(Op &op, int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal) {
  bool posted = false;
  auto poll = [&] {
    posted = !op.team.masked(peer) && op.team.nic->put(peer, qp, dst, src, bytes, signal);
    return posted || op.team.masked(peer) ? Poll::done : Poll::idle;
  };
  if (poll() == Poll::done) return posted;
  auto awaits = [&](int other, Missing &) { return other == peer && !op.team.masked(peer); };
  return wait_until(op, poll, awaits, Awaited::own_nic) && posted;
}

// ---- Send ----

RemoteSender::RemoteSender(Op &op, Kind kind)
    : op_(op), team_(op.team), kind_(kind), num_qps_(op.team.nic ? min(op.team.nic->num_qps(), kRemoteQps) : 1) {}

bool RemoteSender::puts_completed(int peer, uint64_t epoch) const {
  return all_completed(team_, peer, remote_peer(team_, peer).sent[kind_][epoch & 1]);
}

void RemoteSender::begin(uint64_t epoch) {
  epoch_ = epoch;
  for (int peer = 0; peer < team_.num_ranks; peer++)
    if (is_remote(team_, peer)) memset(message(peer).qps, 0, sizeof message(peer).qps);
}

bool RemoteSender::post_on(int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal) {
  if (!post(op_, peer, qp, dst, src, bytes, signal)) return false;
  sent(peer).posted[qp] = team_.nic->posted(peer, qp);
  return true;
}

bool RemoteSender::open(int peer, int qp) {
  uint64_t &word = message(peer).qps[qp / 64], bit = uint64_t{1} << qp % 64;
  if (word & bit) return !team_.masked(peer);
  RemoteArrival &there = remote_peer(team_, team_.rank).arrival[kind_][epoch_ & 1];
  if (!post_on(peer, qp, nullptr, nullptr, 0, {&there.writing, epoch_, DK_SIGNAL_SET})) return false;
  word |= bit;
  return true;
}

void RemoteSender::put(int peer, uint64_t lane, uint64_t offset, const void *src, uint64_t bytes) {
  int qp = static_cast<int>(lane % static_cast<uint64_t>(num_qps_));
  if (!open(peer, qp)) return;
  post_on(peer, qp, at<void>(mirror_address(team_, kind_, epoch_, team_.rank) + offset), src, bytes, {});
}

// The message takes the place of a flag on its QP.
void RemoteSender::end(int peer) {
  if (!open(peer, kMessageQp)) return;
  RemoteArrival &there = remote_peer(team_, team_.rank).arrival[kind_][epoch_ & 1];
  for_each_bit(message(peer).qps, [&](int qp) {
    if (qp != kMessageQp) post_on(peer, qp, nullptr, nullptr, 0, {&there.ended[qp], epoch_, DK_SIGNAL_SET});
  });
  put_message(peer);
}

// Puts the message as SendHalf::post writes it. The words that a reader polls before it knows that the message is
// complete go as signals, which are atomic.
void RemoteSender::put_message(int peer) {
  static_assert(offsetof(SendMessage, num_tokens) == offsetof(SendMessage, cleans) + 4, "one word");
  static_assert(offsetof(SendMessage, rows_offset) == offsetof(SendMessage, cleans) + 8, "the end of that word");
  SendMessage &from = message(peer), &to = team_.control().send_from(kind_, epoch_ & 1, team_.rank);
  uint64_t cleans_and_tokens, body = address_of(&from + 1) - address_of(&from.rows_offset);
  memcpy(&cleans_and_tokens, reinterpret_cast<char *>(&from.cleans), sizeof cleans_and_tokens);
  Signal head[] = {{&to.epoch, 0, DK_SIGNAL_SET},
                   {&to.since_clean, from.since_clean, DK_SIGNAL_SET},
                   {&to.cleans, cleans_and_tokens, DK_SIGNAL_SET}};
  for (const Signal &signal : head)
    if (!post_on(peer, kMessageQp, nullptr, nullptr, 0, signal)) return;
  post_on(peer, kMessageQp, &to.rows_offset, &from.rows_offset, body, {&to.epoch, epoch_, DK_SIGNAL_SET});
}

// ---- Receive ----

bool rows_arrived(const Team &team, Kind kind, int peer, const Arrival &message) {
  const RemoteArrival &here = remote_peer(team, peer).arrival[kind][message.epoch & 1];
  bool ended = true;
  for_each_bit(message.qps,
               [&](int qp) { ended = ended && (qp == kMessageQp || here.ended[qp].load() == message.epoch); });
  return ended;
}

void give_remote_credit(Op &op, Kind kind, int peer, uint64_t epoch) {
  post(op, peer, kMessageQp, {&op.team.control().credit(kind, op.team.rank).value, epoch, DK_SIGNAL_SET});
}

bool wait_for_callers_rows(Op &op, uint64_t epoch) {
  Team &team = op.team;
  auto reads = [&](int peer) {
    const RemoteSent &sent = remote_peer(team, peer).sent[kCombine][epoch & 1];
    return is_remote(team, peer) && sent.message.rows_in_rdma && !all_completed(team, peer, sent);
  };
  return wait_for_own_puts(op, reads);
}

// ---- Cleaning ----

void put_clean_count(Op &op, int peer) {
  Team &team = op.team;
  Signal signal = {&remote_peer(team, team.rank).cleans, team.control().state().cleans.load(), DK_SIGNAL_SET};
  if (is_remote(team, peer)) post(op, peer, kMessageQp, signal);
}

void put_clean_message(Op &op, int peer, uint64_t count, uint64_t cleans) {
  CleanMessage &to = op.team.control().clean_from(op.team.rank, count & 1);
  if (post(op, peer, kMessageQp, {&to.cleans, cleans, DK_SIGNAL_SET}))
    post(op, peer, kMessageQp, {&to.count, count, DK_SIGNAL_SET});
}

void wait_until_delivered(Op &op) {
  Team &team = op.team;
  wait_for_own_puts(
      op, [&](int peer) { return is_remote(team, peer) && !team.masked(peer) && !team.nic->idle(peer, kMessageQp); });
}

}  // namespace dk
