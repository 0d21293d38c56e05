// low_latency.cuh - where low-latency data lies. The rdma region holds rows; a word there that is zero has not arrived,
// so the sender XORs each row with a pattern that the row does not hold, and the receiver writes the zero back after it
// has read a word: overwriting the idle region with zeros is harmless. Calls use two slots in turn. Headers lie in the
// wire region, each word beside the number of its call, so a receiver never takes a word of an older call for new.
#pragma once
#include "cuda/layout/ring.cuh"

namespace deepep {

constexpr int kLowLatencySlots = 2;
constexpr int kMaxTopk = 32;
constexpr int kMaxLowLatencyTokens = 65535;  // a position among an expert's rows has 16 bits
constexpr uint32_t kMaxLocalExperts = 8192;  // 13 bits in an entry of a header
constexpr int kScaleChannels = 128;          // channels of one FP8 scale, of one LogFMT block
constexpr int kHeaderCopies = 4;             // of dispatch's headers: combine reads those of the last two dispatches

struct LowLatencyLayout {
  uint64_t row_bytes, words_at, words_bytes;  // a slot: [E, B] rows of 2H bytes, then a word per 128 channels of each
  uint64_t slot_bytes, zero_copy_bytes, rdma_bytes;
  uint64_t header_bytes, counts_bytes, row_words_bytes, weights_bytes, wire_bytes;
  uint64_t zero_copy(int slot) const { return slot * zero_copy_bytes; }
};

// Bytes of the header of one token at one destination: a code and a weight for each of 32 indices, and the pattern.
constexpr uint64_t kHeaderStride = kMaxTopk * 16 + 16;
// Of the weights of one token, which a combine sends after a dispatch that did not.
constexpr uint64_t kWeightsStride = kMaxTopk * 8;
constexpr int kWeightCopies = 3;  // no rank is more than two sends ahead of another

// How the wire region is divided after the ring's flags: 32nds of it for each area of headers, row words and weights,
// in this order.
enum : uint64_t { kWireParts = 32, kHeaderParts = 5, kRowWordParts = 3, kWeightParts = 2 };
static_assert(kHeaderCopies * kHeaderParts + kLowLatencySlots * kRowWordParts + kWeightCopies * kWeightParts ==
                  kWireParts,
              "all of it");

__host__ __device__ inline LowLatencyLayout low_latency_layout(uint64_t num_ranks, uint64_t max_tokens, uint64_t hidden,
                                                               uint64_t num_experts) {
  LowLatencyLayout at{};
  at.row_bytes = 2 * hidden;
  at.words_bytes = 4 * ceil_div<uint64_t>(hidden, kScaleChannels);
  at.words_at = num_experts * max_tokens * at.row_bytes;
  at.slot_bytes = num_experts * max_tokens * (at.row_bytes + at.words_bytes);
  at.zero_copy_bytes = num_experts * max_tokens * 2 * hidden;
  at.rdma_bytes = 4 * at.slot_bytes + 64;  // the quarters below, and their rounding
  at.header_bytes = num_ranks * max_tokens * kHeaderStride;
  at.counts_bytes = num_experts * 8;                  // [R][L]
  at.row_words_bytes = num_experts * max_tokens * 8;  // of combine's rows, [E][B]
  at.weights_bytes = num_ranks * max_tokens * kWeightsStride;
  // Areas begin at multiples of 128.
  const auto whole = [](uint64_t area, uint64_t parts) { return (area + 128) * kWireParts / parts; };
  const uint64_t row_words = whole(at.row_words_bytes, kRowWordParts), weights = whole(at.weights_bytes, kWeightParts);
  at.wire_bytes = align_up<uint64_t>(
      max(whole(at.header_bytes + at.counts_bytes, kHeaderParts), max(row_words, weights)) + 1, 4096);
  return at;
}

// A rank may be a call ahead of another, with another shape: the data of two consecutive calls must not overlap
// whatever their shapes, and zero-copy rows that users write must never lie in a slot. So the slots lie in the region's
// last two quarters, the zero-copy buffers in its first half; headers, row words and weights have areas of their own.
__host__ __device__ inline uint64_t slot_offset(uint64_t rdma_bytes, uint64_t slot_bytes, int slot) {
  return (slot == 0 ? rdma_bytes / 2 : rdma_bytes - slot_bytes) / 16 * 16;
}
__host__ __device__ inline uint64_t wire_area(uint64_t bytes, uint64_t parts_before) {
  return bytes * parts_before / kWireParts / 128 * 128;
}
__host__ __device__ inline uint64_t header_area(uint64_t bytes, int copy) {
  return copy * wire_area(bytes, kHeaderParts);
}
__host__ __device__ inline uint64_t row_word_area(uint64_t bytes, int slot) {
  return wire_area(bytes, kHeaderCopies * kHeaderParts + slot * kRowWordParts);
}
__host__ __device__ inline uint64_t weight_area(uint64_t bytes, int copy) {
  return wire_area(bytes, kWireParts - (kWeightCopies - copy) * kWeightParts);
}

// Bytes that a block reserves for the headers of any sensible shape whose rows fit in rdma_bytes.
__host__ __device__ inline uint64_t low_latency_wire_allowance(uint64_t rdma_bytes) {
  if (rdma_bytes == 0) return 0;
  return align_up<uint64_t>(min<uint64_t>(32 * rdma_bytes + (1 << 16), (48ull << 20) + rdma_bytes / 32), 4096);
}

// Local expert of the n-th row that a rank sends in combine; `before`: running sums of its experts' rows, [L + 1].
__host__ __device__ inline int expert_of_row(const int32_t *before, int num_local, int n) {
  int low = 0, high = num_local - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (before[middle] <= n)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace deepep
