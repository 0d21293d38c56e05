/* case_transport.c - what queue pairs guarantee and what they do not: order, pieces, sources, depth, quiet, atomics. */
#include <string.h>

#include "wire.h"

#define LATE DK_TRANSPORT_LATE

static int rounds_of(int usual, int full) {
  return settings.full ? full : settings.heaviest == HEAVY ? usual : usual / 4 + 1;
}

/* ---- Order in a queue -------------------------------------------------------------------------------------------- */

/* Rank s sends numbered messages to every other rank on each QP: two puts and a signal of the number, which goes with
 * the second put or alone. The word of the queue from s on QP q is on line s * QPS + q; each message has a destination
 * of its own. */
#define QPS 3
#define MESSAGES 24
#define PLACE 512
#define HALF (PLACE / 2)
#define WORDS 4096 /* bytes of words */

static uint64_t word_at(int sender, int qp) { return 64 * (uint64_t)(sender * QPS + qp); }
static uint64_t place_of(int sender, int qp, int message) {
  return WORDS + PLACE * (uint64_t)((sender * QPS + qp) * MESSAGES + message);
}
static uint64_t half_bytes(uint64_t salt, int half) { return 1 + hash(salt, 7, 7, (uint64_t)half) % HALF; }

static void write_message(char *to, uint64_t salt) {
  for (int half = 0; half < 2; half++)
    for (uint64_t i = 0, n = half_bytes(salt, half); i < n; i++)
      to[half * HALF + (int)i] = (char)hash(salt, 1, (uint64_t)half, i);
}

static void check_message(struct wire *w, int sender, int qp, int message, uint64_t salt) {
  char right[PLACE] = {0};
  write_message(right, salt);
  const char *got = own(w, place_of(sender, qp, message));
  for (int i = 0; i < PLACE; i++)
    expect(w->me, got[i] == right[i],
           "message %d of rank %d on QP %d was signalled, but its byte %d is 0x%02x, wanted 0x%02x", message + 1,
           sender, qp, i, (uint8_t)got[i], (uint8_t)right[i]);
}

static uint64_t salt_of(int sender, int receiver, int qp, int message, uint64_t seed) {
  return hash(seed, (uint64_t)sender, (uint64_t)receiver, (uint64_t)(qp * MESSAGES + message));
}

static void send_all(struct wire *w, char *source, uint64_t seed) {
  struct rank *me = w->me;
  for (int m = 0; m < MESSAGES; m++)
    for (int i = 0; i + 1 < me->count; i++)
      for (int qp = 0; qp < QPS; qp++) {
        int peer = w->peers[i];
        uint64_t salt = salt_of(me->index, peer, qp, m, seed), at = place_of(me->index, qp, m);
        char *message = source + PLACE * ((i * QPS + qp) * MESSAGES + m);
        write_message(message, salt);
        post(w, peer, qp, at, message, half_bytes(salt, 0));
        dk_transport_put_params p = signal_params(w, peer, qp, word_at(me->index, qp), DK_SIGNAL_SET, (uint64_t)m + 1);
        if (m % 2)
          post(w, peer, qp, at + HALF, message + HALF, half_bytes(salt, 1));
        else
          add_bytes(&p, at + HALF, message + HALF, half_bytes(salt, 1));
        CALL(me, transport_put, &p);
      }
}

/* Whenever a word has grown, all messages up to its number must have arrived. */
static void receive_all(struct wire *w, uint64_t seed) {
  struct rank *me = w->me;
  for (int m = 0; m < MESSAGES; m++)
    for (int sender = 0; sender < me->count; sender++)
      for (int qp = 0; qp < QPS && sender != me->index; qp++) {
        uint64_t seen = await_word(w, word_at(sender, qp), (uint64_t)m + 1);
        expect(me, seen <= MESSAGES, "the word of rank %d on QP %d is %lu", sender, qp, (unsigned long)seen);
        for (int known = m; known < (int)seen; known++)
          check_message(w, sender, qp, known, salt_of(sender, me->index, qp, known, seed));
      }
}

static void order(struct rank *me) {
  uint32_t late = me->test->arg ? LATE : 0;
  uint64_t bytes = place_of(MAX_SEATS, 0, 0);
  struct wire *w = make_wire(me, bytes);
  char *source = scratch(me, (size_t)PLACE * MESSAGES * QPS * MAX_SEATS);
  int seeds = me->socket >= 0 ? rounds_of(20, 100) : me->count > 4 ? rounds_of(6, 200) : rounds_of(30, 1000);
  for (int seed = 0; seed < seeds; seed++) {
    struct wire_spec spec = {QPS, seed % 3 == 0 ? 4 : 128, late};
    open_wire(w, &spec, settings.seed * 1000 + (uint64_t)seed);
    meet(me);
    send_all(w, source, (uint64_t)seed);
    receive_all(w, (uint64_t)seed);
    quiet(w, -1, -1);
    meet(me);
    close_wire(w);
    memset(own(w, 0), 0, bytes);
    meet(me);
  }
}

/* ---- No order ------------------------------------------------------------------------------------- */

/* A signal overtakes one that was posted before it on another QP. */
static void no_order(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  int overtaken = 0, rounds = rounds_of(40, 400);
  for (int round = 1; round <= rounds; round++) {
    struct wire_spec spec = {4, 16, LATE};
    open_wire(w, &spec, (uint64_t)round);
    if (me->index == 0) {
      for (int qp = 0; qp < 4; qp++) post_signal(w, 1, qp, 64 * (uint64_t)qp, DK_SIGNAL_SET, (uint64_t)round);
      quiet(w, 1, -1);
    } else {
      await_word(w, 3 * 64, (uint64_t)round);
      for (uint64_t qp = 0; qp < 3; qp++) overtaken += word(w, 64 * qp) < (uint64_t)round;
      for (uint64_t qp = 0; qp < 3; qp++) await_word(w, 64 * qp, (uint64_t)round);
    }
    meet(me);
    close_wire(w);
  }
  expect(me, me->index == 0 || overtaken, "in %d rounds no signal overtook one of another QP", rounds);
}

/* A put is observed half done, its end before its beginning. The reads race on purpose. */
static void pieces(struct rank *me) {
  if (settings.one_mapping) skip(me, "it looks at memory while it is being written");
  const uint64_t bytes = 4096;
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {1, 16, LATE};
  open_wire(w, &spec, settings.seed);
  char *source = scratch(me, bytes);
  bool seen = false;
  int limit = 2000;
  for (int round = 1; round <= limit; round++) {
    if (me->index == 0) {
      memset(source, round, bytes);
      post(w, 1, 0, 4096, source, bytes);
      post_signal(w, 1, 0, 0, DK_SIGNAL_SET, (uint64_t)round);
      quiet(w, 1, 0);
    } else {
      const volatile char *first = own(w, 4096), *last = own(w, 4096 + bytes - 1);
      while (word(w, 0) < (uint64_t)round && !others_failed(me))
        if (*last == (char)round && *first != (char)round) seen = true;
      expect(me, *first == (char)round && *last == (char)round, "round %d was signalled before its bytes", round);
    }
    bool all[2];
    gather(me, &seen, sizeof seen, -1, all, NULL);
    if (all[1]) return;
  }
  fail(me, "in %d rounds no put was seen to arrive in pieces", limit);
}

/* A source that is overwritten before its put has completed: wrong bytes may arrive, and the QP reports an error. */
static void early_reuse(struct rank *me) {
  if (settings.one_mapping) skip(me, "it writes to memory while it is being read");
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {1, 16, LATE};
  char *source = scratch(me, 4099);
  int noticed = 0, spoilt = 0, rounds = rounds_of(60, 300);
  for (int round = 0; round < rounds && me->index == 0; round++) {
    bool waits = round % 3 == 0;
    open_wire(w, &spec, (uint64_t)round);
    memset(source, 1, 4099);
    post(w, 1, 0, 4096, source, 4099);
    if (waits) quiet(w, 1, 0);
    if (round % 2)
      source[4098] = 2;
    else
      memset(source, 2, 4096);
    int32_t code = quiet_code(w, 1, 0, w->timeout_ns);
    bool right = memcmp(theirs(w, 1, 4096), theirs(w, 1, 4097), 4098) == 0 && *theirs(w, 1, 4096) == 1;
    expect(me, code == DK_OK || (code == DK_EMISMATCH && !waits), "quiet returned %s", code_name(code));
    expect(me, right || code == DK_EMISMATCH, "round %d: wrong bytes arrived, and the QP is well", round);
    noticed += code == DK_EMISMATCH;
    spoilt += !right;
    close_wire(w);
  }
  expect(me, me->index || (noticed && spoilt), "in %d rounds the QP broke %d times, and wrong bytes arrived %d times",
         rounds, noticed, spoilt);
  meet(me);
}

/* ---- Depth ------------------------------------------------------------------------------------------------------- */

/* A full QP: a put is refused or waits; no operation is lost or executed twice. */
static void depth(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {2, 5, LATE};
  open_wire(w, &spec, settings.seed);
  if (me->index == 0) {
    uint64_t accepted = 0, refused = 0, late = 0;
    dk_transport_put_params p = signal_params(w, 1, 1, 0, DK_SIGNAL_ADD, 1);
    uint64_t end = now_ns() + limit_ns(10);
    while ((!refused || !late) && now_ns() < end) {
      p.flags = draw(me, 2) ? DK_TRANSPORT_NOWAIT : 0;
      p.timeout_ns = 1;
      int32_t code = dk.transport_put(&p), full = p.flags ? DK_EAGAIN : DK_ETIMEOUT;
      expect(me, code == DK_OK || code == full, "a put to a full QP returned %s", code_name(code));
      accepted += code == DK_OK;
      refused += code == DK_EAGAIN;
      late += code == DK_ETIMEOUT;
    }
    expect(me, refused && late, "the QP of depth 5 never became full: %lu refused, %lu late", (unsigned long)refused,
           (unsigned long)late);
    p.flags = 0;
    p.timeout_ns = w->timeout_ns;
    for (int i = 0; i < 50; i++, accepted++) CALL(me, transport_put, &p);
    quiet(w, 1, 1);
    dk_transport_query_params q = query(w, 1, 1);
    expect(me, q.posted == accepted && q.completed == accepted && q.max_queued == 5,
           "%lu posted, %lu completed, %lu at most; wanted %lu, %lu, 5", (unsigned long)q.posted,
           (unsigned long)q.completed, (unsigned long)q.max_queued, (unsigned long)accepted, (unsigned long)accepted);
    uint64_t sum = *(uint64_t *)(void *)theirs(w, 1, 0);
    expect(me, sum == accepted, "%lu signals arrived of %lu", (unsigned long)sum, (unsigned long)accepted);
  }
  meet(me);
}

/* ---- Quiet ------------------------------------------------------------------------------------------------------- */

static void quiets(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 20);
  struct wire_spec spec = {4, 64, me->test->arg ? LATE : 0};
  char *source = scratch(me, 4 * 1024);
  int not_yet = 0, rounds = rounds_of(20, 200);
  for (int round = 1; round <= rounds && me->index == 0; round++) {
    open_wire(w, &spec, (uint64_t)round);
    memset(source, round, 4 * 1024);
    for (int peer = 1; peer < me->count; peer++)
      for (int qp = 0; qp < 4; qp++)
        for (int i = 0; i < 8; i++) post(w, peer, qp, 4096 + (uint64_t)(qp * 8 + i) * 1024, source + 128 * i, 128);
    not_yet += quiet_code(w, -1, -1, 0) == DK_ETIMEOUT;
    for (int peer = 1; peer < me->count; peer++)
      for (int qp = peer % 2 ? 3 : -1; qp >= -1; qp -= 4) { /* one QP and then the rest, or all of them at once */
        quiet(w, peer, qp);
        dk_transport_query_params q = query(w, peer, qp);
        uint64_t wanted = qp < 0 ? 32 : 8;
        expect(me, q.posted == wanted && q.completed == wanted && q.bytes == wanted * 128 && !q.lost,
               "peer %d, QP %d: %lu posted, %lu completed", peer, qp, (unsigned long)q.posted,
               (unsigned long)q.completed);
        for (uint64_t i = qp < 0 ? 0 : 24; i < 32; i++)
          expect(me, *theirs(w, peer, 4096 + i * 1024 + 127) == (char)round,
                 "round %d: quiet, but put %lu to rank %d is not there", round, (unsigned long)i, peer);
      }
    quiet(w, -1, -1);
    expect(me, quiet_code(w, -1, -1, 0) == DK_OK, "quiet, and then not");
    close_wire(w);
  }
  expect(me, me->index || !me->test->arg || not_yet, "in %d rounds everything was done at once", rounds);
  meet(me);
}

/* ---- Signals ----------------------------------------------------------------------------------------------------- */

static void sums(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 16);
  struct wire_spec spec = {3, 16, me->test->arg ? LATE : 0};
  open_wire(w, &spec, settings.seed);
  const uint64_t each = 150;
  for (uint64_t i = 0; i < each; i++)
    for (int peer = 0; peer < me->count; peer++)
      if (peer != me->index)
        post_signal(w, peer, (int)(i % 3), 128, DK_SIGNAL_ADD, i + ((uint64_t)1 << 40) * (uint64_t)(me->index + 1));
  quiet(w, -1, -1);
  meet(me);
  uint64_t wanted = 0;
  for (int sender = 0; sender < me->count; sender++)
    if (sender != me->index) wanted += each * (each - 1) / 2 + each * ((uint64_t)1 << 40) * (uint64_t)(sender + 1);
  expect(me, word(w, 128) == wanted, "the sum is %lx, wanted %lx", (unsigned long)word(w, 128), (unsigned long)wanted);
  meet(me);
}

/* ---- Many ranks on few cores ------------------------------------------------------------------------------------- */

/* Each rank sends to each and answers what it receives, so that all ranks always wait for each other. */
static void crowd(struct rank *me) {
  struct wire *w = make_wire(me, 1 << 20);
  struct wire_spec spec = {4, 32, me->test->arg ? LATE : 0};
  open_wire(w, &spec, settings.seed);
  char *source = scratch(me, (size_t)MAX_SEATS * 4096);
  uint64_t rounds = (uint64_t)rounds_of(me->test->arg ? 20 : 100, 500), start = now_ns();
  for (uint64_t round = 1; round <= rounds; round++) {
    for (int i = 0; i + 1 < me->count; i++) {
      char *message = source + 4096 * i;
      int qp = (int)(round % 4);
      quiet(w, w->peers[i], -1); /* the source is free */
      memset(message, (int)(round + (uint64_t)me->index), 4096);
      dk_transport_put_params p = signal_params(w, w->peers[i], qp, 64 * (uint64_t)me->index, DK_SIGNAL_SET, round);
      add_bytes(&p, 65536 + 8192 * (uint64_t)me->index + 4096 * (round % 2), message, 4096);
      CALL(me, transport_put, &p);
    }
    for (int sender = 0; sender < me->count; sender++) {
      if (sender == me->index) continue;
      await_word(w, 64 * (uint64_t)sender, round);
      const char *got = own(w, 65536 + 8192 * (uint64_t)sender + 4096 * (round % 2));
      expect(me, got[0] == (char)(round + (uint64_t)sender) && got[4095] == got[0], "round %lu of rank %d is wrong",
             (unsigned long)round, sender);
    }
  }
  double seconds = (double)(now_ns() - start) * 1e-9;
  expect(me, seconds < 30 * settings.patience, "%lu rounds took %.1f s", (unsigned long)rounds, seconds);
  meet(me);
}

static const struct test_case cases[] = {
    {"transport/order in a queue", order, 2, NULL, QUICK, 0, 0},
    {"transport/order in a queue, late", order, 3, "late", QUICK, 0, 0},
    {"transport/order in a queue, late, 8 ranks", order, 8, "late", USUAL, 0, 0},
    {"transport/no order among queues", no_order, 2, NULL, QUICK, 0, 0},
    {"transport/a put seen in pieces", pieces, 2, NULL, USUAL, 0, 0},
    {"transport/a source overwritten too early", early_reuse, 2, NULL, QUICK, 0, 0},
    {"transport/depth", depth, 2, NULL, QUICK, 0, 0},
    {"transport/quiet", quiets, 3, NULL, QUICK, 0, 0},
    {"transport/quiet, late", quiets, 3, "late", QUICK, 0, 0},
    {"transport/signals that add", sums, 4, NULL, QUICK, 0, 0},
    {"transport/signals that add, late", sums, 3, "late", QUICK, 0, 0},
    {"transport/all ranks answer each other", crowd, 8, NULL, USUAL, 0, 0},
    {"transport/all ranks answer each other, late", crowd, 8, "late", USUAL, 0, 0},
};
GROUP(transport_cases);

static const struct test_case process_case[] = {
    {"transport/order in a queue, processes", order, 3, "late", USUAL, 0, 0}};
const struct group transport_process_cases = {process_case, 1};
