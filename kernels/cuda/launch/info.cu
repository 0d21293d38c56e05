// info.cu - dk_info of libdeepep_cuda.so. libdeepep_nvshmem.so has its own (nvshmem/info.cu).
#include "cuda/launch/host.h"

DK_EXPORT int32_t dk_info(dk_info_params *p) { return deepep::cuda_info(p); }
