/* combine.c - combine of normal mode over the handle of a dispatch, and its check. */
#include <math.h>
#include <string.h>

#include "normal.h"

/* The row of rank `at` for a token: a function of the channel, so that the token's rank can compute the sum. In every
 * eighth channel large numbers absorb small ones and cancel, so that a different order of the sum gives different bits.
 * */
static uint16_t value_of(uint64_t salt, int at, int source, int token, int channel) {
  static const uint16_t swallow[3] = {0x4c00, 0x3fc0, 0xcc00}; /* 2^25, 1.5, -2^25 */
  uint64_t bits = hash(salt, (uint64_t)at, (uint64_t)source << 32 | (uint64_t)token, (uint64_t)channel);
  if (channel % 8 == 1) return swallow[(at + token + channel / 8) % 3];
  return random_bf16(bits, (int)(bits >> 20 & 3) - 3);
}

static float weight_of(uint64_t salt, int at, int source, int token, int k) {
  return (float)(hash(salt + 1, (uint64_t)at, (uint64_t)source << 32 | (uint64_t)token, (uint64_t)k) % 4096) / 4096.0f;
}

static uint16_t bias_of(uint64_t salt, int which, int token, int channel) {
  return random_bf16(hash(salt + 2 + (uint64_t)which, 5, (uint64_t)token, (uint64_t)channel), -1);
}

static void fill_rows(struct combine *c) {
  const struct normal *n = c->normal;
  int hidden = c->spec->hidden, topk = n->routing->topk, self = n->team->me->index;
  uint16_t *x = c->x.host;
  float *weights = c->weights.host;
  memset(c->x.host, 0xff, c->x.bytes); /* rows past N are NaN: they must not be read */
  if (c->weights.bytes) memset(weights, 0xff, c->weights.bytes);
  for (int row = 0; row < n->rows; row++) {
    struct origin from = n->origins[row];
    for (int h = 0; h < hidden; h++) x[(int64_t)row * hidden + h] = value_of(c->salt, self, from.source, from.token, h);
    for (int k = 0; c->spec->weights && k < topk; k++)
      weights[row * topk + k] = weight_of(c->salt, self, from.source, from.token, k);
  }
}

static void fill_biases(struct combine *c) {
  struct rank *me = c->normal->team->me;
  int hidden = c->spec->hidden;
  for (int b = 0; b < c->spec->biases; b++) {
    c->bias[b] = tensor(me, "bias", 2 * (uint64_t)c->normal->tokens * (uint64_t)hidden);
    for (int t = 0; t < c->normal->tokens; t++)
      for (int h = 0; h < hidden; h++)
        ((uint16_t *)c->bias[b].host)[(int64_t)t * hidden + h] = bias_of(c->salt, b, t, h);
    send_tensor(me, c->bias[b]);
  }
}

struct combine *make_combine(struct normal *n, const struct combine_spec *spec, uint64_t salt) {
  struct rank *me = n->team->me;
  struct combine *c = scratch(me, sizeof *c);
  uint64_t rows = (uint64_t)n->capacity, tokens = (uint64_t)n->tokens, hidden = (uint64_t)spec->hidden,
           topk = (uint64_t)n->routing->topk;
  c->spec = spec;
  c->normal = n;
  c->salt = salt;
  c->x = tensor(me, "x of combine", 2 * rows * hidden);
  c->weights = tensor(me, "topk_weights of combine", spec->weights ? 4 * rows * topk : 0);
  c->out = tensor(me, "combined_x", 2 * tokens * hidden);
  c->out_weights = tensor(me, "combined_topk_weights", spec->weights ? 4 * tokens * topk : 0);
  fill_rows(c);
  fill_biases(c);
  send_tensor(me, c->x);
  send_tensor(me, c->weights);
  if (spec->segment && me->index > 0) {
    c->segment = n->segment;
    if (c->x.bytes) copy(me, c->segment->at[me->index] + 4096, c->x.at, c->x.bytes);
  }
  return c;
}

dk_combine_params combine_params(struct combine *c) {
  const struct normal *n = c->normal;
  dk_combine_params p = PARAMS(combine, n->team, DK_OP_COMBINE);
  p.num_sms = c->spec->num_sms;
  p.x = c->segment ? c->segment->at[n->team->me->index] + 4096 : c->x.at;
  p.topk_weights = c->weights.at;
  p.bias[0] = c->bias[0].at;
  p.bias[1] = c->bias[1].at;
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  p.recv_src_idx = n->recv_src.at;
  p.num_tokens = n->tokens;
  p.num_recv_tokens = n->capacity;
  p.num_max_tokens = n->spec->at_once ? DK_AT_ONCE_ROWS : 0;
  p.hidden = c->spec->hidden;
  p.num_topk = c->spec->weights ? n->routing->topk : 0;
  p.x_segment = c->segment ? 3 : -1;
  p.x_segment_offset = c->segment ? 4096 : 0;
  p.combined_x = c->out.at;
  p.combined_topk_weights = c->out_weights.at;
  p.nvl_send_chunk = n->spec->send_chunk ? n->spec->send_chunk : 6;
  p.nvl_recv_chunk = n->spec->recv_chunk ? n->spec->recv_chunk : 256;
  p.rdma_send_chunk = 6;
  p.rdma_recv_chunk = 256;
  if (n->team->flags & DK_TEAM_NORMAL_COPY) {
    p.flags |= DK_COMBINE_COPIES;
    p.exchange = n->notify_call;
  }
  return p;
}

void run_combine(struct combine *c) {
  dk_combine_params p = combine_params(c);
  CALL(c->normal->team->me, combine, &p);
}

/* ---- Check ------------------------------------------------------------------------------------------------------- */

/* The sum in FP32 in the order of the ranks. The rows of another node's ranks are added there first, rounded to BF16
 * (weights are not), and enter the sum as one row. With biases the library chooses the order, so there is a tolerance:
 * half a step of BF16, plus FP32's rounding. */
struct sum {
  float total, magnitude;
};
static void add(struct sum *s, float value) {
  s->total += value;
  s->magnitude += fabsf(value);
}

typedef float (*value_fn)(const struct combine *c, int at, int token, int which);
static struct sum sum_of(const struct combine *c, int token, int which, value_fn value, bool round) {
  const struct routing *r = c->normal->routing;
  int self = c->normal->team->me->index, node = c->normal->team->node;
  struct sum all = {0, 0};
  for (int first = 0; first < r->ranks; first += node) {
    struct sum part = {0, 0}, *to = self / node == first / node ? &all : &part;
    bool any = false;
    for (int at = first; at < first + node && at < r->ranks; at++) {
      if (!goes_to(r, self, token, at) || (c->normal->absent >> at & 1)) continue;
      add(to, value(c, at, token, which));
      any = true;
    }
    if (any && to == &part) add(&all, round ? from_bf16(to_bf16(part.total)) : part.total);
  }
  return all;
}

static float row_value(const struct combine *c, int at, int token, int channel) {
  return from_bf16(value_of(c->salt, at, c->normal->team->me->index, token, channel));
}

static float weight_value(const struct combine *c, int at, int token, int k) {
  return weight_of(c->salt, at, c->normal->team->me->index, token, k);
}

static void check_channel(struct combine *c, int token, int channel) {
  struct sum sum = sum_of(c, token, channel, row_value, true);
  for (int b = 0; b < c->spec->biases; b++) add(&sum, from_bf16(bias_of(c->salt, b, token, channel)));
  float got = from_bf16(((const uint16_t *)c->out.host)[(int64_t)token * c->spec->hidden + channel]);
  float allowed = c->spec->biases ? fabsf(sum.total) / 256 + sum.magnitude * 1e-6f : 0;
  float wanted = c->spec->biases ? sum.total : from_bf16(to_bf16(sum.total));
  expect(c->normal->team->me, fabsf(got - wanted) <= allowed, "combined_x[%d][%d] is %g, wanted %g", token, channel,
         got, wanted);
}

static void check_weight(struct combine *c, int token, int k) {
  float wanted = sum_of(c, token, k, weight_value, false).total;
  float got = ((const float *)c->out_weights.host)[token * c->normal->routing->topk + k];
  expect(c->normal->team->me, got == wanted, "combined_topk_weights[%d][%d] is %.9g, wanted %.9g", token, k, got,
         wanted);
}

void check_combine(struct combine *c) {
  struct rank *me = c->normal->team->me;
  fetch_tensor(me, c->out);
  fetch_tensor(me, c->out_weights);
  finish(me);
  expect_healthy(c->normal->team);
  for (int t = 0; t < c->normal->tokens; t++) {
    for (int h = 0; h < c->spec->hidden; h++) check_channel(c, t, h);
    for (int k = 0; c->spec->weights && k < c->normal->routing->topk; k++) check_weight(c, t, k);
  }
}
