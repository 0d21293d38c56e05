/* case_notify.c - the exchange of counts. */
#include <string.h>

#include "normal.h"

static const struct team_spec kSmall = {.nvl_bytes = 1 << 20, .trace = -1};

static void exchange(struct normal *n) {
  run_layout(n);
  run_notify(n);
  await_counts(n);
  check_notify(n);
}

static void patterns(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  for (enum pattern pattern = UNIFORM; pattern <= NO_TOKENS; pattern++) {
    struct normal_spec spec = {
        .pattern = pattern, .tokens = 45, .experts = 4 * me->count, .topk = 3, .index_bytes = 8, .row_bytes = 64};
    struct mark mark = set_mark(me);
    exchange(make_normal(t, &spec, settings.seed + (uint64_t)pattern));
    back_to(me, mark);
  }
}

static void alignments(struct rank *me) {
  static const int alignments[] = {1, 2, 7, 128, 1000};
  struct team *t = make_team(me, &kSmall);
  for (int i = 0; i < COUNT(alignments); i++) {
    struct normal_spec spec = {.pattern = SKEWED,
                               .tokens = 64,
                               .experts = 8 * me->count,
                               .topk = 4,
                               .index_bytes = 4,
                               .row_bytes = 64,
                               .alignment = alignments[i]};
    struct mark mark = set_mark(me);
    exchange(make_normal(t, &spec, settings.seed + (uint64_t)i));
    back_to(me, mark);
  }
}

/* Many notifies in a row, without a wait for the counts in between. */
static void repeated(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {
      .pattern = UNIFORM, .tokens = 20, .experts = 2 * me->count, .topk = 2, .index_bytes = 8, .row_bytes = 64};
  struct normal *calls[10];
  for (int i = 0; i < COUNT(calls); i++) calls[i] = make_normal(t, &spec, (uint64_t)i);
  for (int i = 0; i < COUNT(calls); i++) {
    run_layout(calls[i]);
    run_notify(calls[i]);
  }
  for (int i = 0; i < COUNT(calls); i++) {
    await_counts(calls[i]);
    check_notify(calls[i]);
  }
}

static void many_experts(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {
      .pattern = UNIFORM, .tokens = 30, .experts = 512 * me->count, .topk = 8, .index_bytes = 8, .row_bytes = 64};
  exchange(make_normal(t, &spec, 3));
}

/* Without top-k there are no counts by expert. */
static void without_experts(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {.pattern = UNIFORM, .tokens = 30, .experts = 2 * me->count, .topk = 2, .row_bytes = 64};
  struct normal *n = make_normal(t, &spec, 3);
  memset(n->counts->per_expert, 0x55, 8);
  run_layout(n);
  dk_notify_params p = notify_params(n);
  p.tokens_per_expert = 0;
  p.num_experts = 0;
  CALL(me, notify, &p);
  await_counts(n);
  finish(me);
  expect_healthy(t);
  expect(me, n->counts->num_recv_tokens == n->rows, "num_recv_tokens is %d, wanted %d", n->counts->num_recv_tokens,
         n->rows);
  expect(me, n->counts->per_expert[0] == 0x55555555, "per_expert was written though there are no experts");
}

/* The operation writes seq last: a thread that reads it reads valid counts. */
static void sequence(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {
      .pattern = UNIFORM, .tokens = 20, .experts = 2 * me->count, .topk = 2, .index_bytes = 8, .row_bytes = 64};
  struct mark mark = set_mark(me);
  for (int round = 0; round < 20; round++) {
    struct normal *n = make_normal(t, &spec, (uint64_t)round);
    run_layout(n);
    run_notify(n);
    await_counts(n);
    expect(me, n->counts->num_recv_tokens == n->rows, "round %d: num_recv_tokens is %d when seq arrives, wanted %d",
           round, n->counts->num_recv_tokens, n->rows);
    expect(me, __atomic_load_n(&n->counts->seq, __ATOMIC_ACQUIRE) == n->notify_call, "seq is not the call's number");
    back_to(me, mark);
  }
}

static const struct test_case cases[] = {
    {"notify/patterns on 1 rank", patterns, 1, NULL, QUICK, 0, 0},
    {"notify/patterns on 2 ranks", patterns, 2, NULL, QUICK, 0, 0},
    {"notify/patterns on 5 ranks", patterns, 5, NULL, QUICK, 0, 0},
    {"notify/patterns on 8 ranks", patterns, 8, NULL, USUAL, 0, 0},
    {"notify/alignments", alignments, 3, NULL, QUICK, 0, 0},
    {"notify/ten in a row", repeated, 4, NULL, QUICK, 0, 0},
    {"notify/512 experts a rank", many_experts, 2, NULL, USUAL, 0, 0},
    {"notify/without experts", without_experts, 3, NULL, QUICK, 0, 0},
    {"notify/sequence number last", sequence, 3, NULL, QUICK, 0, 0},
};
GROUP(notify_cases);
