/* case_internode_seeds.c - normal mode across nodes for many seeds: each draws the transport's character, queue pairs and their
 * depth, the size of regions, routing and shapes; dispatch and combine are checked bit by bit. */
#include "normal.h"

enum { LARGEST_ROW = 960 + 4 * 9 };

static struct team_spec draw_place(struct dice *d, int node, uint64_t seed) {
  static const int depths[] = {1, 2, 3, 8, 64};
  struct team_spec spec = {.node = node, .qps = (int)roll(d, 6) + 1, .qp_depth = depths[roll(d, COUNT(depths))], .seed = seed, .trace = 0};
  if (roll(d, 3)) spec.transport_flags = DK_TRANSPORT_LATE;
  if (roll(d, 2)) {
    spec.least_row = LARGEST_ROW;
    return spec;
  }
  spec.nvl_bytes = (uint64_t)1 << (14 + roll(d, 5));
  spec.rdma_bytes = (uint64_t)1 << (12 + roll(d, 7));
  return spec;
}

static void seeds(struct rank *me) {
  int node = *(const int *)me->test->arg, count = seeds_of(me->count > 4 ? 12 : 25);
  for (int i = 0; i < count; i++) {
    uint64_t seed = settings.seed + (uint64_t)i;
    struct dice dice = {hash(seed, (uint64_t)me->count, (uint64_t)node, 0)};
    struct mark mark = set_mark(me);
    me->seed = seed;
    struct team_spec spec = draw_place(&dice, node, seed);
    struct team *t = make_team(me, &spec);
    for (uint64_t rounds = 1 + roll(&dice, 2); rounds; rounds--) normal_round(t, &dice);
    run_barrier(t);
    finish(me);
    expect_healthy(t);
    back_to(me, mark);
  }
}

static const int one = 1, two = 2, four = 4;
static const struct test_case cases[] = {
    {"internode seeds/2 nodes of 2", seeds, 4, &two, USUAL, 0, 0},
    {"internode seeds/2 nodes of 4", seeds, 8, &four, HEAVY, 0, 0},
    {"internode seeds/4 nodes of 2", seeds, 8, &two, HEAVY, 0, 0},
    {"internode seeds/3 nodes of 2", seeds, 6, &two, USUAL, 0, 0},
    {"internode seeds/4 nodes of 1", seeds, 4, &one, USUAL, 0, 0},
};
GROUP(internode_seeds_cases);
