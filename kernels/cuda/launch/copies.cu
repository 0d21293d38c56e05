// copies.cu - rows of dispatch's send halves cross by copy engines: streams of the team fork from the caller's behind
// the kernel that packs, one for each peer, and join it behind the receive half. See impl/low_latency/copies.cuh.
#include "cuda/launch/copies.h"

#include "cuda/impl/low_latency/shared.cuh"

namespace deepep {
namespace {

cudaError_t is_capturing(cudaStream_t stream, bool *capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  *capturing = status != cudaStreamCaptureStatusNone;
  return error;
}

cudaError_t wait_for_event(cudaEvent_t event) {
  cudaError_t error;
  while ((error = cudaEventQuery(event)) == cudaErrorNotReady) (void)cudaGetLastError();
  return error;
}

// Bytes of a row as it travels, with FP4's scales.
uint32_t width_of(const LowLatencyDispatchParams &p) { return value_bytes(p) + (is_fp4(p) ? p.hidden / 16 : 0); }

cudaError_t copy_rows(const Team *team, const LowLatencyDispatchParams &p, int rank, cudaStream_t stream) {
  const Copies &copies = *team->copies;
  const uint64_t tokens = p.num_tokens, before = rank * tokens,
                 number = static_cast<uint64_t>(team->view.rank) * p.by_local.by * p.num_max_tokens;
  uint8_t *slot = copies.blocks[rank] + p.places.slot[p.second_slot];
  const uint8_t *rows = p.outbox.rows + before * p.outbox.row_bytes;
  const uint32_t width = width_of(p);
  cudaError_t error =
      width == p.at.row_bytes
          ? cudaMemcpyAsync(slot + number * p.at.row_bytes, rows, tokens * width, cudaMemcpyDeviceToDevice, stream)
          : cudaMemcpy2DAsync(slot + number * p.at.row_bytes, p.at.row_bytes, rows, p.outbox.row_bytes, width, tokens,
                              cudaMemcpyDeviceToDevice, stream);
  if (error == cudaSuccess && p.format == DK_FORMAT_FP8)
    error = cudaMemcpyAsync(slot + p.at.words_at + number * p.at.words_bytes,
                            reinterpret_cast<const uint8_t *>(p.outbox.words) + before * p.at.words_bytes,
                            tokens * p.at.words_bytes, cudaMemcpyDeviceToDevice, stream);
  return error;
}

// Graphs that were captured before may use the old outboxes.
cudaError_t grow(Team *team, size_t bytes) {
  Copies *copies = team->copies;
  if (bytes <= copies->outbox_bytes) return cudaSuccess;
  void *memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, kLowLatencySlots * bytes);
  if (error != cudaSuccess) return error;
  if (copies->outboxes != nullptr) copies->outgrown.push_back(copies->outboxes);
  copies->outboxes = static_cast<uint8_t *>(memory);
  copies->outbox_bytes = bytes;
  // A kernel that leaves at once, since the team has failed, packs nothing.
  error = cudaMemsetAsync(memory, 0, kLowLatencySlots * bytes, team->device->service);
  return error == cudaSuccess ? cudaStreamSynchronize(team->device->service) : error;
}

}  // namespace

cudaError_t create_copies(Team *team, const uint64_t *blocks) {
  Copies *copies = team->copies = new Copies;
  const int num_ranks = team->view.num_ranks;
  copies->sides.resize(num_ranks);
  cudaError_t error = cudaEventCreateWithFlags(&copies->packed, cudaEventDisableTiming);
  for (int r = 0; r < num_ranks && error == cudaSuccess; ++r) {
    copies->blocks.push_back(pointer<uint8_t>(blocks[r]));
    if (r == team->view.rank) continue;
    Copies::Side &side = copies->sides[r];
    error = cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking);
    for (cudaEvent_t &done : side.done)
      if (error == cudaSuccess) error = cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
  }
  return error;
}

void destroy_copies(Team *team) {
  Copies *copies = team->copies;
  if (copies == nullptr) return;
  (void)finish_copies(team);
  for (const Copies::Side &side : copies->sides) {
    for (cudaEvent_t done : side.done)
      if (done != nullptr) (void)cudaEventDestroy(done);
    if (side.stream != nullptr) (void)cudaStreamDestroy(side.stream);
  }
  if (copies->packed != nullptr) (void)cudaEventDestroy(copies->packed);
  (void)cudaFree(copies->outboxes);
  for (uint8_t *outgrown : copies->outgrown) (void)cudaFree(outgrown);
  delete copies;
  team->copies = nullptr;
}

cudaError_t finish_copies(Team *team) {
  cudaError_t error = cudaSuccess;
  for (const Copies::Side &side : team->copies->sides)
    if (side.stream != nullptr && error == cudaSuccess) error = cudaStreamSynchronize(side.stream);
  if (error == cudaSuccess)
    for (Copies::Flight &flight : team->copies->flights) flight.open = false;
  return error;
}

cudaError_t join_copies(Team *team, int slot, cudaStream_t stream, bool must) {
  Copies *copies = team->copies;
  Copies::Flight &flight = copies->flights[slot];
  if (!flight.open) return cudaSuccess;
  bool capturing = false;
  cudaError_t error = is_capturing(stream, &capturing);
  if (error != cudaSuccess || (capturing && !flight.captured && !must)) return error;
  // That capture has ended, or was given up: a replay of its graph waits for the copies in itself.
  const bool over = flight.captured && !capturing, host = capturing && !flight.captured;
  for (const Copies::Side &side : copies->sides)
    if (side.stream != nullptr && error == cudaSuccess && !over)
      error = host ? wait_for_event(side.done[slot]) : cudaStreamWaitEvent(stream, side.done[slot], 0);
  if (error == cudaSuccess) flight.open = false;
  return error;
}

cudaError_t open_outbox(Team *team, LowLatencyDispatchParams *p) {
  Copies *copies = team->copies;
  const uint64_t rows = static_cast<uint64_t>(team->view.num_ranks) * p->num_max_tokens;
  const cudaError_t error = grow(team, align_up<size_t>(rows * (p->at.row_bytes + p->at.words_bytes), 128));
  if (error != cudaSuccess) return error;
  uint8_t *outbox = copies->outboxes + p->second_slot * copies->outbox_bytes;
  p->outbox = {outbox, reinterpret_cast<uint32_t *>(outbox + rows * p->at.row_bytes), align_up(width_of(*p), 16u)};
  return cudaSuccess;
}

cudaError_t send_outbox(Team *team, const LowLatencyDispatchParams &p) {
  Copies *copies = team->copies;
  const cudaStream_t stream = stream_of(p.stream);
  const int slot = static_cast<int>(p.second_slot);
  Copies::Flight &flight = copies->flights[slot];
  cudaError_t error = is_capturing(stream, &flight.captured);
  if (error == cudaSuccess) error = cudaEventRecord(copies->packed, stream);
  for (int step = 1; step < team->view.num_ranks && error == cudaSuccess; ++step) {
    const int rank = (team->view.rank + step) % team->view.num_ranks;
    const Copies::Side &side = copies->sides[rank];
    error = cudaStreamWaitEvent(side.stream, copies->packed, 0);
    if (error == cudaSuccess) error = copy_rows(team, p, rank, side.stream);
    if (error == cudaSuccess) error = cudaEventRecord(side.done[slot], side.stream);
  }
  flight.open = true;
  copies->captured |= flight.captured;
  return error;
}

}  // namespace deepep
