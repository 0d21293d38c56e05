#include "cpu/team/agreement.h"

namespace dk {
namespace {

constexpr uint64_t kDecided = 1, kRevision = 2, kNumber = 1 << 16;  // parts of Ballot::version

bool is_dead(const Team &team, int peer) { return __atomic_load_n(&team.status->dead[peer], __ATOMIC_ACQUIRE); }

}  // namespace

Agreement::Agreement(Op &op) : op_(op), team_(op.team), patient_(op.op == DK_OP_BARRIER) {
  for (int peer = 0; op.may_shrink && peer < team_.num_ranks; peer++)
    if (peer == team_.rank || !team_.masked(peer)) ranks_.add(peer);
  told_ = ranks_;
}

// Until the caller lifts masks, this rank posts nothing any more that a peer could take for a message of a call. The
// peer that has left it out writes the same, perhaps later.
void Agreement::leave(int peer) {
  left_out_by_ = peer;
  RankState &state = team_.control().state();
  state.generation.fetch_add(1);
  team_.control().notice_from(peer).store(state.lifts.load() + 1);
  tell_all(team_);
}

// A peer that this rank has lifted its mask for, and that has masked this rank itself, may lift its mask until this
// rank's patience ends: then this rank is the one that is left out.
bool Agreement::drop_masked() {
  bool changed = false;
  for (int peer = 0; peer < team_.num_ranks && left_out_by_ < 0; peer++) {
    if (peer == team_.rank || !has(peer) || !team_.masked(peer)) continue;
    changed = true;
    ranks_.remove(peer);
    if (decided_ || is_dead(team_, peer) || !team_.control().notice_from(peer).load()) continue;
    unmask_peer(team_, peer);
    leave(peer);
  }
  return changed;
}

// Whether the peer has masked this rank since this rank's caller has lifted masks.
bool Agreement::leaves_out(int peer) const {
  return peer != team_.rank && has(peer) && !is_dead(team_, peer) &&
         team_.control().notice_from(peer).load() == team_.control().state().lifts.load() + 1;
}

bool Agreement::look_at_notices() {
  for (int peer = 0; peer < team_.num_ranks && left_out_by_ < 0 && !patient_; peer++)
    if (leaves_out(peer)) leave(peer);
  return left_out_by_ >= 0;
}

bool Agreement::is_held_up() const {
  bool held_up = false;
  for (int peer = 0; peer < team_.num_ranks; peer++) held_up |= holds_up(peer);
  return held_up;
}

// False: not posted yet, or being posted.
bool Agreement::read(int peer, uint64_t number, Vote &vote) const {
  Ballot &ballot = team_.control().ballot_from(peer);
  uint64_t version = ballot.version.load();
  if (version / kNumber != number) return false;
  for (int w = 0; w * 64 < team_.num_ranks; w++) vote.ranks.words[w] = ballot.ranks[w].load();
  vote.decided = version & kDecided;
  return ballot.version.load() == version;
}

// A peer's decision holds for this rank too. It may count in a rank that this one has masked meanwhile.
bool Agreement::hear(int peer, uint64_t number) {
  Vote vote;
  if (left_out_by_ >= 0 || decided_ || !read(peer, number, vote)) return false;
  if (!vote.ranks.has(team_.rank)) {
    leave(peer);
    return true;
  }
  if (vote.decided) {
    ranks_ = vote.ranks;
    for (int r = 0; r < team_.num_ranks; r++)
      if (r != team_.rank && has(r) && team_.masked(r)) unmask_peer(team_, r);
    decided_ = true;
    return true;
  }
  RankSet before = ranks_;
  ranks_.keep(vote.ranks);
  return !(before == ranks_);
}

bool Agreement::awaits(int peer, uint64_t number) const {
  Vote vote;
  return !read(peer, number, vote) || !(vote.ranks == ranks_);
}

// Also to the ranks that were dropped meanwhile: they learn it so.
void Agreement::post(uint64_t number) {
  posted_ = ranks_;
  version_ = number * kNumber + ++revision_ * kRevision + (decided_ ? kDecided : 0);
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    if (peer == team_.rank || !told_.has(peer)) continue;
    if (!team_.is_local(peer)) {
      unsent_.add(peer);
      next_word_[peer] = 0;
      continue;
    }
    Ballot &to = team_.peers[peer].control.ballot_from(team_.rank);
    to.version.store(0);
    for (int w = 0; w * 64 < team_.num_ranks; w++) to.ranks[w].store(ranks_.words[w]);
    to.version.store(version_);
    op_.ring(peer);
  }
  flush();
}

bool Agreement::flush() {
  bool all = true;
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    if (!unsent_.has(peer)) continue;
    if (put_ballot(peer)) unsent_.remove(peer);
    all = all && (!unsent_.has(peer) || !has(peer));
  }
  return all;
}

// Its words go as signals, which have no source that must stay: version 0, the ranks, the version.
bool Agreement::put_ballot(int peer) {
  Ballot &to = team_.control().ballot_from(team_.rank);
  const int num_words = (team_.num_ranks + 63) / 64;
  for (uint8_t &next = next_word_[peer]; next < num_words + 2; next++) {
    Signal word = {&to.version, next ? version_ : 0, DK_SIGNAL_SET};
    if (next > 0 && next <= num_words) word = {&to.ranks[next - 1], posted_.words[next - 1], DK_SIGNAL_SET};
    if (!team_.nic->signal(peer, 0, word)) return false;
  }
  return true;
}

}  // namespace dk
