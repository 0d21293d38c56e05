// Links: how rows of normal mode get to another node and into it. A rank puts records (a row and what goes with it) into a ring
// that its partner there, the rank of its own index, has in its wire region; all ranks of that node read the ring in place.
//
// Record n of a call travels on QP n % Q, and each QP has a head word that says how many of its records are there, so it does
// not matter in which order QPs get on. The partner gives credits for what nobody needs any more. Record n is at place n % slots.
#pragma once
#include "cpu/exchange.h"

namespace dk {

constexpr uint64_t kMaxLinkSlots = 1024;

// What this rank remembers of its link to a node during a call.
struct LinkState {
  int64_t sent, done;                 // records put; of them, from the first on, those whose source is free again
  int64_t credited;                   // records that came from there, and are given back
  uint64_t posted[kMaxLinkSlots];     // by place: Nic::posted() after the put
  int64_t source[kMaxLinkSlots];      // by place: the sender's own number for where the record lay
};

// The shape of records, the same on all ranks of a call.
struct LinkShape {
  uint64_t row_bytes, extra_bytes;

  uint64_t extra_at() const { return round_up(row_bytes, 16); }
  uint64_t record_bytes() const { return extra_at() + extra_bytes; }
  uint64_t stride() const { return round_up(record_bytes(), kLine); }
  uint64_t room(const Team &team) const { return min_of(team.wire.link_bytes / stride(), kMaxLinkSlots); }
  uint64_t slots(const Team &team, uint64_t wanted) const { return max_of<uint64_t>(1, min_of(wanted, room(team))); }
};

// QPs and places that this rank uses on its way out. The sender says so in its message; more records than keep everybody busy
// would only push each other out of the caches.
struct LinkPlan {
  uint64_t slots, queues;
};
LinkPlan plan_link(const Team &team, uint64_t row_bytes, int32_t max_rows, int32_t num_sms);

// Toward a node.
class LinkOut {
 public:
  LinkOut(Op &op, const Exchange &exchange, const LinkShape &shape, const LinkPlan &plan, int node);

  // For all links, once a call.
  static void begin(Team &team);

  int peer() const { return peer_; }
  int64_t sent() const { return state_.sent; }
  // A place for record number sent() in my own block, free to be filled; null: not yet.
  uint8_t *place();
  // Whether the partner has room for one more record.
  bool has_credit() const;
  // Puts a record that lies anywhere in my block. `source` is what oldest_source() gives back while it must stay as it is.
  // False: no room now.
  bool send(const void *record, int64_t source);
  // Of the oldest record whose source is not free yet; `none` if all are.
  int64_t oldest_source(int64_t none);
  // How far the partner is, for the record of a failure.
  Missing missing() const;

 private:
  void retire();
  uint64_t credit() const { return team_.far().link_credit(node_).rows(call_); }

  Team &team_;
  LinkState &state_;
  const uint64_t call_, record_bytes_, stride_, slots_, queues_;
  const int node_, peer_;
};

// From a node, at the gate: the rank of mine whose partner sends. Every rank of the node may look at it.
class LinkIn {
 public:
  LinkIn(Team &team, const Exchange &exchange, const LinkShape &shape, int source);

  int64_t arrived() const;  // records, from the first on
  const uint8_t *row(int64_t record) const { return at<const uint8_t>(ring_ + static_cast<uint64_t>(record) % slots_ * shape_.stride()); }
  template <class T> const T *extra(int64_t record) const { return reinterpret_cast<const T *>(row(record) + shape_.extra_at()); }
  uint64_t slots() const { return slots_; }
  Cursor &tail(int index) const { return team_.peers[gate_].far.link_tail(node_, index); }
  // By the gate alone: tells the partner that `records` are not needed any more. True: there was something to tell.
  bool give_credit(int64_t records);

 private:
  Team &team_;
  const LinkShape shape_;
  const uint64_t call_;
  const int node_, gate_;
  uint64_t slots_, queues_, ring_;
};

}  // namespace dk
