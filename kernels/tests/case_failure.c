/* case_failure.c - ranks that do not call, aborts, and what a team does after its first failure. */
#include <stdlib.h>

#include "lowlat.h"
#include "normal.h"

static const struct ll_spec kLowLatency = {
    .tokens = 8, .max_tokens = 8, .hidden = 256, .experts = 6, .topk = 2, .index_bytes = 8};
static const struct normal_spec kNormal = {.tokens = 20, .experts = 6, .topk = 2, .index_bytes = 8, .row_bytes = 512};
static const struct combine_spec kCombine = {.hidden = 256, .weights = true};

/* Inputs of every operation, prepared while all ranks take part. */
struct stage {
  struct team *team;
  struct normal *normal;
  struct combine *combine;
  struct ll *ll;
};

static struct stage set_stage(struct rank *me) {
  struct stage s = {0};
  s.team = make_ll_team(me, &kLowLatency, 0);
  s.normal = make_normal(s.team, &kNormal, 3);
  dispatch_and_check(s.normal);
  s.combine = make_combine(s.normal, &kCombine, 4);
  s.ll = make_ll(s.team, &kLowLatency, 5);
  ll_round(s.ll, 6);
  meet(me);
  return s;
}

static const uint32_t notify = DK_OP_NOTIFY, dispatch = DK_OP_DISPATCH, combine = DK_OP_COMBINE,
                      ll_dispatch = DK_OP_LL_DISPATCH, ll_combine = DK_OP_LL_COMBINE, clean = DK_OP_CLEAN,
                      barrier = DK_OP_BARRIER;

static void run_op(struct stage *s, uint32_t op) {
  if (op == DK_OP_NOTIFY) run_notify(s->normal);
  if (op == DK_OP_DISPATCH) run_dispatch(s->normal, DK_DISPATCH_CACHED);
  if (op == DK_OP_COMBINE) run_combine(s->combine);
  if (op == DK_OP_LL_DISPATCH) run_ll_dispatch(s->ll, DK_PHASE_BOTH, 0);
  if (op == DK_OP_LL_COMBINE) run_ll_combine(s->ll, DK_PHASE_BOTH, 2);
  if (op == DK_OP_CLEAN) run_clean(s->team, 0, 0, 0);
  if (op == DK_OP_BARRIER) run_barrier(s->team);
}

static void expect_all_nan(struct rank *me, struct tensor t) {
  fetch_tensor(me, t);
  finish(me);
  for (uint64_t i = 0; i < t.bytes / 2; i++)
    expect(me, bf16_is_nan(((uint16_t *)t.host)[i]), "channel %lu of a failed combine is %g", (unsigned long)i,
           from_bf16(((uint16_t *)t.host)[i]));
}

static void expect_void_outputs(struct stage *s, uint32_t op) {
  struct rank *me = s->team->me;
  if (op == DK_OP_NOTIFY)
    expect(me, s->normal->counts->num_recv_tokens == -1, "a failed notify left %d rows",
           s->normal->counts->num_recv_tokens);
  if (op == DK_OP_COMBINE) expect_all_nan(me, s->combine->out);
  if (op == DK_OP_LL_DISPATCH) expect_no_rows(s->ll);
  if (op == DK_OP_LL_COMBINE) expect_nan(s->ll);
}

/* The last rank does not call: all others blame it at the deadline. */
static void timeout(struct rank *me) {
  uint32_t op = *(const uint32_t *)me->test->arg;
  struct stage s = set_stage(me);
  if (me->index == me->count - 1) return;
  s.team->timeout_ns = soon_ns();
  uint64_t start = now_ns();
  run_op(&s, op);
  finish(me);
  uint64_t taken = now_ns() - start;
  const dk_failure *f = &s.team->status->failure;
  expect_failure(s.team, DK_ETIMEOUT, op, me->count - 1);
  expect(me, f->call == s.team->calls[op], "the record is of call %lu, wanted %lu", (unsigned long)f->call,
         (unsigned long)s.team->calls[op]);
  expect(me, f->waited_ns >= s.team->timeout_ns / 2 && f->waited_ns < limit_ns(5), "it says that it waited %lu ns",
         (unsigned long)f->waited_ns);
  expect(me, f->phase & DK_PHASE_BOTH, "phase %u", f->phase);
  expect(me, taken >= s.team->timeout_ns * 9 / 10 && taken < limit_ns(2), "it took %.3f s", (double)taken * 1e-9);
  expect_void_outputs(&s, op);
}

/* The engine sets abort_word: every rank returns and blames the culprit, the first within half a second, the others too
 * where each has a core. Emulated devices share the cores, lane by lane, and measure no speed. */
static void aborted(struct rank *me) {
  uint32_t op = *(const uint32_t *)me->test->arg;
  struct stage s = set_stage(me);
  struct team *all[MAX_SEATS];
  int culprit = me->count - 1;
  gather(me, &s.team, sizeof s.team, -1, all, NULL);
  if (me->index == culprit) {
    pause_ms(80);
    uint64_t when = now_ns();
    for (int i = 0; i < culprit; i++) set_abort(all[i], DK_EPEERDEAD, culprit);
    gather(me, &when, sizeof when, -1, scratch(me, sizeof when * MAX_SEATS), NULL);
    return;
  }
  s.team->timeout_ns = limit_ns(100);
  run_op(&s, op);
  finish(me);
  uint64_t end = now_ns(), times[MAX_SEATS], first = end, limit = limit_ns(getenv("DEEPEP_EMULATE") ? 5 : 0.5);
  gather(me, &end, sizeof end, -1, times, NULL);
  for (int i = 0; i < culprit; i++) first = times[i] < first ? times[i] : first;
  expect_failure(s.team, DK_EPEERDEAD, op, culprit);
  expect(me, end > times[culprit] && first - times[culprit] < limit && end - times[culprit] < limit_ns(5),
         "it left %.3f s after the abort, the first rank %.3f s", ((double)end - (double)times[culprit]) * 1e-9,
         ((double)first - (double)times[culprit]) * 1e-9);
  expect_void_outputs(&s, op);
}

/* After the first failure no operation waits, and the failure record does not change. */
static void sticky(struct rank *me) {
  struct stage s = set_stage(me);
  if (me->index == me->count - 1) return;
  s.team->timeout_ns = soon_ns();
  run_barrier(s.team);
  finish(me);
  expect_failure(s.team, DK_ETIMEOUT, DK_OP_BARRIER, me->count - 1);
  s.team->timeout_ns = limit_ns(100);
  poison(me, s.combine->out);
  poison(me, s.ll->out);
  poison(me, s.ll->recv_count);
  static const uint32_t ops[] = {DK_OP_NOTIFY,     DK_OP_DISPATCH, DK_OP_COMBINE, DK_OP_LL_DISPATCH,
                                 DK_OP_LL_COMBINE, DK_OP_CLEAN,    DK_OP_BARRIER};
  uint64_t start = now_ns();
  for (int round = 0; round < 5; round++) {
    for (int i = 0; i < COUNT(ops); i++) run_op(&s, ops[i]);
    run_ll_dispatch(s.ll, DK_PHASE_SEND, 0);
    run_ll_dispatch(s.ll, DK_PHASE_RECV, 0);
  }
  finish(me);
  expect(me, now_ns() - start < limit_ns(5), "operations of a failed team took %.3f s",
         (double)(now_ns() - start) * 1e-9);
  for (int i = 0; i < COUNT(ops); i++) expect_void_outputs(&s, ops[i]);
  expect_failure(s.team, DK_ETIMEOUT, DK_OP_BARRIER, me->count - 1);
  expect(me, s.team->status->failure.call == s.team->calls[DK_OP_BARRIER] - 5, "the record is of barrier %lu",
         (unsigned long)s.team->status->failure.call);
}

/* An abort before the call ends the call too. */
static void aborted_before(struct rank *me) {
  struct stage s = set_stage(me);
  s.team->timeout_ns = limit_ns(100);
  if (me->index == 0) {
    set_abort(s.team, DK_EABORTED, -1);
    run_op(&s, DK_OP_LL_DISPATCH);
    finish(me);
    expect_failure(s.team, DK_EABORTED, DK_OP_LL_DISPATCH, -1);
    expect_no_rows(s.ll);
  }
  meet(me);
  if (me->index != 0) { /* ranks that wait for a failed rank return once the engine sets abort_word */
    set_abort(s.team, DK_EPEERDEAD, 0);
    run_op(&s, DK_OP_LL_COMBINE);
    finish(me);
    expect(me, __atomic_load_n(&s.team->status->sticky, __ATOMIC_ACQUIRE) != 0, "the team is well");
    expect_nan(s.ll);
  }
}

/* After a failed team, a new one works on the same stream and device. */
static void new_team_after(struct rank *me) {
  struct stage s = set_stage(me);
  s.team->timeout_ns = soon_ns();
  if (me->index > 0) {
    run_barrier(s.team);
    finish(me);
    expect_failure(s.team, DK_ETIMEOUT, DK_OP_BARRIER, 0);
  }
  meet(me);
  struct stage next = set_stage(me); /* with all its checks */
  run_combine(next.combine);
  check_combine(next.combine);
  expect_healthy(next.team);
}

/* A rank that is late by less than the deadline causes no failure. */
static void late(struct rank *me) {
  struct stage s = set_stage(me);
  s.team->timeout_ns = limit_ns(2);
  static const uint32_t ops[] = {DK_OP_NOTIFY,      DK_OP_DISPATCH,   DK_OP_COMBINE,
                                 DK_OP_LL_DISPATCH, DK_OP_LL_COMBINE, DK_OP_CLEAN};
  for (int i = 0; i < COUNT(ops); i++) {
    if (me->index == i % me->count) pause_ms(60);
    run_op(&s, ops[i]);
    finish(me);
  }
  expect_healthy(s.team);
  check_combine(s.combine);
  check_dispatch(s.normal, DK_DISPATCH_CACHED);
  check_ll_dispatch(s.ll);
  check_ll_combine(s.ll);
}

/* A rank that has finished a call may leave: the others need nothing more of it and wait only for slower ranks. Rings
 * of a few slots make ranks wait often. */
static const struct normal_spec kManyRows = {
    .tokens = 120, .experts = 12, .topk = 3, .index_bytes = 8, .row_bytes = 8192, .recv_chunk = 2};
static const struct combine_spec kManySums = {.hidden = 4096, .weights = true};

static struct stage set_slow_stage(struct rank *me, uint64_t salt) {
  struct team_spec small = {.min_row = kManyRows.row_bytes + 4 * (uint64_t)kManyRows.topk, .trace = -1};
  struct stage s = {.team = make_team(me, &small)};
  s.normal = make_normal(s.team, &kManyRows, salt);
  dispatch_and_check(s.normal);
  s.combine = make_combine(s.normal, &kManySums, salt);
  meet(me);
  return s;
}

static void leaves_first(struct rank *me) {
  uint32_t op = *(const uint32_t *)me->test->arg;
  uint64_t rounds = me->split ? 4 : 16;
  for (uint64_t round = 0; round < rounds; round++) {
    struct mark mark = set_mark(me);
    struct stage s = op == DK_OP_DISPATCH || op == DK_OP_COMBINE ? set_slow_stage(me, round) : set_stage(me);
    struct team *all[MAX_SEATS];
    gather(me, &s.team, sizeof s.team, -1, all, NULL);
    run_op(&s, op);
    finish(me);
    deliver(s.team);
    for (int i = 0; i < me->count; i++)
      if (i != me->index) __atomic_store_n(&all[i]->status->dead[me->index], 1, __ATOMIC_RELEASE);
    expect_healthy(s.team);
    meet(me);
    back_to(me, mark);
  }
}

static const struct test_case cases[] = {
    {"leaving/notify", leaves_first, 3, &notify, QUICK, 0, 0},
    {"leaving/dispatch", leaves_first, 3, &dispatch, USUAL, 0, 0},
    {"leaving/combine", leaves_first, 3, &combine, USUAL, 0, 0},
    {"leaving/low-latency dispatch", leaves_first, 3, &ll_dispatch, QUICK, 0, 0},
    {"leaving/low-latency combine", leaves_first, 3, &ll_combine, QUICK, 0, 0},
    {"leaving/clean", leaves_first, 3, &clean, QUICK, 0, 0},
    {"leaving/barrier", leaves_first, 3, &barrier, QUICK, 0, 0},
    {"timeout/notify", timeout, 3, &notify, QUICK, 0, 0},
    {"timeout/dispatch", timeout, 3, &dispatch, QUICK, 0, 0},
    {"timeout/combine", timeout, 3, &combine, QUICK, 0, 0},
    {"timeout/low-latency dispatch", timeout, 3, &ll_dispatch, QUICK, 0, 0},
    {"timeout/low-latency combine", timeout, 3, &ll_combine, QUICK, 0, 0},
    {"timeout/clean", timeout, 3, &clean, QUICK, 0, 0},
    {"timeout/barrier", timeout, 3, &barrier, QUICK, 0, 0},
    {"timeout/barrier, 6 ranks", timeout, 6, &barrier, USUAL, 0, 0},
    {"timeout/dispatch, 6 ranks", timeout, 6, &dispatch, USUAL, 0, 0},
    {"abort/notify", aborted, 3, &notify, QUICK, 0, 0},
    {"abort/dispatch", aborted, 3, &dispatch, QUICK, 0, 0},
    {"abort/combine", aborted, 3, &combine, QUICK, 0, 0},
    {"abort/low-latency dispatch", aborted, 3, &ll_dispatch, QUICK, 0, 0},
    {"abort/low-latency combine", aborted, 3, &ll_combine, QUICK, 0, 0},
    {"abort/clean", aborted, 3, &clean, QUICK, 0, 0},
    {"abort/barrier", aborted, 3, &barrier, QUICK, 0, 0},
    {"abort/before the call", aborted_before, 3, NULL, QUICK, 0, 0},
    {"failure/later operations return at once", sticky, 3, NULL, QUICK, 0, 0},
    {"failure/a new team works afterwards", new_team_after, 3, NULL, QUICK, 0, 0},
    {"failure/a rank late by less than the deadline", late, 3, NULL, QUICK, 0, 0},
};
GROUP(failure_cases);
