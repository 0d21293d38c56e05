// What low latency keeps for remote ranks: those that loads and stores do not reach, or (DK_TEAM_LL_TRANSPORT) are not
// to be used for. It lies in the wire region, at the same place on all ranks.
//
// A remote rank cannot read this rank's slots, so the sender puts what that rank needs into a mirror of the slot there.
// Rows take several QPs, which have no order among them: on each QP that a send uses, `writing` goes first and a flag
// goes last.
#pragma once
#include "cpu/team/control.h"

namespace dk {

constexpr int kRemoteQps = 128;  // of those toward a peer; a bit each in SendMessage::qps

// Of one slot of a remote peer: written by its NIC into my block.
struct RemoteArrival {
  alignas(kLine) std::atomic<uint64_t> writing;            // epoch whose rows may be arriving
  alignas(kLine) std::atomic<uint64_t> ended[kRemoteQps];  // epoch whose rows have all come on that QP
};

// Of one slot of mine toward a remote peer, for my own use.
struct RemoteSent {
  SendMessage message;          // source of the put; its `qps` are those that the send uses
  uint64_t posted[kRemoteQps];  // Nic::posted() after the send's last operation there
};

struct RemotePeer {
  alignas(kLine) std::atomic<uint64_t> cleans;  // the peer's RankState::cleans, put by it
  RemoteArrival arrival[2][2];                  // [kind][slot]
  RemoteSent sent[2][2];
};

}  // namespace dk
