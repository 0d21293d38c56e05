/* case_ll_combine.c - low-latency combine: weighted sums, with weights sent before or not, LogFMT, zero copy, repeats.
 */
#include <math.h>
#include <string.h>

#include "lowlat.h"

#define SPEC(name, ...)                \
  static const struct ll_spec name = { \
      .tokens = 20, .max_tokens = 24, .hidden = 512, .experts = 4, .topk = 3, .index_bytes = 8, __VA_ARGS__}
SPEC(plain, .hidden = 256);
SPEC(small, .hidden = 128, .index_bytes = 4, .max_tokens = 64, .tokens = 7);
SPEC(eight, .hidden = 8);
SPEC(odd_hidden, .hidden = 8 * 37);
SPEC(wide, .hidden = 16384, .tokens = 3, .max_tokens = 4, .experts = 2, .topk = 2);
SPEC(many_topk, .topk = 32, .experts = 24, .tokens = 8, .hidden = 256);
SPEC(after_fp8, .format = DK_FORMAT_FP8, .hidden = 1024, .tokens = 8);
SPEC(duplicates, .pattern = DUPLICATES, .topk = 6);
SPEC(nobody, .pattern = NOBODY);
SPEC(silent, .pattern = SILENT_RANK);
SPEC(one_hot, .pattern = ONE_HOT, .tokens = 24);
SPEC(no_tokens, .pattern = NO_TOKENS);
SPEC(weights, .weights = true, .topk = 6, .experts = 8);
SPEC(weights_fp8, .weights = true, .format = DK_FORMAT_FP8, .topk = 6);
SPEC(weights_duplicates, .weights = true, .pattern = DUPLICATES, .topk = 6);
SPEC(unreduced, .weights = true, .combine_flags = DK_LL_UNREDUCED, .topk = 6);
SPEC(logfmt, .combine_flags = DK_LL_LOGFMT);
SPEC(logfmt_block, .combine_flags = DK_LL_LOGFMT, .hidden = 128);
SPEC(logfmt_7168, .combine_flags = DK_LL_LOGFMT, .hidden = 7168, .tokens = 4, .max_tokens = 4);
SPEC(logfmt_duplicates, .combine_flags = DK_LL_LOGFMT, .pattern = DUPLICATES, .topk = 6);
SPEC(logfmt_weights, .combine_flags = DK_LL_LOGFMT, .weights = true, .topk = 6);
SPEC(logfmt_unreduced, .combine_flags = DK_LL_LOGFMT | DK_LL_UNREDUCED, .weights = true, .topk = 6);
SPEC(zero_copy, .combine_flags = DK_LL_ZERO_COPY);
SPEC(zero_copy_weights, .combine_flags = DK_LL_ZERO_COPY, .weights = true, .topk = 6);
SPEC(zero_copy_silent, .combine_flags = DK_LL_ZERO_COPY, .pattern = SILENT_RANK, .hidden = 128);

static void sums(struct rank *me) {
  struct ll_spec spec = *(const struct ll_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  for (uint64_t round = 0; round < 3; round++) {
    struct mark mark = set_mark(me);
    ll_round(make_ll(t, &spec, settings.seed + round), settings.seed + 10 + round);
    back_to(me, mark);
  }
}

/* Upstream's test combines twice with one handle; this one five times, also with LogFMT and zero copy. */
static void same_handle(struct rank *me) {
  struct ll_spec spec = plain, other;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  check_ll_dispatch(l);
  other = spec;
  l->spec = &other;
  static const uint32_t flags[] = {0, DK_LL_LOGFMT, 0, DK_LL_ZERO_COPY, DK_LL_UNREDUCED};
  for (int i = 0; i < COUNT(flags); i++) {
    other.combine_flags = flags[i];
    make_expert_rows(l, 40 + (uint64_t)i);
    run_ll_combine(l, DK_PHASE_BOTH, 2);
    check_ll_combine(l);
  }
}

/* Weights that no dispatch sent: different ones in every combine of a handle. Each time a different rank calls in
 * halves, and does not wait for the others' weights. */
static void new_weights(struct rank *me) {
  struct ll_spec spec = *(const struct ll_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  check_ll_dispatch(l);
  float *own = l->routing->weight[me->index];
  for (int i = 0; i < 7; i++) {
    make_expert_rows(l, 60 + (uint64_t)i);
    for (int at = 0; at < l->tokens * spec.topk; at++)
      ((float *)l->weights.host)[at] = own[at] = -0.75f * own[at] + 0.01f * (float)i;
    send_tensor(me, l->weights);
    if (i % (me->count + 1) == me->index) {
      run_ll_combine(l, DK_PHASE_SEND, 2);
      run_ll_combine(l, DK_PHASE_RECV, 2);
      l->whole_combine = true; /* of the others */
    } else
      run_ll_combine(l, DK_PHASE_BOTH, 2);
    check_ll_combine(l);
  }
}

/* The same input, the same bits: plain, reduced at the experts' rank, LogFMT, FP8 before. */
static void repeatable(struct rank *me) {
  static const struct {
    uint32_t flags;
    int format;
    bool weights;
  } ways[] = {{0, DK_FORMAT_BF16, false},
              {0, DK_FORMAT_BF16, true},
              {DK_LL_LOGFMT, DK_FORMAT_FP8, false},
              {DK_LL_ZERO_COPY, DK_FORMAT_BF16, true}};
  struct ll_spec spec = weights;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  for (int way = 0; way < COUNT(ways); way++) {
    struct mark mark = set_mark(me);
    spec.combine_flags = ways[way].flags;
    spec.format = ways[way].format;
    spec.weights = ways[way].weights;
    struct ll *l = make_ll(t, &spec, 5);
    void *first = scratch(me, l->out.bytes + 1), *received = scratch(me, l->recv_x.bytes + 1);
    for (int round = 0; round < 4; round++) {
      if (me->index == round % me->count) pause_ms(2);
      if (round == 0)
        ll_round(l, 6);
      else {
        memcpy(round == 1 ? received : scratch(me, l->recv_x.bytes + 1), l->recv_x.host, l->recv_x.bytes);
        poison(me, l->out);
        run_ll_dispatch(l, DK_PHASE_BOTH, 0);
        run_ll_combine(l, DK_PHASE_BOTH, 2);
        check_ll_dispatch(l);
        check_ll_combine(l);
      }
      if (round == 0) memcpy(first, l->out.host, l->out.bytes);
      expect(me, memcmp(first, l->out.host, l->out.bytes) == 0, "way %d: round %d gave other bits than round 0", way,
             round);
    }
    back_to(me, mark);
  }
}

/* Rows distributed as a model's: within the contract's tolerance, with and without LogFMT. */
static void usual_rows(struct rank *me) {
  struct ll_spec spec = *(const struct ll_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  ll_round(make_ll(t, &spec, 3), 4 | USUAL_ROWS);
}

/* LogFMT is really used: over a wide range of magnitudes its sums differ from the plain ones. */
static void logfmt_is_used(struct rank *me) {
  struct ll_spec spec = plain;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 4);
  void *before = scratch(me, l->out.bytes + 1);
  memcpy(before, l->out.host, l->out.bytes);
  struct ll_spec coded = spec;
  coded.combine_flags = DK_LL_LOGFMT;
  l->spec = &coded;
  run_ll_combine(l, DK_PHASE_BOTH, 2);
  check_ll_combine(l);
  expect(me, memcmp(before, l->out.host, l->out.bytes) != 0, "LogFMT gives the bits that BF16 gives");
}

/* Rows of NaN and infinity: the sums of their tokens are NaN or infinite, all others are right, and no rank hangs. */
static void not_numbers(struct rank *me) {
  static const struct {
    uint32_t flags;
    bool weights;
    uint16_t bits;
  } ways[] = {{0, false, 0xffff},
              {0, true, 0xffff},
              {DK_LL_LOGFMT, false, 0x7fc0},
              {DK_LL_ZERO_COPY, false, 0xffff},
              {DK_LL_LOGFMT, false, 0x7f80}};
  struct ll_spec spec = plain;
  spec.experts *= me->count;
  spec.topk = 1;
  struct team *t = make_ll_team(me, &spec, 0);
  for (int way = 0; way < COUNT(ways); way++) {
    struct mark mark = set_mark(me);
    spec.weights = ways[way].weights;
    spec.combine_flags = ways[way].flags;
    struct ll *l = make_ll(t, &spec, 3);
    ll_dispatch_and_answer(l, 4);
    finish(me);
    uint16_t *y = l->y.host;
    for (int cell = 0; cell < l->local * l->rows; cell++)
      for (int h = 0; h < spec.hidden; h++)
        y[cell * spec.hidden + h] = ((const int32_t *)l->src_info.host)[cell] % 2 ? ways[way].bits : 0x3f80;
    send_tensor(me, l->y);
    run_ll_combine(l, DK_PHASE_BOTH, 2);
    fetch_tensor(me, l->out);
    finish(me);
    expect_healthy(t);
    for (int token = 0; token < l->tokens; token++) {
      bool sent = l->routing->index[me->index][token] >= 0;
      uint16_t wanted = sent ? to_bf16(l->routing->weight[me->index][token]) : 0;
      for (int h = 0; h < spec.hidden; h++) {
        uint16_t got = ((uint16_t *)l->out.host)[token * spec.hidden + h];
        bool right = token % 2 && sent ? (got & 0x7f80) == 0x7f80 : got == wanted;
        expect(me, right, "way %d: combined_x[%d][%d] is %g", way, token, h, from_bf16(got));
      }
    }
    back_to(me, mark);
  }
}

static const struct test_case cases[] = {
    {"ll combine/1 rank", sums, 1, &plain, QUICK, 0, 0},
    {"ll combine/2 ranks", sums, 2, &plain, QUICK, 0, 0},
    {"ll combine/4 ranks", sums, 4, &plain, QUICK, 0, 0},
    {"ll combine/5 ranks", sums, 5, &plain, USUAL, 0, 0},
    {"ll combine/8 ranks", sums, 8, &plain, USUAL, 0, 0},
    {"ll combine/7 tokens of 64, int32 indices", sums, 3, &small, QUICK, 0, 0},
    {"ll combine/8 channels", sums, 3, &eight, USUAL, 0, 0},
    {"ll combine/296 channels", sums, 3, &odd_hidden, USUAL, 0, 0},
    {"ll combine/16384 channels", sums, 3, &wide, HEAVY, 0, 0},
    {"ll combine/top-32", sums, 2, &many_topk, USUAL, 0, 0},
    {"ll combine/after FP8", sums, 3, &after_fp8, QUICK, 0, 0},
    {"ll combine/duplicates", sums, 3, &duplicates, QUICK, 0, 0},
    {"ll combine/new weights", new_weights, 3, &plain, QUICK, 0, 0},
    {"ll combine/new weights, duplicates", new_weights, 2, &duplicates, USUAL, 0, 0},
    {"ll combine/everything -1", sums, 3, &nobody, QUICK, 0, 0},
    {"ll combine/a rank without tokens, one without rows", sums, 4, &silent, QUICK, 0, 0},
    {"ll combine/one hot expert", sums, 4, &one_hot, USUAL, 0, 0},
    {"ll combine/no tokens at all", sums, 3, &no_tokens, QUICK, 0, 0},
    {"ll combine/weights sent along", sums, 3, &weights, QUICK, 0, 0},
    {"ll combine/weights sent along, 8 ranks", sums, 8, &weights, HEAVY, 0, 0},
    {"ll combine/weights sent along, FP8", sums, 3, &weights_fp8, USUAL, 0, 0},
    {"ll combine/weights sent along, duplicates", sums, 3, &weights_duplicates, QUICK, 0, 0},
    {"ll combine/weights sent along, unreduced", sums, 3, &unreduced, QUICK, 0, 0},
    {"ll combine/LogFMT", sums, 3, &logfmt, QUICK, 0, 0},
    {"ll combine/LogFMT, 128 channels", sums, 4, &logfmt_block, USUAL, 0, 0},
    {"ll combine/LogFMT, 7168 channels", sums, 2, &logfmt_7168, USUAL, 0, 0},
    {"ll combine/LogFMT, duplicates", sums, 3, &logfmt_duplicates, USUAL, 0, 0},
    {"ll combine/LogFMT, weights", sums, 3, &logfmt_weights, QUICK, 0, 0},
    {"ll combine/LogFMT, weights, unreduced", sums, 3, &logfmt_unreduced, USUAL, 0, 0},
    {"ll combine/normally distributed rows", usual_rows, 3, &weights, QUICK, 0, 0},
    {"ll combine/normally distributed rows, LogFMT", usual_rows, 3, &logfmt, QUICK, 0, 0},
    {"ll combine/LogFMT changes the sums", logfmt_is_used, 2, NULL, QUICK, 0, 0},
    {"ll combine/zero copy", sums, 3, &zero_copy, QUICK, 0, 0},
    {"ll combine/zero copy, weights sent along", sums, 3, &zero_copy_weights, USUAL, 0, 0},
    {"ll combine/zero copy, a rank without tokens", sums, 4, &zero_copy_silent, USUAL, 0, 0},
    {"ll combine/one handle, five times", same_handle, 3, NULL, QUICK, 0, 0},
    {"ll combine/the same bits every time", repeatable, 4, NULL, USUAL, 0, 0},
    {"ll combine/NaN stays with its token", not_numbers, 3, NULL, QUICK, 0, 0},
};
GROUP(ll_combine_cases);
