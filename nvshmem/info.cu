// info.cu - dk_info of this library: what the CUDA library says of itself and of devices, and whether NVSHMEM fits.
#include <cstdio>
#include <cstring>

#include "network.h"
#include "nvshmem_build_id.h"

// dk_info of the CUDA library, which is linked in under this name.
extern "C" int32_t cuda_info(dk_info_params *p);

using namespace deepep;

DK_EXPORT int32_t dk_info(dk_info_params *p) {
  const int32_t code = cuda_info(p);
  if (code != DK_OK) return code;
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
