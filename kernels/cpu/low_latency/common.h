// The two halves of a low-latency call, common to dispatch and combine: slots, messages, credits, tickets.
//
// A rank fills a slot of its wire region and posts a message to its peers; they read the slot in place and return a
// credit. To remote ranks (remote.h) it puts their part of the slot, and the slot is free again once those puts have
// completed too. A message matches a receive half if it carries the same number of sends since the same clean; epochs
// are local to the sender. So a message of a peer that was masked, is late or skipped calls never matches a wrong call.
#pragma once
#include "cpu/low_latency/remote.h"

namespace dk {

uint64_t slot_address(const Team &team, int owner, Kind kind, uint64_t epoch);

class SendHalf {
 public:
  SendHalf(Op &op, Kind kind) : op_(op), team_(op.team), kind_(kind), remote_(op, kind) {}

  // Waits until the slot of the next epoch is free. False: the operation failed.
  bool begin();
  uint64_t slot() const { return slot_address(team_, team_.rank, kind_, epoch_); }
  void set_field(int field, int64_t value) { fields_[field] = value; }
  void set_rows(bool in_rdma, uint64_t offset, uint64_t stride) {
    in_rdma_ = in_rdma;
    offset_ = offset;
    stride_ = stride;
  }
  // This rank's arguments are wrong: the message says so and brings no rows, and every rank refuses the call.
  void refuse(const Refusal &why) { refusal_ = why; }
  RemoteSender &remote() { return remote_; }  // between begin and finish
  // Posts the message to the unmasked peers and writes the ticket for the receive half.
  void finish(int32_t num_tokens, uint32_t ticket);

 private:
  bool has_credit(int peer) const;
  bool puts_completed(int peer) const { return !is_remote(team_, peer) || remote_.puts_completed(peer, epoch_); }
  void fill(SendMessage &message, int32_t num_tokens) const;
  void post(int peer, int32_t num_tokens);

  Op &op_;
  Team &team_;
  const Kind kind_;
  RemoteSender remote_;
  uint64_t epoch_ = 0, offset_ = 0, stride_ = 0;
  int64_t fields_[kNumFields] = {};
  Refusal refusal_;
  bool in_rdma_ = false;
};

class RecvHalf {
 public:
  // Takes the ticket; the operation fails if no send half wrote it.
  RecvHalf(Op &op, Kind kind, uint32_t ticket);

  void set_field(int field, int64_t value) { fields_[field] = value; }
  // True if a message has arrived since the last poll, or a peer was masked. Records the time that each peer was waited
  // for.
  bool poll();
  bool settled(int peer) const { return arrived_[peer] != 0 || team_.masked(peer); }
  bool all_settled() const;
  bool has_arrived(int peer) const { return arrived_[peer] != 0 && !team_.masked(peer); }
  bool awaits(int peer, Missing &missing) const;

  const Arrival &message(int peer) const { return team_.arrivals[peer]; }
  // Once all peers are settled: false, with the refusal recorded, if a rank refuses the call.
  bool accepted();
  // The peer's slot; for a remote peer, its mirror here.
  uint64_t slot(int peer) const;
  uint64_t sent_slot() const { return slot_address(team_, team_.rank, kind_, ticket_.epoch); }
  // False: the peer has masked this rank and begun to overwrite the slot; the rows that were read are invalid.
  bool intact(int peer);
  void give_credits();
  uint64_t sent_epoch() const { return ticket_.epoch; }
  void add_waits(uint64_t wait_stats) const;  // int64[R], or 0

 private:
  bool find(int peer, Arrival &found) const;
  bool has_moved_on(int peer) const;
  uint32_t cleans_of(int peer) const;
  bool agrees(int peer, const Arrival &message);

  Op &op_;
  Team &team_;
  const Kind kind_;
  Ticket ticket_ = {};
  uint64_t start_ns_;
  int64_t fields_[kNumFields] = {};
  int64_t *arrived_, *epoch_, *waited_;  // by peer
};

// Before a peer is unmasked: all sends to it count as read, and its earlier sends match no call.
void ignore_past_sends_of(Team &team, int peer);
// Clean number `cleans`: sends are counted from zero again. Sends whose receive halves were never issued count as read.
void restart_counts(Op &op, uint32_t cleans);

template <class P>
bool bad_shape(const P &p, const Team &team) {
  return p.num_max_tokens < 1 || p.hidden < 8 || p.hidden % 8 || p.num_experts < team.num_ranks ||
         p.num_experts % team.num_ranks || static_cast<uint64_t>(p.num_experts) > kMaxExperts || p.num_tokens < 0 ||
         p.num_tokens > p.num_max_tokens || p.num_topk < 1 || p.num_topk > kMaxTopk || p.ticket >= DK_NUM_TICKETS ||
         p.phases < DK_PHASE_SEND || p.phases > DK_PHASE_BOTH ||
         int64_t{p.num_experts} * p.num_max_tokens > INT32_MAX ||
         LowLatencyShape(p, team.num_ranks).rdma_bytes() > team.rdma_bytes;
}

}  // namespace dk
