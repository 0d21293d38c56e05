/* case_mask.c - masks and shrinking: ranks that are masked, late, or unmasked again. */
#include "lowlat.h"

static const struct ll_spec kSpec = {
    .tokens = 12, .max_tokens = 16, .hidden = 256, .experts = 3, .topk = 4, .index_bytes = 8};
static const struct team_spec kPlain = {
    .nvl_bytes = 1 << 16, .rdma_bytes = 1 << 16, .flags = DK_TEAM_LOW_LATENCY, .trace = -1};

static struct ll_spec spec_for(struct rank *me) {
  struct ll_spec spec = kSpec;
  spec.experts *= me->count;
  spec.weights = me->split && me->split->weights;
  return spec;
}

static uint32_t last(struct rank *me) { return 1u << (me->count - 1); }
static bool is_last(struct rank *me) { return me->index == me->count - 1; }

static void update_and_query(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  expect_masks(t, 0);
  run_mask(t, DK_MASK_UPDATE, 1, 1, 0);
  expect_masks(t, 1u << 1);
  run_mask(t, DK_MASK_UPDATE, 2, 1, 0);
  run_mask(t, DK_MASK_UPDATE, 1, 1, 0);
  expect_masks(t, 1u << 1 | 1u << 2);
  run_mask(t, DK_MASK_UPDATE, 1, 0, 0);
  expect_masks(t, 1u << 2);
  run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  expect_masks(t, 0);
  expect_healthy(t);
}

static void refused(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK), *plain = make_team(me, &kPlain);
  const int bad[][3] = {{DK_MASK_UPDATE, -1, 1}, {DK_MASK_UPDATE, me->count, 1}, {7, 0, 0}, {DK_MASK_QUERY, 0, 0}};
  for (int i = 0; i < COUNT(bad); i++) {
    dk_mask_params p = PARAMS(mask, t, DK_OP_MASK);
    p.what = bad[i][0];
    p.rank = bad[i][1];
    p.value = bad[i][2];
    expect(me, dk.mask(&p) != DK_OK, "mask operation %d of rank %d was accepted", bad[i][0], bad[i][1]);
  }
  dk_mask_params p = PARAMS(mask, plain, DK_OP_MASK);
  p.what = DK_MASK_UPDATE;
  p.value = 1;
  expect(me, dk.mask(&p) != DK_OK, "a team that does not shrink was given a mask");
  expect_healthy(t);
}

/* Two rounds without the last rank, fast; it receives nothing. */
static void without_last(struct ll *l) {
  struct rank *me = l->team->me;
  uint64_t start = now_ns();
  l->team->timeout_ns = limit_ns(10);
  l->absent = last(me);
  for (uint64_t round = 0; round < 3; round++) {
    new_ll_payload(l, round);
    ll_round(l, round);
  }
  expect(me, now_ns() - start < l->team->timeout_ns, "a masked rank was waited for");
}

static void masked_by_hand(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  if (!is_last(me)) {
    run_mask(t, DK_MASK_UPDATE, me->count - 1, 1, 0);
    without_last(l);
    expect_masks(t, last(me));
    uint64_t bytes = peer_bytes(t, DK_OP_LL_DISPATCH, me->count - 1) + peer_bytes(t, DK_OP_LL_COMBINE, me->count - 1);
    expect(me, bytes == 0, "%lu bytes went to a masked rank", (unsigned long)bytes);
  }
  meet(me);
  l->absent = 0;
  run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  finish(me);
  meet(me);
  new_ll_payload(l, 50);
  ll_round(l, 51); /* no rank calls clean; only the masks are lifted */
  expect_masks(t, 0);
}

/* Rank 0 masks rank 1 and signals that to no rank: rank 1 detects it, rank 2 receives from both. */
static void one_sided(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  if (me->index == 1) t->timeout_ns = soon_ns(); /* the others wait for it */
  if (me->index == 0) run_mask(t, DK_MASK_UPDATE, 1, 1, 0);
  l->absent = me->index == 0 ? 1u << 1 : me->index == 1 ? 1u << 0 : 0;
  ll_round(l, 4);
  expect_masks(t, l->absent);
}

/* ---- Shrinking --------------------------------------------------------------------------------------------------- */

enum absence { NEVER_THERE, LEFT_BEFORE_COMBINE, LEFT_BETWEEN_HALVES };
static const enum absence never_there = NEVER_THERE, before_combine = LEFT_BEFORE_COMBINE,
                          between_halves = LEFT_BETWEEN_HALVES;

/* The last rank does not call: each survivor masks it at the deadline, and the call completes without it. */
static void absent_rank(struct rank *me) {
  enum absence absence = *(const enum absence *)me->test->arg;
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 1);
  meet(me);
  t->timeout_ns = soon_ns();
  bool gone = is_last(me) && absence == NEVER_THERE;
  l->absent = absence == NEVER_THERE ? last(me) : 0;
  uint64_t start = now_ns();
  if (!gone) {
    new_ll_payload(l, 7);
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    finish(me);
  }
  gone = gone || (is_last(me) && absence == LEFT_BETWEEN_HALVES); /* its rows arrive all the same */
  if (!gone) {
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
    check_ll_dispatch(l);
    make_expert_rows(l, 8);
  }
  if (is_last(me)) return;
  l->absent = last(me);
  run_ll_combine(l, DK_PHASE_BOTH, 2);
  check_ll_combine(l);
  expect(me, now_ns() - start >= t->timeout_ns * 9 / 10, "the last rank was given up before its time was over");
  expect_masks(t, last(me));
  without_last(l);
}

/* The engine marks a rank as dead, before the call or during its wait: no rank waits until the deadline. */
static const int known_before = 0, while_waiting = 1;
static void known_dead(struct rank *me) {
  int later = *(const int *)me->test->arg;
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 1);
  t->timeout_ns = limit_ns(60);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  if (is_last(me)) {
    if (later) pause_ms(100);
    for (int i = 0; i + 1 < me->count; i++) __atomic_store_n(&all[i]->dead[me->index], 1, __ATOMIC_RELEASE);
    if (!later) meet(me);
    return;
  }
  if (!later) meet(me);
  uint64_t start = now_ns();
  l->absent = last(me);
  new_ll_payload(l, 2);
  ll_round(l, 3);
  expect(me, now_ns() - start < limit_ns(5), "a rank known to be dead was waited for");
  expect_masks(t, last(me));
}

/* A clean completes without a rank that does not call; so does a barrier. */
static void absent_from_clean(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 1);
  meet(me);
  if (is_last(me)) return;
  t->timeout_ns = soon_ns();
  run_clean(t, spec.max_tokens, spec.hidden, spec.experts);
  finish(me);
  expect_healthy(t);
  expect_masks(t, last(me));
  without_last(l);
}

/* ---- Unmasking ------------------------------------------------------------------------------------------------- */

/* A late send of the last rank never matches a later call. Lifting the masks lets it take part again: with only the
 * region zeroed (vLLM), or with a clean. */
static const struct lateness {
  bool clean, silent;
} masks_alone = {0, 0}, with_clean = {1, 0}, silent = {0, 1}, silent_with_clean = {1, 1};
static void late_rank(struct rank *me) {
  struct lateness how = *(const struct lateness *)me->test->arg;
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  t->timeout_ns = soon_ns();
  struct ll *l = make_ll(t, &spec, 3);
  if (is_last(me)) {
    meet(me);
    if (!how.silent) run_ll_dispatch(l, DK_PHASE_BOTH, 0); /* of the first round, which the others have finished */
    finish(me);
    expect_healthy(t);
  } else {
    l->absent = last(me);
    ll_round(l, 1);
    meet(me);
    without_last(l);
    pause_ms(20);
    without_last(l);
  }
  meet(me);
  fill(me, t->block->at[me->index] + t->rdma_offset, t->rdma_bytes, 0);
  run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  finish(me);
  meet(me);
  t->timeout_ns = limit_ns(10);
  if (how.clean) run_clean(t, 0, 0, 0);
  l->absent = 0;
  for (uint64_t round = 0; round < 4; round++) {
    new_ll_payload(l, 70 + round);
    ll_round(l, 80 + round);
  }
  expect_masks(t, 0);
}

/* One mask is lifted by update while the others keep using the region. */
static void lifted_by_update(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 3; round++) {
    if (!is_last(me)) run_mask(t, DK_MASK_UPDATE, me->count - 1, 1, 0);
    for (int i = 0; is_last(me) && i + 1 < me->count; i++) run_mask(t, DK_MASK_UPDATE, i, 1, 0);
    l->absent = is_last(me) ? last(me) - 1 : last(me); /* two halves of the group, each on its own */
    new_ll_payload(l, 10 * round);
    ll_round(l, 10 * round);
    for (int i = 0; i < me->count; i++) run_mask(t, DK_MASK_UPDATE, i, 0, 0);
    finish(me);
    meet(me);
    l->absent = 0;
    new_ll_payload(l, 10 * round + 1);
    ll_round(l, 10 * round + 1);
    meet(me);
  }
}

static const struct test_case cases[] = {
    {"mask/update, query, clean", update_and_query, 3, NULL, QUICK, 0, 0},
    {"mask/refused", refused, 2, NULL, QUICK, 0, 0},
    {"mask/a masked rank gets nothing", masked_by_hand, 3, NULL, QUICK, 0, 0},
    {"mask/masks are per rank", one_sided, 3, NULL, QUICK, 0, 0},
    {"mask/lifted by update", lifted_by_update, 3, NULL, QUICK, 0, 0},
    {"shrink/a rank never calls", absent_rank, 3, &never_there, QUICK, 0, 0},
    {"shrink/a rank never calls, 8 ranks", absent_rank, 8, &never_there, HEAVY, 0, 0},
    {"shrink/a rank leaves before combine", absent_rank, 3, &before_combine, QUICK, 0, 0},
    {"shrink/a rank leaves between the halves", absent_rank, 3, &between_halves, QUICK, 0, 0},
    {"shrink/a rank known to be dead", known_dead, 3, &known_before, QUICK, 0, 0},
    {"shrink/a death during the wait", known_dead, 3, &while_waiting, QUICK, 0, 0},
    {"shrink/a rank misses a clean", absent_from_clean, 3, NULL, QUICK, 0, 0},
    {"shrink/a late rank, masks lifted", late_rank, 3, &masks_alone, QUICK, 0, 0},
    {"shrink/a late rank, cleaned", late_rank, 3, &with_clean, QUICK, 0, 0},
    {"shrink/a rank that missed calls, masks lifted", late_rank, 3, &silent, QUICK, 0, 0},
    {"shrink/a rank that missed calls, cleaned", late_rank, 3, &silent_with_clean, QUICK, 0, 0},
};
GROUP(mask_cases);
