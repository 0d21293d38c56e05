/* case_random.c - rounds of random shapes with skewed routing, every row checked, and the same bits when repeated. */
#include <string.h>

#include "lowlat.h"
#include "normal.h"

static enum pattern any_pattern(struct dice *d) {
  static const enum pattern patterns[] = {UNIFORM, SKEWED, SKEWED, SKEWED, DUPLICATES, SILENT_RANK, ONE_HOT, NOBODY};
  return patterns[roll(d, COUNT(patterns))];
}

static int rounds(const struct rank *me) {
  int most = *(const int *)me->test->arg;
  if (settings.rounds) return settings.rounds < most ? settings.rounds : most;
  return settings.patience > 10  ? most / 20 + 1
         : settings.patience > 1 ? most / 8 + 1
         : settings.full         ? 8 * most
                                 : most;
}

void normal_round(struct team *t, struct dice *d) {
  struct rank *me = t->me;
  struct normal_spec spec = {.pattern = any_pattern(d),
                             .tokens = (int)roll(d, 60) + 1,
                             .experts = ((int)roll(d, 6) + 1) * me->count,
                             .topk = (int)roll(d, 8) + 1,
                             .index_bytes = (int)roll(d, 2) * 4 + 4,
                             .alignment = (int)roll(d, 3) * 8 + 1};
  spec.row_bytes = 16 * (roll(d, 60) + 1);
  spec.scales = roll(d, 2) ? (int)roll(d, 9) : 0;
  spec.columns = roll(d, 2);
  spec.spare = roll(d, 4) == 0 ? (int)roll(d, 5) + 1 : 0;
  spec.trust_matrix = roll(d, 8) == 0 && !spec.spare;
  struct combine_spec sums = {.hidden = 8 * ((int)roll(d, 40) + 1), .biases = (int)roll(d, 3), .weights = roll(d, 2)};
  uint64_t salt = roll(d, (uint64_t)1 << 40);
  struct normal *n = make_normal(t, &spec, salt);
  struct combine *c = make_combine(n, &sums, salt + 1);
  jitter(me);
  dispatch_and_check(n);
  run_combine(c);
  jitter(me);
  check_combine(c);
  void *first = scratch(me, c->out.bytes + 1);
  memcpy(first, c->out.host, c->out.bytes);
  poison(me, c->out);
  new_payload(n, salt + 2);
  run_dispatch(n, DK_DISPATCH_CACHED);
  run_combine(c);
  check_dispatch(n, DK_DISPATCH_CACHED);
  check_combine(c);
  expect(me, memcmp(first, c->out.host, c->out.bytes) == 0, "a repeated combine gave other bits");
}

static void normal_rounds(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 17, .trace = 0};
  struct team *t = make_team(me, &spec);
  struct dice dice = {settings.seed * 1000 + (uint64_t)me->count};
  for (int i = 0; i < rounds(me); i++) {
    struct mark mark = set_mark(me);
    normal_round(t, &dice);
    back_to(me, mark);
  }
}

static struct ll_spec largest_ll(const struct rank *me) {
  return (struct ll_spec){.max_tokens = 16, .hidden = 768, .experts = 4 * me->count};
}

static void ll_random_round(struct team *t, struct dice *d) {
  struct rank *me = t->me;
  struct ll_spec largest = largest_ll(me), spec = random_ll_spec(d, me->count, any_pattern(d), &largest);
  uint64_t salt = roll(d, (uint64_t)1 << 40), halves = roll(d, 2);
  struct ll *l = make_ll(t, &spec, salt);
  jitter(me);
  if (halves)
    ll_round_in_halves(l, salt + 1);
  else
    ll_round(l, salt + 1);
}

static struct team *roomy_team(struct rank *me) {
  struct ll_spec largest = largest_ll(me);
  return make_ll_team(me, &largest, 0);
}

static void ll_rounds(struct rank *me) {
  struct team *t = roomy_team(me);
  struct dice dice = {settings.seed * 1000 + 77 + (uint64_t)me->count};
  for (int i = 0; i < rounds(me); i++) {
    struct mark mark = set_mark(me);
    ll_random_round(t, &dice);
    back_to(me, mark);
  }
}

static void mixed_rounds(struct rank *me) {
  struct team *t = roomy_team(me);
  struct dice dice = {settings.seed * 1000 + 99 + (uint64_t)me->count};
  for (int i = 0; i < rounds(me); i++) {
    struct mark mark = set_mark(me);
    uint64_t which = roll(&dice, 5);
    if (which < 2)
      normal_round(t, &dice);
    else if (which < 4)
      ll_random_round(t, &dice);
    else
      run_barrier(t);
    back_to(me, mark);
  }
}

static const int some = 30, many = 150;
static const struct test_case cases[] = {
    {"random/normal mode, 1 rank", normal_rounds, 1, &some, USUAL, 0, 0},
    {"random/normal mode, 3 ranks", normal_rounds, 3, &some, USUAL, 0, 0},
    {"random/normal mode, 4 ranks", normal_rounds, 4, &many, USUAL, 0, 0},
    {"random/normal mode, 8 ranks", normal_rounds, 8, &some, HEAVY, 0, 0},
    {"random/low latency, 2 ranks", ll_rounds, 2, &some, USUAL, 0, 0},
    {"random/low latency, 4 ranks", ll_rounds, 4, &many, USUAL, 0, 0},
    {"random/low latency, 5 ranks", ll_rounds, 5, &some, USUAL, 0, 0},
    {"random/low latency, 8 ranks", ll_rounds, 8, &some, HEAVY, 0, 0},
    {"random/both modes, 4 ranks", mixed_rounds, 4, &many, QUICK, 0, 0},
    {"random/both modes, 7 ranks", mixed_rounds, 7, &some, HEAVY, 0, 0},
};
GROUP(random_cases);
