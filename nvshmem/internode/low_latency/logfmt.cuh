// logfmt.cuh - libdeepep_nvshmem.so: the wire format of combine's rows in LogFMT-10; kernels/cuda/common/log_codes.cuh
// has the codes. A row is 16 bytes with a bit for each block of 128 channels (1: coded), then the blocks. A block that
// is not coded is 256 bytes of BF16. A coded one is 176 bytes, of 16 lanes with 8 channels each:
//   bytes 0 to 63: a word of each lane with codes 0 to 2; 64 to 127: codes 3 to 5; 128 to 159: the lower 16 bits of
//   codes 6 and 7, whose upper 4 bits are in the upper two bits of each of the two words; 160 to 175: the range.
// A row without a coded block is sent as plain BF16. A row that is stored and not put is spread: its blocks begin where
// they do in BF16, so that each is stored as soon as it is known, and the bits lie behind the range of the first block
// that is coded, which the row's word names.
#pragma once
#include "cuda/common/log_codes.cuh"
#include "internode/low_latency/common.cuh"

namespace deepep::internode {

constexpr int kMaxLogChannels = 128 * kScaleChannels;  // a bit for each block
constexpr uint32_t kLogBlockBytes = 176, kPlainBlockBytes = 2 * kScaleChannels, kLogHeader = 16;

// The number of coded blocks before this one.
__device__ __forceinline__ int coded_before(const uint4 &coded, int block) {
  const uint32_t words[4] = {coded.x, coded.y, coded.z, coded.w};
  int count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (block > 32 * i) count += __popc(block >= 32 * (i + 1) ? words[i] : words[i] & ((1u << (block - 32 * i)) - 1));
  return count;
}
__device__ __forceinline__ bool is_coded(const uint4 &coded, int block) {
  const uint32_t word = block < 64 ? (block < 32 ? coded.x : coded.y) : (block < 96 ? coded.z : coded.w);
  return (word >> (block % 32) & 1) != 0;
}
__device__ __forceinline__ uint32_t log_block_at(const uint4 &coded, int block) {
  return kLogHeader + block * kPlainBlockBytes -
         static_cast<uint32_t>(coded_before(coded, block)) * (kPlainBlockBytes - kLogBlockBytes);
}
// Where a block lies in the row, with a bit that says whether it is coded.
constexpr uint32_t kCodedPlace = 1u << 31, kSpreadBitsAt = kLogBlockBytes;
__device__ __forceinline__ uint32_t place_of_block(const uint4 &coded, int block) {
  return log_block_at(coded, block) | (is_coded(coded, block) ? kCodedPlace : 0);
}
__device__ __forceinline__ uint32_t spread_place(const uint4 &coded, int block) {
  return static_cast<uint32_t>(block) * kPlainBlockBytes | (is_coded(coded, block) ? kCodedPlace : 0);
}
// Of a row whose blocks are all coded.
__device__ __forceinline__ uint32_t coded_place(bool spread, int block) {
  const uint32_t at = static_cast<uint32_t>(block);
  return (spread ? at * kPlainBlockBytes : kLogHeader + at * kLogBlockBytes) | kCodedPlace;
}
__device__ __forceinline__ bool is_any_coded(const uint4 &coded) {
  return (coded.x | coded.y | coded.z | coded.w) != 0;
}
__device__ __forceinline__ int first_coded(const uint4 &coded) {  // of a row that has one
  const uint32_t word = coded.x != 0 ? coded.x : coded.y != 0 ? coded.y : coded.z != 0 ? coded.z : coded.w;
  return (coded.x != 0 ? 0 : coded.y != 0 ? 32 : coded.z != 0 ? 64 : 96) + __ffs(static_cast<int>(word)) - 1;
}

// By a whole warp: 16 lanes have a block each.
__device__ __forceinline__ BlockRange range_of_block(const uint4 &data) {
  uint32_t range = packed_range_of_chunk(data);
#pragma unroll
  for (int step = 1; step < 16; step *= 2) range = ptx::max_u16x2(range, __shfl_xor_sync(kAllLanes, range, step));
  return unpack_range(range);
}

// By a warp, two blocks at a time: this lane's 8 channels, zeros past the end of the row.
__device__ __forceinline__ uint4 load_part(const uint8_t *row, int block, int blocks) {
  return block < blocks ? ptx::ld_stream(row + block * kPlainBlockBytes + 16 * (lane_id() % 16)) : uint4{0, 0, 0, 0};
}

// By a warp, which looks at two blocks at a time: the bits of a row.
struct CodedBits {
  uint32_t mine = 0;  // lanes 0 to 3: word `lane`

  __device__ void add(int first, bool coded) {  // of block `first` or the one after it, by half of the lanes each
    const uint32_t votes = __ballot_sync(kAllLanes, coded);
    if (first / 32 == lane_id()) mine |= ((votes & 1) | (votes >> 16 & 1) << 1) << (first % 32);
  }
  __device__ uint4 all() const {
    return {__shfl_sync(kAllLanes, mine, 0), __shfl_sync(kAllLanes, mine, 1), __shfl_sync(kAllLanes, mine, 2),
            __shfl_sync(kAllLanes, mine, 3)};
  }
};
// By a warp: the bits of the blocks of a row that are to be coded.
__device__ inline uint4 choose_coded(const uint8_t *row, int hidden) {
  const int blocks = hidden / kScaleChannels;
  CodedBits bits;
  for (int first = 0; first < blocks; first += 2)
    bits.add(first, is_log_coded(range_of_block(load_part(row, first + lane_id() / 16, blocks))));
  return bits.all();
}

// A block's range, after its codes.
__device__ __forceinline__ void write_range(uint8_t *block, const BlockRange &bits) {
  ptx::st_stream(block + 160, {range_word(bits), 0, 0, 0});
}
__device__ inline void encode_part(uint8_t *at, int part, const uint4 &data, const LogEncoder &encoder) {
  uint32_t codes[8];
  log_encode_chunk(encoder, data, codes);
  const uint32_t rest = codes[6] | codes[7] << 10;
  auto *out = reinterpret_cast<uint32_t *>(at);
  out[part] = codes[0] | codes[1] << 10 | codes[2] << 20 | (rest >> 16 & 3) << 30;
  out[16 + part] = codes[3] | codes[4] << 10 | codes[5] << 20 | rest >> 18 << 30;
  reinterpret_cast<uint16_t *>(at + 128)[part] = static_cast<uint16_t>(rest);
}
// 8 channels of the block that lies at `place`.
__device__ inline void write_part(uint8_t *row, uint32_t place, int part, const uint4 &data, const BlockRange &bits) {
  uint8_t *at = row + (place & ~kCodedPlace);
  if ((place & kCodedPlace) == 0) return ptx::st_stream(at + 16 * part, data);
  encode_part(at, part, data, log_encoder(log_range(bits)));
  if (part == 0) write_range(at, bits);
}

// 8 channels of a block of a spread row, of which all 16 lanes hold theirs; returns whether it is coded.
__device__ __forceinline__ bool store_spread_part(uint8_t *row, int block, int part, const uint4 &data,
                                                  const BlockRange &bits) {
  const bool coded = is_log_coded(bits);
  write_part(row, static_cast<uint32_t>(block) * kPlainBlockBytes | (coded ? kCodedPlace : 0), part, data, bits);
  return coded;
}
// By a warp: stores a row in LogFMT, spread. Returns the bits of its blocks.
__device__ __noinline__ inline uint4 store_spread_row(const uint8_t *row, uint8_t *to, int hidden) {
  const int half = lane_id() / 16, part = lane_id() % 16, blocks = hidden / kScaleChannels;
  CodedBits bits;
  uint4 data = load_part(row, half, blocks);
#pragma unroll 1
  for (int first = 0; first < blocks; first += 2) {
    const uint4 next = load_part(row, first + 2 + half, blocks);
    const BlockRange range = range_of_block(data);
    const bool mine = first + half < blocks;
    bits.add(first, mine && store_spread_part(to, first + half, part, data, range));
    data = next;
  }
  return bits.all();
}

// By a warp: writes the wire format of a row. Returns its bytes.
__device__ inline uint32_t encode_row(const uint8_t *row, uint8_t *to, int hidden, const uint4 &coded) {
  const int lane = lane_id(), part = lane % 16, blocks = hidden / kScaleChannels;
  if (lane == 0) ptx::st_stream(to, coded);
  for (int first = 0; first < blocks; first += 2) {
    const int block = first + lane / 16;
    const uint4 data = load_part(row, block, blocks);
    const BlockRange bits = range_of_block(data);
    if (block < blocks) write_part(to, place_of_block(coded, block), part, data, bits);
  }
  __syncwarp();
  return log_block_at(coded, blocks);
}

// 8 channels of a received row as they lie there, of the block at `place`. Of a coded block: the words of codes 0 to 2,
// of codes 3 to 5, of codes 6 and 7 of two lanes, and the range.
__device__ __forceinline__ uint4 load_wire_part(const uint8_t *row, uint32_t place, int part) {
  const uint8_t *at = row + (place & ~kCodedPlace);
  if ((place & kCodedPlace) == 0) return ptx::ld_stream(at + 16 * part);
  const auto *words = reinterpret_cast<const uint32_t *>(at);
  return {ptx::ld_relaxed_sys(words + part), ptx::ld_relaxed_sys(words + 16 + part),
          ptx::ld_relaxed_sys(words + 32 + part / 2), ptx::ld_relaxed_sys(words + 40)};
}
// Adds them, times weight.
__device__ inline void add_wire_part(const uint4 &data, uint32_t place, int part, float weight, float (&sum)[8]) {
  if ((place & kCodedPlace) == 0) return add_weighted(sum, data, weight);
  const uint32_t first = data.x, second = data.y, pair = data.z, bits = data.w;
  const uint32_t rest = (part % 2 != 0 ? pair >> 16 : pair & 0xffff) | first >> 30 << 16 | second >> 30 << 18;
  const LogRange range = log_range(range_of_word(bits));
  const uint32_t codes[8] = {first, first >> 10, first >> 20, second, second >> 10, second >> 20, rest, rest >> 10};
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = fmaf(log_decode(range, codes[i]), weight, sum[i]);
}

}  // namespace deepep::internode
