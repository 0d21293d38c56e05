/* case_overlap.c - contents that change while a call runs: an output of the call lies where it reads, or a thread of
 * the caller writes there. A kernel goes by what it has checked: nothing outside the tensors is read or written (each
 * tensor has guards), the call ends at once, and other calls are right. */
#include <string.h>

#include "lowlat.h"
#include "normal.h"
#include "routed.h"

#define HIDDEN 64
static const struct routed_spec kExpanded = {
    .tokens = 40, .experts = 4, .topk = 4, .hidden = HIDDEN, .row_bytes = 2 * HIDDEN, .alignment = 4, .weights = true};
static const struct routed_spec kPlain = {.tokens = 40,
                                          .experts = 4,
                                          .topk = 4,
                                          .hidden = HIDDEN,
                                          .row_bytes = 2 * HIDDEN,
                                          .alignment = 1,
                                          .weights = true,
                                          .plain = true};

static struct team *roomy_team(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 20, .trace = -1};
  return make_team(me, &spec);
}

/* The contents of `what` where `output` begins. */
static uint64_t laid_into(struct rank *me, struct tensor output, struct tensor what) {
  expect(me, output.bytes >= what.bytes, "the output has %lu bytes", (unsigned long)output.bytes);
  copy(me, output.at, what.at, what.bytes);
  finish(me);
  return output.at;
}

/* One rank's output lies over the places of its rows: that rank fails by name, long before a deadline, and so do those
 * that wait for its rows. */
static void over_send_head(struct rank *me) {
  const struct routed_spec *spec = me->test->arg;
  for (uint32_t op = DK_OP_DISPATCH; op <= DK_OP_COMBINE; op++) {
    struct mark mark = set_mark(me);
    struct team *t = roomy_team(me);
    struct routed *n = make_routed(t, spec, 3);
    run_routed(n);
    dk_dispatch_params d = routed_dispatch(n, DK_DISPATCH_CACHED);
    dk_combine_params c = routed_combine(n);
    if (me->index == 0) {
      d.send_head = op == DK_OP_DISPATCH ? laid_into(me, n->recv_x, n->head) : n->head.at;
      c.send_head = op == DK_OP_COMBINE ? laid_into(me, n->out, n->head) : n->head.at;
    }
    uint64_t start = now_ns();
    if (op == DK_OP_DISPATCH)
      CALL(me, dispatch, &d);
    else
      CALL(me, combine, &c);
    finish(me);
    expect(me, now_ns() - start < t->timeout_ns / 2, "it took %.1f s", (double)(now_ns() - start) * 1e-9);
    if (me->index == 0) {
      expect_failure(t, DK_EINVAL, op, 0);
      expect(me, t->status->failure.field == DK_FIELD_SEND_HEAD, "field %s", field_name(t->status->failure.field));
    }
    back_to(me, mark);
  }
}

/* The received rows lie over the sender's slots, or the sums over the slots of the rows that they are made of: the rows
 * are wrong, and all else is not. */
static void over_slots(struct rank *me) {
  struct team *t = roomy_team(me);
  struct routed *n = make_routed(t, &kExpanded, 3);
  run_routed(n);
  dk_dispatch_params d = routed_dispatch(n, DK_DISPATCH_CACHED);
  d.dst_slot = laid_into(me, n->recv_x, n->slot);
  CALL(me, dispatch, &d);
  finish(me);
  expect_healthy(t);
  expect_no_refusal(t);
  dk_combine_params c = routed_combine(n);
  c.recv_src_metadata = laid_into(me, n->out, n->meta);
  CALL(me, combine, &c);
  finish(me);
  expect_healthy(t);
  expect_no_refusal(t);
  d = routed_dispatch(n, DK_DISPATCH_CACHED);
  CALL(me, dispatch, &d);
  check_routed_dispatch(n, DK_DISPATCH_CACHED);
  c = routed_combine(n);
  CALL(me, combine, &c);
  check_routed_combine(n);
}

/* Outputs over rank_prefix_matrix, which is read for nothing but the call that it is given to: all is right. Among
 * nodes forwarders go by it too. */
static void over_matrix(struct rank *me) {
  static const struct normal_spec rows = {.tokens = 40, .experts = 24, .topk = 4, .index_bytes = 8, .row_bytes = 512};
  static const struct combine_spec sums = {.hidden = 256, .weights = true};
  struct team_spec spec = {
      .nvl_bytes = 1 << 20, .rdma_bytes = 1 << 20, .node = *(const int *)me->test->arg, .trace = -1};
  struct team *t = make_team(me, &spec);
  struct normal *n = make_normal(t, &rows, 3);
  dispatch_and_check(n);
  struct combine *s = make_combine(n, &sums, 4);
  new_payload(n, 9);
  dk_dispatch_params d = dispatch_params(n, DK_DISPATCH_CACHED);
  d.rank_prefix_matrix = laid_into(me, n->recv_x, n->matrix);
  CALL(me, dispatch, &d);
  check_dispatch(n, DK_DISPATCH_CACHED);
  dk_combine_params c = combine_params(s);
  c.rank_prefix_matrix = laid_into(me, s->out, n->matrix);
  CALL(me, combine, &c);
  check_combine(s);
  expect_healthy(t);
}

/* Outputs of a notify over each other: what the host gets does not go by the one that was overwritten. */
static void over_counts(struct rank *me) {
  struct team *t = roomy_team(me);
  struct routed *n = make_routed(t, me->test->arg, 3);
  dk_notify_params p = routed_notify(n);
  p.rank_prefix_matrix = p.psum_per_expert = p.num_per_expert = p.cumulative_stats = p.dst_slot;
  CALL(me, notify, &p);
  await_routed_counts(n);
  finish(me);
  expect(me, n->counts->num_recv_tokens == n->rows, "%d rows, wanted %d", n->counts->num_recv_tokens, n->rows);
  for (int e = 0; e < n->routing->experts / me->count; e++)
    expect(me, n->counts->per_expert[e] >= n->count[e] && n->counts->per_expert[e] < n->count[e] + n->spec->alignment,
           "expert %d has %d rows, wanted %d", e, n->counts->per_expert[e], n->count[e]);
  meet(me);
  run_routed(make_routed(t, me->test->arg, 4));
}

/* The rows of a rank that is lost after the counts are zeros, between those that come: the ends of the experts' rows
 * are the caller's to change. */
static void changed_ends(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 20, .flags = DK_TEAM_SHRINK, .trace = -1};
  struct team *t = make_team(me, &spec);
  struct routed *n = make_routed(t, &kExpanded, 3);
  dk_status *all[MAX_SEATS];
  gather(me, &t->status, sizeof t->status, -1, all, NULL);
  dk_notify_params notify = routed_notify(n);
  CALL(me, notify, &notify);
  await_routed_counts(n);
  finish(me);
  meet(me);
  if (me->index == 1) {
    __atomic_store_n(&all[0]->dead[1], 1, __ATOMIC_RELEASE);
    return;
  }
  fetch_tensor(me, n->psum_experts);
  finish(me);
  ((int32_t *)n->psum_experts.host)[0] = INT32_MAX;
  send_tensor(me, n->psum_experts);
  dk_dispatch_params d = routed_dispatch(n, 0);
  CALL(me, dispatch, &d);
  finish(me);
  expect_healthy(t);
  expect_masks(t, 2);
}

/* ---- A thread of the caller writes ------------------------------------------------------------------------------- */

struct flips {
  pthread_t thread;
  volatile int32_t *word;
  int32_t right, wrong;
  int over;
};

static void *flip(void *argument) {
  struct flips *f = argument;
  for (uint32_t i = 0; !__atomic_load_n(&f->over, __ATOMIC_ACQUIRE); i++)
    __atomic_store_n(f->word, i & 1 ? f->wrong : f->right, __ATOMIC_RELAXED);
  __atomic_store_n(f->word, f->right, __ATOMIC_RELAXED);
  return NULL;
}

/* The operation runs while the word changes: it is refused or not. */
static void run_flipped(struct rank *me, struct team *t, uint64_t word, int32_t wrong, void (*run)(void *),
                        void *call) {
  enum { kCalls = 60 };
  struct flips f = {.word = (int32_t *)(uintptr_t)word, .wrong = wrong, .right = *(int32_t *)(uintptr_t)word};
  int code = pthread_create(&f.thread, NULL, flip, &f);
  expect(me, code == 0, "pthread_create: %d", code);
  bool ended = true;
  for (int i = 0; i < kCalls && ended; i++) {
    run(call);
    ended = stream_done(me->seat, me->stream, 20);
  }
  __atomic_store_n(&f.over, 1, __ATOMIC_RELEASE);
  pthread_join(f.thread, NULL);
  expect(me, ended, "a call did not end");
  expect_healthy(t);
  memset(t->status->refusals, 0, sizeof t->status->refusals);
  t->status->refused = 0;
}

static void dispatch_again(void *n) { run_dispatch(n, DK_DISPATCH_CACHED); }
static void combine_again(void *c) { run_combine(c); }
static void combine_rows_again(void *l) { run_ll_combine(l, DK_PHASE_BOTH, 2); }

static void changing(struct rank *me) {
  static const struct normal_spec rows = {.tokens = 20, .experts = 4, .topk = 3, .index_bytes = 8, .row_bytes = 512};
  static const struct combine_spec sums = {.hidden = 256, .weights = true};
  static const struct ll_spec few = {
      .tokens = 6, .max_tokens = 8, .hidden = 256, .experts = 4, .topk = 2, .index_bytes = 8};
#ifdef __SANITIZE_THREAD__
  skip(me, "the race is meant");
#endif
  struct team *t = roomy_team(me);
  struct normal *n = make_normal(t, &rows, 3);
  dispatch_and_check(n);
  struct combine *c = make_combine(n, &sums, 4);
  finish(me);
  run_flipped(me, t, n->matrix.at, 1 << 24, dispatch_again, n);
  run_flipped(me, t, n->matrix.at, 1 << 24, combine_again, c);
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
  run_combine(c);
  check_combine(c);
  struct team *low = make_ll_team(me, &few, 0);
  struct ll *l = make_ll(low, &few, 3);
  ll_round(l, 5);
  finish(me);
  run_flipped(me, low, l->layout_range.at, 1 << 24, combine_rows_again, l); /* the count of its rows: the low half */
  ll_round(l, 6);
}

static const int kOneNode = MAX_SEATS, kPairs = 2;
#define CASE(name, run, ranks, arg) {"overlap/" name, run, ranks, arg, QUICK, DK_CAP_HOST_STREAM, 0}
static const struct test_case cases[] = {
    CASE("send_head, plain, 1 rank", over_send_head, 1, &kPlain),
    CASE("send_head, plain", over_send_head, 3, &kPlain),
    CASE("send_head, expanded", over_send_head, 2, &kExpanded),
    CASE("slots, 1 rank", over_slots, 1, NULL),
    CASE("slots", over_slots, 3, NULL),
    CASE("matrix", over_matrix, 3, &kOneNode),
    CASE("matrix, 2 nodes", over_matrix, 4, &kPairs),
    CASE("counts, 1 rank", over_counts, 1, &kExpanded),
    CASE("counts", over_counts, 2, &kPlain),
    CASE("contents that change", changing, 1, NULL),
    {"overlap/ends that change, a lost rank", changed_ends, 2, NULL, QUICK, DK_CAP_HOST_STREAM | DK_CAP_ROUTED_SHRINK,
     0},
};
GROUP(overlap_cases);
