/* case_transport_end.c - transports: lost peers, dropped operations, streams, refused arguments. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "process.h"
#include "wire.h"

#define LATE DK_TRANSPORT_LATE

static uint64_t word_of(const struct wire *w, int rank, uint64_t offset) {
  return __atomic_load_n((uint64_t *)(void *)theirs(w, rank, offset), __ATOMIC_ACQUIRE);
}

static int32_t put_code(struct wire *w, int peer, int qp, uint32_t flags) {
  dk_transport_put_params p = signal_params(w, peer, qp, 0, DK_SIGNAL_ADD, 1);
  p.flags = flags;
  return dk.transport_put(&p);
}

static void lose(struct wire *w, int peer) {
  dk_transport_lose_params p = {.size = sizeof p, .transport = w->handle, .peer = peer};
  CALL(w->me, transport_lose, &p);
}

/* ---- Creation ---------------------------------------------------------------------------------------------------- */

static void expect_created(struct wire *w) {
  for (int i = 0; i + 1 < w->me->count; i++)
    for (int qp = 0; qp < w->qps; qp++) {
      int32_t created = query(w, w->peers[i], qp).created;
      expect(w->me, created == i * w->qps + qp, "QP %d of peer %d is number %d in order of creation, wanted %d", qp,
             w->peers[i], created, i * w->qps + qp);
    }
  expect(w->me, query(w, -1, -1).created == -1, "all QPs together have a place in the order of creation");
}

/* In the order of host_peers: rotated by rank, then arbitrary. */
static void creation(struct rank *me) {
  struct wire *w = make_wire(me, 4096);
  struct wire_spec spec = {3, 7, 0};
  for (int round = 0; round < 4; round++) {
    open_wire(w, &spec, 0);
    expect_created(w);
    close_wire(w);
    int32_t first = w->peers[0], swapped = (int32_t)draw(me, (uint64_t)me->count - 1);
    w->peers[0] = w->peers[swapped];
    w->peers[swapped] = first;
  }
  meet(me);
}

/* ---- Peers that are lost ----------------------------------------------------------------------------------------- */

static void lost(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {2, 256, LATE};
  uint64_t dropped = 0;
  for (int round = 0; round < 10 && me->index == 0; round++) {
    open_wire(w, &spec, (uint64_t)round);
    uint64_t before = word_of(w, 1, 0), other = word_of(w, 2, 0);
    for (int i = 0; i < 400; i++) expect(me, put_code(w, 1 + i % 2, i / 2 % 2, 0) == DK_OK, "put %d failed", i);
    lose(w, 1);
    expect(me, put_code(w, 1, 0, 0) == DK_EPEERDEAD && put_code(w, 1, 1, DK_TRANSPORT_NOWAIT) == DK_EPEERDEAD,
           "a lost peer takes puts");
    int32_t code = quiet_code(w, 1, -1, w->timeout_ns);
    expect(me, code == DK_EPEERDEAD, "quiet of a lost peer returned %s", code_name(code));
    uint64_t arrived = word_of(w, 1, 0) - before;
    quiet(w, -1, -1);
    dk_transport_query_params q = query(w, 1, -1);
    expect(me, q.lost == 1 && q.posted == 200 && q.completed == 200, "lost %d, %lu posted, %lu completed", q.lost,
           (unsigned long)q.posted, (unsigned long)q.completed);
    expect(me, query(w, 2, -1).lost == 0 && word_of(w, 2, 0) - other == 200,
           "of 200 signals to the peer that is well %lu arrived", (unsigned long)(word_of(w, 2, 0) - other));
    expect(me, word_of(w, 1, 0) - before == arrived, "signals arrive at a lost peer after quiet");
    dropped += 200 - arrived;
    lose(w, 1); /* again: nothing new */
    close_wire(w);
  }
  expect(me, me->index || dropped, "a peer was lost ten times, and nothing was dropped");
  meet(me);
}

/* A stream that waits for room to a peer continues when the peer is lost. */
static void lost_while_waited_for(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {1, 1, LATE};
  open_wire(w, &spec, settings.seed);
  if (me->index == 0) {
    dk_transport_put_params p = signal_params(w, 1, 0, 0, DK_SIGNAL_ADD, 1);
    p.stream = me->stream;
    p.timeout_ns = limit_ns(20);
    for (int i = 0; i < 2000; i++) CALL(me, transport_put, &p);
    lose(w, 1);
    expect(me, dk.transport_put(&p) == DK_EPEERDEAD, "puts toward a lost peer can be enqueued");
    finish(me);
    dk_transport_query_params q = query(w, 1, 0);
    expect(me, q.lost == 1 && q.posted < 2000, "%lu of 2000 puts were posted", (unsigned long)q.posted);
  }
  meet(me);
}

/* The owner of a block is dead: puts to it are dropped, and no call hangs or faults. */
static void owner_dies(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 20);
  struct wire_spec spec = {3, 64, LATE};
  char *source = scratch(me, 4096);
  int victim = me->count - 1;
  open_wire(w, &spec, settings.seed);
  meet(me);
  for (int i = 0; i < 300; i++) {
    if (me->index == victim && i == 100) process_die(me);
    for (int peer = 0; peer < me->count; peer++)
      if (peer != me->index) post(w, peer, i % 3, 4096 + 4096 * (uint64_t)(i % 200), source, 4096);
  }
  meet(me); /* the survivors */
  lose(w, victim);
  expect(me, put_code(w, victim, 0, 0) == DK_EPEERDEAD, "a lost peer takes puts");
  for (int peer = 0; peer < victim; peer++)
    if (peer != me->index) post_signal(w, peer, 0, 64 + 64 * (uint64_t)me->index, DK_SIGNAL_SET, 1);
  for (int peer = 0; peer < victim; peer++)
    if (peer != me->index) await_word(w, 64 + 64 * (uint64_t)peer, 1);
  quiet(w, -1, -1);
}

/* ---- Work that is dropped ---------------------------------------------------------------------------------------- */

static void closed_with_work(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {4, 64, LATE};
  uint64_t dropped = 0;
  for (int round = 0; round < 20 && me->index == 0; round++) {
    uint64_t before = word_of(w, 1, 0), start = now_ns();
    open_wire(w, &spec, (uint64_t)round);
    for (int i = 0; i < 4 * 64; i++) put_code(w, 1, i % 4, DK_TRANSPORT_NOWAIT);
    uint64_t posted = query(w, 1, -1).posted;
    close_wire(w);
    expect(me, now_ns() - start < limit_ns(2), "close took %lu ns", (unsigned long)(now_ns() - start));
    uint64_t arrived = word_of(w, 1, 0) - before;
    pause_ms(2);
    expect(me, word_of(w, 1, 0) - before == arrived, "signals arrive after close");
    dropped += posted - arrived;
  }
  expect(me, me->index || dropped, "nothing was dropped by close");
  meet(me);
}

/* In a forked child no thread serves the queues: calls return DK_ESTATE instead of waiting, and close works. */
static void forked(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {1, 4, LATE};
  open_wire(w, &spec, 1);
  for (int i = 0; i < 3; i++) put_code(w, 1 - me->index, 0, 0);
  if (me->index == 0) {
    pid_t child = fork();
    if (child == 0) {
      dk_transport_close_params end = {.size = sizeof end, .transport = w->handle};
      bool good = put_code(w, 1, 0, 0) == DK_ESTATE && quiet_code(w, -1, -1, UINT64_MAX) == DK_ESTATE;
      _exit(good && dk.transport_close(&end) == DK_OK ? 0 : 1);
    }
    int status = -1;
    uint64_t end = now_ns() + limit_ns(5);
    pid_t ended;
    while ((ended = waitpid(child, &status, WNOHANG)) == 0 && now_ns() < end) pause_ms(5);
    if (ended == 0) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
    }
    expect(me, ended == child && status == 0, "the child %s", ended ? "was not refused" : "hangs");
  }
  quiet(w, -1, -1);
  meet(me);
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

/* A put reads what earlier operations of its stream wrote; after quiet, later ones may overwrite its source. */
static void streams(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {2, 4, LATE};
  open_wire(w, &spec, settings.seed);
  struct tensor source = tensor(me, "source", 8192);
  dk_transport_put_params p = put_params(w, 1 - me->index, 0);
  dk_transport_quiet_params q = {.size = sizeof q,
                                 .transport = w->handle,
                                 .stream = me->stream,
                                 .peer = -1,
                                 .qp = -1,
                                 .timeout_ns = w->timeout_ns};
  add_bytes(&p, 4096, (void *)(uintptr_t)source.at, 8192);
  p.stream = me->stream;
  for (uint32_t round = 1; round < 30; round++) {
    fill(me, source.at, 8192, round);
    p.qp = (int)round % 2;
    CALL(me, transport_put, &p);
    CALL(me, transport_quiet, &q);
    fill(me, source.at, 8192, 0xff);
    finish(me);
    meet(me);
    for (uint64_t i = 0; i < 8192; i++)
      expect(me, *own(w, 4096 + i) == (char)round, "round %u: byte %lu is 0x%02x", round, (unsigned long)i,
             (uint8_t)*own(w, 4096 + i));
    meet(me);
  }
}

/* An enqueued put that finds no room in time breaks its QP, so that no later operation overtakes it. */
static void broken(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {2, 1, LATE};
  if (me->index == 0) {
    open_wire(w, &spec, settings.seed);
    for (uint64_t i = 1; i <= 500; i++) {
      dk_transport_put_params p = signal_params(w, 1, 0, 0, DK_SIGNAL_SET, i);
      p.stream = me->stream;
      p.timeout_ns = 1;
      int32_t code = dk.transport_put(&p);
      expect(me, code == DK_OK || code == DK_ETIMEOUT, "an enqueued put returned %s", code_name(code));
    }
    finish(me);
    dk_transport_query_params q = query(w, 1, 0);
    expect(me, q.lost == DK_ETIMEOUT && q.posted < 500, "500 puts of no patience, and the QP is well");
    expect(me, put_code(w, 1, 0, 0) == DK_ETIMEOUT, "a broken QP takes puts");
    expect(me, quiet_code(w, 1, 0, w->timeout_ns) == DK_ETIMEOUT, "a broken QP is quiet");
    expect(me, word_of(w, 1, 0) <= q.posted, "number %lu arrived, but only the first %lu were posted",
           (unsigned long)word_of(w, 1, 0), (unsigned long)q.posted);
    post_signal(w, 1, 1, 64, DK_SIGNAL_SET, 5);
    quiet(w, 1, 1);
    expect(me, word_of(w, 1, 64) == 5, "the other QP is broken too");
  }
  meet(me);
}

/* ---- Refused arguments ---------------------------------------------------------------------------------------------
 * */

#define REFUSED(call, good, field, value)                                                                    \
  do {                                                                                                       \
    __typeof__(good) bad = good;                                                                             \
    bad.field = value;                                                                                       \
    int32_t code = dk.call(&bad);                                                                            \
    expect(me, code == DK_EINVAL, "dk_" #call " with " #field " = " #value " returned %s, wanted DK_EINVAL", \
           code_name(code));                                                                                 \
  } while (0)

static void refused_open(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {2, 4, 0};
  dk_transport_open_params p = open_params(w, &spec, 0);
  REFUSED(transport_open, p, device, 0);
  REFUSED(transport_open, p, rank, -1);
  REFUSED(transport_open, p, rank, me->count);
  REFUSED(transport_open, p, num_ranks, 0);
  REFUSED(transport_open, p, num_ranks, DK_MAX_RANKS + 1);
  REFUSED(transport_open, p, num_qps, 0);
  REFUSED(transport_open, p, num_qps, 65537);
  REFUSED(transport_open, p, num_qps, 65536); /* to each of 5 */
  REFUSED(transport_open, p, qp_depth, 0);
  REFUSED(transport_open, p, qp_depth, (1 << 20) + 1);
  REFUSED(transport_open, p, num_peers, -1);
  REFUSED(transport_open, p, num_peers, me->count);
  REFUSED(transport_open, p, host_peers, 0);
  REFUSED(transport_open, p, host_blocks, 0);
  REFUSED(transport_open, p, block_bytes, 0);
  REFUSED(transport_open, p, flags, 1);
  uint64_t blocks[MAX_SEATS];
  memcpy(blocks, w->block->at, sizeof blocks);
  blocks[w->peers[1]] = 0;
  REFUSED(transport_open, p, host_blocks, (uintptr_t)blocks);
  memcpy(blocks, w->block->at, sizeof blocks);
  blocks[me->index] = 0;
  REFUSED(transport_open, p, host_blocks, (uintptr_t)blocks);
  int32_t twice[2] = {w->peers[0], w->peers[0]}, self[2] = {w->peers[0], me->index},
          stranger[2] = {w->peers[0], me->count};
  REFUSED(transport_open, p, host_peers, (uintptr_t)twice);
  REFUSED(transport_open, p, host_peers, (uintptr_t)self);
  REFUSED(transport_open, p, host_peers, (uintptr_t)stranger);
  p.size -= 8;
  expect(me, dk.transport_open(&p) == DK_EVERSION, "a struct of another version was accepted");
  meet(me);
}

static void refused(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {2, 4, 0};
  open_wire(w, &spec, 0);
  char source[64] = {0};
  dk_transport_put_params p = signal_params(w, w->peers[0], 1, 64, DK_SIGNAL_SET, 1);
  add_bytes(&p, 128, source, 64);
  REFUSED(transport_put, p, transport, 0);
  REFUSED(transport_put, p, peer, -1);
  REFUSED(transport_put, p, peer, me->index);
  REFUSED(transport_put, p, peer, me->count);
  REFUSED(transport_put, p, qp, -1);
  REFUSED(transport_put, p, qp, 2);
  REFUSED(transport_put, p, src, 0);
  REFUSED(transport_put, p, dst_offset, 65536 - 63);
  REFUSED(transport_put, p, dst_offset, UINT64_MAX - 8);
  REFUSED(transport_put, p, bytes, 65536);
  REFUSED(transport_put, p, bytes, UINT64_MAX);
  REFUSED(transport_put, p, signal_offset, 68);
  REFUSED(transport_put, p, signal_offset, 65536);
  REFUSED(transport_put, p, signal_offset, UINT64_MAX - 7);
  REFUSED(transport_put, p, signal_op, 3);
  REFUSED(transport_put, p, flags, DK_TRANSPORT_LATE);
  dk_transport_put_params enqueued = p, nothing = put_params(w, w->peers[0], 0);
  enqueued.stream = me->stream;
  REFUSED(transport_put, enqueued, flags, DK_TRANSPORT_NOWAIT);
  REFUSED(transport_put, nothing, bytes, 0);
  dk_transport_quiet_params q = {.size = sizeof q, .transport = w->handle, .peer = w->peers[0], .qp = 0};
  REFUSED(transport_quiet, q, transport, 0);
  REFUSED(transport_quiet, q, peer, me->index);
  REFUSED(transport_quiet, q, peer, -2);
  REFUSED(transport_quiet, q, qp, 2);
  REFUSED(transport_quiet, q, qp, -2);
  dk_transport_query_params y = query(w, -1, -1);
  expect(me, y.posted == 0, "%lu operations were posted by calls that were refused", (unsigned long)y.posted);
  REFUSED(transport_query, y, peer, me->count);
  REFUSED(transport_query, y, qp, 2);
  REFUSED(transport_query, y, transport, 0);
  dk_transport_lose_params l = {.size = sizeof l, .transport = w->handle};
  REFUSED(transport_lose, l, peer, me->index);
  REFUSED(transport_lose, l, peer, -1);
  CALL(me, transport_put, &p); /* unchanged, it is accepted */
  quiet(w, -1, -1);
  meet(me);
}

static const struct test_case cases[] = {
    {"transport/creation", creation, 4, NULL, QUICK, 0, 0},
    {"transport/lost peer", lost, 3, NULL, QUICK, 0, 0},
    {"transport/lost peer that a stream waits for", lost_while_waited_for, 2, NULL, QUICK, 0, 0},
    {"transport/closed with work queued", closed_with_work, 2, NULL, QUICK, 0, 0},
    {"transport/forked", forked, 2, NULL, HEAVY, 0, 0},
    {"transport/streams", streams, 2, NULL, QUICK, 0, 0},
    {"transport/broken queue pair", broken, 2, NULL, QUICK, 0, 0},
    {"transport/refused to open", refused_open, 6, NULL, QUICK, 0, 0},
    {"transport/refused", refused, 3, NULL, QUICK, 0, 0},
};
GROUP(transport_end_cases);

static const struct test_case process_cases_here[] = {
    {"transport/a peer's process dies", owner_dies, 3, NULL, USUAL, 0, 0}};
const struct group transport_death_cases = {process_cases_here, 1};
