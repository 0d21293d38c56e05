/* case_worst.c - worst case: no rank waits for counts, outputs have more rows than arrive. */
#include "normal.h"

#define SPEC(name, ...) static const struct normal_spec name = {.index_bytes = 8, .nvl_bytes = 1 << 20, __VA_ARGS__}
SPEC(spare_rows, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .spare = 9);
SPEC(spare_fp8, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .scales = 4, .index_bytes = 4, .spare = 1);
SPEC(nobody, .pattern = NOBODY, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 5);
SPEC(one_hot, .pattern = ONE_HOT, .tokens = 50, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 3);
SPEC(no_tokens, .pattern = NO_TOKENS, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 5);

#define ONCE(name, ...) SPEC(name, .at_once = true, .nvl_bytes = 16 << 20, __VA_ARGS__)
ONCE(once, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .spare = 9);
ONCE(once_fp8, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .scales = 4, .index_bytes = 4, .spare = 1);
ONCE(once_wide, .tokens = 40, .experts = 4, .topk = 3, .row_bytes = 16384, .spare = 9, .nvl_bytes = 80 << 20);
ONCE(once_bare, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .spare = 9, .index_bytes = 0);
ONCE(once_nobody, .pattern = NOBODY, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 5);
ONCE(once_one_hot, .pattern = ONE_HOT, .tokens = 50, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 3);
ONCE(once_silent, .pattern = NO_TOKENS, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64, .spare = 5);

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
  struct normal_spec spec = *(const struct normal_spec *)me->test->arg;
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
  struct normal_spec spec = *(const struct normal_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &spec, 4);
  int arriving = busiest(n->routing), allowed = arriving - 7;
  n->capacity = allowed;
  run_layout(n);
  run_notify(n);
  run_dispatch(n, 0);
  finish(me);
  uint32_t op = spec.at_once ? DK_OP_DISPATCH : DK_OP_NOTIFY;
  dk_failure f = expect_refusal(t, DK_EINVAL, op, 0, DK_FIELD_WORST_TOKENS);
  expect(me, f.expected == allowed && f.seen == arriving, "the record says %ld allowed, %ld arrive; it is %d and %d",
         (long)f.expected, (long)f.seen, allowed, arriving);
  n->capacity = arriving;
  dispatch_and_check(n);
}

/* Rank 1's counts are not those of token_in_rank: every rank refuses the call, and no row moves. The next one is right.
 */
static void wrong_counts(struct rank *me) {
  struct normal_spec spec = once;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct normal *n = make_normal(make_team(me, &team), &spec, 4);
  run_layout(n);
  fetch_tensor(me, n->per_rank);
  finish(me);
  int32_t right = ((int32_t *)n->per_rank.host)[0];
  if (me->index == 1) ((int32_t *)n->per_rank.host)[0] = right + 1;
  send_tensor(me, n->per_rank);
  run_dispatch(n, 0);
  finish(me);
  dk_failure f = expect_refusal(n->team, DK_EINVAL, DK_OP_DISPATCH, 1, DK_FIELD_TOKENS_PER_RANK);
  expect(me, f.seen == f.expected + 1, "the record says %ld expected, %ld seen", (long)f.expected, (long)f.seen);
  fetch_tensor(me, n->head);
  finish(me);
  for (int i = 0; i < n->tokens * me->count; i++)
    expect(me, ((int32_t *)n->head.host)[i] == -1, "send_head[%d] of a call that was refused is set", i);
  dispatch_and_check(n);
}

/* Where rows of each source would come first, this rank's nvl region has what it has put there. */
static void expect_own_region(struct team *t, struct tensor begin) {
  struct rank *me = t->me;
  for (int source = 0; source < me->count; source++) {
    uint64_t ring = t->nvl_bytes / me->count / 128 * 128 * source;
    copy(me, begin.at, t->block->at[me->index] + t->nvl_offset + ring, begin.bytes);
    fetch_tensor(me, begin);
    finish(me);
    for (uint64_t i = 0; i < begin.bytes; i++)
      expect(me, ((uint8_t *)begin.host)[i] == 0x5a, "byte %lu of rank %d's ring has been written", (unsigned long)i,
             source);
  }
}

/* Between calls the nvl region is the caller's: no row of peers that have begun a call comes before this rank's own. */
static void region_between_calls(struct rank *me) {
  struct normal_spec spec = once;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &spec, 4);
  struct combine *c = make_combine(n, &with_weights, 6);
  struct tensor begin = tensor(me, "the begin of a ring", 4096);
  run_layout(n);
  for (int call = 0; call < 2; call++) {
    fill(me, t->block->at[me->index] + t->nvl_offset, t->nvl_bytes, 0x5a);
    finish(me);
    meet(me);
    if (me->index == 0) {
      pause_ms(30);
      expect_own_region(t, begin);
    }
    call == 0 ? run_dispatch(n, 0) : run_combine(c);
    finish(me);
  }
  check_dispatch(n, 0);
  check_combine(c);
}

/* One rank has room for more rows than a kernel of few rows takes, or a handle that does not say how it came. */
static void once_alone(struct rank *me) {
  bool in_combine = me->test->arg != NULL;
  struct normal_spec spec = once;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct normal *n = make_normal(make_team(me, &team), &spec, 4);
  run_layout(n);
  bool alone = me->index == 1;
  if (in_combine) {
    run_dispatch(n, 0);
    dk_combine_params p = combine_params(make_combine(n, &with_weights, 6));
    if (alone) p.num_max_tokens = 0;
    CALL(me, combine, &p);
  } else if (alone) {
    dk_notify_params p = notify_params(n);
    CALL(me, notify, &p);
  } else {
    run_dispatch(n, 0);
  }
  finish(me);
  uint32_t op = in_combine ? DK_OP_COMBINE : alone ? DK_OP_NOTIFY : DK_OP_DISPATCH;
  expect_failure(n->team, DK_EMISMATCH, op, -2);
  uint32_t field = n->team->status->failure.field;
  expect(me, field == (in_combine ? DK_FIELD_MAX_TOKENS : DK_FIELD_OPERATION), "the failure is of %s",
         field_name(field));
}

#define AT_ONCE(name, run, ranks, arg, weight) {"worst/at once, " name, run, ranks, arg, weight, DK_CAP_AT_ONCE, 0}
static const struct test_case cases[] = {
    {"worst/spare rows, 1 rank", padded, 1, &spare_rows, QUICK, 0, 0},
    {"worst/spare rows, 3 ranks", padded, 3, &spare_rows, QUICK, 0, 0},
    {"worst/spare rows, 8 ranks", padded, 8, &spare_rows, USUAL, 0, 0},
    {"worst/FP8", padded, 4, &spare_fp8, USUAL, 0, 0},
    {"worst/everything -1", padded, 3, &nobody, QUICK, 0, 0},
    {"worst/one hot expert", padded, 3, &one_hot, QUICK, 0, 0},
    {"worst/no tokens at all", padded, 3, &no_tokens, QUICK, 0, 0},
    {"worst/cached", cached, 3, &spare_rows, QUICK, 0, 0},
    {"worst/too few rows", too_few_rows, 3, &one_hot, QUICK, 0, 0},
    AT_ONCE("1 rank", padded, 1, &once, QUICK),
    AT_ONCE("3 ranks", padded, 3, &once, QUICK),
    AT_ONCE("8 ranks", padded, 8, &once, USUAL),
    AT_ONCE("FP8", padded, 4, &once_fp8, USUAL),
    AT_ONCE("rows of 16 KB", padded, 2, &once_wide, USUAL),
    AT_ONCE("no topk_idx", padded, 3, &once_bare, QUICK),
    AT_ONCE("everything -1", padded, 3, &once_nobody, QUICK),
    AT_ONCE("one hot expert", padded, 3, &once_one_hot, QUICK),
    AT_ONCE("no tokens at all", padded, 3, &once_silent, QUICK),
    AT_ONCE("then cached", cached, 3, &once, QUICK),
    AT_ONCE("too few rows", too_few_rows, 3, &once_one_hot, QUICK),
    AT_ONCE("nothing comes between calls", region_between_calls, 3, NULL, QUICK),
    AT_ONCE("wrong counts", wrong_counts, 3, NULL, QUICK),
    AT_ONCE("by one rank alone", once_alone, 3, NULL, QUICK),
    AT_ONCE("combined by one rank otherwise", once_alone, 3, &once, QUICK),
};
GROUP(worst_cases);
