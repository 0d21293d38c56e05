/* case_stream.c - streams and events. A barrier that the other rank has not called yet keeps a stream busy. */
#include <fenv.h>
#include <string.h>

#include "lowlat.h"

static const struct team_spec kSmall = {.nvl_bytes = 1 << 16, .trace = -1};

static uint64_t new_event(struct rank *me) {
  dk_event_create_params p = {.size = sizeof p, .device = seat_device(me->seat)};
  CALL(me, event_create, &p);
  return p.event;
}

static void drop_event(struct rank *me, uint64_t event) {
  dk_event_destroy_params p = {.size = sizeof p, .device = seat_device(me->seat), .event = event};
  CALL(me, event_destroy, &p);
}

static void record(struct rank *me, uint64_t event, uint64_t stream) {
  dk_event_record_params p = {.size = sizeof p, .device = seat_device(me->seat), .event = event, .stream = stream};
  CALL(me, event_record, &p);
}

static int32_t wait_event(struct rank *me, uint64_t event, uint64_t timeout_ns) {
  dk_event_wait_params p = {
      .size = sizeof p, .device = seat_device(me->seat), .event = event, .timeout_ns = timeout_ns};
  return dk.event_wait(&p);
}

static void stream_wait(struct rank *me, uint64_t stream, uint64_t event) {
  dk_stream_wait_event_params p = {.size = sizeof p, .device = seat_device(me->seat), .stream = stream, .event = event};
  CALL(me, stream_wait_event, &p);
}

static uint64_t new_stream(struct rank *me, int high_priority) {
  dk_stream_create_params p = {.size = sizeof p, .device = seat_device(me->seat), .high_priority = high_priority};
  CALL(me, stream_create, &p);
  return p.stream;
}

static void drop_stream(struct rank *me, uint64_t stream) {
  expect(me, stream_done(me->seat, stream, 10), "the second stream does not end");
  dk_stream_destroy_params p = {.size = sizeof p, .device = seat_device(me->seat), .stream = stream};
  CALL(me, stream_destroy, &p);
}

static int idle(struct rank *me, uint64_t stream) {
  dk_stream_query_params p = {
      .size = sizeof p, .device = seat_device(me->seat), .stream = stream, .capturing = 7, .idle = 7};
  CALL(me, stream_query, &p);
  expect(me, p.capturing == 0, "capturing is %d", p.capturing);
  dk_stream_query_params less = {.size = sizeof less, .device = p.device, .stream = stream, .capturing = 7, .idle = -1};
  CALL(me, stream_query, &less);
  expect(me, less.capturing == 0 && less.idle == -1, "not asked: capturing %d, idle %d", less.capturing, less.idle);
  return p.idle;
}

/* Operations run in the order in which they were enqueued. */
static void fifo(struct rank *me) {
  struct tensor a = tensor(me, "a", 1 << 20), b = tensor(me, "b", 1 << 20);
  for (uint32_t i = 0; i < 50; i++) {
    fill(me, a.at, a.bytes, i);
    copy(me, b.at + i * 1000, a.at + i * 1000, 1000);
  }
  fetch_tensor(me, b);
  finish(me);
  for (int i = 0; i < 50000; i++)
    expect(me, ((uint8_t *)b.host)[i] == i / 1000, "byte %d is %d, wanted %d", i, ((uint8_t *)b.host)[i], i / 1000);
  uint64_t end = now_ns() + limit_ns(2); /* the stream may become idle a moment after its last event */
  while (idle(me, me->stream) == 0 && now_ns() < end) pause_ms(1);
  expect(me, idle(me, me->stream) == 1, "the stream is not idle long after its event was reached");
}

/* Rank 0's stream waits at a barrier until rank 1 calls it. */
static void slices(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  uint64_t event = new_event(me), never = new_event(me);
  expect(me, wait_event(me, never, 0) == DK_OK, "an event that was never recorded should be done");
  if (me->index == 0) {
    run_barrier(t);
    record(me, event, me->stream);
    expect(me, wait_event(me, event, 0) == DK_ETIMEOUT, "the event is done before the barrier can be");
    uint64_t start = now_ns();
    expect(me, wait_event(me, event, 40000000) == DK_ETIMEOUT, "the event is done before the barrier can be");
    expect(me, now_ns() - start >= 40000000, "the slice ended early");
    expect(me, idle(me, me->stream) == 0, "the stream is idle though it stands at a barrier");
    meet(me);
  } else {
    meet(me);
    run_barrier(t);
    record(me, event, me->stream);
  }
  expect(me, wait_event(me, event, limit_ns(10)) == DK_OK, "the event is not done after the barrier");
  expect(me, wait_event(me, event, 0) == DK_OK, "the event is not done any more");
  expect_healthy(t);
  drop_event(me, event);
  drop_event(me, never);
}

/* A second stream waits for the first: for the record that was the newest when the wait was enqueued. */
static void cross_stream(struct rank *me) {
  struct team *t = make_team(me, &kSmall);
  uint64_t event = new_event(me), other = new_stream(me, 1), first = me->stream;
  struct tensor a = tensor(me, "a", 64);
  finish(me);
  if (me->index == 0) {
    run_barrier(t);
    fill(me, a.at, 64, 1);
    record(me, event, first);
    stream_wait(me, other, event);
    record(me, event, other); /* recorded again: the earlier wait refers to the first record */
    stream_wait(me, other, event);
    me->stream = other;
    fetch_tensor(me, a);
    me->stream = first;
    expect(me, wait_event(me, event, 20000000) == DK_ETIMEOUT, "the second stream did not wait for the first");
    drop_event(me, event); /* while it is recorded and waited for */
    meet(me);
    expect(me, stream_done(me->seat, other, 10), "the second stream does not end");
    for (int i = 0; i < 64; i++) expect(me, ((uint8_t *)a.host)[i] == 1, "the second stream was too early");
  } else {
    meet(me);
    run_barrier(t);
    drop_event(me, event);
  }
  finish(me);
  expect_healthy(t);
  drop_stream(me, other);
}

/* Where stream 0 is the calling thread: copies and fills happen at once, and it cannot wait for an event. */
static void host_stream(struct rank *me) {
  uint64_t event = new_event(me), at;
  uint8_t *words = host_words(me, 256, 64, &at);
  memset(words, 9, 128);
  dk_copy_params copying = {
      .size = sizeof copying, .device = seat_device(me->seat), .dst = at + 128, .src = at, .bytes = 128};
  CALL(me, copy, &copying);
  expect(me, words[128] == 9 && words[255] == 9, "a copy on stream 0 is not done when it returns");
  dk_fill_params filling = {
      .size = sizeof filling, .device = seat_device(me->seat), .dst = at, .bytes = 128, .value = 0x105};
  CALL(me, fill, &filling);
  expect(me, words[0] == 5 && words[127] == 5 && words[128] == 9, "a fill on stream 0 is not done when it returns");
  record(me, event, 0);
  expect(me, wait_event(me, event, 0) == DK_OK, "a record on stream 0 is not done at once");
  expect(me, idle(me, 0) == 1, "stream 0 is not idle");
  dk_stream_wait_event_params p = {.size = sizeof p, .device = seat_device(me->seat), .event = event};
  int32_t code = dk.stream_wait_event(&p);
  expect(me, code == DK_EUNSUPPORTED, "stream 0 cannot wait, yet the answer was %s", code_name(code));
  drop_event(me, event);
}

static void many(struct rank *me) {
  uint64_t streams[12], events[40];
  struct tensor t = tensor(me, "t", 12 * 64);
  finish(me);
  for (int i = 0; i < COUNT(events); i++) events[i] = new_event(me);
  for (int i = 0; i < COUNT(streams); i++) streams[i] = new_stream(me, i % 2);
  uint64_t first = me->stream;
  for (int round = 0; round < 20; round++)
    for (int i = 0; i < COUNT(streams); i++) {
      me->stream = streams[i];
      fill(me, t.at + (uint64_t)i * 64, 64, (uint32_t)(round + i));
      int event = (round * COUNT(streams) + i) % COUNT(events);
      record(me, events[event], streams[i]);
      stream_wait(me, streams[(i + 1) % COUNT(streams)], events[event]);
    }
  me->stream = first;
  for (int i = 0; i < COUNT(streams); i++) drop_stream(me, streams[i]);
  for (int i = 0; i < COUNT(events); i++) drop_event(me, events[i]);
  fetch_tensor(me, t);
  finish(me);
  for (int i = 0; i < 12 * 64; i++)
    expect(me, ((uint8_t *)t.host)[i] == 19 + i / 64, "stream %d left %d", i / 64, ((uint8_t *)t.host)[i]);
}

/* A wait for an event launches nothing: the counters that the barrier left in device memory stay there until they are
 * flushed. */
static void waits_only(struct rank *me) {
  const struct team_spec counted = {.nvl_bytes = 1 << 16};
  struct team *t = make_team(me, &counted);
  uint64_t event = new_event(me);
  run_barrier(t);
  while (!idle(me, me->stream)) pause_ms(1);
  uint64_t shown = t->stats->ops[DK_OP_BARRIER].calls;
  expect(me, wait_event(me, event, 0) == DK_OK, "an event that was never recorded is not done");
  record(me, event, me->stream);
  expect(me, wait_event(me, event, limit_ns(10)) == DK_OK, "an event of an idle stream is not done");
  expect(me, t->stats->ops[DK_OP_BARRIER].calls == shown, "waiting for an event changed the statistics page");
  flush_stats(t);
  expect(me, t->stats->ops[DK_OP_BARRIER].calls == 1, "the page shows %lu barriers after a flush, wanted 1",
         (unsigned long)t->stats->ops[DK_OP_BARRIER].calls);
  drop_event(me, event);
}

/* The stream's thread does not round as the thread does that has created the stream. */
static void rounding(struct rank *me) {
  const struct ll_spec spec = {.tokens = 10,
                               .max_tokens = 10,
                               .experts = 6,
                               .topk = 4,
                               .index_bytes = 8,
                               .hidden = 1024,
                               .format = DK_FORMAT_FP8};
  struct team *t = make_ll_team(me, &spec, 0);
  uint64_t first = me->stream;
  fesetround(FE_UPWARD);
  me->stream = new_stream(me, 0);
  fesetround(FE_TONEAREST);
  ll_round(make_ll(t, &spec, 1), 1);
  drop_stream(me, me->stream);
  me->stream = first;
}

static const struct test_case cases[] = {
    {"stream/first in, first out", fifo, 1, NULL, QUICK, 0, 0},
    {"stream/waits with a time limit", slices, 2, NULL, QUICK, 0, 0},
    {"stream/one waits for another", cross_stream, 2, NULL, QUICK, 0, 0},
    {"stream/0 is the calling thread", host_stream, 1, NULL, QUICK, DK_CAP_HOST_STREAM, 0},
    {"stream/many streams and events", many, 1, NULL, QUICK, 0, 0},
    {"stream/rounding is not the creator's", rounding, 2, NULL, QUICK, DK_CAP_HOST_STREAM, 0},
    {"stream/waiting for an event launches nothing", waits_only, 2, NULL, QUICK, 0, 0},
};
GROUP(stream_cases);
