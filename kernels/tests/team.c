/* team.c - teams: a symmetric block of each rank, its status words and statistics, and the small operations. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "suite.h"

static uint64_t pages(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static dk_block_sizes_params sizes_for(struct rank *me, const struct team_spec *spec) {
  dk_block_sizes_params p = {.size = sizeof p,
                             .num_ranks = me->count,
                             .num_nvl_peers = spec->node ? spec->node : MAX_SEATS,
                             .flags = spec->flags,
                             .nvl_bytes = spec->nvl_bytes,
                             .rdma_bytes = spec->rdma_bytes,
                             .max_row_bytes = spec->min_row};
  CALL(me, block_sizes, &p);
  if (spec->min_row) {
    p.nvl_bytes = p.min_nvl_bytes;
    p.rdma_bytes = p.rdma_bytes ? p.rdma_bytes : p.min_rdma_bytes;
    CALL(me, block_sizes, &p);
  }
  return p;
}

static void make_stats(struct team *t, int trace, dk_team_create_params *p) {
  struct rank *me = t->me;
  uint64_t peers = sizeof(dk_stats_page), records = peers + 2 * DK_NUM_OPS * sizeof(uint64_t) * (uint64_t)me->count;
  uint64_t total = records + (uint64_t)trace * sizeof(dk_trace_record);
  t->stats = host_words(me, pages(total), 4096, &p->stats);
  p->host_stats = (uintptr_t)t->stats;
  *t->stats = (dk_stats_page){.magic = DK_STATS_MAGIC,
                              .version = DK_STATS_VERSION,
                              .total_bytes = (uint32_t)total,
                              .num_ops = DK_NUM_OPS,
                              .rank = me->index,
                              .num_ranks = me->count,
                              .state = 1,
                              .peers_offset = peers,
                              .trace_offset = records,
                              .trace_len = (uint64_t)trace};
}

/* Ranks of this process on the same device, and which of them this is. */
static void share_device(struct rank *me, dk_team_create_params *p) {
  int mine = me->socket >= 0 ? me->index : -1 - seat_ordinal(me->seat), all[MAX_SEATS];
  gather(me, &mine, sizeof mine, -1, all, NULL);
  for (int i = 0; i < me->count; i++) {
    if (all[i] != mine) continue;
    p->sm_share_index += i < me->index;
    p->sm_share++;
  }
}

/* ---- Nodes ------------------------------------------------------------------------------------------------------- */

static bool on_my_node(const struct team *t, int rank) { return rank / t->node == t->me->index / t->node; }

/* Queue pairs to every rank that the team does not map: remote ones first, beginning with the next rank. */
static void open_transport(struct team *t, const struct team_spec *spec) {
  struct rank *me = t->me;
  if (!dk.transport_open) skip(me, "the library has no transport");
  int32_t peers[MAX_SEATS];
  dk_transport_open_params p = {
      .size = sizeof p, .device = seat_device(me->seat), .rank = me->index, .num_ranks = me->count};
  for (int local = 0; local < 2; local++)
    for (int i = 1; i < me->count; i++) {
      int peer = (me->index + i) % me->count;
      if (on_my_node(t, peer) == local && (!local || spec->flags & DK_TEAM_LL_TRANSPORT)) peers[p.num_peers++] = peer;
    }
  p.num_qps = spec->qps ? spec->qps : 3;
  p.qp_depth = spec->qp_depth ? spec->qp_depth : 64;
  p.flags = spec->transport_flags;
  p.host_peers = (uintptr_t)peers;
  p.host_blocks = (uintptr_t)t->block->at;
  p.block_bytes = t->block->bytes;
  p.seed = spec->seed;
  CALL(me, transport_open, &p);
  t->transport = p.transport;
  t->qps = p.num_qps;
  keep_transport(me, p.transport);
}

static struct team_spec split_spec(const struct rank *me, const struct team_spec *spec) {
  struct team_spec split = *spec;
  if (!me->split) return split;
  split.node = me->split->node;
  if (!split.rdma_bytes && !split.min_row) split.rdma_bytes = me->split->rdma_bytes;
  split.qps = me->split->qps;
  split.qp_depth = me->split->qp_depth;
  split.transport_flags = me->split->transport_flags;
  split.seed = me->split->seed;
  split.flags |= me->split->flags;
  return split;
}

struct team *make_team(struct rank *me, const struct team_spec *usual) {
  struct team_spec split = split_spec(me, usual), *spec = &split;
  struct team *t = scratch(me, sizeof *t);
  t->me = me;
  t->node = spec->node ? spec->node : MAX_SEATS;
  t->flags = spec->flags;
  t->timeout_ns = limit_ns(10);
  dk_block_sizes_params sizes = sizes_for(me, spec);
  t->nvl_bytes = sizes.nvl_bytes;
  t->rdma_bytes = sizes.rdma_bytes;
  dk_team_create_params p = {.size = sizeof p,
                             .device = seat_device(me->seat),
                             .rank = me->index,
                             .num_ranks = me->count,
                             .num_nvl_peers = t->node,
                             .flags = spec->flags,
                             .control_bytes = sizes.control_bytes,
                             .wire_bytes = sizes.wire_bytes,
                             .nvl_bytes = t->nvl_bytes,
                             .rdma_bytes = t->rdma_bytes};
  p.wire_offset = p.control_bytes;
  p.nvl_offset = t->nvl_offset = p.wire_offset + pages(p.wire_bytes);
  p.rdma_offset = t->rdma_offset = p.nvl_offset + pages(p.nvl_bytes);
  t->block = share(me, p.rdma_offset + pages(p.rdma_bytes));
  uint64_t mapped[MAX_SEATS];
  for (int i = 0; i < me->count; i++) mapped[i] = on_my_node(t, i) ? t->block->at[i] : 0;
  p.host_peer_blocks = (uintptr_t)mapped;
  if (me->count > t->node || spec->flags & DK_TEAM_LL_TRANSPORT) open_transport(t, spec);
  p.transport = t->transport;
  t->status = host_words(me, DK_STATUS_BYTES, 4096, &p.status);
  p.host_status = (uintptr_t)t->status;
  t->status->abort_rank = -1;
  if (spec->trace >= 0) make_stats(t, spec->trace, &p);
  share_device(me, &p);
  CALL(me, team_create, &p);
  t->handle = p.team;
  keep_team(me, t);
  meet(me);
  return t;
}

static const uint64_t *peer_table(const struct team *t, int which, uint32_t op) {
  const uint64_t *tables = (const uint64_t *)((const char *)t->stats + t->stats->peers_offset);
  return tables + ((uint64_t)which * DK_NUM_OPS + op) * (uint64_t)t->me->count;
}

uint64_t peer_bytes(const struct team *t, uint32_t op, int peer) { return peer_table(t, 0, op)[peer]; }
uint64_t peer_wait(const struct team *t, uint32_t op, int peer) { return peer_table(t, 1, op)[peer]; }

uint64_t rdma_bytes_for(struct rank *me, int max_tokens, int hidden, int experts) {
  dk_ll_layout_params p = {
      .size = sizeof p, .num_ranks = me->count, .num_max_tokens = max_tokens, .hidden = hidden, .num_experts = experts};
  CALL(me, ll_layout, &p);
  return p.rdma_bytes;
}

/* ---- Failures ---------------------------------------------------------------------------------------------------- */

static void describe(const dk_failure *f, char *text, size_t size) {
  snprintf(text, size,
           "%s in %s (phase %u) call %" PRIu64 ": rank %d, peer %d, field %s, expected %" PRId64 ", seen %" PRId64
           ", waited %.3f s",
           code_name((int32_t)f->code), op_name(f->op), f->phase, f->call, f->rank, f->peer, field_name(f->field),
           f->expected, f->seen, (double)f->waited_ns * 1e-9);
}

void deliver(struct team *t) {
  dk_transport_quiet_params p = {.size = sizeof p,
                                 .transport = t->transport,
                                 .stream = t->me->stream,
                                 .peer = -1,
                                 .qp = -1,
                                 .timeout_ns = t->timeout_ns};
  if (t->transport) CALL(t->me, transport_quiet, &p);
  finish(t->me);
}

void expect_healthy(struct team *t) {
  if (__atomic_load_n(&t->status->sticky, __ATOMIC_ACQUIRE) == 0) return;
  char text[320];
  describe(&t->status->failure, text, sizeof text);
  fail(t->me, "the team failed: %s", text);
}

void expect_failure(struct team *t, int32_t code, uint32_t op, int peer) {
  uint32_t sticky = __atomic_load_n(&t->status->sticky, __ATOMIC_ACQUIRE);
  const dk_failure *f = &t->status->failure;
  expect(t->me, sticky, "%s should have failed with %s, but the team is well", op_name(op), code_name(code));
  char text[320];
  describe(f, text, sizeof text);
  bool right = sticky == (uint32_t)code && f->code == (uint32_t)code && f->op == op && f->rank == t->me->index;
  right = right && (peer == -2 || f->peer == peer);
  expect(t->me, right, "wanted %s in %s for peer %d; sticky is %s, the record says %s", code_name(code), op_name(op),
         peer, code_name((int32_t)sticky), text);
}

dk_failure expect_refusal(struct team *t, int32_t code, uint32_t op, int peer, uint32_t field) {
  expect_healthy(t);
  dk_failure *first = &t->status->refusals[0], f;
  uint32_t got = __atomic_load_n(&first->code, __ATOMIC_ACQUIRE);
  expect(t->me, got != 0, "%s should have been refused for %s", op_name(op), field_name(field));
  f = *first;
  char text[320];
  describe(&f, text, sizeof text);
  bool right = got == (uint32_t)code && f.op == op && f.rank == t->me->index && f.field == field;
  right = right && (peer == -2 || f.peer == peer) && f.call == t->calls[op];
  expect(t->me, right, "wanted %s in %s call %" PRIu64 " for %s of peer %d; the refusal says %s", code_name(code),
         op_name(op), t->calls[op], field_name(field), peer, text);
  expect(t->me, t->status->refused == 1, "a refusal is there, and `refused` is %u", t->status->refused);
  __atomic_store_n(&t->status->refused, 0, __ATOMIC_RELEASE);
  __atomic_store_n(&first->code, 0, __ATOMIC_RELEASE);
  expect_no_refusal(t);
  return f;
}

void expect_no_refusal(struct team *t) {
  for (int i = 0; i < DK_MAX_REFUSALS; i++) {
    if (__atomic_load_n(&t->status->refusals[i].code, __ATOMIC_ACQUIRE) == 0) continue;
    char text[320];
    describe(&t->status->refusals[i], text, sizeof text);
    fail(t->me, "a call was refused: %s", text);
  }
}

void set_abort(struct team *t, int32_t code, int culprit) {
  __atomic_store_n(&t->status->abort_rank, culprit, __ATOMIC_RELAXED);
  __atomic_store_n(&t->status->abort_word, (uint32_t)code, __ATOMIC_RELEASE);
}

/* ---- Small operations -------------------------------------------------------------------------------------------- */

void run_barrier(struct team *t) {
  dk_barrier_params p = PARAMS(barrier, t, DK_OP_BARRIER);
  CALL(t->me, barrier, &p);
}

void run_clean(struct team *t, int max_tokens, int hidden, int experts) {
  dk_clean_params p = PARAMS(clean, t, DK_OP_CLEAN);
  p.num_max_tokens = max_tokens;
  p.hidden = hidden;
  p.num_experts = experts;
  CALL(t->me, clean, &p);
}

void run_mask(struct team *t, int what, int rank, int value, uint64_t out) {
  dk_mask_params p = PARAMS(mask, t, DK_OP_MASK);
  p.what = what;
  p.rank = rank;
  p.value = value;
  p.out = out;
  CALL(t->me, mask, &p);
}

void expect_masks(struct team *t, uint32_t masked) {
  struct rank *me = t->me;
  struct tensor out = tensor(me, "mask_status", 4 * (uint64_t)me->count);
  run_mask(t, DK_MASK_QUERY, 0, 0, out.at);
  fetch_tensor(me, out);
  finish(me);
  for (int i = 0; i < me->count; i++) {
    int32_t wanted = masked >> i & 1, got = ((int32_t *)out.host)[i];
    expect(me, got == wanted, "mask of rank %d is %d, wanted %d", i, got, wanted);
  }
}

void flush_stats(struct team *t) {
  dk_stats_flush_params p = {.size = sizeof p, .team = t->handle, .timeout_ns = limit_ns(10)};
  CALL(t->me, stats_flush, &p);
}
