/* case_mask_normal.c - normal mode with shrinking: ranks that are masked, dead or late are left out by all alike. */
#include <string.h>

#include "lowlat.h"
#include "normal.h"
#include "routed.h"

static const struct normal_spec kRows = {.tokens = 40, .experts = 3, .topk = 3, .index_bytes = 8, .row_bytes = 512};
static const struct combine_spec kSums = {.hidden = 256, .weights = true};

/* A rank that is left out uses `spec` after the function that made it has returned. */
static struct normal_spec *spec_for(struct rank *me) {
  struct normal_spec *spec = scratch(me, sizeof *spec);
  *spec = kRows;
  spec->experts *= me->count;
  return spec;
}
static struct team *shrinking_team(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 20, .flags = DK_TEAM_SHRINK};
  return make_team(me, &spec);
}
static uint32_t last(struct rank *me) { return 1u << (me->count - 1); }
static bool is_last(struct rank *me) { return me->index == me->count - 1; }

static struct combine *sums_of(struct normal *n, uint64_t salt) { return make_combine(n, &kSums, salt); }

/* Layout, notify, dispatch and combine of the ranks but `absent`, which the callers' layout may not know yet. */
static struct normal *round_without(struct team *t, uint64_t salt, uint32_t absent, bool layout_knows) {
  struct normal *n = make_normal(t, spec_for(t->me), salt);
  run_layout(n);
  if (!layout_knows) check_layout(n);
  leave_out(n, absent);
  if (layout_knows) check_layout(n);
  run_notify(n);
  await_counts(n);
  check_notify(n);
  run_dispatch(n, 0);
  check_dispatch(n, 0);
  struct combine *c = sums_of(n, salt + 1);
  run_combine(c);
  check_combine(c);
  expect_no_refusal(t);
  return n;
}

/* Every operation of a rank that others have masked says who, and leaves nothing in its outputs. */
static void expect_left_out(struct team *t, uint64_t salt, int by) {
  struct normal *n = make_normal(t, spec_for(t->me), salt);
  run_layout(n);
  run_notify(n);
  finish(t->me);
  expect_refusal(t, DK_ESTATE, DK_OP_NOTIFY, by, DK_FIELD_MASKED);
  expect(t->me, n->counts->num_recv_tokens == -1, "a notify that was left out counted %d rows",
         n->counts->num_recv_tokens);
  uint64_t usual = t->timeout_ns;
  t->timeout_ns = soon_ns(); /* a barrier waits for those who may lift their masks */
  run_barrier(t);
  finish(t->me);
  expect_refusal(t, DK_ESTATE, DK_OP_BARRIER, by, DK_FIELD_MASKED);
  t->timeout_ns = usual;
}

/* All ranks lift their masks, and the barrier is where they meet. */
static void take_back(struct team *t, uint64_t salt) {
  t->timeout_ns = limit_ns(20);
  pause_ms(t->me->index * 5); /* some are at the barrier while others have not lifted their masks */
  run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  run_barrier(t);
  finish(t->me);
  expect_masks(t, 0);
  for (uint64_t round = 0; round < 3; round++) round_without(t, salt + 10 * round, 0, false);
}

/* The last rank masks the others when they have lifted their masks and are at the barrier. */
static void masked_at_the_barrier(struct rank *me) {
  struct team *t = shrinking_team(me);
  round_without(t, 1, 0, false);
  meet(me);
  if (is_last(me)) pause_ms(100);
  for (int i = 0; i < me->count; i++)
    if ((i == me->count - 1) != is_last(me)) run_mask(t, DK_MASK_UPDATE, i, 1, 0);
  finish(me);
  if (is_last(me)) pause_ms(50);
  take_back(t, 40);
}

static uint64_t bytes_to(struct team *t, int peer) {
  return peer_bytes(t, DK_OP_DISPATCH, peer) + peer_bytes(t, DK_OP_COMBINE, peer);
}

/* Rank 0 alone has masked the last rank, which calls like the others: all leave it out, and it is told by whom. */
static void masked_by_one(struct rank *me) {
  struct team *t = shrinking_team(me);
  uint64_t start = now_ns();
  t->timeout_ns = limit_ns(20);
  if (me->index == 0) run_mask(t, DK_MASK_UPDATE, me->count - 1, 1, 0);
  finish(me);
  meet(me);
  if (is_last(me)) {
    expect_left_out(t, 3, -2);
  } else {
    round_without(t, 3, last(me), me->index == 0);
    expect_masks(t, last(me));
    run_barrier(t);
    finish(me);
    round_without(t, 4, last(me), true);
    expect(me, bytes_to(t, me->count - 1) == 0, "%lu bytes went to a masked rank",
           (unsigned long)bytes_to(t, me->count - 1));
  }
  expect(me, now_ns() - start < t->timeout_ns, "a masked rank was waited for");
  meet(me);
  take_back(t, 50);
}

/* The last rank comes when the others have gone on: it is told so at once. Then it takes part again. */
static void late_rank(struct rank *me) {
  struct team *t = shrinking_team(me);
  round_without(t, 1, 0, false);
  meet(me);
  if (!is_last(me)) {
    t->timeout_ns = soon_ns();
    round_without(t, 3, last(me), false);
    expect_masks(t, last(me));
    uint64_t start = now_ns();
    t->timeout_ns = limit_ns(20);
    for (uint64_t round = 0; round < 3; round++) round_without(t, 4 + round, last(me), true);
    expect(me, now_ns() - start < t->timeout_ns, "a masked rank was waited for");
  }
  meet(me);
  if (is_last(me)) expect_left_out(t, 3, -2);
  meet(me);
  take_back(t, 60);
}

/* The engine says that the last ranks are dead, before the call or during its wait. */
static const struct death {
  bool later;
  int ranks;
} known_before = {false, 1}, while_waiting = {true, 1}, two_at_once = {true, 2};
static void dead_ranks(struct rank *me) {
  const struct death *death = me->test->arg;
  struct team *t = shrinking_team(me);
  round_without(t, 1, 0, false);
  t->timeout_ns = limit_ns(60);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  int left = me->count - death->ranks;
  uint32_t gone = 0;
  for (int i = left; i < me->count; i++) gone |= 1u << i;
  if (me->index >= left) {
    if (death->later) pause_ms(100);
    for (int i = 0; i < left; i++) __atomic_store_n(&all[i]->dead[me->index], 1, __ATOMIC_RELEASE);
    if (!death->later) meet(me);
    return;
  }
  if (!death->later) meet(me);
  uint64_t start = now_ns();
  round_without(t, 2, gone, false);
  round_without(t, 3, gone, true);
  expect(me, now_ns() - start < limit_ns(10), "a rank known to be dead was waited for");
  expect_masks(t, gone);
}

/* Lost after the exchange of counts: its rows are zeros that name no expert, and the handle goes on without it. */
static const struct loss {
  bool late;     /* not dead, but late */
  bool combines; /* it still takes part in the dispatch */
} dies_before_dispatch = {false, false}, late_for_dispatch = {true, false}, dies_before_combine = {false, true};
static void lost_after_notify(struct rank *me) {
  const struct loss *loss = me->test->arg;
  struct team *t = shrinking_team(me);
  struct normal *n = make_normal(t, spec_for(me), 5);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  run_layout(n);
  run_notify(n);
  await_counts(n);
  if (loss->combines) run_dispatch(n, 0);
  if (loss->combines) check_dispatch(n, 0);
  meet(me);
  t->timeout_ns = loss->late ? soon_ns() : limit_ns(60);
  if (is_last(me)) {
    for (int i = 0; !loss->late && i + 1 < me->count; i++)
      __atomic_store_n(&all[i]->dead[me->index], 1, __ATOMIC_RELEASE);
    if (!loss->late) return;
    meet(me);
    run_dispatch(n, 0);
    finish(me);
    expect_refusal(t, DK_ESTATE, DK_OP_DISPATCH, -2, DK_FIELD_MASKED);
    return;
  }
  n->absent = last(me);
  if (!loss->combines) run_dispatch(n, 0);
  if (!loss->combines) check_dispatch(n, 0);
  struct combine *c = sums_of(n, 6);
  run_combine(c);
  check_combine(c);
  expect_masks(t, last(me));
  new_payload(n, 7);
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
  round_without(t, 8, last(me), true);
  if (loss->late) meet(me);
}

/* The last rank does not come to the dispatch, and the rings are so small that the others wait for readers. */
static void lost_among_rows(struct rank *me) {
  struct team_spec small = {.min_row = kRows.row_bytes, .flags = DK_TEAM_SHRINK, .trace = -1};
  struct team *t = make_team(me, &small);
  struct normal *n = make_normal(t, spec_for(me), 5);
  run_layout(n);
  run_notify(n);
  await_counts(n);
  if (is_last(me)) return;
  t->timeout_ns = soon_ns();
  n->absent = last(me);
  run_dispatch(n, 0);
  check_dispatch(n, 0);
  struct combine *c = sums_of(n, 6);
  run_combine(c);
  check_combine(c);
  expect_masks(t, last(me));
}

/* Two ranks that have masked each other: every rank that counts one of them out leaves out the same ones. */
static void halves(struct rank *me) {
  struct team *t = shrinking_team(me);
  uint32_t mine = me->index % 2 ? 0xaaaaaaaau : 0x55555555u, others = ~mine & ((1u << me->count) - 1);
  for (int i = 0; i < me->count; i++)
    if (others >> i & 1) run_mask(t, DK_MASK_UPDATE, i, 1, 0);
  for (uint64_t round = 0; round < 3; round++) round_without(t, 7 + round, others, true);
  expect_masks(t, others);
  meet(me);
  take_back(t, 70);
}

/* In each round rank 1, which makes no sums, leaves as soon as its rows are out: behind its combine a copy marks it
 * dead, as the engine does. Others find that out while they still wait for those rows; every row is in its sum. To TSan
 * that copy is a race with the others' looks. */
static void leaves_after_its_rows(struct rank *me) {
  enum { ROUNDS = 50, LEAVING = 1 };
  static const struct combine_spec few = {.hidden = 256, .weights = true, .num_sms = 1}; /* its rows come late */
  struct team *t = shrinking_team(me);
  struct normal_spec *spec = spec_for(me);
  spec->pattern = SILENT_RANK;
  struct normal *n = make_normal(t, spec, 5);
  dispatch_and_check(n);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  struct tensor dead = tensor(me, "dead", 1);
  memset(dead.host, 1, 1);
  send_tensor(me, dead);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    struct mark mark = set_mark(me);
    struct combine *c = make_combine(n, me->index == LEAVING ? &few : &kSums, 6 + round);
    run_combine(c);
    for (int i = 0; me->index == LEAVING && i < me->count; i++)
      if (i != LEAVING) copy(me, (uintptr_t)&all[i]->dead[LEAVING], dead.at, 1);
    check_combine(c);
    expect_no_refusal(t);
    expect_masks(t, 0);
    meet(me);
    __atomic_store_n(&t->status->dead[LEAVING], 0, __ATOMIC_RELEASE);
    back_to(me, mark);
    meet(me);
  }
}

/* ---- With a routing ---------------------------------------------------------------------------------------------- */

#define ROUTED(name, ...)                  \
  static const struct routed_spec name = { \
      .tokens = 30, .experts = 3, .topk = 4, .hidden = 64, .row_bytes = 128, .weights = true, __VA_ARGS__}
ROUTED(kPlain, .plain = true, .scales = 3, .columns = true, .alignment = 4, .biases = 1);
ROUTED(kExpanded, .scales = 3, .columns = true, .alignment = 4, .padding = true);
ROUTED(kApart, .alignment = 1, .unreduced = true);
ROUTED(kPlainHalf, .plain = true, .alignment = 1, .sent = 13);
ROUTED(kExpandedHalf, .scales = 2, .alignment = 4, .sent = 13);

static void routed_without(struct team *t, const struct routed_spec *spec, uint64_t salt, uint32_t absent) {
  struct routed *n = make_routed(t, spec, salt);
  leave_out_routed(n, absent);
  run_routed(n);
}

/* Rank 0 alone has masked the last rank: no choice is at its experts, none of its tokens comes, and it is told. */
static void routed_masked(struct rank *me) {
  const struct routed_spec *spec = me->test->arg;
  struct team *t = shrinking_team(me);
  t->timeout_ns = limit_ns(20);
  routed_without(t, spec, 1, 0);
  meet(me);
  if (me->index == 0) run_mask(t, DK_MASK_UPDATE, me->count - 1, 1, 0);
  finish(me);
  meet(me);
  if (is_last(me)) {
    struct routed *n = make_routed(t, spec, 2);
    dk_notify_params p = routed_notify(n);
    CALL(me, notify, &p);
    finish(me);
    expect_refusal(t, DK_ESTATE, DK_OP_NOTIFY, -2, DK_FIELD_MASKED);
    return;
  }
  for (uint64_t round = 0; round < 3; round++) routed_without(t, spec, 2 + round, last(me));
  expect_masks(t, last(me));
}

static void be_dead(struct rank *me, dk_status **all) {
  for (int i = 0; i + 1 < me->count; i++) __atomic_store_n(&all[i]->dead[me->index], 1, __ATOMIC_RELEASE);
}

/* The last rank dies after the exchange of counts, or after the dispatch; then also with the handle of before. */
static const struct routed_loss {
  const struct routed_spec *spec;
  bool combines;
} plain_dispatch = {&kPlain, false}, expanded_dispatch = {&kExpanded, false}, apart_combine = {&kApart, true},
  plain_combine = {&kPlain, true};
static void routed_loss(struct rank *me) {
  const struct routed_loss *loss = me->test->arg;
  struct team *t = shrinking_team(me);
  struct routed *n = make_routed(t, loss->spec, 5);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  dk_notify_params notify = routed_notify(n);
  CALL(me, notify, &notify);
  await_routed_counts(n);
  dk_dispatch_params dispatch = routed_dispatch(n, 0);
  if (loss->combines) {
    CALL(me, dispatch, &dispatch);
    check_routed_dispatch(n, 0);
  }
  finish(me);
  meet(me);
  t->timeout_ns = limit_ns(60);
  if (is_last(me)) {
    be_dead(me, all);
    return;
  }
  n->missing = last(me);
  if (!loss->combines) {
    CALL(me, dispatch, &dispatch);
    check_routed_dispatch(n, 0);
  }
  dk_combine_params combine = routed_combine(n);
  CALL(me, combine, &combine);
  check_routed_combine(n);
  expect_masks(t, last(me));
  new_routed_payload(n, 7);
  dispatch = routed_dispatch(n, DK_DISPATCH_CACHED);
  CALL(me, dispatch, &dispatch);
  check_routed_dispatch(n, DK_DISPATCH_CACHED);
  finish(me);
  expect_healthy(t);
  routed_without(t, loss->spec, 8, last(me));
}

/* The last rank dies within the dispatch, some of its rows not sent: those are zeros, the others are right. It does so
 * by fewer tokens than it has counted, which the CPU engine refuses. */
static void routed_break(struct rank *me) {
  const struct routed_spec *spec = me->test->arg;
  struct team_spec small = {.min_row = spec->row_bytes, .flags = DK_TEAM_SHRINK, .trace = -1};
  struct team *t = make_team(me, &small);
  struct routed *n = make_routed(t, spec, 9);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  t->timeout_ns = limit_ns(60);
  dk_notify_params notify = routed_notify(n);
  CALL(me, notify, &notify);
  await_routed_counts(n);
  dk_dispatch_params dispatch = routed_dispatch(n, 0);
  CALL(me, dispatch, &dispatch);
  if (is_last(me)) {
    finish(me);
    be_dead(me, all);
    return;
  }
  n->missing = last(me);
  check_routed_dispatch(n, 0);
  dk_combine_params combine = routed_combine(n);
  CALL(me, combine, &combine);
  check_routed_combine(n);
  expect_masks(t, last(me));
  routed_without(t, spec, 10, last(me));
}

static const struct test_case cases[] = {
    {"normal mask/masked by one, left out by all", masked_by_one, 4, NULL, QUICK, 0, 0},
    {"normal mask/masked at the barrier", masked_at_the_barrier, 4, NULL, QUICK, 0, 0},
    {"normal mask/a late rank, and back", late_rank, 3, NULL, QUICK, 0, 0},
    {"normal mask/a rank known to be dead", dead_ranks, 3, &known_before, QUICK, 0, 0},
    {"normal mask/a death during the wait", dead_ranks, 3, &while_waiting, QUICK, 0, 0},
    {"normal mask/two deaths at once", dead_ranks, 4, &two_at_once, QUICK, 0, 0},
    {"normal mask/a death between notify and dispatch", lost_after_notify, 3, &dies_before_dispatch, QUICK, 0, 0},
    {"normal mask/late for the dispatch", lost_after_notify, 3, &late_for_dispatch, QUICK, 0, 0},
    {"normal mask/a death before combine", lost_after_notify, 3, &dies_before_combine, QUICK, 0, 0},
    {"normal mask/small region", lost_among_rows, 3, NULL, QUICK, 0, 0},
    {"normal mask/a rank that leaves after its rows", leaves_after_its_rows, 4, NULL, HEAVY, 0, 0},
    {"normal mask/two halves", halves, 4, NULL, QUICK, 0, 0},
    {"normal mask/plain, masked by one", routed_masked, 4, &kPlain, QUICK, DK_CAP_ROUTED_SHRINK, 0},
    {"normal mask/expanded, masked by one", routed_masked, 3, &kExpanded, QUICK, DK_CAP_ROUTED_SHRINK, 0},
    {"normal mask/plain, a death before dispatch", routed_loss, 3, &plain_dispatch, QUICK, DK_CAP_ROUTED_SHRINK, 0},
    {"normal mask/expanded, a death before dispatch", routed_loss, 4, &expanded_dispatch, QUICK, DK_CAP_ROUTED_SHRINK,
     0},
    {"normal mask/plain, a death within dispatch", routed_break, 3, &kPlainHalf, QUICK,
     DK_CAP_ROUTED_SHRINK | DK_CAP_GRAPH, 0},
    {"normal mask/expanded, a death within dispatch", routed_break, 3, &kExpandedHalf, QUICK,
     DK_CAP_ROUTED_SHRINK | DK_CAP_GRAPH, 0},
    {"normal mask/plain, a death before combine", routed_loss, 3, &plain_combine, QUICK, DK_CAP_ROUTED_SHRINK, 0},
    {"normal mask/unreduced, a death before combine", routed_loss, 3, &apart_combine, QUICK, DK_CAP_ROUTED_SHRINK, 0},
};
GROUP(mask_normal_cases);
