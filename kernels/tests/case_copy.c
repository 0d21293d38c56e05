/* case_copy.c - rows of normal mode by copy engines: cases of dispatch and combine once more in such teams, and which
 * calls take that way. A dispatch that takes it leaves its rows in the second half of the sender's nvl region, a
 * combine in that of the receiver's. */
#include <string.h>

#include "normal.h"
#include "rerun_on_nodes.h"

static const struct team_spec copies = {.flags = DK_TEAM_NORMAL_COPY};

#define CASE(name, ranks, weight) \
  {"copy/" name, rerun_on_nodes, ranks, &(const struct rerun){name, &copies}, weight, DK_CAP_NORMAL_COPY, 0}

/* Bytes of the second half of the nvl region that belong to one rank, and where they begin in this rank's block. */
static uint64_t outbox_bytes(const struct team *t) {
  return t->nvl_bytes / 2 / 128 * 128 / (uint64_t)t->me->count / 128 * 128;
}
static uint64_t outbox(const struct team *t, int rank) {
  return t->block->at[t->me->index] + t->nvl_offset + t->nvl_bytes / 2 / 128 * 128 + (uint64_t)rank * outbox_bytes(t);
}

static struct team *copying_team(struct rank *me, uint64_t nvl_bytes) {
  struct team_spec place = {.nvl_bytes = nvl_bytes, .flags = DK_TEAM_NORMAL_COPY, .trace = -1};
  return make_team(me, &place);
}

static void wipe(struct team *t) {
  struct rank *me = t->me;
  fill(me, t->block->at[me->index] + t->nvl_offset, t->nvl_bytes, 0x5a);
  finish(me);
  meet(me);
}

/* Whether the rows for each other rank are packed, which all must be or none. */
static bool packed(struct normal *n) {
  struct rank *me = n->team->me;
  struct tensor row = tensor(me, "outbox", n->spec->row_bytes);
  int whole = 0, empty = 0;
  for (int r = 0; r < me->count; r++) {
    int first = -1;
    for (int token = n->tokens - 1; token >= 0; token--)
      if (((const uint8_t *)n->in_rank.host)[token * me->count + r]) first = token;
    if (r == me->index || first < 0) continue;
    copy(me, row.at, outbox(n->team, r), row.bytes);
    fetch_tensor(me, row);
    finish(me);
    const uint8_t *sent = (const uint8_t *)n->x.host + (uint64_t)first * row.bytes;
    whole += !memcmp(row.host, sent, row.bytes);
    empty += ((const uint8_t *)row.host)[0] == 0x5a && ((const uint8_t *)row.host)[row.bytes - 1] == 0x5a;
  }
  expect(me, !whole || !empty, "%d ranks' rows are packed, %d are not", whole, empty);
  expect(me, whole || empty, "no rank's rows are packed, none's outbox is untouched");
  return whole > 0;
}

struct way {
  struct normal_spec spec;
  uint64_t nvl_bytes;
  bool fresh, cached; /* these calls take the way of copies */
};

static void ways(struct rank *me) {
  const struct way *way = me->test->arg;
  struct normal_spec spec = way->spec;
  spec.experts *= me->count;
  struct team *t = copying_team(me, way->nvl_bytes);
  for (uint64_t round = 0; round < 3; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &spec, settings.seed + round);
    wipe(t);
    dispatch_and_check(n);
    expect(me, packed(n) == way->fresh, "round %lu: the dispatch %s", (unsigned long)round,
           way->fresh ? "did not pack" : "packed");
    meet(me);
    for (uint64_t again = 0; again < 2; again++) {
      new_payload(n, settings.seed + 50 + 2 * round + again);
      wipe(t);
      run_dispatch(n, DK_DISPATCH_CACHED);
      check_dispatch(n, DK_DISPATCH_CACHED);
      expect(me, packed(n) == way->cached, "round %lu: the cached dispatch %s", (unsigned long)round,
             way->cached ? "did not pack" : "packed");
      meet(me);
    }
    back_to(me, mark);
  }
}

#define SPEC .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .index_bytes = 8
static const struct way usual = {{SPEC}, 1 << 20, true, true}, scaled = {{SPEC, .scales = 4}, 1 << 20, true, true},
                        worst = {{SPEC, .spare = 9}, 1 << 20, false, true},
                        in_segment = {{SPEC, .segment = true}, 1 << 20, true, true},
                        crowded = {{SPEC}, 1 << 16, false, false};

/* `spec` is filled in, and lives as long as what comes back. */
static struct normal *usual_dispatch(struct rank *me, struct normal_spec *spec) {
  *spec = usual.spec;
  spec->experts *= me->count;
  struct normal *n = make_normal(copying_team(me, 1 << 20), spec, settings.seed);
  dispatch_and_check(n);
  return n;
}

/* How many rows the last rank sends to itself, as the matrix has it, changed in place; still ascending. */
static void change_matrix(struct normal *n, int by) {
  struct rank *me = n->team->me;
  int32_t *matrix = n->matrix.host;
  int last = me->count * me->count - 1;
  fetch_tensor(me, n->matrix);
  finish(me);
  matrix[last] += by;
  expect(me, matrix[last] >= matrix[last - me->count], "the last rank sends nothing to itself");
  send_tensor(me, n->matrix);
}

/* Rank 0 issues a cached dispatch without its exchange, as a handle of a graph has it: its own rows come by SMs, those
 * of the others by copies. */
static void each_for_itself(struct rank *me) {
  struct normal_spec spec;
  struct normal *n = usual_dispatch(me, &spec);
  for (uint64_t round = 0; round < 4; round++) {
    new_payload(n, round + 9);
    dk_dispatch_params p = dispatch_params(n, DK_DISPATCH_CACHED);
    if (me->index == 0) p.flags &= ~(uint32_t)DK_DISPATCH_COPIES;
    CALL(me, dispatch, &p);
    check_dispatch(n, DK_DISPATCH_CACHED);
  }
}

/* A handle older than the notes that are kept: rows come by SMs. */
static void forgotten(struct rank *me) {
  struct normal_spec spec = {.tokens = 4, .experts = 1, .topk = 1, .row_bytes = 64, .index_bytes = 8};
  spec.experts *= me->count;
  struct team *t = copying_team(me, 1 << 20);
  struct normal *old = make_normal(t, &spec, 1);
  dispatch_and_check(old);
  for (uint64_t i = 0; i < 256; i++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &spec, i + 2);
    run_layout(n);
    run_notify(n);
    await_counts(n);
    finish(me);
    back_to(me, mark);
  }
  for (uint64_t round = 0; round < 2; round++) {
    new_payload(old, round + 5);
    run_dispatch(old, DK_DISPATCH_CACHED);
    check_dispatch(old, DK_DISPATCH_CACHED);
  }
}

/* The matrix of a handle was changed after its exchange: refused on every rank, and the next call is right. */
static void changed_matrix(struct rank *me) {
  struct normal_spec spec;
  struct normal *n = usual_dispatch(me, &spec);
  change_matrix(n, -1);
  run_dispatch(n, DK_DISPATCH_CACHED);
  finish(me);
  expect_refusal(n->team, DK_EINVAL, DK_OP_DISPATCH, -2, DK_FIELD_PREFIX_MATRIX);
  change_matrix(n, 1);
  new_payload(n, 8);
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
}

/* Where rows of a combine from a rank arrive. */
static uint64_t inbox(const struct team *t, int from, int which) {
  return outbox(t, from) + (uint64_t)which * (outbox_bytes(t) / 2 / 128 * 128);
}

/* In which inbox the rows for this rank arrived; -1: in none. */
static int pushed(struct normal *n, uint64_t row_bytes) {
  struct rank *me = n->team->me;
  struct tensor row = tensor(me, "inbox", row_bytes);
  int found[2] = {0, 0}, others = 0;
  for (int r = 0; r < me->count; r++) {
    bool sends = false;
    for (int token = 0; token < n->tokens; token++) sends |= ((const uint8_t *)n->in_rank.host)[token * me->count + r];
    if (r == me->index || !sends) continue;
    others++;
    for (int which = 0; which < 2; which++) {
      copy(me, row.at, inbox(n->team, r, which), row.bytes);
      fetch_tensor(me, row);
      finish(me);
      const uint8_t *bytes = row.host;
      bool touched = false;
      for (uint64_t i = 0; i < row.bytes; i++) touched |= bytes[i] != 0x5a;
      found[which] += touched;
    }
  }
  expect(me, others > 0, "nobody sends rows to this rank: the case says less than it should");
  expect(me, (found[0] % others) + (found[1] % others) == 0, "%d and %d of %d ranks pushed", found[0], found[1],
         others);
  expect(me, !found[0] || !found[1], "rows are in both inboxes");
  return found[0] ? 0 : found[1] ? 1 : -1;
}

struct back {
  struct normal_spec dispatch;
  struct combine_spec combine;
  uint64_t nvl_bytes;
  bool pushes;
};

/* Combines take the two inboxes in turn. */
static void ways_back(struct rank *me) {
  const struct back *back = me->test->arg;
  struct normal_spec spec = back->dispatch;
  spec.experts *= me->count;
  struct team *t = copying_team(me, back->nvl_bytes);
  for (int round = 0; round < 4; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &spec, settings.seed + (uint64_t)round);
    dispatch_and_check(n);
    struct combine *c = make_combine(n, &back->combine, (uint64_t)round);
    meet(me);
    wipe(t);
    run_combine(c);
    check_combine(c);
    meet(me);
    int where = pushed(n, 2 * (uint64_t)back->combine.hidden), wanted = back->pushes ? round % 2 : -1;
    expect(me, where == wanted, "round %d: the rows are in inbox %d, not %d", round, where, wanted);
    back_to(me, mark);
  }
}

/* Rank 0 does not say that the exchange is the team's: its rows go by SMs, those of the others by copies. */
static void each_sender_for_itself(struct rank *me) {
  struct normal_spec spec;
  struct normal *n = usual_dispatch(me, &spec);
  for (uint64_t round = 0; round < 4; round++) {
    struct combine *c = make_combine(n, &(const struct combine_spec){.hidden = 256, .weights = true}, round);
    dk_combine_params p = combine_params(c);
    if (me->index == 0) p.flags &= ~(uint32_t)DK_COMBINE_COPIES;
    CALL(me, combine, &p);
    check_combine(c);
  }
}

/* As changed_matrix. */
static void changed_before_combine(struct rank *me) {
  struct normal_spec spec;
  struct normal *n = usual_dispatch(me, &spec);
  struct combine *c = make_combine(n, &(const struct combine_spec){.hidden = 256}, 3);
  change_matrix(n, -1);
  run_combine(c);
  finish(me);
  expect_refusal(n->team, DK_EINVAL, DK_OP_COMBINE, -2, DK_FIELD_PREFIX_MATRIX);
  change_matrix(n, 1);
  run_combine(c);
  check_combine(c);
}

/* Rank 0's combine fails while rank 1 is late: what copies bring after that would be in rows that rank 1 reads, so rank
 * 1's combine fails, too, although all it needs is there. */
static void failed_sender(struct rank *me) {
  struct normal_spec spec;
  struct normal *n = usual_dispatch(me, &spec);
  struct team *t = n->team;
  struct combine *c = make_combine(n, &(const struct combine_spec){.hidden = 256}, 3);
  run_combine(c);
  check_combine(c);
  meet(me);
  if (me->index == 0) {
    set_abort(t, DK_EABORTED, -1);
    run_combine(c);
    finish(me);
    expect_failure(t, DK_EABORTED, DK_OP_COMBINE, -1);
  }
  meet(me);
  if (me->index == 1) {
    run_combine(c);
    fetch_tensor(me, c->out);
    finish(me);
    expect_failure(t, DK_EABORTED, DK_OP_COMBINE, 0);
    expect(me, t->status->failure.expected == DK_EABORTED && t->status->failure.seen == DK_OP_COMBINE,
           "the record is of %ld in operation %ld", (long)t->status->failure.expected, (long)t->status->failure.seen);
    expect(me, bf16_is_nan(*(const uint16_t *)c->out.host), "the first sum is %g",
           from_bf16(*(const uint16_t *)c->out.host));
  }
}

static const struct back sums_back = {{SPEC}, {.hidden = 256}, 1 << 20, true},
                         weights_back = {{SPEC}, {.hidden = 256, .weights = true}, 1 << 20, true},
                         biases_back = {{SPEC}, {.hidden = 256, .biases = 2}, 1 << 20, true},
                         worst_back = {{SPEC, .spare = 9}, {.hidden = 256}, 1 << 20, true},
                         crowded_back = {{SPEC}, {.hidden = 256}, 1 << 16, false};

#define OWN(name, run, ranks, arg) {"copy/" name, run, ranks, arg, QUICK, DK_CAP_NORMAL_COPY, 0}
static const struct test_case cases[] = {
    OWN("fresh and cached", ways, 3, &usual),
    OWN("fresh and cached, 8 ranks", ways, 8, &usual),
    OWN("scales", ways, 3, &scaled),
    OWN("worst case, then cached", ways, 3, &worst),
    OWN("rows in a segment", ways, 3, &in_segment),
    OWN("outboxes too small", ways, 4, &crowded),
    OWN("each rank for itself", each_for_itself, 3, NULL),
    OWN("an old handle", forgotten, 2, NULL),
    OWN("a changed handle", changed_matrix, 3, NULL),
    OWN("combine", ways_back, 3, &sums_back),
    OWN("combine, 8 ranks", ways_back, 8, &sums_back),
    OWN("combine with weights", ways_back, 3, &weights_back),
    OWN("combine with biases", ways_back, 3, &biases_back),
    OWN("combine after a worst case", ways_back, 3, &worst_back),
    OWN("inboxes too small", ways_back, 4, &crowded_back),
    OWN("each sender for itself", each_sender_for_itself, 3, NULL),
    OWN("a handle changed before combine", changed_before_combine, 3, NULL),
    OWN("a sender that has failed", failed_sender, 2, NULL),
    CASE("dispatch/BF16, 1 rank", 1, QUICK),
    CASE("dispatch/BF16, 2 ranks", 2, QUICK),
    CASE("dispatch/BF16, 8 ranks", 8, USUAL),
    CASE("dispatch/FP8 with scales, int32 indices", 3, QUICK),
    CASE("dispatch/FP8, 56 scales", 2, USUAL),
    CASE("dispatch/without top-k", 3, QUICK),
    CASE("dispatch/rows of 208 bytes", 4, USUAL),
    CASE("dispatch/hidden 16384", 4, USUAL),
    CASE("dispatch/everything -1", 3, QUICK),
    CASE("dispatch/one hot expert", 4, QUICK),
    CASE("dispatch/a rank without tokens, one without rows", 4, QUICK),
    CASE("dispatch/row count from the matrix", 3, QUICK),
    CASE("dispatch/smallest region, 4 ranks", 4, USUAL),
    CASE("dispatch/region overwritten between calls", 3, USUAL),
    CASE("dispatch/thirty calls in a row", 4, USUAL),
    CASE("expand/plain", 3, QUICK),
    CASE("expand/plain, FP8, scales by column", 3, QUICK),
    CASE("expand/plain, worst case", 3, QUICK),
    CASE("expand/plain, a rank without tokens", 4, USUAL),
    CASE("expand/back to back", 3, QUICK),
    CASE("expand/plain rows by an expanded handle", 3, QUICK),
    CASE("expand/refused: plain, cancelled", 3, QUICK),
    CASE("combine/1 rank", 1, QUICK),
    CASE("combine/4 ranks", 4, QUICK),
    CASE("combine/8 ranks", 8, USUAL),
    CASE("combine/two biases", 4, QUICK),
    CASE("combine/8 channels", 3, QUICK),
    CASE("combine/296 channels, top-5", 3, USUAL),
    CASE("combine/everything -1, bias", 3, QUICK),
    CASE("combine/a rank without tokens, one without rows", 4, QUICK),
    CASE("combine/one hot expert", 4, QUICK),
    CASE("combine/no tokens at all", 3, QUICK),
    CASE("combine/smallest region, 2 ranks", 2, QUICK),
    CASE("combine/the same bits every time", 4, USUAL),
    CASE("combine/one handle, many calls", 3, QUICK),
    CASE("timeout/combine", 3, QUICK),
    CASE("abort/combine", 3, QUICK),
    CASE("timeout/dispatch", 3, QUICK),
    CASE("abort/dispatch", 3, QUICK),
    CASE("mismatch/bytes of a row", 3, QUICK),
};
GROUP(copy_cases);
