// stats.cuh - statistics. The last block of a kernel counts in device memory alone: stores across PCIe would delay the
// kernel's end by microseconds. A later kernel of the team copies the counters to the statistics page while it waits
// for its peers, or stats_kernel does so when the host asks (dk_stats_flush). Counters only grow, so that storing one
// twice does no harm.
#pragma once
#include "cuda/sync/wait.cuh"

namespace deepep {

// Words of dk_op_stats before its histogram: calls, errors, total_ns, max_ns, wait_ns, bytes, last_start_ns, last_ns.
constexpr int kOpCounters = 8, kWaitCounter = 4, kBytesCounter = 5;
static_assert(sizeof(dk_op_stats) == 8 * (kOpCounters + DK_HIST_BUCKETS), "eight counters and the histogram");
static_assert(sizeof(dk_trace_record) == 32, "four words");

__device__ inline int duration_bucket(uint64_t ns) {
  const uint64_t units = ns / 512;
  if (units == 0) return 0;
  const int power = 63 - __clzll(static_cast<long long>(units));
  const int quarter = static_cast<int>(ns >> (power + 7) & 3);  // the two bits below the leading one of ns / 512
  return min(4 * power + quarter, DK_HIST_BUCKETS - 1);
}

__device__ inline uint64_t load_fresh(const void *word) { return *static_cast<const volatile uint64_t *>(word); }
__device__ inline void store_out(void *word, uint64_t value) { *static_cast<volatile uint64_t *>(word) = value; }

// Words of the page: bytes to each peer, then waits for each peer.
__device__ inline uint64_t *page_peers(const TeamView &team) {
  return reinterpret_cast<uint64_t *>(reinterpret_cast<uint8_t *>(team.stats) + team.peers_offset);
}
// A record of the trace, a word a lane, goes to its place in the page; once all are there, their number.
__device__ inline uint64_t load_record(const TeamView &team, int which, int lane) {
  return lane < 4 ? load_fresh(reinterpret_cast<const uint64_t *>(&team.scratch->waiting[which].record) + lane) : 0;
}
__device__ inline void store_trace(const TeamView &team, int lane, uint64_t record, uint64_t index) {
  if (team.trace_len == 0) return;
  uint8_t *ring = reinterpret_cast<uint8_t *>(team.stats) + team.trace_offset;
  if (lane < 4) store_out(ring + index % team.trace_len * sizeof(dk_trace_record) + 8 * lane, record);
}
__device__ inline void store_num_records(const TeamView &team, int lane, uint64_t next) {
  if (team.trace_len == 0) return;
  __syncwarp();
  if (lane == 0) ptx::st_release_sys(&team.stats->trace_next, next);
}

// By one warp: copies an operation's counters to the page.
__device__ inline void publish_counters(const TeamView &team, uint64_t op, uint64_t bucket) {
  const Scratch *scratch = team.scratch;
  const int lane = lane_id();
  uint64_t *counters = reinterpret_cast<uint64_t *>(&team.stats->ops[op]);
  uint64_t *bytes = page_peers(team) + op * team.num_ranks, *waits = bytes + DK_NUM_OPS * team.num_ranks;
  const bool counts = lane < kOpCounters, fills = lane == kOpCounters && bucket < DK_HIST_BUCKETS;
  const auto *from = reinterpret_cast<const uint64_t *>(&scratch->ops[op]);
  const uint64_t at = counts ? lane : kOpCounters + bucket, count = counts || fills ? load_fresh(from + at) : 0;
  for (int r = lane; r < team.num_ranks; r += kWarp) {
    const uint64_t sent = load_fresh(&scratch->peer_bytes[op][r]), waited = load_fresh(&scratch->peer_wait_ns[op][r]);
    store_out(bytes + r, sent);
    store_out(waits + r, waited);
  }
  if (counts || fills) store_out(counters + at, count);
}
// By one warp that has nothing else to do: copies what the kernels before counted to the page, where `at_least` so many
// have. All loads are in flight together, and so are those that depend on the first: the kernel may end later for this
// warp.
__device__ inline void publish_newest(const TeamView &team, uint64_t at_least = 1) {
  Scratch *scratch = team.scratch;
  const int lane = lane_id();
  const uint64_t num = load_fresh(&scratch->num_waiting), progress = load_fresh(&scratch->progress);
  if (num < at_least) return;
  if (lane == 0) store_out(&team.status->progress, progress);
#pragma unroll 1
  for (uint64_t i = 0; team.stats != nullptr && i < num; ++i) {
    const WaitingCount *count = scratch->waiting + i;
    const uint64_t record = load_record(team, static_cast<int>(i), lane), index = load_fresh(&count->index);
    publish_counters(team, load_fresh(&count->op), load_fresh(&count->bucket));
    store_trace(team, lane, record, index);
  }
  if (team.stats != nullptr) store_num_records(team, lane, load_fresh(&scratch->trace_next));
  __syncwarp();
  if (lane == 0) scratch->num_waiting = 0;
}
// Called by all warps of a block; the last one copies.
__device__ inline void publish_newest_by_last_warp(const TeamView &team, uint64_t at_least = 1) {
  if (warp_id() == static_cast<int>(blockDim.x) / kWarp - 1) publish_newest(team, at_least);
}

// What counting reads of the scratch, loaded together by the last warp of a block: each load by itself would cost the
// latency of memory. Of the calls before: lane l has counter l.
struct CountLoads {
  uint64_t counter, before, waiting, next, progress;
};
__device__ __forceinline__ CountLoads load_counts(const Session &s, const uint64_t *half) {
  const Scratch *scratch = s.team.scratch;
  const int lane = lane_id();
  CountLoads loads;
  loads.counter = lane < kOpCounters ? load_fresh(reinterpret_cast<const uint64_t *>(&scratch->ops[s.op]) + lane) : 0;
  loads.before = half != nullptr ? load_fresh(half) : 0;
  loads.waiting = load_fresh(&scratch->num_waiting);
  loads.next = load_fresh(&scratch->trace_next);
  loads.progress = load_fresh(&scratch->progress);
  return loads;
}
// Of this call: lane l has peer l.
struct PeerLoads {
  uint64_t sent, waited;
};
__device__ __forceinline__ PeerLoads load_peers(const Session &s) {
  const int lane = lane_id();
  if (lane >= s.team.num_ranks) return {0, 0};
  return {load_fresh(&s.team.scratch->sent_bytes[lane]), load_fresh(&s.team.scratch->wait_ns[lane])};
}

__device__ __forceinline__ void add_to(uint64_t *counter, uint64_t more) {
  atomicAdd(reinterpret_cast<unsigned long long *>(counter), static_cast<unsigned long long>(more));
}
// Payload on the wire toward a rank.
__device__ __forceinline__ void count_bytes(const Session &s, int rank, uint64_t bytes) {
  add_to(&s.team.scratch->peer_bytes[s.op][rank], bytes);
  add_to(reinterpret_cast<uint64_t *>(&s.team.scratch->ops[s.op]) + kBytesCounter, bytes);
}

// Whole warp: moves sent_bytes and wait_ns of the kernel to the counters of each peer and of the operation. That one
// gets the longest wait, for a kernel waits for all ranks at the same time.
__device__ inline void count_peers(const Session &s, const PeerLoads &loads) {
  Scratch *scratch = s.team.scratch;
  uint64_t wait = 0;
  for (int r = lane_id(); r < s.team.num_ranks; r += kWarp) {
    const bool first = r < kWarp;
    const uint64_t sent = first ? loads.sent : scratch->sent_bytes[r],
                   waited = first ? loads.waited : scratch->wait_ns[r];
    if (sent != 0) {  // taken, not cleared: what another block adds meanwhile stays
      count_bytes(s, r, sent);
      add_to(&scratch->sent_bytes[r], 0 - sent);
    }
    if (waited != 0) {
      add_to(&scratch->peer_wait_ns[s.op][r], waited);
      scratch->wait_ns[r] = 0;
    }
    wait = max(wait, waited);
  }
  for (int step = kWarp / 2; step > 0; step /= 2)
    wait = max(wait, static_cast<uint64_t>(__shfl_xor_sync(kAllLanes, wait, step)));
  if (lane_id() == 0 && wait != 0) add_to(reinterpret_cast<uint64_t *>(&scratch->ops[s.op]) + kWaitCounter, wait);
}

// By the last warp of the last block, of a kernel that began at `start`; each lane has one counter. Where a call is
// several kernels, `half` holds the time of those before the last. Waits and bytes are counted by themselves.
__device__ inline void record_loaded(const Session &s, const CountLoads &loads, uint64_t start, uint64_t *half,
                                     bool last_half, bool failed) {
  Scratch *scratch = s.team.scratch;
  const int lane = lane_id();
  auto *op = reinterpret_cast<uint64_t *>(&scratch->ops[s.op]);
  const uint64_t now = ptx::global_timer_ns(), before = loads.before, counter = loads.counter;
  // No kernel did so for long. Not where the team has failed: its buffer may be gone, and the page with it.
  const bool full = loads.waiting >= kWaitingCounts;
  if (full && !failed) publish_newest(s.team);
  __syncwarp();
  const uint64_t waiting = full ? 0 : loads.waiting;
  const uint64_t duration = now - start, total = duration + before, begun = start + s.team.clock_offset_ns;
  const int bucket = last_half ? duration_bucket(total) : DK_HIST_BUCKETS;
  const uint64_t grown = lane == 0   ? counter + (last_half ? 1 : 0)
                         : lane == 1 ? counter + (last_half && failed ? 1 : 0)
                         : lane == 2 ? counter + duration
                         : lane == 3 ? (last_half ? max(counter, total) : counter)
                         : lane == 6 ? (last_half ? begun : counter)
                                     : (last_half ? total : counter);
  if (lane < kOpCounters && lane != kWaitCounter && lane != kBytesCounter) op[lane] = grown;
  if (lane == 8 && last_half) add_to(op + kOpCounters + bucket, 1);
  if (lane == 9) {
    scratch->waiting[waiting] = {
        s.op, static_cast<uint64_t>(bucket), loads.next, {s.call, begun, duration, s.op, s.phase}};
    scratch->num_waiting = waiting + 1;
  }
  if (lane == 10) scratch->trace_next = loads.next + 1;
  if (lane == 11 && last_half) {
    scratch->progress = loads.progress + 1;
    if (failed) store_out(&s.team.status->progress, loads.progress + 1);  // maybe a replay, which the host asks about
  }
  if (lane == 12 && half != nullptr) *half = last_half ? 0 : duration;
}

// By the last block: its last warp loads and counts.
__device__ inline void record_kernel(const Session &s, uint64_t *half, bool last_half, bool failed) {
  if (warp_id() != static_cast<int>(blockDim.x) / kWarp - 1) return;
  const PeerLoads peers = load_peers(s);
  const CountLoads loads = load_counts(s, half);
  const uint64_t start = load_fresh(&s.team.scratch->start_ns);
  count_peers(s, peers);
  record_loaded(s, loads, start, half, last_half, failed);
}

}  // namespace deepep
