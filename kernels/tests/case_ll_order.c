/* case_ll_order.c - halves, tickets, slots: sends with receives later, alternating shapes, ranks that run ahead. */
#include "lowlat.h"

static const struct ll_spec kSpec = {
    .tokens = 14, .max_tokens = 16, .hidden = 256, .experts = 4, .topk = 3, .index_bytes = 8};

static struct ll_spec spec_for(struct rank *me) {
  struct ll_spec spec = kSpec;
  spec.experts *= me->count;
  return spec;
}

/* Send now, receive later, other work in between. */
static void halves(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 5; round++) {
    new_ll_payload(l, round);
    run_ll_dispatch(l, DK_PHASE_SEND, 1);
    if (me->index == 0) pause_ms(3);
    finish(me); /* a send half ends by itself */
    run_ll_dispatch(l, DK_PHASE_RECV, 1);
    check_ll_dispatch(l);
    make_expert_rows(l, round);
    run_ll_combine(l, DK_PHASE_SEND, 3);
    finish(me);
    run_ll_combine(l, DK_PHASE_RECV, 3);
    check_ll_combine(l);
  }
}

/* Two sends in flight, received in either order: the ticket matches a receive to its send. */
static const int fifo = 0, swapped = 1;
static void two_sends(struct rank *me) {
  int swap = *(const int *)me->test->arg;
  struct ll_spec spec = spec_for(me), other = spec;
  other.format = DK_FORMAT_FP8;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *both[2] = {make_ll(t, &spec, 3), make_ll(t, &other, 4)};
  for (uint64_t round = 0; round < 4; round++) {
    for (int i = 0; i < 2; i++) new_ll_payload(both[i], 10 * round + (uint64_t)i);
    for (uint32_t i = 0; i < 2; i++) run_ll_dispatch(both[i], DK_PHASE_SEND, i);
    for (uint32_t i = 0; i < 2; i++) run_ll_dispatch(both[i ^ (uint32_t)swap], DK_PHASE_RECV, i ^ (uint32_t)swap);
    for (int i = 0; i < 2; i++) check_ll_dispatch(both[i]);
    for (int i = 0; i < 2; i++) make_expert_rows(both[i], 100 * round + (uint64_t)i);
    for (uint32_t i = 0; i < 2; i++) run_ll_combine(both[i], DK_PHASE_SEND, 2 + i);
    for (uint32_t i = 0; i < 2; i++) run_ll_combine(both[i ^ (uint32_t)swap], DK_PHASE_RECV, 2 + (i ^ (uint32_t)swap));
    for (int i = 0; i < 2; i++) check_ll_combine(both[i]);
  }
}

/* vLLM's two micro-batches in turn: dispatch A, hook A, dispatch B, work on A, hook B, combine A, ... */
static void micro_batches(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *a = make_ll(t, &spec, 3), *b = make_ll(t, &spec, 4);
  for (uint64_t round = 0; round < 6; round++) {
    new_ll_payload(a, 2 * round);
    new_ll_payload(b, 2 * round + 1);
    run_ll_dispatch(a, DK_PHASE_SEND, 0);
    run_ll_dispatch(a, DK_PHASE_RECV, 0);
    run_ll_dispatch(b, DK_PHASE_SEND, 1);
    check_ll_dispatch(a);
    make_expert_rows(a, round);
    run_ll_dispatch(b, DK_PHASE_RECV, 1);
    run_ll_combine(a, DK_PHASE_SEND, 2);
    check_ll_dispatch(b);
    make_expert_rows(b, 50 + round);
    run_ll_combine(a, DK_PHASE_RECV, 2);
    run_ll_combine(b, DK_PHASE_SEND, 3);
    check_ll_combine(a);
    run_ll_combine(b, DK_PHASE_RECV, 3);
    check_ll_combine(b);
  }
}

/* One rank pauses at random, the others run ahead; slots alternate many times. */
static void many_calls(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 30; round++) {
    new_ll_payload(l, round);
    if (draw(me, 8) == 0) pause_ms((int)draw(me, 4));
    ll_round(l, round);
  }
}

/* Twenty dispatches and combines enqueued at once, without a wait. */
static void enqueued(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 5);
  for (int i = 0; i < 20; i++) {
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
    run_ll_combine(l, DK_PHASE_BOTH, 2);
  }
  check_ll_dispatch(l);
  check_ll_combine(l);
}

/* Different shapes and formats on one buffer, one after the other. */
static void shapes_in_turn(struct rank *me) {
  struct ll_spec specs[4] = {spec_for(me), spec_for(me), spec_for(me), spec_for(me)};
  specs[1].hidden = 1024;
  specs[1].format = DK_FORMAT_FP8;
  specs[2].max_tokens = 5;
  specs[2].tokens = 5;
  specs[2].experts *= 3;
  specs[3].topk = 7;
  specs[3].hidden = 128;
  specs[3].weights = true;
  struct ll_spec largest = specs[1];
  largest.experts *= 3;
  struct team *t = make_ll_team(me, &largest, 0);
  bool clean = me->test->arg != NULL;
  for (uint64_t round = 0; round < 12; round++) {
    struct mark mark = set_mark(me);
    const struct ll_spec *spec = &specs[round * 7 % 4];
    if (clean) run_clean(t, spec->max_tokens, spec->hidden, spec->experts);
    ll_round(make_ll(t, spec, round), round);
    back_to(me, mark);
  }
}

/* Between calls the caller may overwrite the rdma region, with zeros or other bytes. Where rows carry their own
 * arrival, as on GPUs, a clean follows bytes other than zero. */
static void region_overwritten(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 6; round++) {
    fill(me, t->block->at[me->index] + t->rdma_offset, t->rdma_bytes, round % 2 ? 0xff : 0);
    finish(me);
    meet(me);
    if (round % 2 && !(library.caps & DK_CAP_HOST_STREAM)) run_clean(t, 0, 0, 0);
    new_ll_payload(l, round);
    ll_round(l, round);
    meet(me);
  }
}

/* A third send without its receive is an error, not a hang. */
static void third_send(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  t->timeout_ns = limit_ns(0.5);
  struct ll *l = make_ll(t, &spec, 3);
  int32_t code = DK_OK;
  for (uint32_t i = 0; i < 3 && code == DK_OK; i++) {
    dk_ll_dispatch_params p = ll_dispatch_params(l, DK_PHASE_SEND, i);
    code = dk.ll_dispatch(&p);
  }
  finish(me);
  expect(me, code != DK_OK || __atomic_load_n(&t->status->sticky, __ATOMIC_ACQUIRE),
         "three sends without a receive went through");
}

/* The time waited for a rank is counted for that rank. It comes so late that the others wait however busy the machine.
 */
static void waits(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 1);
  meet(me);
  if (me->index == 1) pause_ms(300);
  ll_dispatch_and_answer(l, 2);
  meet(me);
  if (me->index == 1) pause_ms(300);
  run_ll_combine(l, DK_PHASE_BOTH, 2);
  check_ll_combine(l);
  const int64_t *dispatch = l->waits.host, *combine = l->combine_waits.host;
  if (me->index == 1) return;
  expect(me, dispatch[1] > 60000000, "dispatch waited up to 300 ms for rank 1 and says %ld ns", (long)dispatch[1]);
  expect(me, combine[1] > 60000000, "combine waited up to 300 ms for rank 1 and says %ld ns", (long)combine[1]);
}

static const struct test_case cases[] = {
    {"ll order/halves", halves, 3, NULL, QUICK, 0, 0},
    {"ll order/two sends, first in, first out", two_sends, 3, &fifo, QUICK, 0, 0},
    {"ll order/two sends, received the other way round", two_sends, 3, &swapped, QUICK, 0, 0},
    {"ll order/two micro-batches", micro_batches, 4, NULL, USUAL, 0, 0},
    {"ll order/thirty calls, slow ranks", many_calls, 4, NULL, USUAL, 0, 0},
    {"ll order/thirty calls, 8 ranks", many_calls, 8, NULL, HEAVY, 0, 0},
    {"ll order/forty calls enqueued at once", enqueued, 4, NULL, USUAL, 0, 0},
    {"ll order/shapes in turn", shapes_in_turn, 3, NULL, USUAL, 0, 0},
    {"ll order/shapes in turn, cleaned", shapes_in_turn, 3, "clean", USUAL, 0, 0},
    {"ll order/region overwritten between calls", region_overwritten, 3, NULL, QUICK, 0, 0},
    {"ll order/third send", third_send, 2, NULL, QUICK, 0, 0},
    {"ll order/waits are counted", waits, 3, NULL, QUICK, 0, 0},
};
GROUP(ll_order_cases);
