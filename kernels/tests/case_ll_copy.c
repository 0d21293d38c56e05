/* case_ll_copy.c - reruns low-latency cases where rows of dispatch's send halves cross by copy engines: in such teams
 * run_ll_dispatch issues whole calls mostly as two halves. */
#include "lowlat.h"
#include "rerun_on_nodes.h"

static const struct team_spec copies = {.flags = DK_TEAM_LL_COPY};

#define AGAIN(topic, name, ranks, weight) \
  {topic "/" name, rerun_on_nodes, ranks, &(const struct rerun){name, &copies}, weight, DK_CAP_LL_COPY, 0}
#define CASE(name, ranks, weight) AGAIN("ll copy", name, ranks, weight)
#define LONG(name, ranks, weight) AGAIN("ll copy at length", name, ranks, weight) /* emulated: of `make test-full` */

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
 * that sends it there again brings its own row. Rank 0 is late, so that the others look for its rows before they come.
 */
static void routings_in_turn(struct rank *me) {
  struct ll_spec spec = {
      .tokens = 14, .max_tokens = 14, .hidden = 256, .experts = 2 * me->count, .topk = 2, .index_bytes = 8};
  struct team *t = make_ll_team(me, &spec, DK_TEAM_LL_COPY);
  struct ll *both[2] = {make_ll(t, &spec, 3), make_ll(t, &spec, 4)};
  for (uint64_t round = 0; round < 12; round++) {
    struct ll *l = both[round / 2 % 2];
    new_ll_payload(l, round);
    if (me->index == 0) pause_ms(3);
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
    check_ll_dispatch(l);
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
    CASE("ll combine/4 ranks", 4, QUICK),
    LONG("ll combine/weights sent along, FP8", 3, USUAL),
    CASE("ll combine/LogFMT", 3, QUICK),
    CASE("ll order/halves", 3, QUICK),
    LONG("ll order/two sends, first in, first out", 3, QUICK),
    CASE("ll order/two sends, received the other way round", 3, QUICK),
    CASE("ll order/two micro-batches", 4, QUICK),
    LONG("ll order/thirty calls, slow ranks", 4, USUAL),
    LONG("ll order/forty calls enqueued at once", 4, USUAL),
    LONG("ll order/shapes in turn", 3, USUAL),
    LONG("ll order/third send", 2, QUICK),
    CASE("mask/a masked rank gets nothing", 3, QUICK),
    LONG("mask/masks are per rank", 3, QUICK),
    CASE("mask/lifted by update", 3, QUICK),
    LONG("shrink/a rank never calls", 3, QUICK),
    CASE("shrink/a rank leaves between the halves", 3, QUICK),
    CASE("shrink/a death during the wait", 3, QUICK),
    LONG("shrink/a rank misses a clean", 3, QUICK),
    LONG("shrink/a late rank, masks lifted", 3, QUICK),
    LONG("shrink/a late rank, cleaned", 3, QUICK),
    LONG("shrink/a rank that missed calls, masks lifted", 3, QUICK),
    CASE("mismatch/low latency, format", 3, QUICK),
    LONG("timeout/low-latency dispatch", 3, QUICK),
    CASE("abort/low-latency dispatch", 3, QUICK),
    {"ll copy/shapes that grow", growing, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/sends that are cleaned away", lost_hook, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
    {"ll copy/routings in turn", routings_in_turn, 3, NULL, QUICK, DK_CAP_LL_COPY, 0},
};
GROUP(ll_copy_cases);
