/* case_ll_copy.c - reruns low-latency cases where rows of send halves cross by copy engines: in such teams
 * run_ll_dispatch and run_ll_combine issue whole calls mostly as two halves. */
#include <string.h>

#include "lowlat.h"
#include "rerun_on_nodes.h"

static const struct team_spec copies = {.flags = DK_TEAM_LL_COPY},
                              weighted = {.flags = DK_TEAM_LL_COPY, .weights = true};

#define AGAIN(topic, name, place, ranks, weight) \
  {topic "/" name, rerun_on_nodes, ranks, &(const struct rerun){name, &place}, weight, DK_CAP_LL_COPY, 0}
#define CASE(name, ranks, weight) AGAIN("ll copy", name, copies, ranks, weight)
#define LONG(name, ranks, weight) \
  AGAIN("ll copy at length", name, copies, ranks, weight) /* emulated: `make test-full` */
#define WITH_WEIGHTS(name, ranks, weight) AGAIN("ll copy/weights sent along", name, weighted, ranks, weight)

/* Ways of a combine. */
static const struct ll_spec sent_along = {.weights = true}, not_sent = {0}, coded = {.combine_flags = DK_LL_LOGFMT},
                            coded_sent_along = {.weights = true, .combine_flags = DK_LL_LOGFMT};

/* Shapes that grow need more memory for rows on their way; the old one stays, and calls in flight with it. */
static void growing(struct rank *me) {
  struct ll_spec small = {.tokens = 3,
                          .max_tokens = 4,
                          .hidden = 128,
                          .experts = 2 * me->count,
                          .topk = 2,
                          .index_bytes = 8},
                 large = small;
  large.tokens = 30;
  large.max_tokens = 32;
  large.hidden = 1024;
  large.format = DK_FORMAT_FP8;
  struct team *t = make_ll_team(me, &large, DK_TEAM_LL_COPY);
  for (uint64_t round = 0; round < 4; round++) {
    struct mark mark = set_mark(me);
    struct ll *first = make_ll(t, &small, round), *second = make_ll(t, &large, round + 10);
    run_ll_dispatch(first, DK_PHASE_SEND, 0);
    run_ll_dispatch(second, DK_PHASE_SEND, 1);
    run_ll_dispatch(second, DK_PHASE_RECV, 1);
    run_ll_dispatch(first, DK_PHASE_RECV, 0);
    check_ll_dispatch(first);
    check_ll_dispatch(second);
    back_to(me, mark);
  }
}

/* A clean comes after the copies of a send whose receive half never comes. */
static void lost_hook(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 9, .max_tokens = 9, .hidden = 256, .experts = 3 * me->count, .topk = 3, .index_bytes = 4};
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 5; round++) {
    new_ll_payload(l, round);
    run_ll_dispatch(l, DK_PHASE_SEND, 0); /* whose receive half never comes */
    run_clean(t, spec.max_tokens, spec.hidden, spec.experts);
    new_ll_payload(l, 100 + round);
    ll_round(l, round);
  }
}

/* Calls of two routings in turn, in each of the slots: where a token was for a rank, and then is not, the next call
 * that sends it there again brings its own row, and so does the next combine. Rank 0 is late, so that the others look
 * for its rows before they come. `arg`: of the combines; NULL: dispatches alone. */
static void routings_in_turn(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 14, .max_tokens = 14, .hidden = 256, .experts = 2 * me->count, .topk = 2, .index_bytes = 8};
  const struct ll_spec *way = me->test->arg;
  if (way) {
    spec.weights = way->weights;
    spec.combine_flags = way->combine_flags;
  }
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *both[2] = {make_ll(t, &spec, 3), make_ll(t, &spec, 4)};
  for (uint64_t round = 0; round < 12; round++) {
    struct ll *l = both[round / 2 % 2];
    new_ll_payload(l, round);
    if (me->index == 0) pause_ms(3);
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
    check_ll_dispatch(l);
    if (!way) continue;
    make_expert_rows(l, round);
    if (me->index == 0) pause_ms(3);
    run_ll_combine(l, DK_PHASE_SEND, 2);
    run_ll_combine(l, DK_PHASE_RECV, 2);
    check_ll_combine(l);
  }
}

/* Sums are made at the experts' rank in halves, too: the bits are those of a whole call, whether the dispatch brought
 * the weights or the combine does. The third combine of three is the whole one (run_ll_combine). */
static void same_bits(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 14, .max_tokens = 16, .hidden = 384, .experts = 3 * me->count, .topk = 5, .index_bytes = 8};
  const struct ll_spec *way = me->test->arg;
  spec.weights = way->weights;
  spec.combine_flags = way->combine_flags;
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 3; round++) {
    ll_dispatch_and_answer(l, round);
    void *first = scratch(me, l->out.bytes + 1);
    for (int i = 0; i < 3; i++) {
      poison(me, l->out);
      run_ll_combine(l, DK_PHASE_BOTH, 2);
      check_ll_combine(l);
      if (i == 0) memcpy(first, l->out.host, l->out.bytes);
      expect(me, !memcmp(first, l->out.host, l->out.bytes), "combine %d gave other bits than the first", i);
    }
  }
}

/* The send half ends while the weights that the sums need are not there. Their kernel runs beside another call. */
static void late_weights(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 10, .max_tokens = 12, .hidden = 256, .experts = 2 * me->count, .topk = 3, .index_bytes = 4};
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *l = make_ll(t, &spec, 3), *other = make_ll(t, &spec, 4);
  for (uint64_t round = 0; round < 4; round++) {
    ll_dispatch_and_answer(l, round);
    new_ll_payload(other, round);
    meet(me);
    if (me->index != 0) {
      run_ll_combine(l, DK_PHASE_SEND, 2);
      finish(me);
    }
    meet(me);
    if (me->index == 0) run_ll_combine(l, DK_PHASE_SEND, 2);
    run_ll_dispatch(other, DK_PHASE_SEND, 1);
    run_ll_dispatch(other, DK_PHASE_RECV, 1);
    check_ll_dispatch(other);
    run_ll_combine(l, DK_PHASE_RECV, 2);
    check_ll_combine(l);
  }
}

/* A team ends soon, though its sums wait for a rank that does not call. */
static void destroyed(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 10, .max_tokens = 12, .hidden = 256, .experts = 2 * me->count, .topk = 3, .index_bytes = 4};
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *l = make_ll(t, &spec, 3);
  ll_dispatch_and_answer(l, 1);
  meet(me);
  if (me->index != 0) run_ll_combine(l, DK_PHASE_SEND, 2);
  finish(me);
  uint64_t start = now_ns();
  dk_team_destroy_params p = {.size = sizeof p, .team = t->handle};
  CALL(me, team_destroy, &p);
  t->handle = 0;
  expect(me, now_ns() - start < limit_ns(3), "it took %lu ms to destroy the team",
         (unsigned long)((now_ns() - start) / 1000000));
  meet(me); /* copies go to the others' blocks */
}

/* After a clean the numbers of dispatches have a gap, so that no headers are found for sums: each expert's row goes by
 * itself, though copies follow. Two micro-batches, each with rows of its own. */
static void no_headers(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 13, .max_tokens = 15, .hidden = 256, .experts = 3 * me->count, .topk = 4, .index_bytes = 8};
  const struct ll_spec *way = me->test->arg;
  spec.weights = way->weights;
  spec.combine_flags = way->combine_flags;
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *both[2] = {make_ll(t, &spec, 3), make_ll(t, &spec, 4)};
  for (uint64_t round = 0; round < 6; round++) {
    bool cleaned = round % 3 != 2;
    for (int i = 0; i < 2; i++) new_ll_payload(both[i], round);
    for (uint32_t i = 0; i < 2; i++) run_ll_dispatch(both[i], DK_PHASE_BOTH, i);
    for (int i = 0; i < 2; i++) check_ll_dispatch(both[i]);
    for (int i = 0; i < 2; i++) make_expert_rows(both[i], 10 * round + (uint64_t)i);
    if (cleaned) run_clean(t, spec.max_tokens, spec.hidden, spec.experts);
    for (uint32_t i = 0; i < 2; i++) run_ll_combine(both[i], DK_PHASE_SEND, 2 + i);
    for (uint32_t i = 0; i < 2; i++) run_ll_combine(both[i], DK_PHASE_RECV, 2 + i);
    for (int i = 0; i < 2; i++) check_ll_combine(both[i]);
  }
}

static const struct test_case cases[] = {
    CASE("ll dispatch/BF16, 1 rank", 1, QUICK),
    CASE("ll dispatch/BF16, 3 ranks", 3, QUICK),
    LONG("ll dispatch/BF16, 8 ranks", 8, USUAL),
    CASE("ll dispatch/8 channels", 3, QUICK),
    CASE("ll dispatch/296 channels", 3, QUICK),
    CASE("ll dispatch/everything -1", 3, QUICK),
    CASE("ll dispatch/duplicates", 3, QUICK),
    CASE("ll dispatch/a rank without tokens, one without rows", 4, QUICK),
    CASE("ll dispatch/rows of ones", 3, QUICK),
    CASE("ll dispatch/with weights", 3, QUICK),
    CASE("ll dispatch/index E", 2, QUICK),
    CASE("ll FP8/512 channels, 4 ranks", 4, QUICK),
    CASE("ll FP8/2432 channels", 3, QUICK),
    LONG("ll FP8/UE8M0, 512 channels", 4, USUAL),
    CASE("ll FP4/2432 channels", 3, QUICK),
    CASE("ll FP4/cast, 2432 channels", 3, QUICK),
    CASE("ll combine/1 rank", 1, QUICK),
    CASE("ll combine/4 ranks", 4, QUICK),
    LONG("ll combine/8 ranks", 8, USUAL),
    CASE("ll combine/7 tokens of 64, int32 indices", 3, QUICK),
    CASE("ll combine/8 channels", 3, QUICK),
    CASE("ll combine/296 channels", 3, QUICK),
    LONG("ll combine/16384 channels", 3, HEAVY),
    CASE("ll combine/top-32", 2, QUICK),
    CASE("ll combine/after FP8", 3, QUICK),
    CASE("ll combine/duplicates", 3, QUICK),
    CASE("ll combine/new weights", 3, QUICK),
    CASE("ll combine/new weights, duplicates", 2, QUICK),
    CASE("ll combine/everything -1", 3, QUICK),
    CASE("ll combine/a rank without tokens, one without rows", 4, QUICK),
    CASE("ll combine/one hot expert", 4, QUICK),
    CASE("ll combine/no tokens at all", 3, QUICK),
    CASE("ll combine/weights sent along", 3, QUICK),
    LONG("ll combine/weights sent along, 8 ranks", 8, HEAVY),
    LONG("ll combine/weights sent along, FP8", 3, USUAL),
    CASE("ll combine/weights sent along, duplicates", 3, QUICK),
    CASE("ll combine/weights sent along, unreduced", 3, QUICK),
    CASE("ll combine/LogFMT", 3, QUICK),
    CASE("ll combine/LogFMT, 128 channels", 4, QUICK),
    LONG("ll combine/LogFMT, 7168 channels", 2, USUAL),
    CASE("ll combine/LogFMT, duplicates", 3, QUICK),
    CASE("ll combine/LogFMT, weights", 3, QUICK),
    CASE("ll combine/LogFMT, weights, unreduced", 3, QUICK),
    CASE("ll combine/zero copy", 3, QUICK),
    CASE("ll combine/zero copy, weights sent along", 3, QUICK),
    CASE("ll combine/one handle, five times", 3, QUICK),
    CASE("ll combine/the same bits every time", 4, QUICK),
    CASE("ll combine/NaN stays with its token", 3, QUICK),
    CASE("refused/ll combine, index E on a device", 3, QUICK),
    CASE("ll order/halves", 3, QUICK),
    CASE("ll order/waits are counted", 3, QUICK),
    CASE("ll order/two sends, first in, first out", 3, QUICK),
    CASE("ll order/two sends, received the other way round", 3, QUICK),
    CASE("ll order/two micro-batches", 4, QUICK),
    LONG("ll order/thirty calls, slow ranks", 4, USUAL),
    LONG("ll order/forty calls enqueued at once", 4, USUAL),
    LONG("ll order/shapes in turn", 3, USUAL),
    LONG("ll order/third send", 2, QUICK),
    LONG("random/low latency, 4 ranks", 4, USUAL),
    LONG("random/low latency, 5 ranks", 5, USUAL),
    LONG("leaving/low-latency combine", 3, QUICK),
    CASE("statistics/counts and bytes", 3, QUICK),
    LONG("statistics/two halves are one call", 2, QUICK),
    LONG("statistics/each half has its record", 2, QUICK),
    CASE("mask/a masked rank gets nothing", 3, QUICK),
    LONG("mask/masks are per rank", 3, QUICK),
    CASE("mask/lifted by update", 3, QUICK),
    LONG("shrink/a rank never calls", 3, QUICK),
    CASE("shrink/a rank leaves before combine", 3, QUICK),
    CASE("shrink/a rank leaves between the halves", 3, QUICK),
    CASE("shrink/a death during the wait", 3, QUICK),
    LONG("shrink/a rank misses a clean", 3, QUICK),
    LONG("shrink/a late rank, masks lifted", 3, QUICK),
    LONG("shrink/a late rank, cleaned", 3, QUICK),
    LONG("shrink/a rank that missed calls, masks lifted", 3, QUICK),
    WITH_WEIGHTS("mask/a masked rank gets nothing", 3, QUICK),
    WITH_WEIGHTS("mask/masks are per rank", 3, QUICK),
    WITH_WEIGHTS("mask/lifted by update", 3, QUICK),
    WITH_WEIGHTS("shrink/a rank leaves before combine", 3, QUICK),
    WITH_WEIGHTS("shrink/a rank leaves between the halves", 3, QUICK),
    WITH_WEIGHTS("shrink/a death during the wait", 3, QUICK),
    WITH_WEIGHTS("shrink/a late rank, masks lifted", 3, USUAL),
    WITH_WEIGHTS("shrink/a rank that missed calls, masks lifted", 3, USUAL),
    CASE("mismatch/low latency, format", 3, QUICK),
    LONG("timeout/low-latency dispatch", 3, QUICK),
    CASE("timeout/low-latency combine", 3, QUICK),
    CASE("abort/low-latency dispatch", 3, QUICK),
    CASE("abort/low-latency combine", 3, QUICK),
    {"ll copy/sums in halves", same_bits, 4, &not_sent, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/sums in halves, weights sent along", same_bits, 3, &sent_along, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/sums in halves, LogFMT", same_bits, 3, &coded, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/sums in halves, LogFMT, weights sent along", same_bits, 3, &coded_sent_along, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/late weights", late_weights, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/destroyed beside sums", destroyed, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/no headers", no_headers, 3, &not_sent, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/no headers, weights sent along", no_headers, 3, &sent_along, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/no headers, LogFMT", no_headers, 3, &coded, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/no headers, LogFMT, weights sent along", no_headers, 3, &coded_sent_along, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/shapes that grow", growing, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/sends that are cleaned away", lost_hook, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/routings in turn", routings_in_turn, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/routings in turn, combine", routings_in_turn, 3, &not_sent, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/routings in turn, combine, weights sent along", routings_in_turn, 3, &sent_along, QUICK, DK_CAP_LL_COPY,
     0},
    {"ll copy/routings in turn, combine, LogFMT", routings_in_turn, 3, &coded, QUICK, DK_CAP_LL_COPY, 0},
};
GROUP(ll_copy_cases);
