// normal_copies.cu - rows of normal mode by copy engines: see normal_copies.h.
#include "cuda/launch/normal_copies.h"

#include <stdlib.h>

#include <cstring>

#include "cuda/impl/normal/matrix.cuh"

namespace deepep {
namespace {

constexpr size_t kNotesBytes = 16 << 20, kMostNotes = 256, kPage = 4096;

MatrixNote *note_of(const NormalCopies &copies, uint64_t call, uint8_t *notes) {
  return reinterpret_cast<MatrixNote *>(notes + call % copies.num_notes * copies.note_bytes);
}

// The matrix of an exchange of counts, unless its note is gone, not written yet or being written.
bool read_matrix(NormalCopies *copies, uint64_t exchange, size_t entries) {
  const auto number = static_cast<uint32_t>(exchange);
  const MatrixNote *note = note_of(*copies, number, copies->notes);
  const uint64_t before = __atomic_load_n(&note->call, __ATOMIC_ACQUIRE);
  if (before == 0 || static_cast<uint32_t>(before) != number) return false;
  copies->matrix.resize(entries);
  memcpy(copies->matrix.data(), note->matrix, 4 * entries);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&note->call, __ATOMIC_RELAXED) == before;
}

int rows_of(const std::vector<int32_t> &matrix, int num_ranks, int source, int owner) {
  return matrix[source * num_ranks + owner] - rows_before(matrix.data(), num_ranks, source, owner);
}

// The hash of a matrix, as kernels form it; false: it is none.
bool hash_matrix(const std::vector<int32_t> &matrix, int num_ranks, uint32_t *hash) {
  *hash = 0;
  for (int i = 0; i < num_ranks * num_ranks; ++i) {
    if (rows_of(matrix, num_ranks, i / num_ranks, i % num_ranks) < 0) return false;
    *hash += matrix_hash(matrix[i], i);
  }
  return true;
}

}  // namespace

cudaError_t create_normal_copies(Team *team, const uint64_t *blocks) {
  NormalCopies *copies = team->normal_copies = new NormalCopies;
  const size_t num_ranks = team->view.num_ranks;
  copies->note_bytes = align_up<size_t>(sizeof(MatrixNote) + 4 * num_ranks * num_ranks, 64);
  copies->num_notes = static_cast<uint32_t>(max<size_t>(4, min(kMostNotes, kNotesBytes / copies->note_bytes)));
  const size_t bytes = align_up<size_t>(copies->num_notes * copies->note_bytes, kPage);
  copies->notes = static_cast<uint8_t *>(aligned_alloc(kPage, bytes));
  if (copies->notes == nullptr) return cudaErrorMemoryAllocation;
  memset(copies->notes, 0, bytes);
  cudaError_t error = cudaHostRegister(copies->notes, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  copies->registered = error == cudaSuccess;
  void *address = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&address, copies->notes, 0);
  copies->notes_at = reinterpret_cast<uint64_t>(address);
  for (size_t r = 0; r < num_ranks; ++r) copies->blocks.push_back(pointer<uint8_t>(blocks[r]));
  return error;
}

void destroy_normal_copies(Team *team) {
  NormalCopies *copies = team->normal_copies;
  if (copies == nullptr) return;
  if (copies->registered) (void)cudaHostUnregister(copies->notes);
  free(copies->notes);
  delete copies;
  team->normal_copies = nullptr;
}

cudaError_t choose_note(const Team *team, const dk_notify_params *p, MatrixNote **note) {
  *note = nullptr;
  const NormalCopies *copies = team->normal_copies;
  if (copies == nullptr) return cudaSuccess;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream_of(p->stream), &status);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone)
    *note = note_of(*copies, static_cast<uint32_t>(p->call), pointer<uint8_t>(copies->notes_at));
  return error;
}

void choose_pulls(const Team *team, DispatchParams *p) {
  NormalCopies *copies = team->normal_copies;
  const int num_ranks = team->view.num_ranks, me = team->view.rank;
  if (copies == nullptr || (p->flags & DK_DISPATCH_COPIES) == 0 || (p->flags & DK_DISPATCH_CANCELLED) != 0) return;
  const bool counted = p->cached() || p->num_worst_tokens == 0;  // else whether the notify has ended is chance
  if (p->routing == DK_ROUTING_EXPANDED || p->exchange == 0 || num_ranks == 1 || !counted ||
      (team->view.flags & DK_TEAM_SHRINK) != 0)
    return;
  if (!read_matrix(copies, p->exchange, static_cast<size_t>(num_ranks) * num_ranks)) return;
  const std::vector<int32_t> &matrix = copies->matrix;
  uint32_t hash;
  if (!hash_matrix(matrix, num_ranks, &hash)) return;
  for (int i = 0; i < num_ranks * num_ranks; ++i) {
    const int source = i / num_ranks, owner = i % num_ranks, rows = rows_of(matrix, num_ranks, source, owner);
    if (source != owner && static_cast<uint64_t>(rows) * p->row_bytes > team->view.outbox_bytes()) return;
  }
  const int arriving = matrix[(num_ranks - 1) * num_ranks + me];
  if (p->num_recv_tokens >= 0 && arriving > p->num_recv_tokens) return;  // the kernel refuses that
  p->recv_segment = kPulled;
  p->recv_segment_offset = 0;
  p->pulled_hash = hash;
  p->pulled_rows = arriving;
}

cudaError_t pull_rows(const Team *team, const DispatchParams &p) {
  NormalCopies *copies = team->normal_copies;
  const cudaStream_t stream = stream_of(p.stream);
  const int num_ranks = team->view.num_ranks, me = team->view.rank;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  copies->captured |= status != cudaStreamCaptureStatusNone;
  for (int step = 1; step < num_ranks && error == cudaSuccess; ++step) {  // ranks do not all begin with the same one
    const int from = (me + step) % num_ranks, rows = rows_of(copies->matrix, num_ranks, from, me);
    if (rows == 0) continue;
    auto *to = pointer<uint8_t>(static_cast<const dk_dispatch_params &>(p).recv_x) +
               static_cast<uint64_t>(rows_before(copies->matrix.data(), num_ranks, from, me)) * p.row_bytes;
    error = cudaMemcpyAsync(to, copies->blocks[from] + team->view.outbox(me), static_cast<uint64_t>(rows) * p.row_bytes,
                            cudaMemcpyDeviceToDevice, stream);
  }
  return error;
}

cudaError_t push_rows(const Team *team, CombineParams *p) {
  NormalCopies *copies = team->normal_copies;
  const int num_ranks = team->view.num_ranks, me = team->view.rank;
  const cudaStream_t stream = stream_of(p->stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  p->captured = status != cudaStreamCaptureStatusNone;
  if (error != cudaSuccess || p->captured != 0 || (p->flags & DK_COMBINE_COPIES) == 0 || p->exchange == 0 ||
      num_ranks == 1)
    return error;
  if (!read_matrix(copies, p->exchange, static_cast<size_t>(num_ranks) * num_ranks)) return cudaSuccess;
  const std::vector<int32_t> &matrix = copies->matrix;
  uint32_t hash;
  if (!hash_matrix(matrix, num_ranks, &hash)) return cudaSuccess;
  const auto *x = pointer<const uint8_t>(static_cast<const dk_combine_params &>(*p).x);
  const auto *weights = pointer<const uint8_t>(static_cast<const dk_combine_params &>(*p).topk_weights);
  const uint64_t weights_bytes = static_cast<uint64_t>(p->num_topk) * 4;
  const int arrived = matrix[(num_ranks - 1) * num_ranks + me];
  // The kernel says what is wrong with such a call.
  if (arrived > p->num_recv_tokens || (arrived > 0 && (x == nullptr || (weights_bytes > 0 && weights == nullptr))))
    return cudaSuccess;
  for (int r = 0; r < num_ranks; ++r)
    if (r != me && rows_of(matrix, num_ranks, r, me) * (p->row_bytes + weights_bytes) > team->view.inbox_bytes())
      return cudaSuccess;
  p->inbox = static_cast<int32_t>(copies->num_pushes++ % 2);
  p->pushed_hash = hash;
  p->pushed_rows = arrived;
  for (int step = 1; step < num_ranks && error == cudaSuccess; ++step) {  // ranks do not all begin with the same one
    const int to = (me + step) % num_ranks;
    const uint64_t first = rows_before(matrix.data(), num_ranks, to, me), rows = rows_of(matrix, num_ranks, to, me);
    uint8_t *inbox = copies->blocks[to] + team->view.inbox(me, p->inbox);
    if (rows > 0)
      error = cudaMemcpyAsync(inbox, x + first * p->row_bytes, rows * p->row_bytes, cudaMemcpyDeviceToDevice, stream);
    if (rows > 0 && weights_bytes > 0 && error == cudaSuccess)
      error = cudaMemcpyAsync(inbox + rows * p->row_bytes, weights + first * weights_bytes, rows * weights_bytes,
                              cudaMemcpyDeviceToDevice, stream);
  }
  return error;
}

}  // namespace deepep
