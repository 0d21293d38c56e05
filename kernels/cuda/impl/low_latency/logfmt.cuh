// logfmt.cuh - rows in LogFMT-10 (codes: common/log_codes.cuh), in blocks of 128 channels; 16 threads hold a block, 8
// channels each. On the wire three codes share a word with a constant bit, so no word is zero; a block that stays BF16
// is XORed with a pattern that it does not hold. The block's word, after the channels, has its kind and its range.
#pragma once
#include <cuda_bf16.h>

#include "cuda/common/log_codes.cuh"
#include "cuda/impl/low_latency/common.cuh"

namespace deepep {

enum : uint32_t { kBlockThere = 1u << 31, kBlockLogfmt = 1u << 30 };

// Where a block lies in a row of `chunks` chunks: four pieces of 64 bytes. In a row of whole pairs of blocks the two
// take turns, so that a warp, which holds both, stores and loads 128 bytes in a row.
struct BlockPlace {
  uint8_t *first;
  uint32_t step;
};
__device__ __forceinline__ BlockPlace block_place(uint8_t *row, int at, int chunks) {
  const uint32_t block = static_cast<uint32_t>(at) / 16;
  if (chunks % 32 != 0) return {row + block * 256, 64};
  return {row + block / 2 * 512 + block % 2 * 64, 128};
}
__device__ __forceinline__ uint32_t *codes_of(const BlockPlace &place, int lane, int which) {
  return reinterpret_cast<uint32_t *>(place.first + place.step * which) + lane;
}
__device__ __forceinline__ uint8_t *chunk_of(const BlockPlace &place, int lane) {  // of a block that stays BF16
  return place.first + place.step * (lane / 4) + 16 * (lane % 4);
}

// By the 16 threads of a block together: sends 8 channels each to their places in a peer's slot; chunk `at` of the row.
// kWhole: with zeros where codes leave a part of the block's place unused.
template <bool kWhole = false>
__device__ __forceinline__ void send_logfmt_chunk(const uint4 &data, uint8_t *row, uint32_t *infos, int at,
                                                  int chunks) {
  const uint32_t half = 0xffffu << (lane_id() & 16);
  const int lane = lane_id() & 15;
  const BlockPlace place = block_place(row, at, chunks);
  uint32_t *info = infos + at / 16;
  BlockRange bits = unpack_range(packed_range_of_chunk(data));
  bits.low = __reduce_min_sync(half, bits.low);
  bits.high = __reduce_max_sync(half, bits.high);
  if (!is_log_coded(bits)) {
    uint32_t attempt = 0;
    while (__any_sync(half, holds(data, pattern_of(attempt)))) ++attempt;
    ptx::st_relaxed_sys_v4(chunk_of(place, lane), exclusive_or(data, pattern_of(attempt)));
    if (lane == 0) ptx::st_relaxed_sys(info, kBlockThere | attempt);
    return;
  }
  uint32_t codes[9] = {};
  log_encode_chunk(log_encoder(log_range(bits)), data, codes);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    ptx::st_relaxed_sys(codes_of(place, lane, i),
                        kBlockThere | codes[3 * i] | codes[3 * i + 1] << 10 | codes[3 * i + 2] << 20);
  if (kWhole) ptx::st_relaxed_sys(codes_of(place, lane, 3), 0u);
  if (lane == 0) ptx::st_relaxed_sys(info, kBlockThere | kBlockLogfmt | range_word(bits));
}

// By `threads` threads, a multiple of 32: sends a row of BF16 to a peer's slot.
template <bool kWhole = false>
__device__ inline void send_logfmt(const uint8_t *row, uint8_t *to, uint32_t *infos, int hidden, int thread,
                                   int threads) {
  constexpr int kPiece = 4;
  const int chunks = hidden / 8;
#pragma unroll 1
  for (int base = thread; base < chunks; base += kPiece * threads) {
    uint4 data[kPiece];  // all in flight together
#pragma unroll
    for (int u = 0; u < kPiece; ++u)
      if (base + u * threads < chunks) data[u] = ptx::ld_stream(row + 16 * (base + u * threads));
#pragma unroll
    for (int u = 0; u < kPiece; ++u)  // whole blocks of 16 threads
      if (base + u * threads < chunks) send_logfmt_chunk<kWhole>(data[u], to, infos, base + u * threads, chunks);
  }
}

// What a thread polls of its 8 channels: three words of codes, and the block's word. A block that stays BF16 is read
// once that word is there.
__device__ __forceinline__ uint4 load_logfmt_chunk(uint8_t *row, const uint32_t *infos, int at, int chunks) {
  const BlockPlace place = block_place(row, at, chunks);
  return {ptx::ld_relaxed_sys(codes_of(place, lane_id() & 15, 0)),
          ptx::ld_relaxed_sys(codes_of(place, lane_id() & 15, 1)),
          ptx::ld_relaxed_sys(codes_of(place, lane_id() & 15, 2)), ptx::ld_relaxed_sys(infos + at / 16)};
}
__device__ __forceinline__ bool has_logfmt_arrived(const uint4 &v) {
  return v.w != 0 && ((v.w & kBlockLogfmt) == 0 || (v.x != 0 && v.y != 0 && v.z != 0));
}

// By the 16 threads of a block together, each of which has seen its chunk arrive: adds 8 channels, times weight, and
// empties the slot.
__device__ __forceinline__ void add_logfmt(const Session &s, int peer, uint64_t expected, uint8_t *row, uint32_t *infos,
                                           int at, int chunks, const uint4 &chunk, float weight, float (&sum)[8]) {
  const BlockPlace place = block_place(row, at, chunks);
  const int lane = lane_id() & 15;
  if (lane == 0) infos[at / 16] = 0;
  if ((chunk.w & kBlockLogfmt) == 0) {
    uint8_t *from = chunk_of(place, lane);
    uint4 data = ptx::ld_relaxed_sys_v4(from);
    if (!take_chunk(s, peer, expected, from, data)) return;
    add_weighted(sum, exclusive_or(data, pattern_of(chunk.w & ~kBlockThere)), weight);
    return;
  }
  const LogRange range = log_range(range_of_word(chunk.w));
  const uint32_t words[3] = {chunk.x, chunk.y, chunk.z};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    *codes_of(place, lane, i) = 0;
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (3 * i + j < 8) sum[3 * i + j] = fmaf(log_decode(range, words[i] >> (10 * j)), weight, sum[3 * i + j]);
  }
}

}  // namespace deepep
