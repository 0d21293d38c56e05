// Dispatch among nodes. The sender puts a staged row once to each node with a receiver: to its partner there, the
// forwarder. The ranks of that node read it in the forwarder's ring; the forwarder wakes them, and credits the sender
// with the rows that all of them have read.
#pragma once
#include "cpu/normal/link.h"

namespace dk {

// The sender's part: it reads the ring of staged rows as a peer does.
class NodeSender {
 public:
  NodeSender(Team &team, const Exchange &exchange, const Record &record, const LinkPlan &plan, const Ring &staging)
      : team_(team), exchange_(exchange), record_(record), plan_(plan), staging_(staging) {}

  // Puts the rows staged since the last call while there is room. readers(slot): a staged row's receivers, a bit by
  // rank.
  template <class Readers>
  bool send(int64_t staged, Readers readers);
  // The first staged row that must not be overwritten; `staged` if none.
  int64_t oldest_needed(int64_t staged) const;
  bool done(int64_t staged) const;
  bool awaits(int peer, int64_t staged, Missing &missing) const;
  int64_t rows_to(int node) const { return team_.links[node].sent; }

 private:
  LinkOut link(int node) const { return LinkOut(team_, exchange_, record_, plan_, node); }
  bool sends_to(int node) const { return team_.has_link(node) && !exchange_.without(team_.partner(node)); }
  bool is_for(const uint64_t *readers, int node) const {
    for (int peer = node * team_.node_size, end = peer + team_.node_size; peer < end; peer++)
      if (readers[peer / 64] >> peer % 64 & 1) return true;
    return false;
  }

  Team &team_;
  const Exchange &exchange_;
  const Record &record_;
  const LinkPlan &plan_;
  const Ring &staging_;
};

template <class Readers>
bool NodeSender::send(int64_t staged, Readers readers) {
  bool sent = false;
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++) {
    if (!sends_to(node)) continue;
    LinkOut out = link(node);
    int64_t &row = team_.links[node].offered, limit = out.sent() + plan_.batch;
    for (int64_t before = row; row < staged && out.sent() < limit; row++, sent |= row != before) {
      uint64_t slot = static_cast<uint64_t>(row) % staging_.slots();
      if (is_for(readers(slot), node) && !out.send(staging_.row(slot), row)) break;
    }
  }
  return sent;
}

// The forwarder's part, for its partner on each other node.
class Forwarder {
 public:
  Forwarder(Op &op, const Exchange &exchange, const Record &record, const int32_t *matrix)
      : op_(op), team_(op.team), exchange_(exchange), record_(record), matrix_(matrix) {}

  // Wakes the readers of newly arrived rows and credits the senders. True: there was something to do.
  bool relay();
  // Whether the ranks of this node have read all rows that this rank forwards.
  bool done() const;
  bool awaits(int peer, Missing &missing) const;
  // Rows of other nodes that `reader`, a rank of this node, reads here.
  int64_t rows_for(int reader) const;

 private:
  int64_t rows_between(int source, int reader) const {
    int n = team_.num_ranks;
    return matrix_[source * n + reader] - (source ? matrix_[(source - 1) * n + reader] : 0);
  }
  bool reads(const LinkIn &in, int source, int index) const {  // has not finished
    return !exchange_.without(source) && rows_between(source, team_.first_local() + index) > 0 &&
           in.tail(index).rows(exchange_.number()) != kAllRows;
  }
  int64_t slowest_tail(const LinkIn &in, int source) const;

  Op &op_;
  Team &team_;
  const Exchange &exchange_;
  const Record &record_;
  const int32_t *matrix_;
};

}  // namespace dk
