// normal_ops.h - one rank's arrays and calls of normal mode.
#pragma once
#include "modes.h"

// Arrays for one routing and rows of up to 2 * hidden bytes.
struct Arrays {
  int64_t *idx;
  float *weights;
  int32_t *per_rank, *per_expert, *matrix, *heads, *src_idx;
  uint8_t *in_rank;
  uint32_t *scales, *recv_scales;
  int64_t *recv_idx;
  float *recv_weights, *combined_weights;
  uint8_t *x, *recv_x;
  uint16_t *y, *combined;
  dk_counts *counts;
  uint64_t counts_address;
  uint32_t *wrong;
  int hidden, rows, capacity;
  std::vector<int32_t> ranks, tokens;  // of received rows
  int32_t *ranks_device, *tokens_device;
};

Arrays prepare(Rank &rank, const Routing &routing, int hidden, int num_scales);
// With the layout and the counts of all ranks: for dispatches to be timed. Collective.
Arrays prepare_counted(Rank &rank, const Routing &routing, int hidden);
void release(Rank &rank, Arrays &a);

void layout(Rank &rank, const Arrays &a, const Routing &routing);
// Returns the number of the call, which its counts have.
uint64_t notify(Rank &rank, const Arrays &a, const Routing &routing, uint64_t hidden_bytes, int num_scales);
// rows: rows that the outputs have room for, -1: as many as arrive. direct: into the segment. worst: rows that the
// outputs are padded to.
void dispatch(Rank &rank, const Arrays &a, const Routing &routing, uint64_t hidden_bytes, int num_scales, int rows,
              int worst, int sms, bool direct);
void combine(Rank &rank, const Arrays &a, const Routing &routing, int sms, bool weights);
