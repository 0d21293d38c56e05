/* case_worst.c - worst case: no rank waits for counts, outputs have more rows than arrive. */
#include "normal.h"

#define SPEC(name, ...) static const struct normal_spec name = {.index_bytes = 8, .nvl_bytes = 1 << 20, __VA_ARGS__}
SPEC(spare_rows, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .spare = 9);
SPEC(spare_fp8, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .scales = 4, .index_bytes = 4, .spare = 1);
SPEC(nobody, .pattern = NOBODY, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 5);
SPEC(one_hot, .pattern = ONE_HOT, .tokens = 50, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 3);
SPEC(no_tokens, .pattern = NO_TOKENS, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 5);

static const struct combine_spec with_weights = {.hidden = 64, .biases = 1, .weights = true};

/* Dispatch and combine enqueued without a wait in between. */
static void padded(struct rank *me) {
  struct normal_spec spec = *(const struct normal_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct team *t = make_team(me, &team);
  for (uint64_t round = 0; round < 3; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &spec, settings.seed + round);
    struct combine *c = make_combine(n, &with_weights, settings.seed + round);
    run_layout(n);
    run_notify(n);
    run_dispatch(n, 0);
    run_combine(c);
    check_notify(n);
    check_dispatch(n, 0);
    check_combine(c);
    back_to(me, mark);
  }
}

/* The handle serves a cached dispatch and another combine; the rows past N stay undefined. */
static void cached(struct rank *me) {
  struct normal_spec spec = spare_rows;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &spec, 4);
  dispatch_and_check(n);
  new_payload(n, 5);
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
  struct combine *c = make_combine(n, &with_weights, 6);
  run_combine(c);
  check_combine(c);
}

/* Rank 0 receives more rows than it has room for: every rank refuses the notify, and the dispatch after it moves
 * nothing. The next call is right. */
static void too_few_rows(struct rank *me) {
  struct normal_spec spec = one_hot;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &spec, 4);
  int arriving = busiest(n->routing), allowed = arriving - 7;
  n->capacity = allowed;
  run_layout(n);
  run_notify(n);
  dk_dispatch_params p = dispatch_params(n, 0);
  CALL(me, dispatch, &p);
  finish(me);
  dk_failure f = expect_refusal(t, DK_EINVAL, DK_OP_NOTIFY, 0, DK_FIELD_WORST_TOKENS);
  expect(me, f.expected == allowed && f.seen == arriving, "the record says %ld allowed, %ld arrive; it is %d and %d",
         (long)f.expected, (long)f.seen, allowed, arriving);
  n->capacity = arriving;
  dispatch_and_check(n);
}

static const struct test_case cases[] = {
    {"worst/spare rows, 1 rank", padded, 1, &spare_rows, QUICK, 0, 0},
    {"worst/spare rows, 3 ranks", padded, 3, &spare_rows, QUICK, 0, 0},
    {"worst/spare rows, 8 ranks", padded, 8, &spare_rows, USUAL, 0, 0},
    {"worst/FP8", padded, 4, &spare_fp8, USUAL, 0, 0},
    {"worst/everything -1", padded, 3, &nobody, QUICK, 0, 0},
    {"worst/one hot expert", padded, 3, &one_hot, QUICK, 0, 0},
    {"worst/no tokens at all", padded, 3, &no_tokens, QUICK, 0, 0},
    {"worst/cached", cached, 3, NULL, QUICK, 0, 0},
    {"worst/too few rows", too_few_rows, 3, NULL, QUICK, 0, 0},
};
GROUP(worst_cases);
