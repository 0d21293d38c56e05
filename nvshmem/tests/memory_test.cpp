// memory_test.cpp - how the plugin shares memory with other processes, over a stand-in for the driver whose memory is a
// memfd. Last line: "N passed, N failed".
#include "testtransport/memory.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>

using namespace testtransport;

namespace {

constexpr size_t kBytes = 1 << 20;
char *heap;        // stands for this process's GPU memory: an allocation of kBytes
int heap_fd = -1;  // of the memfd
bool exportable = true;

CUresult retain(CUmemGenericAllocationHandle *out, void *address) {
  if (address != heap) return CUDA_ERROR_INVALID_VALUE;
  *out = static_cast<CUmemGenericAllocationHandle>(heap_fd);
  return CUDA_SUCCESS;
}
CUresult export_handle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
  const int fd = dup(static_cast<int>(handle));
  memcpy(out, &fd, sizeof fd);
  return exportable ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
CUresult import_handle(CUmemGenericAllocationHandle *out, void *fd, CUmemAllocationHandleType) {
  *out = static_cast<CUmemGenericAllocationHandle>(dup(static_cast<int>(reinterpret_cast<intptr_t>(fd))));
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr *out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *out = reinterpret_cast<CUdeviceptr>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  return CUDA_SUCCESS;
}
CUresult release_address(CUdeviceptr address, size_t bytes) {
  return munmap(reinterpret_cast<void *>(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  void *got = mmap(reinterpret_cast<void *>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                   static_cast<int>(handle), static_cast<off_t>(offset));
  return got == MAP_FAILED ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }
CUresult release(CUmemGenericAllocationHandle handle) {
  static_cast<int>(handle) != heap_fd &&close(static_cast<int>(handle));
  return CUDA_SUCCESS;
}
CUresult range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  const auto start = reinterpret_cast<CUdeviceptr>(heap);
  if (address < start || address >= start + kBytes) return CUDA_ERROR_INVALID_VALUE;
  *base = start;
  *bytes = kBytes;
  return CUDA_SUCCESS;
}

int failures = 0, passed = 0;
void verdict(const char *name, bool good) {
  if (!good) printf("failed: %s\n", name);
  good ? ++passed : ++failures;
}

// Runs the check in another process and returns its verdict.
template <class F>
bool elsewhere(F function) {
  const pid_t pid = fork();
  if (pid == 0) _exit(function() ? 0 : 1);
  int how = 0;
  return waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0;
}

// Two processes request each other's memory at the same moment, repeatedly.
struct Both {
  std::atomic<int> come, bad;
  MemoryHandle handle[2];
};
bool each_other() {
  constexpr int kRounds = 100;
  auto *both =
      static_cast<Both *>(mmap(nullptr, sizeof(Both), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  auto meet = [both](int times) {
    for (++both->come; both->come < 2 * times && both->bad == 0;) {
    }
    return both->bad == 0;
  };
  auto one = [=](int self) {
    for (int round = 0; round < kRounds; ++round) {
      if (share_memory(&both->handle[self], heap, kBytes, false) != 0 || !meet(2 * round + 1)) {
        ++both->bad;
        return false;
      }
      if (!prepare_memory(both->handle[1 - self])) {
        ++both->bad;
        return false;
      }
      if (!meet(2 * round + 2)) return false;
    }
    return true;
  };
  const pid_t child = fork();
  if (child == 0) _exit(one(1) ? 0 : 1);
  const bool other = elsewhere([&] { return one(0); });
  int how = 0;
  return waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0 && other;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  const struct {
    const char *name;
    void *function;
  } all[] = {{"cuMemRetainAllocationHandle", reinterpret_cast<void *>(retain)},
             {"cuMemExportToShareableHandle", reinterpret_cast<void *>(export_handle)},
             {"cuMemImportFromShareableHandle", reinterpret_cast<void *>(import_handle)},
             {"cuMemAddressReserve", reinterpret_cast<void *>(reserve)},
             {"cuMemAddressFree", reinterpret_cast<void *>(release_address)},
             {"cuMemMap", reinterpret_cast<void *>(map)},
             {"cuMemUnmap", reinterpret_cast<void *>(unmap)},
             {"cuMemSetAccess", reinterpret_cast<void *>(set_access)},
             {"cuMemRelease", reinterpret_cast<void *>(release)},
             {"cuMemGetAddressRange", reinterpret_cast<void *>(range)}};
  for (const auto &one : all)
    if (strcmp(one.name, name) == 0) {
      *out = one.function;
      *result = cudaDriverEntryPointSuccess;
      return cudaSuccess;
    }
  return cudaErrorInvalidValue;
}
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) { return cudaErrorInvalidValue; }
cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned) { return cudaErrorInvalidValue; }
cudaError_t cudaIpcCloseMemHandle(void *) { return cudaSuccess; }
}

int main() {
  heap_fd = memfd_create("heap", MFD_CLOEXEC);
  if (ftruncate(heap_fd, kBytes) != 0) return 1;
  heap = static_cast<char *>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, heap_fd, 0));
  verdict("two processes request from each other",
          each_other());  // before this process listens: children have names of their own
  MemoryHandle part{}, local{}, again{};
  char *const registered = heap + 8192;  // a part of the allocation
  verdict("registered",
          share_memory(&part, registered, 65536, false) == 0 && share_memory(&local, registered, 64, true) == 0);
  verdict("memory of this process keeps its address", reach_memory({registered + 5, 0, &part}) == registered + 5);
  verdict("another process maps it", elsewhere([&] {
                                       if (!prepare_memory(part)) return false;
                                       auto *there = static_cast<char *>(reach_memory({registered + 100, 0, &part}));
                                       if (there == nullptr || there == registered + 100) return false;
                                       *there = 42;
                                       return reach_memory({registered + 200, 0, &part}) == there + 100;  // mapped once
                                     }) &&
                                         registered[100] == 42);
  verdict("local memory is not shared",
          prepare_memory(local) && elsewhere([&] { return reach_memory({registered, 0, &local}) == nullptr; }));
  MemoryHandle strange{};
  verdict("a foreign handle is refused",
          reach_memory({registered, 0, &strange}) == nullptr && reach_memory({registered, 0, nullptr}) == nullptr);
  verdict("unregistered memory cannot be mapped",
          unshare_memory(&part) == 0 && elsewhere([&] { return !prepare_memory(part); }));
  char outside = 0;
  verdict("host memory is refused",
          share_memory(&again, &outside, 1, false) != 0 && share_memory(&again, &outside, 1, true) == 0);
  exportable = false;
  verdict("memory without an export is refused", share_memory(&again, registered, 64, false) != 0);
  exportable = true;
  forget_memory();
  verdict("a second start", share_memory(&again, heap, kBytes, false) == 0 && elsewhere([&] {
                              auto *there = static_cast<char *>(reach_memory({heap + kBytes - 1, 0, &again}));
                              return there != nullptr && (*there = 7) == 7;
                            }) &&
                                heap[kBytes - 1] == 7);
  forget_memory();
  verdict("no answer after the end", elsewhere([&] { return !prepare_memory(again); }));
  printf("%d passed, %d failed\n", passed, failures);
  return failures != 0;
}
