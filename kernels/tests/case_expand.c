/* case_expand.c - calls with a routing: expanded rows in the order of local experts, plain ones in the order of source
 * ranks, and sums in the order of the choices. */
#include "routed.h"

#define ROOMY ((uint64_t)4 << 20)

/* What a specification leaves at 0: rows in BF16, no alignment. */
static void complete(struct routed_spec *spec) {
  if (spec->row_bytes == 0) spec->row_bytes = 2 * (uint64_t)spec->hidden;
  if (spec->alignment == 0) spec->alignment = 1;
}

/* Several calls of a team, each run once. */
static void make_calls(struct team *t, struct routed_spec *specs, struct routed **calls, int count) {
  for (int i = 0; i < count; i++) {
    complete(&specs[i]);
    calls[i] = make_routed(t, &specs[i], (uint64_t)i);
    run_routed(calls[i]);
  }
}

/* A call, a cached dispatch of other rows, and the sums of that. */
static void run_spec(struct rank *me, struct routed_spec spec) {
  complete(&spec);
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  uint64_t longest = spec.row_bytes + 4 * (uint64_t)spec.scales,
           sum = 2 * (uint64_t)spec.hidden + 4 * (uint64_t)spec.topk;
  if (spec.unreduced) sum *= (uint64_t)spec.topk;
  if (spec.nvl_bytes == 0) team.min_row = (longest > sum ? longest : sum) + 12 * (uint64_t)spec.topk;
  struct team *t = make_team(me, &team);
  for (uint64_t round = 0; round < 2; round++) {
    struct mark mark = set_mark(me);
    struct routed *n = make_routed(t, &spec, settings.seed + round);
    run_routed(n);
    new_routed_payload(n, settings.seed + 77 + round);
    dk_dispatch_params again = routed_dispatch(n, DK_DISPATCH_CACHED);
    CALL(me, dispatch, &again);
    check_routed_dispatch(n, DK_DISPATCH_CACHED);
    back_to(me, mark);
  }
}

static void shape(struct rank *me) { run_spec(me, *(const struct routed_spec *)me->test->arg); }

#define SPEC(name, ...)                    \
  static const struct routed_spec name = { \
      .tokens = 40, .experts = 4, .topk = 4, .hidden = 64, .weights = true, .nvl_bytes = ROOMY, __VA_ARGS__}
SPEC(usual, .alignment = 8);
SPEC(fp8, .row_bytes = 512, .scales = 5, .columns = true, .alignment = 4, .padding = true);
SPEC(fp8_many, .row_bytes = 128, .scales = 5, .columns = true, .alignment = 4, .tokens = 600);
SPEC(fp8_rows, .row_bytes = 512, .scales = 3, .index_bytes = 4, .biases = 1);
SPEC(padded, .alignment = 16, .padding = true, .biases = 2);
SPEC(unreduced, .unreduced = true, .biases = 1, .alignment = 2);
SPEC(unreduced_floor, .unreduced = true, .tokens = 30, .nvl_bytes = 0);
SPEC(bare, .weights = false, .negative = true);
SPEC(duplicates, .pattern = DUPLICATES, .topk = 5, .alignment = 4, .padding = true);
SPEC(duplicates_unreduced, .pattern = DUPLICATES, .topk = 5, .unreduced = true);
SPEC(skewed, .pattern = SKEWED, .biases = 2);
SPEC(silent, .pattern = SILENT_RANK, .alignment = 8, .padding = true);
SPEC(nobody, .pattern = NOBODY, .alignment = 8, .padding = true);
SPEC(no_tokens, .pattern = NO_TOKENS, .alignment = 8);
SPEC(worst, .worst = true, .alignment = 8, .padding = true);
SPEC(worst_fp8, .worst = true, .row_bytes = 256, .scales = 2, .columns = true, .biases = 2);
SPEC(worst_segment, .worst = true, .alignment = 8, .padding = true, .segment = true);
SPEC(segment, .segment = true, .alignment = 4, .scales = 3, .columns = true, .tokens = 60);
SPEC(floor, .tokens = 70, .hidden = 512, .nvl_bytes = 0, .alignment = 4);
SPEC(floor_skewed, .pattern = SKEWED, .tokens = 60, .hidden = 512, .nvl_bytes = 0);
SPEC(many_choices, .experts = 24, .topk = 31, .tokens = 5);
SPEC(many_experts, .experts = 256, .topk = 8, .tokens = 20, .alignment = 4);
SPEC(odd, .experts = 3, .topk = 3, .hidden = 8 * 13, .tokens = 33, .num_sms = 2);
SPEC(wide, .hidden = 16384, .tokens = 8, .topk = 3, .experts = 2);
SPEC(large, .tokens = 110, .experts = 8, .topk = 8, .hidden = 512, .alignment = 16, .padding = true,
     .nvl_bytes = (uint64_t)16 << 20);
SPEC(plain, .plain = true, .alignment = 8, .biases = 1);
SPEC(plain_fp8, .plain = true, .row_bytes = 512, .scales = 5, .columns = true, .negative = true, .index_bytes = 4);
SPEC(plain_bare, .plain = true, .weights = false, .biases = 2);
SPEC(plain_worst, .plain = true, .worst = true);
SPEC(plain_duplicates, .plain = true, .pattern = DUPLICATES, .topk = 5);
SPEC(plain_silent, .plain = true, .pattern = SILENT_RANK);
SPEC(plain_segment, .plain = true, .segment = true, .scales = 3, .columns = true, .tokens = 60);
SPEC(plain_many, .plain = true, .tokens = 600, .row_bytes = 128, .biases = 1);
SPEC(few_slots, .tokens = 200, .hidden = 512, .nvl_bytes = 3 * 64 * 1152);
SPEC(plain_few_slots, .plain = true, .tokens = 200, .hidden = 512, .nvl_bytes = 3 * 64 * 1152);
SPEC(plain_floor, .plain = true, .tokens = 70, .hidden = 512, .nvl_bytes = 0);

#define ONCE(name, ...) SPEC(name, .worst = true, .at_once = true, __VA_ARGS__)
ONCE(once, .alignment = 8);
ONCE(once_padded, .alignment = 16, .padding = true, .biases = 2, .pattern = DUPLICATES, .topk = 5);
ONCE(once_fp8, .row_bytes = 512, .scales = 5, .columns = true, .alignment = 4, .padding = true);
ONCE(once_silent, .pattern = SILENT_RANK, .alignment = 8, .padding = true, .weights = false);
ONCE(once_nobody, .pattern = NOBODY, .alignment = 8, .padding = true);
ONCE(once_no_tokens, .pattern = NO_TOKENS, .alignment = 8);
ONCE(once_skewed, .pattern = SKEWED, .tokens = 100, .num_sms = 2);
ONCE(once_wide, .hidden = 16384, .tokens = 8, .topk = 3, .experts = 2);
ONCE(once_many_experts, .experts = 256, .topk = 8, .tokens = 20, .alignment = 4);
ONCE(once_plain, .plain = true, .alignment = 8, .biases = 1);
ONCE(once_plain_fp8, .plain = true, .row_bytes = 512, .scales = 40, .columns = true, .negative = true, .index_bytes = 4,
     .tokens = 130, .num_sms = 1);
ONCE(once_plain_bare, .plain = true, .weights = false, .pattern = DUPLICATES, .topk = 5, .segment = true);
ONCE(once_plain_silent, .plain = true, .pattern = SILENT_RANK);

/* Twenty calls of different shapes without a wait in between, over two handles. */
static void back_to_back(struct rank *me) {
  struct team_spec team = {.nvl_bytes = 1 << 18, .trace = -1};
  struct team *t = make_team(me, &team);
  struct routed_spec specs[3] = {usual, fp8_rows, plain};
  struct routed *calls[3];
  make_calls(t, specs, calls, 3);
  for (uint64_t round = 0; round < 7; round++) {
    for (int i = 0; i < 3; i++) new_routed_payload(calls[i], 100 * round + (uint64_t)i);
    for (int i = 0; i < 3; i++) {
      dk_dispatch_params p = routed_dispatch(calls[i], DK_DISPATCH_CACHED);
      CALL(me, dispatch, &p);
    }
    for (int i = 0; i < 3; i++) check_routed_dispatch(calls[i], DK_DISPATCH_CACHED);
  }
}

/* An expanded handle also serves a dispatch in the plain layout. */
static void plain_by_expanded_handle(struct rank *me) {
  struct team_spec team = {.nvl_bytes = ROOMY, .trace = -1};
  struct team *t = make_team(me, &team);
  struct routed_spec spec = usual, other = plain;
  spec.row_bytes = other.row_bytes = 2 * (uint64_t)spec.hidden;
  spec.alignment = other.alignment = 8;
  struct routed *n = make_routed(t, &spec, 3), *m = make_routed(t, &other, 3);
  run_routed(n);
  dk_dispatch_params p = routed_dispatch(m, DK_DISPATCH_CACHED);
  p.rank_prefix_matrix = n->matrix.at;
  p.send_head = n->head.at;
  CALL(me, dispatch, &p);
  copy(me, m->meta.at, n->meta.at, n->meta.bytes); /* as a cached dispatch leaves it */
  check_routed_dispatch(m, DK_DISPATCH_CACHED);
}

/* Calls at once between others, without a wait in between: each sends before its peers have begun it. */
static void at_once_among_others(struct rank *me) {
  struct team_spec team = {.nvl_bytes = 1 << 20, .trace = -1};
  struct team *t = make_team(me, &team);
  struct routed_spec specs[4] = {once, fp8_rows, once_plain, plain_worst};
  struct routed *calls[4];
  make_calls(t, specs, calls, 4);
  for (uint64_t round = 0; round < 8; round++) {
    for (int i = 0; i < 4; i++) new_routed_payload(calls[i], 100 * round + (uint64_t)i);
    if (round % 2 == 1) run_barrier(t);
    for (int i = 0; i < 4; i++) {
      int which = (i + (int)round) % 4;
      dk_notify_params notify = routed_notify(calls[which]);
      notify.cumulative_stats = 0;
      dk_dispatch_params p = routed_dispatch(calls[which], specs[which].worst ? 0 : DK_DISPATCH_CACHED);
      if (specs[which].at_once)
        p.notify = (uintptr_t)&notify;
      else if (specs[which].worst)
        CALL(me, notify, &notify);
      CALL(me, dispatch, &p);
    }
    for (int i = 0; i < 4; i++) check_routed_dispatch(calls[i], specs[i].worst ? 0 : DK_DISPATCH_CACHED);
  }
}

/* ---- Contents that only kernels see ------------------------------------------------------------------------------ */

static struct routed *small(struct rank *me, struct routed_spec *spec) {
  struct team_spec team = {.nvl_bytes = ROOMY, .trace = -1};
  spec->row_bytes = 2 * (uint64_t)spec->hidden;
  if (spec->alignment == 0) spec->alignment = 1;
  return make_routed(make_team(me, &team), spec, 4);
}

/* The dispatch and the combine after a notify that was refused move nothing, and have nothing to say of their own. */
static void run_after_refusal(struct routed *n) {
  struct rank *me = n->team->me;
  dk_dispatch_params d = routed_dispatch(n, 0);
  CALL(me, dispatch, &d);
  finish(me);
  expect_healthy(n->team);
  expect_no_refusal(n->team);
}

/* An index E on rank 1 ends the notify on all ranks, and the dispatch after it moves nothing. */
static void wrong_index(struct rank *me) {
  struct routed_spec spec = usual;
  struct routed *n = small(me, &spec);
  if (me->index == 1) {
    ((int64_t *)n->idx.host)[7] = n->routing->experts;
    send_tensor(me, n->idx);
  }
  dk_notify_params p = routed_notify(n);
  CALL(me, notify, &p);
  finish(me);
  dk_failure f = expect_refusal(n->team, DK_EINVAL, DK_OP_NOTIFY, 1, DK_FIELD_TOPK_IDX);
  run_after_refusal(n);
  expect(me, f.expected == n->routing->experts && f.seen == n->routing->experts, "the record says %ld of %ld",
         (long)f.seen, (long)f.expected);
  if (me->index == 1) {
    ((int64_t *)n->idx.host)[7] = n->routing->index[1][7];
    send_tensor(me, n->idx);
  }
  for (int e = 0; e < spec.experts; e++) ((int32_t *)n->stats.host)[e] = 100 * e;
  send_tensor(me, n->stats);
  run_routed(n);
}

/* A rank has no memory for its rows: the others, which wait for it in the dispatch, refuse that and go on. */
static void cancelled(struct rank *me) {
  struct routed_spec spec = *(const struct routed_spec *)me->test->arg;
  struct routed *n = small(me, &spec);
  dk_notify_params p = routed_notify(n);
  CALL(me, notify, &p);
  await_routed_counts(n);
  dk_dispatch_params d = routed_dispatch(n, 0);
  d.exchange = n->notify_call;
  if (me->index == 1) {
    d.flags = DK_DISPATCH_CANCELLED;
    d.reason = DK_ENOMEM;
    d.num_tokens = d.num_recv_tokens = d.num_expanded_tokens = 0;
    d.x = d.scales = d.topk_idx = d.topk_weights = d.send_head = d.dst_slot = 0;
    d.recv_x = d.recv_scales = d.recv_topk_idx = d.recv_topk_weights = d.recv_src_metadata = 0;
  }
  CALL(me, dispatch, &d);
  finish(me);
  if (me->index != 1) {
    dk_failure f = expect_refusal(n->team, DK_EINVAL, DK_OP_DISPATCH, 1, DK_FIELD_CANCELLED);
    expect(me, f.seen == DK_ENOMEM, "the reason is %ld", (long)f.seen);
  }
  expect_healthy(n->team);
  expect_no_refusal(n->team);
  for (int e = 0; e < spec.experts; e++) ((int32_t *)n->stats.host)[e] = 100 * e;
  send_tensor(me, n->stats);
  run_routed(n);
}

/* Ranks that were given different alignments, layouts or M end with the name of what differs. */
static const uint32_t kAlignment = DK_FIELD_ALIGNMENT, kRouting = DK_FIELD_ROUTING, kMaxTokens = DK_FIELD_MAX_TOKENS,
                      kOperation = DK_FIELD_OPERATION;
static void mismatch(struct rank *me) {
  uint32_t field = *(const uint32_t *)me->test->arg;
  struct routed_spec spec = usual;
  struct routed *n = small(me, &spec);
  dk_notify_params p = routed_notify(n);
  if (me->index == 1 && field == DK_FIELD_ALIGNMENT) p.expert_alignment *= 2;
  if (me->index == 1 && field == DK_FIELD_ROUTING) p.routing = DK_ROUTING_PLAIN;
  if (me->index == 1 && field == DK_FIELD_MAX_TOKENS) p.num_max_tokens++;
  CALL(me, notify, &p);
  finish(me);
  expect_failure(n->team, DK_EMISMATCH, DK_OP_NOTIFY, -2);
  expect(me, n->team->status->failure.field == field, "the failure is of %s",
         field_name(n->team->status->failure.field));
}

/* Rank 0 has too little room for its expanded rows. */
static void too_few_rows(struct rank *me) {
  struct routed_spec spec = worst;
  spec.pattern = ONE_HOT;
  struct routed *n = small(me, &spec);
  dk_notify_params p = routed_notify(n);
  p.num_worst_expanded = me->index == 0 ? n->expanded - 1 : n->room;
  CALL(me, notify, &p);
  finish(me);
  dk_failure f = expect_refusal(n->team, DK_EINVAL, DK_OP_NOTIFY, 0, DK_FIELD_WORST_EXPANDED);
  run_after_refusal(n);
  expect(me, f.seen == f.expected + 1, "the record says %ld allowed, %ld arrive", (long)f.expected, (long)f.seen);
}

static bool host_library(void) { return library.caps & DK_CAP_HOST_STREAM; }

/* A slot outside the outputs, or one that topk_idx does not know, ends the dispatch on all ranks before a row moves. On
 * GPUs, where rows are on their way by then, the rank fails by that name. */
static const int kHuge = 1 << 28, kNone = -1;
static void wrong_slot(struct rank *me) {
  int value = *(const int *)me->test->arg, at = 0;
  struct routed_spec spec = usual;
  struct routed *n = small(me, &spec);
  run_routed(n);
  while (n->routing->index[me->index][at] < 0) at++;
  int32_t *slot = (int32_t *)n->slot.host + at, right = *slot;
  if (me->index == 1) *slot = value;
  send_tensor(me, n->slot);
  if (!host_library()) n->team->timeout_ns = soon_ns();
  dk_dispatch_params p = routed_dispatch(n, DK_DISPATCH_CACHED);
  CALL(me, dispatch, &p);
  finish(me);
  if (!host_library()) {
    if (me->index == 1) expect_failure(n->team, DK_EINVAL, DK_OP_DISPATCH, 1);
    uint32_t field = n->team->status->failure.field;
    expect(me, me->index != 1 || field == DK_FIELD_DST_SLOT, "the failure is of %s", field_name(field));
    return;
  }
  expect_refusal(n->team, DK_EINVAL, DK_OP_DISPATCH, 1, DK_FIELD_DST_SLOT);
  *slot = right;
  send_tensor(me, n->slot);
  new_routed_payload(n, 9);
  p = routed_dispatch(n, DK_DISPATCH_CACHED);
  CALL(me, dispatch, &p);
  check_routed_dispatch(n, DK_DISPATCH_CACHED);
}

/* The token that came as the first row of rank 1. */
static struct arrival first_of_rank_1(const struct routing *r) {
  struct arrival from = {0, 0};
  while (from.token == r->tokens[from.source] || !goes_to(r, from.source, from.token, 1)) {
    if (++from.token < r->tokens[from.source]) continue;
    from.token = 0;
    from.source++;
  }
  return from;
}

/* A row outside x in the metadata of rank 1 ends the combine on all ranks. On GPUs, where it is found when the row is
 * to be sent, rank 1 refuses its call, and the row's token gets NaN. */
static void wrong_metadata(struct rank *me) {
  struct routed_spec spec = usual;
  struct routed *n = small(me, &spec);
  run_routed(n);
  int k = 0;
  while (n->slots[k] < 0) k++;
  int32_t *entry = (int32_t *)n->meta.host + 2 + k, right = *entry;
  if (me->index == 1) *entry = n->room;
  send_tensor(me, n->meta);
  dk_combine_params p = routed_combine(n);
  CALL(me, combine, &p);
  fetch_tensor(me, n->out);
  finish(me);
  if (host_library() || me->index == 1) {
    dk_failure f = expect_refusal(n->team, DK_EINVAL, DK_OP_COMBINE, 1, DK_FIELD_SRC_METADATA);
    expect(me, f.seen == f.expected, "the record says row %ld of %ld", (long)f.seen, (long)f.expected);
  }
  expect_no_refusal(n->team);
  struct arrival from = first_of_rank_1(n->routing);
  const uint16_t *sum = (uint16_t *)n->out.host + from.token * spec.hidden;
  for (int h = 0; h < spec.hidden && me->index == from.source; h++)
    expect(me, bf16_is_nan(sum[h]), "channel %d of the sum without the row is a number", h);
  *entry = right;
  send_tensor(me, n->meta);
  p = routed_combine(n);
  CALL(me, combine, &p);
  check_routed_combine(n);
}

/* An index E on rank 1 ends the call on all ranks, and so does room for too few expanded rows on rank 0. */
static void at_once_refused(struct rank *me) {
  struct routed_spec spec = once;
  spec.pattern = ONE_HOT;
  struct routed *n = small(me, &spec);
  int64_t right = ((int64_t *)n->idx.host)[7];
  for (int turn = 0; turn < 2; turn++) {
    if (me->index == 1) ((int64_t *)n->idx.host)[7] = turn == 0 ? n->routing->experts : right;
    send_tensor(me, n->idx);
    dk_notify_params p = routed_notify(n);
    if (turn == 1 && me->index == 0) p.num_worst_expanded = n->expanded - 1;
    dk_dispatch_params d = routed_dispatch(n, 0);
    d.notify = (uintptr_t)&p;
    CALL(me, dispatch, &d);
    finish(me);
    expect_refusal(n->team, DK_EINVAL, DK_OP_DISPATCH, turn == 0 ? 1 : 0,
                   turn == 0 ? DK_FIELD_TOPK_IDX : DK_FIELD_WORST_EXPANDED);
    expect_healthy(n->team);
    fetch_tensor(me, n->meta);
    fetch_tensor(me, n->slot);
    finish(me);
    for (int i = 0; i < n->tokens * spec.topk; i++)
      expect(me, ((int32_t *)n->slot.host)[i] == -1, "dst_slot[%d] is set", i);
    for (int i = 0; i < n->rows * (spec.topk + 2); i++)
      expect(me, ((int32_t *)n->meta.host)[i] == -1, "word %d of the metadata of a call that was refused is set", i);
  }
  for (int e = 0; e < spec.experts; e++) ((int32_t *)n->stats.host)[e] = 100 * e;
  send_tensor(me, n->stats);
  run_routed(n);
}

/* One rank makes both calls at once, the others do not; or they have different numbers of tokens. */
static void at_once_mismatch(struct rank *me) {
  uint32_t field = *(const uint32_t *)me->test->arg;
  struct routed_spec spec = once;
  struct routed *n = small(me, &spec);
  dk_notify_params p = routed_notify(n);
  dk_dispatch_params d = routed_dispatch(n, 0);
  if (me->index == 1 && field == DK_FIELD_MAX_TOKENS) d.num_max_tokens = ++p.num_max_tokens;
  d.notify = (uintptr_t)&p;
  if (me->index == 1 && field == DK_FIELD_OPERATION)
    CALL(me, notify, &p);
  else
    CALL(me, dispatch, &d);
  finish(me);
  uint32_t op = me->index == 1 && field == DK_FIELD_OPERATION ? DK_OP_NOTIFY : DK_OP_DISPATCH;
  expect_failure(n->team, DK_EMISMATCH, op, -2);
  dk_failure f = n->team->status->failure;
  expect(me, f.field == field, "the failure is of %s", field_name(f.field));
  expect(me, field != DK_FIELD_OPERATION || f.expected == op, "this rank's operation is %ld", (long)f.expected);
}

#define SHAPE(name, ranks, spec, weight) {"expand/" name, shape, ranks, &spec, weight, 0, 0}
#define AT_ONCE(name, ranks, spec, weight) {"expand/at once, " name, shape, ranks, &spec, weight, DK_CAP_AT_ONCE, 0}
static const struct test_case cases[] = {
    SHAPE("1 rank", 1, usual, QUICK),
    SHAPE("2 ranks", 2, usual, QUICK),
    SHAPE("3 ranks", 3, usual, QUICK),
    SHAPE("8 ranks", 8, usual, USUAL),
    SHAPE("FP8, scales by column, zero padding", 3, fp8, QUICK),
    SHAPE("FP8, scales by column, many rows", 2, fp8_many, QUICK),
    SHAPE("FP8, scales by row, int32 indices", 4, fp8_rows, QUICK),
    SHAPE("zero padding, two biases", 3, padded, QUICK),
    SHAPE("unreduced", 3, unreduced, QUICK),
    SHAPE("unreduced, least memory", 4, unreduced_floor, USUAL),
    SHAPE("no weights, negative numbers", 3, bare, QUICK),
    SHAPE("duplicates", 3, duplicates, QUICK),
    SHAPE("duplicates, unreduced", 2, duplicates_unreduced, QUICK),
    SHAPE("skewed", 4, skewed, USUAL),
    SHAPE("a rank without tokens, one without rows", 4, silent, QUICK),
    SHAPE("everything -1", 3, nobody, QUICK),
    SHAPE("no tokens at all", 3, no_tokens, QUICK),
    SHAPE("worst case", 3, worst, QUICK),
    SHAPE("worst case, FP8", 4, worst_fp8, USUAL),
    SHAPE("least memory", 3, floor, QUICK),
    SHAPE("least memory, skewed", 4, floor_skewed, USUAL),
    SHAPE("rings of 60 rows", 3, few_slots, USUAL),
    SHAPE("top-31", 2, many_choices, USUAL),
    SHAPE("256 experts a rank", 2, many_experts, USUAL),
    SHAPE("rows of 208 bytes", 4, odd, USUAL),
    SHAPE("hidden 16384", 2, wide, USUAL),
    SHAPE("110 tokens, top-8", 4, large, USUAL),
    SHAPE("plain", 3, plain, QUICK),
    SHAPE("plain, FP8, scales by column", 3, plain_fp8, QUICK),
    SHAPE("plain, no weights", 4, plain_bare, USUAL),
    SHAPE("plain, worst case", 3, plain_worst, QUICK),
    SHAPE("plain, duplicates", 2, plain_duplicates, QUICK),
    SHAPE("plain, a rank without tokens", 4, plain_silent, USUAL),
    SHAPE("plain, many rows", 2, plain_many, QUICK),
    SHAPE("plain, least memory", 3, plain_floor, QUICK),
    SHAPE("plain, rings of 60 rows", 3, plain_few_slots, QUICK),
    {"expand/rows straight to their places", shape, 3, &segment, QUICK, DK_CAP_PEER_ROWS, 0},
    {"expand/rows straight to their places, worst case", shape, 4, &worst_segment, USUAL, DK_CAP_PEER_ROWS, 0},
    {"expand/plain, rows straight to their places", shape, 3, &plain_segment, QUICK, DK_CAP_PEER_ROWS, 0},
    AT_ONCE("2 ranks", 2, once, QUICK),
    AT_ONCE("1 rank", 1, once, QUICK),
    AT_ONCE("8 ranks", 8, once, USUAL),
    AT_ONCE("zero padding, duplicates", 3, once_padded, QUICK),
    AT_ONCE("FP8, scales by column", 3, once_fp8, QUICK),
    AT_ONCE("a rank without tokens, one without rows", 4, once_silent, QUICK),
    AT_ONCE("everything -1", 3, once_nobody, QUICK),
    AT_ONCE("no tokens at all", 3, once_no_tokens, QUICK),
    AT_ONCE("skewed", 4, once_skewed, USUAL),
    AT_ONCE("hidden 16384", 2, once_wide, USUAL),
    AT_ONCE("256 experts a rank", 2, once_many_experts, USUAL),
    AT_ONCE("plain", 3, once_plain, QUICK),
    AT_ONCE("plain, FP8, scales by column", 3, once_plain_fp8, QUICK),
    AT_ONCE("plain, rows of a segment", 3, once_plain_bare, QUICK),
    AT_ONCE("plain, a rank without tokens", 4, once_plain_silent, USUAL),
    {"expand/at once among others", at_once_among_others, 3, NULL, QUICK, DK_CAP_AT_ONCE, 0},
    {"expand/at once, refused", at_once_refused, 3, NULL, QUICK, DK_CAP_AT_ONCE, 0},
    {"expand/at once, by one rank alone", at_once_mismatch, 3, &kOperation, QUICK, DK_CAP_AT_ONCE, 0},
    {"expand/at once, other numbers of tokens", at_once_mismatch, 3, &kMaxTokens, QUICK, DK_CAP_AT_ONCE, 0},
    {"expand/back to back", back_to_back, 3, NULL, QUICK, 0, 0},
    {"expand/plain rows by an expanded handle", plain_by_expanded_handle, 3, NULL, QUICK, 0, 0},
    {"expand/refused: index E", wrong_index, 3, NULL, QUICK, 0, 0},
    {"expand/refused: cancelled", cancelled, 3, &usual, QUICK, 0, 0},
    {"expand/refused: plain, cancelled", cancelled, 3, &plain, QUICK, 0, 0},
    {"expand/refused: too few expanded rows", too_few_rows, 3, NULL, QUICK, 0, 0},
    {"expand/refused: slot huge", wrong_slot, 3, &kHuge, QUICK, 0, 0},
    {"expand/refused: slot none", wrong_slot, 3, &kNone, QUICK, 0, 0},
    {"expand/refused: metadata outside x", wrong_metadata, 3, NULL, QUICK, 0, 0},
    {"expand/ranks disagree on the alignment", mismatch, 3, &kAlignment, QUICK, 0, 0},
    {"expand/ranks disagree on the layout", mismatch, 3, &kRouting, QUICK, 0, 0},
    {"expand/ranks disagree on M", mismatch, 3, &kMaxTokens, QUICK, 0, 0},
};
GROUP(expand_cases);
