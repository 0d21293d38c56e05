// Low latency toward remote ranks (mirror.h): what the two halves of a call put, and how they detect arrivals.
#pragma once
#include "cpu/team/mirror.h"
#include "cpu/team/wait.h"

namespace dk {

inline bool any_remote(const Team &team) { return team.wire.mirror_bytes[kDispatch] != 0; }
inline bool is_remote(const Team &team, int peer) {
  return any_remote(team) && peer != team.rank && (!team.is_local(peer) || team.flags & DK_TEAM_LL_TRANSPORT);
}

// Both are in this rank's block and are written by `peer`'s NIC. With `peer` = this rank: the position, in a remote
// peer's block, of what this rank puts.
RemotePeer &remote_peer(const Team &team, int peer);
uint64_t mirror_address(const Team &team, Kind kind, uint64_t epoch, int peer);

// Waits for room in the QP. False: the operation failed or the peer was masked, and nothing was posted.
bool post(Op &op, int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal);
inline bool post(Op &op, int peer, int qp, Signal signal) { return post(op, peer, qp, nullptr, nullptr, 0, signal); }

// The puts of one send half. It posts nothing to a masked peer.
class RemoteSender {
 public:
  RemoteSender(Op &op, Kind kind);
  // Whether all puts from the slot of this epoch have completed, also those to masked peers.
  bool puts_completed(int peer, uint64_t epoch) const;
  void begin(uint64_t epoch);
  // Puts into the mirror, at `offset`. All puts of a lane use the same QP.
  void put(int peer, uint64_t lane, uint64_t offset, const void *src, uint64_t bytes);
  SendMessage &message(int peer) const { return sent(peer).message; }  // filled in before end()
  void end(int peer);

 private:
  RemoteSent &sent(int peer) const { return remote_peer(team_, peer).sent[kind_][epoch_ & 1]; }
  bool post_on(int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal);
  bool open(int peer, int qp);
  void put_message(int peer);

  Op &op_;
  Team &team_;
  const Kind kind_;
  const int num_qps_;
  uint64_t epoch_ = 0;
};

// Whether the rows of this message have arrived on all its QPs.
bool rows_arrived(const Team &team, Kind kind, int peer, const Arrival &message);
void give_remote_credit(Op &op, Kind kind, int peer, uint64_t epoch);
// Waits until the NIC has finished reading the caller's rows (zero copy).
bool wait_for_callers_rows(Op &op, uint64_t epoch);

// A remote peer cannot load this rank's number of cleans, so it is put there.
void put_clean_count(Op &op, int peer);
void wait_until_delivered(Op &op);
void put_clean_message(Op &op, int peer, uint64_t count, uint64_t cleans);

}  // namespace dk
