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

// One counter of an operation by one thread each: side by side, since every load of a counter costs the latency of memory.
__device__ inline void count_field(const Session &s, uint64_t dk_op_stats::*field, uint64_t value, bool add) {
  uint64_t *shadow = &(s.team.scratch->ops[s.op].*field);
  publish(shadow, &(s.team.stats->ops[s.op].*field), add ? *shadow + value : value);
}

// What the call was, for the threads that write it down.
struct CallRecord { uint64_t start, duration, total, bytes, wait_ns; bool last_half, failed; };

__device__ inline void record_field(const Session &s, const CallRecord &call, int which) {
  const bool last = call.last_half;
  if (which == 0 && last) count_field(s, &dk_op_stats::calls, 1, true);
  if (which == 1 && last && call.failed) count_field(s, &dk_op_stats::errors, 1, true);
  if (which == 2) count_field(s, &dk_op_stats::total_ns, call.duration, true);
  if (which == 3 && last && call.total > s.team.scratch->ops[s.op].max_ns) count_field(s, &dk_op_stats::max_ns, call.total, false);
  if (which == 4 && call.wait_ns != 0) count_field(s, &dk_op_stats::wait_ns, call.wait_ns, true);
  if (which == 5 && call.bytes != 0) count_field(s, &dk_op_stats::bytes, call.bytes, true);
  if (which == 6 && last) count_field(s, &dk_op_stats::last_start_ns, call.start, false);
  if (which == 7 && last) count_field(s, &dk_op_stats::last_ns, call.total, false);
  if (which == 8 && last) {
    const int bucket = duration_bucket(call.total);
    uint64_t *shadow = &s.team.scratch->ops[s.op].hist[bucket];
    publish(shadow, &s.team.stats->ops[s.op].hist[bucket], *shadow + 1);
  }
  if (which == 9 && s.team.trace_len != 0) {
    const uint64_t next = s.team.scratch->trace_next;
    auto *ring = reinterpret_cast<dk_trace_record *>(reinterpret_cast<uint8_t *>(s.team.stats) + s.team.trace_offset);
    volatile dk_trace_record *record = ring + next % s.team.trace_len;
    record->call = s.call, record->start_ns = call.start, record->duration_ns = call.duration, record->op = s.op, record->phase = s.phase;
    publish(&s.team.scratch->trace_next, &s.team.stats->trace_next, next + 1);
  }
}

// By the whole last block, after its outputs. Takes what the kernel left in sent_bytes and wait_ns. Where a call is several
// kernels, `half` keeps the time of those before the last.
__device__ inline void record_kernel(const Session &s, uint64_t *half, bool last_half, bool failed) {
  __shared__ unsigned long long sums[2];
  __shared__ uint64_t now;
  Scratch *scratch = s.team.scratch;
  const int num_ranks = s.team.num_ranks;
  const uint64_t start = scratch->start_ns;
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) now = ptx::global_timer_ns();
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const uint64_t bytes = scratch->sent_bytes[r], wait = scratch->wait_ns[r];
    const uint64_t all_bytes = scratch->peer_bytes[s.op][r] + bytes, all_wait = scratch->peer_wait_ns[s.op][r] + wait;
    scratch->sent_bytes[r] = 0, scratch->wait_ns[r] = 0;
    if (s.team.stats == nullptr || (bytes | wait) == 0) continue;
    auto *page = reinterpret_cast<uint64_t *>(reinterpret_cast<uint8_t *>(s.team.stats) + s.team.peers_offset);
    const int at = s.op * num_ranks + r;
    if (bytes != 0) publish(&scratch->peer_bytes[s.op][r], page + at, all_bytes);
    if (wait != 0) publish(&scratch->peer_wait_ns[s.op][r], page + DK_NUM_OPS * num_ranks + at, all_wait);
    atomicAdd(&sums[0], bytes);
    atomicMax(&sums[1], wait); // ranks are waited for side by side
  }
  __syncthreads();
  const int which = static_cast<int>(blockDim.x) - 1 - static_cast<int>(threadIdx.x);
  if (s.team.stats != nullptr && which < 10) {
    const uint64_t duration = now - start, before = half != nullptr ? *half : 0;
    record_field(s, {start + s.team.clock_offset_ns, duration, duration + before, sums[0], sums[1], last_half, failed}, which);
  }
  if (which == 10 && last_half) publish(&scratch->progress, &s.team.status->progress, scratch->progress + 1);
  __syncthreads();
  if (threadIdx.x == 0 && half != nullptr) *half = last_half ? 0 : now - start;
}

}  // namespace deepep
