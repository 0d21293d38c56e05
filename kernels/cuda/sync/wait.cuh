// wait.cuh - every wait of every kernel, and the record that a wait leaves when it ends early. Nothing traps: a kernel
// whose wait ended goes on to its end without waiting again. Waits for another rank have a time limit and name that
// rank; those inside a block (spin_in_block) need neither.
#pragma once
#include <cstddef>

#include "cuda/common/ptx.cuh"
#include "cuda/layout/team.cuh"

namespace deepep {

constexpr uint32_t kPollsPerLook = 64;         // polls of memory between looks at the clock and at the team's own state
constexpr uint32_t kPollsPerHostLook = 2048;   // and at the host's status block, which lies across PCIe
constexpr uint32_t kLeftBefore = 0x7fffffffu;  // another thread of this rank has failed, and has reported it
// Set beside the reason to leave, where the count of polls was: one register holds both.
constexpr uint32_t kLeaving = 0x80000000u;

__device__ inline bool has_failed(const Session &s) { return ptx::ld_relaxed_gpu(&s.team.scratch->sticky) != 0; }

// `sticky` and, above it, `failed`.
__device__ __forceinline__ uint64_t load_failures(const Session &s) {
  static_assert(offsetof(Scratch, failed) == offsetof(Scratch, sticky) + 4 && offsetof(Scratch, sticky) % 8 == 0,
                "one word");
  return ptx::ld_relaxed_gpu(reinterpret_cast<const uint64_t *>(&s.team.scratch->sticky));
}
__device__ __forceinline__ bool had_failed(uint64_t failures) { return failures >> 32 != 0; }

// The last block of the running kernel has to look for a failure or a refusal. A block that says so leaves after that.
__device__ __forceinline__ void let_last_block_look(const Session &s) {
  ptx::atomic_or_relaxed_gpu(&s.team.scratch->exits, kExitLooks);
}

// A record for the host, complete before its code is seen.
__device__ __forceinline__ void store_record(const Session &s, dk_failure *to, uint32_t code, int peer, uint32_t field,
                                             int64_t expected, int64_t seen, uint64_t waited_ns) {
  volatile dk_failure *record = to;
  record->op = s.op;
  record->phase = s.phase;
  record->rank = s.team.rank;
  record->peer = peer;
  record->field = field;
  record->call = s.call;
  record->expected = expected;
  record->seen = seen;
  record->waited_ns = waited_ns;
  ptx::st_release_sys(&to->code, code);
}

// The first failure of a team goes into host memory. Later ones are dropped.
__device__ __noinline__ inline void report_failure(const Session &s, uint32_t code, int peer, uint32_t field,
                                                   int64_t expected, int64_t seen, uint64_t waited_ns) {
  const bool first = code != kLeftBefore && atomicCAS(&s.team.scratch->sticky, 0u, code) == 0;
  let_last_block_look(s);
  if (!first) return;
  dk_status *status = s.team.status;
  store_record(s, &status->failure, code, peer, field, expected, seen, waited_ns);
  ptx::st_release_sys(&status->sticky, code);
}

// What a call's wrong contents mean for its outputs: they hold what the call made of the right ones, or nothing.
enum Refusing : uint32_t { kNoted = 1, kVoid = 2 };

// The outputs hold nothing, and no record says why.
__device__ __forceinline__ void refuse_quietly(const Session &s) {
  atomicExch(&s.team.scratch->refusing, static_cast<uint32_t>(kVoid));
  let_last_block_look(s);
}

// The first refusal of a kernel, into a free entry of host memory; the team goes on.
__device__ __noinline__ inline void report_refusal(const Session &s, Refusing what, uint32_t code, int peer,
                                                   uint32_t field, int64_t expected, int64_t seen) {
  const bool first = atomicCAS(&s.team.scratch->refusing, 0u, static_cast<uint32_t>(what)) == 0;
  let_last_block_look(s);
  if (!first) {
    if (what == kVoid) atomicExch(&s.team.scratch->refusing, static_cast<uint32_t>(kVoid));
    return;
  }
  for (dk_failure &entry : s.team.status->refusals) {
    if (ptx::ld_relaxed_sys(&entry.code) != 0) continue;
    store_record(s, &entry, code, peer, field, expected, seen, 0);
    ptx::st_release_sys(&s.team.status->refused, 1);
    return;
  }
}

// Returns the code with which a wait for `peer` that began at `start` must end now, 0 to go on. After a code the caller
// polls once more: the peer may have sent the data and left between the last poll and this look.
__device__ __noinline__ inline uint32_t reason_to_leave(const Session &s, int peer, uint64_t start, uint32_t polls,
                                                        int patience) {
  if (has_failed(s)) return kLeftBefore;
  const uint64_t limit_ns = s.timeout_ns * ((s.team.flags & DK_TEAM_SHRINK) != 0 ? patience : 1);
  if (ptx::global_timer_ns() - start > limit_ns) return DK_ETIMEOUT;
  if (polls % kPollsPerHostLook != 0) return 0;
  uint32_t reason = ptx::ld_relaxed_sys(&s.team.status->abort_word);
  if (reason == 0 && peer >= 0 && *static_cast<volatile uint8_t *>(&s.team.status->dead[peer]) != 0)
    reason = DK_EPEERDEAD;
  if (reason != 0) __threadfence_system();  // the next poll sees all that was sent before
  return reason;
}

// The rank that a failure record names: the engine's where the engine ended the wait, else the one that was waited for.
__device__ inline int culprit(const Session &s, uint32_t code, int peer) {
  const bool aborted = code != DK_ETIMEOUT && ptx::ld_relaxed_sys(&s.team.status->abort_word) != 0;
  return aborted || code == DK_EABORTED ? *static_cast<volatile int32_t *>(&s.team.status->abort_rank) : peer;
}

// The loop of both waits below: polls until poll() is true, and now and then asks look(polls) for a reason to leave.
// Returns 0, or the reason. `start` stays 0 where the first poll was enough.
template <class Poll, class Look>
__device__ __forceinline__ uint32_t poll_until(uint64_t &start, Poll poll, Look look) {
  start = 0;
  if (poll()) return 0;
  start = ptx::global_timer_ns();
  for (uint32_t polls = 1; !poll();) {
    if ((polls & kLeaving) != 0) return polls & ~kLeaving;
    const uint32_t reason = polls % kPollsPerLook == 0 ? look(polls) : 0;
    polls = reason != 0 ? reason | kLeaving : (polls + 1) & ~kLeaving;
  }
  return 0;
}

// One thread polls until poll(seen) is true. Returns 0, or the code with which the wait ended. `seen`: the value that
// the last poll read.
template <class Poll>
__device__ __forceinline__ uint32_t wait_until(const Session &s, int peer, int64_t &seen, uint64_t &waited_ns,
                                               Poll poll) {
  uint64_t start;
  const uint32_t code = poll_until(
      start, [&] { return poll(seen); }, [&](uint32_t polls) { return reason_to_leave(s, peer, start, polls, 1); });
  waited_ns = start == 0 ? 0 : ptx::global_timer_ns() - start;
  return code;
}

// Likewise; a wait that ends early is reported as the team's failure.
template <class Poll>
__device__ __forceinline__ bool wait_or_fail(const Session &s, int peer, int64_t expected, uint64_t &waited_ns,
                                             Poll poll) {
  int64_t seen = 0;
  const uint32_t code = wait_until(s, peer, seen, waited_ns, poll);
  if (code == 0) return true;
  report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, expected, seen, waited_ns);
  return false;
}

// A whole warp polls; poll() returns the same in all lanes. missing() returns the rank that its lane still waits for,
// or -1: the first such lane looks for reasons to leave, and `peer` is its rank. Returns 0 or the code, in all lanes.
// kPatience: times the time limit, in a team that shrinks; goes_on(code, rank), in all lanes: whether poll() goes on
// without that rank now.
template <int kPatience, class Poll, class Missing, class GoesOn>
__device__ __forceinline__ uint32_t warp_wait_until(const Session &s, int &peer, uint64_t &waited_ns, Poll poll,
                                                    Missing missing, GoesOn goes_on) {
  uint64_t start;
  const uint32_t code = poll_until(start, poll, [&](uint32_t polls) {
    const int mine = missing();
    const uint32_t waiting = __ballot_sync(kAllLanes, mine >= 0);
    const int first = waiting == 0 ? 0 : __ffs(static_cast<int>(waiting)) - 1;
    uint32_t reason = lane_id() == first ? reason_to_leave(s, mine, start, polls, kPatience) : 0;
    reason = __shfl_sync(kAllLanes, reason, first);
    if (reason == 0) return reason;
    // What is missing may have come, and the peer left, since the last poll: a kernel may be stopped for long between
    // two looks. So it takes a second look with the same answer, after more polls.
    const int suspect = peer;
    peer = __shfl_sync(kAllLanes, mine, first);
    if (peer != suspect) return 0u;
    if (!goes_on(reason, peer)) return reason;
    peer = -1;
    start = ptx::global_timer_ns();
    return 0u;
  });
  waited_ns = code == 0 ? 0 : ptx::global_timer_ns() - start;
  return code;
}
template <class Poll, class Missing>
__device__ __forceinline__ uint32_t warp_wait_until(const Session &s, int &peer, uint64_t &waited_ns, Poll poll,
                                                    Missing missing) {
  return warp_wait_until<1>(s, peer, waited_ns, poll, missing, [](uint32_t, int) { return false; });
}
template <class Poll, class Missing>
__device__ __forceinline__ bool warp_wait_or_fail(const Session &s, int64_t expected, Poll poll, Missing missing) {
  int peer = -1;
  uint64_t waited = 0;
  const uint32_t code = warp_wait_until(s, peer, waited, poll, missing);
  if (code == 0) return true;
  if (lane_id() == 0) report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, expected, 0, waited);
  __syncwarp();
  return false;
}

// A wait for other warps of the block or for its copies, which wait for no rank themselves: it needs no deadline.
template <class Poll>
__device__ __forceinline__ void spin_in_block(Poll poll) {
  while (!poll()) {
  }
}

}  // namespace deepep
