// The statistics page. Other processes read its counters while they change, so every store is atomic; counters only
// grow.
#include "cpu/team/op.h"

namespace dk {
namespace {

void set(uint64_t &field, uint64_t value) { __atomic_store_n(&field, value, __ATOMIC_RELAXED); }
void add(uint64_t &field, uint64_t value) { set(field, field + value); }

// Four buckets for each doubling, from 512 ns.
unsigned bucket_of(uint64_t ns) {
  if (ns < 512) return 0;
  unsigned power = 63u - static_cast<unsigned>(__builtin_clzll(ns));
  unsigned bucket = 4 * (power - 9) + static_cast<unsigned>(ns >> (power - 2) & 3);
  return min(bucket, DK_HIST_BUCKETS - 1u);
}

uint64_t *peer_array(dk_stats_page &page, uint32_t which, uint32_t op) {
  uint64_t *arrays = reinterpret_cast<uint64_t *>(reinterpret_cast<char *>(&page) + page.peers_offset);
  return arrays + (which * uint64_t{DK_NUM_OPS} + op) * static_cast<uint64_t>(page.num_ranks);
}

void append(dk_stats_page &page, const dk_trace_record &record) {
  if (page.trace_len == 0) return;
  dk_trace_record *ring = reinterpret_cast<dk_trace_record *>(reinterpret_cast<char *>(&page) + page.trace_offset);
  dk_trace_record &to = ring[page.trace_next % page.trace_len];
  set(to.call, record.call);
  set(to.start_ns, record.start_ns);
  set(to.duration_ns, record.duration_ns);
  __atomic_store_n(&to.op, record.op, __ATOMIC_RELAXED);
  __atomic_store_n(&to.phase, record.phase, __ATOMIC_RELAXED);
  __atomic_store_n(&page.trace_next, page.trace_next + 1, __ATOMIC_RELEASE);
}

}  // namespace

void record_call(dk_stats_page &page, const dk_trace_record &trace, uint64_t total_ns, uint64_t wait_ns, uint64_t bytes,
                 bool failed, bool counts) {
  append(page, trace);
  if (!counts) return;  // a send half: the receive half counts the whole call
  dk_op_stats &stats = page.ops[trace.op];
  add(stats.total_ns, total_ns);
  if (total_ns > stats.max_ns) set(stats.max_ns, total_ns);
  add(stats.wait_ns, wait_ns);
  add(stats.bytes, bytes);
  set(stats.last_start_ns, trace.start_ns);
  set(stats.last_ns, total_ns);
  add(stats.hist[bucket_of(total_ns)], 1);
  if (failed) add(stats.errors, 1);
  __atomic_store_n(&stats.calls, stats.calls + 1, __ATOMIC_RELEASE);
}

void add_peer_bytes(dk_stats_page &page, uint32_t op, int peer, uint64_t bytes) {
  add(peer_array(page, 0, op)[peer], bytes);
}
void add_peer_wait(dk_stats_page &page, uint32_t op, int peer, uint64_t ns) { add(peer_array(page, 1, op)[peer], ns); }

}  // namespace dk
