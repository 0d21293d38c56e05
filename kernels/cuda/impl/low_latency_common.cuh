// low_latency_common.cuh - what low-latency dispatch and combine share: places, words, the start and the end of a call.
#pragma once
#include "cuda/common/fp8.cuh"
#include "cuda/layout/low_latency.cuh"
#include "cuda/sync/session.cuh"

namespace deepep {

constexpr int kLlThreads = 512, kLlGroups = 4, kLlGroupThreads = kLlThreads / kLlGroups;
constexpr uint32_t kAllOnes = 0xffffffffu;

struct LowLatencyParams {
  Session session;
  LowLatencyLayout at;
  uint32_t phases, ticket, flags, format;
  const void *topk_idx;
  const float *topk_weights;
  int32_t num_tokens, num_topk, index_bytes, max_tokens, hidden, num_experts;
  int32_t *src_info;
  int64_t *layout_range, *wait_stats;

  __device__ bool sends() const { return (phases & DK_PHASE_SEND) != 0; }
  __device__ bool receives() const { return (phases & DK_PHASE_RECV) != 0; }
  __device__ int num_local() const { return num_experts / session.team.num_ranks; }
  __device__ int64_t rows_per_expert() const { return static_cast<int64_t>(session.team.num_ranks) * max_tokens; }
};

// Which call this is: `epoch` counts low-latency calls, `dispatch` the dispatches among them.
struct LowLatencyCall {
  uint64_t epoch, dispatch;
  __device__ int slot() const { return static_cast<int>(epoch % kLowLatencySlots); }
};
__device__ inline LowLatencyCall low_latency_call(const LowLatencyParams &p, bool is_dispatch) {
  const Scratch *scratch = p.session.team.scratch;
  if (p.sends())
    return {ptx::ld_relaxed_gpu(&scratch->low_latency_epoch) + 1, ptx::ld_relaxed_gpu(&scratch->low_latency_dispatches) + (is_dispatch ? 1 : 0)};
  return {ptx::ld_relaxed_gpu(&scratch->tickets[p.ticket].epoch), ptx::ld_relaxed_gpu(&scratch->tickets[p.ticket].dispatch)};
}

// ---- Places ------------------------------------------------------------------------------------------------------------

__device__ inline uint8_t *slot_base(const LowLatencyParams &p, int owner, const LowLatencyCall &call) {
  return p.session.team.peers[owner] + p.session.team.rdma + slot_offset(p.session.team.rdma_bytes, p.at.slot_bytes, call.slot());
}
__device__ inline uint8_t *wire_base(const LowLatencyParams &p, int owner) {
  return p.session.team.peers[owner] + p.session.team.wire + p.session.team.ring.bytes;
}
__device__ inline uint64_t wire_left(const LowLatencyParams &p) { return p.session.team.wire_bytes - p.session.team.ring.bytes; }
// Dispatch: the row and the header of token `token` of `source` at `owner`.
__device__ inline uint8_t *token_row(const LowLatencyParams &p, const LowLatencyCall &call, int owner, int source, int token) {
  return slot_base(p, owner, call) + (static_cast<uint64_t>(source) * p.max_tokens + token) * p.at.row_bytes;
}
__device__ inline uint64_t *token_header(const LowLatencyParams &p, uint64_t dispatch, int owner, int source, int token) {
  return reinterpret_cast<uint64_t *>(wire_base(p, owner) + header_area(wire_left(p), dispatch % kHeaderCopies) +
                                      (static_cast<uint64_t>(source) * p.max_tokens + token) * kHeaderStride);
}
// The words that go with a row: scales of dispatch, ranges of LogFMT.
__device__ inline uint32_t *token_words(const LowLatencyParams &p, const LowLatencyCall &call, int owner, int source, int token) {
  return reinterpret_cast<uint32_t *>(slot_base(p, owner, call) + p.at.words_at +
                                      (static_cast<uint64_t>(source) * p.max_tokens + token) * p.at.words_bytes);
}
constexpr int kPatternAt = 2 * kMaxTopk; // word of the header
__device__ inline uint64_t *count_word(const LowLatencyParams &p, uint64_t dispatch, int owner, int source, int local_expert) {
  return reinterpret_cast<uint64_t *>(wire_base(p, owner) + header_area(wire_left(p), dispatch % kHeaderCopies) + p.at.header_bytes) +
         source * p.num_local() + local_expert;
}
// Combine: the row of an expert for a token, at the token's rank, and the word that says what it is.
__device__ inline uint8_t *expert_row(const LowLatencyParams &p, const LowLatencyCall &call, int owner, int expert, int token) {
  return slot_base(p, owner, call) + (static_cast<uint64_t>(expert) * p.max_tokens + token) * p.at.row_bytes;
}
__device__ inline uint64_t *row_word(const LowLatencyParams &p, const LowLatencyCall &call, int owner, int expert, int token) {
  return reinterpret_cast<uint64_t *>(wire_base(p, owner) + row_word_area(wire_left(p), call.slot())) +
         static_cast<uint64_t>(expert) * p.max_tokens + token;
}

// ---- Words: the number of the call above, what it says below ------------------------------------------------------------
// Words of dispatches are numbered by dispatch, those of combines by call. A word of the one may lie where another shape has the
// other, hence the bit that tells them apart.

constexpr uint64_t kDispatchWord = 1ull << 31;
__device__ __forceinline__ uint32_t dispatch_tag(uint64_t dispatch) { return static_cast<uint32_t>(dispatch | kDispatchWord); }
__device__ __forceinline__ uint32_t combine_tag(uint64_t epoch) { return static_cast<uint32_t>(epoch & ~kDispatchWord); }
__device__ __forceinline__ uint64_t tagged(uint32_t tag, uint32_t value) { return static_cast<uint64_t>(tag) << 32 | value; }
__device__ __forceinline__ bool has_tag(uint64_t word, uint32_t tag) { return static_cast<uint32_t>(word >> 32) == tag; }

// Header entry: bit 30: a row for local expert (bits 16..28) at position (bits 0..15) of this source's rows; bit 29: the token has
// nothing for the rank, further entries are not sent.
enum : uint32_t { kEntryRow = 1u << 30, kEntryNothing = 1u << 29, kMaxLocalExperts = 8192 };
__device__ __forceinline__ uint32_t entry_row(int local_expert, int position) {
  return kEntryRow | static_cast<uint32_t>(local_expert) << 16 | static_cast<uint32_t>(position);
}
__device__ __forceinline__ int entry_expert(uint32_t code) { return static_cast<int>(code >> 16 & 0x1fff); }
__device__ __forceinline__ int entry_position(uint32_t code) { return static_cast<int>(code & 0xffff); }

// A row travels as word ^ pattern with a pattern it does not hold, so that no word of it is zero.
__device__ __forceinline__ uint32_t pattern_of(uint32_t attempt) { return kAllOnes - 4 * attempt; }
__device__ __forceinline__ uint4 exclusive_or(const uint4 &v, uint32_t pattern) {
  return {v.x ^ pattern, v.y ^ pattern, v.z ^ pattern, v.w ^ pattern};
}
__device__ __forceinline__ bool holds(const uint4 &v, uint32_t word) { return v.x == word || v.y == word || v.z == word || v.w == word; }
__device__ __forceinline__ bool has_arrived(const uint4 &v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

// ---- Waits that may mask a rank ---------------------------------------------------------------------------------------------

// True: it came. False: the rank is masked now, or the team has failed.
template <class Poll> __device__ __forceinline__ bool wait_or_mask(const Session &s, int peer, uint64_t expected, Poll poll) {
  int64_t seen = 0;
  uint64_t waited = 0;
  const uint32_t code = wait_until(s, peer, seen, waited, poll);
  if (code == 0) return true;
  if (!mask_instead(s, code, peer)) report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, static_cast<int64_t>(expected), seen, waited);
  return false;
}
// 16 bytes that a peer writes; cleared once they are here.
__device__ __forceinline__ bool take_chunk(const Session &s, int peer, uint64_t expected, uint8_t *from, uint4 &chunk) {
  if (!has_arrived(chunk)) {
    const bool came = wait_or_mask(s, peer, expected, [&](int64_t &) {
      chunk = ptx::ld_relaxed_sys_v4(from);
      return has_arrived(chunk);
    });
    if (!came) return false;
  }
  ptx::st_stream(from, uint4{0, 0, 0, 0});
  return true;
}
// Likewise a word; `word` is 0 or what was seen there before.
__device__ __forceinline__ bool take_word(const Session &s, int peer, uint64_t expected, uint32_t *from, uint32_t &word) {
  if (word == 0) word = ptx::ld_relaxed_sys(from);
  if (word == 0) {
    const bool came = wait_or_mask(s, peer, expected, [&](int64_t &) {
      word = ptx::ld_relaxed_sys(from);
      return word != 0;
    });
    if (!came) return false;
  }
  *from = 0;
  return true;
}

// ---- Start and end ---------------------------------------------------------------------------------------------------------------

__device__ inline Enter low_latency_enter(const LowLatencyParams &p) {
  Enter mine{};
  mine.hidden_bytes = static_cast<uint64_t>(p.hidden) * 2, mine.op = p.session.op;
  mine.num_experts = p.num_experts, mine.num_topk = p.num_topk, mine.max_tokens = p.max_tokens;
  mine.flags = (p.format << kEnterFormatShift) | (p.flags & (DK_LL_LOGFMT)) << (kEnterFormatShift + 4);
  return mine;
}

// The last block does what concerns all: where the device has room for it, it has no token of its own.
__device__ inline bool is_clerk() { return blockIdx.x == gridDim.x - 1; }

// The clerk tells everybody which slots are empty here and, when sending, what this call is.
__device__ inline void post_low_latency(const LowLatencyParams &p, const LowLatencyCall &call) {
  const TeamView &team = p.session.team;
  const Enter mine = low_latency_enter(p);
  for (int r = threadIdx.x; r < team.num_ranks; r += kLlThreads) {
    if (is_masked(p.session, r)) continue;
    ptx::fence_acq_rel_sys(); // the emptying, by kernels before this one
    for (int slot = 0; slot < kLowLatencySlots; ++slot)
      ptx::st_relaxed_sys(team.consumed(r, slot, team.rank), team.scratch->consumed[slot][r]);
    if (!p.sends()) continue;
    Enter *to = team.low_latency_enter(r, call.epoch % kLowLatencyEnterCopies, team.rank);
    to->hidden_bytes = mine.hidden_bytes, to->segment_offset = call.dispatch, to->op = mine.op, to->flags = mine.flags, to->num_experts = mine.num_experts;
    to->num_topk = mine.num_topk, to->num_scales = mine.num_scales, to->max_tokens = mine.max_tokens;
    ptx::st_release_sys(&to->epoch, call.epoch);
  }
}

// Whole block, before it writes into any slot: its rows of two calls ago have been taken. Mostly so already, hence both words are
// loaded at once. The first warp does `meanwhile` instead of looking.
template <class Meanwhile>
__device__ inline bool await_empty_slots(const LowLatencyParams &p, const LowLatencyCall &call, Meanwhile meanwhile) {
  const TeamView &team = p.session.team;
  bool good = true;
  if (threadIdx.x < kWarp) meanwhile();
  else
    for (int r = threadIdx.x - kWarp; good && r < team.num_ranks; r += kLlThreads - kWarp) {
      const uint64_t *word = team.consumed(team.rank, call.slot(), r);
      const uint64_t before = ptx::ld_relaxed_gpu(&team.scratch->sent[call.slot()][r]), taken = ptx::ld_acquire_sys(word);
      if (taken >= before || is_masked(p.session, r)) continue;
      good = wait_or_mask(p.session, r, before, [&](int64_t &seen) {
        seen = static_cast<int64_t>(ptx::ld_acquire_sys(word));
        return seen >= static_cast<int64_t>(before);
      }) || !has_failed(p.session);
    }
  return __syncthreads_or(!good) == 0;
}

// Which call of a source belongs to this call of mine; poll once. In step: the same number, or as far ahead as last time. A source
// that went on without this rank is further; one whose mask was lifted may be anywhere, but it sends something new.
__device__ inline bool find_source_call(const LowLatencyParams &p, const LowLatencyCall &call, int source, LowLatencyCall &found) {
  const Session &s = p.session;
  const Scratch *scratch = s.team.scratch;
  const uint64_t expected = call.epoch + scratch->epoch_ahead[source], seen = scratch->seen[source];
  const bool anywhere = scratch->returned[source] != 0;
  const Enter *best = nullptr;
  uint64_t epoch = 0;
  for (int pass = 0; pass < 2; ++pass) { // the second finds what was stored before the newest that the first found
    for (int copy = 0; copy < kLowLatencyEnterCopies; ++copy) {
      const Enter *enter = s.team.low_latency_enter(s.team.rank, copy, source);
      const uint64_t there = ptx::ld_acquire_sys(&enter->epoch);
      const bool exact = there == expected && !anywhere;
      if (!exact && (there <= seen || (there <= expected && !anywhere))) continue;
      if (best != nullptr && !exact && there >= epoch) continue;
      best = enter, epoch = there;
    }
    if (best == nullptr) return false;
    if (epoch == expected && !anywhere) break;
  }
  found = {epoch, best->segment_offset};
  return true;
}

// Whole block of a receive half: the call of each source that belongs to this one, into shared calls[R]. Only where ranks can be
// masked is there anything to find out. Epoch 0: masked, or given up now.
__device__ inline void find_source_calls(const LowLatencyParams &p, const LowLatencyCall &call, LowLatencyCall *calls) {
  const Session &s = p.session;
  for (int r = threadIdx.x; r < s.team.num_ranks; r += kLlThreads) {
    calls[r] = call;
    if ((s.team.flags & DK_TEAM_SHRINK) == 0) continue;
    LowLatencyCall found{};
    if (!is_masked(s, r)) {
      const uint64_t start = ptx::global_timer_ns();
      wait_or_mask(s, r, call.epoch, [&](int64_t &) { return find_source_call(p, call, r, found); });
      if (is_clerk()) s.team.scratch->wait_ns[r] = ptx::global_timer_ns() - start;
    }
    calls[r] = found;
  }
  __syncthreads();
}

// The clerk of a receive half: everybody means the same call. Times go to the caller's statistics.
__device__ inline void check_low_latency_peers(const LowLatencyParams &p, const LowLatencyCall *calls) {
  const TeamView &team = p.session.team;
  const Enter mine = low_latency_enter(p);
  for (int r = threadIdx.x; r < team.num_ranks; r += kLlThreads) {
    const uint64_t epoch = calls[r].epoch;
    const Enter *from = team.low_latency_enter(team.rank, epoch % kLowLatencyEnterCopies, r);
    const uint64_t start = ptx::global_timer_ns();
    const bool came = epoch != 0 && wait_or_mask(p.session, r, epoch, [&](int64_t &seen) {
      seen = static_cast<int64_t>(ptx::ld_acquire_sys(&from->epoch));
      return seen >= static_cast<int64_t>(epoch);
    });
    if (epoch != 0 && (team.flags & DK_TEAM_SHRINK) == 0) team.scratch->wait_ns[r] = ptx::global_timer_ns() - start;
    if (p.wait_stats != nullptr) p.wait_stats[r] += static_cast<int64_t>(team.scratch->wait_ns[r]);
    if (!came) continue;
    const Difference difference = compare_enter(mine, from);
    if (difference.field != DK_FIELD_NONE)
      report_failure(p.session, DK_EMISMATCH, r, difference.field, difference.mine, difference.theirs, 0);
  }
}

// By the last block, after the outputs.
__device__ inline void end_low_latency(const LowLatencyParams &p, const LowLatencyCall &call, const LowLatencyCall *calls, bool failed) {
  Scratch *scratch = p.session.team.scratch;
  if (threadIdx.x == 0) {
    if (p.sends()) scratch->low_latency_epoch = call.epoch, scratch->low_latency_dispatches = call.dispatch;
    if (p.sends() && !p.receives()) scratch->tickets[p.ticket] = {call.epoch, call.dispatch};
  }
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) {
    if (is_masked(p.session, r)) continue;
    if (p.sends()) scratch->sent[call.slot()][r] = call.epoch;
    if (!p.receives() || failed || calls[r].epoch == 0) continue;
    scratch->consumed[calls[r].slot()][r] = calls[r].epoch;
    scratch->seen[r] = most(scratch->seen[r], calls[r].epoch);
    if (calls[r].epoch == call.epoch && calls[r].dispatch == call.dispatch && (p.session.team.flags & DK_TEAM_SHRINK) == 0) continue;
    scratch->epoch_ahead[r] = static_cast<int64_t>(calls[r].epoch - call.epoch);
    scratch->dispatch_ahead[r] = static_cast<int64_t>(calls[r].dispatch - call.dispatch);
    scratch->returned[r] = 0;
  }
  record_kernel(p.session, p.sends() && p.receives() ? nullptr : &scratch->half_ns[p.ticket], p.receives(), failed);
}

}  // namespace deepep
