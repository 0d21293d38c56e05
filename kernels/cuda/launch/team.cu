// team.cu - teams: sizes of the library's own regions, scratch, segments; barrier, masks.
#include <time.h>

#include <cstring>
#include <new>

#include "cuda/impl/small_kernels.cuh"
#include "cuda/launch/copies.h"
#include "cuda/launch/internode.h"
#include "cuda/launch/normal_copies.h"
#include "cuda/layout/low_latency.cuh"

namespace deepep {
namespace {

int64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// CLOCK_MONOTONIC - %globaltimer: a kernel reads the device's clock between two reads of the host's, and of several
// rounds (the first one warms up) the one with the closest reads counts. Off by some microseconds, more only where the
// host thread is interrupted in every round.
cudaError_t measure_clock(Team *team) {
  constexpr int kRounds = 8;
  constexpr int64_t kCloseEnough = 50000;
  cudaStream_t service = team->device->service;
  uint64_t *word = &team->view.scratch->clock_ns;
  cudaError_t error = cudaSuccess;
  int64_t closest = INT64_MAX;
  for (int round = 0; round < kRounds && closest > kCloseEnough && error == cudaSuccess; ++round) {
    uint64_t device_now = 0;
    const int64_t before = monotonic_ns();
    clock_kernel<<<1, 1, 0, service>>>(word);
    error = cudaStreamSynchronize(service);
    const int64_t apart = monotonic_ns() - before;
    if (error == cudaSuccess) error = cudaMemcpyAsync(&device_now, word, 8, cudaMemcpyDeviceToHost, service);
    if (error == cudaSuccess) error = cudaStreamSynchronize(service);
    if (error != cudaSuccess || apart >= closest) continue;
    closest = apart;
    team->view.clock_offset_ns = before + apart / 2 - static_cast<int64_t>(device_now);
  }
  return error;
}

cudaError_t allocate_scratch(Team *team, const uint64_t *peer_blocks) {
  const uint64_t num_ranks = team->view.num_ranks;
  const size_t segment_bytes = num_ranks * DK_MAX_SEGMENTS * 8;
  cudaStream_t service = team->device->service;
  cudaError_t error = cudaMalloc(&team->scratch, sizeof(Scratch));
  if (error == cudaSuccess) error = cudaMalloc(&team->peers, num_ranks * 8);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&team->segments), segment_bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(team->scratch, 0, sizeof(Scratch), service);
  if (error == cudaSuccess) error = cudaMemsetAsync(team->segments, 0, segment_bytes, service);
  if (error == cudaSuccess)
    error = cudaMemcpyAsync(team->peers, peer_blocks, num_ranks * 8, cudaMemcpyHostToDevice, service);
  if (error == cudaSuccess) error = cudaStreamSynchronize(service);
  team->view.scratch = static_cast<Scratch *>(team->scratch);
  team->view.peers = static_cast<uint8_t *const *>(team->peers);
  team->view.segments = team->segments;
  return error == cudaSuccess ? measure_clock(team) : error;
}

void free_team(Team *team) {
  // After a dk_stats_flush that timed out, its kernel may still read the scratch and write the caller's page.
  (void)cudaStreamSynchronize(team->device->service);
  destroy_copies(team);
  destroy_normal_copies(team);
  internode_team_destroy(team);
  (void)cudaFree(team->scratch);
  (void)cudaFree(team->peers);
  (void)cudaFree(team->segments);
  (void)cudaGetLastError();
  delete team;
}

// The scratch as a new team has it, but for statistics, which go on. With `code` not 0 kernels leave at once.
cudaError_t reset_scratch(Team *team, uint32_t code) {
  auto *scratch = team->view.scratch;
  auto *bytes = static_cast<uint8_t *>(team->scratch);
  cudaStream_t service = team->device->service;
  const struct {
    size_t from, to;
  } parts[] = {{0, offsetof(Scratch, ops)},
               {offsetof(Scratch, half_ns), offsetof(Scratch, peer_bytes)},
               {offsetof(Scratch, histogram), sizeof(Scratch)}};
  cudaError_t error = cudaSuccess;
  for (const auto &part : parts)
    if (error == cudaSuccess) error = cudaMemsetAsync(bytes + part.from, 0, part.to - part.from, service);
  if (error == cudaSuccess) error = cudaMemcpyAsync(&scratch->sticky, &code, 4, cudaMemcpyHostToDevice, service);
  if (error == cudaSuccess) error = cudaMemcpyAsync(&scratch->failed, &code, 4, cudaMemcpyHostToDevice, service);
  return error == cudaSuccess ? cudaStreamSynchronize(service) : error;
}

bool is_sane(const dk_team_create_params *p) {
  if (p->device == 0 || p->host_peer_blocks == 0 || p->status == 0 || p->sm_share < 1) return false;
  if (p->num_ranks < 1 || p->num_ranks > DK_MAX_RANKS || p->rank < 0 || p->rank >= p->num_ranks || p->num_nvl_peers < 1)
    return false;
  return p->control_bytes >= control_layout(p->num_ranks).bytes && p->wire_bytes >= ring_flags(p->num_ranks).bytes;
}

TeamView make_view(const dk_team_create_params *p) {
  const auto *blocks = pointer<const uint64_t>(p->host_peer_blocks);
  TeamView view{};
  view.self = pointer<uint8_t>(blocks[p->rank]);
  view.status = pointer<dk_status>(p->status);
  view.stats = pointer<dk_stats_page>(p->stats);
  view.control = p->control_offset;
  view.wire = p->wire_offset;
  view.wire_bytes = p->wire_bytes;
  view.nvl = p->nvl_offset;
  view.nvl_bytes = (p->flags & DK_TEAM_NORMAL_COPY) != 0 ? p->nvl_bytes / 2 / 128 * 128 : p->nvl_bytes;
  view.rdma = p->rdma_offset;
  view.rdma_bytes = p->rdma_bytes;
  view.at = control_layout(p->num_ranks);
  view.ring = ring_flags(p->num_ranks);
  view.rank = p->rank;
  view.num_ranks = p->num_ranks;
  view.num_nvl_peers = p->num_nvl_peers;
  view.flags = p->flags;
  if (p->host_stats != 0) {
    const auto *page = pointer<const dk_stats_page>(p->host_stats);
    view.peers_offset = page->peers_offset;
    view.trace_offset = page->trace_offset;
    view.trace_len = page->trace_len;
  }
  return view;
}

}  // namespace

cudaError_t load_small_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, barrier_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, mask_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, clock_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, stats_kernel);
  return error;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_block_sizes(dk_block_sizes_params *p) {
  DK_ENTER(p);
  if (p->num_ranks < 1 || p->num_ranks > DK_MAX_RANKS) return DK_EINVAL;
  p->control_bytes = control_layout(p->num_ranks).bytes;
  p->wire_bytes = ring_flags(p->num_ranks).bytes + low_latency_wire_allowance(p->rdma_bytes);
  // Two slots for each source, with room for 64 indices and weights in a row's metadata.
  p->min_nvl_bytes = static_cast<uint64_t>(p->num_ranks) * 2 * align_up<uint64_t>(p->max_row_bytes + 1024, 128);
  if ((p->flags & DK_TEAM_NORMAL_COPY) != 0) p->min_nvl_bytes *= 2;
  p->min_rdma_bytes = 0;  // no row goes through a transport
  const bool remote =
      p->num_nvl_peers > 0 && (p->num_ranks > p->num_nvl_peers || (p->flags & DK_TEAM_LL_TRANSPORT) != 0);
  return remote ? internode_block_sizes(p) : static_cast<int32_t>(DK_OK);
}

DK_EXPORT int32_t dk_team_create(dk_team_create_params *p) {
  DK_ENTER(p);
  if (!is_sane(p)) return DK_EINVAL;
  if (p->transport == 0 && (p->flags & DK_TEAM_LL_TRANSPORT) != 0) return DK_EUNSUPPORTED;
  if (p->transport != 0 && (p->flags & (DK_TEAM_LL_COPY | DK_TEAM_NORMAL_COPY)) != 0) return DK_EUNSUPPORTED;
  const auto *blocks = pointer<const uint64_t>(p->host_peer_blocks);
  for (int r = 0; r < p->num_ranks; ++r)
    if (blocks[r] == 0 && p->transport == 0) return DK_EUNSUPPORTED;
  auto *team = new (std::nothrow) Team;
  if (team == nullptr) return DK_ENOMEM;
  team->device = handle_of<Device>(p->device);
  team->sm_share = p->sm_share;
  team->view = make_view(p);
  const OnDevice on(team->device);
  cudaError_t error = on.error() == cudaSuccess ? allocate_scratch(team, blocks) : on.error();
  if (error == cudaSuccess && (p->flags & DK_TEAM_LL_COPY) != 0) error = create_copies(team, blocks);
  if (error == cudaSuccess && (p->flags & DK_TEAM_NORMAL_COPY) != 0) error = create_normal_copies(team, blocks);
  if (error != cudaSuccess) {
    free_team(team);
    return device_failure(p, error);
  }
  const int32_t code = p->transport != 0 ? internode_team_create(p, team) : static_cast<int32_t>(DK_OK);
  if (code != DK_OK) {
    free_team(team);
    return code;
  }
  p->team = handle_to(team);
  return DK_OK;
}

DK_EXPORT int32_t dk_team_destroy(dk_team_destroy_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team == nullptr) return DK_EINVAL;
  end_sums(team);
  const OnDevice on(team->device);
  free_team(team);
  return DK_OK;
}

DK_EXPORT int32_t dk_team_release(dk_team_release_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team == nullptr) return DK_EINVAL;
  // Copies in graphs would go on, to memory that is not there.
  if (team->internode != nullptr || (team->copies != nullptr && team->copies->captured) ||
      (team->normal_copies != nullptr && team->normal_copies->captured))
    return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  cudaError_t error = on.error();
  if (error == cudaSuccess && team->copies != nullptr) error = finish_copies(team);
  if (error == cudaSuccess && p->captured != 0) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = reset_scratch(team, DK_ESTATE);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_team_restore(dk_team_restore_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team == nullptr) return DK_EINVAL;
  if (team->internode != nullptr || p->transport != 0) return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  const size_t segment_bytes = static_cast<size_t>(team->view.num_ranks) * DK_MAX_SEGMENTS * 8;
  cudaError_t error = on.error();
  if (error == cudaSuccess) error = cudaMemsetAsync(team->segments, 0, segment_bytes, team->device->service);
  if (error == cudaSuccess) error = reset_scratch(team, DK_OK);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_stats_flush(dk_stats_flush_params *p) {
  DK_ENTER(p);
  const auto *team = handle_of<Team>(p->team);
  if (team == nullptr) return DK_EINVAL;
  const OnDevice on(team->device);
  if (on.error() != cudaSuccess) return device_failure(p, on.error());
  stats_kernel<<<1, 512, 0, team->device->service>>>(team->view);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return device_failure(p, error);
  const int64_t start = monotonic_ns();
  for (;;) {
    error = cudaStreamQuery(team->device->service);
    if (error != cudaErrorNotReady) break;
    (void)cudaGetLastError();
    if (static_cast<uint64_t>(monotonic_ns() - start) >= p->timeout_ns) return DK_ETIMEOUT;
  }
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_team_segment(dk_team_segment_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (p->index < 0 || p->index >= DK_MAX_SEGMENTS || p->owner < 0 || p->owner >= team->view.num_ranks) return DK_EINVAL;
  const OnDevice on(team->device);
  uint64_t *entry = team->segments + p->owner * DK_MAX_SEGMENTS + p->index;
  cudaError_t error = cudaMemcpyAsync(entry, &p->address, 8, cudaMemcpyHostToDevice, team->device->service);
  if (error == cudaSuccess) error = cudaStreamSynchronize(team->device->service);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

namespace {

template <class P>
int32_t launch_barrier(P *p, uint32_t op, bool counts_as_call) {
  BarrierParams params{};
  params.session = session_of(p, op, DK_PHASE_BOTH);
  params.counts_as_call = counts_as_call;
  barrier_kernel<<<1, 128, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace

DK_EXPORT int32_t dk_barrier(dk_barrier_params *p) {
  DK_ENTER(p);
  if (is_remote(handle_of<Team>(p->team))) return internode_barrier(p);
  const OnDevice on(handle_of<Team>(p->team)->device);
  return launch_barrier(p, DK_OP_BARRIER, true);
}

DK_EXPORT int32_t dk_clean(dk_clean_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if (team->internode != nullptr) return internode_clean(p);
  const uint64_t region = team->view.rdma_bytes;
  uint64_t slot = 0;  // 0: the whole region
  if (p->num_max_tokens != 0 || p->hidden != 0 || p->num_experts != 0) {
    if (p->num_max_tokens <= 0 || p->hidden <= 0 || p->num_experts <= 0) return DK_EINVAL;
    const LowLatencyLayout at = low_latency_layout(team->view.num_ranks, p->num_max_tokens, p->hidden, p->num_experts);
    if (at.rdma_bytes > region) return DK_EINVAL;
    slot = at.slot_bytes;
  }
  const OnDevice on(team->device);
  for (int i = 0; team->copies != nullptr && i < kLowLatencySlots; ++i) {  // of sends without their receive half
    const cudaError_t error = join_copies(team, i, stream_of(p->stream), true);
    if (error != cudaSuccess) return device_failure(p, error);
  }
  // No rank sends before all have entered; none goes on before all are clean.
  const int32_t code = launch_barrier(p, DK_OP_CLEAN, false);
  if (code != DK_OK) return code;
  uint8_t *base = team->view.self + team->view.rdma;
  cudaError_t error = cudaSuccess;
  if (slot == 0 && region != 0) error = cudaMemsetAsync(base, 0, region, stream_of(p->stream));
  for (int i = 0; slot != 0 && error == cudaSuccess && i < kLowLatencySlots; ++i)
    error = cudaMemsetAsync(base + slot_offset(region, slot, i), 0, slot, stream_of(p->stream));
  return error == cudaSuccess ? launch_barrier(p, DK_OP_CLEAN, true) : device_failure(p, error);
}

DK_EXPORT int32_t dk_mask(dk_mask_params *p) {
  DK_ENTER(p);
  auto *team = handle_of<Team>(p->team);
  if ((team->view.flags & DK_TEAM_SHRINK) == 0) return DK_ESTATE;
  if (p->what < DK_MASK_UPDATE || p->what > DK_MASK_CLEAN || (p->what == DK_MASK_QUERY && p->out == 0))
    return DK_EINVAL;
  if (p->what == DK_MASK_UPDATE && (p->rank < 0 || p->rank >= team->view.num_ranks)) return DK_EINVAL;
  const MaskParams params{*p, session_of(p, DK_OP_MASK, DK_PHASE_BOTH)};
  if (team->internode != nullptr) return internode_mask(p, params);
  const OnDevice on(team->device);
  mask_kernel<<<1, 128, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}
