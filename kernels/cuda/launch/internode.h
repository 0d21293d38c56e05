// internode.h - what a team with a transport does instead of the usual launches. libdeepep_cuda.so refuses such teams
// (internode_none.cu); libdeepep_nvshmem.so has the kernels for them (nvshmem/internode).
#pragma once
#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/dispatch_params.cuh"
#include "cuda/impl/normal/notify_params.cuh"
#include "cuda/launch/host.h"
#include "cuda/sync/masks.cuh"

namespace deepep {

inline bool spans_nodes(const Team *team) { return team->view.num_ranks > team->view.num_nvl_peers; }
// Normal mode and barriers use loads and stores on one node even where low latency uses the transport.
inline bool is_remote(const Team *team) { return team->internode != nullptr && spans_nodes(team); }

// Adds to the sizes that the ranks of one node need. Pure; called where num_ranks > num_nvl_peers or flags have
// DK_TEAM_LL_TRANSPORT.
int32_t internode_block_sizes(dk_block_sizes_params *p);
// The wire region that low-latency calls need; the rest is filled. Where internode_block_sizes() is called.
void internode_ll_layout(dk_ll_layout_params *p);
// The team's view is filled; scratch and peers are allocated. Attaches team->internode.
int32_t internode_team_create(dk_team_create_params *p, Team *team);
void internode_team_destroy(Team *team);  // no effect where team->internode is null

// Where is_remote(). The caller has checked the arguments.
int32_t internode_notify(dk_notify_params *p, const NotifyParams &params);
int32_t internode_routed_notify(dk_notify_params *p, const NotifyParams &params);
int32_t internode_dispatch(dk_dispatch_params *p, const DispatchParams &params, int blocks);
int32_t internode_combine(dk_combine_params *p, const CombineParams &params, int blocks);
int32_t internode_barrier(dk_barrier_params *p);

// Where team->internode is not null, with one node or more. The arguments are not checked yet.
int32_t internode_clean(dk_clean_params *p);
int32_t internode_ll_dispatch(dk_ll_dispatch_params *p);
int32_t internode_ll_combine(dk_ll_combine_params *p);
int32_t internode_mask(dk_mask_params *p, const MaskParams &params);  // arguments are checked

cudaError_t load_internode_kernels();  // all of them, on the current device

}  // namespace deepep
