/* case_ll_internode_edges.c - hazards of low latency across nodes: slots that are used again too early, mirrors that
 * are overwritten while they are read; and the bytes and queue pairs of a call. */
#include <string.h>

#include "lowlat.h"

static const struct ll_spec kSpec = {
    .tokens = 14, .max_tokens = 16, .hidden = 256, .experts = 4, .topk = 3, .index_bytes = 8};

#define PLACE(name, ...) static const struct team_spec name = {__VA_ARGS__}
PLACE(mapped, .node = 0);
PLACE(singles, .node = 1, .qps = 3);
PLACE(singles_late, .node = 1, .qps = 2, .transport_flags = DK_TRANSPORT_LATE, .seed = 3);
PLACE(one_queue, .node = 1, .qps = 1);
PLACE(one_queue_late, .node = 1, .qps = 1, .transport_flags = DK_TRANSPORT_LATE, .seed = 5);
PLACE(pairs, .node = 2, .qps = 4);
PLACE(pairs_late, .node = 2, .qps = 3, .transport_flags = DK_TRANSPORT_LATE, .seed = 4);
PLACE(unmapped, .flags = DK_TEAM_LL_TRANSPORT, .qps = 4);

static struct ll_spec spec_for(struct rank *me) {
  struct ll_spec spec = kSpec;
  spec.experts *= me->count;
  me->split = me->test->arg;
  return spec;
}

/* ---- Slots ------------------------------------------------------------------------------------------------------- */

/* Rank 1 receives the second of two sends, and the first one later. The others may send again only after that. */
static void read_before_reuse(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *a = make_ll(t, &spec, 3), *b = make_ll(t, &spec, 4);
  for (uint64_t round = 0; round < 3; round++) {
    new_ll_payload(a, 2 * round);
    new_ll_payload(b, 2 * round + 1);
    run_ll_dispatch(a, DK_PHASE_SEND, 0);
    run_ll_dispatch(b, DK_PHASE_SEND, 1);
    if (me->index == 1) {
      run_ll_dispatch(b, DK_PHASE_RECV, 1);
      finish(me);
      pause_ms(30);
      run_ll_dispatch(a, DK_PHASE_RECV, 0);
    } else {
      run_ll_dispatch(a, DK_PHASE_RECV, 0);
      run_ll_dispatch(b, DK_PHASE_RECV, 1);
    }
    run_ll_dispatch(a, DK_PHASE_SEND, 0); /* enqueued before anything is checked */
    check_ll_dispatch(b);
    run_ll_dispatch(a, DK_PHASE_RECV, 0);
    check_ll_dispatch(a);
    make_expert_rows(a, round);
    run_ll_combine(a, DK_PHASE_BOTH, 2);
    check_ll_combine(a);
  }
}

/* Rank 0 masks and unmasks rank 1 and makes two more calls while rank 1 waits for rank 2, so rank 0 overwrites its rows
 * at rank 1. Rank 1 detects that, before or after it reads the rows, and masks rank 0. */
static void send_and_receive_alone(struct ll *l, uint64_t salt) {
  struct team *t = l->team;
  make_expert_rows(l, salt);
  run_ll_combine(l, DK_PHASE_SEND, 2);
  run_mask(t, DK_MASK_UPDATE, 1, 1, 0);
  run_ll_combine(l, DK_PHASE_RECV, 2);
  run_mask(t, DK_MASK_UPDATE, 1, 0, 0);
  finish(t->me);
}

static void overwritten(struct rank *me) {
  if (!dk.transport_open) skip(me, "who notices depends on where the library keeps rows");
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3);
  t->timeout_ns = limit_ns(10);
  ll_round(l, 4);
  ll_dispatch_and_answer(l, 5);
  meet(me);
  if (me->index == 0) {
    run_ll_combine(l, DK_PHASE_SEND, 2);
    finish(me);
    pause_ms(30); /* usually rank 1 has the message by now; else it detects that rank 0 has moved on */
    run_mask(t, DK_MASK_UPDATE, 2, 1, 0);
    run_mask(t, DK_MASK_UPDATE, 1, 1, 0);
    run_ll_combine(l, DK_PHASE_RECV, 2);
    run_mask(t, DK_MASK_UPDATE, 1, 0, 0);
    finish(me);
    for (uint64_t again = 0; again < 2; again++) send_and_receive_alone(l, 60 + again);
    meet(me);
    return;
  }
  if (me->index == 1) run_ll_combine(l, DK_PHASE_BOTH, 2);
  if (me->index == 2) pause_ms(30);
  meet(me);
  if (me->index == 2) run_ll_combine(l, DK_PHASE_BOTH, 2);
  l->absent = me->index == 1 || !t->transport
                  ? 1u << 0
                  : 0; /* rank 2 was masked as well; it has a mirror of its own, but shares the slot */
  check_ll_combine(l);
  expect_masks(t, l->absent);
}

/* The others mask rank 0 right after they have sent to it, and go on. Their slots may not be used again before the puts
 * have completed: rank 0 receives all rows. The others receive none, so that they are fast. */
static void on_its_way(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  spec.pattern = ONE_HOT;
  spec.tokens = spec.max_tokens;
  struct team *t = make_ll_team(me, &spec, DK_TEAM_SHRINK);
  struct ll *l = make_ll(t, &spec, 3), *next = make_ll(t, &spec, 4);
  for (uint64_t round = 0; round < 12; round++) {
    new_ll_payload(l, 10 * round);
    new_ll_payload(next, 10 * round + 1);
    finish(me);
    meet(me);
    run_ll_dispatch(l, DK_PHASE_SEND, 0);
    if (me->index != 0) run_mask(t, DK_MASK_UPDATE, 0, 1, 0);
    run_ll_dispatch(l, DK_PHASE_RECV, 0);
    for (int i = 0; i < 2 && me->index != 0; i++) run_ll_dispatch(next, DK_PHASE_BOTH, 0);
    l->absent = next->absent = me->index != 0 ? 1u << 0 : 0;
    if (me->index != 0) check_ll_dispatch(next);
    check_ll_dispatch(l);
    meet(me);
    run_mask(t, DK_MASK_CLEAN, 0, 0, 0);
    finish(me);
    meet(me);
  }
}

/* Zero copy: after a combine the caller may overwrite its rows, so their puts must have completed. */
static void callers_rows(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  spec.combine_flags = DK_LL_ZERO_COPY;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  for (uint64_t round = 0; round < 12; round++) {
    new_ll_payload(l, round);
    ll_dispatch_and_answer(l, round);
    run_ll_combine(l, DK_PHASE_BOTH, 2);
    fill(me, t->block->at[me->index] + t->rdma_offset, t->rdma_bytes, 0xff); /* next on the stream */
    check_ll_combine(l);
  }
}

/* The others have sent and take no part any more (an engine's Release): rank 0 has every row, and waits for its own
 * puts alone. */
static void callers_rows_of_the_last(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  spec.combine_flags = DK_LL_ZERO_COPY;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  const bool last = me->index == 0;
  for (uint64_t round = 0; round < 24; round++) {
    new_ll_payload(l, round);
    ll_dispatch_and_answer(l, round);
    if (last) meet(me);
    run_ll_combine(l, DK_PHASE_SEND, 2);
    if (last) {
      finish(me);
    } else {
      deliver(t);
      meet(me);
    }
    for (int i = 1; last && i < me->count; i++) __atomic_store_n(&t->status->dead[i], 1, __ATOMIC_RELEASE);
    run_ll_combine(l, DK_PHASE_RECV, 2);
    check_ll_combine(l);
    for (int i = 1; last && i < me->count; i++) __atomic_store_n(&t->status->dead[i], 0, __ATOMIC_RELEASE);
  }
}

/* One rank sends what the others never receive; after a clean no call may match it, although the call numbers are
 * equal. */
static void sent_before_a_clean(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 4);
  for (int round = 0; round < 12; round++) {
    if (me->index == round % me->count) {
      new_ll_payload(l, 1000 + (uint64_t)round);
      run_ll_dispatch(l, DK_PHASE_SEND, 0);
      t->calls[DK_OP_LL_DISPATCH]--; /* the call has no other half */
    }
    run_clean(t, 0, 0, 0);
    new_ll_payload(l, (uint64_t)round);
    ll_round(l, (uint64_t)round);
  }
}

/* ---- Bytes and queue pairs
 * ------------------------------------------------------------------------------------------------ */

struct traffic {
  uint64_t bytes, posted[8];
};

static struct traffic traffic_to(struct team *t, int peer) {
  struct traffic sum = {0};
  for (int qp = 0; qp < t->qps; qp++) {
    dk_transport_query_params p = {.size = sizeof p, .transport = t->transport, .peer = peer, .qp = qp};
    CALL(t->me, transport_query, &p);
    sum.bytes += p.bytes;
    sum.posted[qp] = p.posted;
  }
  return sum;
}

static bool beyond(const struct team *t, int peer) {
  return peer != t->me->index && (t->flags & DK_TEAM_LL_TRANSPORT || peer / t->node != t->me->index / t->node);
}

static int rows_for(const struct ll *l, int peer) { return rows_between(l->routing, l->team->me->index, peer); }

/* Rows that my experts have for a rank. */
static int answers_for(const struct ll *l, int peer) {
  int rows = 0, first = l->team->me->index * l->local;
  for (int token = 0; token < l->routing->tokens[peer]; token++)
    for (int e = 0; e < l->local; e++) rows += names(l->routing, peer, token, first + e);
  return rows;
}

/* Bytes of each remote rank's rows, once, and of small tables; none for mapped ranks. */
static void bytes(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  spec.hidden = 1024;
  spec.format = DK_FORMAT_FP8;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  struct traffic before[MAX_SEATS], between[MAX_SEATS], after[MAX_SEATS];
  for (int i = 0; i < me->count; i++)
    if (beyond(t, i)) before[i] = traffic_to(t, i);
  ll_dispatch_and_answer(l, 5);
  for (int i = 0; i < me->count; i++)
    if (beyond(t, i)) between[i] = traffic_to(t, i);
  run_ll_combine(l, DK_PHASE_BOTH, 2);
  check_ll_combine(l);
  const uint64_t words = 256; /* messages */
  for (int i = 0; i < me->count; i++) {
    if (!beyond(t, i)) continue;
    after[i] = traffic_to(t, i);
    uint64_t got = between[i].bytes - before[i].bytes, rows = (uint64_t)rows_for(l, i) * (1024 + 1024 / 32);
    uint64_t table = 4 * (uint64_t)l->tokens * (uint64_t)spec.topk;
    expect(me, got >= rows + table && got <= rows + table + words,
           "dispatch put %lu bytes to rank %d, of which rows %lu and indices %lu", (unsigned long)got, i,
           (unsigned long)rows, (unsigned long)table);
    uint64_t answers = (uint64_t)answers_for(l, i), tables = 4 * answers + 16 * (uint64_t)l->local;
    got = after[i].bytes - between[i].bytes;
    expect(me, got >= 2048 * answers && got <= 2048 * answers + tables + words,
           "combine put %lu bytes to rank %d for %lu rows", (unsigned long)got, i, (unsigned long)answers);
  }
}

/* Rows of local expert e use QP e modulo their number; messages and tables use the first. */
static void queue_pairs(struct rank *me) {
  struct ll_spec spec = spec_for(me);
  spec.topk = 1;
  spec.tokens = spec.max_tokens;
  struct team *t = make_ll_team(me, &spec, 0);
  struct ll *l = make_ll(t, &spec, 3);
  ll_round(l, 4);
  for (int i = 0; i < me->count; i++) {
    if (!beyond(t, i)) continue;
    struct traffic before = traffic_to(t, i);
    meet(me);
    run_ll_dispatch(l, DK_PHASE_BOTH, 0);
    check_ll_dispatch(l);
    struct traffic after = traffic_to(t, i);
    for (int qp = 1; qp < t->qps; qp++) {
      uint64_t rows = 0, posted = after.posted[qp] - before.posted[qp];
      for (int token = 0; token < l->tokens; token++)
        for (int e = qp; e < l->local; e += t->qps) rows += names(l->routing, me->index, token, i * l->local + e);
      expect(me, posted == (rows ? rows + 2 : 0), "dispatch posted %lu operations to rank %d on QP %d for %lu rows",
             (unsigned long)posted, i, qp, (unsigned long)rows);
    }
  }
}

/* ---- Teams ------------------------------------------------------------------------------------------------------- */

/* A team with DK_TEAM_LL_TRANSPORT needs a transport that reaches every rank. */
static void without_transport(struct rank *me) {
  if (!dk.transport_open) skip(me, "the library has no transport");
  struct team_spec spec = {.rdma_bytes = 1 << 16, .flags = DK_TEAM_LOW_LATENCY, .trace = -1};
  struct team *t = make_team(me, &spec);
  dk_block_sizes_params plain = {
      .size = sizeof plain, .num_ranks = me->count, .num_nvl_peers = MAX_SEATS, .rdma_bytes = 1 << 16};
  CALL(me, block_sizes, &plain);
  dk_block_sizes_params sizes = plain;
  sizes.flags = DK_TEAM_LL_TRANSPORT;
  CALL(me, block_sizes, &sizes);
  expect(me, sizes.wire_bytes > plain.wire_bytes, "a team with mirrors is as small as one without");
  dk_team_create_params p = {.size = sizeof p,
                             .device = seat_device(me->seat),
                             .rank = me->index,
                             .num_ranks = me->count,
                             .num_nvl_peers = MAX_SEATS,
                             .flags = DK_TEAM_LOW_LATENCY | DK_TEAM_LL_TRANSPORT};
  p.host_peer_blocks = (uintptr_t)t->block->at;
  p.control_bytes = p.wire_offset = sizes.control_bytes;
  p.wire_bytes = sizes.wire_bytes;
  p.rdma_bytes = 1 << 16;
  p.host_status = p.status = (uintptr_t)t->status;
  int32_t code = dk.team_create(&p);
  expect(me, code == DK_EUNSUPPORTED, "a team that needs a transport and has none: %s", code_name(code));
}

static const struct test_case cases[] = {
    {"ll internode edges/a slot is read before it is used again, one node", read_before_reuse, 3, &mapped, QUICK, 0, 0},
    {"ll internode edges/a slot is read before it is used again", read_before_reuse, 3, &singles, QUICK, 0, 0},
    {"ll internode edges/a slot is read before it is used again, late", read_before_reuse, 4, &pairs_late, QUICK, 0, 0},
    {"ll internode edges/overwritten while it waits, one node", overwritten, 3, &mapped, QUICK, 0, 0},
    {"ll internode edges/overwritten while it waits", overwritten, 3, &singles, QUICK, 0, 0},
    {"ll internode edges/overwritten while it waits, late", overwritten, 3, &singles_late, QUICK, 0, 0},
    {"ll internode edges/on its way to a masked rank", on_its_way, 3, &one_queue, QUICK, 0, 0},
    {"ll internode edges/on its way to a masked rank, late", on_its_way, 3, &one_queue_late, QUICK, 0, 0},
    {"ll internode edges/callers' rows are free after a combine", callers_rows, 3, &singles, QUICK, 0, 0},
    {"ll internode edges/callers' rows are free after a combine, late", callers_rows, 4, &singles_late, QUICK, 0, 0},
    {"ll internode edges/callers' rows of the last rank, late", callers_rows_of_the_last, 3, &singles_late, QUICK, 0,
     0},
    {"ll internode edges/sent before a clean, one node", sent_before_a_clean, 3, &mapped, QUICK, 0, 0},
    {"ll internode edges/sent before a clean, late", sent_before_a_clean, 4, &pairs_late, QUICK, 0, 0},
    {"ll internode edges/bytes, 2 nodes of 2", bytes, 4, &pairs, QUICK, 0, 0},
    {"ll internode edges/bytes, one node, unmapped", bytes, 3, &unmapped, QUICK, 0, 0},
    {"ll internode edges/queue pairs", queue_pairs, 3, &singles, QUICK, 0, 0},
    {"ll internode edges/queue pairs, one node, unmapped", queue_pairs, 3, &unmapped, QUICK, 0, 0},
    {"ll internode edges/no transport", without_transport, 2, NULL, QUICK, 0, 0},
};
GROUP(ll_internode_edges_cases);
