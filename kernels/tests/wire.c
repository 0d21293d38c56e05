/* wire.c - see wire.h. */
#include "wire.h"

#include <sched.h>

struct wire *make_wire(struct rank *me, uint64_t block_bytes) {
  if (!dk.transport_open) skip(me, "the library has no transport: it reaches mapped ranks alone");
  if (!(library.caps & DK_CAP_HOST_STREAM)) skip(me, "the case looks into blocks from the host");
  struct wire *w = scratch(me, sizeof *w);
  w->me = me;
  w->block = share(me, block_bytes);
  w->timeout_ns = limit_ns(10);
  for (int i = 0; i + 1 < me->count; i++) w->peers[i] = (i + 1 + me->index) % me->count;
  return w;
}

dk_transport_open_params open_params(struct wire *w, const struct wire_spec *spec, uint64_t seed) {
  return (dk_transport_open_params){.size = sizeof(dk_transport_open_params),
                                    .device = seat_device(w->me->seat),
                                    .rank = w->me->index,
                                    .num_ranks = w->me->count,
                                    .num_qps = spec->qps,
                                    .qp_depth = spec->depth,
                                    .num_peers = w->me->count - 1,
                                    .flags = spec->flags,
                                    .host_peers = (uintptr_t)w->peers,
                                    .host_blocks = (uintptr_t)w->block->at,
                                    .block_bytes = w->block->bytes,
                                    .seed = seed};
}

void open_wire(struct wire *w, const struct wire_spec *spec, uint64_t seed) {
  dk_transport_open_params p = open_params(w, spec, seed);
  CALL(w->me, transport_open, &p);
  w->handle = p.transport;
  w->qps = spec->qps;
  w->depth = spec->depth;
  keep_transport(w->me, w->handle);
}

void close_wire(struct wire *w) {
  dk_transport_close_params p = {.size = sizeof p, .transport = w->handle};
  w->me->num_transports--; /* a case has one at a time */
  w->handle = 0;
  CALL(w->me, transport_close, &p);
}

char *theirs(const struct wire *w, int rank, uint64_t offset) {
  return (char *)(uintptr_t)(w->block->at[rank] + offset);
}
char *own(const struct wire *w, uint64_t offset) { return theirs(w, w->me->index, offset); }
uint64_t word(const struct wire *w, uint64_t offset) {
  return __atomic_load_n((uint64_t *)(void *)own(w, offset), __ATOMIC_ACQUIRE);
}

dk_transport_put_params put_params(const struct wire *w, int peer, int qp) {
  return (dk_transport_put_params){.size = sizeof(dk_transport_put_params),
                                   .transport = w->handle,
                                   .peer = peer,
                                   .qp = qp,
                                   .timeout_ns = w->timeout_ns};
}

dk_transport_put_params signal_params(const struct wire *w, int peer, int qp, uint64_t offset, uint32_t op,
                                      uint64_t value) {
  dk_transport_put_params p = put_params(w, peer, qp);
  p.signal_offset = offset;
  p.signal_op = op;
  p.signal_value = value;
  return p;
}

void add_bytes(dk_transport_put_params *p, uint64_t dst, const void *src, uint64_t bytes) {
  p->dst_offset = dst;
  p->src = (uintptr_t)src;
  p->bytes = bytes;
}

void post(struct wire *w, int peer, int qp, uint64_t dst, const void *src, uint64_t bytes) {
  dk_transport_put_params p = put_params(w, peer, qp);
  add_bytes(&p, dst, src, bytes);
  CALL(w->me, transport_put, &p);
}

void post_signal(struct wire *w, int peer, int qp, uint64_t offset, uint32_t op, uint64_t value) {
  dk_transport_put_params p = signal_params(w, peer, qp, offset, op, value);
  CALL(w->me, transport_put, &p);
}

int32_t quiet_code(struct wire *w, int peer, int qp, uint64_t timeout_ns) {
  dk_transport_quiet_params p = {
      .size = sizeof p, .transport = w->handle, .peer = peer, .qp = qp, .timeout_ns = timeout_ns};
  return dk.transport_quiet(&p);
}

void quiet(struct wire *w, int peer, int qp) {
  int32_t code = quiet_code(w, peer, qp, w->timeout_ns);
  expect(w->me, code == DK_OK, "dk_transport_quiet of peer %d, QP %d returned %s", peer, qp, code_name(code));
}

dk_transport_query_params query(struct wire *w, int peer, int qp) {
  dk_transport_query_params p = {.size = sizeof p, .transport = w->handle, .peer = peer, .qp = qp};
  CALL(w->me, transport_query, &p);
  return p;
}

uint64_t await_word(struct wire *w, uint64_t offset, uint64_t least) {
  uint64_t end = now_ns() + w->timeout_ns, seen;
  for (int looks = 0; (seen = word(w, offset)) < least; looks++) {
    if (looks < 100) continue;
    sched_yield();
    if (looks % 64 || now_ns() < end) continue;
    fail(w->me, "the word at %lu is %lu, and does not become %lu", (unsigned long)offset, (unsigned long)seen,
         (unsigned long)least);
  }
  return seen;
}
