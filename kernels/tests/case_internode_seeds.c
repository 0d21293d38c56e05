/* case_internode_seeds.c - normal mode across nodes for many seeds: each draws the transport's delays, queue pairs and
 * their depth, region sizes, routing and shapes; dispatch and combine are compared bit by bit. */
#include "normal.h"

enum { LARGEST_ROW = 960 + 4 * 9 };

/* The region of 64 KiB holds one to four long rows for each node. */
static struct team_spec draw_place(struct dice *d, int node, uint64_t seed) {
  static const int depths[] = {1, 2, 3, 8, 64};
  struct team_spec spec = {
      .node = node, .qps = (int)roll(d, 6) + 1, .qp_depth = depths[roll(d, COUNT(depths))], .seed = seed, .trace = 0};
  if (roll(d, 3)) spec.transport_flags = DK_TRANSPORT_LATE;
  if (!roll(d, 3)) spec.min_row = LARGEST_ROW;
  spec.nvl_bytes = (uint64_t)1 << (14 + roll(d, 5));
  spec.rdma_bytes = (uint64_t)1 << (roll(d, 2) ? 16 : 12 + roll(d, 7));
  return spec;
}

/* So many long rows that every ring wraps several times. */
static void long_rows(struct team *t, struct dice *d) {
  static const enum pattern patterns[] = {UNIFORM, SKEWED, ONE_HOT, SILENT_RANK};
  struct normal_spec spec = {
      .pattern = patterns[roll(d, COUNT(patterns))], .tokens = 100 + (int)roll(d, 100), .index_bytes = 8};
  spec.experts = t->me->count;
  spec.topk = 1 + (int)roll(d, 3);
  spec.row_bytes = 16 * (400 + roll(d, 600));
  struct combine_spec sums = {.hidden = 8 * (8 + (int)roll(d, 56)), .weights = roll(d, 2)};
  uint64_t salt = roll(d, (uint64_t)1 << 40);
  struct normal *n = make_normal(t, &spec, salt);
  struct combine *c = make_combine(n, &sums, salt + 1);
  dispatch_and_check(n);
  run_combine(c);
  check_combine(c);
}

static void seeds(struct rank *me) {
  int node = *(const int *)me->test->arg, count = seeds_of(me->count > 4 ? 8 : 15);
  for (int i = 0; i < count; i++) {
    uint64_t seed = settings.seed + (uint64_t)i;
    struct dice dice = {hash(seed, (uint64_t)me->count, (uint64_t)node, 0)};
    struct mark mark = set_mark(me);
    me->seed = seed;
    struct team_spec spec = draw_place(&dice, node, seed);
    struct team *t = make_team(me, &spec);
    if (spec.rdma_bytes >= 1 << 16 && roll(&dice, 2)) long_rows(t, &dice);
    for (uint64_t rounds = roll(&dice, 2) + 1; rounds; rounds--) normal_round(t, &dice);
    run_barrier(t);
    finish(me);
    expect_healthy(t);
    back_to(me, mark);
  }
}

static const int one = 1, two = 2, four = 4;
static const struct test_case cases[] = {
    {"normal internode seeds/2 nodes of 2", seeds, 4, &two, USUAL, 0, 0},
    {"normal internode seeds/2 nodes of 4", seeds, 8, &four, HEAVY, 0, 0},
    {"normal internode seeds/4 nodes of 2", seeds, 8, &two, HEAVY, 0, 0},
    {"normal internode seeds/3 nodes of 2", seeds, 6, &two, USUAL, 0, 0},
    {"normal internode seeds/4 nodes of 1", seeds, 4, &one, USUAL, 0, 0},
};
GROUP(internode_seeds_cases);
