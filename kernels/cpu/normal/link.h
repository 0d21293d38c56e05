// Links carry rows of normal mode to another node. A rank puts records (ring.h) into a ring in the wire region of its
// partner, the rank of the same index on that node; all ranks of that node read the ring in place.
//
// Record n of a call travels on QP n % Q and occupies slot n % slots. Each QP has a head word that counts its arrived
// records, so no order among QPs is needed. The partner returns credits for records that all readers have read.
#pragma once
#include "cpu/normal/ring.h"
#include "cpu/team/exchange.h"

namespace dk {

// QPs and slots that this rank uses as a sender; its message carries them. More records than keep all readers busy
// would only evict each other from the caches.
struct LinkPlan {
  uint64_t slots, queues;
  int64_t batch;  // records to one node before the next node's turn
};
LinkPlan plan_link(const Team &team, const Record &record, int32_t send_chunk, int32_t recv_chunk, int32_t num_sms);
template <class P>
LinkPlan plan_link(const Team &team, const Record &record, const P &p) {
  return plan_link(team, record, p.rdma_send_chunk, p.rdma_recv_chunk, p.num_sms);
}
uint64_t link_room(const Team &team, const Record &record);  // slots that fit
void begin_links(Team &team);                                // at the start of a call

// Toward a node.
class LinkOut {
 public:
  LinkOut(Team &team, const Exchange &exchange, const Record &record, const LinkPlan &plan, int node);

  int peer() const { return peer_; }
  int64_t sent() const { return state_.sent; }
  // A free slot in my block for record number sent(); null: not yet.
  uint8_t *next_slot();
  // Puts a record from anywhere in my block. oldest_source() returns `source` while the record must not be overwritten.
  // False: no room now.
  bool send(const void *record, int64_t source);
  // `source` of the oldest record whose source is not free yet; `none` if all are.
  int64_t oldest_source(int64_t none);
  // The credit that is missing, for the failure record.
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

// From a node: the ring in the block of the forwarder, the rank of my node whose partner sends. Every rank of my node
// may read it.
class LinkIn {
 public:
  LinkIn(Team &team, const Exchange &exchange, const Record &record, int source);

  int64_t arrived() const;  // number of records, without gaps from the first one
  uint64_t slots() const { return slots_; }
  const uint8_t *row(uint64_t slot) const { return at<const uint8_t>(ring_ + slot * stride_); }
  template <class T>
  const T *extra(uint64_t slot) const {
    return reinterpret_cast<const T *>(row(slot) + extra_at_);
  }
  Cursor &tail(int index) const { return team_.peers[forwarder_].remote.link_tail(node_, index); }
  // By the forwarder alone: signals to the partner that `records` are released. True: a signal was posted.
  bool give_credit(int64_t records);

 private:
  Team &team_;
  const uint64_t call_, stride_, extra_at_;
  const int node_, forwarder_;
  uint64_t slots_, queues_, ring_;
};

}  // namespace dk
