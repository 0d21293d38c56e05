/* wire.h - transports of a case: each rank's block, and its queue pairs to all others. For host libraries only: cases
 * read the blocks directly. */
#ifndef DEEPEP_KERNEL_TESTS_WIRE_H
#define DEEPEP_KERNEL_TESTS_WIRE_H
#include "suite.h"

struct wire_spec {
  int qps, depth;
  uint32_t flags;
};
struct wire {
  struct rank *me;
  struct share *block;
  uint64_t handle;
  int qps, depth;
  int32_t peers[MAX_SEATS]; /* in the order of creation */
  uint64_t timeout_ns;
};

/* Skips the case where the library has no transport. The block stays for the whole case, the transport until
 * close_wire. */
struct wire *make_wire(struct rank *me, uint64_t block_bytes);
void open_wire(struct wire *w, const struct wire_spec *spec, uint64_t seed);
void close_wire(struct wire *w);
dk_transport_open_params open_params(struct wire *w, const struct wire_spec *spec, uint64_t seed);

char *own(const struct wire *w, uint64_t offset);              /* an address in this rank's block */
char *theirs(const struct wire *w, int rank, uint64_t offset); /* words that only a NIC writes, read to see its work */
uint64_t word(const struct wire *w, uint64_t offset);          /* acquire */

/* Parameters for dk.transport_put on the calling thread, with the wire's time limit. */
dk_transport_put_params put_params(const struct wire *w, int peer, int qp);
dk_transport_put_params signal_params(const struct wire *w, int peer, int qp, uint64_t offset, uint32_t op,
                                      uint64_t value);
void add_bytes(dk_transport_put_params *p, uint64_t dst, const void *src, uint64_t bytes);
void post(struct wire *w, int peer, int qp, uint64_t dst, const void *src, uint64_t bytes);
void post_signal(struct wire *w, int peer, int qp, uint64_t offset, uint32_t op, uint64_t value);
int32_t quiet_code(struct wire *w, int peer, int qp, uint64_t timeout_ns);
void quiet(struct wire *w, int peer, int qp);
dk_transport_query_params query(struct wire *w, int peer, int qp);
/* Polls until the word in this rank's block is at least `value`, or fails the case. */
uint64_t await_word(struct wire *w, uint64_t offset, uint64_t value);

#endif
