/* case_ll_dispatch.c - low-latency dispatch: shapes and routings in BF16, FP8 to the bit. */
#include <string.h>

#include "lowlat.h"

#define SPEC(name, ...)                \
  static const struct ll_spec name = { \
      .tokens = 20, .max_tokens = 24, .hidden = 512, .experts = 4, .topk = 3, .index_bytes = 8, __VA_ARGS__}
SPEC(bf16, .hidden = 256);
SPEC(full, .tokens = 24, .index_bytes = 4);
SPEC(few_of_many, .tokens = 3, .max_tokens = 128, .hidden = 128);
SPEC(one_token, .tokens = 1, .max_tokens = 1, .experts = 1, .topk = 1);
SPEC(sixteen_bytes, .hidden = 8, .tokens = 24);
SPEC(odd_hidden, .hidden = 8 * 37);
SPEC(wide, .hidden = 16384, .tokens = 4, .max_tokens = 4, .experts = 2);
SPEC(many_topk, .topk = 32, .experts = 24, .tokens = 10, .index_bytes = 4);
SPEC(one_expert, .experts = 1, .topk = 1);
SPEC(nobody, .pattern = NOBODY);
SPEC(one_hot, .pattern = ONE_HOT, .tokens = 24);
SPEC(skewed, .pattern = SKEWED);
SPEC(duplicates, .pattern = DUPLICATES, .topk = 6);
SPEC(silent, .pattern = SILENT_RANK);
SPEC(no_tokens, .pattern = NO_TOKENS);
SPEC(ones, .payload = ALL_ONES);
SPEC(zeros, .payload = ALL_ZEROS);
SPEC(fp8, .format = DK_FORMAT_FP8);
SPEC(fp8_block, .format = DK_FORMAT_FP8, .hidden = 128);
SPEC(fp8_odd, .format = DK_FORMAT_FP8, .hidden = 128 * 19, .tokens = 8, .index_bytes = 4);
SPEC(fp8_wide, .format = DK_FORMAT_FP8, .hidden = 16384, .tokens = 4, .max_tokens = 4, .experts = 2);
SPEC(fp8_7168, .format = DK_FORMAT_FP8, .hidden = 7168, .tokens = 6, .max_tokens = 8, .experts = 2);
SPEC(fp8_specials, .format = DK_FORMAT_FP8, .values = SPECIALS);
SPEC(fp8_duplicates, .format = DK_FORMAT_FP8, .pattern = DUPLICATES, .topk = 6);
SPEC(fp8_silent, .format = DK_FORMAT_FP8, .pattern = SILENT_RANK);
SPEC(rounded, .format = DK_FORMAT_FP8, .flags = DK_LL_ROUND_SCALE);
SPEC(rounded_specials, .format = DK_FORMAT_FP8, .flags = DK_LL_ROUND_SCALE, .values = SPECIALS);
SPEC(ue8m0, .format = DK_FORMAT_FP8, .flags = DK_LL_ROUND_SCALE | DK_LL_UE8M0, .hidden = 1024);
SPEC(ue8m0_block, .format = DK_FORMAT_FP8, .flags = DK_LL_ROUND_SCALE | DK_LL_UE8M0, .hidden = 512);
SPEC(ue8m0_7168, .format = DK_FORMAT_FP8, .flags = DK_LL_ROUND_SCALE | DK_LL_UE8M0, .hidden = 7168, .tokens = 4,
     .max_tokens = 4);
SPEC(fp4, .format = DK_FORMAT_FP4);
SPEC(fp4_odd, .format = DK_FORMAT_FP4, .hidden = 128 * 19, .tokens = 8, .index_bytes = 4);
SPEC(fp4_wide, .format = DK_FORMAT_FP4, .hidden = 33024, .tokens = 3, .max_tokens = 4, .experts = 2);
SPEC(fp4_ones, .format = DK_FORMAT_FP4, .payload = ALL_ONES, .hidden = 128);
SPEC(fp4_zeros, .format = DK_FORMAT_FP4, .payload = ALL_ZEROS, .weights = true);
SPEC(nvfp4, .format = DK_FORMAT_NVFP4);
SPEC(nvfp4_odd, .format = DK_FORMAT_NVFP4, .hidden = 128 * 19, .tokens = 8, .index_bytes = 4);
SPEC(nvfp4_tiles, .format = DK_FORMAT_NVFP4, .hidden = 128, .tokens = 60, .max_tokens = 64, .experts = 1, .topk = 2);
SPEC(nvfp4_wide, .format = DK_FORMAT_NVFP4, .hidden = 16512, .tokens = 3, .max_tokens = 4, .experts = 2);
SPEC(nvfp4_specials, .format = DK_FORMAT_NVFP4, .values = SPECIALS, .pattern = DUPLICATES, .weights = true);
SPEC(weights_too, .weights = true);
SPEC(fp8_weights_too, .weights = true, .format = DK_FORMAT_FP8, .pattern = DUPLICATES);

/* Three calls, so that both wire slots are used and one of them twice. */
static void shape(struct rank *me) {
  struct ll_spec spec = *(const struct ll_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  for (uint64_t round = 0; round < 3; round++) {
    struct mark mark = set_mark(me);
    struct ll *l = make_ll(t, &spec, settings.seed + round);
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
    check_ll_dispatch(l);
    back_to(me, mark);
  }
}

/* An index out of range: on host libraries every rank refuses the call; on GPUs, where rows leave at once, the index
 * counts as -1 and its rank alone says so. Either way the team goes on. */
static void bad_index(struct rank *me) {
  struct ll_spec spec = bf16;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  t->timeout_ns = soon_ns();
  struct ll *l = make_ll(t, &spec, 3);
  finish(me); /* the right indices are on their way */
  if (me->index == 0) {
    ((int64_t *)l->idx.host)[4] = spec.experts;
    send_tensor(me, l->idx);
  }
  run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  finish(me);
  if (me->index == 0 || library.caps & DK_CAP_HOST_STREAM) {
    dk_failure f = expect_refusal(t, DK_EINVAL, DK_OP_LL_DISPATCH, 0, DK_FIELD_TOPK_IDX);
    expect(me, f.expected == spec.experts && f.seen == spec.experts, "the record: %ld, %ld", (long)f.expected,
           (long)f.seen);
  }
  expect_no_refusal(t);
  if (library.caps & DK_CAP_HOST_STREAM) expect_no_rows(l);
  meet(me);
  struct ll *next = make_ll(t, &spec, 4);
  for (int round = 0; round < 3; round++) ll_round(next, 4 + (uint64_t)round);
}

/* The first received row of expert 0 overwrites the counts: no row goes beyond those of its expert, and the team goes
 * on. */
static void overlapping(struct rank *me) {
  struct ll_spec spec = ones;
  spec.experts *= me->count;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 5);
  struct tensor count = l->recv_count;
  l->recv_count.at = l->recv_x.at;
  run_ll_dispatch(l, DK_PHASE_BOTH, 0);
  finish(me); /* guards around each tensor are checked here */
  expect_no_refusal(t);
  l->recv_count = count;
  meet(me);
  struct ll *next = make_ll(t, &spec, 6);
  for (int round = 0; round < 3; round++) ll_round(next, 6 + (uint64_t)round);
}

static const struct test_case cases[] = {
    {"ll dispatch/BF16, 1 rank", shape, 1, &bf16, QUICK, 0, 0},
    {"ll dispatch/BF16, 2 ranks", shape, 2, &bf16, QUICK, 0, 0},
    {"ll dispatch/BF16, 3 ranks", shape, 3, &bf16, USUAL, 0, 0},
    {"ll dispatch/BF16, 5 ranks", shape, 5, &bf16, USUAL, 0, 0},
    {"ll dispatch/BF16, 8 ranks", shape, 8, &bf16, USUAL, 0, 0},
    {"ll dispatch/T = B, int32 indices", shape, 3, &full, QUICK, 0, 0},
    {"ll dispatch/3 tokens of 128", shape, 3, &few_of_many, QUICK, 0, 0},
    {"ll dispatch/one token, one expert", shape, 2, &one_token, QUICK, 0, 0},
    {"ll dispatch/8 channels", shape, 3, &sixteen_bytes, USUAL, 0, 0},
    {"ll dispatch/296 channels", shape, 3, &odd_hidden, USUAL, 0, 0},
    {"ll dispatch/16384 channels", shape, 3, &wide, USUAL, 0, 0},
    {"ll dispatch/top-32", shape, 2, &many_topk, USUAL, 0, 0},
    {"ll dispatch/one expert a rank", shape, 4, &one_expert, USUAL, 0, 0},
    {"ll dispatch/everything -1", shape, 3, &nobody, QUICK, 0, 0},
    {"ll dispatch/one hot expert", shape, 4, &one_hot, QUICK, 0, 0},
    {"ll dispatch/skewed", shape, 4, &skewed, USUAL, 0, 0},
    {"ll dispatch/duplicates", shape, 3, &duplicates, QUICK, 0, 0},
    {"ll dispatch/a rank without tokens, one without rows", shape, 4, &silent, QUICK, 0, 0},
    {"ll dispatch/no tokens at all", shape, 3, &no_tokens, QUICK, 0, 0},
    {"ll dispatch/rows of ones", shape, 3, &ones, QUICK, 0, 0},
    {"ll dispatch/rows of zeros", shape, 3, &zeros, QUICK, 0, 0},
    {"ll dispatch/with weights", shape, 3, &weights_too, QUICK, 0, 0},
    {"ll dispatch/outputs that overlap", overlapping, 2, NULL, QUICK, DK_CAP_HOST_STREAM, 0},
    {"ll dispatch/index E", bad_index, 2, NULL, QUICK, 0, 0},
    {"ll FP8/512 channels, 1 rank", shape, 1, &fp8, QUICK, 0, 0},
    {"ll FP8/512 channels, 4 ranks", shape, 4, &fp8, QUICK, 0, 0},
    {"ll FP8/512 channels, 8 ranks", shape, 8, &fp8, USUAL, 0, 0},
    {"ll FP8/128 channels", shape, 3, &fp8_block, QUICK, 0, 0},
    {"ll FP8/2432 channels", shape, 3, &fp8_odd, USUAL, 0, 0},
    {"ll FP8/7168 channels", shape, 2, &fp8_7168, USUAL, 0, 0},
    {"ll FP8/16384 channels", shape, 2, &fp8_wide, HEAVY, 0, 0},
    {"ll FP8/NaN and infinity", shape, 3, &fp8_specials, QUICK, 0, 0},
    {"ll FP8/duplicates", shape, 3, &fp8_duplicates, USUAL, 0, 0},
    {"ll FP8/a rank without tokens, one without rows", shape, 3, &fp8_silent, QUICK, 0, 0},
    {"ll FP8/rounded scales", shape, 3, &rounded, QUICK, 0, 0},
    {"ll FP8/rounded scales, NaN and infinity", shape, 3, &rounded_specials, QUICK, 0, 0},
    {"ll FP8/UE8M0", shape, 3, &ue8m0, QUICK, 0, 0},
    {"ll FP8/UE8M0, 512 channels", shape, 4, &ue8m0_block, USUAL, 0, 0},
    {"ll FP8/UE8M0, 7168 channels", shape, 2, &ue8m0_7168, USUAL, 0, 0},
    {"ll FP8/with weights, duplicates", shape, 3, &fp8_weights_too, QUICK, 0, 0},
    {"ll FP4/512 channels, 4 ranks", shape, 4, &fp4, QUICK, 0, 0},
    {"ll FP4/2432 channels", shape, 3, &fp4_odd, QUICK, 0, 0},
    {"ll FP4/33024 channels", shape, 2, &fp4_wide, HEAVY, 0, 0},
    {"ll FP4/rows of ones", shape, 2, &fp4_ones, QUICK, 0, 0},
    {"ll FP4/rows of zeros, with weights", shape, 3, &fp4_zeros, QUICK, 0, 0},
    {"ll FP4/cast, 4 ranks", shape, 4, &nvfp4, QUICK, 0, 0},
    {"ll FP4/cast, 2432 channels", shape, 3, &nvfp4_odd, QUICK, 0, 0},
    {"ll FP4/cast, three tiles of scales", shape, 5, &nvfp4_tiles, QUICK, 0, 0},
    {"ll FP4/cast, 16512 channels", shape, 2, &nvfp4_wide, HEAVY, 0, 0},
    {"ll FP4/cast, NaN and infinity, duplicates", shape, 3, &nvfp4_specials, QUICK, 0, 0},
};
GROUP(ll_dispatch_cases);
