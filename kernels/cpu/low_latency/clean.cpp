// Clean: a barrier of all unmasked ranks, after which low-latency sends are counted from zero again. Slots are not
// cleared: their messages carry older counts.
#include "cpu/low_latency/common.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

class CleanBarrier {
 public:
  explicit CleanBarrier(Op &op) : op_(op), team_(op.team), cleans_(op.team.control().state().cleans) {}
  void run();

 private:
  void post(int peer, uint64_t count);
  bool poll();
  CleanMessage *oldest_message(int peer, uint64_t seen) const;  // that this rank has not waited for; null: none
  void mark_earlier_sends(int peer, uint64_t cleans);

  Op &op_;
  Team &team_;
  uint64_t cleans_;  // the greatest number of cleans among the ranks that arrived
  int64_t *arrived_ = team_.numbers(0);
};

void CleanBarrier::post(int peer, uint64_t count) {
  uint64_t cleans = team_.control().state().cleans;
  if (is_remote(team_, peer)) {
    if (!team_.masked(peer)) put_clean_message(op_, peer, count, cleans);
    return;
  }
  CleanMessage &to = team_.peers[peer].control.clean_from(team_.rank, count & 1);
  to.cleans = cleans;
  to.count.store(count);
  op_.ring(peer);
}

void CleanBarrier::run() {
  uint64_t count = ++team_.control().state().clean_calls;
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    arrived_[peer] = peer == team_.rank;
    if (peer != team_.rank) post(peer, count);
  }
  auto awaits = [this](int peer, Missing &missing) {
    int64_t seen = static_cast<int64_t>(team_.control().peer_state(peer).clean_seen);
    missing = {seen + 1, seen};
    return !arrived_[peer] && !team_.masked(peer);
  };
  auto step = [&] {
    bool progress = poll();
    Missing unused;
    for (int peer = 0; peer < team_.num_ranks; peer++)
      if (awaits(peer, unused)) return progress ? Poll::progress : Poll::idle;
    return Poll::done;
  };
  if (!wait_until(op_, step, awaits)) return;
  restart_counts(op_, static_cast<uint32_t>(cleans_) + 1);
  for (Ticket &ticket : team_.control().state().tickets) ticket.open = 0;
}

// All sends of the peer from before this clean have arrived; no receive half will match them.
void CleanBarrier::mark_earlier_sends(int peer, uint64_t cleans) {
  for (int kind = 0; kind < 2; kind++) {
    uint64_t &seen = team_.control().peer_state(peer).seen_at_clean[kind];
    for (uint64_t slot = 0; slot < 2; slot++) {
      const SendMessage &message = team_.control().send_from(static_cast<Kind>(kind), slot, peer);
      uint64_t epoch = message.epoch.load();
      if (message.cleans <= cleans && message.epoch.load() == epoch) seen = max(seen, epoch);
    }
  }
}

CleanMessage *CleanBarrier::oldest_message(int peer, uint64_t seen) const {
  CleanMessage *oldest = nullptr;
  uint64_t oldest_count = UINT64_MAX;
  for (uint64_t parity = 0; parity < 2; parity++) {
    CleanMessage &message = team_.control().clean_from(peer, parity);
    uint64_t count = message.count.load();
    if (count > seen && count < oldest_count) {
      oldest = &message;
      oldest_count = count;
    }
  }
  return oldest;
}

// Takes each peer's oldest clean that this rank has not waited for: a peer may be one ahead.
bool CleanBarrier::poll() {
  bool found = false;
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    if (arrived_[peer] || team_.masked(peer)) continue;
    uint64_t &seen = team_.control().peer_state(peer).clean_seen;
    CleanMessage *oldest = oldest_message(peer, seen);
    // The peer may have written two between the loads of the two places, so that the older one was missed: look again.
    if (oldest) oldest = oldest_message(peer, seen);
    if (!oldest) continue;
    cleans_ = max(cleans_, oldest->cleans);
    mark_earlier_sends(peer, oldest->cleans);
    seen = oldest->count.load();
    arrived_[peer] = 1;
    found = true;
  }
  return found;
}

void run_clean(const dk_clean_params &p) {
  Op op(p, DK_OP_CLEAN);
  op.may_shrink = op.team.shrinks();
  if (!op.failed()) CleanBarrier(op).run();
}

}  // namespace
}  // namespace dk

using namespace dk;

// The shape selects slots; this library restarts all of them together.
DK_EXPORT int32_t dk_clean(dk_clean_params *p) {
  DK_ENTER(p);
  if (bad_head(*p) || p->num_max_tokens < 0 || p->hidden < 0 || p->num_experts < 0) return DK_EINVAL;
  return enqueue<dk_clean_params, run_clean>(*p);
}
