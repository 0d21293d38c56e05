/* lowlat_check.c - expected outputs of low-latency dispatch and combine, by plain loops over all ranks' indices. */
#include <math.h>
#include <string.h>

#include "lowlat.h"

static bool is_absent(const struct ll *l, int rank) { return l->absent >> rank & 1; }

/* ---- Dispatch ---------------------------------------------------------------------------------------------------- */

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The received scale of a block as a float; with UE8M0 it is made of the exponent alone. */
static uint32_t scale_at(const struct ll *l, int expert, int row, int block) {
  const uint32_t *words = l->recv_scales.host;
  int blocks = l->spec->hidden / 128;
  if (!(l->spec->flags & DK_LL_UE8M0)) return words[((int64_t)expert * blocks + block) * l->rows + row];
  uint32_t word = words[((int64_t)expert * (blocks / 4) + block / 4) * l->rows + row];
  return (word >> (8 * (block % 4)) & 0xff) << 23;
}

/* A NaN channel stays NaN, an infinite one saturates; the other channels of the block are not compared. */
static bool check_special(struct ll *l, const uint16_t *x, const uint8_t *got, int expert, int row) {
  bool special = false;
  for (int i = 0; i < 128; i++) {
    if ((x[i] & 0x7f80) != 0x7f80) continue;
    special = true;
    bool right = (got[i] & 0x7f) >= 0x7e; /* NaN or 448 */
    expect(l->team->me, right, "expert %d row %d: 0x%04x became 0x%02x", expert, row, x[i], got[i]);
  }
  return special;
}

static void check_fp8_row(struct ll *l, int expert, int row, int source, int token) {
  struct rank *me = l->team->me;
  int hidden = l->spec->hidden;
  uint16_t x[hidden];
  make_numbers(l, source, token, x);
  const uint8_t *got = (const uint8_t *)l->recv_x.host + ((int64_t)expert * l->rows + row) * hidden;
  for (int b = 0; b < hidden / 128; b++) {
    if (check_special(l, x + b * 128, got + b * 128, expert, row)) continue;
    uint8_t codes[128];
    float scale;
    reference_fp8(x + b * 128, l->spec->flags & DK_LL_ROUND_SCALE, codes, &scale);
    uint32_t got_scale = scale_at(l, expert, row, b);
    expect(me, got_scale == bits_of(scale),
           "expert %d row %d (token %d of rank %d): scale %d is 0x%08x, wanted 0x%08x (%g)", expert, row, token, source,
           b, got_scale, bits_of(scale), scale);
    for (int i = 0; i < 128; i++)
      expect(me, got[b * 128 + i] == codes[i],
             "expert %d row %d (token %d of rank %d): channel %d (%g) is 0x%02x, wanted 0x%02x", expert, row, token,
             source, b * 128 + i, from_bf16(x[b * 128 + i]), got[b * 128 + i], codes[i]);
  }
}

/* The bytes of the scales of a row, in the order of its channels. */
static void scales_of_fp4(const struct ll *l, int expert, int row, uint8_t *to) {
  const uint8_t *scales = l->recv_scales.host;
  int count = l->spec->hidden / 16;
  int64_t tiles = (l->rows + 127) / 128;
  for (int c = 0; c < count; c++) {
    int64_t at = ((int64_t)expert * l->rows + row) * count + c;
    if (l->spec->format == DK_FORMAT_NVFP4)
      at = (((((int64_t)expert * tiles + row / 128) * (count / 4) + c / 4) * 32 + row % 32) * 4 + row / 32 % 4) * 4 +
           c % 4;
    to[c] = scales[at];
  }
}

static void check_fp4_row(struct ll *l, int expert, int row, int source, int token) {
  struct rank *me = l->team->me;
  int hidden = l->spec->hidden;
  uint32_t scales[hidden / 64];
  scales_of_fp4(l, expert, row, (uint8_t *)scales);
  const uint8_t *got = (const uint8_t *)l->recv_x.host + ((int64_t)expert * l->rows + row) * (hidden / 2);
  if (l->spec->format == DK_FORMAT_FP4) {
    expect_row(me, "recv_x", row, got, (uint64_t)hidden / 2, l->spec->payload, l->salt, source, token);
    expect_row(me, "recv_scales", row, scales, sizeof scales, ll_scale_payload(l->spec, token), l->salt + 1, source,
               token);
    return;
  }
  uint16_t x[hidden];
  make_numbers(l, source, token, x);
  for (int b = 0; b < hidden / 16; b++) {
    uint8_t codes[16], scale, got_scale = ((uint8_t *)scales)[b];
    reference_fp4(x + b * 16, NVFP4_FACTOR, codes, &scale);
    expect(me, got_scale == scale, "expert %d row %d (token %d of rank %d): scale %d is 0x%02x, wanted 0x%02x", expert,
           row, token, source, b, got_scale, scale);
    for (int i = 0; i < 16; i++) {
      int code = got[b * 8 + i / 2] >> (4 * (i % 2)) & 15;
      expect(me, code == codes[i], "expert %d row %d (token %d of rank %d): channel %d (%g) is %d, wanted %d", expert,
             row, token, source, b * 16 + i, from_bf16(x[b * 16 + i]), code, codes[i]);
    }
  }
}

static void check_row(struct ll *l, int expert, int row, int source, int token) {
  struct rank *me = l->team->me;
  int from = ((const int32_t *)l->src_info.host)[(int64_t)expert * l->rows + row];
  expect(me, from == token, "expert %d row %d comes from token %d, wanted %d of rank %d", expert, row, from, token,
         source);
  uint64_t bytes = 2 * (uint64_t)l->spec->hidden;
  if (l->spec->format >= DK_FORMAT_FP4)
    check_fp4_row(l, expert, row, source, token);
  else if (l->spec->format == DK_FORMAT_FP8)
    check_fp8_row(l, expert, row, source, token);
  else
    expect_row(me, "recv_x", row,
               (const char *)l->recv_x.host + ((uint64_t)expert * (uint64_t)l->rows + (uint64_t)row) * bytes, bytes,
               l->spec->payload, l->salt, source, token);
}

static void check_expert(struct ll *l, int expert) {
  struct rank *me = l->team->me;
  int row = 0, global = me->index * l->local + expert;
  for (int source = 0; source < me->count; source++) {
    int first = row;
    for (int t = 0; t < l->routing->tokens[source]; t++)
      if (!is_absent(l, source) && names(l->routing, source, t, global)) row++;
    int64_t range = ((const int64_t *)l->layout_range.host)[expert * me->count + source];
    int got_first = (int)(range >> 32), got = (int)(range & 0xffffffff);
    expect(me, got == row - first && (got == 0 || got_first == first),
           "layout_range[%d][%d]: first %d, count %d; wanted %d, %d", expert, source, got_first, got, first,
           row - first);
    for (int t = 0, at = first; t < l->routing->tokens[source]; t++)
      if (!is_absent(l, source) && names(l->routing, source, t, global)) check_row(l, expert, at++, source, t);
  }
  int count = ((const int32_t *)l->recv_count.host)[expert], total = ((const int32_t *)l->cumulative.host)[expert];
  expect(me, count == row, "recv_count[%d] is %d, wanted %d", expert, count, row);
  expect(me, l->dispatches != 1 || total == 7 + row, "cumulative_stats[%d] is %d, wanted 7 + %d", expert, total, row);
}

void check_ll_dispatch(struct ll *l) {
  struct rank *me = l->team->me;
  const struct tensor outputs[] = {l->recv_x,       l->recv_scales, l->recv_count, l->src_info,
                                   l->layout_range, l->cumulative,  l->waits};
  for (int i = 0; i < COUNT(outputs); i++) fetch_tensor(me, outputs[i]);
  finish(me);
  expect_healthy(l->team);
  for (int expert = 0; expert < l->local; expert++) check_expert(l, expert);
  for (int r = 0; r < me->count; r++) {
    int64_t waited = ((const int64_t *)l->waits.host)[r];
    expect(me, waited >= 1000 && waited < 1000 + (int64_t)limit_ns(120), "wait_stats[%d] is %ld", r, (long)waited);
  }
}

void expect_no_rows(struct ll *l) {
  struct rank *me = l->team->me;
  fetch_tensor(me, l->recv_count);
  finish(me);
  for (int e = 0; e < l->local; e++)
    expect(me, ((const int32_t *)l->recv_count.host)[e] == 0, "recv_count[%d] of a failed call is %d", e,
           ((const int32_t *)l->recv_count.host)[e]);
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

/* An expert's output row. It has blocks of every kind for LogFMT: narrow, wide, with zeros, all equal, reaching 1. */
uint16_t expert_value(uint64_t salt, int expert, int source, int token, int channel) {
  uint64_t row = hash(salt, (uint64_t)expert, (uint64_t)source, (uint64_t)token),
           kind = mix(row + (uint64_t)channel / 128) % 6;
  uint64_t bits = mix(row + (uint64_t)channel);
  if (salt & USUAL_ROWS) {
    int sum = 0; /* the sum of twelve bytes: close to a normal distribution */
    for (int i = 0; i < 12; i++) sum += (int)((i < 8 ? bits : mix(bits)) >> (8 * (i % 8)) & 0xff) - 127;
    return to_bf16((float)sum / 1024);
  }
  if (kind == 0) return random_bf16(bits, (int)((bits >> 20) % 3));
  if (kind == 1) return random_bf16(bits, -1 - (int)(bits >> 20 & 31));
  if (kind == 2 && bits >> 20 & 1) return 0;
  if (kind == 3) return 0x3e80;
  return random_bf16(bits, -1 - (int)(bits >> 20 & 3));
}

void make_expert_rows(struct ll *l, uint64_t salt) {
  struct rank *me = l->team->me;
  int hidden = l->spec->hidden;
  finish(me);
  l->row_salt = salt;
  memset(l->y.host, 0xff, l->y.bytes); /* rows past the count are NaN */
  for (int e = 0; e < l->local; e++) {
    int64_t row = (int64_t)e * l->rows;
    for (int s = 0; s < me->count; s++)
      for (int t = 0; t < l->routing->tokens[s]; t++) {
        if (is_absent(l, s) || !names(l->routing, s, t, me->index * l->local + e)) continue;
        for (int h = 0; h < hidden; h++)
          ((uint16_t *)l->y.host)[row * hidden + h] = expert_value(salt, me->index * l->local + e, s, t, h);
        row++;
      }
  }
  send_tensor(me, l->y);
  poison(me, l->out);
}

/* The sums of one block of one token, and their tolerance. */
struct block_sum {
  double sum[128], allowed[128];
};

static void add_expert(struct ll *l, struct block_sum *b, int64_t expert, float weight, int token, int first, int width,
                       bool coded) {
  int self = l->team->me->index;
  uint16_t x[128] = {0};
  double error[128] = {0};
  for (int i = 0; i < width; i++) x[i] = expert_value(l->row_salt, (int)expert, self, token, first + i);
  if (coded) reference_logfmt_error(x, error);
  for (int i = 0; i < width; i++) {
    double value = (double)weight * (double)from_bf16(x[i]);
    b->sum[i] += value;
    b->allowed[i] += fabs(value) * 1e-6 + (double)fabsf(weight) * error[i];
  }
}

/* What a rank's sum may lose on its way: rounded to BF16, and in LogFMT to a code. The rank's own sum may differ from
 * this one by an ulp, and with it the codes' range. Across nodes each row is sent by itself. */
static void round_sum(struct block_sum *b, int width, bool coded) {
  uint16_t x[128] = {0};
  double error[128] = {0}, greatest = 0;
  for (int i = 0; i < width; i++) greatest = fmax(greatest, fabs(b->sum[i]));
  for (int i = 0; i < width; i++)
    x[i] = to_bf16((float)(greatest >= 1 && greatest < 1.02 ? b->sum[i] * 0.97 : b->sum[i]));
  if (coded) reference_logfmt_error(x, error);
  for (int i = 0; i < width; i++)
    b->allowed[i] = fmax(b->allowed[i], fabs(b->sum[i]) / 256 + 1.5 * error[i] + greatest * 0x1p-32);
}

static void check_block(struct ll *l, int token, int first, int width, struct difference *all) {
  struct rank *me = l->team->me;
  uint32_t flags = l->spec->combine_flags;
  uint32_t team = l->team->flags & (DK_TEAM_LL_COPY | DK_TEAM_SHRINK);
  /* At the experts' rank, which may add its rows and round. */
  bool known = l->spec->weights || l->whole_combine || team == DK_TEAM_LL_COPY;
  bool reduced = known && !(library.caps & DK_CAP_HOST_STREAM) && !(flags & DK_LL_UNREDUCED);
  struct block_sum b = {{0}, {0}};
  for (int rank = 0; rank < me->count; rank++) {
    struct block_sum part = {{0}, {0}};
    for (int k = 0; k < l->spec->topk; k++) {
      int64_t at = (int64_t)token * l->spec->topk + k, expert = l->routing->index[me->index][at];
      if (expert < 0 || owner_of(l->routing, expert) != rank || is_absent(l, rank)) continue;
      add_expert(l, &part, expert, l->routing->weight[me->index][at], token, first, width, flags & DK_LL_LOGFMT);
    }
    if (reduced) round_sum(&part, width, flags & DK_LL_LOGFMT);
    for (int i = 0; i < width; i++) {
      b.sum[i] += part.sum[i];
      b.allowed[i] += part.allowed[i];
    }
  }
  const uint16_t *got = (const uint16_t *)l->out.host + (int64_t)token * l->spec->hidden + first;
  for (int i = 0; i < width; i++) {
    double value = (double)from_bf16(got[i]), allowed = b.allowed[i] + (fabs(b.sum[i]) + b.allowed[i]) / 256;
    expect(me, fabs(value - b.sum[i]) <= allowed, "combined_x[%d][%d] is %g, wanted %g +- %g", token, first + i, value,
           b.sum[i], allowed);
    add_difference(all, value, b.sum[i]);
  }
}

void check_ll_combine(struct ll *l) {
  struct rank *me = l->team->me;
  fetch_tensor(me, l->out);
  fetch_tensor(me, l->combine_waits);
  finish(me);
  expect_healthy(l->team);
  struct difference all = {0, 0};
  for (int t = 0; t < l->tokens; t++)
    for (int h = 0; h < l->spec->hidden && t != l->voided - 1; h += 128)
      check_block(l, t, h, l->spec->hidden - h < 128 ? l->spec->hidden - h : 128, &all);
  bool told = !(l->spec->combine_flags & DK_LL_LOGFMT) ||
              l->row_salt & USUAL_ROWS; /* the contract states LogFMT's for normally distributed rows */
  expect(me, !told || difference_of(&all) < 1e-5, "calc_diff of combined_x is %g", difference_of(&all));
  for (int r = 0; r < me->count; r++)
    expect(me, ((const int64_t *)l->combine_waits.host)[r] >= 1000, "wait_stats[%d] of combine shrank", r);
}

void expect_nan(struct ll *l) {
  struct rank *me = l->team->me;
  fetch_tensor(me, l->out);
  finish(me);
  for (uint64_t i = 0; i < l->out.bytes / 2; i++)
    expect(me, bf16_is_nan(((const uint16_t *)l->out.host)[i]), "channel %lu of a failed combine is %g, not NaN",
           (unsigned long)i, from_bf16(((const uint16_t *)l->out.host)[i]));
}
