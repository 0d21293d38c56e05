// info.cu - dk_info of libdeepep_nvshmem.so: that of the CUDA library, whose objects are linked in, under this
// library's kind and build id. Without a matching NVSHMEM no device can be used.
#include <cstdio>
#include <cstring>

#include "network.h"
#include "nvshmem_build_id.h"

using namespace deepep;

DK_EXPORT int32_t dk_info(dk_info_params *p) {
  const int32_t code = cuda_info(p);
  if (code != DK_OK) return code;
  p->caps |= DK_CAP_ROUTED_NODES | DK_CAP_SHRINK_NODES | DK_CAP_ROUTED_SHRINK_NODES;
  snprintf(p->kind, sizeof p->kind, "nvshmem");
  snprintf(p->build, sizeof p->build, "nvshmem-%s-%d.%d.%d", DK_NVSHMEM_BUILD_ID, kBuiltFor.major, kBuiltFor.minor,
           kBuiltFor.patch);
  char mismatch[sizeof p->reason];
  Report report(mismatch, sizeof mismatch);
  if (check_versions(&report) == DK_OK) return DK_OK;
  p->num_devices = 0;
  memcpy(p->reason, mismatch, sizeof mismatch);
  return DK_OK;
}
