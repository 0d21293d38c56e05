// Arithmetic on rows. One table of functions per instruction set; all return the same bits for the same input.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace dk {

constexpr int kScaleChannels = 128;  // channels that share an FP8 scale or a LogFMT range
constexpr int kFp4Channels = 16;     // channels that share a scale of FP4

// LogFMT-10 on the wire: 4 bytes for each block of 128 channels (smallest, greatest), then the blocks, 256 bytes apart.
// A coded block takes 160 bytes: 128 low bytes, then 32 bytes of four 2-bit tops (magnitude bit 8, sign).
constexpr size_t logfmt_row_bytes(size_t channels) { return channels / kScaleChannels * 4 + channels * 2; }

struct RowKernels {
  const char *name;
  // `stream`: stores bypass the caches, for rows that are not read again soon. finish_stream() orders them.
  void (*copy)(void *dst, const void *src, size_t bytes, bool stream);
  void (*finish_stream)();

  // dst[i] = BF16(rows[0][i] + rows[1][i] + ...), added in FP32 from left to right. count >= 1.
  void (*sum)(uint16_t *dst, const uint16_t *const *rows, int count, size_t elements, bool stream);
  // dst[i] = BF16(weights[0] * rows[0][i] + ...), products and sums in FP32 from left to right. count 0 gives zeros.
  void (*weighted_sum)(uint16_t *dst, const uint16_t *const *rows, const float *weights, int count, size_t elements);

  // E4M3 with one scale for 128 channels. scales[i] is the factor that gives the value back.
  void (*cast_fp8)(uint8_t *dst, float *scales, const uint16_t *src, size_t blocks, bool round_scale);

  // E2M1, two channels in a byte, with one E4M3 scale for 16 channels; see dk_ll_dispatch_params.x_scales for `factor`.
  void (*cast_fp4)(uint8_t *dst, uint8_t *scales, const uint16_t *src, size_t blocks, float factor);

  void (*logfmt_encode)(uint8_t *dst, const uint16_t *src, size_t blocks);
  // Adds weight * row to FP32 sums, for `count` of its `blocks` from `first` on, whether coded or left as BF16. The
  // order of channels within acc differs between tables; store_sums of the same table restores it in dst.
  void (*logfmt_add)(float *acc, const uint8_t *row, float weight, size_t blocks, size_t first, size_t count);
  void (*store_sums)(uint16_t *dst, const float *acc, size_t blocks);
};

extern const RowKernels kRowsBaseline;
#if defined(__x86_64__)
extern const RowKernels kRowsAvx2, kRowsAvx512;
#endif

}  // namespace dk
