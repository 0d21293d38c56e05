/* normal.c - layout, notify and dispatch as a caller issues them. */
#include "normal.h"

#include <string.h>

static void set_index(struct tensor *t, int bytes, int64_t i, int64_t value) {
  if (bytes == 4)
    ((int32_t *)t->host)[i] = (int32_t)value;
  else
    ((int64_t *)t->host)[i] = value;
}

uint32_t scale_of(uint64_t salt, int rank, int token, int column) {
  return (uint32_t)hash(salt, 11, (uint64_t)rank << 32 | (uint64_t)token, (uint64_t)column);
}

int busiest(const struct routing *r) {
  int most = 0;
  for (int to = 0; to < r->ranks; to++) {
    int rows = 0;
    for (int from = 0; from < r->ranks; from++) rows += rows_between(r, from, to);
    if (rows > most) most = rows;
  }
  return most;
}

/* ---- Inputs ------------------------------------------------------------------------------------------------------ */

static void make_scales(struct normal *n) {
  const struct normal_spec *spec = n->spec;
  if (spec->scales == 0 || n->tokens == 0) return;
  n->scale_token_stride = spec->columns ? 1 : spec->scales + 2; /* not contiguous: the library has to use the strides */
  n->scale_stride = spec->columns ? n->tokens + 3 : 1;
  n->scales = tensor(n->team->me, "scales", 4 * (uint64_t)(n->tokens + 3) * (uint64_t)(spec->scales + 2));
}

static void fill_payload(struct normal *n) {
  const struct normal_spec *spec = n->spec;
  struct rank *me = n->team->me;
  for (int token = 0; token < n->tokens; token++)
    make_row((char *)n->x.host + (uint64_t)token * spec->row_bytes, spec->row_bytes, spec->payload, n->salt, me->index,
             token);
  send_tensor(me, n->x);
  if (n->scales.bytes == 0) return;
  uint32_t *values = n->scales.host;
  memset(values, 0xee, n->scales.bytes);
  for (int t = 0; t < n->tokens; t++)
    for (int s = 0; s < spec->scales; s++)
      values[t * n->scale_token_stride + s * n->scale_stride] = scale_of(n->salt, me->index, t, s);
  send_tensor(me, n->scales);
}

void new_payload(struct normal *n, uint64_t salt) {
  n->salt = salt;
  finish(n->team->me); /* copies from and to the host have to be finished */
  fill_payload(n);
  if (!n->spec->segment) poison(n->team->me, n->recv_x);
  poison(n->team->me, n->recv_scales);
}

static void fill_topk(struct normal *n, int index_bytes) {
  struct rank *me = n->team->me;
  uint64_t entries = (uint64_t)n->tokens * (uint64_t)n->routing->topk;
  n->idx = tensor(me, "topk_idx", entries * (uint64_t)index_bytes);
  n->weights = tensor(me, "topk_weights", entries * 4);
  for (uint64_t i = 0; i < entries; i++) set_index(&n->idx, index_bytes, (int64_t)i, n->routing->index[me->index][i]);
  if (entries) memcpy(n->weights.host, n->routing->weight[me->index], entries * 4);
  send_tensor(me, n->idx);
  send_tensor(me, n->weights);
}

static void list_origins(struct normal *n) {
  int self = n->team->me->index;
  n->rows = 0;
  for (int s = 0; s < n->routing->ranks; s++) n->rows += rows_between(n->routing, s, self);
  n->origins = scratch(n->team->me, (size_t)n->rows * sizeof *n->origins);
  int row = 0;
  for (int s = 0; s < n->routing->ranks; s++)
    for (int t = 0; t < n->routing->tokens[s]; t++)
      if (goes_to(n->routing, s, t, self)) n->origins[row++] = (struct origin){s, t};
}

static void make_outputs(struct normal *n, int index_bytes) {
  struct rank *me = n->team->me;
  const struct normal_spec *spec = n->spec;
  uint64_t ranks = (uint64_t)me->count, tokens = (uint64_t)n->tokens, rows = (uint64_t)n->capacity,
           topk = (uint64_t)spec->topk;
  n->per_rank = tensor(me, "tokens_per_rank", 4 * ranks);
  n->per_node = tensor(me, "tokens_per_node", 4 * ((ranks - 1) / (uint64_t)n->team->node + 1));
  n->per_expert = tensor(me, "tokens_per_expert", 4 * (uint64_t)spec->experts);
  n->in_rank = tensor(me, "token_in_rank", tokens * ranks);
  n->matrix = tensor(me, "rank_prefix_matrix", 4 * ranks * ranks);
  n->head = tensor(me, "send_head", 4 * tokens * ranks);
  if (spec->segment && me->index > 0) {
    n->recv_x =
        (struct tensor){scratch(me, rows * spec->row_bytes), n->segment->at[me->index] + 4096, rows * spec->row_bytes};
  } else {
    n->recv_x = tensor(me, "recv_x", rows * spec->row_bytes);
  }
  n->recv_scales = tensor(me, "recv_scales", 4 * rows * (uint64_t)spec->scales);
  n->recv_idx = tensor(me, "recv_topk_idx", spec->index_bytes ? rows * topk * (uint64_t)index_bytes : 0);
  n->recv_weights = tensor(me, "recv_topk_weights", spec->index_bytes ? 4 * rows * topk : 0);
  n->recv_src = tensor(me, "recv_src_idx", 4 * rows);
  n->counts = host_words(me, sizeof(dk_counts) + 4 * (uint64_t)spec->experts, 64, &n->counts_at);
}

static void name_segments(struct normal *n) {
  struct rank *me = n->team->me;
  n->segment = share(me, 4096 + (uint64_t)(busiest(n->routing) + 1) * n->spec->row_bytes);
  for (int owner = 0; owner < me->count; owner++) {
    dk_team_segment_params p = {.size = sizeof p,
                                .team = n->team->handle,
                                .index = 3,
                                .owner = owner,
                                .address = n->segment->at[owner],
                                .bytes = n->segment->bytes};
    CALL(me, team_segment, &p);
  }
  meet(me);
}

struct normal *make_normal(struct team *t, const struct normal_spec *spec, uint64_t salt) {
  struct rank *me = t->me;
  struct normal *n = scratch(me, sizeof *n);
  int index_bytes = spec->index_bytes ? spec->index_bytes : 8;
  n->spec = spec;
  n->team = t;
  n->salt = salt;
  n->routing = make_routing(me, spec->pattern, salt, spec->tokens, spec->experts, spec->topk);
  n->tokens = n->routing->tokens[me->index];
  list_origins(n);
  n->capacity = spec->spare ? busiest(n->routing) + spec->spare : n->rows;
  if (spec->segment) name_segments(n);
  fill_topk(n, index_bytes);
  n->x = tensor(me, "x", (uint64_t)n->tokens * spec->row_bytes);
  make_scales(n);
  fill_payload(n);
  make_outputs(n, index_bytes);
  return n;
}

void leave_out(struct normal *n, uint32_t ranks) {
  struct routing *r = n->routing;
  for (int source = 0; source < r->ranks; source++) {
    int64_t entries = (int64_t)r->tokens[source] * r->topk;
    for (int64_t i = 0; i < entries; i++)
      if (owner_of(r, r->index[source][i]) >= 0 && (ranks >> owner_of(r, r->index[source][i]) & 1))
        r->index[source][i] = -1;
    if (ranks >> source & 1) r->tokens[source] = 0;
  }
  list_origins(n);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

void run_layout(struct normal *n) {
  dk_layout_params p = PARAMS(layout, n->team, DK_OP_LAYOUT);
  p.topk_idx = n->idx.at;
  p.index_bytes = n->spec->index_bytes ? n->spec->index_bytes : 8;
  p.num_tokens = n->tokens;
  p.num_topk = n->spec->topk;
  p.num_experts = n->spec->experts;
  p.tokens_per_rank = n->per_rank.at;
  p.tokens_per_node = n->per_node.at;
  p.tokens_per_expert = n->per_expert.at;
  p.token_in_rank = n->in_rank.at;
  CALL(n->team->me, layout, &p);
}

dk_notify_params notify_params(struct normal *n) {
  dk_notify_params p = PARAMS(notify, n->team, DK_OP_NOTIFY);
  n->notify_call = p.call;
  p.num_sms = n->spec->num_sms;
  p.tokens_per_rank = n->per_rank.at;
  p.tokens_per_expert = n->per_expert.at;
  p.token_in_rank = n->in_rank.at;
  p.num_tokens = n->tokens;
  p.num_topk = n->spec->index_bytes ? n->spec->topk : 0;
  p.num_experts = n->spec->experts;
  p.expert_alignment = n->spec->alignment ? n->spec->alignment : 1;
  p.num_worst_tokens = n->spec->spare ? n->capacity : 0;
  p.num_scales = n->spec->scales;
  p.hidden_bytes = n->spec->row_bytes;
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  p.host_counts = n->spec->spare ? 0 : (uintptr_t)n->counts;
  p.counts = n->spec->spare ? 0 : n->counts_at;
  return p;
}

void run_notify(struct normal *n) {
  if (n->spec->at_once) return;
  dk_notify_params p = notify_params(n);
  CALL(n->team->me, notify, &p);
}

dk_dispatch_params dispatch_params(struct normal *n, uint32_t flags) {
  const struct normal_spec *spec = n->spec;
  bool cached = flags & DK_DISPATCH_CACHED, topk = spec->index_bytes && !cached,
       direct = spec->segment && n->team->me->index > 0;
  dk_dispatch_params p = PARAMS(dispatch, n->team, DK_OP_DISPATCH);
  p.flags = flags;
  p.num_sms = spec->num_sms;
  p.x = n->x.at;
  p.scales = n->scales.at;
  p.scale_token_stride = n->scale_token_stride;
  p.scale_stride = n->scale_stride;
  p.topk_idx = topk ? n->idx.at : 0;
  p.topk_weights = topk ? n->weights.at : 0;
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  p.hidden_bytes = spec->row_bytes;
  p.num_tokens = n->tokens;
  p.num_scales = spec->scales;
  p.num_topk = topk ? spec->topk : 0;
  p.index_bytes = topk ? spec->index_bytes : 0;
  p.num_experts = topk ? spec->experts : 0;
  p.num_recv_tokens = spec->trust_matrix ? -1 : n->capacity;
  p.num_worst_tokens = spec->spare && !cached ? n->capacity : 0;
  if (n->team->flags & DK_TEAM_NORMAL_COPY) {
    p.flags |= DK_DISPATCH_COPIES;
    p.exchange = n->notify_call;
  }
  p.recv_segment = direct ? 3 : -1;
  p.recv_segment_offset = direct ? 4096 : 0;
  p.recv_x = n->recv_x.at;
  p.recv_scales = n->recv_scales.at;
  p.recv_topk_idx = topk ? n->recv_idx.at : 0;
  p.recv_topk_weights = topk ? n->recv_weights.at : 0;
  p.recv_src_idx = cached ? 0 : n->recv_src.at;
  p.nvl_send_chunk = spec->send_chunk ? spec->send_chunk : 6;
  p.nvl_recv_chunk = spec->recv_chunk ? spec->recv_chunk : 256;
  p.rdma_send_chunk = 6;
  p.rdma_recv_chunk = 256;
  return p;
}

void run_dispatch(struct normal *n, uint32_t flags) {
  dk_dispatch_params p = dispatch_params(n, flags);
  dk_notify_params notify;
  if (n->spec->at_once && !(flags & DK_DISPATCH_CACHED)) {
    notify = notify_params(n);
    p.notify = (uintptr_t)&notify;
  }
  CALL(n->team->me, dispatch, &p);
}

void await_counts(struct normal *n) {
  struct rank *me = n->team->me;
  dk_host_wait_params p = {.size = sizeof p,
                           .device = seat_device(me->seat),
                           .host_word = (uintptr_t)&n->counts->seq,
                           .at_least = n->notify_call,
                           .host_status = (uintptr_t)n->team->status,
                           .timeout_ns = 50000000};
  uint64_t end = now_ns() + limit_ns(20);
  int32_t code;
  me->doing = "waiting for counts";
  while ((code = dk.host_wait(&p)) == DK_ETIMEOUT && now_ns() < end) {
  }
  me->doing = "running";
  if (code == DK_EABORTED && others_failed(me)) finish(me);
  if (code == DK_EABORTED) expect_healthy(n->team);
  expect(me, code == DK_OK, "dk_host_wait for the counts ended with %s", code_name(code));
}

void dispatch_and_check(struct normal *n) {
  run_layout(n);
  run_notify(n);
  if (!n->spec->spare) await_counts(n);
  run_dispatch(n, 0);
  check_layout(n);
  check_notify(n);
  check_dispatch(n, 0);
}
