// memory.cu - device memory that peers can map, and host memory that kernels can write.
// Virtual memory is exported as a descriptor: a peer's mapping stays valid when the owner frees it or dies. Where the
// driver refuses that, ordinary allocations and cudaIpc.
#include <sys/types.h>

#include <cstring>
#include <new>

#include "cuda/common/types.cuh"
#include "cuda/launch/host.h"

namespace deepep {
namespace {

constexpr size_t kAlignment = 2u << 20;

CUmemAllocationProp allocation_properties(int ordinal) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = ordinal;
  return properties;
}

// This device may read and write what is mapped at the memory's addresses.
CUresult allow_access(const Memory *memory) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = memory->device->ordinal;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver()->MemSetAccess(memory->address, memory->bytes, &access, 1);
}

// Maps `handle` at the memory's addresses, again and again where it is smaller. At an error nothing is mapped.
CUresult map_at(const Memory *memory, CUmemGenericAllocationHandle handle, size_t handle_bytes) {
  const Driver *d = driver();
  size_t mapped = 0;
  CUresult result = CUDA_SUCCESS;
  while (result == CUDA_SUCCESS && mapped < memory->bytes) {
    const size_t part = memory->bytes - mapped < handle_bytes ? memory->bytes - mapped : handle_bytes;
    result = d->MemMap(memory->address + mapped, part, 0, handle, 0);
    if (result == CUDA_SUCCESS) mapped += part;
  }
  if (result == CUDA_SUCCESS) result = allow_access(memory);
  if (result != CUDA_SUCCESS && mapped > 0) (void)d->MemUnmap(memory->address, mapped);
  return result;
}

// Maps memory->handle at new addresses, for reads and writes of this device.
CUresult map_here(Memory *memory) {
  const Driver *d = driver();
  CUresult result = d->MemAddressReserve(&memory->address, memory->bytes, kAlignment, 0, 0);
  if (result != CUDA_SUCCESS) return result;
  result = map_at(memory, memory->handle, memory->bytes);
  if (result == CUDA_SUCCESS) return result;
  (void)d->MemAddressFree(memory->address, memory->bytes);
  memory->address = 0;
  return result;
}

CUresult allocate_virtual(Memory *memory, size_t bytes) {
  const Driver *d = driver();
  if (d == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  const CUmemAllocationProp properties = allocation_properties(memory->device->ordinal);
  size_t granularity = 0;
  CUresult result = d->MemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return result;
  memory->bytes = align_up(align_up(bytes, kAlignment), granularity);
  result = d->MemCreate(&memory->handle, memory->bytes, &properties, 0);
  if (result != CUDA_SUCCESS) return result;
  result = map_here(memory);
  if (result != CUDA_SUCCESS) (void)d->MemRelease(memory->handle);
  memory->kind = MemoryKind::kVirtual;
  memory->owned = true;
  return result;
}

cudaError_t allocate_runtime(Memory *memory, size_t bytes) {
  void *address = nullptr;
  memory->bytes = align_up(bytes, kAlignment);
  memory->kind = MemoryKind::kRuntime;
  const cudaError_t error = cudaMalloc(&address, memory->bytes);
  memory->address = reinterpret_cast<CUdeviceptr>(address);
  return error;
}

cudaError_t zero(const Memory &memory) {
  const cudaError_t error =
      cudaMemsetAsync(reinterpret_cast<void *>(memory.address), 0, memory.bytes, memory.device->service);
  return error == cudaSuccess ? cudaStreamSynchronize(memory.device->service) : error;
}

int32_t release(Memory *memory) {
  const Driver *d = driver();
  const OnDevice on(memory->device);
  void *address = reinterpret_cast<void *>(memory->address);
  if (memory->kind == MemoryKind::kVirtual) {
    if (memory->handle != 0) (void)d->MemUnmap(memory->address, memory->bytes);
    (void)d->MemAddressFree(memory->address, memory->bytes);
    if (memory->handle != 0) (void)d->MemRelease(memory->handle);
  } else if (memory->kind == MemoryKind::kRuntime) {
    (void)cudaFree(address);
  } else if (memory->kind == MemoryKind::kImported) {
    (void)cudaIpcCloseMemHandle(address);
  }
  (void)cudaGetLastError();
  delete memory;
  return DK_OK;
}

// What stands in for released memory: at most this many pieces cover it, each of the same few physical pages. A kernel
// looks at its block before it knows that the team is released, and a captured graph may clear a region.
constexpr size_t kStandInPieces = 256;

CUresult create_stand_in(const Memory *memory, CUmemGenericAllocationHandle *handle, size_t *bytes) {
  const Driver *d = driver();
  CUmemAllocationProp properties = allocation_properties(memory->device->ordinal);
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
  size_t granularity = 0;
  const CUresult result = d->MemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return result;
  *bytes = align_up(align_up(memory->bytes / kStandInPieces + 1, kAlignment), granularity);
  return d->MemCreate(handle, *bytes, &properties, 0);
}

// The stand-in comes first: an error before the memory is gone leaves it as it was.
CUresult give_back(Memory *memory) {
  const Driver *d = driver();
  CUmemGenericAllocationHandle stand_in = 0;
  size_t bytes = 0;
  CUresult result = memory->owned ? create_stand_in(memory, &stand_in, &bytes) : CUDA_SUCCESS;
  if (result != CUDA_SUCCESS) return result;
  result = d->MemUnmap(memory->address, memory->bytes);
  if (result != CUDA_SUCCESS) {
    if (stand_in != 0) (void)d->MemRelease(stand_in);
    return result;
  }
  (void)d->MemRelease(memory->handle);
  memory->handle = stand_in;
  memory->released = true;
  if (stand_in == 0) return CUDA_SUCCESS;
  result = map_at(memory, stand_in, bytes);
  if (result == CUDA_SUCCESS) return result;
  (void)d->MemRelease(stand_in);
  memory->handle = 0;
  return result;
}

// A caller's kernels may use a view of this rank's memory, and replayed graphs its stand-in.
cudaError_t await_users(const OnDevice &on, const Memory *memory) {
  return on.error() == cudaSuccess && memory->owned ? cudaDeviceSynchronize() : on.error();
}

// Puts `handle` in the place of the stand-in; it is the memory's from then on.
CUresult take_back(Memory *memory, CUmemGenericAllocationHandle handle) {
  const Driver *d = driver();
  if (memory->handle != 0) {
    const CUresult result = d->MemUnmap(memory->address, memory->bytes);
    if (result != CUDA_SUCCESS) return result;
    (void)d->MemRelease(memory->handle);
    memory->handle = 0;
  }
  const CUresult result = map_at(memory, handle, memory->bytes);
  if (result == CUDA_SUCCESS) memory->handle = handle;
  return result;
}

struct LocalBlob {
  uint64_t address, bytes;
  uint32_t virtual_memory;
  int32_t ordinal;
};
static_assert(sizeof(LocalBlob) <= 64 && sizeof(cudaIpcMemHandle_t) == 64, "blobs are 64 bytes");

// Memory of the same process: a second mapping that keeps it alive, or the address itself.
int32_t import_local(dk_mem_import_params *p, Memory *memory) {
  LocalBlob blob{};
  memcpy(&blob, p->blob, sizeof blob);
  memory->bytes = blob.bytes;
  if (blob.virtual_memory != 0) {
    const CUresult result = driver()->MemRetainAllocationHandle(&memory->handle, pointer<void>(blob.address));
    if (result != CUDA_SUCCESS) return driver_failure(p, result);
    memory->kind = MemoryKind::kVirtual;
    const CUresult mapped = map_here(memory);
    if (mapped == CUDA_SUCCESS) return DK_OK;
    (void)driver()->MemRelease(memory->handle);
    return driver_failure(p, mapped);
  }
  memory->kind = MemoryKind::kAlias;
  memory->address = blob.address;
  if (blob.ordinal == memory->device->ordinal) return DK_OK;
  const cudaError_t error = cudaDeviceEnablePeerAccess(blob.ordinal, 0);
  (void)cudaGetLastError();
  if (error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled) return DK_OK;
  return device_failure(p, error);
}

int32_t import_into(dk_mem_import_params *p, Memory *memory) {
  memory->bytes = align_up<size_t>(p->bytes, kAlignment);
  if (p->kind == DK_SHARE_LOCAL) return import_local(p, memory);
  if (p->kind == DK_SHARE_BLOB) {
    cudaIpcMemHandle_t handle;
    memcpy(&handle, p->blob, sizeof handle);
    void *address = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) return device_failure(p, error);
    memory->kind = MemoryKind::kImported;
    memory->address = reinterpret_cast<CUdeviceptr>(address);
    return DK_OK;
  }
  if (p->kind != DK_SHARE_FD || p->fd < 0) return DK_EINVAL;
  if (driver() == nullptr) return DK_EUNSUPPORTED;
  CUresult result =
      driver()->MemImportFromShareableHandle(&memory->handle, reinterpret_cast<void *>(static_cast<intptr_t>(p->fd)),
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) return driver_failure(p, result);
  memory->kind = MemoryKind::kVirtual;
  result = map_here(memory);
  if (result == CUDA_SUCCESS) return DK_OK;
  (void)driver()->MemRelease(memory->handle);
  return driver_failure(p, result);
}

}  // namespace
}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_mem_alloc(dk_mem_alloc_params *p) {
  DK_ENTER(p);
  auto *device = handle_of<Device>(p->device);
  p->mem = p->address = p->out_bytes = 0;
  if (device == nullptr || p->bytes == 0) return DK_EINVAL;
  if (p->bytes > device->properties.totalGlobalMem) return DK_ENOMEM;
  auto *memory = new (std::nothrow) Memory;
  if (memory == nullptr) return DK_ENOMEM;
  memory->device = device;
  const OnDevice on(device);
  if (on.error() != cudaSuccess) {
    delete memory;
    return device_failure(p, on.error());
  }
  const CUresult result = allocate_virtual(memory, p->bytes);
  cudaError_t error = cudaSuccess;
  if (result != CUDA_SUCCESS) {
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      delete memory;
      return driver_failure(p, result);
    }
    error = allocate_runtime(memory, p->bytes);
    if (error != cudaSuccess) {
      delete memory;
      return device_failure(p, error);
    }
  }
  error = zero(*memory);
  if (error != cudaSuccess) {
    release(memory);
    return device_failure(p, error);
  }
  p->mem = handle_to(memory);
  p->address = memory->address;
  p->out_bytes = memory->bytes;
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_export(dk_mem_export_params *p) {
  DK_ENTER(p);
  auto *memory = handle_of<Memory>(p->mem);
  const bool local = p->kind == DK_SHARE_LOCAL;  // asked for; else the library chooses
  p->kind = DK_SHARE_NONE;
  p->fd = -1;
  memset(p->blob, 0, sizeof p->blob);
  if (memory == nullptr || memory->released) return DK_EINVAL;
  if (local) {
    const LocalBlob blob{memory->address, memory->bytes, memory->kind == MemoryKind::kVirtual, memory->device->ordinal};
    memcpy(p->blob, &blob, sizeof blob);
    p->kind = DK_SHARE_LOCAL;
    return DK_OK;
  }
  const OnDevice on(memory->device);
  if (memory->kind == MemoryKind::kVirtual) {
    int fd = -1;
    const CUresult result =
        driver()->MemExportToShareableHandle(&fd, memory->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) return driver_failure(p, result);
    p->kind = DK_SHARE_FD;
    p->fd = fd;
    return DK_OK;
  }
  if (memory->kind != MemoryKind::kRuntime) return DK_EUNSUPPORTED;
  cudaIpcMemHandle_t handle;
  const cudaError_t error = cudaIpcGetMemHandle(&handle, reinterpret_cast<void *>(memory->address));
  if (error != cudaSuccess) return device_failure(p, error);
  memcpy(p->blob, &handle, sizeof handle);
  p->kind = DK_SHARE_BLOB;
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_import(dk_mem_import_params *p) {
  DK_ENTER(p);
  auto *device = handle_of<Device>(p->device);
  p->mem = p->address = 0;
  if (device == nullptr || p->bytes == 0) return DK_EINVAL;
  auto *memory = new (std::nothrow) Memory;
  if (memory == nullptr) return DK_ENOMEM;
  memory->device = device;
  const OnDevice on(device);
  const int32_t code = on.error() == cudaSuccess ? import_into(p, memory) : device_failure(p, on.error());
  if (code != DK_OK) {
    delete memory;
    return code;
  }
  p->mem = handle_to(memory);
  p->address = memory->address;
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_free(dk_mem_free_params *p) {
  DK_ENTER(p);
  auto *memory = handle_of<Memory>(p->mem);
  return memory == nullptr ? static_cast<int32_t>(DK_OK) : release(memory);  // as free(NULL)
}

DK_EXPORT int32_t dk_mem_release(dk_mem_release_params *p) {
  DK_ENTER(p);
  auto *memory = handle_of<Memory>(p->mem);
  if (memory == nullptr) return DK_EINVAL;
  if (memory->kind != MemoryKind::kVirtual) return DK_EUNSUPPORTED;
  if (memory->released) return DK_ESTATE;
  const OnDevice on(memory->device);
  const cudaError_t error = await_users(on, memory);
  if (error != cudaSuccess) return device_failure(p, error);
  const CUresult result = give_back(memory);
  return result == CUDA_SUCCESS ? static_cast<int32_t>(DK_OK) : driver_failure(p, result);
}

namespace deepep {
namespace {

CUresult restored_handle(const dk_mem_restore_params *p, const Memory *memory, CUmemGenericAllocationHandle *handle) {
  const Driver *d = driver();
  if (!memory->owned)
    return d->MemImportFromShareableHandle(handle, reinterpret_cast<void *>(static_cast<intptr_t>(p->fd)),
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  const CUmemAllocationProp properties = allocation_properties(memory->device->ordinal);
  return d->MemCreate(handle, memory->bytes, &properties, 0);
}

}  // namespace
}  // namespace deepep

DK_EXPORT int32_t dk_mem_restore(dk_mem_restore_params *p) {
  DK_ENTER(p);
  auto *memory = handle_of<Memory>(p->mem);
  if (memory == nullptr) return DK_EINVAL;
  if (!memory->released) return DK_ESTATE;
  if (p->kind != static_cast<uint32_t>(memory->owned ? DK_SHARE_NONE : DK_SHARE_FD)) return DK_EUNSUPPORTED;
  const OnDevice on(memory->device);
  cudaError_t error = await_users(on, memory);
  if (error != cudaSuccess) return device_failure(p, error);
  CUmemGenericAllocationHandle handle = 0;
  CUresult result = restored_handle(p, memory, &handle);
  if (result != CUDA_SUCCESS) return driver_failure(p, result);
  result = take_back(memory, handle);
  if (result != CUDA_SUCCESS) {
    (void)driver()->MemRelease(handle);
    return driver_failure(p, result);
  }
  memory->released = false;
  if (memory->owned) error = zero(*memory);
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_host_register(dk_host_register_params *p) {
  DK_ENTER(p);
  auto *device = handle_of<Device>(p->device);
  if (device == nullptr || p->host == 0 || p->bytes == 0) return DK_EINVAL;
  const OnDevice on(device);
  cudaError_t error = on.error();
  if (error == cudaSuccess)
    error = cudaHostRegister(pointer<void>(p->host), p->bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaErrorHostMemoryAlreadyRegistered) {
    (void)cudaGetLastError();
    error = cudaSuccess;
  }
  void *address = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&address, pointer<void>(p->host), 0);
  if (error != cudaSuccess) return device_failure(p, error);
  p->address = handle_to(address);
  return DK_OK;
}

DK_EXPORT int32_t dk_host_unregister(dk_host_unregister_params *p) {
  DK_ENTER(p);
  auto *device = handle_of<Device>(p->device);
  if (device == nullptr) return DK_EINVAL;
  const OnDevice on(device);
  const cudaError_t error = cudaHostUnregister(pointer<void>(p->host));
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}
