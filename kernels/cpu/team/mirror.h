// Low-latency state for remote ranks: ranks that loads and stores do not reach, or that are to be reached by the
// transport only (DK_TEAM_LL_TRANSPORT). It lies in the wire region, at the same offset on all ranks.
//
// A remote rank cannot read this rank's slots, so the sender puts the rows and indices that it needs into a mirror of
// the slot there. Rows travel on several QPs, which have no order among them: on each QP of a send, the sender posts
// `writing` first and a flag last.
#pragma once
#include "cpu/team/control.h"

namespace dk {

constexpr int kRemoteQps = 128;  // QPs to a peer; a bit each in SendMessage::qps

// One slot of a remote peer; its NIC writes this into my block.
struct RemoteArrival {
  alignas(kLine) std::atomic<uint64_t> writing;            // epoch whose rows may be arriving
  alignas(kLine) std::atomic<uint64_t> ended[kRemoteQps];  // epoch whose rows have all arrived on that QP
};

// One slot of mine toward a remote peer; only this rank uses it.
struct RemoteSent {
  SendMessage message;          // source of the put; its `qps` are the QPs of the send
  uint64_t posted[kRemoteQps];  // Nic::posted() after the send's last operation there
};

struct RemotePeer {
  alignas(kLine) std::atomic<uint64_t> cleans;  // the peer's RankState::cleans; the peer puts it
  RemoteArrival arrival[2][2];                  // [kind][slot]
  RemoteSent sent[2][2];
};

}  // namespace dk
