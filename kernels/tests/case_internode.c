/* case_internode.c - normal mode across nodes: reruns cases of one node with a transport between nodes, in some places
 * one that delays as much as it may. */
#include "lowlat.h"
#include "normal.h"
#include "rerun_on_nodes.h"

#define LATE DK_TRANSPORT_LATE
#define PLACE(name, ...) static const struct team_spec name = {.rdma_bytes = 1 << 19, __VA_ARGS__}
PLACE(pairs, .node = 2, .qps = 4, .seed = 1); /* nodes of two ranks each */
PLACE(pairs_late, .node = 2, .qps = 3, .transport_flags = LATE, .seed = 2);
PLACE(trios_late, .node = 3, .qps = 3, .transport_flags = LATE, .seed = 5);
PLACE(fours, .node = 4, .qps = 2, .seed = 3);
PLACE(fours_late, .node = 4, .qps = 5, .transport_flags = LATE, .seed = 4);
PLACE(narrow, .rdma_bytes = 1 << 16, .node = 2, .qps = 2, .seed = 11); /* room for a row of 32 KiB and no more */
PLACE(singles, .node = 1, .qps = 3, .seed = 6);
PLACE(singles_late, .node = 1, .qps = 5, .transport_flags = LATE, .seed = 7);
PLACE(shallow, .node = 2, .qps = 1, .qp_depth = 1, .seed = 8); /* always full */
PLACE(shallow_late, .node = 2, .qps = 2, .qp_depth = 2, .transport_flags = LATE, .seed = 9);
PLACE(many_qps, .node = 2, .qps = 100, .qp_depth = 4, .seed = 10);

/* Bytes are counted for the rank that this rank sends them to: rows for ranks of my node, also those that I forward
 * from my partners; and, once a node, rows for my partner there. */
static int crossing(const struct normal *n, int source, int node) { /* tokens of `source` that go to `node` */
  int tokens = 0;
  for (int t = 0; t < n->routing->tokens[source]; t++) {
    bool any = false;
    for (int r = node * n->team->node; r < (node + 1) * n->team->node; r++)
      any = any || goes_to(n->routing, source, t, r);
    tokens += any;
  }
  return tokens;
}

static uint64_t bytes_of(struct normal *n, int to, bool back) {
  struct rank *me = n->team->me;
  int peers = n->team->node, node = me->index / peers, rows = 0;
  if (to / peers != node)
    return to % peers == me->index % peers ? (uint64_t)crossing(n, back ? to : me->index, back ? node : to / peers) : 0;
  for (int other = 0; other < me->count; other++) {
    bool mine = other / peers == node;
    if (back && other % peers == to % peers) rows += rows_between(n->routing, other, me->index);
    if (!back && !mine && other % peers == me->index % peers && to != me->index)
      rows += rows_between(n->routing, other, to);
  }
  return (uint64_t)(back ? rows : rows + rows_between(n->routing, me->index, to));
}

static void counted(struct rank *me) {
  static const struct normal_spec rows = {
      .pattern = SKEWED, .tokens = 40, .experts = 24, .topk = 4, .index_bytes = 8, .row_bytes = 512, .scales = 4};
  static const struct combine_spec sums = {.hidden = 128, .weights = true};
  struct team_spec spec = {
      .nvl_bytes = 1 << 18, .rdma_bytes = 1 << 18, .node = *(const int *)me->test->arg, .trace = 0};
  struct team *t = make_team(me, &spec);
  struct normal *n = make_normal(t, &rows, 5);
  struct combine *c = make_combine(n, &sums, 6);
  for (int round = 0; round < 2; round++) {
    dispatch_and_check(n);
    run_combine(c);
    check_combine(c);
  }
  uint64_t total[2] = {0, 0};
  for (int to = 0; to < me->count; to++)
    for (int back = 0; back < 2; back++) {
      uint64_t bytes = peer_bytes(t, back ? DK_OP_COMBINE : DK_OP_DISPATCH, to);
      uint64_t wanted = 2 * bytes_of(n, to, back) * (back ? 2 * 128 + 4 * 4 : 512 + 4 * 4);
      expect(me, bytes == wanted, "%s: %lu bytes to rank %d, wanted %lu", back ? "combine" : "dispatch",
             (unsigned long)bytes, to, (unsigned long)wanted);
      total[back] += bytes;
    }
  expect(me, t->stats->ops[DK_OP_DISPATCH].bytes == total[0] && t->stats->ops[DK_OP_COMBINE].bytes == total[1],
         "bytes do not add up");
}

/* Rank 0's network delivers nothing, and the other node tells it so. Rank 1, which reads in rank 0's memory that it has
 * failed, blames rank 0 as well, and not the rank that told it. */
static void told(struct rank *me) {
  static const struct ll_spec low = {
      .tokens = 8, .max_tokens = 8, .hidden = 256, .experts = 8, .topk = 2, .index_bytes = 8};
  me->split = &pairs;
  struct team *t = make_ll_team(me, &low, 0);
  for (int peer = 2; peer < 4 && me->index == 0; peer++) {
    dk_transport_lose_params p = {.size = sizeof p, .transport = t->transport, .peer = peer};
    CALL(me, transport_lose, &p);
  }
  bool near = me->index < 2;
  t->timeout_ns = near ? limit_ns(20) : soon_ns();
  run_barrier(t); /* whose message of rank 0 does not come to the other node */
  finish(me);
  if (!near) expect_failure(t, DK_ETIMEOUT, DK_OP_BARRIER, 0);
  meet(me);
  if (me->index == 0) run_clean(t, 0, 0, 0);
  finish(me);
  if (me->index == 0) expect_failure(t, DK_EABORTED, DK_OP_CLEAN, -2);
  meet(me);
  if (me->index == 1) run_barrier(t);
  finish(me);
  if (me->index == 1) expect_failure(t, DK_ETIMEOUT, DK_OP_BARRIER, 0);
}

/* Teams that are refused: either all ranks of a node are mapped or none. Ranks 0 and 1 are rank 0's node. */
static int32_t create(struct rank *me, int ranks, uint64_t transport, uint64_t own, unsigned mapped) {
  uint64_t blocks[4] = {own}, status_at;
  for (int i = 1; i < 4; i++)
    blocks[i] = mapped >> i & 1 ? own + 4096 * (uint64_t)i : 0; /* only the address is checked */
  void *status = host_words(me, DK_STATUS_BYTES, 4096, &status_at);
  dk_block_sizes_params sizes = {
      .size = sizeof sizes, .num_ranks = 4, .num_nvl_peers = 2, .nvl_bytes = 4096, .rdma_bytes = 4096};
  CALL(me, block_sizes, &sizes);
  dk_team_create_params p = {.size = sizeof p,
                             .device = seat_device(me->seat),
                             .num_ranks = ranks,
                             .num_nvl_peers = 2,
                             .host_peer_blocks = (uintptr_t)blocks,
                             .control_bytes = sizes.control_bytes,
                             .wire_offset = sizes.control_bytes,
                             .wire_bytes = sizes.wire_bytes,
                             .nvl_bytes = 4096,
                             .rdma_bytes = 4096,
                             .host_status = (uintptr_t)status,
                             .status = status_at,
                             .sm_share = 1,
                             .transport = transport};
  int32_t code = dk.team_create(&p);
  expect(me, (code == DK_OK) == (p.team != 0), "%s, and the team is %lu", code_name(code), (unsigned long)p.team);
  dk_team_destroy_params destroy = {.size = sizeof destroy, .team = p.team};
  CALL(me, team_destroy, &destroy);
  return code;
}

static uint64_t reach(struct rank *me, uint64_t own, uint64_t bytes, int num_peers) {
  int32_t peers[2] = {2, 3};
  uint64_t blocks[4] = {own, own, own, own}; /* nothing is ever put */
  dk_transport_open_params p = {.size = sizeof p,
                                .device = seat_device(me->seat),
                                .num_ranks = 4,
                                .num_qps = 1,
                                .qp_depth = 4,
                                .num_peers = num_peers,
                                .host_peers = (uintptr_t)peers,
                                .host_blocks = (uintptr_t)blocks,
                                .block_bytes = bytes};
  CALL(me, transport_open, &p);
  keep_transport(me, p.transport);
  return p.transport;
}

static void refused(struct rank *me) {
  if (!dk.transport_open) skip(me, "the library has no transport");
  struct share *block = share(me, 64 << 20);
  uint64_t own = block->at[0], both = reach(me, own, block->bytes, 2), one = reach(me, own, block->bytes, 1);
  const struct {
    const char *what;
    int32_t code;
    int ranks;
    uint64_t transport;
    unsigned mapped;
  } teams[] = {
      {"ranks of another node without a transport", DK_EUNSUPPORTED, 4, 0, 3},
      {"a transport that does not reach all", DK_EINVAL, 4, one, 3},
      {"a rank of my node that is not mapped", DK_EINVAL, 4, both, 1},
      {"one of two ranks of another node mapped", DK_EINVAL, 4, both, 7},
      {"half a node", DK_EINVAL, 3, both, 3},
      {"two nodes", DK_OK, 4, both, 3},
  };
  for (int i = 0; i < COUNT(teams); i++) {
    int32_t code = create(me, teams[i].ranks, teams[i].transport, own, teams[i].mapped);
    expect(me, code == teams[i].code, "%s: %s, wanted %s", teams[i].what, code_name(code), code_name(teams[i].code));
  }
}

/* A call whose rows do not fit the region for other nodes is refused; rows that fit still pass. */
static void no_room(struct rank *me) {
  static const struct normal_spec fits = {.tokens = 20, .experts = 4, .topk = 2, .index_bytes = 8, .row_bytes = 1024};
  static const struct combine_spec sums = {.hidden = 64};
  struct team_spec spec = {.nvl_bytes = 1 << 20, .rdma_bytes = 4096, .node = 1, .trace = -1};
  struct team *t = make_team(me, &spec);
  struct normal *n = make_normal(t, &fits, 5);
  struct combine *c = make_combine(n, &sums, 6);
  dispatch_and_check(n);
  dk_dispatch_params d = dispatch_params(n, 0);
  dk_combine_params back = combine_params(c);
  d.hidden_bytes = 1 << 15;
  back.hidden = 1 << 14;
  int32_t codes[2] = {dk.dispatch(&d), dk.combine(&back)};
  expect(me, codes[0] == DK_EINVAL && codes[1] == DK_EINVAL, "rows of 32 KiB in a region of 4: %s, %s",
         code_name(codes[0]), code_name(codes[1]));
  back.hidden = 64;
  back.recv_src_idx = 0;
  expect(me, !n->rows || dk.combine(&back) == DK_EINVAL, "rows without their tokens' numbers were accepted");
  run_combine(c);
  check_combine(c);
}

static const int of_two = 2, of_four = 4;

#define CASE(place, name, ranks, weight) ON_NODES("normal internode", name, place, ranks, weight)
/* Calls with a routing; each rank's row crosses by itself, so that the sums are those of one node. */
#define ROUTED(place, name, ranks, weight)        \
  {"normal internode/" #place ": expand/" name,   \
   rerun_on_nodes,                                \
   ranks,                                         \
   &(const struct rerun){"expand/" name, &place}, \
   weight,                                        \
   DK_CAP_ROUTED_NODES,                           \
   0}

static const struct test_case cases[] = {
    ROUTED(pairs, "unreduced", 4, QUICK),
    ROUTED(pairs_late, "zero padding, two biases", 4, QUICK),
    ROUTED(trios_late, "duplicates", 6, USUAL),
    ROUTED(singles_late, "plain", 3, QUICK),
    ROUTED(singles, "worst case, FP8", 4, USUAL),
    ROUTED(shallow_late, "plain, FP8, scales by column", 4, QUICK),
    ROUTED(fours_late, "plain, worst case", 8, USUAL),
    ROUTED(pairs, "refused: cancelled", 4, USUAL),
    ROUTED(pairs, "refused: index E", 4, USUAL),
    CASE(pairs, "team/barrier, 3 ranks", 4, QUICK),
    CASE(pairs_late, "team/barrier, 3 ranks", 6, QUICK),
    CASE(singles_late, "team/200 barriers enqueued", 4, USUAL),
    CASE(shallow, "team/200 barriers enqueued", 4, USUAL),
    CASE(pairs, "notify/patterns on 5 ranks", 4, QUICK),
    CASE(pairs_late, "notify/patterns on 5 ranks", 6, USUAL),
    CASE(singles_late, "notify/alignments", 4, QUICK),
    CASE(pairs_late, "notify/ten in a row", 4, QUICK),
    CASE(shallow_late, "notify/512 experts a rank", 4, USUAL),
    CASE(pairs, "notify/without experts", 4, QUICK),
    CASE(pairs_late, "notify/sequence number last", 8, USUAL),

    CASE(pairs, "refused/dispatch, matrix huge", 4, QUICK),
    CASE(pairs, "refused/combine, matrix huge", 4, QUICK),
    CASE(pairs_late, "refused/dispatch, head of all tokens", 4, QUICK),
    CASE(pairs_late, "refused/combine, head out of order", 4, QUICK),
    CASE(singles, "refused/combine, handles of two exchanges", 3, QUICK),
    CASE(pairs, "worst/too few rows", 4, QUICK),

    CASE(pairs, "dispatch/BF16, 4 ranks", 4, QUICK),
    CASE(fours, "dispatch/BF16, 4 ranks", 8, USUAL),
    CASE(pairs, "dispatch/BF16, 4 ranks", 8, USUAL),
    CASE(pairs, "dispatch/BF16, 4 ranks", 6, USUAL),
    CASE(singles, "dispatch/BF16, 4 ranks", 4, QUICK),
    CASE(pairs_late, "dispatch/BF16, 4 ranks", 4, QUICK),
    CASE(fours_late, "dispatch/BF16, 4 ranks", 8, HEAVY),
    CASE(singles_late, "dispatch/BF16, 4 ranks", 4, USUAL),
    CASE(pairs, "dispatch/FP8 with scales, int32 indices", 4, QUICK),
    CASE(pairs_late, "dispatch/FP8, scales by column", 6, USUAL),
    CASE(singles, "dispatch/FP8, 56 scales", 4, USUAL),
    CASE(pairs, "dispatch/without top-k", 4, QUICK),
    CASE(pairs, "dispatch/rows of 16 bytes", 4, QUICK),
    CASE(pairs_late, "dispatch/rows of 208 bytes", 4, USUAL),
    CASE(fours, "dispatch/hidden 16384", 8, HEAVY),
    CASE(narrow, "dispatch/hidden 16384", 4, USUAL),
    CASE(pairs, "dispatch/top-31", 4, USUAL),
    CASE(pairs, "dispatch/everything -1", 4, QUICK),
    CASE(pairs_late, "dispatch/one hot expert", 4, QUICK),
    CASE(fours_late, "dispatch/skewed", 8, HEAVY),
    CASE(pairs, "dispatch/duplicates", 4, QUICK),
    CASE(pairs_late, "dispatch/a rank without tokens, one without rows", 6, USUAL),
    CASE(pairs, "dispatch/no tokens at all", 4, QUICK),
    CASE(pairs, "dispatch/rows of ones", 4, QUICK),
    CASE(pairs, "dispatch/rows of zeros", 4, QUICK),
    CASE(pairs, "dispatch/2 SMs", 4, USUAL),
    CASE(pairs_late, "dispatch/chunks of 1", 4, USUAL),
    CASE(pairs, "dispatch/smallest region, 4 ranks", 4, QUICK),
    CASE(pairs_late, "dispatch/smallest region, FP8", 6, USUAL),
    CASE(singles_late, "dispatch/smallest region, skewed", 4, USUAL),
    CASE(fours, "dispatch/smallest region, 8 ranks", 8, HEAVY),
    CASE(shallow, "dispatch/512 tokens of 4 KiB", 4, HEAVY),
    CASE(shallow_late, "dispatch/BF16, 4 ranks", 8, HEAVY),
    CASE(many_qps, "dispatch/BF16, 4 ranks", 4, USUAL),
    CASE(pairs, "dispatch/handle of another team", 4, QUICK),
    CASE(pairs_late, "dispatch/thirty calls in a row", 4, USUAL),

    CASE(pairs, "worst/spare rows, 3 ranks", 4, QUICK),
    CASE(pairs_late, "worst/FP8", 6, USUAL),
    CASE(pairs, "worst/one hot expert", 4, QUICK),
    CASE(singles, "worst/no tokens at all", 4, QUICK),
    CASE(pairs_late, "worst/cached", 4, QUICK),
    CASE(pairs, "worst/too few rows", 4, QUICK),

    CASE(pairs, "combine/4 ranks", 4, QUICK),
    CASE(fours, "combine/8 ranks", 8, USUAL),
    CASE(pairs, "combine/8 ranks", 8, USUAL),
    CASE(pairs, "combine/8 ranks", 6, USUAL),
    CASE(singles, "combine/3 ranks", 4, QUICK),
    CASE(pairs_late, "combine/3 ranks", 4, QUICK),
    CASE(fours_late, "combine/8 ranks", 8, HEAVY),
    CASE(singles_late, "combine/3 ranks", 4, USUAL),
    CASE(pairs, "combine/one bias", 4, QUICK),
    CASE(pairs_late, "combine/two biases", 6, USUAL),
    CASE(pairs, "combine/8 channels", 4, QUICK),
    CASE(pairs_late, "combine/296 channels, top-5", 4, USUAL),
    CASE(fours, "combine/16384 channels", 8, HEAVY),
    CASE(narrow, "combine/16384 channels", 4, USUAL),
    CASE(pairs, "combine/everything -1, bias", 4, QUICK),
    CASE(pairs_late, "combine/a rank without tokens, one without rows", 6, USUAL),
    CASE(pairs, "combine/one hot expert", 4, USUAL),
    CASE(singles, "combine/no tokens at all", 4, QUICK),
    CASE(fours, "combine/top-31", 8, USUAL),
    CASE(pairs, "combine/smallest region, 2 ranks", 4, QUICK),
    CASE(fours_late, "combine/smallest region, 8 ranks", 8, HEAVY),
    CASE(pairs, "combine/chunks of 1, 2 SMs", 4, USUAL),
    CASE(shallow, "combine/4 ranks", 4, QUICK),
    CASE(shallow_late, "combine/8 ranks", 8, HEAVY),
    CASE(many_qps, "combine/4 ranks", 4, USUAL),
    CASE(pairs_late, "combine/the same bits every time", 4, USUAL),
    CASE(pairs, "combine/one handle, many calls", 4, QUICK),
    CASE(pairs, "combine/NaN stays with its token", 4, QUICK),

    CASE(pairs, "mismatch/bytes of a row", 4, QUICK),
    CASE(pairs_late, "mismatch/number of experts", 4, QUICK),
    CASE(singles, "mismatch/top-k", 4, QUICK),
    CASE(pairs_late, "mismatch/number of scales", 6, USUAL),
    CASE(pairs, "mismatch/dispatch, bytes of a row", 4, QUICK),
    CASE(singles_late, "mismatch/dispatch, weights given or not", 4, QUICK),
    CASE(pairs_late, "mismatch/dispatch, cached or not", 4, QUICK),

    CASE(pairs, "normal mask/masked by one, left out by all", 4, QUICK),
    CASE(pairs_late, "normal mask/masked by one, left out by all", 6, USUAL),
    CASE(pairs_late, "normal mask/masked at the barrier", 4, QUICK),
    CASE(pairs, "normal mask/a late rank, and back", 4, QUICK),
    CASE(singles_late, "normal mask/a late rank, and back", 4, USUAL),
    CASE(shallow, "normal mask/a late rank, and back", 4, USUAL),
    CASE(pairs_late, "normal mask/a rank known to be dead", 4, QUICK),
    CASE(pairs, "normal mask/a death during the wait", 4, QUICK),
    CASE(pairs_late, "normal mask/two deaths at once", 4, QUICK),
    CASE(trios_late, "normal mask/two deaths at once", 6, USUAL),
    CASE(pairs_late, "normal mask/a death between notify and dispatch", 4, QUICK),
    CASE(pairs, "normal mask/late for the dispatch", 4, QUICK),
    CASE(shallow_late, "normal mask/a death before combine", 4, QUICK),
    CASE(pairs, "normal mask/small region", 4, QUICK),
    CASE(pairs_late, "normal mask/two halves", 4, QUICK),

    CASE(singles, "timeout/notify", 3, QUICK),
    CASE(pairs_late, "timeout/notify", 6, USUAL),
    CASE(pairs, "timeout/dispatch", 6, QUICK),
    CASE(singles_late, "timeout/dispatch", 3, USUAL),
    CASE(pairs, "timeout/combine", 6, QUICK),
    CASE(trios_late, "timeout/combine", 6, USUAL),
    CASE(trios_late, "timeout/barrier", 6, USUAL),
    CASE(pairs, "abort/notify", 6, QUICK),
    CASE(singles, "abort/dispatch", 3, QUICK),
    CASE(pairs_late, "abort/combine", 6, USUAL),
    CASE(trios_late, "abort/barrier", 6, QUICK),
    CASE(pairs_late, "leaving/dispatch", 6, USUAL),
    CASE(pairs_late, "leaving/combine", 6, USUAL),
    CASE(singles, "leaving/combine", 3, USUAL),
    CASE(pairs_late, "failure/later operations return at once", 6, QUICK),
    CASE(singles, "failure/a new team works afterwards", 3, QUICK),
    CASE(pairs_late, "failure/a rank late by less than the deadline", 6, USUAL),
    {"normal internode/failure/blamed by another node", told, 4, NULL, QUICK, 0, 0},
    {"normal internode/refused", refused, 1, NULL, QUICK, 0, 0},
    {"normal internode/rows without room", no_room, 2, NULL, QUICK, 0, 0},
    {"normal internode/statistics/bytes, 3 nodes of 2", counted, 6, &of_two, QUICK, 0, 0},
    {"normal internode/statistics/bytes, 2 nodes of 4", counted, 8, &of_four, USUAL, 0, 0},
    CASE(singles, "statistics/waiting", 3, QUICK),
    CASE(pairs_late, "statistics/errors", 6, QUICK),
};
GROUP(internode_cases);
