/* routed.c - calls with a routing as a caller issues them, and what they should give. */
#include "routed.h"

#include <string.h>

static int local_experts(const struct routed *n) { return n->routing->experts / n->routing->ranks; }
static int64_t expert_of(const struct routed *n, int source, int token, int k) {
  return n->routing->index[source][token * n->routing->topk + k];
}
static int aligned(int rows, int to) { return (rows + to - 1) / to * to; }
static uint32_t scale_value(uint64_t salt, int rank, int token, int column) {
  return (uint32_t)hash(salt, 11, (uint64_t)rank << 32 | (uint64_t)token, (uint64_t)column) | 1;
}

/* ---- What should come: plain loops in the order of the layout ---------------------------------------------------- */

/* The row of a choice at its rank: of all choices of the expert those of earlier ranks, tokens and places are before
 * it. */
static int expanded_row(const struct routed *n, int source, int token, int k) {
  const struct routing *r = n->routing;
  int64_t expert = expert_of(n, source, token, k);
  int local = local_experts(n), rank = owner_of(r, expert), row = 0;
  for (int e = rank * local; e <= expert; e++) {
    int count = 0;
    for (int s = 0; s < r->ranks; s++)
      for (int t = 0; t < r->tokens[s]; t++)
        for (int j = 0; j < r->topk; j++) {
          if (expert_of(n, s, t, j) != e) continue;
          bool before = s < source || (s == source && (t < token || (t == token && j < k)));
          if (e < expert || before) count++;
        }
    row += e < expert ? aligned(count, n->spec->alignment) : count;
  }
  return row;
}

static void list_rows(struct routed *n) {
  const struct routing *r = n->routing;
  struct rank *me = n->team->me;
  int local = local_experts(n), self = me->index;
  for (int s = 0; s < r->ranks; s++) n->rows += rows_between(r, s, self);
  n->arrivals = scratch(me, (size_t)n->rows * sizeof *n->arrivals + 1);
  n->slots = scratch(me, (size_t)(n->rows * r->topk) * sizeof(int) + 1);
  n->first = scratch(me, (size_t)local * sizeof(int));
  n->count = scratch(me, (size_t)local * sizeof(int));
  int *next = scratch(me, (size_t)local * sizeof(int)), row = 0;
  for (int s = 0; s < r->ranks; s++)
    for (int i = 0; i < r->tokens[s] * r->topk; i++)
      if (owner_of(r, r->index[s][i]) == self) n->count[r->index[s][i] - self * local]++;
  for (int e = 0; e < local; e++) {
    next[e] = n->first[e] = n->expanded;
    n->expanded += aligned(n->count[e], n->spec->alignment);
  }
  for (int s = 0; s < r->ranks; s++)
    for (int t = 0; t < r->tokens[s]; t++) {
      if (!goes_to(r, s, t, self)) continue;
      n->arrivals[row] = (struct arrival){s, t};
      for (int k = 0; k < r->topk; k++) {
        int64_t e = expert_of(n, s, t, k);
        n->slots[row * r->topk + k] = owner_of(r, e) == self ? next[e - self * local]++ : -1;
      }
      row++;
    }
}

/* ---- Inputs ------------------------------------------------------------------------------------------------------ */

static void fill_choices(struct routed *n) {
  struct rank *me = n->team->me;
  int bytes = n->spec->index_bytes ? n->spec->index_bytes : 8;
  uint64_t entries = (uint64_t)n->tokens * (uint64_t)n->routing->topk;
  n->idx = tensor(me, "topk_idx", entries * (uint64_t)bytes);
  n->weights = tensor(me, "topk_weights", n->spec->weights ? entries * 4 : 0);
  for (uint64_t i = 0; i < entries; i++) {
    int64_t value = n->routing->index[me->index][i];
    if (value < 0 && n->spec->negative && i % 2) value = bytes == 4 ? INT32_MIN : INT64_MIN + (int64_t)i;
    if (bytes == 4)
      ((int32_t *)n->idx.host)[i] = (int32_t)value;
    else
      ((int64_t *)n->idx.host)[i] = value;
  }
  if (n->weights.bytes) memcpy(n->weights.host, n->routing->weight[me->index], entries * 4);
  send_tensor(me, n->idx);
  send_tensor(me, n->weights);
}

static void fill_rows(struct routed *n) {
  struct rank *me = n->team->me;
  uint64_t bytes = n->spec->row_bytes;
  for (int t = 0; t < n->tokens; t++) {
    make_row((char *)n->x.host + (uint64_t)t * bytes, bytes, NAMED, n->salt, me->index, t);
    for (int s = 0; s < n->spec->scales; s++)
      ((uint32_t *)n->scales.host)[t * n->spec->scales + s] = scale_value(n->salt, me->index, t, s);
  }
  send_tensor(me, n->x);
  send_tensor(me, n->scales);
}

static void make_outputs(struct routed *n) {
  struct rank *me = n->team->me;
  const struct routed_spec *spec = n->spec;
  uint64_t ranks = (uint64_t)me->count, tokens = (uint64_t)n->tokens, rows = (uint64_t)n->capacity,
           room = (uint64_t)n->room, topk = (uint64_t)n->routing->topk, local = (uint64_t)local_experts(n);
  n->copy = tensor(me, "topk_copy", n->idx.bytes);
  n->matrix = tensor(me, "rank_prefix_matrix", 4 * ranks * ranks);
  n->head = tensor(me, "send_head", 4 * tokens * ranks);
  n->slot = tensor(me, "dst_slot", 4 * tokens * topk);
  n->psum_ranks = tensor(me, "psum_per_rank", 4 * ranks);
  n->psum_experts = tensor(me, "psum_per_expert", 4 * local);
  n->num_experts = tensor(me, "num_per_expert", 4 * local);
  n->stats = tensor(me, "cumulative_stats", 4 * local);
  for (uint64_t e = 0; e < local; e++) ((int32_t *)n->stats.host)[e] = (int32_t)(100 * e);
  send_tensor(me, n->stats);
  if (spec->segment && me->index > 0)
    n->recv_x =
        (struct tensor){scratch(me, room * spec->row_bytes), n->segment->at[me->index] + 4096, room * spec->row_bytes};
  else
    n->recv_x = tensor(me, "recv_x", room * spec->row_bytes);
  n->scale_row_stride = spec->columns ? 1 : spec->scales;
  n->scale_stride = spec->columns ? aligned(n->room, 4) : 1;
  n->recv_scales = tensor(me, "recv_scales", 4 * (uint64_t)aligned(n->room, 4) * (uint64_t)spec->scales);
  n->recv_idx = tensor(me, "recv_topk_idx",
                       spec->plain ? rows * topk * (uint64_t)(spec->index_bytes ? spec->index_bytes : 8) : 0);
  n->recv_weights = tensor(me, "recv_topk_weights", !spec->weights ? 0 : spec->plain ? 4 * rows * topk : 4 * room);
  n->meta = tensor(me, "recv_src_metadata", 4 * rows * (topk + 2));
  n->counts = host_words(me, sizeof(dk_counts) + 4 * local, 64, &n->counts_at);
}

static void name_segments(struct routed *n) {
  struct rank *me = n->team->me;
  int room = n->max_tokens * me->count * n->routing->topk + n->spec->alignment * n->routing->experts;
  n->segment = share(me, 4096 + (uint64_t)room * n->spec->row_bytes);
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

/* Of tokens that do not leave a rank nothing comes to itself either: it would wait for that. */
static void keep_from_itself(struct routing *r, int rank, int token) {
  for (int i = token * r->topk; i < r->tokens[rank] * r->topk; i++)
    if (owner_of(r, r->index[rank][i]) == rank) r->index[rank][i] = -1;
}

struct routed *make_routed(struct team *t, const struct routed_spec *spec, uint64_t salt) {
  struct rank *me = t->me;
  struct routed *n = scratch(me, sizeof *n);
  n->spec = spec;
  n->team = t;
  n->salt = salt;
  n->routing = make_routing(me, spec->pattern, salt, spec->tokens, spec->experts * me->count, spec->topk);
  n->tokens = n->routing->tokens[me->index];
  n->max_tokens = spec->tokens + 3;
  if (spec->sent) keep_from_itself(n->routing, me->count - 1, spec->sent);
  list_rows(n);
  int local = local_experts(n), most = n->max_tokens * me->count;
  n->capacity = spec->worst ? most : n->rows;
  /* A token that names an expert twice has more rows than different experts. */
  n->room = spec->plain ? n->capacity : spec->worst ? most * spec->topk + spec->alignment * local : n->expanded;
  if (spec->segment) name_segments(n);
  fill_choices(n);
  n->x = tensor(me, "x", (uint64_t)n->tokens * spec->row_bytes);
  n->scales = tensor(me, "scales", 4 * (uint64_t)n->tokens * (uint64_t)spec->scales);
  fill_rows(n);
  make_outputs(n);
  return n;
}

void leave_out_routed(struct routed *n, uint32_t ranks) {
  struct routing *r = n->routing;
  for (int source = 0; source < r->ranks; source++) {
    for (int i = 0; i < r->tokens[source] * r->topk; i++) {
      int owner = owner_of(r, r->index[source][i]);
      if (owner >= 0 && (ranks >> owner & 1)) r->index[source][i] = -1;
    }
    if (ranks >> source & 1) r->tokens[source] = 0;
  }
  n->rows = n->expanded = 0;
  list_rows(n);
}

void new_routed_payload(struct routed *n, uint64_t salt) {
  struct rank *me = n->team->me;
  n->salt = salt;
  finish(me); /* copies from and to the host have to be finished */
  fill_rows(n);
  if (!n->segment) poison(me, n->recv_x);
  poison(me, n->recv_scales);
  poison(me, n->recv_weights);
  poison(me, n->recv_idx);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

static int kind_of(const struct routed *n) { return n->spec->plain ? DK_ROUTING_PLAIN : DK_ROUTING_EXPANDED; }

dk_notify_params routed_notify(struct routed *n) {
  const struct routed_spec *spec = n->spec;
  dk_notify_params p = PARAMS(notify, n->team, DK_OP_NOTIFY);
  n->notify_call = p.call;
  p.num_sms = spec->num_sms;
  p.num_tokens = n->tokens;
  p.num_topk = spec->topk;
  p.num_experts = n->routing->experts;
  p.expert_alignment = spec->alignment;
  p.num_worst_tokens = spec->worst ? n->capacity : 0;
  p.num_worst_expanded = spec->worst && !spec->plain ? n->room : 0;
  p.num_scales = spec->scales;
  p.hidden_bytes = spec->row_bytes;
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  p.host_counts = spec->worst ? 0 : (uintptr_t)n->counts;
  p.counts = spec->worst ? 0 : n->counts_at;
  p.routing = kind_of(n);
  p.index_bytes = spec->index_bytes ? spec->index_bytes : 8;
  p.num_max_tokens = n->max_tokens;
  p.topk_idx = n->idx.at;
  p.dst_slot = n->slot.at;
  p.psum_per_rank = n->psum_ranks.at;
  p.psum_per_expert = n->psum_experts.at;
  p.num_per_expert = n->num_experts.at;
  p.cumulative_stats = n->stats.at;
  p.topk_copy = n->copy.at;
  return p;
}

dk_dispatch_params routed_dispatch(struct routed *n, uint32_t flags) {
  const struct routed_spec *spec = n->spec;
  bool direct = spec->segment && n->team->me->index > 0;
  dk_dispatch_params p = PARAMS(dispatch, n->team, DK_OP_DISPATCH);
  p.flags = flags | (spec->padding ? DK_DISPATCH_ZERO_PADDING : 0);
  p.num_sms = spec->num_sms;
  p.x = n->x.at;
  p.scales = n->scales.at;
  p.scale_token_stride = spec->scales;
  p.scale_stride = 1;
  p.topk_idx = n->idx.at;
  p.topk_weights = n->weights.at;
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  p.hidden_bytes = spec->row_bytes;
  p.num_tokens = spec->sent && n->team->me->index == n->team->me->count - 1 ? spec->sent : n->tokens;
  p.num_scales = spec->scales;
  p.num_topk = spec->topk;
  p.index_bytes = spec->index_bytes ? spec->index_bytes : 8;
  p.num_experts = n->routing->experts;
  p.num_recv_tokens = n->capacity;
  p.num_worst_tokens = spec->worst && !(flags & DK_DISPATCH_CACHED) ? n->capacity : 0;
  if (n->team->flags & DK_TEAM_NORMAL_COPY) {
    p.flags |= DK_DISPATCH_COPIES;
    p.exchange = n->notify_call;
  }
  p.recv_segment = direct ? 3 : -1;
  p.recv_segment_offset = direct ? 4096 : 0;
  p.recv_x = n->recv_x.at;
  p.recv_scales = n->recv_scales.at;
  p.recv_topk_idx = n->recv_idx.at;
  p.recv_topk_weights = n->recv_weights.at;
  p.nvl_send_chunk = 6;
  p.nvl_recv_chunk = 256;
  p.rdma_send_chunk = 6;
  p.rdma_recv_chunk = 256;
  p.routing = kind_of(n);
  p.num_max_tokens = n->max_tokens;
  p.num_expanded_tokens = spec->plain ? 0 : n->room;
  p.expert_alignment = spec->alignment;
  p.recv_scale_token_stride = n->scale_row_stride;
  p.recv_scale_stride = n->scale_stride;
  p.dst_slot = n->slot.at;
  p.psum_per_expert = n->psum_experts.at;
  p.recv_src_metadata = n->meta.at;
  return p;
}

void await_routed_counts(struct routed *n) {
  struct rank *me = n->team->me;
  dk_host_wait_params p = {.size = sizeof p,
                           .device = seat_device(me->seat),
                           .host_word = (uintptr_t)&n->counts->seq,
                           .at_least = n->notify_call,
                           .host_status = (uintptr_t)n->team->status,
                           .timeout_ns = 50000000};
  uint64_t end = now_ns() + limit_ns(20);
  int32_t code;
  while ((code = dk.host_wait(&p)) == DK_ETIMEOUT && now_ns() < end) {
  }
  if (code == DK_EABORTED) expect_healthy(n->team);
  expect(me, code == DK_OK, "dk_host_wait for the counts ended with %s", code_name(code));
}

/* ---- Check of notify --------------------------------------------------------------------------------------------- */

static void expect_int(struct routed *n, const char *name, const struct tensor *t, int i, int wanted) {
  int got = ((const int32_t *)t->host)[i];
  expect(n->team->me, got == wanted, "%s[%d] is %d, wanted %d", name, i, got, wanted);
}

static void check_slots(struct routed *n) {
  const struct routing *r = n->routing;
  int self = n->team->me->index, *places = scratch(n->team->me, (size_t)r->ranks * sizeof(int));
  for (int t = 0; t < n->tokens; t++) {
    for (int to = 0; to < r->ranks; to++)
      expect_int(n, "send_head", &n->head, t * r->ranks + to, goes_to(r, self, t, to) ? places[to] : -1);
    for (int k = 0; k < r->topk; k++) {
      int to = owner_of(r, expert_of(n, self, t, k)), wanted = -1;
      bool last = to >= 0;
      for (int later = k + 1; later < r->topk; later++) last &= owner_of(r, expert_of(n, self, t, later)) != to;
      if (to >= 0 && !n->spec->plain) wanted = expanded_row(n, self, t, k);
      if (last && n->spec->plain) wanted = self * n->max_tokens + places[to];
      expect_int(n, "dst_slot", &n->slot, t * r->topk + k, wanted);
    }
    for (int to = 0; to < r->ranks; to++) places[to] += goes_to(r, self, t, to);
  }
}

void check_routed_notify(struct routed *n) {
  struct rank *me = n->team->me;
  const struct routing *r = n->routing;
  struct tensor all[] = {n->copy,       n->matrix,       n->head,        n->slot,
                         n->psum_ranks, n->psum_experts, n->num_experts, n->stats};
  for (int i = 0; i < COUNT(all); i++) fetch_tensor(me, all[i]);
  finish(me);
  expect_healthy(n->team);
  expect(me, n->tokens == 0 || memcmp(n->copy.host, n->idx.host, n->idx.bytes) == 0, "topk_copy is not topk_idx");
  for (int to = 0; to < r->ranks; to++)
    for (int s = 0, rows = 0; s < r->ranks; s++) {
      rows += rows_between(r, s, to);
      expect_int(n, "rank_prefix_matrix", &n->matrix, s * r->ranks + to, rows);
      if (to == me->index) expect_int(n, "psum_per_rank", &n->psum_ranks, s, rows);
    }
  check_slots(n);
  for (int e = 0, sum = 0; e < local_experts(n); e++) {
    int rows = aligned(n->count[e], n->spec->alignment);
    sum += rows;
    expect_int(n, "num_per_expert", &n->num_experts, e, n->count[e]);
    expect_int(n, "psum_per_expert", &n->psum_experts, e, n->spec->plain ? sum : n->first[e] + n->count[e]);
    expect_int(n, "cumulative_stats", &n->stats, e, 100 * e + n->count[e]);
    if (!n->spec->worst)
      expect(me, n->counts->per_expert[e] == rows, "the host's count of expert %d is %d, wanted %d", e,
             n->counts->per_expert[e], rows);
  }
  if (!n->spec->worst)
    expect(me, n->counts->num_recv_tokens == n->rows, "the host's number of rows is %d, wanted %d",
           n->counts->num_recv_tokens, n->rows);
  int crossed = 0;
  for (int row = 0; row < n->rows; row++)
    crossed += n->arrivals[row].source / n->team->node != me->index / n->team->node;
  if (!n->spec->worst)
    expect(me, n->counts->num_recv_nodes_tokens == crossed, "num_recv_nodes_tokens is %d, wanted %d",
           n->counts->num_recv_nodes_tokens, crossed);
}

/* ---- Check of dispatch ------------------------------------------------------------------------------------------- */

static void expect_scales(struct routed *n, int row, const struct arrival *from) {
  for (int s = 0; s < n->spec->scales; s++) {
    uint32_t got = ((const uint32_t *)n->recv_scales.host)[row * n->scale_row_stride + s * n->scale_stride];
    uint32_t wanted = from ? scale_value(n->salt, from->source, from->token, s) : 0;
    expect(n->team->me, got == wanted, "recv_scales[%d][%d] is %x, wanted %x", row, s, got, wanted);
  }
}

static void expect_weight(struct routed *n, int64_t i, float wanted) {
  float got = ((const float *)n->recv_weights.host)[i];
  expect(n->team->me, got == wanted, "recv_topk_weights[%ld] is %g, wanted %g", (long)i, got, wanted);
}

static void check_plain_row(struct routed *n, int row, const struct arrival *from) {
  const struct routing *r = n->routing;
  struct rank *me = n->team->me;
  expect_row(me, "recv_x", row, (char *)n->recv_x.host + (uint64_t)row * n->spec->row_bytes, n->spec->row_bytes, NAMED,
             n->salt, from->source, from->token);
  expect_scales(n, row, from);
  for (int k = 0; k < r->topk; k++) {
    int64_t expert = expert_of(n, from->source, from->token, k), at = (int64_t)row * r->topk + k;
    int64_t wanted = owner_of(r, expert) == me->index ? expert - me->index * local_experts(n) : -1;
    int64_t got = n->spec->index_bytes == 4 ? ((int32_t *)n->recv_idx.host)[at] : ((int64_t *)n->recv_idx.host)[at];
    expect(me, got == wanted, "recv_topk_idx[%d][%d] is %ld, wanted %ld", row, k, (long)got, (long)wanted);
    if (n->spec->weights) expect_weight(n, at, r->weight[from->source][from->token * r->topk + k]);
  }
}

static void check_expanded_row(struct routed *n, int row, const struct arrival *from) {
  const struct routing *r = n->routing;
  for (int k = 0; k < r->topk; k++) {
    int slot = n->slots[row * r->topk + k];
    if (slot < 0) continue;
    expect_row(n->team->me, "recv_x", slot, (char *)n->recv_x.host + (uint64_t)slot * n->spec->row_bytes,
               n->spec->row_bytes, NAMED, n->salt, from->source, from->token);
    expect_scales(n, slot, from);
    if (n->spec->weights) expect_weight(n, slot, r->weight[from->source][from->token * r->topk + k]);
  }
}

static void check_padding(struct routed *n) {
  for (int e = 0; e < local_experts(n); e++) {
    int end = n->first[e] + aligned(n->count[e], n->spec->alignment);
    for (int row = n->first[e] + n->count[e]; row < end; row++) {
      const unsigned char *bytes = (unsigned char *)n->recv_x.host + (uint64_t)row * n->spec->row_bytes;
      for (uint64_t i = 0; i < n->spec->row_bytes; i++)
        expect(n->team->me, bytes[i] == 0, "byte %lu of padding row %d is %x", (unsigned long)i, row, bytes[i]);
      expect_scales(n, row, NULL);
      if (n->spec->weights) expect_weight(n, row, 0);
    }
  }
}

/* Of a rank that was lost after the notify: zeros that name no expert. */
static void check_missing_row(struct routed *n, int row, bool cached) {
  int topk = n->routing->topk;
  struct rank *me = n->team->me;
  for (int k = 0; k < topk; k++) {
    int at = n->spec->plain ? row : n->slots[row * topk + k];
    if (n->spec->plain) {
      int64_t i = (int64_t)row * topk + k;
      int64_t got = n->spec->index_bytes == 4 ? ((int32_t *)n->recv_idx.host)[i] : ((int64_t *)n->recv_idx.host)[i];
      expect(me, got == -1, "a missing row's recv_topk_idx is %ld", (long)got);
      if (n->spec->weights) expect_weight(n, i, 0);
    }
    /* In the plain layout a row may have come whose metadata, which others receive, has been given up. */
    if (at < 0 || (n->spec->plain && n->arrivals[row].token < n->spec->sent)) continue;
    const unsigned char *bytes = (unsigned char *)n->recv_x.host + (uint64_t)at * n->spec->row_bytes;
    for (uint64_t i = 0; i < n->spec->row_bytes; i++)
      expect(me, bytes[i] == 0, "byte %lu of the missing row %d is %x", (unsigned long)i, at, bytes[i]);
    expect_scales(n, at, NULL);
    if (n->spec->weights && !n->spec->plain) expect_weight(n, at, 0);
    if (!cached && !n->spec->plain)
      expect_int(n, "recv_src_metadata of a missing row", &n->meta, row * (topk + 2) + 2 + k, -1);
  }
}

/* Whether the row of a rank that was lost during the dispatch has not come. */
static bool is_blank(struct routed *n, int row) {
  int topk = n->routing->topk;
  if (n->arrivals[row].token >= n->spec->sent) return true;
  for (int k = 0; k < topk; k++) {
    int64_t i = (int64_t)row * topk + k;
    int64_t got = !n->spec->plain             ? ((int32_t *)n->meta.host)[row * (topk + 2) + 2 + k]
                  : n->spec->index_bytes == 4 ? ((int32_t *)n->recv_idx.host)[i]
                                              : ((int64_t *)n->recv_idx.host)[i];
    if (got >= 0) return false;
  }
  return true;
}

static void check_metadata(struct routed *n, int row, const struct arrival *from) {
  int topk = n->routing->topk, last = -1, at = row * (topk + 2);
  for (int k = 0; k < topk; k++) {
    if (n->slots[row * topk + k] >= 0) last = k;
    if (!n->spec->plain) expect_int(n, "recv_src_metadata", &n->meta, at + 2 + k, n->slots[row * topk + k]);
  }
  expect_int(n, "recv_src_metadata", &n->meta, at, from->source * n->max_tokens + from->token);
  expect_int(n, "recv_src_metadata", &n->meta, at + 1, from->source * topk + last);
}

/* A segment has no copy on the host: it passes through a tensor. */
static void fetch_segment(struct routed *n) {
  struct rank *me = n->team->me;
  struct mark mark = set_mark(me);
  struct tensor room = tensor(me, "copy of the segment", n->recv_x.bytes);
  if (room.bytes) copy(me, room.at, n->recv_x.at, room.bytes);
  fetch_tensor(me, room);
  finish(me);
  if (room.bytes) memcpy(n->recv_x.host, room.host, room.bytes);
  back_to(me, mark);
}

void check_routed_dispatch(struct routed *n, uint32_t flags) {
  struct rank *me = n->team->me;
  struct tensor all[] = {n->recv_x, n->recv_scales, n->recv_idx, n->recv_weights, n->meta};
  for (int i = n->segment && me->index > 0 ? 1 : 0; i < COUNT(all); i++) fetch_tensor(me, all[i]);
  if (n->segment && me->index > 0) fetch_segment(n);
  finish(me);
  expect_healthy(n->team);
  expect_no_refusal(n->team);
  for (int row = 0; row < n->rows; row++) {
    if ((n->missing >> n->arrivals[row].source & 1) && is_blank(n, row)) {
      check_missing_row(n, row, flags & DK_DISPATCH_CACHED);
      continue;
    }
    if (n->spec->plain)
      check_plain_row(n, row, &n->arrivals[row]);
    else
      check_expanded_row(n, row, &n->arrivals[row]);
    check_metadata(n, row, &n->arrivals[row]);
  }
  if (n->spec->padding) check_padding(n);
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

/* What expert `e` (plain: its rank) gives for a choice. In every fourth channel large numbers absorb small ones and
 * cancel, so that another order gives other bits. */
static uint16_t result_of(const struct routed *n, int source, int token, int k, int channel) {
  static const uint16_t swallow[3] = {0x4c00, 0x3fc0, 0xcc00}; /* 2^25, 1.5, -2^25 */
  int64_t e = expert_of(n, source, token, k);
  int who = n->spec->plain ? owner_of(n->routing, e) : (int)e * 64 + k;
  uint64_t bits = hash(n->salt, (uint64_t)who, (uint64_t)source << 32 | (uint64_t)token, (uint64_t)channel);
  if (channel % 4 == 1) return swallow[bits % 3];
  return random_bf16(bits, (int)(bits >> 20 & 3) - 3);
}
static uint16_t bias_value(const struct routed *n, int which, int token, int channel) {
  if (channel % 4 == 1) return which ? 0xcc00 : 0x4c00;
  return random_bf16(hash(n->salt + 2 + (uint64_t)which, 5, (uint64_t)token, (uint64_t)channel), -1);
}
static float weight_back(const struct routed *n, int source, int token, int k, int at) {
  return (float)(hash(n->salt + 1, (uint64_t)at, (uint64_t)source << 32 | (uint64_t)token, (uint64_t)k) % 4096) /
         4096.0f;
}

static void fill_results(struct routed *n) {
  const struct routing *r = n->routing;
  int hidden = n->spec->hidden, self = n->team->me->index;
  uint16_t *y = n->y.host;
  float *weights = n->y_weights.host;
  memset(n->y.host, 0xff, n->y.bytes); /* padding is NaN: it must not be read */
  if (n->y_weights.bytes) memset(weights, 0xff, n->y_weights.bytes);
  for (int row = 0; row < n->rows; row++) {
    struct arrival from = n->arrivals[row];
    for (int k = 0; k < r->topk; k++) {
      int slot = n->slots[row * r->topk + k];
      if (n->spec->weights && n->spec->plain)
        weights[row * r->topk + k] = weight_back(n, from.source, from.token, k, self);
      if (slot < 0) continue;
      if (n->spec->weights && !n->spec->plain) weights[slot] = weight_back(n, from.source, from.token, k, self);
      uint16_t *to = y + (int64_t)(n->spec->plain ? row : slot) * hidden;
      for (int h = 0; h < hidden; h++) to[h] = result_of(n, from.source, from.token, k, h);
    }
  }
}

dk_combine_params routed_combine(struct routed *n) {
  struct rank *me = n->team->me;
  const struct routed_spec *spec = n->spec;
  uint64_t rows = (uint64_t)n->room, hidden = (uint64_t)spec->hidden, tokens = (uint64_t)n->tokens,
           topk = (uint64_t)spec->topk;
  n->y = tensor(me, "x of combine", 2 * rows * hidden);
  n->y_weights = tensor(me, "topk_weights of combine", !spec->weights ? 0 : spec->plain ? 4 * rows * topk : 4 * rows);
  n->out = tensor(me, "combined_x", 2 * tokens * hidden);
  n->out_weights = tensor(me, "combined_topk_weights", spec->weights ? 4 * tokens * topk : 0);
  fill_results(n);
  send_tensor(me, n->y);
  send_tensor(me, n->y_weights);
  for (int b = 0; b < spec->biases; b++) {
    n->bias[b] = tensor(me, "bias", 2 * tokens * hidden);
    for (int t = 0; t < n->tokens; t++)
      for (int h = 0; h < spec->hidden; h++)
        ((uint16_t *)n->bias[b].host)[(int64_t)t * spec->hidden + h] = bias_value(n, b, t, h);
    send_tensor(me, n->bias[b]);
  }
  dk_combine_params p = PARAMS(combine, n->team, DK_OP_COMBINE);
  p.flags = spec->unreduced ? DK_COMBINE_UNREDUCED : me->split ? DK_COMBINE_APART : 0; /* the order of sums */
  p.num_sms = spec->num_sms;
  p.x = n->y.at;
  p.topk_weights = n->y_weights.at;
  for (int b = 0; b < spec->biases; b++) p.bias[b] = n->bias[b].at;
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  p.num_tokens = n->tokens;
  p.num_recv_tokens = n->capacity;
  p.hidden = spec->hidden;
  p.num_topk = spec->topk;
  p.x_segment = -1;
  p.num_max_tokens = n->max_tokens;
  p.combined_x = n->out.at;
  p.combined_topk_weights = n->out_weights.at;
  p.nvl_send_chunk = 6;
  p.nvl_recv_chunk = 256;
  p.rdma_send_chunk = 6;
  p.rdma_recv_chunk = 256;
  p.routing = kind_of(n);
  p.num_x_rows = spec->plain ? 0 : n->room;
  p.num_experts = n->routing->experts;
  p.index_bytes = spec->index_bytes ? spec->index_bytes : 8;
  p.topk_idx = n->idx.at;
  p.recv_src_metadata = n->meta.at;
  return p;
}

/* The sum of a token as the contract has it: FP32, from the biases on, the ranks in the order of their last choices. */
static uint16_t wanted_sum(const struct routed *n, int token, int channel) {
  const struct routing *r = n->routing;
  int self = n->team->me->index;
  float total = 0;
  for (int b = 0; b < n->spec->biases; b++) total += from_bf16(bias_value(n, b, token, channel));
  for (int k = 0; k < r->topk; k++) {
    int rank = owner_of(r, expert_of(n, self, token, k));
    if (rank < 0 || (n->missing >> rank & 1)) continue;
    if (n->spec->unreduced) {
      total += from_bf16(result_of(n, self, token, k, channel));
      continue;
    }
    bool last = true;
    for (int later = k + 1; later < r->topk; later++) last &= owner_of(r, expert_of(n, self, token, later)) != rank;
    if (!last) continue;
    float part = 0;
    for (int j = 0; j <= k; j++)
      if (owner_of(r, expert_of(n, self, token, j)) == rank && (!n->spec->plain || j == k))
        part += from_bf16(result_of(n, self, token, j, channel));
    total += from_bf16(to_bf16(part));
  }
  return to_bf16(total);
}

void check_routed_combine(struct routed *n) {
  struct rank *me = n->team->me;
  int hidden = n->spec->hidden, topk = n->routing->topk;
  fetch_tensor(me, n->out);
  fetch_tensor(me, n->out_weights);
  finish(me);
  expect_healthy(n->team);
  expect_no_refusal(n->team);
  for (int t = 0; t < n->tokens; t++) {
    for (int h = 0; h < hidden; h++) {
      float got = from_bf16(((const uint16_t *)n->out.host)[(int64_t)t * hidden + h]),
            wanted = from_bf16(wanted_sum(n, t, h));
      expect(me, got == wanted, "combined_x[%d][%d] is %g, wanted %g", t, h, got, wanted);
    }
    for (int k = 0; n->spec->weights && k < topk; k++) {
      int rank = owner_of(n->routing, expert_of(n, me->index, t, k));
      float got = ((const float *)n->out_weights.host)[t * topk + k],
            wanted = rank < 0 || (n->missing >> rank & 1) ? 0 : weight_back(n, me->index, t, k, rank);
      expect(me, got == wanted, "combined_topk_weights[%d][%d] is %g, wanted %g", t, k, got, wanted);
    }
  }
}

void run_routed_dispatch(struct routed *n) {
  struct rank *me = n->team->me;
  dk_notify_params notify = routed_notify(n);
  if (!n->spec->at_once) CALL(me, notify, &notify);
  if (!n->spec->worst) await_routed_counts(n);
  dk_dispatch_params dispatch = routed_dispatch(n, 0);
  if (n->spec->at_once) dispatch.notify = (uintptr_t)&notify;
  CALL(me, dispatch, &dispatch);
}

void run_routed(struct routed *n) {
  struct rank *me = n->team->me;
  run_routed_dispatch(n);
  check_routed_notify(n);
  check_routed_dispatch(n, 0);
  if (n->spec->hidden == 0) return;
  dk_combine_params combine = routed_combine(n);
  CALL(me, combine, &combine);
  check_routed_combine(n);
}
