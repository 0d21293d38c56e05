// transport.cu - the interface's transport over NVSHMEM: each operation is a small kernel on the caller's stream.
// NVSHMEM's device functions wait without a limit: DK_TRANSPORT_NOWAIT is not supported, and timeout_ns has no effect.
#include "queue.cuh"

#include <new>
#include <vector>

#include "internode/layout.h"
#include "internode/low_latency/put.cuh"
#ifdef DEEPEP_TEST_WIRE
#include <dlfcn.h>

#include "internode/wire.cuh"
#endif
#include "network.h"

namespace deepep {
namespace {

constexpr int kThreads = 256;

// In device memory, for each peer and queue pair. Kernels count, so replays of graphs are counted too.
struct Counts {
  unsigned long long posted, completed, bytes, max_queued;
};

struct PutParams {
  Queue queue;
  int pe, how;  // how: NVSHMEM_SIGNAL_*, 0: none
  void *to;
  const void *from;
  uint64_t bytes, value;
  uint64_t *word;
  Counts *counts;
};

__global__ void __launch_bounds__(kThreads) put_kernel(const __grid_constant__ PutParams p) {
  if (static_cast<int>(blockIdx.x) != p.queue.block) return;  // see Queue: the block's index chooses the queue pair
  __shared__ bool in_flight;
  if (threadIdx.x == 0) in_flight = atomicAdd(&p.counts->posted, 0ull) != atomicAdd(&p.counts->completed, 0ull);
  __syncthreads();
  if (in_flight) fence(p.queue, p.pe);
  if (p.bytes != 0 && p.how != 0)
    put_signal(p.queue, p.pe, p.to, p.from, p.bytes, p.word, p.value, p.how);
  else if (p.bytes != 0)
    put(p.queue, p.pe, p.to, p.from, p.bytes);
  else
    signal(p.queue, p.pe, p.word, p.value, p.how);
  if (threadIdx.x != 0) return;
  const unsigned long long posted = atomicAdd(&p.counts->posted, 1ull) + 1;
  atomicAdd(&p.counts->bytes, p.bytes);
  atomicMax(&p.counts->max_queued, posted - atomicAdd(&p.counts->completed, 0ull));
}

// One block waits for the operations in flight on the queue pairs of `counts` and counts them as completed.
struct QuietParams {
  Queue queue;
  int pe, num_counts;
  Counts *counts;
};

__global__ void __launch_bounds__(kThreads) quiet_kernel(const __grid_constant__ QuietParams p) {
  if (static_cast<int>(blockIdx.x) != p.queue.block) return;
  for (int first = 0; first < p.num_counts; first += kThreads) {
    Counts *own = first + static_cast<int>(threadIdx.x) < p.num_counts ? p.counts + first + threadIdx.x : nullptr;
    const unsigned long long posted = own != nullptr ? atomicAdd(&own->posted, 0ull) : 0;
    __syncthreads();
    quiet(p.queue, p.pe);
    if (own != nullptr) atomicMax(&own->completed, posted);
    __syncthreads();
  }
}

struct Transport {
  Device *device = nullptr;
  uint8_t *block = nullptr;
  uint64_t bytes = 0;
  int num_qps = 0, num_peers = 0;
  std::vector<int> place;     // of each rank: its index among the peers, -1: it is none
  std::vector<uint8_t> lost;  // by rank
  std::vector<int> handles;   // of queue pairs, where NVSHMEM has them
  Counts *counts = nullptr;   // device, [peers][num_qps]

  bool reaches(int peer) const { return peer >= 0 && peer < static_cast<int>(place.size()) && place[peer] >= 0; }
  Counts *counts_of(int peer, int qp) const { return counts + static_cast<size_t>(place[peer]) * num_qps + qp; }
  Queue queue(int qp) const {
#if DEEPEP_QUEUE_HANDLES
    return Queue{static_cast<nvshmemx_qp_handle_t>(handles[qp]), qp};
#else
    return Queue{qp};
#endif
  }
  bool outside(uint64_t offset, uint64_t length) const { return length > bytes || offset > bytes - length; }
};

bool bad_peers(const dk_transport_open_params *p, std::vector<int> *place) {
  const auto *peers = pointer<const int32_t>(p->host_peers);
  for (int i = 0; i < p->num_peers; ++i) {
    if (peers[i] < 0 || peers[i] >= p->num_ranks || peers[i] == p->rank || (*place)[peers[i]] >= 0) return true;
    (*place)[peers[i]] = i;
  }
  return false;
}

// Also true if this rank's block does not come from the heap.
bool bad_open(const dk_transport_open_params *p, const Network &net) {
  if (p->device == 0 || p->rank != net.rank || p->num_ranks != net.num_ranks || p->num_qps < 1 || p->num_qps > 65536)
    return true;
  if (p->qp_depth < 1 || p->num_peers < 0 || p->num_peers >= p->num_ranks || p->host_blocks == 0 ||
      (p->num_peers > 0 && p->host_peers == 0))
    return true;
  const auto block = net.blocks.find(pointer<const uint64_t>(p->host_blocks)[p->rank]);
  return block == net.blocks.end() || p->block_bytes == 0 || p->block_bytes > block->second;
}

cudaError_t make_counts(Transport *transport) {
  const size_t bytes = sizeof(Counts) * static_cast<size_t>(transport->num_peers) * transport->num_qps;
  if (bytes == 0) return cudaSuccess;
  cudaError_t error = cudaMalloc(&transport->counts, bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(transport->counts, 0, bytes, transport->device->service);
  return error == cudaSuccess ? cudaStreamSynchronize(transport->device->service) : error;
}

void destroy(Transport *transport) {
  (void)cudaFree(transport->counts);
  (void)cudaGetLastError();
  delete transport;
}

// Without handles, or if NVSHMEM does not create that many, operations use its default queue pairs.
void make_queues(Transport *transport) {
#if DEEPEP_QUEUE_HANDLES
  nvshmemx_qp_handle_t *made = nullptr;
  transport->handles.assign(transport->num_qps, NVSHMEMX_QP_DEFAULT);
  if (nvshmemx_qp_create(transport->num_qps, &made) == 0 && made != nullptr)
    transport->handles.assign(made, made + transport->num_qps);
#else
  (void)transport;
#endif
}

bool bad_put(const Transport &transport, const dk_transport_put_params *p) {
  if (!transport.reaches(p->peer) || p->qp < 0 || p->qp >= transport.num_qps || p->signal_op > DK_SIGNAL_ADD)
    return true;
  if ((p->flags & ~static_cast<uint32_t>(DK_TRANSPORT_NOWAIT)) != 0) return true;
  // A NIC reads registered memory only, and that is the heap.
  if (p->bytes != 0 && (transport.outside(p->dst_offset, p->bytes) || !in_heap(p->src, p->bytes))) return true;
  if (p->signal_op == DK_SIGNAL_NONE) return p->bytes == 0;
  return p->signal_offset % 8 != 0 || transport.outside(p->signal_offset, 8);
}

template <class P>
bool bad_choice(const Transport &transport, const P *p) {
  return p->peer < -1 || p->qp < -1 || p->qp >= transport.num_qps || (p->peer >= 0 && !transport.reaches(p->peer));
}

// Calls act(peer, qp) for each queue pair that p->peer and p->qp name; -1 names all.
template <class P, class Act>
void for_each_queue(const Transport &transport, const P *p, Act act) {
  for (int peer = 0; peer < static_cast<int>(transport.place.size()); ++peer)
    for (int qp = 0; qp < transport.num_qps && transport.reaches(peer); ++qp)
      if ((p->peer < 0 || p->peer == peer) && (p->qp < 0 || p->qp == qp)) act(peer, qp);
}

PutParams put_params(const Transport &transport, const dk_transport_put_params *p) {
  PutParams k{};
  k.queue = transport.queue(p->qp);
  k.pe = p->peer;
  k.bytes = p->bytes;
  k.value = p->signal_value;
  k.how = p->signal_op == DK_SIGNAL_NONE ? 0 : p->signal_op == DK_SIGNAL_SET ? NVSHMEM_SIGNAL_SET : NVSHMEM_SIGNAL_ADD;
  k.to = transport.block + p->dst_offset;
  k.from = pointer<const void>(p->src);  // the peer's object is named by its address in this rank's block
  k.word = reinterpret_cast<uint64_t *>(transport.block + p->signal_offset);
  k.counts = transport.counts_of(p->peer, p->qp);
  return k;
}

#if DEEPEP_QUEUE_HANDLES
cudaError_t launch_quiet(const Transport &transport, const dk_transport_quiet_params *p) {
  cudaError_t error = cudaSuccess;
  for_each_queue(transport, p, [&](int peer, int qp) {
    const QuietParams k{transport.queue(qp), peer, 1, transport.counts_of(peer, qp)};
    quiet_kernel<<<qp + 1, kThreads, 0, stream_of(p->stream)>>>(k);
    if (error == cudaSuccess) error = cudaGetLastError();
  });
  return error;
}
#else
// Waits for all queue pairs, whichever p names.
cudaError_t launch_quiet(const Transport &transport, const dk_transport_quiet_params *p) {
  const QuietParams k{transport.queue(0), 0, transport.num_peers * transport.num_qps, transport.counts};
  quiet_kernel<<<1, kThreads, 0, stream_of(p->stream)>>>(k);
  return cudaGetLastError();
}
#endif

}  // namespace

bool internode::transport_reaches(uint64_t transport, int rank) {
  return handle_of<Transport>(transport)->reaches(rank);
}
#ifdef DEEPEP_PUTS  // for bench_ops
constexpr bool kPutsAlone = true;
#else
constexpr bool kPutsAlone = false;
#endif
bool internode::transport_stores(uint64_t transport) {
  const auto *it = handle_of<Transport>(transport);
#ifdef DEEPEP_TEST_WIRE
  if (dlsym(RTLD_DEFAULT, "testtransport_worker") != nullptr) return false;
#endif
  for (size_t rank = 0; rank < it->place.size(); ++rank)
    if (it->reaches(static_cast<int>(rank)) &&
        (kPutsAlone || nvshmem_ptr(it->block, static_cast<int>(rank)) == nullptr))
      return false;
  return true;
}
uint8_t *internode::transport_block(uint64_t transport, int rank) {
  return static_cast<uint8_t *>(nvshmem_ptr(handle_of<Transport>(transport)->block, rank));
}
const std::vector<int> &internode::transport_queues(uint64_t transport) {
  return handle_of<Transport>(transport)->handles;
}

#ifdef DEEPEP_TEST_WIRE
__device__ testtransport::WorkerState *internode::wire_worker = nullptr;

namespace {
cudaError_t find_worker() {
  using Find = void *(*)();
  const auto find = reinterpret_cast<Find>(dlsym(RTLD_DEFAULT, "testtransport_worker"));
  void *worker = find == nullptr ? nullptr : find();
  return cudaMemcpyToSymbol(internode::wire_worker, &worker, sizeof worker);
}
}  // namespace
#endif

__device__ void internode::put_by_warp(void *to, const void *from, uint32_t bytes, uint64_t *word, uint64_t value,
                                       int rank) {
  __threadfence_system();  // a NIC reads what other threads wrote
#ifdef DEEPEP_TEST_WIRE
  if (put_by_wire(rank, to, from, bytes, word, value)) return;
#endif
  nvshmemx_putmem_signal_nbi_warp(to, from, bytes, word, value, NVSHMEM_SIGNAL_SET, rank);
}
__device__ void internode::signal_by_thread(uint64_t *word, uint64_t value, int rank) {
#ifdef DEEPEP_TEST_WIRE
  if (wire_worker != nullptr) return testtransport::post_put(wire_worker, rank, nullptr, nullptr, 0, word, value);
#endif
  nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, rank);
}
__device__ void internode::get_by_thread(uint64_t *to, const uint64_t *from, int words, int rank) {
#ifdef DEEPEP_TEST_WIRE
  if (wire_worker != nullptr) return testtransport::post_get(wire_worker, rank, to, from, 8ull * words);
#endif
  nvshmem_uint64_get_nbi(to, from, static_cast<size_t>(words), rank);
}
__device__ void internode::quiet_by_thread() {
#ifdef DEEPEP_TEST_WIRE
  if (wire_worker != nullptr) testtransport::wait_for_posts(wire_worker);
#endif
  nvshmem_quiet();
}

cudaError_t load_transport_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, put_kernel);
#ifdef DEEPEP_TEST_WIRE
  if (error == cudaSuccess) error = find_worker();
#endif
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, quiet_kernel) : error;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_transport_open(dk_transport_open_params *p) {
  DK_ENTER(p);
  p->transport = 0;
  Network &net = network();
  const std::lock_guard<std::mutex> lock(net.mutex);
  if (net.users == 0) return DK_ESTATE;
  if (p->flags != 0) return DK_EUNSUPPORTED;  // DK_TRANSPORT_LATE is for software RDMA
  if (bad_open(p, net)) return DK_EINVAL;
  auto *transport = new (std::nothrow) Transport;
  if (transport == nullptr) return DK_ENOMEM;
  transport->place.assign(p->num_ranks, -1);
  transport->lost.assign(p->num_ranks, 0);
  if (bad_peers(p, &transport->place)) {
    delete transport;
    return DK_EINVAL;
  }
  transport->device = handle_of<Device>(p->device);
  transport->block = pointer<uint8_t>(pointer<const uint64_t>(p->host_blocks)[p->rank]);
  transport->bytes = p->block_bytes;
  transport->num_qps = p->num_qps;
  transport->num_peers = p->num_peers;
  const OnDevice on(transport->device);
  const cudaError_t error = on.error() == cudaSuccess ? make_counts(transport) : on.error();
  if (error != cudaSuccess) {
    destroy(transport);
    return device_failure(p, error);
  }
  make_queues(transport);
  p->transport = handle_to(transport);
  return DK_OK;
}

DK_EXPORT int32_t dk_transport_close(dk_transport_close_params *p) {
  DK_ENTER(p);
  auto *transport = handle_of<Transport>(p->transport);
  p->transport = 0;
  if (transport == nullptr) return DK_OK;
  const OnDevice on(transport->device);
  destroy(transport);
  return DK_OK;
}

DK_EXPORT int32_t dk_transport_put(dk_transport_put_params *p) {
  DK_ENTER(p);
  auto *transport = handle_of<Transport>(p->transport);
  if (transport == nullptr || bad_put(*transport, p)) return DK_EINVAL;
  if ((p->flags & DK_TRANSPORT_NOWAIT) != 0) return DK_EUNSUPPORTED;
  if (transport->lost[p->peer]) return DK_EPEERDEAD;
  const OnDevice on(transport->device);
  if (on.error() != cudaSuccess) return device_failure(p, on.error());
  put_kernel<<<p->qp + 1, p->bytes != 0 ? kThreads : kWarp, 0, stream_of(p->stream)>>>(put_params(*transport, p));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_transport_quiet(dk_transport_quiet_params *p) {
  DK_ENTER(p);
  auto *transport = handle_of<Transport>(p->transport);
  if (transport == nullptr || bad_choice(*transport, p)) return DK_EINVAL;
  // Without handles a quiet waits for every peer, and it never ends if one of them is lost.
  for (const uint8_t lost : transport->lost)
    if (lost) return DK_EPEERDEAD;
  const OnDevice on(transport->device);
  const cudaError_t error = on.error() == cudaSuccess ? launch_quiet(*transport, p) : on.error();
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_transport_query(dk_transport_query_params *p) {
  DK_ENTER(p);
  auto *transport = handle_of<Transport>(p->transport);
  if (transport == nullptr || bad_choice(*transport, p)) return DK_EINVAL;
  p->posted = p->completed = p->bytes = p->max_queued = 0;
  p->created = -1;  // NVSHMEM has no function for that
  p->lost = 0;
  const OnDevice on(transport->device);
  cudaError_t error = on.error();
  cudaStream_t service = transport->device->service;
  for_each_queue(*transport, p, [&](int peer, int qp) {
    Counts counts{};
    if (error == cudaSuccess)
      error = cudaMemcpyAsync(&counts, transport->counts_of(peer, qp), sizeof counts, cudaMemcpyDeviceToHost, service);
    if (error == cudaSuccess) error = cudaStreamSynchronize(service);
    p->posted += counts.posted;
    p->completed += counts.completed;
    p->bytes += counts.bytes;
    p->max_queued = max<uint64_t>(p->max_queued, counts.max_queued);
    if (transport->lost[peer]) p->lost = 1;
  });
  return error == cudaSuccess ? static_cast<int32_t>(DK_OK) : device_failure(p, error);
}

DK_EXPORT int32_t dk_transport_lose(dk_transport_lose_params *p) {
  DK_ENTER(p);
  auto *transport = handle_of<Transport>(p->transport);
  if (transport == nullptr || !transport->reaches(p->peer)) return DK_EINVAL;
  transport->lost[p->peer] = 1;
  return DK_OK;
}
