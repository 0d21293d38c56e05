/* case_release.c - memory that is given back and comes again at the same addresses: alone, and under a team. */
#include <string.h>
#include <unistd.h>

#include "lowlat.h"
#include "normal.h"
#include "routed.h"

static const struct ll_spec kLowLatency = {
    .tokens = 10, .max_tokens = 16, .hidden = 256, .experts = 12, .topk = 3, .index_bytes = 8};
static const struct normal_spec kNormal = {.tokens = 40, .experts = 12, .topk = 3, .index_bytes = 8, .row_bytes = 512};
static const struct combine_spec kCombine = {.hidden = 256, .weights = true};

static void expect_filled(struct rank *me, const char *what, uint64_t at, uint64_t bytes, uint8_t wanted) {
  struct mark mark = set_mark(me);
  struct tensor t = tensor(me, what, bytes);
  copy(me, t.at, at, bytes);
  fetch_tensor(me, t);
  finish(me);
  for (uint64_t i = 0; i < bytes; i++)
    expect(me, ((uint8_t *)t.host)[i] == wanted, "%s: byte %lu is 0x%02x, wanted 0x%02x", what, (unsigned long)i,
           ((uint8_t *)t.host)[i], wanted);
  back_to(me, mark);
}

static int32_t release(uint64_t mem) {
  dk_mem_release_params p = {.size = sizeof p, .mem = mem};
  return dk.mem_release(&p);
}

static int32_t restore(uint64_t mem, uint32_t kind) {
  dk_mem_restore_params p = {.size = sizeof p, .mem = mem, .kind = kind, .fd = -1};
  return dk.mem_restore(&p);
}

/* What a peer has mapped keeps its content, the owner's addresses can be touched, and what comes again is zeroed. */
static void memory(struct rank *me) {
  const uint64_t bytes = (uint64_t)5 << 20;
  dk_mem_alloc_params own = {.size = sizeof own, .device = seat_device(me->seat), .bytes = bytes};
  CALL(me, mem_alloc, &own);
  struct share peer = {.mem = own.mem, .bytes = own.out_bytes};
  dk_mem_export_params out = {.size = sizeof out, .mem = own.mem, .fd = -1};
  CALL(me, mem_export, &out);
  dk_mem_import_params in = {
      .size = sizeof in, .device = seat_device(me->seat), .bytes = own.out_bytes, .kind = out.kind, .fd = out.fd};
  memcpy(in.blob, out.blob, sizeof in.blob);
  CALL(me, mem_import, &in);
  close(out.fd);
  for (uint8_t round = 1; round < 4; round++) {
    expect(me, restore(own.mem, DK_SHARE_NONE) == DK_ESTATE, "memory that is there was restored");
    fill(me, own.address, bytes, round);
    finish(me);
    expect(me, release(own.mem) == DK_OK, "it was not released");
    expect(me, release(own.mem) == DK_ESTATE, "it was released twice");
    expect_filled(me, "a peer's mapping", in.address + bytes - 4096, 4096, round);
    fill(me, own.address, bytes, 0x77); /* a view of the caller */
    finish(me);
    expect_filled(me, "a peer's mapping", in.address, 4096, round);
    expect(me, release(in.mem) == DK_OK, "the mapping was not released");
    expect(me, restore(in.mem, DK_SHARE_FD) != DK_OK, "a mapping of nothing was restored");
    expect(me, restore(own.mem, DK_SHARE_FD) != DK_OK, "allocated memory was restored from a descriptor");
    expect(me, restore(own.mem, DK_SHARE_NONE) == DK_OK, "it was not restored");
    expect_filled(me, "restored memory", own.address, 8192, 0);
    expect_filled(me, "restored memory", own.address + bytes - 8192, 8192, 0);
    CALL(me, mem_export, &out);
    dk_mem_restore_params again = {.size = sizeof again, .mem = in.mem, .kind = out.kind, .fd = out.fd};
    CALL(me, mem_restore, &again);
    close(out.fd);
    fill(me, own.address + 4096, 4096, 0x10 + round);
    finish(me);
    expect_filled(me, "the mapping again", in.address + 4096, 4096, 0x10 + round);
    fill(me, in.address, 4096, 0x20 + round);
    finish(me);
    expect_filled(me, "restored memory", own.address, 4096, 0x20 + round);
  }
  expect(me, release(own.mem) == DK_OK, "it was not released");
  dk_mem_free_params end[] = {{.size = sizeof *end, .mem = peer.mem}, {.size = sizeof *end, .mem = in.mem}};
  for (int i = 0; i < COUNT(end); i++) CALL(me, mem_free, &end[i]);
}

static void release_team(struct team *t) {
  dk_team_release_params p = {.size = sizeof p, .team = t->handle, .captured = 1};
  CALL(t->me, team_release, &p);
  release_share(t->me, t->block);
}

static void restore_team(struct team *t) {
  restore_share(t->me, t->block);
  dk_team_restore_params p = {.size = sizeof p, .team = t->handle};
  CALL(t->me, team_restore, &p);
  meet(t->me);
}

static struct combine *dispatch_and_combine(struct team *t, const struct normal_spec *spec, uint64_t salt) {
  struct normal *n = make_normal(t, spec, salt);
  dispatch_and_check(n);
  struct combine *c = make_combine(n, &kCombine, salt);
  run_combine(c);
  check_combine(c);
  return c;
}

static uint64_t calls_counted(struct team *t) {
  flush_stats(t);
  return t->stats->ops[DK_OP_LL_DISPATCH].calls;
}

/* Operations of a released team leave at once and write no record, only that they ran, as a replayed graph must; then
 * all is as new. */
static void teams(struct rank *me) {
  struct team *t = make_ll_team(me, &kLowLatency, me->test->arg ? DK_TEAM_SHRINK : 0);
  for (uint64_t round = 0; round < 4; round++) {
    struct mark mark = set_mark(me);
    struct combine *c = dispatch_and_combine(t, &kNormal, round);
    struct normal *n = c->normal;
    struct ll *l = make_ll(t, &kLowLatency, round + 50);
    for (uint64_t i = 0; i <= round; i++) ll_round(l, 60 + i); /* numbers of calls odd and even */
    uint64_t counted = calls_counted(t), finished = t->status->progress;
    if (me->index == 0) pause_ms(2);
    if (settings.one_mapping) meet(me); /* a peer's calls would read what is gone here */
    release_team(t);
    uint64_t start = now_ns();
    run_layout(n);
    run_notify(n);
    run_dispatch(n, DK_DISPATCH_CACHED);
    run_combine(c);
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
    run_ll_combine(l, DK_PHASE_SEND, 2);
    run_ll_combine(l, DK_PHASE_RECV, 2);
    run_clean(t, 0, 0, 0);
    run_clean(t, kLowLatency.max_tokens, kLowLatency.hidden, kLowLatency.experts);
    if (me->test->arg) run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
    run_barrier(t);
    finish(me);
    expect(me, now_ns() - start < limit_ns(5), "the calls of a released team took %.3f s",
           (double)(now_ns() - start) * 1e-9);
    expect_no_rows(l);
    expect_nan(l);
    expect_healthy(t);
    expect(me, t->status->progress > finished, "the host cannot see that a released team's calls ran");
    expect(me, calls_counted(t) > counted, "statistics began anew");
    restore_team(t);
    back_to(me, mark);
  }
}

/* The same of calls for few rows, with a routing and without: their kernels look at peers before these answer. */
static void few_rows(struct rank *me) {
  static const struct normal_spec spec = {
      .tokens = 40, .experts = 12, .topk = 3, .index_bytes = 8, .row_bytes = 512, .spare = 5, .at_once = true};
  static const struct routed_spec with_routing = {.tokens = 12,
                                                  .experts = 4,
                                                  .topk = 3,
                                                  .hidden = 256,
                                                  .row_bytes = 512,
                                                  .alignment = 4,
                                                  .worst = true,
                                                  .at_once = true};
  struct team_spec wide = {.nvl_bytes = 8 << 20, .trace = -1};
  struct team *t = make_team(me, &wide);
  for (uint64_t round = 0; round < 3; round++) {
    struct mark mark = set_mark(me);
    struct combine *c = dispatch_and_combine(t, &spec, round);
    struct normal *n = c->normal;
    struct routed *r = make_routed(t, &with_routing, round);
    run_routed(r);
    if (settings.one_mapping) meet(me);
    release_team(t);
    run_dispatch(n, 0);
    run_combine(c);
    run_routed_dispatch(r);
    dk_combine_params combine = routed_combine(r);
    CALL(me, combine, &combine);
    finish(me);
    expect_healthy(t);
    fetch_tensor(me, n->head);
    fetch_tensor(me, r->slot);
    finish(me);
    for (int i = 0; i < n->tokens * me->count; i++)
      expect(me, ((int32_t *)n->head.host)[i] == -1, "send_head[%d] of a released team's call is set", i);
    for (int i = 0; i < r->tokens * with_routing.topk; i++)
      expect(me, ((int32_t *)r->slot.host)[i] == -1, "dst_slot[%d] of a released team's call is set", i);
    restore_team(t);
    back_to(me, mark);
  }
}

static const struct test_case cases[] = {
    {"release/memory", memory, 1, NULL, QUICK, 0, 0},
    {"release/team, 3 ranks", teams, 3, NULL, QUICK, 0, 0},
    {"release/team with shrink, 2 ranks", teams, 2, "shrink", QUICK, 0, 0},
    {"release/few rows, 3 ranks", few_rows, 3, NULL, QUICK, DK_CAP_AT_ONCE, 0},
};
GROUP(release_cases);
