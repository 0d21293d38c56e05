/* case_balance.c - copies of experts on other ranks: by handles that dk_balance makes, a cached dispatch brings weights
 * to their slots, and gradients to the workspace of the experts' ranks, where they are added. */
#include <string.h>

#include "routed.h"

struct balance_spec {
  int slots, local, rows; /* slots and experts of a rank, rows of an expert */
  uint64_t row_bytes;
  int part;                               /* slots in a dispatch of weights, rows in one of gradients */
  enum { RANDOM, CROWDED, NONE } mapping; /* CROWDED: all slots are copies of expert 0 */
};

struct balance {
  const struct balance_spec *spec;
  struct team *team;
  int32_t *expert; /* [R, slots], -1: none */
  struct tensor mapping, copies, experts, matrix, head, idx, slot, weights, rows, arrived;
};

static int experts_of(const struct balance *b) { return b->team->me->count * b->spec->local; }

/* A third of the slots are of no expert, by other numbers than -1 too. */
static void draw_mapping(struct balance *b) {
  static const int32_t nothing[] = {-1, -7, INT32_MIN, INT32_MAX};
  struct rank *me = b->team->me;
  struct dice dice = {settings.seed + 3};
  for (int i = 0; i < me->count * b->spec->slots; i++) {
    bool empty = b->spec->mapping == NONE || (b->spec->mapping == RANDOM && roll(&dice, 3) == 0);
    b->expert[i] = empty ? -1 : b->spec->mapping == CROWDED ? 0 : (int32_t)roll(&dice, (uint64_t)experts_of(b));
    int32_t given = empty ? (i % 5 == 4 ? (int32_t)experts_of(b) : nothing[i % 4]) : b->expert[i];
    ((int32_t *)b->mapping.host)[i] = given;
  }
  send_tensor(me, b->mapping);
}

static struct balance *make_balance(struct team *t, const struct balance_spec *spec) {
  struct rank *me = t->me;
  struct balance *b = scratch(me, sizeof *b);
  uint64_t ranks = (uint64_t)me->count, slots = (uint64_t)spec->slots, rows = (uint64_t)spec->rows;
  uint64_t tokens = rows * (uint64_t)(spec->local > spec->slots ? spec->local : spec->slots);
  uint64_t choices = tokens * ranks * slots, most = ranks * slots * rows;
  *b = (struct balance){spec,
                        t,
                        scratch(me, 4 * ranks * slots),
                        tensor(me, "mapping", 4 * ranks * slots),
                        tensor(me, "copies", slots * rows * spec->row_bytes),
                        tensor(me, "experts", (uint64_t)spec->local * rows * spec->row_bytes),
                        tensor(me, "matrix", 4 * ranks * ranks),
                        tensor(me, "head", 4 * tokens * ranks),
                        tensor(me, "idx", 4 * choices),
                        tensor(me, "slot", 4 * choices),
                        tensor(me, "weights", 4 * choices),
                        tensor(me, "rows", most * spec->row_bytes),
                        tensor(me, "arrived", 4 * most)};
  draw_mapping(b);
  return b;
}

static void prepare(struct balance *b, int what, int first, int count) {
  struct rank *me = b->team->me;
  dk_balance_params p = {.size = sizeof p, .device = seat_device(me->seat), .stream = me->stream};
  p.mapping = b->mapping.at;
  p.what = what;
  p.rank = me->index;
  p.num_ranks = me->count;
  p.num_slots = b->spec->slots;
  p.num_local = b->spec->local;
  p.num_rows = b->spec->rows;
  p.first = first;
  p.count = count;
  p.rank_prefix_matrix = b->matrix.at;
  p.send_head = b->head.at;
  p.topk_idx = b->idx.at;
  p.dst_slot = b->slot.at;
  p.topk_weights = b->weights.at;
  p.rows = b->rows.at;
  p.arrived = b->arrived.at;
  p.experts = b->experts.at;
  p.row_bytes = b->spec->row_bytes;
  CALL(me, balance, &p);
}

static void move(struct balance *b, bool grads, int count) {
  const struct balance_spec *spec = b->spec;
  int ranks = b->team->me->count;
  dk_dispatch_params p = PARAMS(dispatch, b->team, DK_OP_DISPATCH);
  p.flags = DK_DISPATCH_CACHED;
  p.routing = DK_ROUTING_EXPANDED;
  p.hidden_bytes = spec->row_bytes;
  p.index_bytes = 4;
  p.expert_alignment = 1;
  p.num_recv_tokens = -1;
  p.recv_segment = -1;
  p.nvl_send_chunk = p.rdma_send_chunk = 6;
  p.nvl_recv_chunk = p.rdma_recv_chunk = 256;
  p.rank_prefix_matrix = b->matrix.at;
  p.send_head = b->head.at;
  p.topk_idx = b->idx.at;
  p.dst_slot = b->slot.at;
  p.num_tokens = p.num_max_tokens = spec->rows * (grads ? spec->slots : spec->local);
  p.num_topk = grads ? 1 : ranks * count;
  p.num_experts = grads ? ranks : ranks * count;
  p.x = grads ? b->copies.at : b->experts.at;
  p.recv_x = grads ? b->rows.at : b->copies.at;
  p.num_expanded_tokens = grads ? ranks * spec->slots * count : spec->slots * spec->rows;
  p.topk_weights = grads ? b->weights.at : 0;
  p.recv_topk_weights = grads ? b->arrived.at : 0;
  CALL(b->team->me, dispatch, &p);
}

static int least(int a, int b) { return a < b ? a : b; }

static void prefetch(struct balance *b) {
  for (int first = 0; first < b->spec->slots; first += b->spec->part) {
    int count = least(b->spec->part, b->spec->slots - first);
    prepare(b, DK_BALANCE_COPIES, first, count);
    move(b, false, count);
  }
}

static void reduce(struct balance *b) {
  for (int first = 0; first < b->spec->rows; first += b->spec->part) {
    int count = least(b->spec->part, b->spec->rows - first);
    prepare(b, DK_BALANCE_GRADS, first, count);
    move(b, true, count);
    prepare(b, DK_BALANCE_ADD, first, count);
  }
}

/* Word w of row r of an expert; of a copy, the gradient that rank and slot have, whole numbers: sums are exact. */
static uint32_t weight_of(int expert, int row, int word) {
  return (uint32_t)hash(settings.seed, (uint64_t)expert, (uint64_t)row, (uint64_t)word);
}
static float gradient_of(int place, int row, int word) { return (float)(weight_of(place + 1000, row, word) % 4096); }

static void check_prefetch(struct balance *b) {
  const struct balance_spec *spec = b->spec;
  struct rank *me = b->team->me;
  int words = (int)(spec->row_bytes / 4);
  for (int e = 0; e < spec->local; e++)
    for (int i = 0; i < spec->rows * words; i++)
      ((uint32_t *)b->experts.host)[e * spec->rows * words + i] =
          weight_of(me->index * spec->local + e, i / words, i % words);
  send_tensor(me, b->experts);
  poison(me, b->copies);
  prefetch(b);
  fetch_tensor(me, b->copies);
  finish(me);
  expect_healthy(b->team);
  expect_no_refusal(b->team);
  for (int c = 0; c < spec->slots; c++) {
    int expert = b->expert[me->index * spec->slots + c];
    for (int i = 0; i < spec->rows * words; i++) {
      uint32_t got = ((uint32_t *)b->copies.host)[c * spec->rows * words + i];
      uint32_t want = expert < 0 ? 0xa5a5a5a5u : weight_of(expert, i / words, i % words);
      expect(me, got == want, "slot %d of expert %d, row %d, word %d: %08x, want %08x", c, expert, i / words, i % words,
             got, want);
    }
  }
}

/* refused: nothing came. */
static void check_reduce(struct balance *b, bool refused) {
  const struct balance_spec *spec = b->spec;
  struct rank *me = b->team->me;
  int words = (int)(spec->row_bytes / 4), size = spec->rows * words;
  float *own = b->experts.host;
  for (int c = 0; c < spec->slots; c++)
    for (int i = 0; i < size; i++)
      ((float *)b->copies.host)[c * size + i] = gradient_of(me->index * spec->slots + c, i / words, i % words);
  for (int i = 0; i < spec->local * size; i++) own[i] = (float)i;
  send_tensor(me, b->copies);
  send_tensor(me, b->experts);
  reduce(b);
  fetch_tensor(me, b->experts);
  finish(me);
  expect_healthy(b->team);
  for (int e = 0; e < spec->local; e++)
    for (int i = 0; i < size; i++) {
      float want = (float)(e * size + i);
      for (int place = 0; place < me->count * spec->slots && !refused; place++)
        if (b->expert[place] == me->index * spec->local + e) want += gradient_of(place, i / words, i % words);
      expect(me, own[e * size + i] == want, "expert %d, row %d, word %d: %g, want %g", e, i / words, i % words,
             (double)own[e * size + i], (double)want);
    }
}

static struct team *team_for(struct rank *me, const struct balance_spec *spec) {
  struct team_spec team = {.min_row = spec->row_bytes + 12 * 32, .trace = -1};
  return make_team(me, &team);
}

static void both(struct rank *me) {
  const struct balance_spec *spec = me->test->arg;
  struct balance *b = make_balance(team_for(me, spec), spec);
  for (int round = 0; round < 2; round++) {
    check_prefetch(b);
    check_reduce(b, false);
    expect_no_refusal(b->team);
  }
}

/* A rank with another mapping: every rank refuses the call by the matrix of its handle, and nothing is added, also not
 * what an earlier call has left in the workspace. */
static void disagreement(struct rank *me) {
  const struct balance_spec *spec = me->test->arg;
  struct balance *b = make_balance(team_for(me, spec), spec);
  check_reduce(b, false);
  expect_no_refusal(b->team);
  int32_t *entry = &((int32_t *)b->mapping.host)[0], right = *entry;
  if (me->index == 1) *entry = b->expert[0] < 0 ? 0 : -1;
  send_tensor(me, b->mapping);
  check_reduce(b, true);
  dk_failure f = expect_refusal(b->team, DK_EINVAL, DK_OP_DISPATCH, -2, DK_FIELD_PREFIX_MATRIX);
  expect(me, f.seen == INT64_MIN, "the record has an entry of the matrix, %ld", (long)f.seen);
  *entry = right;
  send_tensor(me, b->mapping);
  check_reduce(b, false);
  check_prefetch(b);
}

static const struct balance_spec usual = {3, 2, 5, 64, 2, RANDOM}, wide = {2, 3, 4, 2048, 1, RANDOM},
                                 crowded = {4, 2, 3, 32, 3, CROWDED}, none = {2, 2, 3, 32, 3, NONE},
                                 whole = {2, 2, 6, 128, 6, RANDOM};
static const struct test_case cases[] = {
    {"balance/1 rank", both, 1, &usual, QUICK, 0, 0},
    {"balance/3 ranks", both, 3, &usual, QUICK, 0, 0},
    {"balance/8 ranks, wide rows", both, 8, &wide, USUAL, 0, 0},
    {"balance/all slots of one expert", both, 3, &crowded, QUICK, 0, 0},
    {"balance/no copies", both, 2, &none, QUICK, 0, 0},
    {"balance/ranks disagree on the mapping", disagreement, 3, &whole, QUICK, 0, 0},
};
GROUP(balance_cases);
