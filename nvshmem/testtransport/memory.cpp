// memory.cpp - shares GPU memory between processes: virtual memory by a file descriptor, which each process sends over
// an abstract Unix socket on request; other memory by cudaIpc.
#include "memory.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "log.h"

namespace testtransport {
namespace {

constexpr uint32_t kMagic = 0x44505454;
static_assert(sizeof(Shared) <= sizeof(MemoryHandle) && sizeof(cudaIpcMemHandle_t) == 64, "handles have room");

struct Driver {
  decltype(&cuMemRetainAllocationHandle) retain;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemRelease) release;
  decltype(&cuMemGetAddressRange) range;
};

template <class F>
bool find(F &function, const char *name) {
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  void *address = nullptr;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result);
  function = reinterpret_cast<F>(address);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess && address != nullptr;
}

const Driver *driver() {
  static Driver d{};
  static const bool good =
      find(d.retain, "cuMemRetainAllocationHandle") && find(d.export_handle, "cuMemExportToShareableHandle") &&
      find(d.import_handle, "cuMemImportFromShareableHandle") && find(d.reserve, "cuMemAddressReserve") &&
      find(d.free, "cuMemAddressFree") && find(d.map, "cuMemMap") && find(d.unmap, "cuMemUnmap") &&
      find(d.set_access, "cuMemSetAccess") && find(d.release, "cuMemRelease") && find(d.range, "cuMemGetAddressRange");
  return good ? &d : nullptr;
}

struct Mapping {
  uint64_t address;
  size_t bytes;
  uint32_t kind;
};

// Two locks: a process must answer requests while its own request waits for an answer.
std::mutex giving;                    // of exported memory
std::map<uint64_t, int> descriptors;  // by serial
uint64_t next_serial = 1;
int listener = -1;
pthread_t server;
std::mutex taking;                                       // of imported memory
std::map<std::pair<int64_t, uint64_t>, Mapping> mapped;  // by pid and serial

socklen_t name_of(int64_t pid, sockaddr_un *name) {
  memset(name, 0, sizeof *name);
  name->sun_family = AF_UNIX;
  const int length =
      snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "deepep-testtransport-%lld", static_cast<long long>(pid));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

// Sends one byte, with the descriptor if there is one.
void send_descriptor(int to, int fd) {
  char byte = fd >= 0 ? 1 : 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
  }
  (void)sendmsg(to, &message, MSG_NOSIGNAL);
}

int receive_descriptor(int from) {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || byte != 1) return -1;
  const cmsghdr *head = CMSG_FIRSTHDR(&message);
  if (head == nullptr || head->cmsg_type != SCM_RIGHTS) return -1;
  int fd = -1;
  memcpy(&fd, CMSG_DATA(head), sizeof fd);
  return fd;
}

// A thread: answers requests, each a serial, with the descriptor, until the listener is shut down.
void *serve(void *argument) {
  const int own = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  for (int peer; (peer = accept4(own, nullptr, nullptr, SOCK_CLOEXEC)) >= 0; close(peer)) {
    uint64_t serial = 0;
    if (recv(peer, &serial, sizeof serial, MSG_WAITALL) != sizeof serial) continue;
    const std::lock_guard<std::mutex> lock(giving);
    const auto found = descriptors.find(serial);
    send_descriptor(peer, found == descriptors.end() ? -1 : found->second);
  }
  close(own);
  return nullptr;
}

bool listen_once() {
  if (listener >= 0) return true;
  sockaddr_un name;
  const socklen_t length = name_of(getpid(), &name);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0 && bind(fd, reinterpret_cast<sockaddr *>(&name), length) == 0 && listen(fd, 64) == 0 &&
      pthread_create(&server, nullptr, serve, reinterpret_cast<void *>(static_cast<intptr_t>(fd))) == 0) {
    listener = fd;
    return true;
  }
  if (fd >= 0) close(fd);
  return false;
}

int fetch_descriptor(const Shared &shared) {
  sockaddr_un name;
  const socklen_t length = name_of(shared.pid, &name);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit{5, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  int received = -1;
  if (fd >= 0 && connect(fd, reinterpret_cast<sockaddr *>(&name), length) == 0 &&
      send(fd, &shared.serial, sizeof shared.serial, MSG_NOSIGNAL) == sizeof shared.serial)
    received = receive_descriptor(fd);
  if (fd >= 0) close(fd);
  return received;
}

bool map_descriptor(const Shared &shared, int fd, Mapping *out) {
  const Driver *d = driver();
  CUmemGenericAllocationHandle allocation = 0;
  int device = 0;
  if (d == nullptr || cudaGetDevice(&device) != cudaSuccess) return false;
  if (d->import_handle(&allocation, reinterpret_cast<void *>(static_cast<intptr_t>(fd)),
                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS)
    return false;
  CUdeviceptr address = 0;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const bool reserved = d->reserve(&address, shared.bytes, 0, 0, 0) == CUDA_SUCCESS;
  const bool placed = reserved && d->map(address, shared.bytes, 0, allocation, 0) == CUDA_SUCCESS;
  const bool good = placed && d->set_access(address, shared.bytes, &access, 1) == CUDA_SUCCESS;
  (void)d->release(allocation);  // the mapping keeps the memory
  if (!good && placed) (void)d->unmap(address, shared.bytes);
  if (!good && reserved) (void)d->free(address, shared.bytes);
  *out = {address, shared.bytes, kDescriptor};
  return good;
}

bool map_shared(const Shared &shared, Mapping *out) {
  if (shared.kind == kDescriptor) {
    const int fd = fetch_descriptor(shared);
    if (fd < 0) return false;
    const bool good = map_descriptor(shared, fd, out);
    close(fd);
    return good;
  }
  if (shared.kind != kRuntime) return false;
  cudaIpcMemHandle_t handle;
  memcpy(&handle, shared.runtime_handle, sizeof handle);
  void *address = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess);
  (void)cudaGetLastError();
  *out = {reinterpret_cast<uint64_t>(address), shared.bytes, kRuntime};
  return error == cudaSuccess;
}

const Mapping *map_once(const Shared &shared) {
  const auto key = std::make_pair(shared.pid, shared.serial);
  const auto found = mapped.find(key);
  if (found != mapped.end()) return &found->second;
  Mapping mapping{};
  if (map_shared(shared, &mapping)) return &mapped.emplace(key, mapping).first->second;
  complain("memory of process %lld cannot be mapped", static_cast<long long>(shared.pid));
  return nullptr;
}

// How other processes can import the allocation that begins at `base`.
bool offer(Shared *shared, CUdeviceptr base) {
  const Driver *d = driver();
  CUmemGenericAllocationHandle allocation = 0;
  int fd = -1;
  if (d->retain(&allocation, reinterpret_cast<void *>(base)) == CUDA_SUCCESS) {
    const CUresult result = d->export_handle(&fd, allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    (void)d->release(allocation);
    if (result != CUDA_SUCCESS || !listen_once()) return false;
    descriptors[shared->serial] = fd;
    shared->kind = kDescriptor;
    return true;
  }
  cudaIpcMemHandle_t handle;
  const cudaError_t error = cudaIpcGetMemHandle(&handle, reinterpret_cast<void *>(base));
  (void)cudaGetLastError();
  memcpy(shared->runtime_handle, &handle, sizeof handle);
  shared->kind = kRuntime;
  return error == cudaSuccess;
}

}  // namespace

int share_memory(MemoryHandle *handle, void *address, size_t bytes, bool local_only) {
  memset(handle, 0, sizeof *handle);
  Shared shared{};
  shared.magic = kMagic;
  shared.pid = getpid();
  shared.address = reinterpret_cast<uint64_t>(address);
  shared.bytes = bytes;
  const std::lock_guard<std::mutex> lock(giving);
  shared.serial = next_serial++;
  if (!local_only) {
    CUdeviceptr base = 0;
    size_t whole = 0;
    if (driver() == nullptr || driver()->range(&base, &whole, shared.address) != CUDA_SUCCESS)
      return complain("%p is no GPU memory: only the heap on the GPU can be shared", address);
    shared.offset = shared.address - base;
    shared.bytes = whole;
    if (!offer(&shared, base))
      return complain("%p, %zu bytes, can be handed to others neither as a descriptor nor by cudaIpc", address, bytes);
  }
  memcpy(handle, &shared, sizeof shared);
  return 0;
}

int unshare_memory(MemoryHandle *handle) {
  Shared shared;
  memcpy(&shared, handle, sizeof shared);
  const std::lock_guard<std::mutex> lock(giving);
  const auto found = descriptors.find(shared.serial);
  if (shared.magic != kMagic || shared.pid != getpid() || found == descriptors.end()) return 0;
  close(found->second);
  descriptors.erase(found);
  return 0;
}

void *reach_memory(const Place &place) {
  Shared shared{};
  if (place.handle != nullptr) memcpy(&shared, place.handle, sizeof shared);
  if (shared.magic != kMagic) {
    complain("%p has no handle of this transport", place.address);
    return nullptr;
  }
  if (shared.pid == getpid()) return place.address;
  const std::lock_guard<std::mutex> lock(taking);
  const Mapping *mapping = map_once(shared);
  if (mapping == nullptr) return nullptr;
  return reinterpret_cast<void *>(mapping->address + shared.offset +
                                  (reinterpret_cast<uint64_t>(place.address) - shared.address));
}

bool prepare_memory(const MemoryHandle &handle) {
  Shared shared;
  memcpy(&shared, &handle, sizeof shared);
  if (shared.magic != kMagic || shared.pid == getpid() || shared.kind == kLocalOnly) return true;  // not of this plugin
  const std::lock_guard<std::mutex> lock(taking);
  return map_once(shared) != nullptr;
}

void *start_of(const MemoryHandle &handle) {
  Shared shared;
  memcpy(&shared, &handle, sizeof shared);
  if (shared.magic != kMagic) return nullptr;
  if (shared.pid == getpid()) return reinterpret_cast<void *>(shared.address);
  const std::lock_guard<std::mutex> lock(taking);
  const auto found = mapped.find({shared.pid, shared.serial});
  return found == mapped.end() ? nullptr : reinterpret_cast<void *>(found->second.address + shared.offset);
}

void forget_memory() {
  {
    const std::lock_guard<std::mutex> lock(taking);
    for (const auto &[key, mapping] : mapped) {
      if (mapping.kind == kRuntime) {
        (void)cudaIpcCloseMemHandle(reinterpret_cast<void *>(mapping.address));
        continue;
      }
      (void)driver()->unmap(mapping.address, mapping.bytes);
      (void)driver()->free(mapping.address, mapping.bytes);
    }
    mapped.clear();
  }
  std::unique_lock<std::mutex> lock(giving);
  for (const auto &[serial, fd] : descriptors) close(fd);
  descriptors.clear();
  const int fd = listener;
  listener = -1;
  lock.unlock();  // the server may be waiting for it
  if (fd < 0) return;
  (void)shutdown(fd, SHUT_RDWR);
  pthread_join(server, nullptr);  // it closes the listener
}

}  // namespace testtransport
