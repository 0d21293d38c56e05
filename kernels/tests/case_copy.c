/* case_copy.c - rows of dispatch by copy engines: cases of dispatch once more in such teams, and which calls take that
 * way. A call that takes it leaves its rows in the second half of the sender's nvl region. */
#include <string.h>

#include "normal.h"
#include "rerun_on_nodes.h"

static const struct team_spec copies = {.flags = DK_TEAM_NORMAL_COPY};

#define CASE(name, ranks, weight) \
  {"copy/" name, rerun_on_nodes, ranks, &(const struct rerun){name, &copies}, weight, DK_CAP_NORMAL_COPY, 0}

/* Where the first of this rank's rows for a rank is packed. */
static uint64_t outbox(const struct team *t, int to) {
  uint64_t half = t->nvl_bytes / 2 / 128 * 128, each = half / (uint64_t)t->me->count / 128 * 128;
  return t->block->at[t->me->index] + t->nvl_offset + half + (uint64_t)to * each;
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
  struct team_spec place = {.nvl_bytes = way->nvl_bytes, .flags = DK_TEAM_NORMAL_COPY, .trace = -1};
  struct team *t = make_team(me, &place);
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

/* Rank 0 issues a cached dispatch without its exchange, as a handle of a graph has it: its own rows come by SMs, those
 * of the others by copies. */
static void each_for_itself(struct rank *me) {
  struct normal_spec spec = usual.spec;
  spec.experts *= me->count;
  struct team_spec place = {.nvl_bytes = 1 << 20, .flags = DK_TEAM_NORMAL_COPY, .trace = -1};
  struct team *t = make_team(me, &place);
  struct normal *n = make_normal(t, &spec, settings.seed);
  dispatch_and_check(n);
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
  struct team_spec place = {.nvl_bytes = 1 << 20, .flags = DK_TEAM_NORMAL_COPY, .trace = -1};
  struct team *t = make_team(me, &place);
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
  struct normal_spec spec = usual.spec;
  spec.experts *= me->count;
  struct team_spec place = {.nvl_bytes = 1 << 20, .flags = DK_TEAM_NORMAL_COPY, .trace = -1};
  struct team *t = make_team(me, &place);
  struct normal *n = make_normal(t, &spec, settings.seed);
  dispatch_and_check(n);
  int32_t *matrix = n->matrix.host;
  fetch_tensor(me, n->matrix);
  finish(me);
  int last = me->count * me->count - 1;
  matrix[last]--; /* still ascending, or the case says less than it should */
  expect(me, matrix[last] >= matrix[last - me->count], "the last rank sends nothing to itself");
  send_tensor(me, n->matrix);
  run_dispatch(n, DK_DISPATCH_CACHED);
  finish(me);
  expect_refusal(t, DK_EINVAL, DK_OP_DISPATCH, -2, DK_FIELD_PREFIX_MATRIX);
  matrix[last]++;
  send_tensor(me, n->matrix);
  new_payload(n, 8);
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
}

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
    CASE("combine/4 ranks", 4, QUICK),
    CASE("timeout/dispatch", 3, QUICK),
    CASE("abort/dispatch", 3, QUICK),
    CASE("mismatch/bytes of a row", 3, QUICK),
};
GROUP(copy_cases);
