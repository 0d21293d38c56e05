/* case_isa.c - every instruction set that a library can use gives the reference's results. */
#include "lowlat.h"
#include "normal.h"

static const struct normal_spec kNormal = {
    .tokens = 30, .experts = 6, .topk = 3, .index_bytes = 8, .row_bytes = 16 * 21};
static const struct combine_spec sums[] = {
    {.hidden = 8 * 21, .weights = true}, {.hidden = 1024, .biases = 2}, {.hidden = 8}};

#define ROWS .tokens = 10, .max_tokens = 10, .experts = 6, .topk = 4, .index_bytes = 8
static const struct ll_spec shapes[] = {
    {ROWS, .hidden = 8 * 37},
    {ROWS, .hidden = 1024, .format = DK_FORMAT_FP8},
    {ROWS, .hidden = 128, .format = DK_FORMAT_FP8, .values = SPECIALS},
    {ROWS, .hidden = 256, .format = DK_FORMAT_NVFP4, .values = SPECIALS},
    {ROWS, .hidden = 1024, .format = DK_FORMAT_FP8, .flags = DK_LL_ROUND_SCALE | DK_LL_UE8M0},
    {ROWS, .hidden = 1024, .combine_flags = DK_LL_LOGFMT},
    {ROWS, .hidden = 1024, .weights = true},
};

static void everything(struct rank *me) {
  struct ll_spec largest = {ROWS, .hidden = 1024};
  struct team *t = make_ll_team(me, &largest, 0);
  for (uint64_t seed = 0; seed < 3; seed++) {
    for (int i = 0; i < COUNT(sums); i++) {
      struct mark mark = set_mark(me);
      struct normal *n = make_normal(t, &kNormal, seed);
      dispatch_and_check(n);
      struct combine *c = make_combine(n, &sums[i], seed);
      run_combine(c);
      check_combine(c);
      back_to(me, mark);
    }
    for (int i = 0; i < COUNT(shapes); i++) {
      struct mark mark = set_mark(me);
      ll_round(make_ll(t, &shapes[i], seed), seed);
      back_to(me, mark);
    }
  }
}

static const struct test_case cases[] = {
    {"isa/CPU, baseline", everything, 3, NULL, QUICK, DK_CAP_HOST_STREAM, 1},
    {"isa/CPU, AVX2", everything, 3, NULL, QUICK, DK_CAP_HOST_STREAM, 2},
    {"isa/CPU, AVX-512", everything, 3, NULL, QUICK, DK_CAP_HOST_STREAM, 3},
    {"isa/CUDA, sm_80 code on a later device", everything, 3, NULL, QUICK, DK_CAP_SM90, 80},
};
GROUP(isa_cases);
