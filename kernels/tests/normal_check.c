/* normal_check.c - expected outputs of layout, notify and dispatch, by plain loops over all ranks' routing. */
#include <string.h>

#include "normal.h"

static int64_t index_at(const struct tensor *t, int bytes, int64_t i) {
  return bytes == 4 ? ((const int32_t *)t->host)[i] : ((const int64_t *)t->host)[i];
}

static void expect_ints(struct rank *me, const char *what, struct tensor t, const int32_t *wanted, int count) {
  const int32_t *got = t.host;
  for (int i = 0; i < count; i++)
    expect(me, got[i] == wanted[i], "%s[%d] is %d, wanted %d", what, i, got[i], wanted[i]);
}

void check_layout(struct normal *n) {
  struct rank *me = n->team->me;
  const struct routing *r = n->routing;
  int32_t *per_rank = scratch(me, sizeof(int32_t) * (size_t)(2 * r->ranks + r->experts)),
          *per_node = per_rank + r->ranks;
  int32_t *per_expert = per_node + r->ranks;
  fetch_tensor(me, n->per_rank);
  fetch_tensor(me, n->per_node);
  fetch_tensor(me, n->per_expert);
  fetch_tensor(me, n->in_rank);
  finish(me);
  expect_healthy(n->team);
  const uint8_t *in_rank = n->in_rank.host;
  for (int t = 0; t < n->tokens; t++) {
    for (int rank = 0, last = -1; rank < r->ranks; rank++) {
      bool sent = goes_to(r, me->index, t, rank);
      per_rank[rank] += sent;
      per_node[rank / n->team->node] += sent && last != rank / n->team->node;
      if (sent) last = rank / n->team->node;
      expect(me, in_rank[t * r->ranks + rank] == sent, "token_in_rank[%d][%d] is %u", t, rank,
             in_rank[t * r->ranks + rank]);
    }
    for (int e = 0; e < r->experts; e++) per_expert[e] += times_named(r, me->index, t, e);
  }
  expect_ints(me, "tokens_per_rank", n->per_rank, per_rank, r->ranks);
  expect_ints(me, "tokens_per_node", n->per_node, per_node, (r->ranks + n->team->node - 1) / n->team->node);
  expect_ints(me, "tokens_per_expert", n->per_expert, per_expert, r->experts);
}

static void check_counts(struct normal *n) {
  struct rank *me = n->team->me;
  const struct routing *r = n->routing;
  int local = r->experts / r->ranks, align = n->spec->alignment ? n->spec->alignment : 1;
  expect(me, n->counts->num_recv_tokens == n->rows, "num_recv_tokens is %d, wanted %d", n->counts->num_recv_tokens,
         n->rows);
  int crossed = 0;
  for (int s = 0; s < r->ranks; s++)
    if (s / n->team->node != me->index / n->team->node) crossed += rows_between(r, s, me->index);
  expect(me, n->counts->num_recv_nodes_tokens == crossed, "num_recv_nodes_tokens is %d, wanted %d",
         n->counts->num_recv_nodes_tokens, crossed);
  for (int l = 0; l < local; l++) {
    int wanted = 0;
    for (int s = 0; s < r->ranks; s++)
      for (int t = 0; t < r->tokens[s]; t++) wanted += times_named(r, s, t, me->index * local + l);
    wanted = (wanted + align - 1) / align * align;
    expect(me, n->counts->per_expert[l] == wanted, "per_expert[%d] is %d, wanted %d", l, n->counts->per_expert[l],
           wanted);
  }
}

void check_notify(struct normal *n) {
  struct rank *me = n->team->me;
  const struct routing *r = n->routing;
  fetch_tensor(me, n->matrix);
  fetch_tensor(me, n->head);
  finish(me);
  expect_healthy(n->team);
  int32_t matrix[MAX_SEATS * MAX_SEATS];
  for (int to = 0; to < r->ranks; to++)
    for (int from = 0, sum = 0; from < r->ranks; from++)
      matrix[from * r->ranks + to] = sum += rows_between(r, from, to);
  expect_ints(me, "rank_prefix_matrix", n->matrix, matrix, r->ranks * r->ranks);
  const int32_t *head = n->head.host;
  for (int to = 0; to < r->ranks; to++)
    for (int t = 0, next = 0; t < n->tokens; t++) {
      int wanted = goes_to(r, me->index, t, to) ? next++ : -1, got = head[t * r->ranks + to];
      expect(me, got == wanted, "send_head[%d][%d] is %d, wanted %d", t, to, got, wanted);
    }
  if (!n->spec->spare) check_counts(n);
}

static void check_topk(struct normal *n, int row) {
  struct rank *me = n->team->me;
  const struct routing *r = n->routing;
  struct origin from = n->origins[row];
  int local = r->experts / r->ranks;
  for (int k = 0; k < r->topk; k++) {
    int64_t at = (int64_t)row * r->topk + k, source = (int64_t)from.token * r->topk + k;
    int64_t expert = r->index[from.source][source], got = index_at(&n->recv_idx, n->spec->index_bytes, at);
    bool here = owner_of(r, expert) == me->index;
    int64_t wanted = here ? expert - me->index * local : -1;
    float weight = here ? r->weight[from.source][source] : 0, got_weight = ((const float *)n->recv_weights.host)[at];
    expect(me, got == wanted, "recv_topk_idx[%d][%d] is %ld, wanted %ld", row, k, (long)got, (long)wanted);
    expect(me, got_weight == weight, "recv_topk_weights[%d][%d] is %g, wanted %g", row, k, got_weight, weight);
  }
}

static void check_scales(struct normal *n, int row) {
  const uint32_t *got = (const uint32_t *)n->recv_scales.host + (int64_t)row * n->spec->scales;
  for (int s = 0; s < n->spec->scales; s++) {
    uint32_t wanted = scale_of(n->salt, n->origins[row].source, n->origins[row].token, s);
    expect(n->team->me, got[s] == wanted, "recv_scales[%d][%d] (token %d of rank %d) is 0x%08x, wanted 0x%08x", row, s,
           n->origins[row].token, n->origins[row].source, got[s], wanted);
  }
}

/* Zeros that name no expert. */
static void check_absent_row(struct normal *n, int row, bool topk) {
  struct rank *me = n->team->me;
  const uint8_t *x = (const uint8_t *)n->recv_x.host + (uint64_t)row * n->spec->row_bytes;
  for (uint64_t i = 0; i < n->spec->row_bytes; i++)
    expect(me, x[i] == 0, "byte %d of row %d of a lost rank is %u", (int)i, row, x[i]);
  for (int k = 0; topk && k < n->routing->topk; k++) {
    int64_t at = (int64_t)row * n->routing->topk + k, got = index_at(&n->recv_idx, n->spec->index_bytes, at);
    expect(me, got == -1 && ((const float *)n->recv_weights.host)[at] == 0, "row %d of a lost rank names expert %ld",
           row, (long)got);
  }
}

static void fetch_segment(struct normal *n) {
  struct rank *me = n->team->me;
  struct tensor room = tensor(me, "copy of the segment", n->recv_x.bytes);
  if (room.bytes) copy(me, room.at, n->recv_x.at, room.bytes);
  fetch_tensor(me, room);
  finish(me);
  memcpy(n->recv_x.host, room.host, room.bytes);
}

void check_dispatch(struct normal *n, uint32_t flags) {
  struct rank *me = n->team->me;
  bool cached = flags & DK_DISPATCH_CACHED, topk = n->spec->index_bytes && !cached;
  const struct tensor outputs[] = {n->recv_scales, n->recv_idx, n->recv_weights, n->recv_src};
  for (int i = 0; i < COUNT(outputs); i++) fetch_tensor(me, outputs[i]);
  if (n->spec->segment && me->index > 0)
    fetch_segment(n);
  else
    fetch_tensor(me, n->recv_x);
  finish(me);
  expect_healthy(n->team);
  for (int row = 0; row < n->rows; row++) {
    struct origin from = n->origins[row];
    if (n->absent >> from.source & 1) {
      check_absent_row(n, row, topk);
      continue;
    }
    expect_row(me, "recv_x", row, (const char *)n->recv_x.host + (uint64_t)row * n->spec->row_bytes, n->spec->row_bytes,
               n->spec->payload, n->salt, from.source, from.token);
    check_scales(n, row);
    if (topk) check_topk(n, row);
    int32_t source = ((const int32_t *)n->recv_src.host)[row];
    expect(me, source == from.token, "recv_src_idx[%d] is %d, wanted %d", row, source, from.token);
  }
  for (int64_t i = (int64_t)n->rows * n->routing->topk;
       topk && n->spec->spare && i < (int64_t)n->capacity * n->routing->topk; i++) {
    int64_t index = index_at(&n->recv_idx, n->spec->index_bytes, i);
    float weight = ((const float *)n->recv_weights.host)[i];
    expect(me, index == -1 && weight == 0, "padding entry %ld has index %ld and weight %g", (long)i, (long)index,
           weight);
  }
}
