// team.cu - libdeepep_nvshmem.so: teams with a transport: the sizes of their regions, their device memory. No kernels.
#include <new>

#include "cuda/launch/internode.h"
#include "internode/normal/rings.h"
#include "internode/shrink_layout.h"

namespace deepep {
namespace {

// Bytes after a row's payload for up to 100 indices and weights; the row's numbers at a node's ranks are added to it.
constexpr uint64_t kRowExtras = 1024;

uint64_t local_control_bytes(int num_ranks) { return control_layout(num_ranks).bytes; }

// Where the parts of teams that shrink lie; all teams have room for them.
internode::ShrinkOffsets shrink_offsets_of(uint64_t low_latency_outbox, int num_ranks) {
  return internode::shrink_offsets(low_latency_outbox + internode::kLowLatencyOutboxBytes, num_ranks);
}

// All nodes have the same number of ranks, so that each rank has a partner on every other node. Blocks of this node are
// mapped; the transport reaches the others.
int32_t check(const dk_team_create_params *p) {
  const auto *blocks = pointer<const uint64_t>(p->host_peer_blocks);
  const int peers = min(p->num_nvl_peers, p->num_ranks);
  if (p->num_ranks % peers != 0) return DK_EINVAL;
  for (int r = 0; r < p->num_ranks; ++r) {
    const bool local = r / peers == p->rank / peers;
    if (local && blocks[r] == 0) return DK_EINVAL;
    const bool needed = !local || (r != p->rank && (p->flags & DK_TEAM_LL_TRANSPORT) != 0);
    if (needed && !internode::transport_reaches(p->transport, r)) return DK_EINVAL;
  }
  return DK_OK;
}

int32_t fill_view(const dk_team_create_params *p, internode::NodeView *view) {
  const int peers = min(p->num_nvl_peers, p->num_ranks);
  view->num_peers = peers;
  view->num_nodes = p->num_ranks / peers;
  view->node = p->rank / peers;
  view->index = p->rank % peers;
  view->puts_are_stores = internode::transport_stores(p->transport);
  view->at = internode::control_offsets(p->control_offset + local_control_bytes(p->num_ranks), p->num_ranks, peers);
  view->low_latency_outbox = view->at.end;
  const uint64_t end = shrink_offsets_of(view->low_latency_outbox, p->num_ranks).end;
  return p->control_bytes < end - p->control_offset ? DK_EINVAL : DK_OK;
}

// The blocks into which kernels store: inside the node, unless low latency must not, and of other nodes where puts are
// stores. Null for others.
std::vector<uint8_t *> stored_blocks(const dk_team_create_params *p, const internode::NodeView &view) {
  const auto *mapped = pointer<const uint64_t>(p->host_peer_blocks);
  std::vector<uint8_t *> blocks(p->num_ranks);
  for (int r = 0; r < p->num_ranks; ++r) {
    const bool near = view.is_local(r) && (p->flags & DK_TEAM_LL_TRANSPORT) == 0;
    if (r == p->rank || near)
      blocks[r] = pointer<uint8_t>(mapped[r]);
    else if (view.puts_are_stores)
      blocks[r] = internode::transport_block(p->transport, r);
  }
  return blocks;
}

cudaError_t allocate(InternodeTeam *team, const std::vector<int> &queues, const std::vector<uint8_t *> &blocks,
                     cudaStream_t service) {
  const internode::NodeView &view = team->view;
  const size_t bytes =
      sizeof(internode::NormalState) + internode::StreamListSizes(view.num_nodes, view.num_peers).bytes;
  cudaError_t error = cudaMalloc(&team->state, bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(team->state, 0, bytes, service);
  const size_t addresses = blocks.size() * sizeof(uint8_t *);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&team->blocks), addresses);
  if (error == cudaSuccess)
    error = cudaMemcpyAsync(team->blocks, blocks.data(), addresses, cudaMemcpyHostToDevice, service);
  team->view.blocks = team->blocks;
  if (error == cudaSuccess && !queues.empty()) {
    error = cudaMalloc(reinterpret_cast<void **>(&team->queues), queues.size() * sizeof(int));
    if (error == cudaSuccess)
      error =
          cudaMemcpyAsync(team->queues, queues.data(), queues.size() * sizeof(int), cudaMemcpyHostToDevice, service);
    team->view.queues = team->queues;
    team->view.num_queues = static_cast<int>(queues.size());
  }
  return error == cudaSuccess ? cudaStreamSynchronize(service) : error;
}

cudaError_t allocate_shrink(Team *team) {
  auto *view = new (std::nothrow) internode::ShrinkView{};
  if (view == nullptr) return cudaErrorMemoryAllocation;
  team->internode->shrink = view;
  const int num_ranks = team->view.num_ranks;
  view->at = shrink_offsets_of(team->internode->view.low_latency_outbox, num_ranks);
  const size_t bytes = internode::shrink_state_bytes(num_ranks);
  cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&view->state), bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(view->state, 0, bytes, team->device->service);
  return error == cudaSuccess ? cudaStreamSynchronize(team->device->service) : error;
}

}  // namespace

int32_t internode_block_sizes(dk_block_sizes_params *p) {
  const int peers = min(p->num_nvl_peers, p->num_ranks);
  if (p->num_ranks % peers != 0) return DK_EINVAL;
  const uint64_t outbox = internode::control_offsets(p->control_bytes, p->num_ranks, peers).end;
  p->control_bytes = shrink_offsets_of(outbox, p->num_ranks).end;
  // At least two rows to and two from each node; inside the node a row for the tokens of each rank.
  const uint64_t nodes = p->num_ranks / peers, row = align_up<uint64_t>(p->max_row_bytes + kRowExtras + 4 * peers, 128);
  if (nodes > 1) {
    p->min_rdma_bytes = 4 * nodes * row;
    p->min_nvl_bytes = p->num_ranks * row;
    // A team that shrinks stages a row for each rank there, and receives one from each in the nvl region.
    if ((p->flags & DK_TEAM_SHRINK) != 0) p->min_rdma_bytes = p->num_ranks * row;
  }
  return DK_OK;
}

int32_t internode_team_create(dk_team_create_params *p, Team *team) {
  int32_t code = check(p);
  if (code != DK_OK) return code;
  auto *created = new (std::nothrow) InternodeTeam;
  if (created == nullptr) return DK_ENOMEM;
  team->internode = created;
  code = fill_view(p, &created->view);
  if (code != DK_OK) return code;
  cudaError_t error = allocate(created, internode::transport_queues(p->transport), stored_blocks(p, created->view),
                               team->device->service);
  if (error == cudaSuccess && is_remote(team) && (team->view.flags & DK_TEAM_SHRINK) != 0)
    error = allocate_shrink(team);
  if (error == cudaSuccess) error = internode::prepare_normal(team);
  return error == cudaSuccess ? internode::create_low_latency(p, team) : device_failure(p, error);
}

void internode_team_destroy(Team *team) {
  if (team->internode == nullptr) return;
  internode::destroy_low_latency(team);
  (void)cudaFree(team->internode->state);
  (void)cudaFree(team->internode->queues);
  (void)cudaFree(team->internode->blocks);
  if (team->internode->shrink != nullptr) (void)cudaFree(team->internode->shrink->state);
  delete team->internode->shrink;
  delete team->internode;
  team->internode = nullptr;
}

cudaError_t load_internode_kernels() {
  const cudaError_t error = internode::load_normal_kernels();
  return error == cudaSuccess ? internode::load_low_latency_kernels() : error;
}

}  // namespace deepep
