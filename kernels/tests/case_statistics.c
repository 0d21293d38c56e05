/* case_statistics.c - the statistics page: counts, bytes, histogram, trace. */
#include "lowlat.h"
#include "normal.h"

static const struct ll_spec kLowLatency = {
    .tokens = 10, .max_tokens = 16, .hidden = 512, .experts = 6, .topk = 3, .index_bytes = 8};
static const struct normal_spec kNormal = {
    .pattern = SKEWED, .tokens = 40, .experts = 6, .topk = 3, .index_bytes = 8, .row_bytes = 512, .scales = 4};
static const struct combine_spec kCombine = {.hidden = 128, .weights = true};

static struct team *make_counted(struct rank *me, int trace) {
  struct team_spec spec = {.nvl_bytes = 1 << 18, .flags = DK_TEAM_LOW_LATENCY | DK_TEAM_SHRINK, .trace = trace};
  spec.rdma_bytes = rdma_bytes_for(me, kLowLatency.max_tokens, kLowLatency.hidden, kLowLatency.experts);
  return make_team(me, &spec);
}

static int bucket_of(uint64_t ns) { /* 4 floor(log2(d/512)) + the next two bits, within 0..63 */
  if (ns < 512) return 0;
  int power = 0;
  while (ns >> (power + 1)) power++;
  int bucket = 4 * (power - 9) + (int)(ns >> (power - 2) & 3);
  return bucket < DK_HIST_BUCKETS ? bucket : DK_HIST_BUCKETS - 1;
}

static void expect_calls(struct team *t, uint32_t op, uint64_t calls, uint64_t errors) {
  struct rank *me = t->me;
  const dk_op_stats *s = &t->stats->ops[op];
  uint64_t in_histogram = 0, wait = 0;
  int highest = -1;
  expect(me, s->calls == calls, "%s: %lu calls counted, wanted %lu", op_name(op), (unsigned long)s->calls,
         (unsigned long)calls);
  expect(me, s->errors == errors, "%s: %lu errors counted, wanted %lu", op_name(op), (unsigned long)s->errors,
         (unsigned long)errors);
  for (int b = 0; b < DK_HIST_BUCKETS; b++) {
    in_histogram += s->hist[b];
    if (s->hist[b]) highest = b;
  }
  expect(me, in_histogram == calls, "%s: the histogram has %lu of %lu calls", op_name(op), (unsigned long)in_histogram,
         (unsigned long)calls);
  if (calls == 0) return;
  expect(me, highest == bucket_of(s->max_ns), "%s: longest %lu ns is bucket %d, the highest filled one is %d",
         op_name(op), (unsigned long)s->max_ns, bucket_of(s->max_ns), highest);
  expect(me, s->hist[bucket_of(s->last_ns)], "%s: the last call, %lu ns, is not in the histogram", op_name(op),
         (unsigned long)s->last_ns);
  expect(me, s->total_ns >= s->max_ns && s->max_ns >= s->last_ns && s->total_ns <= calls * s->max_ns,
         "%s: total %lu, max %lu, last %lu ns", op_name(op), (unsigned long)s->total_ns, (unsigned long)s->max_ns,
         (unsigned long)s->last_ns);
  for (int i = 0; i < me->count; i++) wait += peer_wait(t, op, i);
  expect(me, s->wait_ns <= s->total_ns, "%s: waited longer than it took", op_name(op));
  expect(me, s->last_start_ns == 0 || (s->last_start_ns <= now_ns() && s->last_start_ns + limit_ns(100) > now_ns()),
         "%s: started at %lu", op_name(op), (unsigned long)s->last_start_ns);
}

/* Bytes to a peer: its rows, and at most their extras. */
static void expect_bytes(struct team *t, uint32_t op, int peer, uint64_t least, uint64_t most) {
  uint64_t bytes = peer_bytes(t, op, peer);
  expect(t->me, bytes >= least && bytes <= most, "%s: %lu bytes to rank %d, wanted %lu to %lu", op_name(op),
         (unsigned long)bytes, peer, (unsigned long)least, (unsigned long)most);
}

static void expect_sum(struct team *t, uint32_t op) {
  uint64_t sum = 0;
  for (int i = 0; i < t->me->count; i++) sum += peer_bytes(t, op, i);
  expect(t->me, sum == t->stats->ops[op].bytes, "%s: %lu bytes, but %lu to all peers together", op_name(op),
         (unsigned long)t->stats->ops[op].bytes, (unsigned long)sum);
}

static int expert_rows(const struct routing *r, int source, int rank) {
  int rows = 0, local = r->experts / r->ranks;
  for (int token = 0; token < r->tokens[source]; token++)
    for (int e = rank * local; e < (rank + 1) * local; e++) rows += names(r, source, token, e);
  return rows;
}

static void counted(struct rank *me) {
  const uint64_t rounds = 3;
  struct team *t = make_counted(me, 0);
  struct normal *n = make_normal(t, &kNormal, 1);
  struct ll *l = make_ll(t, &kLowLatency, 2);
  struct combine *c = make_combine(n, &kCombine, 3);
  for (uint64_t i = 0; i < rounds; i++) {
    dispatch_and_check(n);
    run_combine(c);
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
    check_ll_dispatch(l);
    make_expert_rows(l, i);
    run_ll_combine(l, DK_PHASE_BOTH, 2);
    run_barrier(t);
    run_clean(t, 0, 0, 0);
    run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  }
  finish(me);
  flush_stats(t);
  expect_healthy(t);
  for (uint32_t op = DK_OP_LAYOUT; op < DK_NUM_OPS; op++) expect_calls(t, op, rounds, 0);
  for (int i = 0; i < me->count; i++) {
    uint64_t rows = rounds * (uint64_t)rows_between(n->routing, me->index, i),
             back = rounds * (uint64_t)rows_between(n->routing, i, me->index);
    expect_bytes(t, DK_OP_DISPATCH, i, rows * 512, rows * (512 + 16 + 12 * 3 + 16));
    expect_bytes(t, DK_OP_COMBINE, i, back * 256, back * (256 + 12 + 16));
    uint64_t tokens = rounds * (uint64_t)rows_between(l->routing, me->index, i),
             most = rounds * (uint64_t)expert_rows(l->routing, me->index, i);
    expect_bytes(t, DK_OP_LL_DISPATCH, i, tokens * 1024, most * (1024 + 12 * 3 + 16));
    uint64_t answers = rounds * (uint64_t)rows_between(l->routing, i, me->index),
             all = rounds * (uint64_t)expert_rows(l->routing, i, me->index);
    expect_bytes(t, DK_OP_LL_COMBINE, i, answers * 1024, all * (1024 + 64));
  }
  const uint32_t moving[] = {DK_OP_DISPATCH, DK_OP_COMBINE, DK_OP_LL_DISPATCH, DK_OP_LL_COMBINE};
  for (int i = 0; i < COUNT(moving); i++) expect_sum(t, moving[i]);
  expect(me, t->stats->magic == DK_STATS_MAGIC && t->stats->num_ranks == me->count && t->stats->state == 1,
         "the page's head was written over");
  expect(me, t->stats->trace_next == 0 || t->stats->trace_len == 0, "a trace is kept though there is no room for one");
}

/* Time waited for a late rank is counted for that operation and that peer. */
static void waited(struct rank *me) {
  struct team *t = make_counted(me, 0);
  run_barrier(t);
  finish(me);
  flush_stats(t);
  meet(me);
  if (me->index == 1) pause_ms(100);
  run_barrier(t);
  finish(me);
  flush_stats(t);
  const dk_op_stats *s = &t->stats->ops[DK_OP_BARRIER];
  if (me->index == 1) return;
  expect(me, s->wait_ns >= 60000000, "a barrier waited 100 ms and says %lu ns", (unsigned long)s->wait_ns);
  expect(me, peer_wait(t, DK_OP_BARRIER, 1) >= 60000000, "it waited 100 ms for rank 1 and says %lu ns",
         (unsigned long)peer_wait(t, DK_OP_BARRIER, 1));
  expect(me, s->max_ns >= 60000000, "the longest barrier took %lu ns", (unsigned long)s->max_ns);
}

/* The ring keeps the newest records, each at its index. */
static void traced(struct rank *me) {
  struct team *t = make_counted(me, 5);
  for (int i = 0; i < 9; i++) {
    run_barrier(t);
    run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
  }
  finish(me);
  flush_stats(t);
  const dk_trace_record *ring = (const dk_trace_record *)((const char *)t->stats + t->stats->trace_offset);
  expect(me, t->stats->trace_next == 18, "trace_next is %lu after 18 calls", (unsigned long)t->stats->trace_next);
  for (uint64_t i = 13; i < 18; i++) {
    const dk_trace_record *r = &ring[i % 5];
    uint32_t op = i % 2 ? DK_OP_MASK : DK_OP_BARRIER;
    expect(me, r->op == op && r->call == i / 2 + 1, "record %lu is %s %lu, wanted %s %lu", (unsigned long)i,
           op_name(r->op), (unsigned long)r->call, op_name(op), (unsigned long)i / 2 + 1);
    const dk_trace_record *before = &ring[(i - 1) % 5];
    if (i > 13)
      expect(me, r->start_ns >= before->start_ns + before->duration_ns,
             "record %lu begins before the one before it ends", (unsigned long)i);
  }
}

/* Receive halves leave counts in device memory for later kernels: each half has its record, at its index, also where
 * two batches take turns. */
static void many_halves(struct rank *me) {
  struct team *t = make_counted(me, 64);
  struct ll *l = make_ll(t, &kLowLatency, 2);
  for (int i = 0; i < 7; i++) {
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
  }
  run_ll_dispatch(l, DK_PHASE_SEND, 0);
  run_ll_dispatch(l, DK_PHASE_SEND, 1);
  run_ll_dispatch(l, DK_PHASE_RECV, 0);
  run_ll_dispatch(l, DK_PHASE_RECV, 1);
  finish(me);
  flush_stats(t);
  expect_calls(t, DK_OP_LL_DISPATCH, 9, 0);
  const dk_trace_record *ring = (const dk_trace_record *)((const char *)t->stats + t->stats->trace_offset);
  expect(me, t->stats->trace_next == 18, "trace_next is %lu after 18 halves", (unsigned long)t->stats->trace_next);
  for (uint64_t i = 0; i < 18; i++) {
    const uint32_t phase = (i < 14 ? i % 2 : i / 2 % 2 == 0) == 0 ? DK_PHASE_SEND : DK_PHASE_RECV;
    expect(me, ring[i].op == DK_OP_LL_DISPATCH && ring[i].phase == phase, "record %lu has phase %u, wanted %u",
           (unsigned long)i, ring[i].phase, phase);
  }
}

static void two_halves(struct rank *me) {
  struct team *t = make_counted(me, 8);
  struct ll *l = make_ll(t, &kLowLatency, 2);
  run_ll_dispatch(l, DK_PHASE_SEND, 0);
  finish(me);
  flush_stats(t);
  expect_calls(t, DK_OP_LL_DISPATCH, 0, 0); /* the call counts when its receive half ends */
  pause_ms(50);
  run_ll_dispatch(l, DK_PHASE_RECV, 0);
  finish(me);
  flush_stats(t);
  expect_calls(t, DK_OP_LL_DISPATCH, 1, 0);
  const dk_trace_record *ring = (const dk_trace_record *)((const char *)t->stats + t->stats->trace_offset);
  expect(me, t->stats->trace_next == 2 && ring[0].phase == DK_PHASE_SEND && ring[1].phase == DK_PHASE_RECV,
         "the trace has %lu records, phases %u, %u", (unsigned long)t->stats->trace_next, ring[0].phase, ring[1].phase);
  const dk_op_stats *s = &t->stats->ops[DK_OP_LL_DISPATCH];
  expect(me, s->total_ns >= ring[0].duration_ns, "the send half's time is not in the call's");
  if (settings.patience > 1) return; /* below, times are compared */
  uint64_t both = ring[0].duration_ns + ring[1].duration_ns;
  expect(me, s->total_ns <= both + 10000000, "the call took %lu ns, its halves %lu: the gap between them counts",
         (unsigned long)s->total_ns, (unsigned long)both);
}

static void errors(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 18};
  struct team *t = make_team(me, &spec);
  struct normal *n = make_normal(t, &kNormal, 1);
  t->timeout_ns = soon_ns();
  if (me->index == 0) return;
  run_layout(n);
  run_notify(n);
  finish(me);
  flush_stats(t);
  expect_failure(t, DK_ETIMEOUT, DK_OP_NOTIFY, 0);
  expect_calls(t, DK_OP_NOTIFY, 1, 1);
  expect_calls(t, DK_OP_LAYOUT, 1, 0);
}

static const struct test_case cases[] = {
    {"statistics/counts and bytes", counted, 3, NULL, QUICK, 0, 0},
    {"statistics/counts and bytes, 1 rank", counted, 1, NULL, QUICK, 0, 0},
    {"statistics/waiting", waited, 3, NULL, QUICK, 0, 0},
    {"statistics/trace", traced, 2, NULL, QUICK, 0, 0},
    {"statistics/two halves are one call", two_halves, 2, NULL, QUICK, 0, 0},
    {"statistics/each half has its record", many_halves, 2, NULL, QUICK, 0, 0},
    {"statistics/errors", errors, 2, NULL, QUICK, 0, 0},
};
GROUP(statistics_cases);
