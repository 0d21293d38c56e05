// Links: how rows of normal mode get to another node and into it. A rank puts records (ring.h) into a ring that its
// partner there, the rank of its own index, has in its wire region; all ranks of that node read the ring in place.
//
// Record n of a call travels on QP n % Q, and each QP has a head word that says how many of its records are there, so
// it does not matter in which order QPs get on. The partner gives credits for what nobody needs any more. Record n is
// at place n % slots.
#pragma once
#include "cpu/normal/ring.h"
#include "cpu/team/exchange.h"

namespace dk {

// QPs and places that this rank uses on its way out. The sender says so in its message; more records than keep
// everybody busy would only push each other out of the caches.
struct LinkPlan {
  uint64_t slots, queues;
  int64_t batch;  // records in a row to one node, before others have their turn
};
LinkPlan plan_link(const Team &team, const Record &record, int32_t send_chunk, int32_t recv_chunk, int32_t num_sms);
template <class P>
LinkPlan plan_link(const Team &team, const Record &record, const P &p) {
  return plan_link(team, record, p.rdma_send_chunk, p.rdma_recv_chunk, p.num_sms);
}
uint64_t link_room(const Team &team, const Record &record);  // places that there can be
void begin_links(Team &team);                                // once a call

// Toward a node.
class LinkOut {
 public:
  LinkOut(Team &team, const Exchange &exchange, const Record &record, const LinkPlan &plan, int node);

  int peer() const { return peer_; }
  int64_t sent() const { return state_.sent; }
  // A place for record number sent() in my own block, free to be filled; null: not yet.
  uint8_t *next_slot();
  // Puts a record that lies anywhere in my block. `source` is what oldest_source() gives back while it must stay as it
  // is. False: no room now.
  bool send(const void *record, int64_t source);
  // Of the oldest record whose source is not free yet; `none` if all are.
  int64_t oldest_source(int64_t none);
  // How far the partner is, for the record of a failure.
  Missing missing() const;

 private:
  void retire();
  bool has_room();
  uint64_t credit() const { return team_.remote().link_credit(node_).rows(call_); }

  Team &team_;
  LinkState &state_;
  const uint64_t call_, record_bytes_, stride_, slots_, queues_;
  const int node_, peer_;
};

// From a node, at the forwarder: the rank of mine whose partner sends. Every rank of the node may look at it.
class LinkIn {
 public:
  LinkIn(Team &team, const Exchange &exchange, const Record &record, int source);

  int64_t arrived() const;  // records, from the first on
  uint64_t slots() const { return slots_; }
  const uint8_t *row(uint64_t slot) const { return at<const uint8_t>(ring_ + slot * stride_); }
  template <class T>
  const T *extra(uint64_t slot) const {
    return reinterpret_cast<const T *>(row(slot) + extra_at_);
  }
  Cursor &tail(int index) const { return team_.peers[forwarder_].remote.link_tail(node_, index); }
  // By the forwarder alone: tells the partner that `records` are not needed any more. True: there was something to
  // tell.
  bool give_credit(int64_t records);

 private:
  Team &team_;
  const uint64_t call_, stride_, extra_at_;
  const int node_, forwarder_;
  uint64_t slots_, queues_, ring_;
};

}  // namespace dk
