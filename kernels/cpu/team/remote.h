// Control words between ranks of different nodes. Loads and stores do not reach another node: a NIC writes these words,
// and only ranks of the block's node read them. They follow Control where there is more than one node.
//
// A rank sends rows to another node over a link: to the rank of the same index there (its partner), into a ring of that
// rank's wire region (link.h). Names here are the receiver's: `node` is the node that writes.
#pragma once
#include "cpu/team/control.h"

namespace dk {

constexpr int kMaxLinkQueues = 64;  // QPs that the rows of a link are spread over

class RemoteControl {
 public:
  // num_nodes: as links count them (links_of).
  RemoteControl(uint64_t base, int num_ranks, int num_nodes)
      : base_(base),
        call_bytes_(Control::call_bytes(num_ranks)),
        ranks_(static_cast<uint64_t>(num_ranks)),
        nodes_(static_cast<uint64_t>(num_nodes)) {}
  static uint64_t bytes(int num_ranks, int num_nodes) {
    return num_nodes > 1 ? round_up(RemoteControl(0, num_ranks, num_nodes).end(), kPage) : 0;
  }

  // The first failure of a rank of another node; that rank puts it.
  FailureRecord &failure_record_from(int peer) const { return at<FailureRecord>(base_)[peer]; }
  // Whom a rank of another node waits for, and when it said so (wait.cpp); that rank puts it.
  std::atomic<uint64_t> &wait_of(int peer) const { return at<std::atomic<uint64_t>>(waits())[peer * 8]; }
  // In a team that shrinks: RankState::generation and lifts of a rank of another node; that rank puts them.
  std::atomic<uint64_t> &generation_of(int peer) const { return at<std::atomic<uint64_t>>(waits())[peer * 8 + 1]; }
  std::atomic<uint64_t> &lifts_of(int peer) const { return at<std::atomic<uint64_t>>(waits())[peer * 8 + 2]; }
  // Rows from `node` that the rank of this index on my node has read; it writes the word.
  Cursor &link_tail(int node, int index) const {
    return at<Cursor>(tails())[static_cast<uint64_t>(node) * (ranks_ / nodes_) + static_cast<uint64_t>(index)];
  }
  // Rows sent to `node` that my partner there has released; it puts the word.
  Cursor &link_credit(int node) const { return at<Cursor>(credits())[node]; }
  // Rows from my partner on `node` that have arrived on each QP, packed like a Cursor; it puts the word with the rows.
  std::atomic<uint64_t> &link_head(int node, int queue) const {
    return at<std::atomic<uint64_t>>(heads())[node * kMaxLinkQueues + queue];
  }
  // Sources of messages to the ranks of other nodes.
  CallMessage &outbox(int peer) const {
    return *at<CallMessage>(outboxes() + static_cast<uint64_t>(peer) * call_bytes_);
  }

 private:
  uint64_t tails() const { return base_ + ranks_ * sizeof(FailureRecord); }
  uint64_t credits() const { return tails() + ranks_ * sizeof(Cursor); }
  uint64_t heads() const { return credits() + nodes_ * sizeof(Cursor); }
  uint64_t outboxes() const { return heads() + nodes_ * kMaxLinkQueues * sizeof(uint64_t); }
  uint64_t waits() const { return outboxes() + ranks_ * call_bytes_; }
  uint64_t end() const { return waits() + ranks_ * kLine; }

  uint64_t base_, call_bytes_, ranks_, nodes_;
};

}  // namespace dk
