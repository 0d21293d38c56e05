// normal_copies.h - rows of normal mode by copy engines (DK_TEAM_NORMAL_COPY). Host.
//
// Dispatch: a sender's kernel packs rows for each rank in its own nvl region and ends once all ranks have packed; then
// each rank's copies bring its rows to their places. An outbox is filled again only once all ranks have entered the
// next dispatch, which in their streams comes behind their copies. Combine: a sender's copies bring its rows, and then
// their weights, to its inbox at each rank; its kernel follows, and its message there says so. Of the two inboxes it
// takes the other one each time: once its kernel has ended all ranks have begun that combine, and are through with
// those before.
//
// The host has to know how many rows cross: notify leaves each matrix in host memory, where a call finds it by the
// number of the exchange. Without it, or without room, SMs move the rows. Each receiver of a dispatch and each sender
// of a combine decides for itself and says so in its message. The copies are in the call's own stream: streams of their
// own, which would wait for it, share hardware queues with others, and one of these could hold a kernel that the call's
// waits for.
#pragma once
#include <vector>

#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/dispatch_params.cuh"
#include "cuda/impl/normal/notify_params.cuh"
#include "cuda/launch/host.h"

namespace deepep {

struct NormalCopies {
  std::vector<uint8_t *> blocks;  // of all ranks
  uint8_t *notes = nullptr;       // MatrixNotes, by the number of the notify
  uint64_t notes_at = 0;          // as kernels see them
  size_t note_bytes = 0;
  uint32_t num_notes = 0;
  uint32_t num_pushes = 0;                    // combines whose rows crossed by copies
  bool registered = false, captured = false;  // captured: graphs hold copies
  std::vector<int32_t> matrix;                // of the call that is being issued
};

cudaError_t create_normal_copies(Team *team, const uint64_t *blocks);
void destroy_normal_copies(Team *team);

// Where a notify leaves its matrix; null: nowhere, since a graph captures it or the team has no such copies.
cudaError_t choose_note(const Team *team, const dk_notify_params *p, MatrixNote **note);
// Before the kernel of a dispatch: whether rows come by copies. Then, once it is launched, the copies.
void choose_pulls(const Team *team, DispatchParams *params);
cudaError_t pull_rows(const Team *team, const DispatchParams &params);
// Before the kernel of a combine: whether rows go by copies, and these. A captured combine's do not: its replays would
// fill one inbox each time.
cudaError_t push_rows(const Team *team, CombineParams *params);

}  // namespace deepep
