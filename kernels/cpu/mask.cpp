// Masks: which ranks this one does without. Each rank's own affair; nothing is told to the others.
#include "cpu/check.h"
#include "cpu/ll.h"

namespace dk {
namespace {

void set_mask(Team &team, int peer, bool masked) {
  OwnPeerState &state = team.control().peer_state(peer);
  if (state.masked && !masked) forget_past_of(team, peer);
  state.masked = masked;
}

void clean_masks(Team &team) {
  for (int peer = 0; peer < team.num_ranks; peer++) set_mask(team, peer, false);
  start_anew(team, team.control().own().cleans + 1);
}

void run_mask(const dk_mask_params &p) {
  Op op(p, DK_OP_MASK);
  if (p.what == DK_MASK_UPDATE && !op.failed()) set_mask(op.team, p.rank, p.value != 0);
  if (p.what == DK_MASK_CLEAN && !op.failed()) clean_masks(op.team);
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
  if (p->what == DK_MASK_UPDATE && (p->rank < 0 || p->rank >= team.num_ranks || p->value < 0 || p->value > 1)) return DK_EINVAL;
  if (p->what == DK_MASK_QUERY && !p->out) return DK_EINVAL;
  return enqueue<dk_mask_params, run_mask>(*p);
}
