/* case_layout.c - counts of tokens by rank, node and expert, and indices out of range. */
#include <string.h>

#include "normal.h"

static const struct team_spec kSmall = {.nvl_bytes = 1 << 20, .trace = -1};

struct shape {
  enum pattern pattern;
  int tokens, local_experts, topk, index_bytes;
};
static const struct shape shapes[] = {
    {UNIFORM, 100, 4, 8, 8},  {UNIFORM, 100, 4, 8, 4},   {UNIFORM, 33, 1, 1, 8},     {NOBODY, 20, 2, 3, 8},
    {ONE_HOT, 50, 3, 2, 4},   {DUPLICATES, 64, 5, 6, 8}, {SILENT_RANK, 40, 2, 3, 4}, {SKEWED, 70, 8, 7, 8},
    {NO_TOKENS, 10, 2, 2, 8}, {UNIFORM, 700, 32, 9, 8},  {UNIFORM, 5, 64, 32, 4},
};

static void all_shapes(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  for (int i = 0; i < COUNT(shapes); i++) {
    const struct shape *s = &shapes[i];
    struct normal_spec spec = {.pattern = s->pattern,
                               .tokens = s->tokens,
                               .experts = s->local_experts * me->count,
                               .topk = s->topk,
                               .index_bytes = s->index_bytes,
                               .row_bytes = 16};
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &spec, settings.seed + (uint64_t)i);
    run_layout(n);
    check_layout(n);
    back_to(me, mark);
  }
}

/* Layout is local: no other rank takes part. */
static void alone(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {
      .pattern = UNIFORM, .tokens = 30, .experts = 9, .topk = 2, .index_bytes = 8, .row_bytes = 16};
  struct normal *n = make_normal(t, &spec, 5);
  if (me->index == 1) {
    run_layout(n);
    check_layout(n);
  }
}

/* tokens_per_node is optional. */
static void without_nodes(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {
      .pattern = UNIFORM, .tokens = 60, .experts = 16, .topk = 3, .index_bytes = 8, .row_bytes = 16};
  struct normal *n = make_normal(t, &spec, 6);
  run_layout(n);
  poison(me, n->per_rank);
  poison(me, n->in_rank);
  dk_layout_params p = PARAMS(layout, t, DK_OP_LAYOUT);
  p.topk_idx = n->idx.at;
  p.index_bytes = 8;
  p.num_tokens = n->tokens;
  p.num_topk = 3;
  p.num_experts = 16;
  p.tokens_per_rank = n->per_rank.at;
  p.tokens_per_expert = n->per_expert.at;
  p.token_in_rank = n->in_rank.at;
  CALL(me, layout, &p);
  check_layout(n);
}

/* An index outside [-1, E): the call is refused, the record holds the index, and the team goes on. */
struct bad_index {
  int64_t index;
  int bytes;
};
static const struct bad_index too_large = {12, 8}, below = {-2, 4}, remote = {(int64_t)1 << 40, 8};

static void bad_index(struct rank *me) {
  const struct bad_index *bad = me->test->arg;
  struct team *t = make_team(me, &kSmall);
  struct normal_spec spec = {
      .pattern = UNIFORM, .tokens = 30, .experts = 12, .topk = 2, .index_bytes = bad->bytes, .row_bytes = 16};
  struct normal *n = make_normal(t, &spec, 5);
  finish(me); /* the right indices are on their way */
  if (bad->bytes == 4)
    ((int32_t *)n->idx.host)[41] = (int32_t)bad->index;
  else
    ((int64_t *)n->idx.host)[41] = bad->index;
  send_tensor(me, n->idx);
  run_layout(n);
  finish(me);
  dk_failure f = expect_refusal(t, DK_EINVAL, DK_OP_LAYOUT, me->index, DK_FIELD_TOPK_IDX);
  expect(me, f.expected == 12 && f.seen == bad->index, "the record says E = %ld, index %ld", (long)f.expected,
         (long)f.seen);
  meet(me);
  dispatch_and_check(make_normal(t, &spec, 6));
}

static const struct test_case cases[] = {
    {"layout/shapes on 1 rank", all_shapes, 1, NULL, QUICK, 0, 0},
    {"layout/shapes on 3 ranks", all_shapes, 3, NULL, QUICK, 0, 0},
    {"layout/shapes on 8 ranks", all_shapes, 8, NULL, USUAL, 0, 0},
    {"layout/by one rank alone", alone, 3, NULL, QUICK, 0, 0},
    {"layout/without nodes", without_nodes, 4, NULL, QUICK, 0, 0},
    {"layout/index E", bad_index, 2, &too_large, QUICK, 0, 0},
    {"layout/index -2", bad_index, 2, &below, QUICK, 0, 0},
    {"layout/index 2^40", bad_index, 1, &remote, QUICK, 0, 0},
};
GROUP(layout_cases);
