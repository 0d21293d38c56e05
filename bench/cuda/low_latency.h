// low_latency.h - the arrays of one rank's low-latency calls, and the calls.
#pragma once
#include "modes.h"

struct LowLatency {
  int R, B, H, E, L, K;
  int64_t *idx;
  float *weights;
  uint16_t *x, *y, *combined;
  uint8_t *recv_x;
  uint32_t *scales;
  int32_t *count, *src_info, *stats;
  int64_t *range, *wait_stats;
  int tokens;
  int num_sms = 0;  // 0: the library's choice
};

// BF16, normally distributed; odd: each row holds the word of all ones.
std::vector<uint16_t> make_rows(int rank, int tokens, int hidden, bool odd);
LowLatency prepare(const Shape &s, int rank, const Routing &routing, bool odd);
void dispatch(Rank &rank, const LowLatency &a, int format, uint32_t flags, bool weights,
              uint32_t phases = DK_PHASE_BOTH, uint32_t ticket = 0);
void combine(Rank &rank, const LowLatency &a, uint32_t flags, const void *x, uint32_t phases = DK_PHASE_BOTH,
             uint32_t ticket = 0);
