/* case_dispatch.c - rows of all shapes arrive whole, at the right place and in order; also with a cached handle and
 * over many calls. */
#include "normal.h"

#define ROOMY ((uint64_t)4 << 20)

/* Two calls on one buffer, then a cached one with different rows. */
static void run_spec(struct rank *me, struct normal_spec spec) {
  spec.experts *= me->count; /* tables give the number of local experts */
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  if (spec.nvl_bytes == 0) team.min_row = spec.row_bytes + 4 * (uint64_t)spec.scales;
  struct team *t = make_team(me, &team);
  for (uint64_t round = 0; round < 2; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &spec, settings.seed + round);
    dispatch_and_check(n);
    new_payload(n, settings.seed + 77 + round);
    run_dispatch(n, DK_DISPATCH_CACHED);
    check_dispatch(n, DK_DISPATCH_CACHED);
    back_to(me, mark);
  }
}

static void shape(struct rank *me) { run_spec(me, *(const struct normal_spec *)me->test->arg); }

#define SPEC(name, ...) static const struct normal_spec name = {.index_bytes = 8, .nvl_bytes = ROOMY, __VA_ARGS__}
SPEC(bf16, .tokens = 100, .experts = 8, .topk = 4, .row_bytes = 2 * 512);
SPEC(fp8, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .scales = 4, .index_bytes = 4);
SPEC(fp8_columns, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 384, .scales = 3, .columns = true);
SPEC(many_scales, .tokens = 25, .experts = 4, .topk = 2, .row_bytes = 7168, .scales = 56, .columns = true);
SPEC(without_topk, .tokens = 50, .experts = 4, .topk = 3, .row_bytes = 256, .index_bytes = 0);
SPEC(sixteen_bytes, .tokens = 200, .experts = 2, .topk = 1, .row_bytes = 16);
SPEC(odd_chunks, .tokens = 77, .experts = 3, .topk = 5, .row_bytes = 16 * 13, .index_bytes = 4);
SPEC(wide, .tokens = 12, .experts = 2, .topk = 3, .row_bytes = 2 * 16384);
SPEC(many_topk, .tokens = 20, .experts = 24, .topk = 31, .row_bytes = 64);
SPEC(nobody, .pattern = NOBODY, .tokens = 30, .experts = 2, .topk = 2, .row_bytes = 64);
SPEC(one_hot, .pattern = ONE_HOT, .tokens = 120, .experts = 2, .topk = 2, .row_bytes = 256);
SPEC(skewed, .pattern = SKEWED, .tokens = 120, .experts = 4, .topk = 3, .row_bytes = 256);
SPEC(duplicates, .pattern = DUPLICATES, .tokens = 60, .experts = 4, .topk = 5, .row_bytes = 128);
SPEC(silent, .pattern = SILENT_RANK, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 128);
SPEC(no_tokens, .pattern = NO_TOKENS, .tokens = 10, .experts = 4, .topk = 3, .row_bytes = 128);
SPEC(ones, .payload = ALL_ONES, .tokens = 40, .experts = 4, .topk = 3, .row_bytes = 512);
SPEC(zeros, .payload = ALL_ZEROS, .tokens = 40, .experts = 4, .topk = 3, .row_bytes = 512);
SPEC(matrix_alone, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .trust_matrix = true);
SPEC(few_sms, .tokens = 90, .experts = 4, .topk = 3, .row_bytes = 1024, .num_sms = 2);
SPEC(small_chunks, .tokens = 90, .experts = 4, .topk = 3, .row_bytes = 1024, .send_chunk = 1, .recv_chunk = 2);
SPEC(floor, .tokens = 150, .experts = 4, .topk = 3, .row_bytes = 1024, .nvl_bytes = 0);
SPEC(floor_fp8, .tokens = 70, .experts = 4, .topk = 3, .row_bytes = 768, .scales = 6, .nvl_bytes = 0);
SPEC(floor_skewed, .pattern = SKEWED, .tokens = 100, .experts = 4, .topk = 3, .row_bytes = 2048, .nvl_bytes = 0);
SPEC(few_slots, .tokens = 300, .experts = 8, .topk = 3, .row_bytes = 512, .nvl_bytes = 4 * 64 * 576);
SPEC(few_slots_fp8, .tokens = 200, .experts = 4, .topk = 3, .row_bytes = 768, .scales = 6, .nvl_bytes = 3 * 56 * 832);
SPEC(large, .tokens = 512, .experts = 8, .topk = 8, .row_bytes = 4096, .nvl_bytes = (uint64_t)16 << 20);

/* The caller may overwrite the nvl region between calls of normal mode. */
static void overwritten_region(struct rank *me) {
  struct normal_spec spec = bf16;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = 1 << 20, .trace = -1};
  struct team *t = make_team(me, &team);
  for (uint32_t round = 0; round < 4; round++) {
    struct mark mark = set_mark(me);
    fill(me, t->block->at[me->index] + t->nvl_offset, t->nvl_bytes, round * 85);
    finish(me);
    meet(me); /* all ranks are idle before any continues */
    dispatch_and_check(make_normal(t, &spec, round));
    meet(me);
    back_to(me, mark);
  }
}

/* A handle is data only: one team can use another team's. */
static void handle_elsewhere(struct rank *me) {
  struct normal_spec spec = bf16;
  spec.experts *= me->count;
  struct team_spec first = {.nvl_bytes = 1 << 20, .trace = -1}, second = {.nvl_bytes = 1 << 18, .trace = -1};
  struct team *a = make_team(me, &first), *b = make_team(me, &second);
  struct normal *n = make_normal(a, &spec, 9);
  dispatch_and_check(n);
  new_payload(n, 10);
  n->team = b;
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
}

/* Thirty calls of different sizes without a wait in between: a rank may run ahead of its peers. */
static void back_to_back(struct rank *me) {
  struct team_spec team = {.nvl_bytes = 1 << 18, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal_spec specs[3] = {bf16, fp8, sixteen_bytes};
  struct normal *calls[3];
  for (int i = 0; i < 3; i++) {
    specs[i].experts *= me->count;
    calls[i] = make_normal(t, &specs[i], (uint64_t)i);
    dispatch_and_check(calls[i]);
  }
  for (uint64_t round = 0; round < 10; round++) {
    for (int i = 0; i < 3; i++) new_payload(calls[i], 100 * round + (uint64_t)i);
    for (int i = 0; i < 3; i++) run_dispatch(calls[i], DK_DISPATCH_CACHED);
    for (int i = 0; i < 3; i++) check_dispatch(calls[i], DK_DISPATCH_CACHED);
  }
}

static const struct test_case cases[] = {
    {"dispatch/BF16, 1 rank", shape, 1, &bf16, QUICK, 0, 0},
    {"dispatch/BF16, 2 ranks", shape, 2, &bf16, QUICK, 0, 0},
    {"dispatch/BF16, 3 ranks", shape, 3, &bf16, USUAL, 0, 0},
    {"dispatch/BF16, 4 ranks", shape, 4, &bf16, USUAL, 0, 0},
    {"dispatch/BF16, 5 ranks", shape, 5, &bf16, USUAL, 0, 0},
    {"dispatch/BF16, 8 ranks", shape, 8, &bf16, USUAL, 0, 0},
    {"dispatch/FP8 with scales, int32 indices", shape, 3, &fp8, QUICK, 0, 0},
    {"dispatch/FP8, scales by column", shape, 4, &fp8_columns, QUICK, 0, 0},
    {"dispatch/FP8, 56 scales", shape, 2, &many_scales, USUAL, 0, 0},
    {"dispatch/without top-k", shape, 3, &without_topk, QUICK, 0, 0},
    {"dispatch/rows of 16 bytes", shape, 3, &sixteen_bytes, QUICK, 0, 0},
    {"dispatch/rows of 208 bytes", shape, 4, &odd_chunks, USUAL, 0, 0},
    {"dispatch/hidden 16384", shape, 4, &wide, USUAL, 0, 0},
    {"dispatch/top-31", shape, 2, &many_topk, USUAL, 0, 0},
    {"dispatch/everything -1", shape, 3, &nobody, QUICK, 0, 0},
    {"dispatch/one hot expert", shape, 4, &one_hot, QUICK, 0, 0},
    {"dispatch/skewed", shape, 4, &skewed, USUAL, 0, 0},
    {"dispatch/duplicates", shape, 3, &duplicates, QUICK, 0, 0},
    {"dispatch/a rank without tokens, one without rows", shape, 4, &silent, QUICK, 0, 0},
    {"dispatch/no tokens at all", shape, 3, &no_tokens, QUICK, 0, 0},
    {"dispatch/rows of ones", shape, 3, &ones, QUICK, 0, 0},
    {"dispatch/rows of zeros", shape, 3, &zeros, QUICK, 0, 0},
    {"dispatch/row count from the matrix", shape, 3, &matrix_alone, USUAL, 0, 0},
    {"dispatch/2 SMs", shape, 3, &few_sms, USUAL, 0, 0},
    {"dispatch/chunks of 1", shape, 3, &small_chunks, USUAL, 0, 0},
    {"dispatch/smallest region, 2 ranks", shape, 2, &floor, QUICK, 0, 0},
    {"dispatch/smallest region, 4 ranks", shape, 4, &floor, USUAL, 0, 0},
    {"dispatch/smallest region, 8 ranks", shape, 8, &floor, HEAVY, 0, 0},
    {"dispatch/smallest region, FP8", shape, 3, &floor_fp8, USUAL, 0, 0},
    {"dispatch/smallest region, skewed", shape, 4, &floor_skewed, USUAL, 0, 0},
    {"dispatch/rings of 64 rows", shape, 4, &few_slots, USUAL, 0, 0},
    {"dispatch/rings of 56 rows, FP8", shape, 3, &few_slots_fp8, QUICK, 0, 0},
    {"dispatch/512 tokens of 4 KiB", shape, 4, &large, HEAVY, 0, 0},
    {"dispatch/region overwritten between calls", overwritten_region, 3, NULL, USUAL, 0, 0},
    {"dispatch/handle of another team", handle_elsewhere, 3, NULL, QUICK, 0, 0},
    {"dispatch/thirty calls in a row", back_to_back, 4, NULL, USUAL, 0, 0},
};
GROUP(dispatch_cases);
