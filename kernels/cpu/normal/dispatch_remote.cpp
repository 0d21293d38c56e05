#include "cpu/normal/dispatch_remote.h"

namespace dk {

// ---- Sender ----

int64_t NodeSender::oldest_needed(int64_t staged) const {
  int64_t oldest = staged;
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++)
    if (team_.has_link(node)) oldest = min(oldest, link(node).oldest_source(team_.links[node].offered));
  return oldest;
}

bool NodeSender::done(int64_t staged) const {
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++)
    if (sends_to(node) && team_.links[node].offered < staged) return false;
  return true;
}

bool NodeSender::awaits(int peer, int64_t staged, Missing &missing) const {
  int node = team_.node(peer);
  if (team_.is_local(peer) || peer != team_.partner(node)) return false;
  if (team_.links[node].offered == staged) return false;
  missing = link(node).missing();
  return missing.seen < missing.expected;
}

// ---- Forwarder ----

// Rows that the slowest reader of my node has read; -1: all readers have finished.
int64_t Forwarder::slowest_tail(const LinkIn &in, int source) const {
  int64_t slowest = -1;
  for (int index = 0; index < team_.node_size; index++) {
    if (!reads(in, source, index)) continue;
    int64_t rows = static_cast<int64_t>(in.tail(index).rows(exchange_.number()));
    slowest = slowest < 0 ? rows : min(slowest, rows);
  }
  return slowest;
}

bool Forwarder::relay() {
  bool progress = false;
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++) {
    int source = team_.partner(node);
    if (!team_.has_link(node) || !exchange_.arrived(source)) continue;
    LinkIn in(team_, exchange_, record_, source);
    int64_t here = in.arrived();
    if (here > team_.links[node].seen) {
      team_.links[node].seen = here;
      for (int index = 0; index < team_.node_size; index++)
        if (reads(in, source, index)) op_.ring(team_.first_local() + index);
      progress = true;
    }
    int64_t read = slowest_tail(in, source);
    if (read >= 0) progress |= in.give_credit(read);
  }
  return progress;
}

bool Forwarder::done() const {
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++) {
    int source = team_.partner(node);
    if (team_.has_link(node) && slowest_tail(LinkIn(team_, exchange_, record_, source), source) >= 0) return false;
  }
  return true;
}

// A reader that has not read all arrived rows; or the sender, if all readers have.
bool Forwarder::awaits(int peer, Missing &missing) const {
  bool local = team_.is_local(peer);
  if (!team_.spans_nodes() || (local ? team_.node(peer) != team_.my_node() : peer != team_.partner(team_.node(peer))))
    return false;
  for (int node = 0; node < team_.num_nodes(); node++) {
    int source = team_.partner(node);
    if (!team_.has_link(node) || (!local && source != peer)) continue;
    LinkIn in(team_, exchange_, record_, source);
    int64_t here = in.arrived();
    if (local && !reads(in, source, team_.index(peer))) continue;
    int64_t read =
        local ? static_cast<int64_t>(in.tail(team_.index(peer)).rows(exchange_.number())) : slowest_tail(in, source);
    missing = local ? Missing{here, read} : Missing{here + 1, here};
    if (local ? read < here : read == here) return true;
  }
  return false;
}

int64_t Forwarder::rows_for(int reader) const {
  int64_t rows = 0;
  bool forwards = team_.node(reader) == team_.my_node() && reader != team_.rank;
  for (int node = 0; team_.spans_nodes() && forwards && node < team_.num_nodes(); node++)
    if (team_.has_link(node)) rows += rows_between(team_.partner(node), reader);
  return rows;
}

}  // namespace dk
