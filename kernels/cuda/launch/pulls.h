// pulls.h - dispatch's rows by copy engines (DK_TEAM_NORMAL_COPY): a sender's kernel packs rows for each rank in its
// own nvl region and ends once all ranks have packed; then each rank's copies bring its rows to their places. Host.
//
// The host has to know how many rows come from each rank: notify leaves each matrix in host memory, where a dispatch
// finds it by the number of the exchange. Without it, or without room, the rows come by SMs. Each receiver decides for
// itself and says so in its message. An outbox is filled again only once all ranks have entered the next dispatch,
// which in their streams comes behind their copies. The copies follow the kernel in the call's own stream: streams of
// their own, which would wait for it, share hardware queues with others, and one of these could hold a kernel that the
// kernel waits for.
#pragma once
#include <vector>

#include "cuda/impl/normal/dispatch_params.cuh"
#include "cuda/impl/normal/notify_params.cuh"
#include "cuda/launch/host.h"

namespace deepep {

struct Pulls {
  std::vector<uint8_t *> blocks;  // of all ranks
  uint8_t *notes = nullptr;       // MatrixNotes, by the number of the notify
  uint64_t notes_at = 0;          // as kernels see them
  size_t note_bytes = 0;
  uint32_t num_notes = 0;
  bool registered = false, captured = false;  // captured: graphs hold copies
  std::vector<int32_t> matrix;                // of the dispatch that is being issued
};

cudaError_t create_pulls(Team *team, const uint64_t *blocks);
void destroy_pulls(Team *team);

// Where a notify leaves its matrix; null: nowhere, since a graph captures it or the team has no pulls.
cudaError_t choose_note(const Team *team, const dk_notify_params *p, MatrixNote **note);
// Before the kernel of a dispatch: whether rows come by copies. Then, once it is launched, the copies.
void choose_pulls(const Team *team, DispatchParams *params);
cudaError_t pull_rows(const Team *team, const DispatchParams &params);

}  // namespace deepep
