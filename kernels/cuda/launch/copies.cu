// copies.cu - rows of low-latency send halves cross by copy engines: streams of the team fork from the caller's behind
// the kernel that packs, one for each peer, and join it behind the receive half. Where a combine has to wait for
// weights another stream forks first, for its sums, and joins in front of the receive half; the copies follow there.
// See impl/low_latency/copies.cuh and combine_outbox.cuh.
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

// The words after the rows: see await_left_rows.
cudaError_t copy_rows(const Team *team, const Shipment &s, int rank, cudaStream_t stream) {
  const uint64_t before = rank * s.tokens;
  uint8_t *slot = team->copies->blocks[rank] + s.slot;
  const uint8_t *rows = s.outbox.rows + before * s.outbox.row_bytes;
  cudaError_t error = s.width == s.row_bytes
                          ? cudaMemcpyAsync(slot + s.first_row * s.row_bytes, rows, s.tokens * s.width,
                                            cudaMemcpyDeviceToDevice, stream)
                          : cudaMemcpy2DAsync(slot + s.first_row * s.row_bytes, s.row_bytes, rows, s.outbox.row_bytes,
                                              s.width, s.tokens, cudaMemcpyDeviceToDevice, stream);
  if (error == cudaSuccess && s.words_bytes != 0)
    error = cudaMemcpyAsync(slot + s.words_at + s.first_row * s.words_bytes,
                            reinterpret_cast<const uint8_t *>(s.outbox.words) + before * s.words_bytes,
                            s.tokens * s.words_bytes, cudaMemcpyDeviceToDevice, stream);
  return error;
}

template <class P>
Shipment shipment(const Team *team, const P &p, uint64_t tokens, uint32_t width, bool words) {
  return {p.outbox,
          tokens,
          p.places.slot[p.second_slot],
          static_cast<uint64_t>(team->view.rank) * p.by_local.by * p.num_max_tokens,
          width,
          p.at.row_bytes,
          p.at.words_at,
          words ? p.at.words_bytes : 0,
          static_cast<int>(p.second_slot)};
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

template <class P>
cudaError_t open(Team *team, P *p, uint32_t row_bytes) {
  Copies *copies = team->copies;
  const uint64_t rows = static_cast<uint64_t>(team->view.num_ranks) * p->num_max_tokens;
  const cudaError_t error = grow(team, align_up<size_t>(rows * (p->at.row_bytes + p->at.words_bytes), 128));
  if (error != cudaSuccess) return error;
  uint8_t *outbox = copies->outboxes + p->second_slot * copies->outbox_bytes;
  p->outbox = {outbox, reinterpret_cast<uint32_t *>(outbox + rows * p->at.row_bytes), row_bytes};
  return cudaSuccess;
}

// Its blocks go before those of other kernels that wait for an SM: peers wait for these sums.
cudaError_t create_sums(Copies *copies) {
  int least = 0, greatest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&copies->sums, cudaStreamNonBlocking, greatest);
  for (cudaEvent_t &summed : copies->summed)
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&summed, cudaEventDisableTiming);
  return error;
}

}  // namespace

cudaError_t create_copies(Team *team, const uint64_t *blocks) {
  Copies *copies = team->copies = new Copies;
  const int num_ranks = team->view.num_ranks;
  copies->sides.resize(num_ranks);
  cudaError_t error = cudaEventCreateWithFlags(&copies->packed, cudaEventDisableTiming);
  if (error == cudaSuccess) error = create_sums(copies);
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

void end_sums(Team *team) {
  if (team->copies == nullptr) return;
  bool summing = false;
  for (const Copies::Flight &flight : team->copies->flights) summing |= flight.summing;
  if (!summing) return;
  uint32_t running = 0;
  (void)__atomic_compare_exchange_n(&team->view.status->abort_word, &running, static_cast<uint32_t>(DK_EABORTED), false,
                                    __ATOMIC_RELEASE, __ATOMIC_RELAXED);
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
  for (cudaEvent_t summed : copies->summed)
    if (summed != nullptr) (void)cudaEventDestroy(summed);
  if (copies->packed != nullptr) (void)cudaEventDestroy(copies->packed);
  if (copies->sums != nullptr) (void)cudaStreamDestroy(copies->sums);
  (void)cudaFree(copies->outboxes);
  for (uint8_t *outgrown : copies->outgrown) (void)cudaFree(outgrown);
  delete copies;
  team->copies = nullptr;
}

cudaError_t finish_copies(Team *team) {
  Copies *copies = team->copies;
  cudaError_t error = copies->sums != nullptr ? cudaStreamSynchronize(copies->sums) : cudaSuccess;
  for (const Copies::Side &side : copies->sides)
    if (side.stream != nullptr && error == cudaSuccess) error = cudaStreamSynchronize(side.stream);
  if (error == cudaSuccess)
    for (Copies::Flight &flight : copies->flights) flight.open = flight.summing = false;
  return error;
}

cudaError_t join_sums(Team *team, int slot, cudaStream_t stream) {
  Copies *copies = team->copies;
  Copies::Flight &flight = copies->flights[slot];
  if (!flight.summing) return cudaSuccess;
  bool capturing = false;
  cudaError_t error = is_capturing(stream, &capturing);
  if (error != cudaSuccess) return error;
  if (capturing && !flight.captured)  // issued before the capture
    error = wait_for_event(copies->summed[slot]);
  else if (capturing || !flight.captured)
    error = cudaStreamWaitEvent(stream, copies->summed[slot], 0);
  if (error == cudaSuccess) flight.summing = false;
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
  if (error == cudaSuccess) flight.open = flight.summing = false;  // copies follow the sums
  return error;
}

cudaError_t open_outbox(Team *team, LowLatencyDispatchParams *p) { return open(team, p, align_up(width_of(*p), 16u)); }
cudaError_t open_outbox(Team *team, CopiedCombineParams *p) {
  return open(team, p, static_cast<uint32_t>(p->at.row_bytes));
}
Shipment shipment_of(const Team *team, const LowLatencyDispatchParams &p) {
  return shipment(team, p, p.num_tokens, width_of(p), p.format == DK_FORMAT_FP8);
}
Shipment shipment_of(const Team *team, const CopiedCombineParams &p) {
  return shipment(team, p, p.num_max_tokens, static_cast<uint32_t>(p.at.row_bytes), (p.flags & DK_LL_LOGFMT) != 0);
}

cudaError_t send_outbox(Team *team, const Shipment &shipment, cudaStream_t stream,
                        const std::function<cudaError_t(cudaStream_t)> &sum) {
  Copies *copies = team->copies;
  const int slot = shipment.second_slot;
  Copies::Flight &flight = copies->flights[slot];
  cudaEvent_t full = copies->packed;
  cudaError_t error = is_capturing(stream, &flight.captured);
  if (error == cudaSuccess) error = cudaEventRecord(copies->packed, stream);
  if (sum && error == cudaSuccess) {
    full = copies->summed[slot];
    error = cudaStreamWaitEvent(copies->sums, copies->packed, 0);
    if (error == cudaSuccess) error = sum(copies->sums);
    if (error == cudaSuccess) error = cudaEventRecord(full, copies->sums);
    flight.summing = true;
  }
  for (int step = 1; step < team->view.num_ranks && error == cudaSuccess; ++step) {
    const int rank = (team->view.rank + step) % team->view.num_ranks;
    const Copies::Side &side = copies->sides[rank];
    error = cudaStreamWaitEvent(side.stream, full, 0);
    if (error == cudaSuccess) error = copy_rows(team, shipment, rank, side.stream);
    if (error == cudaSuccess) error = cudaEventRecord(side.done[slot], side.stream);
  }
  flight.open = true;
  copies->captured |= flight.captured;
  return error;
}

void note_dispatch(Copies *copies, const dk_ll_dispatch_params *p) {
  if ((p->phases & DK_PHASE_SEND) != 0) copies->dispatch_of_ticket[p->ticket] = ++copies->dispatches;
  const uint64_t number = copies->dispatch_of_ticket[p->ticket];
  if ((p->phases & DK_PHASE_RECV) != 0)
    copies->routed[number % kRoutingCopies] = {p->src_info, number, p->num_topk, p->topk_weights != 0};
}

Weights find_weights(const Copies *copies, const dk_ll_combine_params *p) {
  const Copies::Routed *newest = nullptr;
  for (const Copies::Routed &routed : copies->routed)
    if (routed.number != 0 && routed.src_info == p->src_info && (newest == nullptr || routed.number > newest->number))
      newest = &routed;
  if (newest == nullptr || newest->num_topk != p->num_topk || newest->number + 1 < copies->dispatches)
    return Weights::kNoDispatch;
  return newest->weights ? Weights::kOfDispatch : Weights::kOfCombine;
}

}  // namespace deepep
