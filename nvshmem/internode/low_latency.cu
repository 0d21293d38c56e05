// low_latency.cu - launches of low latency among nodes.
#include <new>

#include "cuda/launch/internode.h"
#include "internode/layout.h"
#include "internode/low_latency/params.h"
#include "internode/mask.cuh"

namespace deepep {

struct InternodeLowLatency {
  InternodeLlTeam team;
};

namespace {

// A block for each token of a full call and one for the control block, as far as this rank's share of the device goes.
int blocks_for(const Team *team, int32_t num_sms, int32_t max_tokens) {
  const int share = max(1, team->device->num_sms / max(1, team->sm_share));
  return min(num_sms > 0 ? num_sms : max(32, max_tokens) + 1, share);
}

template <class P, class K>
int32_t launch(P *p, const Team *team, const K &params, void (*kernel)(K)) {
  const size_t shared = internode_ll_tables(p, team->view.num_ranks);
  const OnDevice on(team->device);
  kernel<<<blocks_for(team, p->num_sms, p->num_max_tokens), kInternodeLlThreads, shared, stream_of(p->stream)>>>(
      params);
  return launched(p);
}

}  // namespace

InternodeLowLatencyBytes internode_ll_bytes(int, int, uint64_t, uint32_t) { return {kInternodeLlControlBytes, 0}; }

int32_t internode_ll_team_create(dk_team_create_params *p, Team *team) {
  auto *ll = new (std::nothrow) InternodeLowLatency{{team->view, team->internode->view.ll_control, nullptr, 0}};
  if (ll == nullptr) return DK_ENOMEM;
  team->internode->ll = ll;
  cudaStream_t service = team->device->service;
  cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&ll->team.state), sizeof(InternodeLlState));
  if (error == cudaSuccess) error = cudaMemsetAsync(ll->team.state, 0, sizeof(InternodeLlState), service);
  if (error == cudaSuccess) error = cudaStreamSynchronize(service);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

void internode_ll_team_destroy(Team *team) {
  if (team->internode->ll == nullptr) return;
  (void)cudaFree(team->internode->ll->team.state);
  delete team->internode->ll;
  team->internode->ll = nullptr;
}

// No word lies where rows do, and words are told apart by the call: nothing there needs to be empty.
int32_t internode_ll_clear(dk_clean_params *, const Team *) { return DK_OK; }

cudaError_t load_remote_ll_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, internode_low_latency_dispatch_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, internode_low_latency_combine_kernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, internode_mask_kernel) : error;
}

int32_t internode_mask(dk_mask_params *p, const MaskParams &params) {
  const OnDevice on(handle_of<Team>(p->team)->device);
  internode_mask_kernel<<<1, 128, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t internode_ll_dispatch(dk_ll_dispatch_params *p) {
  auto *team = handle_of<Team>(p->team);
  InternodeLlDispatchParams d{};
  const int32_t code = fill_remote_ll_dispatch(p, team->internode->ll->team, &d);
  return code == DK_OK ? launch(p, team, d, internode_low_latency_dispatch_kernel) : code;
}

int32_t internode_ll_combine(dk_ll_combine_params *p) {
  auto *team = handle_of<Team>(p->team);
  InternodeLlCombineParams c{};
  int32_t code = fill_remote_ll_combine(p, team->internode->ll->team, &c);
  if (code == DK_OK) code = launch(p, team, c, internode_low_latency_combine_kernel);
  if (code == DK_OK && (p->phases & DK_PHASE_SEND) != 0) team->internode->ll->team.next_stage = 1 - c.call.stage;
  return code;
}

}  // namespace deepep
