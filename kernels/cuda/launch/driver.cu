// driver.cu - the driver's functions, found through the runtime.
#include "cuda/launch/host.h"

namespace deepep {
namespace {

template <class F>
bool find(F &function, const char *name) {
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  void *address = nullptr;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result);
  function = reinterpret_cast<F>(address);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess && address != nullptr;
}

}  // namespace

const Driver *driver() {
  static Driver d{};
  static const bool good =
      find(d.MemCreate, "cuMemCreate") && find(d.MemRelease, "cuMemRelease") &&
      find(d.MemAddressReserve, "cuMemAddressReserve") && find(d.MemAddressFree, "cuMemAddressFree") &&
      find(d.MemMap, "cuMemMap") && find(d.MemUnmap, "cuMemUnmap") && find(d.MemSetAccess, "cuMemSetAccess") &&
      find(d.MemGetAllocationGranularity, "cuMemGetAllocationGranularity") &&
      find(d.MemExportToShareableHandle, "cuMemExportToShareableHandle") &&
      find(d.MemImportFromShareableHandle, "cuMemImportFromShareableHandle") &&
      find(d.MemRetainAllocationHandle, "cuMemRetainAllocationHandle") && find(d.GetErrorString, "cuGetErrorString");
  return good ? &d : nullptr;
}

}  // namespace deepep
