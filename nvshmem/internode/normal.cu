// normal.cu - launches of normal mode and barriers among nodes.
#include "cuda/launch/internode.h"
#include "internode/combine.cuh"
#include "internode/dispatch.cuh"
#include "internode/notify.cuh"

namespace deepep {
namespace {

constexpr size_t kMostLists = 200 * 1024; // shared memory of combine's lists

template <class P> int32_t launch_barrier(P *p, uint32_t op, bool counts_as_call) {
  const Team *team = handle_of<Team>(p->team);
  FarBarrierParams params{};
  params.session = session_of(p, op, DK_PHASE_BOTH);
  params.far = team->far->view, params.counts_as_call = counts_as_call;
  const OnDevice on(team->device);
  far_barrier_kernel<<<1, 256, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

}  // namespace

cudaError_t load_far_normal_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, far_notify_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, far_barrier_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, far_dispatch_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, far_combine_kernel);
  return error;
}

int32_t far_notify(dk_notify_params *p, const NotifyParams &n) {
  const Team *team = handle_of<Team>(p->team);
  const FarNotifyParams params{n, team->far->view};
  const OnDevice on(team->device);
  far_notify_kernel<<<1 + least(team->view.num_ranks, 16), kNotifyThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t far_dispatch(dk_dispatch_params *p, const DispatchParams &d, int blocks) {
  const Team *team = handle_of<Team>(p->team);
  FarDispatchParams params{d, team->far->view, {}, {}, static_cast<FarState *>(team->far->state)};
  params.rings = far_rings(team->view, params.far, d.row_bytes + 4ull * FarRowWords(d, params.far.num_peers).end, false);
  if (params.rings.slots == 0) return DK_EUNSUPPORTED; // rdma region under min_rdma_bytes
  params.lists = far_lists(params.state, params.far);
  const OnDevice on(team->device);
  far_dispatch_kernel<<<blocks, FarDispatchRoles::kThreads, 0, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t far_combine(dk_combine_params *p, const CombineParams &c, int blocks) {
  const Team *team = handle_of<Team>(p->team);
  if (p->num_recv_tokens > 0 && p->recv_src_idx == 0) return DK_EINVAL;
  FarCombineParams params{c, team->far->view, {}, {}};
  params.rings = far_rings(team->view, params.far, c.row_bytes + 4ull * (1 + c.num_topk), true);
  if (params.rings.slots == 0) return DK_EUNSUPPORTED; // nvl region under min_nvl_bytes, or rdma region under min_rdma_bytes
  params.lists = far_lists(static_cast<FarState *>(team->far->state), params.far);
  const size_t shared = sizeof(void *) * FarCombineRoles::kWarps * (params.far.num_peers + params.far.num_nodes);
  if (shared > kMostLists) return DK_EUNSUPPORTED;
  const OnDevice on(team->device);
  if (shared > 40 * 1024) { // beyond what a kernel has without asking
    const cudaError_t error = cudaFuncSetAttribute(far_combine_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return device_failure(p, error);
  }
  far_combine_kernel<<<blocks, FarCombineRoles::kThreads, shared, stream_of(p->stream)>>>(params);
  return launched(p);
}

int32_t far_barrier(dk_barrier_params *p) { return launch_barrier(p, DK_OP_BARRIER, true); }

int32_t far_clean(dk_clean_params *p) {
  const Team *team = handle_of<Team>(p->team);
  const bool all = p->num_max_tokens == 0 && p->hidden == 0 && p->num_experts == 0;
  if (!all && (p->num_max_tokens <= 0 || p->hidden <= 0 || p->num_experts <= 0)) return DK_EINVAL;
  // Nobody sends before all have come; nobody goes on before all are clean.
  int32_t code = launch_barrier(p, DK_OP_CLEAN, false);
  if (code == DK_OK) code = far_ll_clear(p, team);
  return code == DK_OK ? launch_barrier(p, DK_OP_CLEAN, true) : code;
}

}  // namespace deepep
