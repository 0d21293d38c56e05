// combine_send.cuh - combine, the sending half. The experts' rank sums its experts' rows for a token in FP32 and sends
// one row. The weights come from the dispatch if that had them; else every combine sends them first, and a call that
// also receives waits for them. The send half alone never waits: it sends each expert's row by itself. The row word
// says which of the two a row is, so ranks need not agree. By copy engines: combine_outbox.cuh.
#pragma once
#include "cuda/impl/low_latency/combine_outbox.cuh"

namespace deepep {

// ---- Send: weights --------------------------------------------------------------------------------------------------

// Whether this rank sends its weights to the experts' ranks.
__device__ __forceinline__ bool sends_weights(const LowLatencyCombineParams &p) {
  return p.sends() && (p.session.team.flags & DK_TEAM_SHRINK) == 0;
}
// By the last warp, for the block's tokens; `entry`: of the first one.
template <class P>
__device__ inline void send_weights(const P &p, const LowLatencyCall &call, uint8_t *const *peers, Entry entry) {
  const int lane = lane_id();
#pragma unroll 1
  for (int token = first_of_block(); token < p.num_tokens; token += num_workers()) {
    if (token != first_of_block()) entry = load_entry(p, token);
    const int expert = entry.expert >= 0 && entry.expert < p.num_experts ? static_cast<int>(entry.expert) : -1;
    if (P::kCopies && __any_sync(kAllLanes, expert < 0 && entry.expert != -1) != 0) {
      for (int r = 0; r < p.session.team.num_ranks; ++r)
        ptx::st_relaxed_sys(sent_weights(p, peers[r], call, p.session.team.rank, token) + lane,
                            tagged(combine_tag(call.epoch), kUnwanted));
      continue;
    }
    if (expert < 0 && entry.expert != -1)  // the rank of the row's expert, whichever that is, waits for its weight
      for (int r = 0; r < p.session.team.num_ranks; ++r)
        ptx::st_relaxed_sys(sent_weights(p, peers[r], call, p.session.team.rank, token) + lane,
                            tagged(combine_tag(call.epoch), 0));
    const float sum = sum_of_same(p, expert, entry.weight, __match_any_sync(kAllLanes, expert));
    if (expert >= 0)
      ptx::st_relaxed_sys(sent_weights(p, peers[p.by_local.quotient(expert)], call, p.session.team.rank, token) + lane,
                          tagged(combine_tag(call.epoch), P::kCopies ? weight_bits(sum) : __float_as_uint(sum)));
  }
}

// ---- Send: sums of this rank's experts ------------------------------------------------------------------------------

struct SumList {  // shared, of a group
  const uint8_t *row[kMaxTopk];
  float weight[kMaxTopk];
  int32_t count, first_expert;
};

// A lane's entry of a token's header, in each of the last dispatches: which of them counts is known later.
struct Headers {
  uint64_t entry[kHeaderCopies], weight[kHeaderCopies];
};
template <class P>
__device__ __forceinline__ Headers load_headers(const P &p, int source, int token) {
  Headers headers{};
#pragma unroll
  for (int copy = 0; copy < kHeaderCopies; ++copy)
    if (lane_id() < p.num_topk)
      ptx::ld_relaxed_sys_pair(token_header(p, own_block(p), copy, source, token) + 2 * lane_id(), headers.entry[copy],
                               headers.weight[copy]);
  return headers;
}

// A dispatch whose rows may be summed here; number 0: none. `fetch`: its weights come with the combine.
struct SummedDispatch {
  uint64_t number;
  bool fetch;
};

// By the first warp of a group: lists the rows of x that belong to a token, from the header of its dispatch. `bases`:
// [L][R], the first row.
template <class P>
__device__ inline void read_sum(const P &p, const LowLatencyCall &call, const SummedDispatch &summed,
                                const Headers &headers, int source, int token, const int32_t *bases, SumList *list) {
  const int lane = lane_id(), num_ranks = p.session.team.num_ranks;
  uint64_t dispatch = summed.number;
  if ((p.session.team.flags & DK_TEAM_SHRINK) != 0)
    dispatch += p.session.team.scratch->dispatch_ahead[source];  // by the source's own count
  uint64_t entry = 0, weight = 0;
#pragma unroll
  for (int copy = 0; copy < kHeaderCopies; ++copy)
    if (dispatch % kHeaderCopies == copy) {
      entry = headers.entry[copy];
      weight = headers.weight[copy];
    }
  const uint32_t code = static_cast<uint32_t>(entry);
  const bool row = lane < p.num_topk && has_tag(entry, dispatch_tag(dispatch)) && (code & kEntryRow) != 0 &&
                   entry_expert(code) < p.num_local() && entry_position(code) < p.num_max_tokens;
  const bool nothing =
      __any_sync(kAllLanes, lane == 0 && (!has_tag(entry, dispatch_tag(dispatch)) || (code & kEntryNothing) != 0)) != 0;
  uint32_t rows = nothing ? 0 : __ballot_sync(kAllLanes, row);
  if (summed.fetch && rows != 0) {
    const bool wanted = (rows >> lane & 1) != 0;
    const uint64_t *from = sent_weights(p, own_block(p), call, source, token) + lane;
    const uint64_t start = P::kBeside || is_control_block() ? ptx::global_timer_ns() : 0;
    const auto here = [&] { return !wanted || has_tag(weight, combine_tag(call.epoch)); };
    const bool came = warp_wait_or_fail(
        p.session, static_cast<int64_t>(call.epoch),
        [&] {
          if (!here()) weight = ptx::ld_relaxed_sys(from);
          return __all_sync(kAllLanes, here()) != 0;
        },
        [&] { return here() ? -1 : source; });
    if (!came || (P::kCopies && __any_sync(kAllLanes, wanted && static_cast<uint32_t>(weight) == kUnwanted) != 0))
      rows = 0;
    if (P::kBeside && lane == 0)  // its warps wait at the same time
      atomicMax(reinterpret_cast<unsigned long long *>(&p.session.team.scratch->beside[p.ticket].wait_ns[source]),
                static_cast<unsigned long long>(ptx::global_timer_ns() - start));
    if (!P::kBeside && is_control_block() && lane == 0)
      add_to(&p.session.team.scratch->wait_ns[source], ptx::global_timer_ns() - start);
  }
  const int expert = row ? entry_expert(code) : 0x7fffffff;
  const int first = __reduce_min_sync(kAllLanes, nothing ? 0x7fffffff : expert);
  if (rows >> lane & 1) {
    const int at = __popc(rows & ((1u << lane) - 1));
    list->row[at] = p.x() + (expert * p.rows_per_expert() + bases[expert * num_ranks + source] + entry_position(code)) *
                                p.x_row_stride;
    list->weight[at] = __uint_as_float(static_cast<uint32_t>(weight));
  }
  // One thread reads the mask, which may change meanwhile, for the whole group.
  if (lane == 0) {
    list->count = is_masked(p.session, source) ? 0 : __popc(rows);
    list->first_expert = first;
  }
}

// By a group: chunks first + thread, + kLlGroupThreads, ... of a row that begins at `to`.
constexpr int kPieceChunks = 4;
__device__ __forceinline__ void send_piece(uint8_t *to, int first, int chunks, const uint4 (&data)[kPieceChunks]) {
#pragma unroll
  for (int u = 0; u < kPieceChunks; ++u)
    if (first + u * kLlGroupThreads < chunks) ptx::st_relaxed_sys_v4(to + 16 * (first + u * kLlGroupThreads), data[u]);
}

// By a group. A rounded sum is never two NaNs with all bits set, so the first pattern always serves. Loads of several
// chunks and rows are in flight together: one after the other each would cost the latency of memory.
template <class P>
__device__ inline void send_sum(const P &p, const LowLatencyCall &call, const SumList *list, uint8_t *block, int dest,
                                int token, int thread) {
  constexpr int kRows = 2;
  const int expert = p.session.team.rank * p.num_local() + list->first_expert, chunks = p.hidden / 8;
  const uint32_t number = number_of_row(p, expert, token);
  uint8_t *to = slot_row(p, block, call, number);
  const bool logfmt = (p.flags & DK_LL_LOGFMT) != 0;
  uint32_t *infos = slot_words(p, block, call, number), kind = kKindSum;
  if constexpr (P::kCopies)
    if (p.outbox.rows != nullptr) {
      const uint32_t packed = number_of_token(p, p.session.team.rank, token);
      const bool copied = goes_by_copy(p, dest);
      kind = kKindPacked;
      to = copied ? outbox_row(p, dest, token) : slot_row(p, block, call, packed);
      infos = copied ? outbox_words(p, dest, token) : slot_words(p, block, call, packed);
    }
#pragma unroll 1
  for (int base = thread; base < chunks; base += kPieceChunks * kLlGroupThreads) {
    float sum[kPieceChunks][8] = {};
#pragma unroll 1
    for (int first = 0; first < list->count; first += kRows) {
      uint4 data[kRows][kPieceChunks];
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (first + n >= list->count) continue;
        const uint8_t *from = list->row[first + n] + 16 * base;
#pragma unroll
        for (int u = 0; u < kPieceChunks; ++u)
          if (base + u * kLlGroupThreads < chunks) data[n][u] = ptx::ld_stream(from + 16 * kLlGroupThreads * u);
      }
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (first + n >= list->count) continue;
#pragma unroll
        for (int u = 0; u < kPieceChunks; ++u)
          if (base + u * kLlGroupThreads < chunks) add_weighted(sum[u], data[n][u], list->weight[first + n]);
      }
    }
    uint4 out[kPieceChunks];
#pragma unroll
    for (int u = 0; u < kPieceChunks; ++u) out[u] = round_bf16(sum[u]);
    if (logfmt) {
#pragma unroll
      for (int u = 0; u < kPieceChunks; ++u) {
        const int at = base + u * kLlGroupThreads;
        if (at < chunks) send_logfmt_chunk<P::kCopies>(out[u], to, infos, at, chunks);
      }
      continue;
    }
#pragma unroll
    for (int u = 0; u < kPieceChunks; ++u) out[u] = exclusive_or(out[u], pattern_of(0));
    send_piece(to, base, chunks, out);
  }
  if (thread == 0)
    ptx::st_relaxed_sys(row_word(p, block, call, number),
                        tagged(combine_tag(call.epoch), (pattern_of(0) & ~kKindMask) | kind));
}

// Groups take (rank, token) pairs in turn.
struct SumItem {
  int dest, token;
};
template <class P>
__device__ __forceinline__ SumItem sum_item(const P &p, int item) {
  return {(item / p.num_max_tokens + p.session.team.rank) % p.session.team.num_ranks, item % p.num_max_tokens};
}
__device__ __forceinline__ int first_item() {
  return static_cast<int>(threadIdx.x) / kLlGroupThreads * num_workers() + first_of_block();
}
template <class P>
__device__ __forceinline__ int num_items(const P &p) {
  return p.session.team.num_ranks * p.num_max_tokens;
}

// ---- Send: each expert's row ----------------------------------------------------------------------------------------

struct ExpertRow {
  int expert, row, dest;  // a local expert, one of its rows, the rank of its token
};
// The n-th row to send. `bases`: [L][R], the first row.
template <class P>
__device__ __forceinline__ ExpertRow find_row(const P &p, const int32_t *before, const int32_t *bases, int n) {
  const int num_ranks = p.session.team.num_ranks, expert = expert_of_row(before, p.num_local(), n);
  const int32_t *first = bases + expert * num_ranks;
  const int row = n - before[expert];
  int dest = 0;
  while (dest + 1 < num_ranks && row >= first[dest + 1]) ++dest;
  return {expert, row, dest};
}

// By a group. Most rows are read once: a thread holds its first chunks. place(word): where the row goes at its
// receiver, and its word.
template <class Place>
__device__ __forceinline__ void send_plain_row(const uint8_t *row, int chunks, uint32_t tag, bool sent, int group,
                                               int thread, Place place) {
  constexpr int kHeld = 7;
  uint4 held[kHeld];
#pragma unroll
  for (int u = 0; u < kHeld; ++u)
    if (thread + u * kLlGroupThreads < chunks) held[u] = ptx::ld_stream(row + 16 * (thread + u * kLlGroupThreads));
  uint32_t attempt = 0;
#pragma unroll 1
  for (;; ++attempt) {  // a pattern that the row does not hold
    bool found = false;
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (thread + u * kLlGroupThreads < chunks) found |= holds(held[u], pattern_of(attempt));
#pragma unroll 1
    for (int at = thread + kHeld * kLlGroupThreads; at < chunks; at += kLlGroupThreads)
      found |= holds(ptx::ld_stream(row + 16 * at), pattern_of(attempt));
    if (!ptx::barrier_or_among<kLlGroupThreads>(1 + group, found)) break;
  }
  if (!sent) return;
  const uint32_t pattern = pattern_of(attempt);
  uint64_t *word;
  uint8_t *to = place(word);
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int at = thread + u * kLlGroupThreads;
    if (at < chunks) ptx::st_relaxed_sys_v4(to + 16 * at, exclusive_or(held[u], pattern));
  }
#pragma unroll 1
  for (int at = thread + kHeld * kLlGroupThreads; at < chunks; at += kLlGroupThreads)
    ptx::st_relaxed_sys_v4(to + 16 * at, exclusive_or(ptx::ld_stream(row + 16 * at), pattern));
  if (thread == 0) ptx::st_relaxed_sys(word, tagged(tag, (pattern & ~kKindMask) | kKindRow));
}

// By a group: a row by itself.
template <class P>
__device__ inline void send_expert_row(const P &p, const LowLatencyCall &call, uint8_t *const *peers,
                                       const ExpertRow &which, int group, int thread) {
  const int64_t number_here = which.expert * p.rows_per_expert() + which.row;
  const uint8_t *from = p.x() + static_cast<uint64_t>(number_here) * p.x_row_stride;
  const int token = p.src_info()[number_here];  // the same for all threads, in flight beside the row
  // A mask may be set meanwhile: warps may differ, lanes must not.
  const bool sent =
      __any_sync(kAllLanes, token >= 0 && token < p.num_max_tokens && !is_masked(p.session, which.dest)) != 0;
  const auto number = [&] { return number_of_row(p, p.session.team.rank * p.num_local() + which.expert, token); };
  if ((p.flags & DK_LL_LOGFMT) == 0) {
    send_plain_row(from, p.hidden / 8, combine_tag(call.epoch), sent, group, thread, [&](uint64_t *&word) {
      word = row_word(p, peers[which.dest], call, number());
      return slot_row(p, peers[which.dest], call, number());
    });
  } else if (sent) {
    // The words of [E, B] rows are found as those of a source are, with the expert in place of the source.
    send_logfmt(from, slot_row(p, peers[which.dest], call, number()), slot_words(p, peers[which.dest], call, number()),
                p.hidden, thread, kLlGroupThreads);
    if (thread == 0)
      ptx::st_relaxed_sys(row_word(p, peers[which.dest], call, number()), tagged(combine_tag(call.epoch), kKindLogfmt));
  }
  if (sent && thread == 0) count_bytes(p.session, which.dest, 2ull * p.hidden);
}

// By a group: a row of this rank's first expert goes into the outbox by itself; zeros where a token has none. `found`:
// shared, of the group. Rarely called.
__device__ __noinline__ inline void pack_first_expert(const CopiedCombineParams &p, const LowLatencyCall &call,
                                                      uint8_t *const *peers, const int32_t *bases, int dest, int token,
                                                      int32_t *found, int group, int thread) {
  const int32_t first = bases[dest];  // [L][R]
  const int rows = static_cast<int>(min(p.layout_range()[dest] & 0xffffffff, static_cast<int64_t>(p.num_max_tokens)));
  if (thread == 0) *found = -1;
  const bool sent = !is_masked(p.session, dest);  // by one thread's look: a mask may be set meanwhile
  ptx::barrier_among<kLlGroupThreads>(1 + group);
  for (int i = thread; i < rows; i += kLlGroupThreads)
    if (p.src_info()[first + i] == token) *found = first + i;
  ptx::barrier_among<kLlGroupThreads>(1 + group);
  if (thread == 0 && !sent) *found = -1;
  ptx::barrier_among<kLlGroupThreads>(1 + group);
  const int row = *found;
  if (row < 0) {
    empty_outbox_row(p, dest, token, thread);
    return;
  }
  const uint8_t *from = p.x() + static_cast<uint64_t>(row) * p.x_row_stride;
  uint64_t *word = row_word(p, peers[dest], call, number_of_token(p, p.session.team.rank, token));
  if ((p.flags & DK_LL_LOGFMT) == 0) {
    send_plain_row(from, p.hidden / 8, combine_tag(call.epoch), true, group, thread, [&](uint64_t *&at) {
      at = word;
      return outbox_row(p, dest, token);
    });
  } else {
    send_logfmt<true>(from, outbox_row(p, dest, token), outbox_words(p, dest, token), p.hidden, thread,
                      kLlGroupThreads);
    if (thread == 0) ptx::st_relaxed_sys(word, tagged(combine_tag(call.epoch), kKindLogfmt));
  }
  if (thread == 0) count_bytes(p.session, dest, 2ull * p.hidden);
}

// By the groups of a worker, in turn: sums, or each row by itself. The caller has filled the list of a group's first
// sum.
template <class P>
__device__ inline void send_items(const P &p, const LowLatencyCall &call, const SummedDispatch &summed,
                                  uint8_t *const *peers, const int32_t *bases, int32_t *before, SumList *lists) {
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads,
            thread = static_cast<int>(threadIdx.x) % kLlGroupThreads;
  int number = first_item(), items = num_items(p);
  if (summed.number == 0) {
    sum_expert_rows(p, p.layout_range(), p.num_local(), before);
    const int rows = before[p.num_local()];
#pragma unroll 1
    for (; number < rows; number += kLlGroups * num_workers()) {
      const ExpertRow row = find_row(p, before, bases, number);
      if constexpr (P::kCopies)
        if (row.expert == 0 && goes_by_copy(p, row.dest)) continue;
      send_expert_row(p, call, peers, row, group, thread);
      mark(kMarkRowOut, thread == 0);
    }
    if constexpr (P::kCopies)
      for (number = first_item(); p.outbox.rows != nullptr && number < items; number += kLlGroups * num_workers()) {
        const SumItem item = sum_item(p, number);
        if (!goes_by_copy(p, item.dest)) continue;
        pack_first_expert(p, call, peers, bases, item.dest, item.token, &lists[group].count, group, thread);
        ptx::barrier_among<kLlGroupThreads>(1 + group);
      }
    items = 0;
  }
  SumList *list = lists + group;
#pragma unroll 1
  for (; number < items; number += kLlGroups * num_workers()) {
    const SumItem item = sum_item(p, number);
    if (number != first_item()) {
      ptx::barrier_among<kLlGroupThreads>(1 + group);
      if (thread < kWarp)
        read_sum(p, call, summed, load_headers(p, item.dest, item.token), item.dest, item.token, bases, list);
      ptx::barrier_among<kLlGroupThreads>(1 + group);
    }
    if (list->count > 0) {
      send_sum(p, call, list, peers[item.dest], item.dest, item.token, thread);
      if (thread == 0) count_bytes(p.session, item.dest, 2ull * p.hidden);
    } else if constexpr (P::kCopies) {
      if (goes_by_copy(p, item.dest)) empty_outbox_row(p, item.dest, item.token, thread);
    }
    mark(kMarkRowOut, thread == 0);
  }
}

// The dispatch that made src_info, if its headers are still here. Lane i of a warp looks at record i.
template <class P>
__device__ __forceinline__ bool may_sum(const P &p) {
  return (p.flags & DK_LL_UNREDUCED) == 0;
}
template <class P>
__device__ __forceinline__ LowLatencyRouting load_routing(const P &p) {
  const auto *words = reinterpret_cast<const uint64_t *>(&p.session.team.scratch->routing[lane_id() % kRoutingCopies]);
  LowLatencyRouting routing;
  routing.src_info = ptx::ld_relaxed_gpu(words);
  routing.dispatch = ptx::ld_relaxed_gpu(words + 1);
  routing.has_weights = ptx::ld_relaxed_gpu(words + 2);
  routing.num_topk = ptx::ld_relaxed_gpu(words + 3);
  return routing;
}
template <class P>
__device__ inline SummedDispatch routed_dispatch(const P &p, const LowLatencyCall &call,
                                                 const LowLatencyRouting &mine) {
  uint64_t newest = mine.src_info == reinterpret_cast<uint64_t>(p.src_info())
                        ? mine.dispatch
                        : 0;  // its memory may have served several dispatches
  bool waits = p.receives();
  if constexpr (P::kCopies) waits |= p.defers != 0;
  const bool may_fetch = waits && (p.session.team.flags & DK_TEAM_SHRINK) == 0;
  bool usable =
      newest != 0 && (mine.has_weights != 0 || may_fetch) && mine.num_topk == static_cast<uint64_t>(p.num_topk);
  bool known = mine.has_weights != 0;
#pragma unroll
  for (int step = 1; step < kRoutingCopies; step *= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, newest, step);
    const bool other_usable = __shfl_xor_sync(kAllLanes, static_cast<int>(usable), step) != 0;
    const bool other_known = __shfl_xor_sync(kAllLanes, static_cast<int>(known), step) != 0;
    if (other > newest) {
      newest = other;
      usable = other_usable;
      known = other_known;
    }
  }
  return {usable && may_sum(p) && newest + 1 >= call.dispatch ? newest : 0, !known};
}

}  // namespace deepep
