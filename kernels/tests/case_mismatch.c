/* case_mismatch.c - ranks whose arguments differ: each fails with the peer and both values. */
#include "lowlat.h"
#include "normal.h"

static const struct team_spec kTeam = {.nvl_bytes = 1 << 20, .trace = -1};

/* One rank differs. It sees another value at any other rank; all others see its value. */
static void expect_mismatch(struct team *t, uint32_t op, uint32_t field, int odd, bool values) {
  struct rank *me = t->me;
  finish(me);
  const dk_failure *f = &t->status->failure;
  expect_failure(t, DK_EMISMATCH, op, me->index == odd ? -2 : odd);
  expect(me, f->field == field, "rank %d differs in %s, the record names %s", odd, field_name(field),
         field_name(f->field));
  expect(me, f->peer != me->index && f->peer >= 0 && f->peer < me->count, "the record's peer is %d", f->peer);
  expect(me, f->expected != f->seen, "both sides are %ld", (long)f->seen);
  if (values)
    expect(me, f->expected == 100 + (me->index == odd) && f->seen == 100 + (me->index != odd), "mine %ld, theirs %ld",
           (long)f->expected, (long)f->seen);
}

/* A wait for the counts of a failed notify ends, and the counts are marked as invalid. */
static void expect_no_counts(struct normal *n) {
  struct rank *me = n->team->me;
  dk_host_wait_params p = {.size = sizeof p, .device = seat_device(me->seat), .timeout_ns = limit_ns(5)};
  p.host_word = (uintptr_t)&n->counts->seq;
  p.at_least = n->notify_call;
  p.host_status = (uintptr_t)n->team->status;
  int32_t code = dk.host_wait(&p);
  expect(me, code == DK_EABORTED || code == DK_OK, "the wait for counts ended with %s", code_name(code));
  expect(me, __atomic_load_n(&n->counts->seq, __ATOMIC_ACQUIRE) == n->notify_call,
         "a failed notify left no sequence number");
  expect(me, n->counts->num_recv_tokens == -1, "a failed notify says that %d rows come", n->counts->num_recv_tokens);
}

static void set_field(dk_notify_params *p, uint32_t field, bool odd, struct rank *me) {
  if (field == DK_FIELD_HIDDEN_BYTES) p->hidden_bytes = odd ? 101 * 16 : 100 * 16;
  if (field == DK_FIELD_NUM_EXPERTS) p->num_experts = (odd ? 101 : 100) * me->count;
  if (field == DK_FIELD_NUM_TOPK) p->num_topk = odd ? 101 : 100;
  if (field == DK_FIELD_NUM_SCALES) p->num_scales = odd ? 101 : 100;
}

/* A new team for each rank that differs: a failed team stays failed. */
static const uint32_t hidden_bytes = DK_FIELD_HIDDEN_BYTES, num_experts = DK_FIELD_NUM_EXPERTS,
                      num_topk = DK_FIELD_NUM_TOPK, num_scales = DK_FIELD_NUM_SCALES, format = DK_FIELD_FORMAT,
                      operation = DK_FIELD_OPERATION, max_tokens = DK_FIELD_MAX_TOKENS;
static void in_notify(struct rank *me) {
  uint32_t field = *(const uint32_t *)me->test->arg;
  for (int odd = 0; odd < me->count; odd++) {
    struct normal_spec spec = {
        .tokens = 10, .experts = 101 * me->count, .topk = 2, .index_bytes = 8, .row_bytes = 1600};
    struct team *t = make_team(me, &kTeam);
    struct normal *n = make_normal(t, &spec, 3);
    run_layout(n);
    dk_notify_params p = notify_params(n);
    set_field(&p, field, me->index == odd, me);
    CALL(me, notify, &p);
    finish(me);
    bool plain = field == DK_FIELD_NUM_TOPK || field == DK_FIELD_NUM_SCALES;
    expect_mismatch(t, DK_OP_NOTIFY, field, odd, plain);
    const dk_failure *f = &t->status->failure;
    int64_t unit = field == DK_FIELD_HIDDEN_BYTES ? 16 : me->count;
    if (!plain) expect(me, f->expected == (me->index == odd ? 101 : 100) * unit, "mine is %ld", (long)f->expected);
    expect_no_counts(n);
    meet(me);
  }
}

static void in_dispatch(struct rank *me) {
  uint32_t field = *(const uint32_t *)me->test->arg;
  for (int odd = 0; odd < me->count; odd++) {
    struct normal_spec spec = {.tokens = 10, .experts = 4 * me->count, .topk = 2, .index_bytes = 8, .row_bytes = 512};
    struct team *t = make_team(me, &kTeam);
    struct normal *n = make_normal(t, &spec, 3);
    run_layout(n);
    run_notify(n);
    await_counts(n);
    bool other = me->index == odd;
    dk_dispatch_params p = dispatch_params(n, other && field == DK_FIELD_OPERATION ? DK_DISPATCH_CACHED : 0);
    if (other && field == DK_FIELD_HIDDEN_BYTES) p.hidden_bytes = 256;
    if (other && field == DK_FIELD_FORMAT) p.topk_weights = p.recv_topk_weights = 0;
    CALL(me, dispatch, &p);
    expect_mismatch(t, DK_OP_DISPATCH, field, odd, false);
    meet(me);
  }
}

static void in_low_latency(struct rank *me) {
  uint32_t field = *(const uint32_t *)me->test->arg;
  for (int odd = 0; odd < me->count; odd++) {
    struct ll_spec spec = {.tokens = 6,
                           .max_tokens = 100,
                           .hidden = 256,
                           .experts = 2 * me->count,
                           .topk = 2,
                           .index_bytes = 8},
                   largest;
    largest = spec;
    largest.max_tokens = 101;
    largest.hidden = 384;
    largest.experts = 3 * me->count;
    struct team *t = make_ll_team(me, &largest, 0);
    bool other = me->index == odd;
    if (other && field == DK_FIELD_MAX_TOKENS) spec.max_tokens = 101;
    if (other && field == DK_FIELD_HIDDEN_BYTES) spec.hidden = 384;
    if (other && field == DK_FIELD_NUM_EXPERTS) spec.experts = 3 * me->count;
    if (other && field == DK_FIELD_FORMAT) spec.format = DK_FORMAT_FP8;
    struct mark mark = set_mark(me);
    struct ll *l = make_ll(t, &spec, 3);
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
    expect_mismatch(t, DK_OP_LL_DISPATCH, field, odd, field == DK_FIELD_MAX_TOKENS);
    expect_no_rows(l);
    meet(me);
    back_to(me, mark);
  }
}

/* Only one rank sends weights: the others would read bytes that were not sent. A rank without tokens need not pass any.
 * */
static void in_weights(struct rank *me) {
  if (library.caps & DK_CAP_HOST_STREAM) skip(me, "the library never sums at the experts' rank");
  for (int odd = 0; odd < me->count; odd++) {
    struct ll_spec spec = {
        .tokens = 6, .max_tokens = 8, .hidden = 256, .experts = 2 * me->count, .topk = 2, .index_bytes = 8};
    struct team *t = make_ll_team(me, &spec, 0);
    spec.weights = me->index == odd;
    struct mark mark = set_mark(me);
    struct ll *l = make_ll(t, &spec, 3);
    expect(me, l->tokens > 0, "no tokens");
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
    expect_mismatch(t, DK_OP_LL_DISPATCH, format, odd, false);
    meet(me);
    back_to(me, mark);
  }
  struct ll_spec spec = {.pattern = SILENT_RANK,
                         .tokens = 6,
                         .max_tokens = 8,
                         .hidden = 256,
                         .experts = 2 * me->count,
                         .topk = 2,
                         .index_bytes = 8};
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  spec.weights = l->tokens > 0;
  ll_round(l, 4);
}

static const struct test_case cases[] = {
    {"mismatch/bytes of a row", in_notify, 3, &hidden_bytes, QUICK, 0, 0},
    {"mismatch/number of experts", in_notify, 3, &num_experts, QUICK, 0, 0},
    {"mismatch/top-k", in_notify, 3, &num_topk, QUICK, 0, 0},
    {"mismatch/number of scales", in_notify, 3, &num_scales, QUICK, 0, 0},
    {"mismatch/4 ranks", in_notify, 4, &num_scales, USUAL, 0, 0},
    {"mismatch/dispatch, bytes of a row", in_dispatch, 3, &hidden_bytes, QUICK, 0, 0},
    {"mismatch/dispatch, weights given or not", in_dispatch, 3, &format, QUICK, 0, 0},
    {"mismatch/dispatch, cached or not", in_dispatch, 3, &operation, QUICK, 0, 0},
    {"mismatch/low latency, hidden", in_low_latency, 3, &hidden_bytes, QUICK, 0, 0},
    {"mismatch/low latency, number of experts", in_low_latency, 3, &num_experts, QUICK, 0, 0},
    {"mismatch/low latency, B", in_low_latency, 3, &max_tokens, QUICK, 0, 0},
    {"mismatch/low latency, format", in_low_latency, 3, &format, QUICK, 0, 0},
    {"mismatch/low latency, weights", in_weights, 3, NULL, QUICK, 0, 0},
};
GROUP(mismatch_cases);
