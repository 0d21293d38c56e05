// pulls.cu - dispatch's rows by copy engines: see pulls.h.
#include "cuda/launch/pulls.h"

#include <stdlib.h>

#include <cstring>

#include "cuda/impl/normal/matrix.cuh"

namespace deepep {
namespace {

constexpr size_t kNotesBytes = 16 << 20, kMostNotes = 256, kPage = 4096;

MatrixNote *note_of(const Pulls &pulls, uint64_t call, uint8_t *notes) {
  return reinterpret_cast<MatrixNote *>(notes + call % pulls.num_notes * pulls.note_bytes);
}

// The matrix of an exchange of counts, unless its note is gone, not written yet or being written.
bool read_matrix(Pulls *pulls, uint64_t exchange, size_t entries) {
  const auto number = static_cast<uint32_t>(exchange);
  const MatrixNote *note = note_of(*pulls, number, pulls->notes);
  const uint64_t before = __atomic_load_n(&note->call, __ATOMIC_ACQUIRE);
  if (before == 0 || static_cast<uint32_t>(before) != number) return false;
  pulls->matrix.resize(entries);
  memcpy(pulls->matrix.data(), note->matrix, 4 * entries);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&note->call, __ATOMIC_RELAXED) == before;
}

int rows_of(const std::vector<int32_t> &matrix, int num_ranks, int source, int owner) {
  return matrix[source * num_ranks + owner] - rows_before(matrix.data(), num_ranks, source, owner);
}

}  // namespace

cudaError_t create_pulls(Team *team, const uint64_t *blocks) {
  Pulls *pulls = team->pulls = new Pulls;
  const size_t num_ranks = team->view.num_ranks;
  pulls->note_bytes = align_up<size_t>(sizeof(MatrixNote) + 4 * num_ranks * num_ranks, 64);
  pulls->num_notes = static_cast<uint32_t>(max<size_t>(4, min(kMostNotes, kNotesBytes / pulls->note_bytes)));
  const size_t bytes = align_up<size_t>(pulls->num_notes * pulls->note_bytes, kPage);
  pulls->notes = static_cast<uint8_t *>(aligned_alloc(kPage, bytes));
  if (pulls->notes == nullptr) return cudaErrorMemoryAllocation;
  memset(pulls->notes, 0, bytes);
  cudaError_t error = cudaHostRegister(pulls->notes, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  pulls->registered = error == cudaSuccess;
  void *address = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&address, pulls->notes, 0);
  pulls->notes_at = reinterpret_cast<uint64_t>(address);
  for (size_t r = 0; r < num_ranks; ++r) pulls->blocks.push_back(pointer<uint8_t>(blocks[r]));
  return error;
}

void destroy_pulls(Team *team) {
  Pulls *pulls = team->pulls;
  if (pulls == nullptr) return;
  if (pulls->registered) (void)cudaHostUnregister(pulls->notes);
  free(pulls->notes);
  delete pulls;
  team->pulls = nullptr;
}

cudaError_t choose_note(const Team *team, const dk_notify_params *p, MatrixNote **note) {
  *note = nullptr;
  const Pulls *pulls = team->pulls;
  if (pulls == nullptr) return cudaSuccess;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream_of(p->stream), &status);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone)
    *note = note_of(*pulls, static_cast<uint32_t>(p->call), pointer<uint8_t>(pulls->notes_at));
  return error;
}

void choose_pulls(const Team *team, DispatchParams *p) {
  Pulls *pulls = team->pulls;
  const int num_ranks = team->view.num_ranks, me = team->view.rank;
  if (pulls == nullptr || (p->flags & DK_DISPATCH_COPIES) == 0 || (p->flags & DK_DISPATCH_CANCELLED) != 0) return;
  const bool counted = p->cached() || p->num_worst_tokens == 0;  // else whether the notify has ended is chance
  if (p->routing == DK_ROUTING_EXPANDED || p->exchange == 0 || num_ranks == 1 || !counted ||
      (team->view.flags & DK_TEAM_SHRINK) != 0)
    return;
  if (!read_matrix(pulls, p->exchange, static_cast<size_t>(num_ranks) * num_ranks)) return;
  const std::vector<int32_t> &matrix = pulls->matrix;
  uint32_t hash = 0;
  for (int i = 0; i < num_ranks * num_ranks; ++i) {
    const int source = i / num_ranks, owner = i % num_ranks, rows = rows_of(matrix, num_ranks, source, owner);
    hash += matrix_hash(matrix[i], i);
    if (rows < 0 || (source != owner && static_cast<uint64_t>(rows) * p->row_bytes > team->view.outbox_bytes())) return;
  }
  const int arriving = matrix[(num_ranks - 1) * num_ranks + me];
  if (p->num_recv_tokens >= 0 && arriving > p->num_recv_tokens) return;  // the kernel refuses that
  p->recv_segment = kPulled;
  p->recv_segment_offset = 0;
  p->pulled_hash = hash;
  p->pulled_rows = arriving;
}

cudaError_t pull_rows(const Team *team, const DispatchParams &p) {
  Pulls *pulls = team->pulls;
  const cudaStream_t stream = stream_of(p.stream);
  const int num_ranks = team->view.num_ranks, me = team->view.rank;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  pulls->captured |= status != cudaStreamCaptureStatusNone;
  for (int step = 1; step < num_ranks && error == cudaSuccess; ++step) {  // ranks do not all begin with the same one
    const int from = (me + step) % num_ranks, rows = rows_of(pulls->matrix, num_ranks, from, me);
    if (rows == 0) continue;
    auto *to = pointer<uint8_t>(static_cast<const dk_dispatch_params &>(p).recv_x) +
               static_cast<uint64_t>(rows_before(pulls->matrix.data(), num_ranks, from, me)) * p.row_bytes;
    error = cudaMemcpyAsync(to, pulls->blocks[from] + team->view.outbox(me), static_cast<uint64_t>(rows) * p.row_bytes,
                            cudaMemcpyDeviceToDevice, stream);
  }
  return error;
}

}  // namespace deepep
