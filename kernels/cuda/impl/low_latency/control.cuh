// control.cuh - control messages of a low-latency call: the control block sends and checks them, and each block finds
// the peer's call that belongs to this rank's call.
#pragma once
#include <cstddef>

#include "cuda/impl/low_latency/common.cuh"

namespace deepep {

// The message with which a call begins: a line of tagged words for each rank, which needs no fence, since each word
// shows by itself that it has arrived. The number of the call is where other operations have it.
struct LowLatencyHandshakeMessage {
  uint64_t hidden_bytes, op, flags, num_experts, num_topk, max_tokens, epoch, dispatch;
};
static_assert(sizeof(LowLatencyHandshakeMessage) == sizeof(HandshakeMessage) &&
                  offsetof(LowLatencyHandshakeMessage, epoch) == offsetof(HandshakeMessage, epoch),
              "the same line");
template <class P>
__device__ inline uint64_t *low_latency_line(const P &p, uint8_t *block, uint64_t epoch, int source) {
  const TeamView &team = p.session.team;
  return reinterpret_cast<uint64_t *>(block + team.control + team.at.low_latency_handshake) +
         sizeof(HandshakeMessage) / 8 * (epoch % kLowLatencyHandshakeCopies * team.num_ranks + source);
}
__device__ inline uint32_t format_of(const LowLatencyDispatchParams &p) { return static_cast<uint32_t>(p.format); }
__device__ inline uint32_t format_of(const LowLatencyCombineParams &) { return 0; }
template <class P>
__device__ inline HandshakeMessage low_latency_handshake(const P &p) {
  HandshakeMessage mine = low_latency_message(p, p.num_max_tokens, format_of(p));
  if (p.session.op == DK_OP_LL_DISPATCH)
    mine.flags |= (p.topk_weights() != nullptr ? kHandshakeWeights : 0) | (p.num_tokens == 0 ? kHandshakeSilent : 0);
  return mine;
}
constexpr uint32_t kSecondSlot = 1u << 31;  // beside the operation
__device__ inline void store_message(uint64_t *line, const HandshakeMessage &mine, const LowLatencyCall &call) {
  const uint32_t tag = static_cast<uint32_t>(call.epoch);
  ptx::st_relaxed_sys_pair(line, tagged(tag, static_cast<uint32_t>(mine.hidden_bytes)),
                           tagged(tag, mine.op | (call.slot() != 0 ? kSecondSlot : 0)));
  ptx::st_relaxed_sys_pair(line + 2, tagged(tag, mine.flags), tagged(tag, mine.num_experts));
  ptx::st_relaxed_sys_pair(line + 4, tagged(tag, mine.num_topk), tagged(tag, mine.max_tokens));
  ptx::st_relaxed_sys_pair(line + 6, call.epoch, tagged(tag, static_cast<uint32_t>(call.dispatch)));
}
// False: not all of it has arrived. `seen`: the number of the call that the line has.
__device__ inline bool load_message(const uint64_t *line, uint64_t epoch, HandshakeMessage &theirs, int64_t &seen) {
  uint64_t word[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) ptx::ld_relaxed_sys_pair(line + i, word[i], word[i + 1]);
  seen = static_cast<int64_t>(word[6]);
  bool all = word[6] == epoch;
#pragma unroll
  for (int i = 0; i < 6; ++i) all &= has_tag(word[i], static_cast<uint32_t>(epoch));
  theirs.hidden_bytes = static_cast<uint32_t>(word[0]);
  theirs.op = static_cast<uint32_t>(word[1]) & ~kSecondSlot;
  theirs.flags = static_cast<uint32_t>(word[2]);
  theirs.num_experts = static_cast<int32_t>(word[3]);
  theirs.num_topk = static_cast<int32_t>(word[4]);
  theirs.max_tokens = static_cast<int32_t>(word[5]);
  return all;
}

// What the last warp of the control block loads with the rest: lane r's calls whose rows of rank r were taken.
struct EarlyControl {
  uint64_t consumed[kLowLatencySlots];
};
template <class P>
__device__ __forceinline__ EarlyControl load_control(const P &p) {
  const TeamView &team = p.session.team;
  const int r = lane_id();
  if (!is_control_block() || !is_last_warp() || r >= team.num_ranks) return {};
  return {{load_fresh(&team.scratch->consumed[0][r]), load_fresh(&team.scratch->consumed[1][r])}};
}
// The last warp of the control block writes to every rank which slots are empty here and, when sending, this call's
// message.
template <class P>
__device__ inline void post_low_latency(const P &p, const LowLatencyCall &call, uint8_t *const *peers,
                                        const EarlyControl &early) {
  const TeamView &team = p.session.team;
  if (!is_last_warp()) return;  // the others go ahead
  ptx::fence_acq_rel_sys();     // earlier kernels' emptying of slots is visible before the credits below
#pragma unroll 1
  for (int r = lane_id(); r < team.num_ranks; r += kWarp) {
    if (is_masked(p.session, r)) continue;
    uint8_t *block = peers[r];
    const bool loaded = r < kWarp;
    const uint64_t given_up = given_up_by(team, r);
    for (int slot = 0; slot < kLowLatencySlots; ++slot)
      ptx::st_relaxed_sys(credit(team, block, slot, team.rank),
                          max(loaded ? early.consumed[slot] : team.scratch->consumed[slot][r], given_up));
    if (p.sends()) store_message(low_latency_line(p, block, call.epoch, team.rank), low_latency_handshake(p), call);
  }
}

// From how many waiting counts on a sending call copies them to the statistics page, while its rows are on their way. A
// receive half finds its rows there and does not copy; neither does dispatch's send half, whose rows are out sooner, as
// long as a combine may come first.
template <class P>
__device__ __forceinline__ uint64_t counts_to_publish(const P &p) {
  return p.receives() || p.session.op == DK_OP_LL_COMBINE ? 1 : kWaitingCounts / 2;
}

// What every thread loads before anything else, all in flight together: each load by itself would cost the latency of
// memory. Nothing here may use a loaded value.
struct EarlyStart {
  uint64_t epoch, dispatch;  // of the newest call, or of the ticket
  uint64_t failures;         // the first thread's
  uint32_t unsettled;        // likewise
  uint64_t begun_ns;         // likewise, of block 0
  uint8_t *peer;             // thread r's: the block of rank r
};
template <class P>
__device__ __forceinline__ EarlyStart load_start(const P &p) {
  const TeamView &team = p.session.team;
  Scratch *scratch = team.scratch;
  EarlyStart start{};
  if (blockIdx.x == 0 && threadIdx.x == 0) start.begun_ns = ptx::global_timer_ns();
  start.epoch = ptx::ld_relaxed_gpu(p.sends() ? &scratch->low_latency_epoch : &scratch->tickets[p.ticket].epoch);
  start.dispatch =
      ptx::ld_relaxed_gpu(p.sends() ? &scratch->low_latency_dispatches : &scratch->tickets[p.ticket].dispatch);
  if (threadIdx.x == 0) {
    start.failures = load_failures(p.session);
    start.unsettled = ptx::ld_relaxed_gpu(&scratch->unsettled);
  }
  if (static_cast<int>(threadIdx.x) < team.num_ranks) start.peer = team.peers[threadIdx.x];
  return start;
}
// Whole block: the peers' addresses go to shared memory. False: the team has failed before; the kernel goes straight to
// its end.
template <class P>
__device__ __forceinline__ bool begin_low_latency(const P &p, const EarlyStart &start, uint8_t **peers) {
  const TeamView &team = p.session.team;
  if (static_cast<int>(threadIdx.x) < team.num_ranks) peers[threadIdx.x] = start.peer;
#pragma unroll 1
  for (int r = threadIdx.x + kLlThreads; r < team.num_ranks; r += kLlThreads) peers[r] = team.peers[r];
  if ((start.failures | start.unsettled) != 0) let_last_block_look(p.session);
  return __syncthreads_or(had_failed(start.failures)) == 0;
}
template <class P>
__device__ __forceinline__ LowLatencyCall low_latency_call(const P &p, const EarlyStart &start, bool is_dispatch) {
  const uint64_t epoch = start.epoch + (p.sends() ? 1 : 0);
  return {epoch, start.dispatch + (p.sends() && is_dispatch ? 1 : 0), may_copy(p) ? p.second_slot : epoch & 1};
}

// One poll for the slot of a source's call, once its message is there.
template <class P>
__device__ __forceinline__ bool find_slot(const P &p, int source, LowLatencyCall &call) {
  const uint64_t word = ptx::ld_relaxed_sys(low_latency_line(p, own_block(p), call.epoch, source) + 1);
  call.second_slot = (word & kSecondSlot) != 0;
  return has_tag(word, static_cast<uint32_t>(call.epoch));
}

// One poll of find_handshake(), and the number of the source's dispatch.
template <class P>
__device__ __noinline__ inline bool find_source_call(const P &p, LowLatencyCall call, int source,
                                                     LowLatencyCall &found) {
  const auto line_of = [&](int copy) { return low_latency_line(p, own_block(p), copy, source); };
  uint64_t epoch = 0;
  const int copy = find_handshake(
      p.session.team, call.epoch, source,
      [&](int at) { return ptx::ld_acquire_sys(line_of(at) + offsetof(LowLatencyHandshakeMessage, epoch) / 8); },
      epoch);
  if (copy < 0) return false;
  const uint64_t dispatch = ptx::ld_relaxed_sys(line_of(copy) + offsetof(LowLatencyHandshakeMessage, dispatch) / 8);
  if (!has_tag(dispatch, static_cast<uint32_t>(epoch))) return false;  // it comes with the next poll
  // Numbers of dispatches differ by less than 2^31.
  const int32_t ahead = static_cast<int32_t>(static_cast<uint32_t>(dispatch) - static_cast<uint32_t>(call.dispatch));
  found = {epoch, call.dispatch + static_cast<int64_t>(ahead), epoch & 1};
  return !may_copy(p) || find_slot(p, source, found);
}

// Whole block of a receive half, thread r for source r: writes the call of each source that belongs to this one to
// shared calls[R]. Only with shrink may its numbers differ from this rank's, and only with DK_TEAM_LL_COPY its slot.
// Epoch 0: masked, or given up now.
template <class P>
__device__ inline void find_source_calls(const P &p, const LowLatencyCall &call, LowLatencyCall *calls) {
  const Session &s = p.session;
  for (int r = threadIdx.x; r < s.team.num_ranks; r += kLlThreads) {
    calls[r] = call;
    if ((s.team.flags & DK_TEAM_SHRINK) == 0) {
      if (!may_copy(p)) continue;
      const uint64_t start = is_control_block() ? ptx::global_timer_ns() : 0;
      wait_or_mask(s, r, call.epoch, [&](int64_t &) { return find_slot(p, r, calls[r]); });
      if (is_control_block()) s.team.scratch->wait_ns[r] += ptx::global_timer_ns() - start;
      continue;
    }
    LowLatencyCall found{};
    if (!is_masked(s, r)) {
      const uint64_t start = ptx::global_timer_ns();
      wait_or_mask(s, r, call.epoch, [&](int64_t &) { return find_source_call(p, call, r, found); });
      if (is_control_block()) s.team.scratch->wait_ns[r] = ptx::global_timer_ns() - start;
    }
    calls[r] = found;
  }
}

// The control block of a receive half, thread r for source r: checks that all ranks make the same call, and adds the
// waits to the caller's statistics.
template <class P>
__device__ __noinline__ inline void check_low_latency_peers(const P &p, const LowLatencyCall *calls) {
  const TeamView &team = p.session.team;
  const HandshakeMessage mine = low_latency_handshake(p);
  for (int r = threadIdx.x; r < team.num_ranks; r += kLlThreads) {
    const uint64_t epoch = calls[r].epoch;
    const uint64_t *line = low_latency_line(p, own_block(p), epoch, r);
    HandshakeMessage theirs{};
    uint64_t waited = load_fresh(&team.scratch->wait_ns[r]);  // for weights; loaded beside the message
    const uint64_t start = ptx::global_timer_ns();
    const bool came = epoch != 0 && wait_or_mask(p.session, r, epoch, [&](int64_t &seen) {
                        return load_message(line, epoch, theirs, seen);
                      });
    if (epoch != 0 && (team.flags & DK_TEAM_SHRINK) == 0)
      team.scratch->wait_ns[r] = waited += ptx::global_timer_ns() - start;
    if (p.wait_stats() != nullptr)  // an addition that waits for no load
      atomicAdd(reinterpret_cast<unsigned long long *>(&p.wait_stats()[r]), static_cast<unsigned long long>(waited));
    if (!came) continue;
    const Difference difference = compare_messages(mine, &theirs);
    if (difference.field != DK_FIELD_NONE)
      report_failure(p.session, DK_EMISMATCH, r, difference.field, difference.mine, difference.theirs, 0);
  }
}

}  // namespace deepep
