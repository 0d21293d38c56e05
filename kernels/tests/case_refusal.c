/* case_refusal.c - contents that only kernels see: the call is refused by name before a row moves, on every rank, and
 * the team goes on. */
#include <string.h>

#include "lowlat.h"
#include "normal.h"

static const struct normal_spec kRows = {.tokens = 20, .experts = 12, .topk = 3, .index_bytes = 8, .row_bytes = 512};
static const struct combine_spec kSums = {.hidden = 256, .weights = true};

static bool host_library(void) { return library.caps & DK_CAP_HOST_STREAM; }

static struct team *small_team(struct rank *me) {
  struct team_spec spec = {.nvl_bytes = 1 << 20, .trace = -1};
  return make_team(me, &spec);
}

static int32_t *ints(struct tensor t) { return t.host; }

/* ---- A handle's contents ----------------------------------------------------------------------------------------- */

enum change {
  MATRIX_HUGE,
  MATRIX_NEGATIVE,
  MATRIX_ZERO,
  MATRIX_ALL_HUGE,
  MATRIX_DESCENDS,
  HEAD_HUGE,
  HEAD_ALL,
  HEAD_MAX,
  HEAD_SWAPPED,
  HEAD_NONE
};
struct mutation {
  enum change change;
  uint32_t op; /* DK_OP_DISPATCH: cached */
};

static void change_matrix(struct rank *me, int32_t *matrix, enum change change) {
  int n = me->count;
  for (int i = 0; i < n * n; i++) {
    bool last = i >= n * (n - 1);
    if (change == MATRIX_HUGE && !last) matrix[i] = 1000000;
    if (change == MATRIX_NEGATIVE && !last) matrix[i] = -1000000;
    if (change == MATRIX_ZERO) matrix[i] = 0;
    if (change == MATRIX_ALL_HUGE) matrix[i] = 1000000;
  }
  if (change == MATRIX_DESCENDS) matrix[me->index] = matrix[n * (n - 1) + me->index] + 1;
}

/* False: this rank's tokens go nowhere where the change would be seen. */
static bool change_head(struct normal *n, enum change change) {
  int ranks = n->team->me->count, sent = 0, last = -1;
  int32_t *head = ints(n->head);
  for (int i = 0; i < n->tokens * ranks; i++) {
    if (change == HEAD_ALL) head[i] = i / ranks;
    if (head[i] < 0) continue;
    if (change == HEAD_HUGE) head[i] = 1000000;
    if (change == HEAD_MAX) head[i] = INT32_MAX;
    if (change == HEAD_NONE) head[i] = -1;
    if (i % ranks != 0) continue;
    if (change == HEAD_SWAPPED && sent == 1) {
      int32_t first = head[last];
      head[last] = head[i];
      head[i] = first;
    }
    sent++;
    last = i;
  }
  return change == HEAD_ALL || sent > 1;
}

static void run_changed(struct normal *n, struct combine *c, uint32_t op) {
  if (op == DK_OP_COMBINE)
    run_combine(c);
  else
    run_dispatch(n, DK_DISPATCH_CACHED);
  finish(n->team->me);
}

/* One rank after the other has a wrong handle: the call is refused on all, the rank and the tensor are named, and the
 * same call with the right handle works. */
/* On GPUs the entries of send_head are looked at one by one, where they are used: combine leaves out a row that has no
 * place, its rank alone refuses the call; in a dispatch peers wait for that row. */
static void changed_head_on_gpu(struct rank *me, const struct mutation *m) {
  if (m->change != HEAD_HUGE && m->change != HEAD_MAX) skip(me, "on GPUs places are bounded, not counted");
  for (int odd = 0; odd < me->count; odd++) {
    struct team *t = small_team(me);
    struct normal *n = make_normal(t, &kRows, 3);
    dispatch_and_check(n);
    struct combine *c = make_combine(n, &kSums, 4);
    fetch_tensor(me, n->head);
    finish(me);
    meet(me);
    if (m->op == DK_OP_DISPATCH) t->timeout_ns = soon_ns();
    if (me->index == odd) {
      change_head(n, m->change);
      send_tensor(me, n->head);
    }
    run_changed(n, c, m->op);
    if (m->op == DK_OP_COMBINE) {
      if (me->index == odd) expect_refusal(t, DK_EINVAL, DK_OP_COMBINE, odd, DK_FIELD_SEND_HEAD);
      expect_healthy(t);
      expect_no_refusal(t);
      if (me->index != odd) check_combine(c);
    } else if (me->index == odd) {
      expect_failure(t, DK_EINVAL, DK_OP_DISPATCH, odd);
      expect(me, t->status->failure.field == DK_FIELD_SEND_HEAD, "field %s", field_name(t->status->failure.field));
    }
    meet(me);
  }
}

static void changed_handle(struct rank *me) {
  const struct mutation *m = me->test->arg;
  if (m->change > MATRIX_DESCENDS && !host_library()) return changed_head_on_gpu(me, m);
  struct team *t = small_team(me);
  struct normal *n = make_normal(t, &kRows, 3);
  dispatch_and_check(n);
  struct combine *c = make_combine(n, &kSums, 4);
  bool matrix = m->change <= MATRIX_DESCENDS;
  for (int odd = 0; odd < me->count; odd++) {
    struct tensor all = matrix ? n->matrix : n->head;
    void *right = scratch(me, all.bytes + 1);
    fetch_tensor(me, all);
    finish(me);
    memcpy(right, all.host, all.bytes);
    if (me->index == odd) {
      if (matrix) change_matrix(me, all.host, m->change);
      if (!matrix) expect(me, change_head(n, m->change), "the case changes nothing");
      send_tensor(me, all);
    }
    run_changed(n, c, m->op);
    uint32_t field = matrix ? DK_FIELD_PREFIX_MATRIX : DK_FIELD_SEND_HEAD;
    /* A matrix of zeros is right by itself where the rank sends nothing, else send_head does not fit it. */
    if (m->change == MATRIX_ZERO && host_library()) field = DK_FIELD_SEND_HEAD;
    if (m->change == MATRIX_ALL_HUGE) field = DK_FIELD_HANDLE_ROWS;
    bool differs = m->change == MATRIX_ZERO && !host_library(); /* then the odd rank finds that the others differ */
    expect_refusal(t, DK_EINVAL, m->op, differs && me->index == odd ? -2 : odd, field);
    memcpy(all.host, right, all.bytes);
    send_tensor(me, all);
    if (m->op == DK_OP_COMBINE) {
      fetch_tensor(me, c->out);
      finish(me);
      for (uint64_t i = 0; i < c->out.bytes / 2; i++)
        expect(me, bf16_is_nan(((uint16_t *)c->out.host)[i]), "a refused combine left a sum");
    }
    meet(me);
    run_changed(n, c, m->op);
    if (m->op == DK_OP_COMBINE)
      check_combine(c);
    else
      check_dispatch(n, DK_DISPATCH_CACHED);
    expect_healthy(t);
    expect_no_refusal(t);
    meet(me);
  }
}

/* Handles of two exchanges: each is right by itself. */
static void swapped(struct rank *me) {
  uint32_t op = *(const uint32_t *)me->test->arg;
  struct team *t = small_team(me);
  struct normal *n = make_normal(t, &kRows, 3);
  dispatch_and_check(n);
  struct combine *c = make_combine(n, &kSums, 4);
  for (int odd = 0; odd < me->count; odd++) {
    dk_dispatch_params d = dispatch_params(n, DK_DISPATCH_CACHED);
    dk_combine_params p = combine_params(c);
    t->calls[op == DK_OP_COMBINE ? DK_OP_DISPATCH : DK_OP_COMBINE]--;
    /* A rank that does not know its exchange refuses the call with the others. */
    d.exchange = p.exchange = me->index == odd                                                        ? 5
                              : host_library() && me->count > 2 && me->index == (odd + 1) % me->count ? 0
                                                                                                      : 6;
    if (op == DK_OP_COMBINE)
      CALL(me, combine, &p);
    else
      CALL(me, dispatch, &d);
    finish(me);
    dk_failure f = expect_refusal(t, DK_EMISMATCH, op, -2, DK_FIELD_EXCHANGE);
    expect(me, f.expected + f.seen == 11, "the record says %ld and %ld", (long)f.expected, (long)f.seen);
    meet(me);
    d = dispatch_params(n, DK_DISPATCH_CACHED);
    p = combine_params(c);
    t->calls[op == DK_OP_COMBINE ? DK_OP_DISPATCH : DK_OP_COMBINE]--;
    d.exchange = p.exchange = me->index == odd ? 0 : 6;
    if (op == DK_OP_COMBINE)
      CALL(me, combine, &p);
    else
      CALL(me, dispatch, &d);
    finish(me);
    expect_healthy(t);
    expect_no_refusal(t);
    meet(me);
  }
}

/* ---- Arguments of a dispatch ------------------------------------------------------------------------------------- */

/* Counts that differ from token_in_rank. On GPUs the counts have left before the rows are numbered: the dispatch is
 * refused. */
static void wrong_counts(struct rank *me) {
  struct team *t = small_team(me);
  for (int odd = 0; odd < me->count; odd++) {
    struct normal *n = make_normal(t, &kRows, 3);
    run_layout(n);
    fetch_tensor(me, n->per_rank);
    finish(me);
    int32_t tokens = ints(n->per_rank)[me->count - 1];
    if (me->index == odd) {
      ints(n->per_rank)[me->count - 1]++;
      send_tensor(me, n->per_rank);
    }
    run_notify(n);
    finish(me);
    uint32_t op = DK_OP_NOTIFY;
    if (!host_library()) {
      op = DK_OP_DISPATCH;
      expect_no_refusal(t);
      expect(me, n->counts->seq == n->notify_call, "the counts of a notify that is refused later");
      dk_dispatch_params d = dispatch_params(n, 0);
      d.exchange = n->notify_call;
      CALL(me, dispatch, &d);
      finish(me);
    }
    dk_failure f = expect_refusal(t, DK_EINVAL, op, odd, DK_FIELD_TOKENS_PER_RANK);
    if (me->index == odd) expect(me, f.expected == tokens, "the record: %ld", (long)f.expected);
    expect(me, f.seen == f.expected + 1, "the record: %ld, %ld", (long)f.expected, (long)f.seen);
    if (host_library())
      expect(me, n->counts->num_recv_tokens == -1 && n->counts->seq == n->notify_call, "a refused notify left counts");
    expect_healthy(t);
    meet(me);
    dispatch_and_check(n);
    expect_no_refusal(t);
    meet(me);
  }
}

/* A rank has no memory for its rows: the others, which wait for it in the dispatch, refuse that and go on. */
static void cancelled(struct rank *me) {
  struct team *t = small_team(me);
  for (int odd = 0; odd < me->count; odd++) {
    struct normal *n = make_normal(t, &kRows, 3);
    run_layout(n);
    run_notify(n);
    await_counts(n);
    dk_dispatch_params d = dispatch_params(n, 0);
    d.exchange = n->notify_call;
    if (me->index == odd) {
      d.flags = DK_DISPATCH_CANCELLED;
      d.reason = DK_ENOMEM;
      d.num_tokens = d.num_recv_tokens = d.num_scales = d.num_topk = d.num_experts = 0;
      d.x = d.scales = d.topk_idx = d.topk_weights = d.send_head = 0;
      d.recv_x = d.recv_scales = d.recv_topk_idx = d.recv_topk_weights = d.recv_src_idx = 0;
      d.recv_segment = -1;
    }
    CALL(me, dispatch, &d);
    finish(me);
    if (me->index != odd) {
      dk_failure f = expect_refusal(t, DK_EINVAL, DK_OP_DISPATCH, odd, DK_FIELD_CANCELLED);
      expect(me, f.seen == DK_ENOMEM, "the reason is %ld", (long)f.seen);
    }
    expect_healthy(t);
    expect_no_refusal(t);
    meet(me);
    dispatch_and_check(n);
    meet(me);
  }
}

/* An index outside [-1, E) in a dispatch. On GPUs it counts as -1, and its rank says so. */
static void wrong_index(struct rank *me) {
  struct team *t = small_team(me);
  for (int odd = 0; odd < me->count; odd++) {
    struct normal *n = make_normal(t, &kRows, 3);
    run_layout(n);
    run_notify(n);
    await_counts(n);
    finish(me);
    int64_t right = ((int64_t *)n->idx.host)[7], wrong = odd ? -2 : kRows.experts;
    if (me->index == odd) {
      ((int64_t *)n->idx.host)[7] = wrong;
      send_tensor(me, n->idx);
    }
    run_dispatch(n, 0);
    finish(me);
    if (me->index == odd || host_library()) {
      dk_failure f = expect_refusal(t, DK_EINVAL, DK_OP_DISPATCH, odd, DK_FIELD_TOPK_IDX);
      expect(me, f.expected == kRows.experts && f.seen == wrong, "the record: %ld, %ld", (long)f.expected,
             (long)f.seen);
    }
    expect_healthy(t);
    expect_no_refusal(t);
    meet(me);
    if (me->index == odd) {
      ((int64_t *)n->idx.host)[7] = right;
      send_tensor(me, n->idx);
    }
    dispatch_and_check(n);
    meet(me);
  }
}

/* Nobody raises them: the first ones stay, and no memory past them is written. */
static void many_refusals(struct rank *me) {
  struct team *t = small_team(me);
  struct normal *n = make_normal(t, &kRows, 3);
  finish(me);
  ((int64_t *)n->idx.host)[0] = kRows.experts;
  send_tensor(me, n->idx);
  for (int i = 0; i < DK_MAX_REFUSALS + 3; i++) run_layout(n);
  finish(me);
  expect_healthy(t);
  for (int i = 0; i < DK_MAX_REFUSALS; i++)
    expect(me, t->status->refusals[i].code == DK_EINVAL && t->status->refusals[i].call == (uint64_t)i + 1,
           "entry %d is of call %lu", i, (unsigned long)t->status->refusals[i].call);
}

/* ---- Low latency ------------------------------------------------------------------------------------------------- */

static const struct ll_spec kLowLatency = {
    .tokens = 8, .max_tokens = 8, .hidden = 256, .experts = 12, .topk = 3, .index_bytes = 8};
enum ll_change { RANGE_HUGE, RANGE_COUNT, RANGE_ROWS, SOURCE_HUGE, SOURCE_ORDER, INDEX };
static const enum ll_change kRangeHuge = RANGE_HUGE, kRangeCount = RANGE_COUNT, kRangeRows = RANGE_ROWS,
                            kSourceHuge = SOURCE_HUGE, kSourceOrder = SOURCE_ORDER, kIndex = INDEX;

static uint32_t change_ll(struct ll *l, enum ll_change change) {
  int64_t *range = l->layout_range.host, entries = (int64_t)(l->layout_range.bytes / 8);
  for (int64_t i = 0; i < entries && change <= RANGE_ROWS; i++) {
    if (change == RANGE_HUGE) range[i] = (int64_t)1 << 40;
    if (change == RANGE_COUNT) range[i] |= kLowLatency.max_tokens + 1;
    if (change == RANGE_ROWS) range[i] = (int64_t)l->rows << 32 | 1;
  }
  for (int64_t i = 0; i < entries && change >= SOURCE_HUGE && change <= SOURCE_ORDER; i++) {
    int64_t first = range[i] >> 32, count = range[i] & 0xffffffff;
    int32_t *source = ints(l->src_info) + i / l->team->me->count * l->rows + first;
    if (change == SOURCE_HUGE && count) source[count - 1] = kLowLatency.max_tokens;
    if (change == SOURCE_ORDER && count > 1) source[1] = source[0];
  }
  if (change == INDEX) ((int64_t *)l->idx.host)[3] = kLowLatency.experts;
  return change <= RANGE_ROWS ? DK_FIELD_LAYOUT_RANGE : change <= SOURCE_ORDER ? DK_FIELD_SRC_INFO : DK_FIELD_TOPK_IDX;
}

/* A handle that no dispatch has left, or other indices. */
static void changed_ll_handle(struct rank *me) {
  enum ll_change change = *(const enum ll_change *)me->test->arg;
  if (!host_library()) skip(me, "on GPUs the numbers are bounded where they are used, and peers wait for their rows");
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  struct ll *l = make_ll(t, &kLowLatency, 3);
  for (int odd = 0; odd < me->count; odd++) {
    ll_round(l, 5);
    struct tensor all[] = {l->layout_range, l->src_info, l->idx};
    void *right[3];
    for (int i = 0; i < 3; i++) {
      right[i] = scratch(me, all[i].bytes);
      fetch_tensor(me, all[i]);
      finish(me);
      memcpy(right[i], all[i].host, all[i].bytes);
    }
    uint32_t field = 0;
    if (me->index == odd) {
      field = change_ll(l, change);
      for (int i = 0; i < 3; i++) send_tensor(me, all[i]);
    }
    run_ll_combine(l, DK_PHASE_BOTH, 2);
    finish(me);
    expect_healthy(t);
    expect_refusal(t, DK_EINVAL, DK_OP_LL_COMBINE, odd, field ? field : t->status->refusals[0].field);
    expect_nan(l);
    for (int i = 0; i < 3; i++) {
      memcpy(all[i].host, right[i], all[i].bytes);
      send_tensor(me, all[i]);
    }
    finish(me);
    meet(me);
    ll_round(l, 6);
    meet(me);
  }
}

enum { kLongRow = 1024 };
/* On GPUs rows of a combine are on their way when its indices are seen: the rank has no sum for that token, says so
 * once, and the team goes on, also where the rows came late, and where shapes and slots change. */
static void wrong_index_on_a_device(struct rank *me) {
  if (host_library()) skip(me, "on the host every rank refuses the call");
  struct ll_spec specs[] = {kLowLatency, kLowLatency}, other = kLowLatency;
  specs[1].weights = true;                      /* else combine sends them */
  specs[0].hidden = specs[1].hidden = kLongRow; /* a row is many warps' work: parts of it come after its word */
  other.hidden = 128;
  other.format = DK_FORMAT_FP8;
  other.combine_flags = DK_LL_LOGFMT;
  struct team *t = make_ll_team(me, &specs[0], 0);
  struct ll *small = make_ll(t, &other, 9);
  for (int turn = 0; turn < 4; turn++) {
    struct ll *l = make_ll(t, &specs[turn % 2], 3);
    bool halves = turn == 3;
    for (uint64_t again = 0; again <= (uint64_t)(turn == 2); again++) {
      ll_dispatch_and_answer(l, 5 + again);
      fetch_tensor(me, l->idx);
      finish(me);
      int64_t right = ((int64_t *)l->idx.host)[3];
      int64_t wrong = turn % 2 ? -7 : kLowLatency.experts;
      if (me->index == turn % me->count) {
        ((int64_t *)l->idx.host)[3] = wrong;
        send_tensor(me, l->idx);
        l->voided = 1 + 3 / kLowLatency.topk;
      }
      if (halves) run_ll_combine(l, DK_PHASE_SEND, 2);
      run_ll_combine(l, halves ? DK_PHASE_RECV : DK_PHASE_BOTH, 2);
      check_ll_combine(l);
      if (l->voided) {
        dk_failure f = expect_refusal(t, DK_EINVAL, DK_OP_LL_COMBINE, me->index, DK_FIELD_TOPK_IDX);
        expect(me, f.seen == wrong && f.expected == kLowLatency.experts, "the record: index %ld", (long)f.seen);
        const uint16_t *row = (const uint16_t *)l->out.host + (l->voided - 1) * kLongRow;
        for (int h = 0; h < kLongRow; h++) expect(me, bf16_is_nan(row[h]), "channel %d is no NaN", h);
        ((int64_t *)l->idx.host)[3] = right;
        send_tensor(me, l->idx);
        l->voided = 0;
      }
      expect_no_refusal(t);
    }
    for (uint64_t round = 0; round < 2; round++) {
      ll_round(l, 7 + round);
      ll_round(small, 7 + round);
    }
    ll_round_in_halves(l, 20);
    expect_no_refusal(t);
  }
}

/* The send half is refused; the receive half says so, once. */
static void refused_in_halves(struct rank *me) {
  if (!host_library()) skip(me, "on GPUs a wrong index counts as -1");
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  struct ll *l = make_ll(t, &kLowLatency, 3);
  finish(me);
  int64_t right = ((int64_t *)l->idx.host)[3];
  if (me->index == 0) ((int64_t *)l->idx.host)[3] = -2;
  send_tensor(me, l->idx);
  run_ll_dispatch(l, DK_PHASE_SEND, 0);
  finish(me);
  expect_no_refusal(t);
  run_ll_dispatch(l, DK_PHASE_RECV, 0);
  finish(me);
  expect_refusal(t, DK_EINVAL, DK_OP_LL_DISPATCH, 0, DK_FIELD_TOPK_IDX);
  expect_no_rows(l);
  ((int64_t *)l->idx.host)[3] = right;
  send_tensor(me, l->idx);
  meet(me);
  for (uint64_t round = 0; round < 4; round++) ll_round_in_halves(l, round);
}

/* ---- Ranks that come late ---------------------------------------------------------------------------------------- */

/* A rank that comes after the others gave up finds all their messages, and is not told of success. */
static void late_rank(struct rank *me) {
  if (!host_library()) skip(me, "a failed rank tells its peers through the engine alone");
  struct team *t = small_team(me);
  run_barrier(t);
  finish(me);
  meet(me);
  if (me->index > 0) {
    t->timeout_ns = soon_ns();
    run_barrier(t);
    finish(me);
    expect_failure(t, DK_ETIMEOUT, DK_OP_BARRIER, 0);
  }
  meet(me);
  if (me->index > 0) return;
  run_barrier(t);
  finish(me);
  expect_failure(t, DK_EABORTED, DK_OP_BARRIER, -2);
  const dk_failure *f = &t->status->failure;
  expect(me, f->peer > 0 && f->expected == DK_ETIMEOUT && f->seen == DK_OP_BARRIER,
         "peer %d, its code %ld, its call %ld", f->peer, (long)f->expected, (long)f->seen);
}

/* Ranks in different operations that wait for each other: they say so, before the deadline. */
static void crossed(struct rank *me) {
  if (!host_library()) skip(me, "ranks do not see each other's waits");
  struct team *t = make_ll_team(me, &kLowLatency, 0);
  struct ll *l = make_ll(t, &kLowLatency, 3);
  ll_round(l, 4);
  run_barrier(t);
  finish(me);
  meet(me);
  t->timeout_ns = limit_ns(40);
  uint64_t start = now_ns();
  if (me->index == 0)
    run_barrier(t);
  else
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  finish(me);
  uint32_t mine = me->index == 0 ? DK_OP_BARRIER : DK_OP_LL_DISPATCH;
  expect_failure(t, DK_EMISMATCH, mine, !me->index);
  const dk_failure *f = &t->status->failure;
  expect(me, f->field == DK_FIELD_OPERATION && f->expected == mine && f->expected + f->seen == 13, "%ld and %ld",
         (long)f->expected, (long)f->seen);
  expect(me, now_ns() - start < t->timeout_ns / 2, "it took %.1f s", (double)(now_ns() - start) * 1e-9);
}

#define HANDLE(name, change, ranks)                                                                                  \
  {"refused/dispatch, " name, changed_handle, ranks, &(const struct mutation){change, DK_OP_DISPATCH}, QUICK, 0, 0}, \
      {"refused/combine, " name, changed_handle, ranks, &(const struct mutation){change, DK_OP_COMBINE}, QUICK, 0, 0}
static const uint32_t dispatch = DK_OP_DISPATCH, combine = DK_OP_COMBINE;

static const struct test_case cases[] = {
    HANDLE("matrix huge", MATRIX_HUGE, 3),
    HANDLE("matrix below 0", MATRIX_NEGATIVE, 3),
    HANDLE("matrix of zeros", MATRIX_ZERO, 3),
    HANDLE("matrix all huge, 1 rank", MATRIX_ALL_HUGE, 1),
    HANDLE("matrix all huge", MATRIX_ALL_HUGE, 3),
    HANDLE("matrix descends", MATRIX_DESCENDS, 3),
    HANDLE("head huge, 1 rank", HEAD_HUGE, 1),
    HANDLE("head huge", HEAD_HUGE, 3),
    HANDLE("head of all tokens", HEAD_ALL, 3),
    HANDLE("head INT_MAX", HEAD_MAX, 3),
    HANDLE("head out of order", HEAD_SWAPPED, 3),
    HANDLE("head of none", HEAD_NONE, 3),
    {"refused/dispatch, handles of two exchanges", swapped, 3, &dispatch, QUICK, 0, 0},
    {"refused/combine, handles of two exchanges", swapped, 3, &combine, QUICK, 0, 0},
    {"refused/combine, handles of two exchanges, 2 ranks", swapped, 2, &combine, QUICK, 0, 0},
    {"refused/notify, wrong counts", wrong_counts, 3, NULL, QUICK, 0, 0},
    {"refused/dispatch, cancelled", cancelled, 3, NULL, QUICK, 0, 0},
    {"refused/dispatch, index", wrong_index, 3, NULL, QUICK, 0, 0},
    {"refused/more than are kept", many_refusals, 1, NULL, QUICK, 0, 0},
    {"refused/ll combine, range huge", changed_ll_handle, 3, &kRangeHuge, QUICK, 0, 0},
    {"refused/ll combine, range of too many rows", changed_ll_handle, 3, &kRangeCount, QUICK, 0, 0},
    {"refused/ll combine, range past the rows", changed_ll_handle, 3, &kRangeRows, QUICK, 0, 0},
    {"refused/ll combine, source token B", changed_ll_handle, 3, &kSourceHuge, QUICK, 0, 0},
    {"refused/ll combine, sources out of order", changed_ll_handle, 3, &kSourceOrder, QUICK, 0, 0},
    {"refused/ll combine, index E", changed_ll_handle, 3, &kIndex, QUICK, 0, 0},
    {"refused/ll combine, index E on a device", wrong_index_on_a_device, 3, NULL, QUICK, 0, 0},
    {"refused/ll dispatch in halves", refused_in_halves, 3, NULL, QUICK, 0, 0},
    {"refused/different operations", crossed, 2, NULL, QUICK, 0, 0},
    {"refused/a late rank is not told of success", late_rank, 3, NULL, QUICK, 0, 0},
};
GROUP(refusal_cases);
