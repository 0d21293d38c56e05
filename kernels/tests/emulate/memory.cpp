// memory.cpp - memory of emulated devices: anonymous files that the driver's functions map; they can be exported to
// other processes, and stay as long as a process maps them. And registered memory of the host.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "gpu.h"

namespace emulate {
namespace {

constexpr size_t kGranularity = 2u << 20;

struct File {
  int descriptor;
  int users;
};
std::mutex lock;
std::set<File *> files;
std::map<uintptr_t, File *> mapped;  // by address
std::map<const void *, size_t> registered;

CUmemGenericAllocationHandle keep(int descriptor) {
  auto *file = new File{descriptor, 1};
  const std::lock_guard<std::mutex> guard(lock);
  files.insert(file);
  return reinterpret_cast<CUmemGenericAllocationHandle>(file);
}
File *find(CUmemGenericAllocationHandle handle) {  // lock held
  const auto found = files.find(reinterpret_cast<File *>(handle));
  return found == files.end() ? nullptr : *found;
}
void *address_of(CUdeviceptr address) { return reinterpret_cast<void *>(address); }

CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *, unsigned long long) {
  if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  const int descriptor = memfd_create("emulated device", MFD_CLOEXEC);
  if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    close(descriptor);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = keep(descriptor);
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard<std::mutex> guard(lock);
  File *file = find(handle);
  if (file == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (--file->users > 0) return CUDA_SUCCESS;
  close(file->descriptor);  // mappings stay
  files.erase(file);
  for (auto at = mapped.begin(); at != mapped.end();) at = at->second == file ? mapped.erase(at) : std::next(at);
  delete file;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
  const size_t to = std::max<size_t>(alignment, 4096);
  void *memory = mmap(nullptr, bytes + to, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = reinterpret_cast<uintptr_t>(memory), start = (first + to - 1) / to * to;
  if (start > first) munmap(memory, start - first);
  if (first + to > start) munmap(reinterpret_cast<void *>(start + bytes), first + to - start);
  *address = start;
  return CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, size_t bytes) {
  return munmap(address_of(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const std::lock_guard<std::mutex> guard(lock);
  File *file = find(handle);
  struct stat about{};
  if (file == nullptr || fstat(file->descriptor, &about) != 0 || offset + bytes > static_cast<size_t>(about.st_size))
    return CUDA_ERROR_INVALID_VALUE;
  void *at =
      mmap(address_of(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file->descriptor, static_cast<off_t>(offset));
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  mapped[address] = file;
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, size_t bytes) {
  const std::lock_guard<std::mutex> guard(lock);
  mapped.erase(mapped.lower_bound(address), mapped.lower_bound(address + bytes));
  void *at =
      mmap(address_of(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *, size_t) {
  return mprotect(address_of(address), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult granularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult export_file(void *descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                     unsigned long long) {
  const std::lock_guard<std::mutex> guard(lock);
  const File *file = find(handle);
  const int copy = file == nullptr ? -1 : fcntl(file->descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int *>(descriptor) = copy;
  return CUDA_SUCCESS;
}
CUresult import_file(CUmemGenericAllocationHandle *handle, void *descriptor, CUmemAllocationHandleType) {
  const int given = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  if (fcntl(given, F_GET_SEALS) < 0) return CUDA_ERROR_INVALID_VALUE;  // memory of another kind, or none
  const int copy = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = keep(copy);
  return CUDA_SUCCESS;
}
CUresult retain(CUmemGenericAllocationHandle *handle, void *address) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = mapped.find(reinterpret_cast<uintptr_t>(address));
  if (found == mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  ++found->second->users;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found->second);
  return CUDA_SUCCESS;
}
CUresult error_string(CUresult, const char **text) {
  *text = "an error of the emulated driver";
  return CUDA_SUCCESS;
}

template <class F>
void *entry(F *function) {
  return reinterpret_cast<void *>(function);
}

}  // namespace
}  // namespace emulate

using namespace emulate;

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  static const std::map<std::string, void *> functions = {{"cuMemCreate", entry(create)},
                                                          {"cuMemRelease", entry(release)},
                                                          {"cuMemAddressReserve", entry(reserve)},
                                                          {"cuMemAddressFree", entry(unreserve)},
                                                          {"cuMemMap", entry(map)},
                                                          {"cuMemUnmap", entry(unmap)},
                                                          {"cuMemSetAccess", entry(set_access)},
                                                          {"cuMemGetAllocationGranularity", entry(granularity)},
                                                          {"cuMemExportToShareableHandle", entry(export_file)},
                                                          {"cuMemImportFromShareableHandle", entry(import_file)},
                                                          {"cuMemRetainAllocationHandle", entry(retain)},
                                                          {"cuGetErrorString", entry(error_string)}};
  const auto found = functions.find(name);
  *function = found == functions.end() ? nullptr : found->second;
  *result = found == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- The runtime's own ----

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  const size_t whole = (bytes + 511) / 512 * 512;
  *memory = bytes > 8ull << 30 ? nullptr : aligned_alloc(512, whole);
  if (*memory == nullptr) return failed(cudaErrorMemoryAllocation);
  memset(*memory, 0xb7, whole);  // memory is not cleared
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
  if (memory == nullptr) return cudaSuccess;
  Gpu::get().synchronize_device(current_device());
  free(memory);
  return cudaSuccess;
}
// Large pieces of files become holes: most of what is cleared is never read, and pages that no process touches cost
// nothing.
static void clear(void *memory, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto first = reinterpret_cast<uintptr_t>(memory), end = first + bytes,
             from = (first + kPage - 1) / kPage * kPage, to = end / kPage * kPage;
  if (to <= from + 16 * kPage || madvise(reinterpret_cast<void *>(from), to - from, MADV_REMOVE) != 0) {
    memset(memory, 0, bytes);
    return;
  }
  memset(memory, 0, from - first);
  memset(reinterpret_cast<void *>(to), 0, end - to);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
  return failed(Gpu::get().enqueue(
      stream, {[=] { value == 0 ? clear(at, bytes) : void(memset(at, value, bytes)); }, nullptr, nullptr}));
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = *total_bytes = 8ull << 30;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcCloseMemHandle(void *) { return failed(cudaErrorNotSupported); }

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned) {
  const std::lock_guard<std::mutex> guard(lock);
  return failed(registered.emplace(memory, bytes).second ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void *memory) {
  const std::lock_guard<std::mutex> guard(lock);
  return failed(registered.erase(memory) == 1 ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **address, void *memory, unsigned) {
  *address = memory;
  return cudaSuccess;
}
