// low_latency.cu - libdeepep_nvshmem.so: launches of low latency and of masks for teams with a transport.
#include <new>

#include "cuda/launch/internode.h"
#include "internode/layout.h"
#include "internode/low_latency/params.h"
#include "internode/mask.cuh"

namespace deepep {
namespace {

using namespace internode;

// One block more than there are tokens counts them. Combine has as many: a rank's messages come from the last block,
// and NVSHMEM may choose the queue pair, which keeps their order, by the block.
template <class P, class K>
int32_t launch(P *p, const Team *team, const K &params, void (*kernel)(K), size_t shared) {
  const int blocks = low_latency_blocks(team, p->num_sms, p->num_max_tokens + 1);
  const OnDevice on(team->device);
  kernel<<<blocks, kLlThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace

namespace internode {

int32_t create_low_latency(dk_team_create_params *p, Team *team) {
  const NodeView &view = team->internode->view;
  auto *ll = new (std::nothrow)
      LowLatencyTeam{team->view, view.low_latency_outbox, nullptr, 0, view.blocks, team->device->max_shared};
  if (ll == nullptr) return DK_ENOMEM;
  team->internode->low_latency = ll;
  cudaStream_t service = team->device->service;
  cudaError_t error = opt_in(deep_ep::internode_ll::combine, ll->max_shared);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&ll->state), sizeof(LowLatencyState));
  if (error == cudaSuccess) error = cudaMemsetAsync(ll->state, 0, sizeof(LowLatencyState), service);
  if (error == cudaSuccess) error = cudaStreamSynchronize(service);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

void destroy_low_latency(Team *team) {
  LowLatencyTeam *ll = team->internode->low_latency;
  if (ll == nullptr) return;
  (void)cudaFree(ll->state);
  delete ll;
  team->internode->low_latency = nullptr;
}

cudaError_t load_low_latency_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, deep_ep::internode_ll::dispatch);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, deep_ep::internode_ll::combine);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, internode_shrinking_mask_kernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, internode_mask_kernel) : error;
}

}  // namespace internode

void internode_ll_layout(dk_ll_layout_params *p) {
  const WireSizes needed(p->num_ranks, p->num_max_tokens, p->num_experts);
  p->wire_bytes = ring_flags(p->num_ranks).bytes + needed.region();
}

int32_t internode_mask(dk_mask_params *p, const MaskParams &params) {
  const Team *team = handle_of<Team>(p->team);
  const InternodeTeam &nodes = *team->internode;
  const OnDevice on(team->device);
  if (nodes.shrink != nullptr)
    internode_shrinking_mask_kernel<<<1, 128, 0, stream_of(p->stream)>>>({params, nodes.view, *nodes.shrink});
  else
    internode_mask_kernel<<<1, 128, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t internode_ll_dispatch(dk_ll_dispatch_params *p) {
  auto *team = handle_of<Team>(p->team);
  InternodeLlDispatchParams d{};
  const int32_t code = fill_dispatch(p, *team->internode->low_latency, &d);
  if (code != DK_OK) return code;
  return launch(p, team, d, deep_ep::internode_ll::dispatch, shared_bytes(p, team->view.num_ranks));
}

int32_t internode_ll_combine(dk_ll_combine_params *p) {
  auto *team = handle_of<Team>(p->team);
  InternodeLlCombineParams c{};
  int32_t code = fill_combine(p, *team->internode->low_latency, &c);
  if (code == DK_OK) code = launch(p, team, c, deep_ep::internode_ll::combine, combine_shared_bytes(p, c));
  if (code == DK_OK && (p->phases & DK_PHASE_SEND) != 0) team->internode->low_latency->next_stage = 1 - c.call.stage;
  return code;
}

}  // namespace deepep

#ifdef DEEPEP_TIMELINE
// As the CUDA library's (kernels/cuda/launch/low_latency.cu).
extern "C" __attribute__((visibility("default"))) uint64_t dk_timeline(uint64_t *to) {
  if (to != nullptr && cudaMemcpyFromSymbol(to, deepep::g_timeline, sizeof deepep::g_timeline) != cudaSuccess) return 0;
  return sizeof deepep::g_timeline / sizeof(uint64_t);
}
#endif
