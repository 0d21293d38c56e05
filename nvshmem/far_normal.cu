// far_normal.cu - normal mode and barriers among nodes.
#include "cuda/launch/far.h"
#include "far_normal.h"

namespace deepep {

cudaError_t load_far_normal_kernels() { return cudaSuccess; }
int32_t far_notify(dk_notify_params *, const NotifyParams &) { return DK_EUNSUPPORTED; }
int32_t far_dispatch(dk_dispatch_params *, const DispatchParams &, int) { return DK_EUNSUPPORTED; }
int32_t far_combine(dk_combine_params *, const CombineParams &, int) { return DK_EUNSUPPORTED; }
int32_t far_barrier(dk_barrier_params *) { return DK_EUNSUPPORTED; }
int32_t far_clean(dk_clean_params *) { return DK_EUNSUPPORTED; }

}  // namespace deepep
