// low_latency.cu - launches of low latency among nodes.
#include <new>

#include "cuda/launch/internode.h"
#include "internode/layout.h"
#include "internode/low_latency_params.h"
#include "internode/mask.cuh"

namespace deepep {

struct FarLowLatency { FarLlTeam team; };

namespace {

// A block for each token of a full call and one for the clerk, as far as this rank's share of the device goes.
int blocks_for(const Team *team, int32_t num_sms, int32_t max_tokens) {
  const int share = most(1, team->device->num_sms / most(1, team->sm_share));
  return least(num_sms > 0 ? num_sms : most(32, max_tokens) + 1, share);
}

template <class P, class K> int32_t launch(P *p, const Team *team, const K &params, void (*kernel)(K)) {
  const size_t shared = far_ll_tables(p, team->view.num_ranks);
  const OnDevice on(team->device);
  kernel<<<blocks_for(team, p->num_sms, p->num_max_tokens), kFarLlThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace

FarLowLatencyBytes far_ll_bytes(int, int, uint64_t, uint32_t) { return {kFarLlControlBytes, 0}; }

int32_t far_ll_team_create(dk_team_create_params *p, Team *team) {
  auto *ll = new (std::nothrow) FarLowLatency{{team->view, team->far->view.ll_control, nullptr, 0}};
  if (ll == nullptr) return DK_ENOMEM;
  team->far->ll = ll;
  cudaStream_t service = team->device->service;
  cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&ll->team.state), sizeof(FarLlState));
  if (error == cudaSuccess) error = cudaMemsetAsync(ll->team.state, 0, sizeof(FarLlState), service);
  if (error == cudaSuccess) error = cudaStreamSynchronize(service);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

void far_ll_team_destroy(Team *team) {
  if (team->far->ll == nullptr) return;
  (void)cudaFree(team->far->ll->team.state);
  delete team->far->ll;
  team->far->ll = nullptr;
}

// No word lies where rows do, and words are told apart by the call: nothing there needs to be empty.
int32_t far_ll_clear(dk_clean_params *, const Team *) { return DK_OK; }

cudaError_t load_far_ll_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, far_low_latency_dispatch_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, far_low_latency_combine_kernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, far_mask_kernel) : error;
}

int32_t far_mask(dk_mask_params *p, const MaskParams &params) {
  const OnDevice on(handle_of<Team>(p->team)->device);
  far_mask_kernel<<<1, 128, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t far_ll_dispatch(dk_ll_dispatch_params *p) {
  auto *team = handle_of<Team>(p->team);
  FarLlDispatchParams d{};
  const int32_t code = fill_far_ll_dispatch(p, team->far->ll->team, &d);
  return code == DK_OK ? launch(p, team, d, far_low_latency_dispatch_kernel) : code;
}

int32_t far_ll_combine(dk_ll_combine_params *p) {
  auto *team = handle_of<Team>(p->team);
  FarLlCombineParams c{};
  int32_t code = fill_far_ll_combine(p, team->far->ll->team, &c);
  if (code == DK_OK) code = launch(p, team, c, far_low_latency_combine_kernel);
  if (code == DK_OK && (p->phases & DK_PHASE_SEND) != 0) team->far->ll->team.next_stage = 1 - c.call.stage;
  return code;
}

}  // namespace deepep
