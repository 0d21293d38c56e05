// internode_none.cu - libdeepep_cuda.so accesses ranks by loads and stores alone. Not in libdeepep_nvshmem.so.
#include "cuda/launch/internode.h"

namespace deepep {

int32_t internode_block_sizes(dk_block_sizes_params *) { return DK_OK; }
void internode_ll_layout(dk_ll_layout_params *) {}
int32_t internode_team_create(dk_team_create_params *, Team *) { return DK_EUNSUPPORTED; }
void internode_team_destroy(Team *) {}
int32_t internode_notify(dk_notify_params *, const NotifyParams &) { return DK_EUNSUPPORTED; }
int32_t internode_routed_notify(dk_notify_params *, const NotifyParams &) { return DK_EUNSUPPORTED; }
int32_t internode_dispatch(dk_dispatch_params *, const DispatchParams &, int) { return DK_EUNSUPPORTED; }
int32_t internode_combine(dk_combine_params *, const CombineParams &, int) { return DK_EUNSUPPORTED; }
int32_t internode_barrier(dk_barrier_params *) { return DK_EUNSUPPORTED; }
int32_t internode_clean(dk_clean_params *) { return DK_EUNSUPPORTED; }
int32_t internode_ll_dispatch(dk_ll_dispatch_params *) { return DK_EUNSUPPORTED; }
int32_t internode_ll_combine(dk_ll_combine_params *) { return DK_EUNSUPPORTED; }
int32_t internode_mask(dk_mask_params *, const MaskParams &) { return DK_EUNSUPPORTED; }
cudaError_t load_internode_kernels() { return cudaSuccess; }

}  // namespace deepep
