// logfmt.cuh - rows in LogFMT-10 (codes: common/log_codes.cuh), in blocks of 128 channels; 16 threads hold a block, 8
// channels each. On the wire three codes share a word with a constant bit, so no word is zero; a block that stays BF16
// is XORed with a pattern that it does not hold. The block's word, after the channels, has its kind and its range.
#pragma once
#include <cuda_bf16.h>

#include "cuda/common/log_codes.cuh"
#include "cuda/impl/low_latency/common.cuh"

namespace deepep {

enum : uint32_t { kBlockThere = 1u << 31, kBlockLogfmt = 1u << 30 };

// By the 16 threads of a block together: sends 8 channels each to block `to` of a peer's slot.
__device__ __forceinline__ void send_logfmt_chunk(const uint4 &data, uint8_t *to, uint32_t *info) {
  const uint32_t half = 0xffffu << (lane_id() & 16);
  const int lane = lane_id() & 15;
  BlockRange bits = range_of_chunk(data);
  bits.low = __reduce_min_sync(half, bits.low);
  bits.high = __reduce_max_sync(half, bits.high);
  if (!is_log_coded(bits)) {
    uint32_t attempt = 0;
    while (__any_sync(half, holds(data, pattern_of(attempt)))) ++attempt;
    ptx::st_relaxed_sys_v4(to + 16 * lane, exclusive_or(data, pattern_of(attempt)));
    if (lane == 0) ptx::st_relaxed_sys(info, kBlockThere | attempt);
    return;
  }
  uint32_t codes[9] = {};
  log_encode_chunk(log_range(bits), data, codes);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    ptx::st_relaxed_sys(reinterpret_cast<uint32_t *>(to + 64 * i) + lane,
                        kBlockThere | codes[3 * i] | codes[3 * i + 1] << 10 | codes[3 * i + 2] << 20);
  if (lane == 0) ptx::st_relaxed_sys(info, kBlockThere | kBlockLogfmt | bits.high << 15 | bits.low);
}

// By `threads` threads, a multiple of 32: sends a row of BF16 to a peer's slot.
__device__ inline void send_logfmt(const uint8_t *row, uint8_t *to, uint32_t *infos, int hidden, int thread,
                                   int threads) {
  for (int at = thread; at < hidden / 8; at += threads)  // whole blocks of 16 threads
    send_logfmt_chunk(ptx::ld_stream(row + 16 * at), to + at / 16 * 256, infos + at / 16);
}

// What a thread polls of its 8 channels: three words of codes, and the block's word. A block that stays BF16 is read
// once that word is there.
__device__ __forceinline__ uint4 load_logfmt_chunk(const uint8_t *row, const uint32_t *infos, int at) {
  const auto *codes = reinterpret_cast<const uint32_t *>(row + at / 16 * 256) + at % 16;
  return {ptx::ld_relaxed_sys(codes), ptx::ld_relaxed_sys(codes + 16), ptx::ld_relaxed_sys(codes + 32),
          ptx::ld_relaxed_sys(infos + at / 16)};
}
__device__ __forceinline__ bool has_logfmt_arrived(const uint4 &v) {
  return v.w != 0 && ((v.w & kBlockLogfmt) == 0 || (v.x != 0 && v.y != 0 && v.z != 0));
}

// By the 16 threads of a block together, each of which has seen its chunk arrive: adds 8 channels, times weight, and
// empties the slot.
__device__ __forceinline__ void add_logfmt(const Session &s, int peer, uint64_t expected, uint8_t *row, uint32_t *infos,
                                           int at, const uint4 &chunk, float weight, float (&sum)[8]) {
  uint8_t *block = row + at / 16 * 256;
  const int lane = at % 16;
  if (lane == 0) infos[at / 16] = 0;
  if ((chunk.w & kBlockLogfmt) == 0) {
    uint4 data = ptx::ld_relaxed_sys_v4(block + 16 * lane);
    if (!take_chunk(s, peer, expected, block + 16 * lane, data)) return;
    add_weighted(sum, exclusive_or(data, pattern_of(chunk.w & ~kBlockThere)), weight);
    return;
  }
  const LogRange range = log_range({chunk.w & 0x7fff, chunk.w >> 15 & 0x7fff});
  const uint32_t words[3] = {chunk.x, chunk.y, chunk.z};
  auto *codes = reinterpret_cast<uint32_t *>(block) + lane;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    codes[16 * i] = 0;
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (3 * i + j < 8) sum[3 * i + j] = fmaf(log_decode(range, words[i] >> (10 * j)), weight, sum[3 * i + j]);
  }
}

}  // namespace deepep
