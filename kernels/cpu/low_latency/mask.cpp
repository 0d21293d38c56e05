// Masks: the ranks that this rank leaves out of its calls. Each rank keeps its own mask, and tells a rank that it has
// masked it (Control::notice_from); remote ranks receive this rank's number of cleans besides.
#include "cpu/low_latency/common.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

// True: the peer was masked and is not any more.
bool set_mask(Team &team, int peer, bool masked) {
  PeerState &state = team.control().peer_state(peer);
  bool lifted = state.masked && !masked;
  if (lifted) ignore_past_sends_of(team, peer);
  if (masked)
    mask_peer(team, peer);
  else
    unmask_peer(team, peer);
  return lifted;
}

// The caller takes ranks back: messages of this rank's earlier collective calls are void.
void count_lift(Team &team) {
  RankState &state = team.control().state();
  state.lifts.fetch_add(1);
  state.generation.fetch_add(1);
  tell_all(team);
}

// Until ranks of other nodes know it, and nothing of earlier calls is on its way to them.
void wait_until_told(Op &op) {
  Team &team = op.team;
  auto waits = [&](int peer) {
    return team.told && !team.is_local(peer) && !team.masked(peer) && !(tell(team, peer) && team.nic->idle(peer));
  };
  auto poll = [&] {
    for (int peer = 0; peer < team.num_ranks; peer++)
      if (waits(peer)) return Poll::idle;
    return Poll::done;
  };
  if (poll() == Poll::idle) wait_until(op, poll, [&](int peer, Missing &) { return waits(peer); });
}

// Waits until the puts are delivered: the caller may synchronise with the other ranks next, and calls after that rely
// on the count.
void update_mask(Op &op, int peer, bool masked) {
  if (!masked) count_lift(op.team);
  if (set_mask(op.team, peer, masked)) {
    put_clean_count(op, peer);
    wait_until_delivered(op);
  }
  wait_until_told(op);
}

void clean_masks(Op &op) {
  count_lift(op.team);
  for (int peer = 0; peer < op.team.num_ranks; peer++) set_mask(op.team, peer, false);
  restart_counts(op, op.team.control().state().cleans + 1);
  wait_until_delivered(op);
  wait_until_told(op);
}

void run_mask(const dk_mask_params &p) {
  Op op(p, DK_OP_MASK);
  op.may_shrink = true;  // nothing can be put to a dead remote peer
  if (p.what == DK_MASK_UPDATE && !op.failed()) update_mask(op, p.rank, p.value != 0);
  if (p.what == DK_MASK_CLEAN && !op.failed()) clean_masks(op);
  if (p.what != DK_MASK_QUERY) return;
  for (int peer = 0; peer < op.team.num_ranks; peer++) at<int32_t>(p.out)[peer] = op.team.masked(peer);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_mask(dk_mask_params *p) {
  DK_ENTER(p);
  if (bad_head(*p) || p->what < DK_MASK_UPDATE || p->what > DK_MASK_CLEAN) return DK_EINVAL;
  Team &team = *at<Team>(p->team);
  if (!team.shrinks()) return DK_ESTATE;
  if (p->what == DK_MASK_UPDATE && (p->rank < 0 || p->rank >= team.num_ranks || p->value < 0 || p->value > 1))
    return DK_EINVAL;
  if (p->what == DK_MASK_QUERY && !p->out) return DK_EINVAL;
  return enqueue<dk_mask_params, run_mask>(*p);
}
