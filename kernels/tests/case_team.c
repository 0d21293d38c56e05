/* case_team.c - barriers, several teams, both modes on one team, teams created and destroyed. */
#include "lowlat.h"
#include "normal.h"

static const struct ll_spec kLowLatency = {
    .tokens = 10, .max_tokens = 16, .hidden = 256, .experts = 8, .topk = 3, .index_bytes = 8};
static const struct normal_spec kNormal = {.tokens = 40, .experts = 8, .topk = 3, .index_bytes = 8, .row_bytes = 512};
static const struct combine_spec kCombine = {.hidden = 256, .weights = true};

/* No rank leaves a barrier before all have called it; each time another rank is the last. */
static void barrier(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 16, .trace = -1};
  struct team *t = make_team(me, &spec);
  for (int round = 0; round < 2 * me->count; round++) {
    uint64_t arrived, left[MAX_SEATS], times[MAX_SEATS], now;
    if (me->index == round % me->count) pause_ms(5);
    arrived = now_ns();
    run_barrier(t);
    finish(me);
    now = now_ns();
    gather(me, &arrived, sizeof arrived, -1, times, NULL);
    gather(me, &now, sizeof now, -1, left, NULL);
    for (int i = 0; i < me->count; i++)
      expect(me, times[i] <= now, "round %d: left a barrier %lu ns before rank %d came", round,
             (unsigned long)(times[i] - now), i);
  }
  expect_healthy(t);
}

static void barriers_enqueued(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 16, .trace = -1};
  struct team *t = make_team(me, &spec);
  for (int i = 0; i < 200; i++) run_barrier(t);
  finish(me);
  expect_healthy(t);
  flush_stats(t);
  expect(me, __atomic_load_n(&t->status->progress, __ATOMIC_ACQUIRE) == 200, "progress is %lu after 200 barriers",
         (unsigned long)t->status->progress);
}

/* One normal-mode call, one low-latency call, a barrier, a clean, over and over on one buffer. */
static void both_modes(struct rank *me) {
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  bool clean = me->test->arg != NULL;
  for (uint64_t round = 0; round < 5; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &kNormal, round);
    struct ll *l = make_ll(t, &kLowLatency, round);
    struct combine *c = make_combine(n, &kCombine, round);
    dispatch_and_check(n);
    if (clean) run_clean(t, kLowLatency.max_tokens, kLowLatency.hidden, kLowLatency.experts);
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    run_combine(c);
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
    check_ll_dispatch(l);
    run_barrier(t);
    make_expert_rows(l, round);
    run_ll_combine(l, DK_PHASE_BOTH, 2);
    run_dispatch(n, DK_DISPATCH_CACHED);
    check_ll_combine(l);
    check_combine(c);
    check_dispatch(n, DK_DISPATCH_CACHED);
    back_to(me, mark);
  }
}

/* Two buffers of the same ranks, calls in turn, without a wait in between. */
static void two_teams(struct rank *me) {
  struct team *t[2] = {make_ll_team(me, &kLowLatency, 0), make_ll_team(me, &kLowLatency, 0)};
  struct normal *n[2];
  struct combine *c[2];
  struct ll *l[2];
  for (uint64_t i = 0; i < 2; i++) {
    n[i] = make_normal(t[i], &kNormal, i);
    dispatch_and_check(n[i]);
    c[i] = make_combine(n[i], &kCombine, 10 + i);
    l[i] = make_ll(t[i], &kLowLatency, 20 + i);
    ll_round(l[i], 30 + i);
  }
  for (uint64_t round = 0; round < 5; round++) {
    for (uint64_t i = 0; i < 2; i++) new_payload(n[i], 100 * round + i);
    for (uint64_t i = 0; i < 2; i++) new_ll_payload(l[i], 100 * round + 50 + i);
    for (int i = 0; i < 2; i++) run_dispatch(n[i], DK_DISPATCH_CACHED);
    for (int i = 0; i < 2; i++) run_ll_dispatch(l[i], DK_PHASE_SEND, 0);
    for (int i = 0; i < 2; i++) run_combine(c[i]);
    for (int i = 0; i < 2; i++) run_ll_dispatch(l[i], DK_PHASE_RECV, 0);
    for (int i = 0; i < 2; i++) check_dispatch(n[i], DK_DISPATCH_CACHED);
    for (int i = 0; i < 2; i++) check_combine(c[i]);
    for (int i = 0; i < 2; i++) check_ll_dispatch(l[i]);
  }
}

/* Each team on a stream of its own: where streams are threads, neither waits for the other. */
static void two_streams(struct rank *me) {
  struct team *a = make_ll_team(me, &kLowLatency, 0), *b = make_ll_team(me, &kLowLatency, 0);
  struct ll *first = make_ll(a, &kLowLatency, 1), *second = make_ll(b, &kLowLatency, 2);
  struct normal *n = make_normal(b, &kNormal, 3);
  dk_stream_create_params p = {.size = sizeof p, .device = seat_device(me->seat)};
  CALL(me, stream_create, &p);
  uint64_t own = me->stream;
  finish(me);
  for (int i = 0; i < 10; i++) { /* rank 1 issues them the other way round */
    for (int k = 0; k < 2; k++) {
      bool is_first = (k == 0) != (me->index == 1);
      me->stream = is_first ? own : p.stream;
      run_ll_dispatch(is_first ? first : second, DK_PHASE_BOTH, 0);
    }
  }
  me->stream = p.stream;
  dispatch_and_check(n);
  check_ll_dispatch(second);
  bool done = stream_done(me->seat, p.stream, 30);
  me->stream = own;
  check_ll_dispatch(first);
  dk_stream_destroy_params end = {.size = sizeof end, .device = seat_device(me->seat), .stream = p.stream};
  if (done) CALL(me, stream_destroy, &end);
}

static void many_teams(struct rank *me) {
  for (int round = 0; round < 6; round++) {
    struct team *t = make_ll_team(me, &kLowLatency, 0);
    struct mark mark = set_mark(me);
    ll_round(make_ll(t, &kLowLatency, (uint64_t)round), 7);
    back_to(me, mark);
    meet(me);
    dk_team_destroy_params p = {.size = sizeof p, .team = t->handle};
    CALL(me, team_destroy, &p);
    t->handle = 0;
  }
}

static void refused(struct rank *me) {
  uint64_t blocks[2] = {4096, 0};
  dk_team_create_params p = {.size = sizeof p, .device = seat_device(me->seat), .num_ranks = 2, .num_nvl_peers = 8};
  uint64_t status_at;
  void *status = host_words(me, DK_STATUS_BYTES, 4096, &status_at);
  p.host_peer_blocks = (uintptr_t)blocks;
  p.host_status = (uintptr_t)status;
  p.status = status_at;
  p.sm_share = 1;
  const struct {
    int rank, ranks;
  } bad[] = {{-1, 2}, {2, 2}, {0, 0}, {0, DK_MAX_RANKS + 1}};
  for (int i = 0; i < COUNT(bad); i++) {
    p.rank = bad[i].rank;
    p.num_ranks = bad[i].ranks;
    expect(me, dk.team_create(&p) != DK_OK && !p.team, "rank %d of %d was accepted", p.rank, p.num_ranks);
  }
  p.rank = 0;
  p.num_ranks = 2;
  expect(me, dk.team_create(&p) != DK_OK && !p.team, "a block of 0 bytes was accepted");
}

/* Invalid arguments of every operation. The team works afterwards. */
static void bad_arguments(struct rank *me) {
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  struct normal *n = make_normal(t, &kNormal, 3);
  struct ll *l = make_ll(t, &kLowLatency, 4);
  dk_ll_dispatch_params d = ll_dispatch_params(l, DK_PHASE_BOTH, 0), one = d;
#define REFUSED(call, params, field, value) \
  one = d;                                  \
  one.field = value;                        \
  expect(me, dk.call(&one) != DK_OK, #call " with " #field " = " #value " was accepted")
  REFUSED(ll_dispatch, d, phases, 0);
  REFUSED(ll_dispatch, d, phases, 4);
  REFUSED(ll_dispatch, d, ticket, DK_NUM_TICKETS);
  REFUSED(ll_dispatch, d, num_tokens, 17);
  REFUSED(ll_dispatch, d, num_tokens, -1);
  REFUSED(ll_dispatch, d, hidden, 0);
  REFUSED(ll_dispatch, d, num_experts, 0);
  REFUSED(ll_dispatch, d, index_bytes, 2);
  REFUSED(ll_dispatch, d, hidden, 1 << 20);
#undef REFUSED
  dk_dispatch_params bytes = dispatch_params(n, 0);
  bytes.hidden_bytes = 24;
  expect(me, dk.dispatch(&bytes) != DK_OK, "rows of 24 bytes were accepted");
  finish(me);
  expect_healthy(t);
  t->calls[DK_OP_LL_DISPATCH] = t->calls[DK_OP_DISPATCH] = 0;
  meet(me);
  dispatch_and_check(n);
  ll_round(l, 3);
}

static const struct test_case cases[] = {
    {"team/barrier, 3 ranks", barrier, 3, NULL, QUICK, 0, 0},
    {"team/barrier, 8 ranks", barrier, 8, NULL, USUAL, 0, 0},
    {"team/200 barriers enqueued", barriers_enqueued, 4, NULL, USUAL, 0, 0},
    {"team/normal and low latency in turn", both_modes, 4, NULL, QUICK, 0, 0},
    {"team/normal and low latency in turn, cleaned", both_modes, 2, "clean", QUICK, 0, 0},
    {"team/two teams in turn", two_teams, 4, NULL, USUAL, 0, 0},
    {"team/two teams on two streams", two_streams, 4, NULL, USUAL, DK_CAP_HOST_STREAM, 0},
    {"team/created and destroyed", many_teams, 2, NULL, QUICK, 0, 0},
    {"team/refused", refused, 1, NULL, QUICK, 0, 0},
    {"team/bad arguments", bad_arguments, 2, NULL, QUICK, 0, 0},
};
GROUP(team_cases);
