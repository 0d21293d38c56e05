// team.cu - teams with a transport: sizes, what they have besides. No kernels here.
#include <new>

#include "cuda/launch/internode.h"
#include "internode/normal/rings.h"

namespace deepep {
namespace {

constexpr uint64_t kRowExtras =
    1024;  // what goes with a row, for up to 100 indices and weights, besides its place at each rank of a node

uint64_t local_control_bytes(int num_ranks) { return control_layout(num_ranks).bytes; }

// Nodes are of one size, so that everybody has partners. Those of my node are mapped, others are reached by the
// transport.
int32_t check(const dk_team_create_params *p) {
  const auto *blocks = pointer<const uint64_t>(p->host_peer_blocks);
  const int peers = min(p->num_nvl_peers, p->num_ranks);
  if (p->num_ranks % peers != 0) return DK_EINVAL;
  for (int r = 0; r < p->num_ranks; ++r) {
    const bool local = r / peers == p->rank / peers;
    if (local && blocks[r] == 0) return DK_EINVAL;
    const bool needed = !local || (r != p->rank && (p->flags & DK_TEAM_LL_TRANSPORT) != 0);
    if (needed && !transport_reaches(p->transport, r)) return DK_EINVAL;
  }
  return DK_OK;
}

// The view's control and wire regions become those of one node; what follows is low latency's.
int32_t fill_view(const dk_team_create_params *p, Team *team, InternodeView *view) {
  const int peers = min(p->num_nvl_peers, p->num_ranks);
  view->num_peers = peers;
  view->num_nodes = p->num_ranks / peers;
  view->node = p->rank / peers;
  view->index = p->rank % peers;
  view->at = internode_control(p->control_offset + local_control_bytes(p->num_ranks), p->num_ranks, peers);
  const InternodeLowLatencyBytes ll = internode_ll_bytes(p->num_ranks, peers, p->rdma_bytes, p->flags);
  view->ll_control = view->at.end;
  if (p->control_bytes < view->ll_control + ll.control - p->control_offset || p->wire_bytes < ll.wire) return DK_EINVAL;
  team->view.wire_bytes = p->wire_bytes - ll.wire;
  view->ll_wire = p->wire_offset + team->view.wire_bytes;
  view->ll_wire_bytes = ll.wire;
  return DK_OK;
}

cudaError_t allocate(InternodeTeam *internode, const std::vector<int> &queues, cudaStream_t service) {
  const size_t bytes =
      sizeof(InternodeState) + InternodeListSizes(internode->view.num_nodes, internode->view.num_peers).bytes;
  cudaError_t error = cudaMalloc(&internode->state, bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(internode->state, 0, bytes, service);
  if (error == cudaSuccess && !queues.empty()) {
    error = cudaMalloc(reinterpret_cast<void **>(&internode->queues), queues.size() * sizeof(int));
    if (error == cudaSuccess)
      error = cudaMemcpyAsync(internode->queues, queues.data(), queues.size() * sizeof(int), cudaMemcpyHostToDevice,
                              service);
    internode->view.queues = internode->queues;
    internode->view.num_queues = static_cast<int>(queues.size());
  }
  return error == cudaSuccess ? cudaStreamSynchronize(service) : error;
}

}  // namespace

int32_t internode_block_sizes(dk_block_sizes_params *p) {
  const int peers = min(p->num_nvl_peers, p->num_ranks);
  if (p->num_ranks % peers != 0) return DK_EINVAL;
  const InternodeLowLatencyBytes ll = internode_ll_bytes(p->num_ranks, peers, p->rdma_bytes, p->flags);
  p->control_bytes = internode_control(p->control_bytes, p->num_ranks, peers).end + ll.control;
  p->wire_bytes += ll.wire;
  // Two rows on their way to each node, and two from each; inside the node one for each rank's tokens.
  const uint64_t nodes = p->num_ranks / peers, row = align_up<uint64_t>(p->max_row_bytes + kRowExtras + 4 * peers, 128);
  if (nodes > 1) {
    p->min_rdma_bytes = 4 * nodes * row;
    p->min_nvl_bytes = p->num_ranks * row;
  }
  return DK_OK;
}

int32_t internode_team_create(dk_team_create_params *p, Team *team) {
  int32_t code = check(p);
  if (code != DK_OK) return code;
  auto *internode = new (std::nothrow) InternodeTeam;
  if (internode == nullptr) return DK_ENOMEM;
  team->internode = internode;
  code = fill_view(p, team, &internode->view);
  if (code != DK_OK) return code;
  const cudaError_t error = allocate(internode, transport_queues(p->transport), team->device->service);
  return error == cudaSuccess ? internode_ll_team_create(p, team) : device_failure(p, error);
}

void internode_team_destroy(Team *team) {
  if (team->internode == nullptr) return;
  internode_ll_team_destroy(team);
  (void)cudaFree(team->internode->state);
  (void)cudaFree(team->internode->queues);
  delete team->internode;
  team->internode = nullptr;
}

cudaError_t load_remote_kernels() {
  const cudaError_t error = load_remote_normal_kernels();
  return error == cudaSuccess ? load_remote_ll_kernels() : error;
}

}  // namespace deepep
