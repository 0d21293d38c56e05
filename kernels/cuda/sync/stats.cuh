// stats.cuh - the statistics page: counted in device memory by the last block of a kernel, stored out to host memory.
#pragma once
#include "cuda/sync/wait.cuh"

namespace deepep {

__device__ inline int duration_bucket(uint64_t ns) {
  const uint64_t units = ns / 512;
  if (units == 0) return 0;
  const int power = 63 - __clzll(static_cast<long long>(units));
  const int quarter = static_cast<int>(ns >> (power + 7) & 3); // the two bits below the leading one of ns / 512
  return least(4 * power + quarter, DK_HIST_BUCKETS - 1);
}

template <class T> __device__ inline void publish(T *shadow, T *page, T value) {
  *shadow = value;
  *static_cast<volatile T *>(page) = value;
}

__device__ inline void record_trace(const Session &s, uint64_t start, uint64_t duration) {
  Scratch *scratch = s.team.scratch;
  if (s.team.trace_len == 0) return;
  auto *ring = reinterpret_cast<dk_trace_record *>(reinterpret_cast<uint8_t *>(s.team.stats) + s.team.trace_offset);
  volatile dk_trace_record *record = ring + scratch->trace_next % s.team.trace_len;
  record->call = s.call, record->start_ns = start, record->duration_ns = duration, record->op = s.op, record->phase = s.phase;
  publish(&scratch->trace_next, &s.team.stats->trace_next, scratch->trace_next + 1);
}

// By one thread. `bytes` and `wait_ns` are sums over peers; a call counts when its last half ends.
__device__ inline void record_call(const Session &s, uint64_t now, uint64_t before_ns, bool last_half, bool failed, uint64_t bytes,
                                   uint64_t wait_ns) {
  dk_op_stats *shadow = &s.team.scratch->ops[s.op], *page = &s.team.stats->ops[s.op];
  const uint64_t start = s.team.scratch->start_ns, duration = now - start, total = duration + before_ns;
  const uint64_t start_on_host = start + s.team.clock_offset_ns;
  if (bytes != 0) publish(&shadow->bytes, &page->bytes, shadow->bytes + bytes);
  if (wait_ns != 0) publish(&shadow->wait_ns, &page->wait_ns, shadow->wait_ns + wait_ns);
  publish(&shadow->total_ns, &page->total_ns, shadow->total_ns + duration);
  if (last_half) {
    const int bucket = duration_bucket(total);
    if (failed) publish(&shadow->errors, &page->errors, shadow->errors + 1);
    if (total > shadow->max_ns) publish(&shadow->max_ns, &page->max_ns, total);
    publish(&shadow->last_start_ns, &page->last_start_ns, start_on_host);
    publish(&shadow->last_ns, &page->last_ns, total);
    publish(&shadow->hist[bucket], &page->hist[bucket], shadow->hist[bucket] + 1);
    publish(&shadow->calls, &page->calls, shadow->calls + 1);
  }
  record_trace(s, start_on_host, duration);
}

// By the whole last block, after its outputs. Takes what the kernel left in sent_bytes and wait_ns.
__device__ inline void record_kernel(const Session &s, uint64_t before_ns, bool last_half, bool failed) {
  __shared__ unsigned long long sums[2];
  Scratch *scratch = s.team.scratch;
  const int num_ranks = s.team.num_ranks;
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const uint64_t bytes = scratch->sent_bytes[r], wait = scratch->wait_ns[r];
    scratch->sent_bytes[r] = 0, scratch->wait_ns[r] = 0;
    if (s.team.stats == nullptr || (bytes | wait) == 0) continue;
    auto *page = reinterpret_cast<uint64_t *>(reinterpret_cast<uint8_t *>(s.team.stats) + s.team.peers_offset);
    const int at = s.op * num_ranks + r;
    if (bytes != 0) publish(&scratch->peer_bytes[s.op][r], page + at, scratch->peer_bytes[s.op][r] + bytes);
    if (wait != 0) publish(&scratch->peer_wait_ns[s.op][r], page + DK_NUM_OPS * num_ranks + at, scratch->peer_wait_ns[s.op][r] + wait);
    atomicAdd(&sums[0], bytes);
    atomicMax(&sums[1], wait); // ranks are waited for side by side
  }
  __syncthreads();
  if (threadIdx.x == 0 && s.team.stats != nullptr)
    record_call(s, ptx::global_timer_ns(), before_ns, last_half, failed, sums[0], sums[1]);
  if (threadIdx.x == 0 && last_half) publish(&scratch->progress, &s.team.status->progress, scratch->progress + 1);
}

}  // namespace deepep
