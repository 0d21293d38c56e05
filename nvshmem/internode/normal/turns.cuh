// turns.cuh - libdeepep_nvshmem.so: streams that all warps of a role serve, a turn at a time, so that the slower of two
// warps serves less.
#pragma once
#include "internode/normal/common.cuh"

namespace deepep::internode {

// In device memory, zeroed before a call. words[0]: turns taken, above them the streams that are closed; then of each
// stream how far it is, in whatever way its turns keep that.
struct TurnQueue {
  static constexpr uint64_t kClosed = ~0ull, kServed = ~1ull;  // kServed: a warp has it
  uint64_t *words;
  int count;

  __device__ unsigned long long *word(int at) const { return reinterpret_cast<unsigned long long *>(words + at); }
};

// What a warp has taken: the stream, and how far it is. stream -1: another warp has it, or it is closed.
struct StreamTurn {
  int stream;
  uint64_t at;
};

// The next turn; `closed`: of all streams. Whole warp.
__device__ inline StreamTurn take_turn(const TurnQueue &queue, int &closed) {
  unsigned long long turn = 0, at = 0;
  if (lane_id() == 0) turn = atomicAdd(queue.word(0), 1ull);
  turn = __shfl_sync(kAllLanes, turn, 0);
  closed = static_cast<int>(turn >> 32);
  if (closed == queue.count) return {-1, 0};
  const int first = static_cast<int>(static_cast<uint32_t>(turn) % static_cast<uint32_t>(queue.count));
  int stream = first;
  for (int tried = 0; closed > 0 && tried < queue.count; tried += kWarp) {  // the first that is open
    const int mine = (first + tried + lane_id()) % queue.count;
    const uint32_t open = __ballot_sync(kAllLanes, ptx::ld_relaxed_gpu(queue.words + 1 + mine) < TurnQueue::kServed);
    stream = (first + tried + __ffs(static_cast<int>(open)) - 1) % queue.count;
    if (open != 0) break;
    if (tried + kWarp >= queue.count) return {-1, 0};
  }
  if (lane_id() == 0) {
    at = atomicExch(queue.word(1 + stream), TurnQueue::kServed);
    if (at == TurnQueue::kClosed) atomicExch(queue.word(1 + stream), TurnQueue::kClosed);
    ptx::fence_acq_rel_gpu();  // what the turns before it have written
  }
  at = __shfl_sync(kAllLanes, at, 0);
  return {at < TurnQueue::kServed ? stream : -1, at};
}
__device__ inline void end_turn(const TurnQueue &queue, const StreamTurn &turn, bool closes) {
  __syncwarp();
  if (lane_id() == 0) {
    ptx::fence_acq_rel_gpu();
    atomicExch(queue.word(1 + turn.stream), closes ? TurnQueue::kClosed : turn.at);
    if (closes) atomicAdd(queue.word(0), 1ull << 32);
  }
  __syncwarp();
}

// As serve_streams(), of all the queue's streams; advance(stream, at, blocked) leaves in `at` how far the stream is. A
// warp gives up when time is over and as many turns as there are streams have moved none for it. help: turns of a warp
// that only helps, as long as each of them moves; -1: it stays until all streams are closed.
template <class Advance>
__device__ inline void serve_in_turn(const Session &s, Role role, const TurnQueue &queue, int help, Advance advance) {
  InRole timed(role, queue.count > 0);
  __syncwarp();  // as serve_streams()
  uint64_t start = 0;
  uint32_t polls = 0, reason = 0;
  int left = 0;  // turns to try, once there is a reason
  BlockedStream missing{-1, 0, 0};
  for (; help != 0; help -= help > 0) {
    int closed = 0;
    StreamTurn turn = take_turn(queue, closed);
    if (closed == queue.count) return;
    Outcome outcome = kBlocked;
    if (turn.stream >= 0) {
      BlockedStream blocked{-1, 0, 0};
      outcome = advance(turn.stream, turn.at, blocked);
      end_turn(queue, turn, outcome == kDone);
      if (outcome == kBlocked) missing = blocked;
    }
    if (outcome != kBlocked) {
      timed.moved();
      polls = reason = 0;
      missing.peer = -1;
      if (__any_sync(kAllLanes, lane_id() == 0 && has_failed(s))) return;
      continue;
    }
    if (help > 0) return;
    if (reason != 0 && missing.peer >= 0 && --left <= 0) return report_blocked(s, reason, missing, start);
    if (polls++ == 0) start = ptx::global_timer_ns();
    if (polls % kPollsPerLook != 0) continue;
    if (__any_sync(kAllLanes, lane_id() == 0 && has_failed(s))) return;
    if (reason != 0) continue;
    if (lane_id() == 0) reason = reason_to_leave(s, missing.peer, start, polls, 1);
    reason = __shfl_sync(kAllLanes, reason, 0);
    left = queue.count;
  }
}

}  // namespace deepep::internode
