/* case_process.c - ranks as processes: memory shared by descriptors, and ranks that are killed. */
#include <signal.h>
#include <unistd.h>

#include "lowlat.h"
#include "normal.h"
#include "process.h"

static const struct ll_spec kLowLatency = {
    .tokens = 10, .max_tokens = 16, .hidden = 256, .experts = 12, .topk = 3, .index_bytes = 8};
static const struct normal_spec kNormal = {.tokens = 60, .experts = 12, .topk = 3, .index_bytes = 8, .row_bytes = 1024};
static const struct combine_spec kCombine = {.hidden = 512, .weights = true, .biases = 1};

static void expect_filled(struct rank *me, uint64_t at, uint64_t bytes, int value) {
  struct tensor t = tensor(me, "copy", bytes);
  copy(me, t.at, at, bytes);
  fetch_tensor(me, t);
  finish(me);
  for (uint64_t i = 0; i < bytes; i++)
    expect(me, ((uint8_t *)t.host)[i] == value, "byte %lu is 0x%02x, wanted 0x%02x", (unsigned long)i,
           ((uint8_t *)t.host)[i], value);
}

/* Both read what the other wrote; the owner frees first, and the importer's mapping stays valid. */
static void shared_memory(struct rank *me) {
  struct share *s = share(me, 1 << 20);
  int other = 1 - me->index;
  fill(me, s->at[other], 1 << 20, 0x10 + (uint32_t)me->index);
  finish(me);
  meet(me);
  expect_filled(me, s->at[me->index], 1 << 20, 0x10 + other);
  meet(me);
  if (me->index == 0) {
    dk_mem_free_params p = {.size = sizeof p, .mem = s->mem};
    CALL(me, mem_free, &p);
    s->mem = 0;
  }
  meet(me);
  if (me->index == 1) {
    expect_filled(me, s->at[0], 1 << 20, 0x11);
    fill(me, s->at[0], 4096, 0x77);
    expect_filled(me, s->at[0], 4096, 0x77);
  }
}

static void owner_dies(struct rank *me) {
  struct share *s = share(me, 1 << 20);
  fill(me, s->at[me->index], 1 << 20, 0x20 + (uint32_t)me->index);
  finish(me);
  meet(me);
  if (me->index == 0) process_die(me);
  meet(me); /* with the survivors */
  expect_filled(me, s->at[0], 1 << 20, 0x20);
  meet(me);
  fill(me, s->at[0], 1 << 20, 0x2f);
  expect_filled(me, s->at[0] + (1 << 20) - 4096, 4096, 0x2f);
}

static void both_modes(struct rank *me) {
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  for (uint64_t round = 0; round < 5; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &kNormal, round);
    struct combine *c = make_combine(n, &kCombine, round);
    dispatch_and_check(n);
    run_combine(c);
    check_combine(c);
    ll_round(make_ll(t, &kLowLatency, round), round);
    run_barrier(t);
    back_to(me, mark);
  }
  expect_healthy(t);
}

/* Without shrink the survivors blame the victim: at the deadline, or at once if the engine marks it as dead. */
static void killed_before(struct rank *me) {
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  struct ll *l = make_ll(t, &kLowLatency, 1);
  int victim = me->count - 1;
  ll_round(l, 2);
  meet(me);
  if (me->index == victim) process_die(me);
  meet(me);
  t->timeout_ns = limit_ns(me->index == 0 ? 0.3 : 100);
  if (me->index != 0) set_abort(t, DK_EPEERDEAD, victim);
  run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  finish(me);
  bool late = me->index == 0 && t->status->sticky == DK_ETIMEOUT; /* unless it has read rank 1's failure record first */
  expect_failure(t, late ? DK_ETIMEOUT : DK_EPEERDEAD, DK_OP_LL_DISPATCH, victim);
  expect_no_rows(l);
}

/* With shrink the survivors go on, with memory whose owner is dead. */
static void killed_and_masked(struct rank *me) {
  struct team *t = make_ll_team(me, &kLowLatency, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &kLowLatency, 1);
  int victim = me->count - 1;
  ll_round(l, 2);
  meet(me);
  if (me->index == victim) process_die(me);
  meet(me);
  t->timeout_ns = limit_ns(
      me->index == 0 ? 10 : 0.5); /* the engine marks the death on rank 0 alone, which has to wait for the others */
  if (me->index == 0) __atomic_store_n(&t->status->dead[victim], 1, __ATOMIC_RELEASE);
  l->absent = 1u << victim;
  for (uint64_t round = 0; round < 4; round++) {
    new_ll_payload(l, round);
    ll_round(l, round);
  }
  expect_masks(t, 1u << victim);
}

/* The last rank is late by less than the deadline, and the others do not run in between: until they run again, and say
 * so, no one may be given up. */
static void all_stand_still(struct rank *me) {
  if (!(library.caps & DK_CAP_HOST_STREAM)) skip(me, "a device runs on when its process is stopped");
  struct team *t = make_ll_team(me, &kLowLatency, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &kLowLatency, 1);
  ll_round(l, 2);
  pid_t mine = getpid(), pids[MAX_SEATS];
  process_gather(me, &mine, sizeof mine, -1, pids, NULL);
  t->timeout_ns = limit_ns(1);
  if (me->index == me->count - 1) {
    pause_ms((int)(limit_ns(0.4) / 1000000));
    for (int i = 0; i < me->index; i++) kill(pids[i], SIGSTOP);
    pause_ms((int)(limit_ns(1) / 1000000));
    for (int i = 0; i < me->index; i++) kill(pids[i], SIGCONT);
    pause_ms((int)(limit_ns(0.1) / 1000000));
  }
  new_ll_payload(l, 3);
  ll_round(l, 3);
  expect_masks(t, 0);
}

static const struct test_case cases[] = {
    {"process/shared memory, owner lets go first", shared_memory, 2, NULL, USUAL, 0, 0},
    {"process/shared memory, owner dies", owner_dies, 3, NULL, USUAL, 0, 0},
    {"process/both modes, 2 ranks", both_modes, 2, NULL, USUAL, 0, 0},
    {"process/both modes, 4 ranks", both_modes, 4, NULL, USUAL, 0, 0},
    {"process/a rank dies before the call", killed_before, 3, NULL, USUAL, 0, 0},
    {"process/a rank dies, the others shrink", killed_and_masked, 3, NULL, USUAL, 0, 0},
    {"process/all ranks stand still", all_stand_still, 3, NULL, USUAL, 0, 0},
};
GROUP(process_cases);
