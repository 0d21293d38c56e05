/* case_combine.c - sums over the rows of a token, with weights and biases; the same bits every time. */
#include <string.h>

#include "normal.h"

struct both {
  struct normal_spec dispatch;
  struct combine_spec combine;
};

#define BOTH(name, dispatch_, ...) static const struct both name = {.dispatch = dispatch_, .combine = {__VA_ARGS__}}
#define ROWS(...) \
  {.tokens = 60, .experts = 4, .topk = 4, .index_bytes = 8, .row_bytes = 64, .nvl_bytes = 1 << 20, __VA_ARGS__}
BOTH(plain, ROWS(), .hidden = 256);
BOTH(weights, ROWS(), .hidden = 256, .weights = true);
BOTH(one_bias, ROWS(), .hidden = 128, .biases = 1, .weights = true);
BOTH(two_biases, ROWS(), .hidden = 128, .biases = 2);
BOTH(eight, ROWS(), .hidden = 8, .biases = 1);
BOTH(odd, ROWS(.topk = 5), .hidden = 8 * 37, .weights = true);
BOTH(wide, ROWS(.tokens = 6), .hidden = 16384, .weights = true);
BOTH(nobody, ROWS(.pattern = NOBODY), .hidden = 64, .biases = 1, .weights = true);
BOTH(nobody_plain, ROWS(.pattern = NOBODY), .hidden = 64, .weights = true);
BOTH(silent, ROWS(.pattern = SILENT_RANK), .hidden = 64, .weights = true);
BOTH(one_hot, ROWS(.pattern = ONE_HOT, .tokens = 150), .hidden = 64, .weights = true);
BOTH(no_tokens, ROWS(.pattern = NO_TOKENS), .hidden = 64, .weights = true, .biases = 2);
BOTH(many_topk, ROWS(.topk = 31, .experts = 16, .tokens = 20), .hidden = 64, .weights = true);
BOTH(least, ROWS(.nvl_bytes = 0, .tokens = 120), .hidden = 1024, .weights = true);
BOTH(chunks, ROWS(.send_chunk = 1, .recv_chunk = 2), .hidden = 256, .weights = true, .num_sms = 2);

static void sums(struct rank *me) {
  struct both both = *(const struct both *)me->test->arg;
  both.dispatch.experts *= me->count;
  struct team_spec team = {.nvl_bytes = both.dispatch.nvl_bytes, .trace = -1};
  if (team.nvl_bytes == 0) team.min_row = 2 * (uint64_t)both.combine.hidden + 4 * (uint64_t)both.dispatch.topk;
  struct team *t = make_team(me, &team);
  for (uint64_t round = 0; round < 2; round++) {
    struct mark mark = set_mark(me);
    struct normal *n = make_normal(t, &both.dispatch, settings.seed + round);
    dispatch_and_check(n);
    struct combine *c = make_combine(n, &both.combine, settings.seed + round);
    run_combine(c);
    check_combine(c);
    back_to(me, mark);
  }
}

/* Ten combines of the same input give the same bits, in whatever order the rows arrive. */
static void repeatable(struct rank *me) {
  struct both both = two_biases;
  both.dispatch.experts *= me->count;
  both.combine.weights = true;
  struct team_spec team = {.nvl_bytes = 1 << 18, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &both.dispatch, 3);
  dispatch_and_check(n);
  struct combine *c = make_combine(n, &both.combine, 4);
  uint64_t bytes = c->out.bytes, more = c->out_weights.bytes;
  char *first = scratch(me, bytes + more + 1);
  for (int round = 0; round < 10; round++) {
    poison(me, c->out);
    poison(me, c->out_weights);
    if (me->index == round % me->count) pause_ms(2);
    run_combine(c);
    check_combine(c);
    if (round == 0) {
      memcpy(first, c->out.host, bytes);
      memcpy(first + bytes, c->out_weights.host, more);
    }
    expect(me, memcmp(first, c->out.host, bytes) == 0 && memcmp(first + bytes, c->out_weights.host, more) == 0,
           "round %d gave other bits than round 0", round);
  }
}

/* One handle: several combines of different widths, a cached dispatch, another combine. */
static void one_handle(struct rank *me) {
  struct both both = plain;
  both.dispatch.experts *= me->count;
  struct team_spec team = {.nvl_bytes = 1 << 20, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &both.dispatch, 3);
  dispatch_and_check(n);
  static const struct combine_spec specs[] = {
      {.hidden = 64}, {.hidden = 2048, .weights = true}, {.hidden = 8, .biases = 2}};
  for (int i = 0; i < COUNT(specs); i++) {
    struct combine *c = make_combine(n, &specs[i], (uint64_t)i);
    run_combine(c);
    check_combine(c);
    new_payload(n, 50 + (uint64_t)i);
    run_dispatch(n, DK_DISPATCH_CACHED);
    check_dispatch(n, DK_DISPATCH_CACHED);
  }
}

/* Infinity and NaN in a row reach the sum of that row's token and no other sum. */
static void not_numbers(struct rank *me) {
  struct both both = plain;
  both.dispatch.experts *= me->count;
  struct team_spec team = {.nvl_bytes = 1 << 20, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &both.dispatch, 3);
  dispatch_and_check(n);
  struct combine *c = make_combine(n, &both.combine, 4);
  finish(me);
  for (int row = 0; row < n->rows; row++)
    for (int h = 0; h < 256; h++) ((uint16_t *)c->x.host)[row * 256 + h] = n->origins[row].token % 2 ? 0xffff : 0x3f80;
  send_tensor(me, c->x);
  run_combine(c);
  fetch_tensor(me, c->out);
  finish(me);
  expect_healthy(t);
  for (int token = 0; token < n->tokens; token++) {
    int rows = 0;
    for (int rank = 0; rank < me->count; rank++) rows += goes_to(n->routing, me->index, token, rank);
    for (int h = 0; h < 256; h++) {
      uint16_t got = ((uint16_t *)c->out.host)[token * 256 + h];
      bool right = token % 2 && rows ? bf16_is_nan(got) : got == to_bf16((float)rows);
      expect(me, right, "combined_x[%d][%d] is %g", token, h, from_bf16(got));
    }
  }
}

static const struct test_case cases[] = {
    {"combine/1 rank", sums, 1, &weights, QUICK, 0, 0},
    {"combine/2 ranks", sums, 2, &plain, QUICK, 0, 0},
    {"combine/3 ranks", sums, 3, &weights, QUICK, 0, 0},
    {"combine/4 ranks", sums, 4, &plain, USUAL, 0, 0},
    {"combine/5 ranks", sums, 5, &weights, USUAL, 0, 0},
    {"combine/8 ranks", sums, 8, &weights, USUAL, 0, 0},
    {"combine/one bias", sums, 3, &one_bias, QUICK, 0, 0},
    {"combine/two biases", sums, 4, &two_biases, QUICK, 0, 0},
    {"combine/8 channels", sums, 3, &eight, QUICK, 0, 0},
    {"combine/296 channels, top-5", sums, 3, &odd, USUAL, 0, 0},
    {"combine/16384 channels", sums, 4, &wide, USUAL, 0, 0},
    {"combine/everything -1", sums, 3, &nobody_plain, QUICK, 0, 0},
    {"combine/everything -1, bias", sums, 3, &nobody, QUICK, 0, 0},
    {"combine/a rank without tokens, one without rows", sums, 4, &silent, QUICK, 0, 0},
    {"combine/one hot expert", sums, 4, &one_hot, USUAL, 0, 0},
    {"combine/no tokens at all", sums, 3, &no_tokens, QUICK, 0, 0},
    {"combine/top-31", sums, 2, &many_topk, USUAL, 0, 0},
    {"combine/smallest region, 2 ranks", sums, 2, &least, QUICK, 0, 0},
    {"combine/smallest region, 8 ranks", sums, 8, &least, HEAVY, 0, 0},
    {"combine/chunks of 1, 2 SMs", sums, 3, &chunks, USUAL, 0, 0},
    {"combine/the same bits every time", repeatable, 4, NULL, USUAL, 0, 0},
    {"combine/one handle, many calls", one_handle, 3, NULL, QUICK, 0, 0},
    {"combine/NaN stays with its token", not_numbers, 3, NULL, QUICK, 0, 0},
};
GROUP(combine_cases);
