// copies.h - the streams on which rows of dispatch's send halves cross by copy engines (DK_TEAM_LL_COPY). Host.
#pragma once
#include <vector>

#include "cuda/impl/low_latency/params.cuh"
#include "cuda/launch/host.h"

namespace deepep {

struct Copies {
  struct Side {  // of a peer
    cudaStream_t stream = nullptr;
    cudaEvent_t done[kLowLatencySlots]{};  // the newest copies out of each outbox
  };
  struct Flight {                         // the newest copies out of an outbox
    bool open = false, captured = false;  // no stream of a caller waits for them yet; issued in a capture
  };
  std::vector<Side> sides;        // by rank; this rank's is empty
  std::vector<uint8_t *> blocks;  // of all ranks
  cudaEvent_t packed = nullptr;   // the caller's stream has filled an outbox
  Flight flights[kLowLatencySlots];
  uint8_t *outboxes = nullptr;  // one for each slot, of outbox_bytes
  size_t outbox_bytes = 0;
  std::vector<uint8_t *> outgrown;  // outboxes that captured graphs may use
  int slot_of_ticket[DK_NUM_TICKETS]{};
  int slot = 0;           // of the next call that sends
  bool captured = false;  // graphs hold copies
};

// Of a team with DK_TEAM_LL_COPY; `blocks`: as host_peer_blocks of dk_team_create.
cudaError_t create_copies(Team *team, const uint64_t *blocks);
void destroy_copies(Team *team);
// Waits on the host until no copy is in flight.
cudaError_t finish_copies(Team *team);

// Makes `stream` wait for the copies out of a slot's outbox, unless a stream of a caller does already. `must`: also
// where they were issued outside of the capture that `stream` is in now; then by waiting on the host.
cudaError_t join_copies(Team *team, int slot, cudaStream_t stream, bool must);

// A send half: memory to pack rows into. Then, once its kernel is launched, the copies.
cudaError_t open_outbox(Team *team, LowLatencyDispatchParams *params);
cudaError_t send_outbox(Team *team, const LowLatencyDispatchParams &params);

}  // namespace deepep
