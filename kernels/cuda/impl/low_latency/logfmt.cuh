// logfmt.cuh - rows in LogFMT-10 (codes: common/log_codes.cuh), in blocks of 128 channels; 16 threads hold a block, 8
// channels each. On the wire three codes share a word with a constant bit, so no word is zero; a block that stays BF16
// is XORed with a pattern that it does not hold. The block's word, after the channels, has its kind and its range.
#pragma once
#include <cuda_bf16.h>

#include "cuda/common/log_codes.cuh"
#include "cuda/impl/low_latency/common.cuh"

namespace deepep {

enum : uint32_t { kBlockThere = 1u << 31, kBlockLogfmt = 1u << 30 };

// By `threads` threads, a multiple of 32: sends a row of BF16 to a peer's slot.
__device__ inline void send_logfmt(const uint8_t *row, uint8_t *to, uint32_t *infos, int hidden, int thread,
                                   int threads) {
  const int chunks = hidden / 8;
  for (int first = 0; first < chunks; first += threads) {
    const int at = first + thread;
    const bool mine = at < chunks;
    const uint32_t half = mine ? 0xffffu << (lane_id() & 16) : 0;
    if (!mine) continue;  // whole blocks of 16 threads at a time
    const uint4 data = ptx::ld_stream(row + 16 * at);
    BlockRange bits = range_of_chunk(data);
    bits.low = __reduce_min_sync(half, bits.low);
    bits.high = __reduce_max_sync(half, bits.high);
    uint8_t *block = to + at / 16 * 256;
    uint32_t *info = infos + at / 16;
    const int lane = at % 16;
    if (!is_log_coded(bits)) {
      uint32_t attempt = 0;
      while (__any_sync(half, holds(data, pattern_of(attempt)))) ++attempt;
      ptx::st_relaxed_sys_v4(block + 16 * lane, exclusive_or(data, pattern_of(attempt)));
      if (lane == 0) ptx::st_relaxed_sys(info, kBlockThere | attempt);
      continue;
    }
    uint32_t codes[9] = {};
    log_encode_chunk(log_range(bits), data, codes);
#pragma unroll
    for (int i = 0; i < 3; ++i)
      ptx::st_relaxed_sys(reinterpret_cast<uint32_t *>(block + 64 * i) + lane,
                          kBlockThere | codes[3 * i] | codes[3 * i + 1] << 10 | codes[3 * i + 2] << 20);
    if (lane == 0) ptx::st_relaxed_sys(info, kBlockThere | kBlockLogfmt | bits.high << 15 | bits.low);
  }
}

// By the 16 threads of a block together: adds 8 channels of a row in a slot, times weight, and empties the slot.
__device__ inline void add_logfmt(const Session &s, int peer, uint64_t expected, uint8_t *row, uint32_t *infos, int at,
                                  float weight, float (&sum)[8]) {
  const uint32_t half = 0xffffu << (lane_id() & 16);
  uint32_t *info_at = infos + at / 16;
  const int lane = at % 16;
  uint8_t *block = row + at / 16 * 256;
  uint32_t info = ptx::ld_relaxed_sys(info_at);
  const bool came = info != 0 || wait_or_mask(s, peer, expected, [&](int64_t &) {
                      info = ptx::ld_relaxed_sys(info_at);
                      return info != 0;
                    });
  if (!__all_sync(half, came)) return;
  if (lane == 0) *info_at = 0;
  if ((info & kBlockLogfmt) == 0) {
    uint4 data = ptx::ld_relaxed_sys_v4(block + 16 * lane);
    if (!take_chunk(s, peer, expected, block + 16 * lane, data)) return;
    add_weighted(sum, exclusive_or(data, pattern_of(info & ~kBlockThere)), weight);
    return;
  }
  const LogRange range = log_range({info & 0x7fff, info >> 15 & 0x7fff});
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    uint32_t word = 0;
    if (!take_word(s, peer, expected, reinterpret_cast<uint32_t *>(block + 64 * i) + lane, word)) return;
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (3 * i + j < 8) sum[3 * i + j] = fmaf(log_decode(range, word >> (10 * j)), weight, sum[3 * i + j]);
  }
}

}  // namespace deepep
