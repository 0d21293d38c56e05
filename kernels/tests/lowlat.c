/* lowlat.c - low-latency calls as a caller issues them. */
#include "lowlat.h"

#include <string.h>

struct team *make_ll_team(struct rank *me, const struct ll_spec *largest, uint32_t flags) {
  struct team_spec spec = {.nvl_bytes = 1 << 18, .flags = flags | DK_TEAM_LOW_LATENCY, .trace = 0};
  spec.rdma_bytes = rdma_bytes_for(me, largest->max_tokens, largest->hidden, largest->experts);
  return make_team(me, &spec);
}

/* ---- Inputs and outputs ------------------------------------------------------------------------------------------ */

/* FP8: blocks of very different sizes, so that a scale of another block does not pass; zero blocks and tiny ones. */
void make_numbers(const struct ll *l, int source, int token, uint16_t *row) {
  static const uint16_t specials[] = {0x7fc0, 0xffc0, 0x7f80, 0xff80, 0x7f7f, 0x0001, 0x8000};
  for (int h = 0; h < l->spec->hidden; h++) {
    uint64_t block = hash(l->salt, 21, (uint64_t)source << 32 | (uint64_t)token, (uint64_t)h / 128),
             bits = mix(block + (uint64_t)h);
    int exponent = (int)(block % 36) - 24 - (int)(bits >> 32 & 7); /* also below the smallest amax */
    row[h] = block >> 40 & 15 ? random_bf16(bits, exponent) : 0;
    if (l->spec->values == SPECIALS && token % 3 == 1 && h % 128 == token % 128)
      row[h] = specials[token / 3 % COUNT(specials)];
  }
}

uint64_t ll_value_bytes(const struct ll_spec *spec) {
  uint64_t hidden = (uint64_t)spec->hidden;
  return spec->format == DK_FORMAT_BF16 ? 2 * hidden : spec->format == DK_FORMAT_FP8 ? hidden : hidden / 2;
}

uint64_t ll_scale_bytes(const struct ll_spec *spec) {
  uint64_t hidden = (uint64_t)spec->hidden;
  if (spec->format == DK_FORMAT_BF16) return 0;
  return spec->format == DK_FORMAT_FP8 ? hidden / (spec->flags & DK_LL_UE8M0 ? 128 : 32) : hidden / 16;
}

/* Some rows' scales alone are all ones: a word that a GPU tries first as the pattern of a row. */
enum payload ll_scale_payload(const struct ll_spec *spec, int token) {
  return spec->payload == NAMED && token % 4 == 3 ? ALL_ONES : spec->payload;
}

static void fill_x(struct ll *l) {
  struct rank *me = l->team->me;
  uint64_t bytes = ll_value_bytes(l->spec), scales = ll_scale_bytes(l->spec);
  if (l->spec->format == DK_FORMAT_NVFP4) ((float *)l->x_scales.host)[0] = NVFP4_FACTOR;
  for (int t = 0; t < l->tokens; t++) {
    if (l->spec->format == DK_FORMAT_FP8 || l->spec->format == DK_FORMAT_NVFP4)
      make_numbers(l, me->index, t, (uint16_t *)l->x.host + (int64_t)t * l->spec->hidden);
    else
      make_row((char *)l->x.host + (uint64_t)t * bytes, bytes, l->spec->payload, l->salt, me->index, t);
    if (l->spec->format == DK_FORMAT_FP4)
      make_row((char *)l->x_scales.host + (uint64_t)t * scales, scales, ll_scale_payload(l->spec, t), l->salt + 1,
               me->index, t);
  }
  send_tensor(me, l->x);
  send_tensor(me, l->x_scales);
}

static void fill_indices(struct ll *l) {
  struct rank *me = l->team->me;
  int64_t entries = (int64_t)l->tokens * l->spec->topk;
  l->idx = tensor(me, "topk_idx", (uint64_t)(entries * l->spec->index_bytes));
  l->weights = tensor(me, "topk_weights", 4 * (uint64_t)entries);
  for (int64_t i = 0; i < entries; i++) {
    if (l->spec->index_bytes == 4)
      ((int32_t *)l->idx.host)[i] = (int32_t)l->routing->index[me->index][i];
    else
      ((int64_t *)l->idx.host)[i] = l->routing->index[me->index][i];
    ((float *)l->weights.host)[i] = l->routing->weight[me->index][i];
  }
  send_tensor(me, l->idx);
  send_tensor(me, l->weights);
}

static void make_outputs(struct ll *l) {
  struct rank *me = l->team->me;
  uint64_t cells = (uint64_t)l->local * (uint64_t)l->rows, hidden = (uint64_t)l->spec->hidden,
           ranks = (uint64_t)me->count;
  uint64_t rows = (uint64_t)l->rows;
  if (l->spec->format == DK_FORMAT_NVFP4) rows = (rows + 127) / 128 * 128; /* whole tiles */
  l->recv_x = tensor(me, "recv_x", cells * ll_value_bytes(l->spec));
  l->recv_scales = tensor(me, "recv_scales", (uint64_t)l->local * rows * ll_scale_bytes(l->spec));
  l->recv_count = tensor(me, "recv_count", 4 * (uint64_t)l->local);
  l->src_info = tensor(me, "src_info", 4 * cells);
  l->layout_range = tensor(me, "layout_range", 8 * (uint64_t)l->local * ranks);
  l->cumulative = tensor(me, "cumulative_stats", 4 * (uint64_t)l->local);
  l->waits = tensor(me, "wait_stats", 8 * ranks);
  l->y = tensor(me, "x of combine", cells * hidden * 2);
  l->out = tensor(me, "combined_x", (uint64_t)l->tokens * hidden * 2);
  l->combine_waits = tensor(me, "wait_stats of combine", 8 * ranks);
  for (int e = 0; e < l->local; e++) ((int32_t *)l->cumulative.host)[e] = 7;
  for (int r = 0; r < me->count; r++) ((int64_t *)l->waits.host)[r] = ((int64_t *)l->combine_waits.host)[r] = 1000;
  send_tensor(me, l->cumulative);
  send_tensor(me, l->waits);
  send_tensor(me, l->combine_waits);
}

struct ll *make_ll(struct team *t, const struct ll_spec *spec, uint64_t salt) {
  struct rank *me = t->me;
  struct ll *l = scratch(me, sizeof *l);
  l->spec = spec;
  l->team = t;
  l->salt = salt;
  l->routing = make_routing(me, spec->pattern, salt, spec->tokens, spec->experts, spec->topk);
  l->tokens = l->routing->tokens[me->index];
  l->local = spec->experts / me->count;
  l->rows = spec->max_tokens * me->count;
  l->layout = (dk_ll_layout_params){.size = sizeof l->layout,
                                    .num_ranks = me->count,
                                    .num_max_tokens = spec->max_tokens,
                                    .hidden = spec->hidden,
                                    .num_experts = spec->experts};
  CALL(me, ll_layout, &l->layout);
  bool fp4 = spec->format == DK_FORMAT_FP4;
  l->x = tensor(me, "x", (uint64_t)l->tokens * (fp4 ? ll_value_bytes(spec) : 2 * (uint64_t)spec->hidden));
  l->x_scales = tensor(me, "x_scales", fp4 ? (uint64_t)l->tokens * ll_scale_bytes(spec) : 4);
  fill_x(l);
  fill_indices(l);
  make_outputs(l);
  return l;
}

void new_ll_payload(struct ll *l, uint64_t salt) {
  l->salt = salt;
  finish(l->team->me); /* the host's copies may still be on their way */
  fill_x(l);
  struct tensor outputs[] = {l->recv_x, l->recv_scales, l->recv_count, l->src_info, l->layout_range, l->out};
  for (int i = 0; i < COUNT(outputs); i++) poison(l->team->me, outputs[i]);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

/* Each half gets only its own tensors: the other half's need not exist yet, or any more. */
dk_ll_dispatch_params ll_dispatch_params(struct ll *l, uint32_t phases, uint32_t ticket) {
  const struct ll_spec *spec = l->spec;
  dk_ll_dispatch_params p = PARAMS(ll_dispatch, l->team, DK_OP_LL_DISPATCH);
  if (phases == DK_PHASE_RECV) p.call = --l->team->calls[DK_OP_LL_DISPATCH]; /* both halves are one call */
  p.flags = spec->flags;
  p.phases = phases;
  p.ticket = ticket;
  p.x = l->x.at;
  p.x_scales = spec->format >= DK_FORMAT_FP4 ? l->x_scales.at : 0;
  p.topk_idx = l->idx.at;
  p.topk_weights = spec->weights ? l->weights.at : 0;
  p.num_tokens = l->tokens;
  p.num_topk = spec->topk;
  p.index_bytes = spec->index_bytes;
  p.format = spec->format;
  p.num_max_tokens = spec->max_tokens;
  p.hidden = spec->hidden;
  p.num_experts = spec->experts;
  p.recv_x = l->recv_x.at;
  p.recv_scales = l->recv_scales.at;
  p.recv_count = l->recv_count.at;
  p.src_info = l->src_info.at;
  p.layout_range = l->layout_range.at;
  p.cumulative_stats = l->cumulative.at;
  p.wait_stats = l->waits.at;
  return p;
}

/* Where rows of halves cross by copy engines, only every third whole call stays one. */
static bool goes_in_halves(const struct team *t, int calls) { return t->flags & DK_TEAM_LL_COPY && calls % 3 != 2; }

void run_ll_dispatch(struct ll *l, uint32_t phases, uint32_t ticket) {
  if (phases == DK_PHASE_BOTH && goes_in_halves(l->team, l->dispatches)) {
    run_ll_dispatch(l, DK_PHASE_SEND, ticket);
    run_ll_dispatch(l, DK_PHASE_RECV, ticket);
    return;
  }
  dk_ll_dispatch_params p = ll_dispatch_params(l, phases, ticket);
  CALL(l->team->me, ll_dispatch, &p);
  if (phases & DK_PHASE_RECV) l->dispatches++;
}

dk_ll_combine_params ll_combine_params(struct ll *l, uint32_t phases, uint32_t ticket) {
  const struct ll_spec *spec = l->spec;
  struct team *t = l->team;
  dk_ll_combine_params p = PARAMS(ll_combine, t, DK_OP_LL_COMBINE);
  if (phases == DK_PHASE_RECV) p.call = --t->calls[DK_OP_LL_COMBINE];
  p.flags = spec->combine_flags;
  p.phases = phases;
  p.ticket = ticket;
  p.x = l->y.at;
  p.x_row_stride = 2 * (uint64_t)spec->hidden;
  if (spec->combine_flags & DK_LL_ZERO_COPY) {
    p.x = t->block->at[t->me->index] + t->rdma_offset + l->layout.zero_copy_offset[t->combines % 2];
    p.x_row_stride = l->layout.zero_copy_row_stride;
  }
  p.topk_idx = l->idx.at;
  p.topk_weights = l->weights.at;
  p.src_info = l->src_info.at;
  p.layout_range = l->layout_range.at;
  p.num_tokens = l->tokens;
  p.num_topk = spec->topk;
  p.index_bytes = spec->index_bytes;
  p.num_max_tokens = spec->max_tokens;
  p.hidden = spec->hidden;
  p.num_experts = spec->experts;
  p.combined_x = l->out.at;
  p.wait_stats = l->combine_waits.at;
  return p;
}

/* Zero copy: the caller's rows are only where dk_ll_layout puts them. */
static void write_in_place(struct ll *l) {
  struct team *t = l->team;
  uint64_t base = t->block->at[t->me->index] + t->rdma_offset + l->layout.zero_copy_offset[t->combines % 2];
  uint64_t row_bytes = 2 * (uint64_t)l->spec->hidden, cells = (uint64_t)l->local * (uint64_t)l->rows;
  for (uint64_t i = 0; i < cells; i++)
    copy(t->me, base + i * l->layout.zero_copy_row_stride, l->y.at + i * row_bytes, row_bytes);
}

void run_ll_combine(struct ll *l, uint32_t phases, uint32_t ticket) {
  if (phases == DK_PHASE_BOTH && goes_in_halves(l->team, (int)l->team->combines)) {
    run_ll_combine(l, DK_PHASE_SEND, ticket);
    run_ll_combine(l, DK_PHASE_RECV, ticket);
    return;
  }
  if (phases & DK_PHASE_SEND && l->spec->combine_flags & DK_LL_ZERO_COPY) write_in_place(l);
  dk_ll_combine_params p = ll_combine_params(l, phases, ticket);
  if (phases != DK_PHASE_RECV) l->whole_combine = phases == DK_PHASE_BOTH;
  CALL(l->team->me, ll_combine, &p);
  if (phases & DK_PHASE_SEND) l->team->combines++;
}

void ll_dispatch_and_answer(struct ll *l, uint64_t salt) {
  run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  check_ll_dispatch(l);
  make_expert_rows(l, salt);
}

void ll_round(struct ll *l, uint64_t salt) {
  ll_dispatch_and_answer(l, salt);
  run_ll_combine(l, DK_PHASE_BOTH, 2);
  check_ll_combine(l);
}

void ll_round_in_halves(struct ll *l, uint64_t salt) {
  struct rank *me = l->team->me;
  run_ll_dispatch(l, DK_PHASE_SEND, 1);
  jitter(me);
  run_ll_dispatch(l, DK_PHASE_RECV, 1);
  check_ll_dispatch(l);
  make_expert_rows(l, salt);
  run_ll_combine(l, DK_PHASE_SEND, 3);
  jitter(me);
  run_ll_combine(l, DK_PHASE_RECV, 3);
  check_ll_combine(l);
}

struct ll_spec random_ll_spec(struct dice *d, int ranks, enum pattern pattern, const struct ll_spec *largest) {
  static const uint32_t combine_flags[] = {0, 0, DK_LL_LOGFMT, DK_LL_ZERO_COPY, DK_LL_UNREDUCED};
  struct ll_spec spec = {.pattern = pattern,
                         .experts = ((int)roll(d, (uint64_t)(largest->experts / ranks)) + 1) * ranks,
                         .max_tokens = (int)roll(d, (uint64_t)largest->max_tokens) + 1,
                         .topk = (int)roll(d, 8) + 1,
                         .index_bytes = (int)roll(d, 2) * 4 + 4,
                         .hidden = 128 * ((int)roll(d, (uint64_t)(largest->hidden / 128)) + 1)};
  spec.tokens = (int)roll(d, (uint64_t)spec.max_tokens) + 1;
  spec.format = (int)roll(d, 4);
  if (spec.format == DK_FORMAT_FP8 && roll(d, 2)) spec.flags = DK_LL_ROUND_SCALE;
  if (spec.flags && spec.hidden == 512) spec.flags |= DK_LL_UE8M0;
  spec.weights = roll(d, 2);
  spec.combine_flags = combine_flags[roll(d, COUNT(combine_flags))];
  return spec;
}
