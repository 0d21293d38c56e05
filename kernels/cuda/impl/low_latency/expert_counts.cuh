// expert_counts.cuh - how many tokens choose an expert, and how many of them before a token. Every block counts in its
// own copy of topk_idx in shared memory.
#pragma once
#include "cuda/impl/low_latency/control.cuh"

namespace deepep {

// The entries of topk_idx as 16-bit codes in shared memory, `stride` of them a token; kNoExpert where there is none.
// Mostly all tokens fit into one tile.
constexpr int kTileCodes = 4096;
constexpr uint32_t kNoExpert = 0xffff;
__host__ __device__ constexpr int code_stride(int num_topk) { return align_up(num_topk, 8); }
__host__ __device__ constexpr int tokens_of_tile(int num_topk) {
  return kTileCodes / code_stride(num_topk) / kWarp * kWarp;
}
struct CodeTile {
  uint16_t *codes;
  int stride, tokens;
  __device__ CodeTile(void *memory, int num_topk, int num_tokens)
      : codes(static_cast<uint16_t *>(memory)), stride(code_stride(num_topk)), tokens(num_tokens) {}
};
__device__ __forceinline__ uint16_t code_of(const LowLatencyDispatchParams &p, int64_t expert) {
  return static_cast<uint16_t>(expert >= 0 && expert < p.num_experts ? static_cast<uint32_t>(expert) : kNoExpert);
}

// The first codes of the first tile, loaded before anything else; only where the entries of a token fill its codes.
constexpr int kEarlyCodes = 2;
struct CodeLoads {
  int64_t expert[kEarlyCodes];
};
__device__ __forceinline__ CodeLoads load_early_codes(const LowLatencyDispatchParams &p, const CodeTile &tile) {
  CodeLoads early{{-1, -1}};
  const int thread = static_cast<int>(threadIdx.x), entries = tile.stride == p.num_topk ? p.num_tokens * p.num_topk : 0;
  if (p.index_bytes == 8) {
#pragma unroll
    for (int u = 0; u < kEarlyCodes; ++u)
      if (thread + u * kLlThreads < entries)
        early.expert[u] = static_cast<const int64_t *>(p.topk_idx())[thread + u * kLlThreads];
  } else {
#pragma unroll
    for (int u = 0; u < kEarlyCodes; ++u)
      if (thread + u * kLlThreads < entries)
        early.expert[u] = static_cast<const int32_t *>(p.topk_idx())[thread + u * kLlThreads];
  }
  return early;
}
// Whole block: the tile that begins with token `first`, its codes from `from` on.
__device__ inline void store_codes(const LowLatencyDispatchParams &p, const CodeTile &tile, int first, int from) {
  const int codes = min(tile.tokens, align_up(p.num_tokens - first, kWarp)) * tile.stride;  // whole warps read them
#pragma unroll 1
  for (int at = from + static_cast<int>(threadIdx.x); at < codes; at += kLlThreads) {
    const int within = tile.stride == p.num_topk ? p.by_topk.quotient(at) : at / tile.stride,
              k = at - within * tile.stride, token = first + within;
    const bool there = k < p.num_topk && token < p.num_tokens;
    tile.codes[at] =
        there ? code_of(p, load_index(p.topk_idx(), static_cast<int64_t>(token) * p.num_topk + k, p.index_bytes))
              : static_cast<uint16_t>(kNoExpert);
  }
}
__device__ __forceinline__ void store_first_tile(const LowLatencyDispatchParams &p, const CodeTile &tile,
                                                 const CodeLoads &early) {
  const bool loaded = tile.stride == p.num_topk;
#pragma unroll
  for (int u = 0; u < kEarlyCodes; ++u)
    if (loaded) tile.codes[threadIdx.x + u * kLlThreads] = code_of(p, early.expert[u]);
  store_codes(p, tile, 0, loaded ? kEarlyCodes * kLlThreads : 0);
}

// Whether a token names an expert: eight codes at a time, two in a word. Exact: the test for a half that is zero.
__device__ __forceinline__ bool names(const uint16_t *codes, int stride, uint32_t expert) {
  const uint32_t twice = expert << 16 | expert;
  uint32_t zero = 0;
#pragma unroll 1
  for (int k = 0; k < stride; k += 8) {
    const uint4 eight = *reinterpret_cast<const uint4 *>(codes + k);
    for (uint32_t pair : {eight.x, eight.y, eight.z, eight.w}) {
      const uint32_t difference = pair ^ twice;
      zero |= (difference - 0x00010001u) & ~difference & 0x80008000u;
    }
  }
  return zero != 0;
}

// What a block counts in one pass over the codes: for each entry of its token the tokens before it that name the same
// expert, then for this block's experts b + (first .. first + 31) * W all tokens. In shared memory.
struct ExpertCounts {
  uint32_t count[2 * kMaxTopk];
};
__device__ __forceinline__ int own_expert(int n) { return static_cast<int>(blockIdx.x) + n * num_workers(); }

// Whole block; the counts are complete after a barrier. A warp counts for one expert at a time; none of the loops is
// unrolled, since code that runs once waits for its instructions to be fetched. `loaded`: the only tile is in shared
// memory; else the caller has a barrier before this. No token: num_tokens.
__device__ inline void count_experts(const LowLatencyDispatchParams &p, const CodeTile &tile, bool loaded, int token,
                                     int first_own, ExpertCounts *expert_counts) {
  const int lane = lane_id(), entries = token < p.num_tokens ? p.num_topk : 0,
            tile_tokens = loaded ? p.num_tokens : tile.tokens;
  int first = 0;
  do {
    if (!loaded) {
      store_codes(p, tile, first, 0);
      __syncthreads();
    }
#pragma unroll 1
    for (int which = warp_id(); which < entries + kWarp; which += kLlThreads / kWarp) {
      uint32_t expert = static_cast<uint32_t>(own_expert(first_own + which - entries));
      if (which >= entries && expert >= static_cast<uint32_t>(p.num_experts)) break;
      if (which < entries)
        expert =
            loaded
                ? tile.codes[token * tile.stride + which]
                : code_of(p, load_index(p.topk_idx(), static_cast<int64_t>(token) * p.num_topk + which, p.index_bytes));
      const int end = min((which < entries ? token : p.num_tokens) - first, tile_tokens);
      uint32_t count = 0;
#pragma unroll 1
      for (int base = 0; base < end; base += kWarp)
        count += __popc(__ballot_sync(
            kAllLanes, base + lane < end && names(tile.codes + (base + lane) * tile.stride, tile.stride, expert)));
      if (lane == 0) expert_counts->count[which] = (first == 0 ? 0 : expert_counts->count[which]) + count;
    }
    if (!loaded) __syncthreads();
    first += tile_tokens;
  } while (first < p.num_tokens);
}

}  // namespace deepep
