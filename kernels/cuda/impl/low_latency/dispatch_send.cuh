// dispatch_send.cuh - dispatch, the sending half: a token's row goes once to each rank that holds one of its experts,
// with a header: the local experts, and the row's position among their rows. Block b sends tokens b, b + W, ...
#pragma once
#include "cuda/impl/low_latency/copies.cuh"
#include "cuda/impl/low_latency/expert_counts.cuh"

namespace deepep {

// ---- Send: one token ------------------------------------------------------------------------------------------------

struct TokenRoute {          // of the token that a block is sending, in shared memory
  int32_t expert[kMaxTopk];  // -1: none, or named before
  float weight[kMaxTopk];    // summed over repetitions
  uint8_t *row[kMaxTopk];    // of each rank that holds one of the experts: where the token's row and words lie there
  uint32_t *words[kMaxTopk];
  int32_t rank[kMaxTopk], num_ranks;
};

struct SendTables {       // shared
  uint8_t *const *peers;  // [R], there too
  TokenRoute route;
  ExpertCounts expert_counts;
};

// By the last warp: the token's experts without repetitions, the ranks that hold them.
__device__ inline void read_route(const LowLatencyDispatchParams &p, const LowLatencyCall &call, int token, Entry entry,
                                  SendTables *tables) {
  const int lane = lane_id();
  TokenRoute *route = &tables->route;
  uint8_t *const *peers = tables->peers;
  if (entry.expert < -1 || entry.expert >= p.num_experts) {
    report_refusal(p.session, kNoted, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, entry.expert);
    entry.expert = -1;
  }
  const int expert = static_cast<int>(entry.expert), rank = expert < 0 ? -1 : p.by_local.quotient(expert);
  const uint32_t same = __match_any_sync(kAllLanes, expert), same_rank = __match_any_sync(kAllLanes, rank),
                 below = (1u << lane) - 1;
  const bool repeated = (same & below) != 0;
  const float sum = sum_of_same(p, expert, entry.weight, same);
  route->expert[lane] = expert < 0 || repeated ? -1 : expert;
  route->weight[lane] = sum;
  const bool leads = rank >= 0 && (same_rank & below) == 0 && !is_masked(p.session, rank);
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  if (leads) {
    const int n = __popc(leaders & below);
    route->rank[n] = rank;
    const uint32_t number = number_of_token(p, p.session.team.rank, token);
    if (p.outbox.rows != nullptr && rank != p.session.team.rank) {
      route->row[n] = outbox_row(p, rank, token);
      route->words[n] = outbox_words(p, rank, token);
    } else {
      route->row[n] = slot_row(p, peers[rank], call, number);
      route->words[n] = slot_scales(p, peers[rank], call, number);
    }
  }
  if (lane == 0) route->num_ranks = __popc(leaders);
}

// By one warp: writes to the owners of this block's experts from the `first` on how many of this rank's tokens choose
// them, and how many tokens it has. Their counts begin at `at`.
__device__ inline void send_own_counts(const LowLatencyDispatchParams &p, const LowLatencyCall &call,
                                       const SendTables *tables, int at, int first) {
  const int expert = own_expert(first + lane_id());
  const int owner = p.by_local.quotient(expert);
  if (expert < p.num_experts && !is_masked(p.session, owner))
    ptx::st_relaxed_sys(
        count_word(p, tables->peers[owner], call.dispatch, p.session.team.rank, expert - owner * p.num_local()),
        tagged(dispatch_tag(call.dispatch),
               static_cast<uint32_t>(p.num_tokens) << 16 | tables->expert_counts.count[at + lane_id()]));
}
// Whole block: its experts, but for the first `skip`.
__device__ inline void send_expert_counts(const LowLatencyDispatchParams &p, const LowLatencyCall &call,
                                          const CodeTile &tile, bool loaded, int skip, SendTables *tables) {
#pragma unroll 1
  for (int first = skip; own_expert(first) < p.num_experts; first += kWarp) {
    __syncthreads();
    count_experts(p, tile, loaded, p.num_tokens, first, &tables->expert_counts);
    __syncthreads();
    if (warp_id() == 0) send_own_counts(p, call, tables, 0, first);
  }
}

// By all threads, the last first: in FP8 those have less of the row to send.
__device__ inline void send_headers(const LowLatencyDispatchParams &p, const LowLatencyCall &call, int token,
                                    const SendTables *tables, uint32_t pattern) {
  const TokenRoute *route = &tables->route;
  const TeamView &team = p.session.team;
  const int num_local = p.num_local();
  for (int i = kLlThreads - 1 - static_cast<int>(threadIdx.x); i < team.num_ranks * p.num_topk; i += kLlThreads) {
    const int r = p.by_topk.quotient(i), k = i - r * p.num_topk;
    if (is_masked(p.session, r)) continue;
    bool chosen = false;
    for (int n = 0; n < route->num_ranks; ++n) chosen |= route->rank[n] == r;
    if (!chosen && k > 0) continue;
    uint64_t *header = token_header(p, tables->peers[r], call.dispatch, team.rank, token);
    const int expert = route->expert[k];
    const int local_expert = expert - r * num_local;
    const bool here = expert >= 0 && local_expert >= 0 && local_expert < num_local;
    const uint32_t code = !chosen ? kEntryNothing
                          : here  ? entry_row(local_expert, static_cast<int>(tables->expert_counts.count[k]))
                                  : 0;
    if (chosen && k == 0) ptx::st_relaxed_sys(&header[kPatternAt], tagged(dispatch_tag(call.dispatch), pattern));
    ptx::st_relaxed_sys_pair(&header[2 * k], tagged(dispatch_tag(call.dispatch), code),
                             tagged(dispatch_tag(call.dispatch), __float_as_uint(route->weight[k])));
  }
}

// What a thread loads of a row before anything else: 32 consecutive bytes (FP8), or two chunks kLlThreads apart (BF16,
// FP4). NVFP4 loads later.
struct RowBegin {
  uint4 a, b;
};
__device__ __forceinline__ RowBegin load_row_begin(const LowLatencyDispatchParams &p, int token) {
  const bool fp8 = p.format == DK_FORMAT_FP8;
  const int thread = static_cast<int>(threadIdx.x), first = fp8 ? 2 * thread : thread,
            second = fp8 ? first + 1 : first + kLlThreads;
  const int bytes = p.format == DK_FORMAT_FP4 ? p.hidden / 2 : 2 * p.hidden,
            chunks = p.format == DK_FORMAT_NVFP4 ? 0 : bytes / 16;
  const uint8_t *x = p.x() + static_cast<uint64_t>(token) * bytes;
  RowBegin begin{{0, 0, 0, 0}, {0, 0, 0, 0}};
  if (token < p.num_tokens && first < chunks) begin.a = ptx::ld_stream(x + 16 * first);
  if (token < p.num_tokens && second < chunks) begin.b = ptx::ld_stream(x + 16 * second);
  return begin;
}

// Stores a chunk at every rank that takes the token.
__device__ __forceinline__ void store_everywhere(const TokenRoute *route, int offset, const uint4 &chunk) {
  constexpr int kAtOnce = 4;
  for (int first = 0; first < route->num_ranks; first += kAtOnce) {
    uint8_t *row[kAtOnce];  // all loaded before the first store: the compiler moves no load across it
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) row[n] = first + n < route->num_ranks ? route->row[first + n] : nullptr;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      if (row[n] != nullptr) ptx::st_relaxed_sys_v4(row[n] + offset, chunk);
  }
}

// The row cast to FP8: 8 threads hold a block of 128 channels, 16 channels each.
__device__ inline void send_fp8_row(const LowLatencyDispatchParams &p, int token, const TokenRoute *route,
                                    const RowBegin &begin) {
  const int pieces = p.hidden / 16;
  const uint8_t *x = p.x() + static_cast<uint64_t>(token) * 2 * p.hidden;
#pragma unroll 1
  for (int first = 0; first < pieces; first += kLlThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    const bool mine = at < pieces;
    uint4 a = begin.a, b = begin.b;
    if (first != 0) {
      a = b = uint4{0, 0, 0, 0};
      if (mine) {
        a = ptx::ld_stream(x + 32 * at);
        b = ptx::ld_stream(x + 32 * at + 16);
      }
    }
    const Fp8Scale scale = fp8_scale_of_eight(a, b, (p.flags & DK_LL_ROUND_SCALE) != 0);
    if (!mine) continue;
    store_everywhere(route, 16 * at, exclusive_or(cast_sixteen(a, b, scale.inverse), kAllOnes));
    if (at % 8 != 0) continue;
    for (int n = 0; n < route->num_ranks; ++n)
      ptx::st_relaxed_sys(route->words[n] + at / 8, __float_as_uint(scale.scale) ^ kAllOnes);
  }
}

// The scales of a row of FP4 that the caller has packed: words; none of BF16.
__device__ __forceinline__ const uint32_t *given_scales(const LowLatencyDispatchParams &p, int token) {
  return reinterpret_cast<const uint32_t *>(p.x_scales() + static_cast<uint64_t>(token) * (p.hidden / kFp4Channels));
}
__device__ __forceinline__ int num_given_scales(const LowLatencyDispatchParams &p) {
  return p.format == DK_FORMAT_FP4 ? p.hidden / 64 : 0;
}
// Whether a thread's part of a row of BF16 or FP4 holds the pattern.
__device__ inline bool row_holds(const LowLatencyDispatchParams &p, int token, const RowBegin &begin,
                                 uint32_t pattern) {
  const int bytes = value_bytes(p);
  const uint8_t *x = p.x() + static_cast<uint64_t>(token) * bytes;
  bool found = holds(begin.a, pattern) || holds(begin.b, pattern);
  for (int at = static_cast<int>(threadIdx.x) + 2 * kLlThreads; at < bytes / 16; at += kLlThreads)
    found |= holds(ptx::ld_stream(x + 16 * at), pattern);
  for (int at = static_cast<int>(threadIdx.x); at < num_given_scales(p); at += kLlThreads)
    found |= given_scales(p, token)[at] == pattern;
  return found;
}
// The row cast to FP4: a thread holds 32 channels, and two neighbours a word of scales.
__device__ __noinline__ inline void send_nvfp4_row(const LowLatencyDispatchParams &p, int token,
                                                   const TokenRoute *route) {
  const int pieces = p.hidden / 32;
  const uint8_t *x = p.x() + static_cast<uint64_t>(token) * 2 * p.hidden;
  const float factor = fp4_factor(p.x_scales());
#pragma unroll 1
  for (int first = 0; first < pieces; first += kLlThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    uint32_t scales = 0;
    if (at < pieces)
      store_everywhere(route, 16 * at, exclusive_or(cast_fp4_piece(x + 64 * at, factor, scales), kNeverFp4));
    scales |= __shfl_xor_sync(kAllLanes, scales, 1) << 16;
    if (at >= pieces || at % 2 != 0) continue;
    for (int n = 0; n < route->num_ranks; ++n) ptx::st_relaxed_sys(route->words[n] + at / 2, scales ^ kNeverFp4);
  }
}
// A row of BF16 or FP4 as it is.
__device__ inline void send_row(const LowLatencyDispatchParams &p, int token, const TokenRoute *route,
                                const RowBegin &begin, uint32_t pattern) {
  const int bytes = value_bytes(p), chunks = bytes / 16, thread = static_cast<int>(threadIdx.x);
  const uint8_t *x = p.x() + static_cast<uint64_t>(token) * bytes;
#pragma unroll 1
  for (int at = thread; at < chunks; at += kLlThreads) {
    const uint4 chunk = at == thread ? begin.a : at == thread + kLlThreads ? begin.b : ptx::ld_stream(x + 16 * at);
    store_everywhere(route, 16 * at, exclusive_or(chunk, pattern));
  }
#pragma unroll 1
  for (int at = thread; at < num_given_scales(p); at += kLlThreads) {
    const uint32_t word = given_scales(p, token)[at] ^ pattern;
    for (int n = 0; n < route->num_ranks; ++n) ptx::st_relaxed_sys(route->words[n] + at, word);
  }
}

// ---- Send: all tokens of a block ------------------------------------------------------------------------------------

// What a block loads before it knows whether the slots are empty, and the number of the call.
struct EarlySend {
  CodeLoads codes;
  RowBegin row;
  Entry entry;
  SlotSeen slot;
};
__device__ __forceinline__ EarlySend load_early_send(const LowLatencyDispatchParams &p, const CodeTile &tile) {
  EarlySend early;
  early.row = load_row_begin(p, first_of_block());
  early.codes = load_early_codes(p, tile);
  early.entry = is_last_warp() ? load_entry(p, first_of_block()) : Entry{-1, 0};
  early.slot = look_at_slot(p);
  return early;
}

// False: the team failed.
__device__ inline bool send_tokens(const LowLatencyDispatchParams &p, const LowLatencyCall &call, const CodeTile &tile,
                                   const EarlySend &early, SendTables *tables) {
  const bool fp8 = p.format == DK_FORMAT_FP8, nvfp4 = p.format == DK_FORMAT_NVFP4, loaded = p.num_tokens <= tile.tokens;
  const int first = first_of_block();
  TokenRoute *route = &tables->route;
#pragma unroll 1
  for (int token = first; token < p.num_tokens; token += num_workers()) {
    RowBegin begin = early.row;
    if (token != first) begin = load_row_begin(p, token);
    if (is_last_warp())
      read_route(p, call, token, token == first ? early.entry : load_entry(p, token),
                 tables);  // the others have experts to count
    count_experts(p, tile, loaded, token, token == first ? 0 : p.num_experts, &tables->expert_counts);
    if (token != first)
      __syncthreads();
    else if (!await_empty_slots(p, call, early.slot))
      return false;
    mark(kMarkEmpty, threadIdx.x == 0);
    uint32_t pattern =
        nvfp4 ? kNeverFp4 : kAllOnes;  // one that the row does not hold: nearly always the first one tried
    for (uint32_t attempt = 0; !fp8 && !nvfp4 && __syncthreads_or(row_holds(p, token, begin, pattern)) != 0; ++attempt)
      pattern = pattern_of(attempt + 1);
    mark(kMarkCounted, threadIdx.x == 0);
    send_headers(p, call, token, tables, pattern);
    if (token == first && warp_id() == kLlThreads / kWarp - 2) send_own_counts(p, call, tables, p.num_topk, 0);
    if (fp8)
      send_fp8_row(p, token, route, begin);
    else if (nvfp4)
      send_nvfp4_row(p, token, route);
    else
      send_row(p, token, route, begin, pattern);
    if (p.outbox.rows != nullptr) clear_unsent(p, token, route->rank, route->num_ranks);
    mark(kMarkRowOut, threadIdx.x == 0);
    for (int n = threadIdx.x; n < route->num_ranks; n += kLlThreads)  // payload, for the statistics
      count_bytes(p.session, route->rank[n], dispatch_payload(p));
    if (token + num_workers() < p.num_tokens) __syncthreads();
  }
  if (first >= p.num_tokens && !await_empty_slots(p, call, early.slot))
    return false;  // after that wait, counts of old calls have been read
  send_expert_counts(p, call, tile, loaded, first < p.num_tokens ? kWarp : 0, tables);
  __syncthreads();
  return true;
}

}  // namespace deepep
