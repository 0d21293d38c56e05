// common.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: offsets, signal words, handshake messages,
// waits, the end of a call. kernels/cuda/impl/low_latency/shared.cuh has what the CUDA library's kernels do alike.
//
// All ranks are reached in the same way: the sender delivers a row together with its signal word, by stores and a
// release where NVLink reaches the rank, else by one put-with-signal (DK_TEAM_LL_TRANSPORT: never by an address of the
// node's own). No two operations need an order between them. A signal word carries the sender's rank and the number of
// its call and lies outside user-visible memory; rows lie in the rdma region, in two slots that calls use in turn. The
// sender uses a slot, and the source of a put, again only after the receiver has posted a credit for what was in it:
// the receiver has the data, so the put is complete. What a NIC sends is staged in this rank's block, since it reads
// registered memory alone; what is stored goes to its place at once.
//   rdma region: combine's staged rows (zero copy's buffers) [2] | slots [2]
//   wire region after the ring's flags: signal words [2] | counts, in and out [2] | tables of received tokens [2] |
//   weights of combine, in and out [2]
#pragma once
#include <cstddef>

#include "cuda/common/copy_row.cuh"
#include "cuda/common/fp4.cuh"
#include "cuda/impl/low_latency/shared.cuh"
#include "cuda/impl/low_latency/timeline.cuh"
#include "internode/low_latency/put.cuh"
#include "internode/low_latency/team.h"

namespace deepep::internode {

constexpr int kLlWarps = kLlThreads / kWarp;
// The outbox: the newest handshake messages to all ranks, by epoch % kLowLatencyHandshakeCopies.
static_assert(kLowLatencyHandshakeCopies * sizeof(HandshakeMessage) <= kLowLatencyOutboxBytes, "the outbox");

// A received dispatch whose table of tokens (see sums.cuh) is there. A combine finds it by the address of src_info.
struct ReceivedDispatch {
  uint64_t src_info, number;  // number: of the dispatches that this rank has received, from 1 on
  int32_t num_experts, max_tokens, num_topk;
  int32_t brought_weights;  // 1: this rank's own tokens went out with their weights, or it had none
};
constexpr int kTables = 2;  // of the newest dispatches, by their number

// Device memory of a team, zeroed once; only this rank's kernels access it.
struct LowLatencyState {
  ReceivedDispatch received[kTables];
  uint64_t num_received;                            // dispatches so far
  uint64_t combine_sent[kLowLatencySlots];          // this rank's newest call in each slot if it was a combine, else 0
  uint64_t stage_epoch[2];                          // newest call that sent from each buffer of staged rows
  uint64_t stage_bytes;                             // size of a buffer in the newest of these calls
  uint64_t posted[kLowLatencySlots][DK_MAX_RANKS];  // the newest credit posted to each rank, of Scratch::consumed
};

// From the start of a block, for the shape of a call.
struct LowLatencyOffsets {
  uint64_t slot[2], words[2], counts_in[2], counts_out[2], outbox;
  uint64_t table[kTables], weights_in[2], weights_out[2];
  uint64_t stage;            // combine: the buffer of staged rows that this call sends from
  uint64_t stage_bytes;      // of one such buffer
  uint64_t source_bytes;     // of a slot: the part that one source writes
  uint32_t header_bytes;     // dispatch: before a row's payload, see kNoEntry
  uint32_t weights_at;       // dispatch: in a row, behind the payload; see send_token
  uint32_t row_bytes;        // dispatch: all of that
  uint32_t counts_bytes;     // dispatch: one rank's counts for another
  uint32_t max_entries;      // of a token at one rank
  uint32_t weights_bytes;    // combine: one rank's for another
  uint32_t table_tokens_at;  // in a table, behind the number of tokens of each source
};

struct InternodeLlParams : LowLatencyArguments {
  LowLatencyOffsets at;
  LowLatencyState *state;
  int32_t num_local, stage;  // experts of a rank; combine: index of the buffer at `at.stage`
  uint8_t *const *blocks;    // [R]: those into which threads store; null: a NIC serves what goes there
  uint32_t coding_at;        // combine that sends LogFMT: where in a block's shared memory its groups have their Coding
  bool keeps_sums;           // there is room for the groups' sums behind it

  // Whether a dispatch's rows bring their tokens' weights. Shapes of small rows have no room for them.
  __device__ bool brings_weights() const { return topk_weights != nullptr && at.weights_at < at.row_bytes; }
};

// A call's number (epoch) chooses its slot. A receive half takes the number that its send half left in the ticket.
__device__ __forceinline__ int slot_of(uint64_t epoch) { return static_cast<int>(epoch % kLowLatencySlots); }
__device__ inline uint64_t epoch_of_call(const InternodeLlParams &p) {
  const Scratch *scratch = p.session.team.scratch;
  return p.sends() ? ptx::ld_relaxed_gpu(&scratch->low_latency_epoch) + 1
                   : ptx::ld_relaxed_gpu(&scratch->tickets[p.ticket].epoch);
}

// ---- Offsets from the start of a block ------------------------------------------------------------------------------

template <class T = uint8_t>
__device__ __forceinline__ T *mine_at(const InternodeLlParams &p, uint64_t offset) {
  return reinterpret_cast<T *>(p.session.team.self + offset);
}
__device__ inline uint64_t handshake_at(const TeamView &team, uint64_t epoch, int source) {
  return team.control + team.at.low_latency_handshake +
         (epoch % kLowLatencyHandshakeCopies * team.num_ranks + source) * sizeof(HandshakeMessage);
}
__device__ inline uint64_t credit_at(const TeamView &team, int slot, int from) {
  return team.control + team.at.consumed + (static_cast<uint64_t>(slot) * team.num_ranks + from) * 8;
}
// Dispatch: a row has its token's index, also where it was staged; a source numbers the words of its rows for each
// destination in the order of its tokens. A source writes its rows of dispatch where its first expert's rows
// of combine lie, so each rank writes into a part of the slot of its own, whichever call uses that slot at the others:
// after a rank has missed calls its slots may differ from theirs by one.
__device__ inline uint64_t row_at(const InternodeLlParams &p, uint64_t epoch, int source, int token) {
  return p.at.slot[slot_of(epoch)] + source * p.at.source_bytes + static_cast<uint64_t>(token) * p.at.row_bytes;
}
__device__ inline uint64_t row_word_at(const InternodeLlParams &p, uint64_t epoch, int source, int number) {
  return p.at.words[slot_of(epoch)] + (static_cast<uint64_t>(source) * p.num_local * p.max_tokens + number) * 8;
}
// Of the one message of a pair of ranks beside its rows: counts of a dispatch, weights of a combine.
__device__ inline uint64_t message_word_at(const InternodeLlParams &p, uint64_t epoch, int source) {
  return p.at.words[slot_of(epoch)] + (static_cast<uint64_t>(p.num_experts) * p.max_tokens + source) * 8;
}
// Combine: an expert's row for a token of this rank; the sum of a rank's experts is in the row of the lowest of them.
__device__ inline uint64_t expert_row_at(const InternodeLlParams &p, uint64_t epoch, int expert, int token) {
  return p.at.slot[slot_of(epoch)] + (static_cast<uint64_t>(expert) * p.max_tokens + token) * 2 * p.hidden;
}
__device__ inline uint64_t expert_word_at(const InternodeLlParams &p, uint64_t epoch, int expert, int token) {
  return p.at.words[slot_of(epoch)] + (static_cast<uint64_t>(expert) * p.max_tokens + token) * 8;
}

// ---- Signal words: the number of the sender's call, its rank, 16 bits of value -------------------------------------

__device__ __forceinline__ uint64_t signal_word(uint64_t epoch, int source, uint32_t value) {
  return epoch << 32 | static_cast<uint32_t>(source) << 16 | value;
}
__device__ __forceinline__ bool is_from(uint64_t word, uint64_t epoch, int source) {
  return word >> 16 == signal_word(epoch, source, 0) >> 16;
}
__device__ __forceinline__ uint32_t signal_value(uint64_t word) { return static_cast<uint32_t>(word) & 0xffff; }
static_assert(DK_MAX_RANKS <= 65536, "a rank takes 16 bits");

// A source's counts are such words, too, one for each of the receiver's experts and these behind them. So whoever reads
// them need not wait for the word of the message that has them all.
enum { kCountRows, kCountHasWeights, kCountWords };
__device__ inline uint64_t *counts_from(const InternodeLlParams &p, uint64_t epoch, int source) {
  return mine_at<uint64_t>(p, p.at.counts_in[slot_of(epoch)] + static_cast<uint64_t>(source) * p.at.counts_bytes);
}

// ---- Sending --------------------------------------------------------------------------------------------------------

// A message: bytes for an offset in a rank's block, then a signal word.
struct Delivery {
  int rank;
  uint8_t *block;  // of the rank; null: a NIC takes the bytes from `from`
  uint32_t bytes;  // a multiple of 16
  uint64_t to, word_at, word;
  const uint8_t *from;
};

// By a warp, behind a barrier among those that have stored the bytes, or staged them for a NIC: the word, or the whole
// put. Not inlined: a caller would have to spill what it holds in registers around each call of NVSHMEM's functions.
__device__ __noinline__ inline void send_delivery(const InternodeLlParams &p, const Delivery &d) {
  uint8_t *self = p.session.team.self;
  if (d.block == nullptr)
    put_by_warp(self + d.to, d.from, d.bytes, reinterpret_cast<uint64_t *>(self + d.word_at), d.word, d.rank);
  else if (lane_id() == 0)
    ptx::st_release_sys(reinterpret_cast<uint64_t *>(d.block + d.word_at), d.word);
}
// By a warp: all of a message that lies at `from`.
__device__ inline void deliver(const InternodeLlParams &p, const Delivery &d) {
  if (d.block != nullptr) copy_row(d.block + d.to, d.from, d.bytes);
  __syncwarp();
  send_delivery(p, d);
}

// A dispatch as in one node. A combine says whether its weights follow, which is not compared.
__device__ inline HandshakeMessage internode_message(const InternodeLlParams &p, bool weights_follow) {
  HandshakeMessage mine = low_latency_message(p, p.max_tokens, p.format);
  if (p.session.op == DK_OP_LL_DISPATCH)
    mine.flags |= (p.topk_weights != nullptr ? kHandshakeWeights : 0) | (p.num_tokens == 0 ? kHandshakeSilent : 0);
  mine.segment = weights_follow ? 1 : 0;
  return mine;
}

// The control block posts to every rank the credits that it has not posted yet and, in a send half, the handshake
// message. It overwrites the outbox's copy of four calls ago: credits for that call arrived before the send half of two
// calls ago.
__device__ inline void post_low_latency(const InternodeLlParams &p, uint64_t epoch, bool weights_follow) {
  const TeamView &team = p.session.team;
  auto *out = mine_at<HandshakeMessage>(p, p.at.outbox) + epoch % kLowLatencyHandshakeCopies;
  if (p.sends() && threadIdx.x == 0) *out = internode_message(p, weights_follow);
  __syncthreads();
#pragma unroll 1
  for (int r = warp_id(); r < team.num_ranks; r += kLlWarps) {
    if (__any_sync(kAllLanes, is_masked(p.session, r))) continue;
    const int slot = lane_id();
    const uint64_t taken = slot < kLowLatencySlots ? max(team.scratch->consumed[slot][r], given_up_by(team, r)) : 0;
    if (r != team.rank && slot < kLowLatencySlots && p.state->posted[slot][r] != taken) {
      const uint64_t at = credit_at(team, slot, team.rank);
      if (p.blocks[r] != nullptr)
        ptx::st_release_sys(reinterpret_cast<uint64_t *>(p.blocks[r] + at), taken);
      else
        signal_by_thread(mine_at<uint64_t>(p, at), taken, r);
      p.state->posted[slot][r] = taken;
    }
    __syncwarp();
    const uint64_t to = handshake_at(team, epoch, team.rank);
    if (p.sends())
      deliver(p, {r, p.blocks[r], offsetof(HandshakeMessage, epoch), to, to + offsetof(HandshakeMessage, epoch), epoch,
                  reinterpret_cast<const uint8_t *>(out)});
  }
}
static_assert(offsetof(HandshakeMessage, epoch) % 16 == 0, "copied in units of 16 bytes");

// ---- Waits that may mask a rank -------------------------------------------------------------------------------------

// By one thread: waits until a rank has taken everything that this rank sent to it in a slot, the newest in call
// `sent`. False: the team has failed. For this rank itself it does not wait: its receive half either ran before this
// kernel or comes after it.
__device__ inline bool await_credit(const InternodeLlParams &p, int slot, int r, uint64_t sent) {
  const Session &s = p.session;
  if (r == s.team.rank) {
    if (s.team.scratch->consumed[slot][r] >= sent) return true;
    report_failure(s, DK_EINVAL, r, DK_FIELD_OPERATION, kLowLatencySlots, kLowLatencySlots + 1, 0);
    return false;
  }
  const auto *word = mine_at<uint64_t>(p, credit_at(s.team, slot, r));
  if (ptx::ld_acquire_sys(word) >= sent || is_masked(s, r)) return true;
  return wait_or_mask(s, r, sent,
                      [&](int64_t &seen) {
                        seen = static_cast<int64_t>(ptx::ld_acquire_sys(word));
                        return seen >= static_cast<int64_t>(sent);
                      }) ||
         !has_failed(s);
}

__device__ __forceinline__ uint64_t last_sent(const InternodeLlParams &p, int slot, int r) {
  return ptx::ld_relaxed_gpu(&p.session.team.scratch->sent[slot][r]);
}

// What a send half loads before its block knows whether the team has failed.
struct SlotLoads {
  uint64_t sent, taken;  // of this thread's rank, as await_credit() compares them
  uint64_t stage_epoch;  // combine: the newest call that sent from this buffer; from any, if that had another shape
};
__device__ __forceinline__ SlotLoads load_slots(const InternodeLlParams &p, uint64_t epoch, bool is_combine) {
  const int r = static_cast<int>(threadIdx.x);
  SlotLoads loads{};
  const TeamView &team = p.session.team;
  const int slot = slot_of(epoch);
  if (r < team.num_ranks) {
    loads.sent = last_sent(p, slot, r);
    loads.taken = r == team.rank ? ptx::ld_relaxed_gpu(&team.scratch->consumed[slot][r])
                                 : ptx::ld_acquire_sys(mine_at<uint64_t>(p, credit_at(team, slot, r)));
  }
  if (!is_combine) return loads;
  const LowLatencyState &state = *p.state;
  const uint64_t bytes = state.stage_bytes, first = state.stage_epoch[0], second = state.stage_epoch[1];
  loads.stage_epoch = bytes != p.at.stage_bytes ? max(first, second) : p.stage == 0 ? first : second;
  return loads;
}

// Whole block of a send half: waits until the slot is free at every rank and no put reads the buffer that this call
// sends from. A combine also waits for the call before it if that one sent from the same buffer (a graph with an odd
// number of combines is replayed) or had another shape.
__device__ inline bool await_empty_slots(const InternodeLlParams &p, uint64_t epoch, const SlotLoads &loads,
                                         bool is_combine) {
  const int slot = slot_of(epoch), other = slot_of(epoch + 1);
  const bool both = is_combine && loads.stage_epoch + 1 == epoch;
  bool good = true;
#pragma unroll 1
  for (int r = threadIdx.x; good && r < p.session.team.num_ranks; r += kLlThreads) {
    const bool early = r == static_cast<int>(threadIdx.x);
    if (!early || loads.taken < loads.sent) good = await_credit(p, slot, r, early ? loads.sent : last_sent(p, slot, r));
    if (both && good) good = await_credit(p, other, r, last_sent(p, other, r));
  }
  return __syncthreads_or(!good) == 0;
}

// ---- The call of each source that belongs to this one ---------------------------------------------------------------

// With shrink: one poll for the source's call.
__device__ inline bool find_source_call(const InternodeLlParams &p, uint64_t epoch, int source, uint64_t &found) {
  const TeamView &team = p.session.team;
  return find_handshake(
             team, epoch, source,
             [&](int copy) {
               return ptx::ld_acquire_sys(&mine_at<HandshakeMessage>(p, handshake_at(team, copy, source))->epoch);
             },
             found) >= 0;
}
// Likewise for a wait. Messages of queue pairs may pass each other, so a later call than the one expected is taken only
// once the expected one has stayed away for a part of the time limit. since: when a later one was first seen, 0 before.
__device__ inline bool await_source_call(const InternodeLlParams &p, uint64_t epoch, int source, uint64_t &since,
                                         uint64_t &found) {
  constexpr uint64_t kPart = 8;
  const Scratch *scratch = p.session.team.scratch;
  if (!find_source_call(p, epoch, source, found)) return false;
  if (found == epoch + scratch->epoch_ahead[source] || scratch->returned[source] != 0) return true;
  const uint64_t now = ptx::global_timer_ns();
  if (since == 0) since = now;
  if (now - since >= p.session.timeout_ns / kPart) return true;
  found = 0;
  return false;
}

// By one thread, with shrink: the number of a source's call, 0 if the source is masked, before or by this wait.
__device__ __noinline__ inline uint64_t await_source(const InternodeLlParams &p, uint64_t epoch, int source) {
  const Session &s = p.session;
  if (is_masked(s, source)) return 0;
  const uint64_t start = ptx::global_timer_ns();
  uint64_t since = 0, found = 0;
  wait_or_mask(s, source, epoch, [&](int64_t &) { return await_source_call(p, epoch, source, since, found); });
  if (is_control_block()) s.team.scratch->wait_ns[source] = ptx::global_timer_ns() - start;
  return found;
}
// The number of each source's call, in shared calls[R]; 0: the source is masked, before or by this wait. Whole block:
// without shrink before begin(), whose barrier follows.
__device__ inline void set_source_calls(const InternodeLlParams &p, uint64_t epoch, uint64_t *calls) {
#pragma unroll 1
  for (int r = threadIdx.x; r < p.session.team.num_ranks && !p.shrinks(); r += kLlThreads) calls[r] = epoch;
}
// With shrink in a receive half.
__device__ inline void find_source_calls(const InternodeLlParams &p, uint64_t epoch, uint64_t *calls) {
  if (!p.shrinks()) return;
#pragma unroll 1
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) calls[r] = await_source(p, epoch, r);
  __syncthreads();
}

// By one thread: waits for the word of a source's message; its number is `theirs` in the source's count.
__device__ inline bool await_message_word(const InternodeLlParams &p, uint64_t epoch, uint64_t theirs, int source) {
  return wait_or_mask(p.session, source, epoch, [&](int64_t &seen) {
    const uint64_t word = ptx::ld_acquire_sys(mine_at<uint64_t>(p, message_word_at(p, theirs, source)));
    seen = static_cast<int64_t>(word >> 32);
    return is_from(word, theirs, source);
  });
}

// The control block, at the end of a receive half. A dispatch waits for the words of the messages with counts: the
// credit for the call says that all of it has come. With shrink they have come before. And the caller may write the
// next combine's rows after this kernel, so puts of the previous call must have left that buffer. A rank posts its
// credit for them in its first kernel after it took the rows, mostly the one that sent this call. No wait for that if
// this rank has not received the previous call itself: its peers might be waiting for it to do so.
__device__ inline void end_receiving(const InternodeLlParams &p, uint64_t epoch, bool is_dispatch) {
  const Session &s = p.session;
  const int slot = slot_of(epoch - 1), me = s.team.rank;
  const bool counts = is_dispatch && !p.shrinks();
#pragma unroll 1
  for (int r = threadIdx.x; r < s.team.num_ranks; r += kLlThreads) {  // all loads are under way together
    const uint64_t word = counts ? ptx::ld_relaxed_sys(mine_at<uint64_t>(p, message_word_at(p, epoch, r))) : 0,
                   taken = r == me ? 0 : ptx::ld_relaxed_sys(mine_at<uint64_t>(p, credit_at(s.team, slot, r))),
                   sent = last_sent(p, slot, r), combine = ptx::ld_relaxed_gpu(&p.state->combine_sent[slot]),
                   received = ptx::ld_relaxed_gpu(&s.team.scratch->consumed[slot][me]);
    if (counts && !is_from(word, epoch, r) && !await_message_word(p, epoch, epoch, r)) return;
    const bool in_use = epoch > 1 && combine == epoch - 1 && received >= epoch - 1;
    if (in_use && r != me && taken < sent && !await_credit(p, slot, r, sent)) return;
  }
}

__device__ inline bool differs_from(const InternodeLlParams &p, const HandshakeMessage &mine,
                                    const HandshakeMessage *theirs, int source) {
  const Difference difference = compare_messages(mine, theirs);
  if (difference.field == DK_FIELD_NONE) return false;
  report_failure(p.session, DK_EMISMATCH, source, difference.field, difference.mine, difference.theirs, 0);
  return true;
}

// The control block of a receive half: waits for each source's handshake message and compares its arguments with this
// rank's. Waiting times go to the caller's wait_stats. Weights that follow a combine's message are awaited even where
// rows are not summed here: the credit for the call says that all of it has come.
__device__ inline void check_low_latency_peers(const InternodeLlParams &p, const uint64_t *calls) {
  constexpr int kEach = (DK_MAX_RANKS + kLlThreads - 1) / kLlThreads;
  const TeamView &team = p.session.team;
  const HandshakeMessage mine = internode_message(p, false);
  uint64_t epochs[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int r = static_cast<int>(threadIdx.x) + n * kLlThreads;
    epochs[n] = r < team.num_ranks ? calls[r] : 0;
  }
  __syncthreads();  // dispatch's counters write to `calls` next
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int r = static_cast<int>(threadIdx.x) + n * kLlThreads;
    if (r >= team.num_ranks) break;
    const uint64_t epoch = epochs[n];
    const auto *from = mine_at<HandshakeMessage>(p, handshake_at(team, epoch, r));
    const uint64_t start = ptx::global_timer_ns();
    const bool came = epoch != 0 && wait_or_mask(p.session, r, epoch, [&](int64_t &seen) {
                        seen = static_cast<int64_t>(ptx::ld_acquire_sys(&from->epoch));
                        return seen >= static_cast<int64_t>(epoch);
                      });
    const bool fits = came && !differs_from(p, mine, from, r);
    if (fits && from->segment != 0) await_message_word(p, epoch, epoch, r);
    if (epoch != 0 && !p.shrinks()) team.scratch->wait_ns[r] += ptx::global_timer_ns() - start;
    if (p.wait_stats != nullptr) p.wait_stats[r] += static_cast<int64_t>(team.scratch->wait_ns[r]);
  }
}

// ---- End ------------------------------------------------------------------------------------------------------------

// By the last block to leave, after it has completed the outputs.
__device__ inline void end_low_latency(const InternodeLlParams &p, uint64_t epoch, const uint64_t *calls,
                                       bool is_combine, bool failed) {
  Scratch *scratch = p.session.team.scratch;
  if (threadIdx.x == 0 && p.sends()) {
    scratch->low_latency_epoch = epoch;
    if (!p.receives()) scratch->tickets[p.ticket] = {epoch, 0};
    p.state->combine_sent[slot_of(epoch)] = is_combine ? epoch : 0;
    if (is_combine) {
      p.state->stage_epoch[p.stage] = epoch;
      p.state->stage_bytes = p.at.stage_bytes;
    }
  }
#pragma unroll 1
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) {
    if (is_masked(p.session, r)) continue;
    if (p.sends()) scratch->sent[slot_of(epoch)][r] = epoch;
    if (!p.receives() || failed || calls[r] == 0) continue;
    scratch->consumed[slot_of(calls[r])][r] = calls[r];
    scratch->seen[r] = max(scratch->seen[r], calls[r]);
    scratch->epoch_ahead[r] = static_cast<int64_t>(calls[r] - epoch);
    scratch->returned[r] = 0;
  }
  record_kernel(p.session, p.sends() && p.receives() ? nullptr : &scratch->half_ns[p.ticket], p.receives(), failed);
}

// Loads a token's index for each lane; -1: none. Several tokens' loads may be under way before one is checked.
__device__ __forceinline__ int64_t load_index_of_lane(const InternodeLlParams &p, int token) {
  return lane_id() < p.num_topk && token < p.num_tokens
             ? load_index(p.topk_idx, static_cast<int64_t>(token) * p.num_topk + lane_id(), p.index_bytes)
             : -1;
}
__device__ __forceinline__ float load_weight_of_lane(const InternodeLlParams &p, int token) {
  return lane_id() < p.num_topk && token < p.num_tokens
             ? p.topk_weights[static_cast<int64_t>(token) * p.num_topk + lane_id()]
             : 0;
}
// The expert; -1: none, or a wrong index, which is reported.
__device__ __forceinline__ int checked_expert(const InternodeLlParams &p, int64_t expert, bool &wrong) {
  wrong = expert < -1 || expert >= p.num_experts;
  if (!wrong) return static_cast<int>(expert);
  report_refusal(p.session, kNoted, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert);
  return -1;
}
__device__ __forceinline__ int checked_expert(const InternodeLlParams &p, int64_t expert) {
  bool wrong;
  return checked_expert(p, expert, wrong);
}
}  // namespace deepep::internode
