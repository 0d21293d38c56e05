/* case_ll_internode_random.c - low latency across nodes for many seeds, each with its shapes, queue pairs, delays,
 * orders of calls and masks; and the same bits as with loads and stores. */
#include <string.h>

#include "lowlat.h"

static struct ll_spec largest_for(const struct rank *me) {
  return (struct ll_spec){.max_tokens = 12, .hidden = 640, .experts = 4 * me->count};
}

static struct ll_spec any_spec(const struct rank *me, struct dice *d) {
  static const enum pattern patterns[] = {UNIFORM,     UNIFORM, SKEWED, SKEWED,   DUPLICATES,
                                          SILENT_RANK, ONE_HOT, NOBODY, NO_TOKENS};
  struct ll_spec largest = largest_for(me);
  struct ll_spec spec = random_ll_spec(d, me->count, patterns[roll(d, COUNT(patterns))], &largest);
  if (roll(d, 6) == 0 && !spec.combine_flags && spec.format == DK_FORMAT_BF16) spec.hidden = 8 * ((int)roll(d, 9) + 1);
  return spec;
}

/* ---- Rounds ------------------------------------------------------------------------------------------------------ */

static void both_halves(struct ll *l, uint64_t salt) {
  jitter(l->team->me);
  ll_round(l, salt);
}

/* Two sends in flight, received in either order, without waits in between, so that slots are used again as soon as
 * possible. */
static void two_at_once(struct ll *a, struct ll *b, bool swap, int times) {
  struct rank *me = a->team->me;
  struct ll *first = swap ? b : a, *second = swap ? a : b;
  for (int i = 0; i < times; i++) {
    run_ll_dispatch(a, DK_PHASE_SEND, 0);
    run_ll_dispatch(b, DK_PHASE_SEND, 1);
    jitter(me);
    run_ll_dispatch(first, DK_PHASE_RECV, swap);
    run_ll_dispatch(second, DK_PHASE_RECV, !swap);
  }
  check_ll_dispatch(a);
  check_ll_dispatch(b);
  make_expert_rows(a, a->salt + 1);
  make_expert_rows(b, b->salt + 1);
  for (int i = 0; i < times; i++) {
    run_ll_combine(a, DK_PHASE_SEND, 2);
    run_ll_combine(b, DK_PHASE_SEND, 3);
    jitter(me);
    run_ll_combine(first, DK_PHASE_RECV, 2 + (uint32_t)swap);
    run_ll_combine(second, DK_PHASE_RECV, 3 - (uint32_t)swap);
  }
  check_ll_combine(a);
  check_ll_combine(b);
}

/* One rank and all others mask each other for a round, then unmask. */
static void apart(struct ll *l, struct dice *d, uint64_t salt) {
  struct team *t = l->team;
  struct rank *me = t->me;
  int lone = (int)roll(d, (uint64_t)me->count);
  bool clean = roll(d, 2);
  finish(me);
  meet(me); /* a masked rank may lose rows that it has not received yet */
  for (int i = 0; i < me->count; i++)
    if (i != me->index && (i == lone || me->index == lone)) run_mask(t, DK_MASK_UPDATE, i, 1, 0);
  l->absent = me->index == lone ? ~(1u << lone) : 1u << lone;
  ll_round(l, salt);
  l->absent = 0;
  finish(me);
  meet(me);
  if (clean) run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  for (int i = 0; i < me->count && !clean; i++) run_mask(t, DK_MASK_UPDATE, i, 0, 0);
  finish(me);
  meet(me);
  new_ll_payload(l, salt + 2);
  ll_round(l, salt + 3);
}

static void any_round(struct team *t, struct dice *d) {
  struct rank *me = t->me;
  struct ll_spec spec = any_spec(me, d), other = any_spec(me, d);
  uint64_t salt = roll(d, (uint64_t)1 << 40), kind = roll(d, 8);
  other.combine_flags &= ~(uint32_t)DK_LL_ZERO_COPY; /* two shapes use the same bytes */
  struct ll *l = make_ll(t, &spec, salt);
  if (kind < 2)
    both_halves(l, salt + 1);
  else if (kind < 4)
    ll_round_in_halves(l, salt + 1);
  else if (kind == 4)
    apart(l, d, salt + 1);
  else
    two_at_once(l, make_ll(t, &other, salt + 10), roll(d, 2), 1 + (int)roll(d, 3));
  if (roll(d, 8) == 0) run_clean(t, spec.max_tokens, spec.hidden, spec.experts);
}

/* ---- Seeds ------------------------------------------------------------------------------------------------------- */

struct spread {
  int node, seeds, full;
};

/* All kinds of queue pairs and delays. A node of all ranks: its ranks may not use loads and stores. */
static struct team_spec any_place(const struct spread *spread, struct dice *d, uint64_t seed) {
  struct team_spec place = {.node = spread->node, .seed = seed};
  static const int depths[] = {1, 2, 3, 8, 64, 256};
  place.qps = 1 + (int)roll(d, 6);
  place.qp_depth = depths[roll(d, COUNT(depths))];
  if (roll(d, 4)) place.transport_flags = DK_TRANSPORT_LATE;
  if (!spread->node) place.flags = DK_TEAM_LL_TRANSPORT;
  return place;
}

static int number_of(const struct spread *spread) {
  if (settings.seeds) return settings.seeds;
  if (settings.heaviest != HEAVY) return spread->seeds / 6 + 1;
  return settings.full ? spread->full : spread->seeds;
}

static void seeds(struct rank *me) {
  const struct spread *spread = me->test->arg;
  struct ll_spec largest = largest_for(me);
  for (int seed = 0; seed < number_of(spread); seed++) {
    struct mark mark = set_mark(me);
    struct dice dice = {hash(settings.seed, (uint64_t)seed, (uint64_t)me->count, (uint64_t)spread->node)};
    struct team_spec place = any_place(spread, &dice, dice.state);
    me->split = &place;
    struct team *t = make_ll_team(me, &largest, DK_TEAM_SHRINK);
    for (int round = 0; round < 4; round++) {
      struct mark inner = set_mark(me);
      any_round(t, &dice);
      back_to(me, inner);
    }
    expect_masks(t, 0);
    back_to(me, mark);
  }
}

/* ---- The same bits ----------------------------------------------------------------------------------------------- */

static void expect_same(struct rank *me, const char *what, struct tensor a, struct tensor b) {
  expect(me, a.bytes == b.bytes && memcmp(a.host, b.host, a.bytes) == 0, "%s differs from what loads and stores bring",
         what);
}

/* All outputs of a call, compared with those of a team on one node. */
static void same_bits(struct rank *me) {
  struct ll_spec largest = largest_for(me);
  struct team *mapped = make_ll_team(me, &largest, 0);
  struct dice dice = {hash(settings.seed, 5, (uint64_t)me->count, 0)};
  struct team_spec place = any_place(me->test->arg, &dice, settings.seed);
  me->split = &place;
  struct team *t = make_ll_team(me, &largest, 0);
  for (int round = 0; round < 12; round++) {
    struct mark mark = set_mark(me);
    struct ll_spec spec = any_spec(me, &dice);
    uint64_t salt = roll(&dice, (uint64_t)1 << 40);
    struct ll *a = make_ll(mapped, &spec, salt), *b = make_ll(t, &spec, salt);
    ll_round(a, salt + 1);
    ll_round(b, salt + 1);
    expect_same(me, "recv_x", a->recv_x, b->recv_x);
    expect_same(me, "recv_scales", a->recv_scales, b->recv_scales);
    expect_same(me, "recv_count", a->recv_count, b->recv_count);
    expect_same(me, "src_info", a->src_info, b->src_info);
    expect_same(me, "layout_range", a->layout_range, b->layout_range);
    expect_same(me, "combined_x", a->out, b->out);
    back_to(me, mark);
  }
}

#define SPREAD(name, ...) static const struct spread name = {__VA_ARGS__}
SPREAD(fours, .node = 4, .seeds = 3, .full = 100);
SPREAD(pairs, .node = 2, .seeds = 10, .full = 300);
SPREAD(more_pairs, .node = 2, .seeds = 4, .full = 100);
SPREAD(singles, .node = 1, .seeds = 7, .full = 250);
SPREAD(unmapped, .seeds = 8, .full = 250);

static const struct test_case cases[] = {
    {"ll internode seeds/2 nodes of 2", seeds, 4, &pairs, QUICK, 0, 0},
    {"ll internode seeds/2 nodes of 4", seeds, 8, &fours, HEAVY, 0, 0},
    {"ll internode seeds/4 nodes of 2", seeds, 8, &more_pairs, HEAVY, 0, 0},
    {"ll internode seeds/3 nodes of 2", seeds, 6, &more_pairs, USUAL, 0, 0},
    {"ll internode seeds/4 nodes of 1", seeds, 4, &singles, USUAL, 0, 0},
    {"ll internode seeds/one node, unmapped", seeds, 3, &unmapped, QUICK, 0, 0},
    {"ll internode bits/2 nodes of 2", same_bits, 4, &pairs, QUICK, 0, 0},
    {"ll internode bits/2 nodes of 4", same_bits, 8, &fours, HEAVY, 0, 0},
    {"ll internode bits/3 nodes of 1", same_bits, 3, &singles, USUAL, 0, 0},
    {"ll internode bits/one node, unmapped", same_bits, 4, &unmapped, USUAL, 0, 0},
};
GROUP(ll_internode_random_cases);
