#include "cpu/normal/combine_remote.h"

#include <string.h>

#include "cpu/normal/handle.h"

namespace dk {

void add_weights(float *to, const float *const *rows, int count, int32_t num_topk) {
  for (int32_t k = 0; k < num_topk; k++) {
    float total = 0;
    for (int r = 0; r < count; r++) total += rows[r][k];
    to[k] = total;
  }
}

void NodeSum::begin(int32_t num_topk) {
  num_topk_ = num_topk;
  record_ = link_record(team_, p_, num_topk);
  size_t bytes = sizeof(int64_t) * static_cast<size_t>(team_.num_ranks);
  memset(consumed_, 0, bytes);
  memset(head_, 0, bytes);
}

// ---- Rows of my node's ranks for my partner on another node ----

NodeSum::RowStream NodeSum::stream(int node, int index) const {
  int holder = team_.first_local() + index, which = node * team_.node_size + index;
  return {holder, rows_between(team_, team_.matrix.get(), team_.partner(node), holder), consumed_ + which,
          head_ + which};
}

bool NodeSum::has_arrived(int source, const RowStream &s) const {
  if (s.rank == team_.rank || *s.consumed < *s.head) return true;
  *s.head = static_cast<int64_t>(team_.peers[s.rank].control.combine_head(source).rows(exchange_.number()));
  return *s.consumed < *s.head;
}

const uint8_t *NodeSum::row(int source, const RowStream &s) const {
  if (s.rank == team_.rank) {
    int64_t own = first_row(source) + *s.consumed;
    if (!expanded(p_.routing)) return at<const uint8_t>(p_.x) + static_cast<uint64_t>(own) * record_.row_bytes;
    Ring scratch = ring(source, team_.rank);  // no row goes through it: this rank forwards them itself
    gather_terms(*team_.device->rows, p_, own, scratch.row(0), nullptr);
    return scratch.row(0);
  }
  Ring theirs = ring(source, s.rank);
  return theirs.row(static_cast<uint64_t>(*s.consumed) % theirs.slots());
}

int32_t NodeSum::token_of(int source, const RowStream &s) const {
  if (team_.shrinks()) return static_cast<int32_t>(*s.consumed);  // no rows of other ranks are to be added to it
  if (s.rank == team_.rank) {
    int64_t own = first_row(source) + *s.consumed;
    return p_.routing ? token_of_row(p_, source, own) : at<const int32_t>(p_.recv_src_idx)[own];
  }
  Ring theirs = ring(source, s.rank);
  return theirs.extra<TokenNumber>(static_cast<uint64_t>(*s.consumed) % theirs.slots())->token;
}

int32_t NodeSum::last_choice(int source, const RowStream &s) const {
  if (s.rank == team_.rank) return last_choice_of_row(p_, first_row(source) + *s.consumed);
  Ring theirs = ring(source, s.rank);
  return theirs.extra<TokenNumber>(static_cast<uint64_t>(*s.consumed) % theirs.slots())->last_choice;
}

const float *NodeSum::weights_of(int source, const RowStream &s) const {
  if (s.rank == team_.rank) return at<const float>(p_.topk_weights) + (first_row(source) + *s.consumed) * num_topk_;
  Ring theirs = ring(source, s.rank);
  return reinterpret_cast<const float *>(
      theirs.extra<TokenNumber>(static_cast<uint64_t>(*s.consumed) % theirs.slots()) + 1);
}

// ---- Sums ----

// The first token whose sum was not sent; -1: none, or a rank's next row has not arrived yet.
int32_t NodeSum::next_token(int node) const {
  int32_t first = -1;
  for (int index = 0; index < team_.node_size; index++) {
    RowStream s = stream(node, index);
    if (*s.consumed == s.count) continue;
    if (!has_arrived(team_.partner(node), s)) return -1;
    int32_t token = token_of(team_.partner(node), s);
    if (first < 0 || token < first) first = token;
  }
  return first;
}

void NodeSum::add_token(int node, int32_t token, uint8_t *to) const {
  const uint16_t *rows[DK_MAX_RANKS];
  const float *weights[DK_MAX_RANKS];
  int count = 0, source = team_.partner(node);
  for (int index = 0; index < team_.node_size; index++) {
    RowStream s = stream(node, index);
    if (*s.consumed == s.count || token_of(source, s) != token) continue;
    if (num_topk_) weights[count] = weights_of(source, s);
    rows[count++] = reinterpret_cast<const uint16_t *>(row(source, s));
  }
  if (count)
    team_.device->rows->sum(reinterpret_cast<uint16_t *>(to), rows, count, static_cast<size_t>(p_.hidden), false);
  TokenNumber *extra = reinterpret_cast<TokenNumber *>(to + record_.extra_at());
  extra->token = token;
  add_weights(reinterpret_cast<float *>(extra + 1), weights, count, num_topk_);
}

// A rank's K weights for a token, as they leave its node.
void NodeSum::copy_weights(int source, const RowStream &s, float *to) const {
  if (s.rank != team_.rank || !expanded(p_.routing)) {
    memcpy(to, weights_of(source, s), sizeof(float) * static_cast<size_t>(num_topk_));
    return;
  }
  for (int32_t k = 0; k < num_topk_; k++) {
    int32_t row = expanded_row(p_, first_row(source) + *s.consumed, k);
    to[k] = row < 0 ? 0 : at<const float>(p_.topk_weights)[row];
  }
}

// The terms in the order of the token's last choice of each rank.
void NodeSum::add_routed_token(int node, int32_t token, uint8_t *to) const {
  const uint16_t *rows[kMaxTopk];
  int32_t last[kMaxTopk];
  int count = 0, source = team_.partner(node);
  TokenNumber *extra = reinterpret_cast<TokenNumber *>(to + record_.extra_at());
  float *weights = reinterpret_cast<float *>(extra + 1);
  extra->token = token;
  for (int index = 0; index < team_.node_size; index++, weights += num_topk_) {
    RowStream s = stream(node, index);
    if (!has(source, s, token) || count == kMaxTopk) continue;  // K choices have at most K ranks
    int32_t choice = last_choice(source, s);
    int place = count++;
    for (; place > 0 && last[place - 1] > choice; place--) {
      rows[place] = rows[place - 1];
      last[place] = last[place - 1];
    }
    rows[place] = reinterpret_cast<const uint16_t *>(row(source, s));
    last[place] = choice;
    if (num_topk_) copy_weights(source, s, weights);
  }
  if (count)
    team_.device->rows->sum(reinterpret_cast<uint16_t *>(to), rows, count, static_cast<size_t>(p_.hidden), false);
}

// The row of the first rank that has one for the token.
void NodeSum::copy_row(int node, int32_t token, uint8_t *to) const {
  int source = team_.partner(node);
  for (int index = 0; index < team_.node_size; index++) {
    RowStream s = stream(node, index);
    if (!has(source, s, token)) continue;
    TokenNumber *extra = reinterpret_cast<TokenNumber *>(to + record_.extra_at());
    extra->token = token;
    team_.device->rows->copy(to, row(source, s), record_.row_bytes, false);
    if (num_topk_) copy_weights(source, s, reinterpret_cast<float *>(extra + 1));
    return;
  }
}

void NodeSum::fill(int node, int32_t token, uint8_t *to) const {
  if (rows_apart(p_)) return copy_row(node, token, to);
  p_.routing ? add_routed_token(node, token, to) : add_token(node, token, to);
}

void NodeSum::advance(int node, int32_t token) {
  for (int index = 0; index < team_.node_size; index++) {
    RowStream s = stream(node, index);
    if (!has(team_.partner(node), s, token)) continue;
    ++*s.consumed;
    if (rows_apart(p_)) return;
  }
}

// A sum that finds no room on its QP stays in its slot and is not computed again.
bool NodeSum::add_for(int node) {
  int source = team_.partner(node);
  LinkState &state = team_.links[node];
  LinkOut out = link(node);
  int64_t before = state.sent;
  while (state.sent < before + plan_.batch) {
    int32_t token = next_token(node);
    uint8_t *slot = token < 0 ? nullptr : out.next_slot();
    if (!slot) break;
    if (state.offered == state.sent) {
      fill(node, token, slot);
      state.offered++;
    }
    if (!out.send(slot, 0)) break;
    advance(node, token);
  }
  if (state.sent == before) return false;
  for (int index = 0; index < team_.node_size; index++) {
    RowStream s = stream(node, index);
    if (s.rank == team_.rank || s.count == 0) continue;
    team_.peers[s.rank].control.combine_tail(source).set(exchange_.number(), static_cast<uint64_t>(*s.consumed));
    op_.ring(s.rank);
  }
  return true;
}

bool NodeSum::add() {
  bool progress = false;
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++)
    if (sends_to(node)) progress |= add_for(node);
  return progress;
}

bool NodeSum::done() const {
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++) {
    for (int index = 0; sends_to(node) && index < team_.node_size; index++) {
      RowStream s = stream(node, index);
      if (*s.consumed < s.count) return false;
    }
  }
  return true;
}

// A rank of my node whose next row has not arrived; or the partner on another node that has no room for a sum.
bool NodeSum::awaits(int peer, Missing &missing) const {
  if (!team_.spans_nodes()) return false;
  if (!team_.is_local(peer)) {
    int node = team_.node(peer);
    if (peer != team_.partner(node) || next_token(node) < 0) return false;
    missing = link(node).missing();
    return missing.seen < missing.expected;
  }
  if (team_.node(peer) != team_.my_node()) return false;
  for (int node = 0; node < team_.num_nodes(); node++) {
    if (!sends_to(node)) continue;
    RowStream s = stream(node, team_.index(peer));
    missing = {*s.consumed + 1, *s.head};
    if (*s.consumed < s.count && !has_arrived(team_.partner(node), s)) return true;
  }
  return false;
}

}  // namespace dk
