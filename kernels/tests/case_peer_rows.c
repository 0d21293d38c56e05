/* case_peer_rows.c - rows in a registered segment, which peers write and read directly. */
#include "normal.h"

#define SPEC(name, ...) \
  static const struct normal_spec name = {.index_bytes = 8, .nvl_bytes = 1 << 20, .segment = true, __VA_ARGS__}
SPEC(bf16, .tokens = 100, .experts = 4, .topk = 4, .row_bytes = 1024);
SPEC(fp8, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .scales = 4);
SPEC(skewed, .pattern = SKEWED, .tokens = 100, .experts = 4, .topk = 3, .row_bytes = 2048, .nvl_bytes = 1 << 18);
SPEC(padded, .tokens = 60, .experts = 4, .topk = 3, .row_bytes = 512, .spare = 1);

/* Rank 0 receives staged rows, the others in a segment: each receiver chooses. */
static void segments(struct rank *me) {
  struct normal_spec spec = *(const struct normal_spec *)me->test->arg;
  spec.experts *= me->count;
  struct team_spec team = {.nvl_bytes = spec.nvl_bytes, .trace = -1};
  struct team *t = make_team(me, &team);
  struct normal *n = make_normal(t, &spec, settings.seed);
  dispatch_and_check(n);
  new_payload(n, settings.seed + 1);
  run_dispatch(n, DK_DISPATCH_CACHED);
  check_dispatch(n, DK_DISPATCH_CACHED);
  struct combine_spec combine = {.hidden = (int)spec.row_bytes / 2, .weights = true, .segment = true};
  struct combine *c = make_combine(n, &combine, settings.seed);
  for (int round = 0; round < 2; round++) {
    run_combine(c);
    check_combine(c);
  }
}

static void forgotten(struct rank *me) {
  struct team_spec team = {.nvl_bytes = 1 << 20, .trace = -1};
  struct team *t = make_team(me, &team);
  struct share *s = share(me, 1 << 16);
  const uint64_t addresses[] = {s->at[0], 0, s->at[0]};
  for (int i = 0; i < COUNT(addresses); i++) {
    dk_team_segment_params p = {
        .size = sizeof p, .team = t->handle, .index = DK_MAX_SEGMENTS - 1, .address = addresses[i], .bytes = s->bytes};
    CALL(me, team_segment, &p);
  }
  const int bad[][2] = {{-1, 0}, {DK_MAX_SEGMENTS, 0}, {0, -1}, {0, me->count}};
  for (int i = 0; i < COUNT(bad); i++) {
    dk_team_segment_params p = {.size = sizeof p,
                                .team = t->handle,
                                .index = bad[i][0],
                                .owner = bad[i][1],
                                .address = s->at[0],
                                .bytes = 4096};
    expect(me, dk.team_segment(&p) != DK_OK, "segment %d of rank %d was accepted", bad[i][0], bad[i][1]);
  }
}

static const struct test_case cases[] = {
    {"peer rows/BF16, 2 ranks", segments, 2, &bf16, QUICK, DK_CAP_PEER_ROWS, 0},
    {"peer rows/BF16, 8 ranks", segments, 8, &bf16, USUAL, DK_CAP_PEER_ROWS, 0},
    {"peer rows/FP8", segments, 3, &fp8, QUICK, DK_CAP_PEER_ROWS, 0},
    {"peer rows/skewed", segments, 4, &skewed, USUAL, DK_CAP_PEER_ROWS, 0},
    {"peer rows/worst case", segments, 3, &padded, QUICK, DK_CAP_PEER_ROWS, 0},
    {"peer rows/segments come and go", forgotten, 2, NULL, QUICK, DK_CAP_PEER_ROWS, 0},
};
GROUP(peer_rows_cases);
