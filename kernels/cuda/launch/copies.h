// copies.h - the streams on which rows of low-latency send halves cross by copy engines (DK_TEAM_LL_COPY), and the one
// on which sums of combine are made before that. Host.
#pragma once
#include <functional>
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
    bool summing = false;                 // a kernel on `sums` fills the outbox, for which no such stream waits yet
  };
  struct Routed {  // a dispatch that was received here, as the host has issued it
    uint64_t src_info = 0, number = 0;
    int32_t num_topk = 0;
    bool weights = false;
  };
  std::vector<Side> sides;                 // by rank; this rank's is empty
  std::vector<uint8_t *> blocks;           // of all ranks
  cudaEvent_t packed = nullptr;            // the caller's stream has filled an outbox, or begun a call
  cudaStream_t sums = nullptr;             // the sums of one call after those of another
  cudaEvent_t summed[kLowLatencySlots]{};  // that stream has filled an outbox
  Flight flights[kLowLatencySlots];
  uint8_t *outboxes = nullptr;  // one for each slot, of outbox_bytes
  size_t outbox_bytes = 0;
  std::vector<uint8_t *> outgrown;  // outboxes that captured graphs may use
  int slot_of_ticket[DK_NUM_TICKETS]{};
  int slot = 0;                                                   // of the next call that sends
  uint64_t dispatches = 0, dispatch_of_ticket[DK_NUM_TICKETS]{};  // dispatches so far that send
  Routed routed[kRoutingCopies];                                  // by the dispatch's number
  bool captured = false;                                          // graphs hold copies
};

// Of a team with DK_TEAM_LL_COPY; `blocks`: as host_peer_blocks of dk_team_create.
cudaError_t create_copies(Team *team, const uint64_t *blocks);
// Before a team is destroyed: ends the waits of sums whose receive half was never called, which may be for a rank that
// never calls. By a store of the host, no call of CUDA: that would wait for another thread of the process which frees
// memory of this device, and so for these sums.
void end_sums(Team *team);
void destroy_copies(Team *team);
// Waits on the host until no copy is in flight.
cudaError_t finish_copies(Team *team);

// Makes `stream` wait for the copies out of a slot's outbox, unless a stream of a caller does already. `must`: also
// where they were issued outside of the capture that `stream` is in now; then by waiting on the host.
cudaError_t join_copies(Team *team, int slot, cudaStream_t stream, bool must);

// Makes `stream`, that of a receive half, wait for a kernel that still fills the outbox of a slot. Before the receive
// half's own kernel, which could keep that one from its SMs.
cudaError_t join_sums(Team *team, int slot, cudaStream_t stream);

// A send half: memory to pack rows into.
cudaError_t open_outbox(Team *team, LowLatencyDispatchParams *params);
cudaError_t open_outbox(Team *team, CopiedCombineParams *params);
// The rows of a send half: `tokens` for each peer, from their outbox to consecutive places in the slot there.
struct Shipment {
  Outbox outbox;
  uint64_t tokens, slot, first_row;           // the slot's offset in a block, the number of the first place
  uint32_t width;                             // bytes of a row that are copied
  uint64_t row_bytes, words_at, words_bytes;  // of the slot; words_bytes 0: there are none to copy
  int second_slot;
};
Shipment shipment_of(const Team *team, const LowLatencyDispatchParams &params);
Shipment shipment_of(const Team *team, const CopiedCombineParams &params);
// The copies, once the kernel is launched on `stream`. sum(stream of the team): launches a kernel before them that
// fills the outbox beside that stream; empty: the kernel on `stream` has done so.
cudaError_t send_outbox(Team *team, const Shipment &shipment, cudaStream_t stream,
                        const std::function<cudaError_t(cudaStream_t)> &sum);

// What the host knows of the dispatch whose rows a combine returns. A graph's replays may find another one: kernels
// decide by what they find, this alone says who sums.
enum class Weights { kNoDispatch, kOfDispatch, kOfCombine };
void note_dispatch(Copies *copies, const dk_ll_dispatch_params *p);  // issued
Weights find_weights(const Copies *copies, const dk_ll_combine_params *p);

}  // namespace deepep
