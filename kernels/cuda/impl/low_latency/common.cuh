// common.cuh - what low-latency dispatch and combine share: places in a block, words, the end of a call.
#pragma once
#include "cuda/common/fp4.cuh"
#include "cuda/impl/low_latency/params.cuh"
#include "cuda/impl/low_latency/shared.cuh"
#include "cuda/impl/low_latency/timeline.cuh"

namespace deepep {

constexpr uint32_t kAllOnes = 0xffffffffu;

// Which call this is: `epoch` counts low-latency calls, `dispatch` the dispatches among them. The sender chooses the
// slot: it is the parity of the epoch, but with DK_TEAM_LL_COPY (see copies.cuh).
struct LowLatencyCall {
  uint64_t epoch, dispatch : 63, second_slot : 1;  // 16 bytes: shared memory has one of each rank
  __device__ int slot() const { return static_cast<int>(second_slot); }
};
static_assert(sizeof(LowLatencyCall) == 16, "no padding");
template <class P>
__device__ __forceinline__ bool may_copy(const P &p) {
  return (p.session.team.flags & DK_TEAM_LL_COPY) != 0;
}

// ---- Places: all in a rank's block ----------------------------------------------------------------------------------

template <class P>
__device__ __forceinline__ uint8_t *own_block(const P &p) {
  return p.session.team.self;
}
template <class P>
__device__ __forceinline__ uint8_t *slot_base(const P &p, uint8_t *block, const LowLatencyCall &call) {
  return block + (call.slot() == 0 ? p.places.slot[0] : p.places.slot[1]);
}
template <class P>
__device__ __forceinline__ uint8_t *header_base(const P &p, uint8_t *block, uint64_t dispatch) {
  return block + p.places.headers + static_cast<uint32_t>(dispatch % kHeaderCopies) * p.places.header_step;
}
// Rows of combine are numbered by expert and token, those of dispatch by the source's first expert and token: all below
// 2^32. So each rank writes to a part of the slot that no other rank's calls use: once a rank has missed calls, its
// numbers, and with them its slots, may differ from the others' by one.
template <class P>
__device__ __forceinline__ uint32_t number_of_row(const P &p, int source_or_expert, int token) {
  return static_cast<uint32_t>(source_or_expert) * static_cast<uint32_t>(p.num_max_tokens) +
         static_cast<uint32_t>(token);
}
template <class P>
__device__ __forceinline__ uint32_t number_of_token(const P &p, int source, int token) {
  return number_of_row(p, source * p.num_local(), token);
}
template <class P>
__device__ __forceinline__ uint8_t *slot_row(const P &p, uint8_t *block, const LowLatencyCall &call, uint32_t number) {
  return slot_base(p, block, call) + static_cast<uint64_t>(number) * static_cast<uint32_t>(p.at.row_bytes);
}
// The words that go with a row: scales of dispatch, ranges of LogFMT.
template <class P>
__device__ __forceinline__ uint32_t *slot_words(const P &p, uint8_t *block, const LowLatencyCall &call,
                                                uint32_t number) {
  return reinterpret_cast<uint32_t *>(slot_base(p, block, call) + p.at.words_at +
                                      static_cast<uint64_t>(number) * static_cast<uint32_t>(p.at.words_bytes));
}
// The words of a row of dispatch that are its scales; those of FP4 lie behind its values.
template <class P>
__device__ __forceinline__ uint32_t *slot_scales(const P &p, uint8_t *block, const LowLatencyCall &call,
                                                 uint32_t number) {
  return is_fp4(p) ? reinterpret_cast<uint32_t *>(slot_row(p, block, call, number) + value_bytes(p))
                   : slot_words(p, block, call, number);
}
constexpr int kPatternAt = 2 * kMaxTopk;  // word of the header
template <class P>
__device__ __forceinline__ uint64_t *token_header(const P &p, uint8_t *block, uint64_t dispatch, int source,
                                                  int token) {
  return reinterpret_cast<uint64_t *>(header_base(p, block, dispatch) +
                                      number_of_row(p, source, token) * kHeaderStride);
}
template <class P>
__device__ __forceinline__ uint64_t *count_word(const P &p, uint8_t *block, uint64_t dispatch, int source,
                                                int local_expert) {
  return reinterpret_cast<uint64_t *>(header_base(p, block, dispatch) + p.at.header_bytes) + source * p.num_local() +
         local_expert;
}
// Combine: the word with the kind of an expert's row for a token. kKindPacked: a sum at the place of the token's row
// for its sender's first local expert.
enum : uint32_t { kKindPacked = 0, kKindRow = 1, kKindLogfmt = 2, kKindSum = 3, kKindMask = 3 };
template <class P>
__device__ __forceinline__ uint64_t *row_word(const P &p, uint8_t *block, const LowLatencyCall &call, uint32_t number) {
  return reinterpret_cast<uint64_t *>(block + (call.slot() == 0 ? p.places.row_words[0] : p.places.row_words[1])) +
         number;
}
// Combine: the weights of a source's token, in the order of its entries, where the dispatch did not bring them. A rank
// sends them before it has checked that slots are empty, and shapes may differ from call to call: one copy more than
// slots.
template <class P>
__device__ __forceinline__ uint64_t *sent_weights(const P &p, uint8_t *block, const LowLatencyCall &call, int source,
                                                  int token) {
  const uint32_t copy = static_cast<uint32_t>(call.epoch % kWeightCopies);
  const uint64_t at = copy == 0 ? p.places.weights[0] : copy == 1 ? p.places.weights[1] : p.places.weights[2];
  return reinterpret_cast<uint64_t *>(block + at + number_of_row(p, source, token) * kWeightsStride);
}
// The newest call whose rows `taker` has taken from a slot, in the block of the rank that wrote them.
__device__ inline uint64_t *credit(const TeamView &team, uint8_t *block, int slot, int taker) {
  return reinterpret_cast<uint64_t *>(block + team.control + team.at.consumed) + slot * team.num_ranks + taker;
}

// ---- Words: the number of the call in the upper half, the value in the lower ----------------------------------------
// Words of dispatches are numbered by dispatch, those of combines by call. A word of the one may lie where another
// shape has the other, hence the bit that distinguishes them.

constexpr uint64_t kDispatchWord = 1ull << 31;
__device__ __forceinline__ uint32_t dispatch_tag(uint64_t dispatch) {
  return static_cast<uint32_t>(dispatch | kDispatchWord);
}
__device__ __forceinline__ uint32_t combine_tag(uint64_t epoch) {
  return static_cast<uint32_t>(epoch & ~kDispatchWord);
}
__device__ __forceinline__ uint64_t tagged(uint32_t tag, uint32_t value) {
  return static_cast<uint64_t>(tag) << 32 | value;
}
__device__ __forceinline__ bool has_tag(uint64_t word, uint32_t tag) {
  return static_cast<uint32_t>(word >> 32) == tag;
}

// Header entry. Bit 30: a row for local expert (bits 16..28) at position (bits 0..15) of this source's rows. Bit 29:
// the token has nothing for the rank, and no further entries are sent.
enum : uint32_t { kEntryRow = 1u << 30, kEntryNothing = 1u << 29 };
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
__device__ __forceinline__ bool holds(const uint4 &v, uint32_t word) {
  return v.x == word || v.y == word || v.z == word || v.w == word;
}
__device__ __forceinline__ bool has_arrived(const uint4 &v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

// ---- Waits that may mask a rank -------------------------------------------------------------------------------------

// Waits for 16 bytes that a peer writes, and clears them.
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
// Likewise a word; `word` is 0 or what an earlier load returned.
__device__ __forceinline__ bool take_word(const Session &s, int peer, uint64_t expected, uint32_t *from,
                                          uint32_t &word) {
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

// ---- A token's entries, one for each lane ---------------------------------------------------------------------------

struct Entry {
  int64_t expert;
  float weight;
};
template <class P>
__device__ __forceinline__ Entry load_entry(const P &p, int token) {
  const int64_t at = static_cast<int64_t>(token) * p.num_topk + lane_id();
  if (lane_id() >= p.num_topk || token >= p.num_tokens) return {-1, 0};
  return {load_index(p.topk_idx(), at, p.index_bytes), p.topk_weights() != nullptr ? p.topk_weights()[at] : 0};
}

// ---- Start and end --------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_last_warp() { return warp_id() == kLlThreads / kWarp - 1; }
// Where the grid is not tiny, the control block has no token of its own: what it waits for holds up no row.
constexpr int kTinyGrid = 32;
__device__ inline int num_workers() { return static_cast<int>(gridDim.x) - (gridDim.x > kTinyGrid ? 1 : 0); }
__device__ inline bool is_worker() { return static_cast<int>(blockIdx.x) < num_workers(); }
// The number of this block's first token; the next ones follow num_workers() apart. A control block without tokens gets
// a number above all.
__device__ inline int first_of_block() { return is_worker() ? static_cast<int>(blockIdx.x) : 1 << 29; }

// What a thread reads of a slot at a rank, before the number of the call (and so its slot) is known: in flight beside
// the kernel's other first loads. Warps 1 to 7 look at the first slot, 8 to 14 at the second.
constexpr int kWatchers = 7 * kWarp;  // of a slot
static_assert(kLowLatencySlots * kWatchers + kWarp <= kLlThreads, "each slot has its threads");
struct SlotSeen {
  uint64_t sent, taken;
  int slot, rank;  // what this thread looks at; rank -1: nothing
};
template <class P>
__device__ __forceinline__ SlotSeen look_at_slot(const P &p) {
  const TeamView &team = p.session.team;
  const int watcher = static_cast<int>(threadIdx.x) - kWarp, slot = watcher / kWatchers,
            rank = watcher - slot * kWatchers;
  if (watcher < 0 || slot >= kLowLatencySlots || rank >= team.num_ranks) return {0, 0, 0, -1};
  SlotSeen seen{ptx::ld_relaxed_gpu(&team.scratch->sent[slot][rank]), 0, slot, rank};
  seen.taken = ptx::ld_acquire_sys(credit(team, team.self, slot, rank));
  return seen;
}

// Whole block, before it writes into any slot: waits until its rows of two calls ago have been taken; mostly the first
// look shows that.
template <class P>
__device__ inline bool await_empty_slots(const P &p, const LowLatencyCall &call, const SlotSeen &seen) {
  const TeamView &team = p.session.team;
  bool good = true;
  if (seen.slot == call.slot())
#pragma unroll 1
    for (int r = seen.rank; r >= 0 && good && r < team.num_ranks; r += kWatchers) {
      const uint64_t *word = credit(team, team.self, call.slot(), r);
      const uint64_t before = r == seen.rank ? seen.sent : ptx::ld_relaxed_gpu(&team.scratch->sent[call.slot()][r]);
      if ((r == seen.rank && seen.taken >= before) || is_masked(p.session, r)) continue;
      good = wait_or_mask(p.session, r, before,
                          [&](int64_t &now) {
                            now = static_cast<int64_t>(ptx::ld_acquire_sys(word));
                            return now >= static_cast<int64_t>(before);
                          }) ||
             !has_failed(p.session);
    }
  return __syncthreads_or(!good) == 0;
}

// Rows that a combine has left may come by copies, which the senders' next messages do not follow. Their words do: of
// rows that were taken they are cleared here, when the combine ends, and so are known those to wait for.
template <class P>
__device__ inline void clear_taken_words(const P &p, const LowLatencyCall *calls) {
  const int num_ranks = p.session.team.num_ranks, num_local = p.num_local();
  for (int token = threadIdx.x; token < p.num_tokens; token += kLlThreads) {
    bool taken = true;
    for (int k = 0; k < p.num_topk; ++k) {
      const int64_t expert = load_index(p.topk_idx(), static_cast<int64_t>(token) * p.num_topk + k, p.index_bytes);
      taken &= expert >= -1 && expert < p.num_experts;
    }
    for (int r = 0; taken && r < num_ranks; ++r)
      for (int l = 0; l < num_local && calls[r].epoch != 0; ++l)
        *row_word(p, own_block(p), calls[r], number_of_row(p, r * num_local + l, token)) = 0;
  }
}
__device__ inline void await_left_rows(const Session &s) {
  const Leftover &left = s.team.scratch->leftover;
  const uint32_t rows = left.rows_of_rank * s.team.num_ranks;
  for (uint32_t i = threadIdx.x; i < rows; i += kLlThreads) {
    const int rank = static_cast<int>(i / left.rows_of_rank);
    const uint32_t slot = left.at[rank];
    const uint64_t epoch = left.epoch[rank];
    const uint64_t word =
        ptx::ld_relaxed_sys(reinterpret_cast<const uint64_t *>(s.team.self + left.row_words[slot]) + i);
    if (epoch == 0 || !has_tag(word, combine_tag(epoch))) continue;
    const bool packed = (static_cast<uint32_t>(word) & kKindMask) == kKindPacked;
    const uint64_t row = packed ? rank * left.rows_of_rank + i % left.max_tokens : i;
    const uint8_t *from = s.team.self + left.slot[slot] + row * left.row_bytes;
    const auto *words =
        reinterpret_cast<const uint32_t *>(s.team.self + left.slot[slot] + left.words_at + row * left.words_bytes);
    bool came = true;
    for (uint64_t at = 0; came && left.num_words == 0 && at < left.row_bytes; at += 16)
      came = wait_or_mask(s, rank, epoch, [&](int64_t &) { return has_arrived(ptx::ld_relaxed_sys_v4(from + at)); });
    for (uint32_t at = 0; came && at < left.num_words; ++at)  // which are copied after the row
      came = wait_or_mask(s, rank, epoch, [&](int64_t &) { return ptx::ld_relaxed_sys(words + at) != 0; });
  }
  __syncthreads();
}

// By the last block of a call that receives, which has all ranks' messages: see Leftover.
__device__ __noinline__ inline void empty_leftover(const Session &s) {
  Scratch *scratch = s.team.scratch;
  const Leftover &left = scratch->leftover;
  ptx::fence_acq_rel_sys();
  if ((s.team.flags & DK_TEAM_LL_COPY) != 0) await_left_rows(s);
  for (int slot = 0; slot < kLowLatencySlots; ++slot)
    for (uint64_t at = 16ull * threadIdx.x; at < left.slot_bytes; at += 16ull * kLlThreads)
      ptx::st_stream(s.team.self + left.slot[slot] + at, uint4{0, 0, 0, 0});
  for (int r = threadIdx.x; r < s.team.num_ranks; r += kLlThreads)
    if (left.epoch[r] != 0) scratch->consumed[left.at[r]][r] = left.epoch[r];
  __syncthreads();
  if (threadIdx.x == 0) scratch->unsettled = 0;
}
template <class P>
__device__ __noinline__ inline void leave_rows(const P &p, const LowLatencyCall *calls) {
  Scratch *scratch = p.session.team.scratch;
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) {
    scratch->leftover.epoch[r] = is_masked(p.session, r) ? 0 : calls[r].epoch;
    scratch->leftover.at[r] = static_cast<uint32_t>(calls[r].slot());
  }
  if (may_copy(p)) clear_taken_words(p, calls);
  if (threadIdx.x != 0) return;
  for (int slot = 0; slot < kLowLatencySlots; ++slot) scratch->leftover.row_words[slot] = p.places.row_words[slot];
  scratch->leftover.row_bytes = p.at.row_bytes;
  scratch->leftover.words_at = p.at.words_at;
  scratch->leftover.words_bytes = p.at.words_bytes;
  scratch->leftover.rows_of_rank = static_cast<uint32_t>(p.num_local() * p.num_max_tokens);
  scratch->leftover.max_tokens = static_cast<uint32_t>(p.num_max_tokens);
  scratch->leftover.num_words = (p.flags & DK_LL_LOGFMT) != 0 ? static_cast<uint32_t>(p.hidden / kScaleChannels) : 0;
  for (int slot = 0; slot < kLowLatencySlots; ++slot) scratch->leftover.slot[slot] = p.places.slot[slot];
  scratch->leftover.slot_bytes = p.at.slot_bytes;
  scratch->unsettled = 1;
}

// What the last block finds in the scratch beside a failure: loaded together with it.
struct Notes {
  uint32_t refusing, unsettled;
};
// By the last block, after the outputs.
template <class P>
__device__ inline void end_low_latency(const P &p, const LowLatencyCall &call, const LowLatencyCall *calls,
                                       const Notes &notes, bool failed) {
  Scratch *scratch = p.session.team.scratch;
  const bool leaves = notes.refusing != 0 && p.session.op == DK_OP_LL_COMBINE && p.receives() && !failed;
  if (notes.unsettled != 0 && p.receives() && !failed) empty_leftover(p.session);
  if (notes.refusing != 0) {
    __syncthreads();  // all threads have read it
    if (threadIdx.x == 0) scratch->refusing = 0;
    if (leaves) leave_rows(p, calls);
  }
  if (threadIdx.x == 0) {
    if (p.sends()) {
      scratch->low_latency_epoch = call.epoch;
      scratch->low_latency_dispatches = call.dispatch;
    }
    if (p.sends() && !p.receives()) scratch->tickets[p.ticket] = {call.epoch, call.dispatch};
  }
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) {
    if (is_masked(p.session, r)) continue;
    if (p.sends()) scratch->sent[call.slot()][r] = call.epoch;
    if (!p.receives() || failed || calls[r].epoch == 0) continue;
    if (!leaves) scratch->consumed[calls[r].slot()][r] = calls[r].epoch;
    if ((p.session.team.flags & DK_TEAM_SHRINK) == 0) {
      scratch->seen[r] = call.epoch;
      continue;
    }
    scratch->seen[r] = max(scratch->seen[r], calls[r].epoch);
    scratch->epoch_ahead[r] = static_cast<int64_t>(calls[r].epoch - call.epoch);
    scratch->dispatch_ahead[r] = static_cast<int64_t>(calls[r].dispatch - call.dispatch);
    scratch->returned[r] = 0;
  }
}

// Whole block; as with finish(), the last block to leave sees what the others wrote, where it has to look at that.
// Mostly it has not, and does without a load: what it counts with has been loaded meanwhile by every block's last warp,
// and what the control block has waited for that block counts itself.
template <class P, class Outputs>
__device__ inline void finish_low_latency(const P &p, uint64_t begun_ns, const LowLatencyCall &call,
                                          const LowLatencyCall *calls, Outputs outputs) {
  Scratch *scratch = p.session.team.scratch;
  __shared__ uint64_t exits;
  // The last block reads what others wrote only to mend it after a loss: a worker's rows need no order before its exit,
  // they are complete when the kernel is.
  const bool shrinks = (p.session.team.flags & DK_TEAM_SHRINK) != 0;
  uint64_t *half = p.sends() && p.receives() ? nullptr : &scratch->half_ns[p.ticket];
  CountLoads loads{};
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint64_t mine = 1 | (blockIdx.x == 0 ? begun_ns << kExitTimeAt : 0);
    exits = mine + (shrinks || is_control_block() ? ptx::atomic_add_acq_rel_gpu(&scratch->exits, mine)
                                                  : ptx::atomic_add_relaxed_gpu(&scratch->exits, mine));
  }
  if (is_last_warp()) {
    loads = load_counts(p.session, half);
    if (is_control_block()) count_peers(p.session, load_peers(p.session));
  }
  __syncthreads();
  if ((exits & kExitCount) != gridDim.x) return;
  mark(kMarkLeft, threadIdx.x == 0);
  const bool looks = shrinks || (exits & kExitLooks) != 0;
  Notes notes{};
  bool failed = false;
  if (looks) {
    ptx::fence_acq_rel_sys();
    notes = {ptx::ld_relaxed_gpu(&scratch->refusing), ptx::ld_relaxed_gpu(&scratch->unsettled)};
    failed = has_failed(p.session);
  }
  if (is_last_warp()) {
    const uint64_t now = ptx::global_timer_ns(), passed = (now - (exits >> kExitTimeAt)) << kExitTimeAt >> kExitTimeAt;
    record_loaded(p.session, loads, now - passed, half, p.receives(), failed);
  } else if (threadIdx.x == 0) {
    scratch->exits = 0;
    if (looks) scratch->failed = failed;
  }
  outputs(failed);
  end_low_latency(p, call, calls, notes, failed);
}

}  // namespace deepep
