// heap.cu - allocates the ranks' blocks from NVSHMEM's symmetric heap.
#include <new>

#include "network.h"

namespace deepep {
namespace {

constexpr size_t kAlignment = 4096;

cudaError_t zero(void *address, size_t bytes, const Device *device) {
  const cudaError_t error = cudaMemsetAsync(address, 0, bytes, device->service);
  return error == cudaSuccess ? cudaStreamSynchronize(device->service) : error;
}

}  // namespace

bool in_heap(uint64_t address, uint64_t bytes) {
  Network &net = network();
  const std::lock_guard<std::mutex> lock(net.mutex);
  auto block = net.blocks.upper_bound(address);
  if (block == net.blocks.begin()) return false;
  --block;
  const uint64_t offset = address - block->first;
  return bytes <= block->second && offset <= block->second - bytes;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_transport_alloc(dk_transport_alloc_params *p) {
  DK_ENTER(p);
  p->mem = p->address = p->out_bytes = 0;
  Network &net = network();
  if (p->attachment != handle_to(&net) || p->bytes == 0 || p->host_peer_blocks == 0) return DK_EINVAL;
  const std::lock_guard<std::mutex> lock(net.mutex);
  if (net.users == 0) return DK_ESTATE;
  const OnDevice on(&net.device);
  if (on.error() != cudaSuccess) return device_failure(p, on.error());
  const size_t bytes = align_up<size_t>(p->bytes, kAlignment);
  void *block = nvshmem_align(kAlignment, bytes);
  if (block == nullptr) return DK_ENOMEM;
  const cudaError_t error = zero(block, bytes, &net.device);
  if (error != cudaSuccess) {
    nvshmem_free(block);
    return device_failure(p, error);
  }
  auto *reach = pointer<uint64_t>(p->host_peer_blocks);
  for (int rank = 0; rank < net.num_ranks; ++rank)
    reach[rank] = handle_to(rank == net.rank ? block : nvshmem_ptr(block, rank));
  net.blocks[handle_to(block)] = bytes;
  p->mem = p->address = handle_to(block);
  p->out_bytes = bytes;
  return DK_OK;
}

DK_EXPORT int32_t dk_transport_free(dk_transport_free_params *p) {
  DK_ENTER(p);
  if (p->mem == 0) return DK_OK;  // as free(NULL)
  Network &net = network();
  const std::lock_guard<std::mutex> lock(net.mutex);
  if (net.blocks.erase(p->mem) == 0) return DK_EINVAL;
  const OnDevice on(&net.device);
  if (on.error() != cudaSuccess) return device_failure(p, on.error());
  nvshmem_free(pointer<void>(p->mem));
  return DK_OK;
}
