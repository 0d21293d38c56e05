/* normal.h - one call of normal mode: layout, notify, dispatch, combine, each with its check against the reference. */
#ifndef DEEPEP_KERNEL_TESTS_NORMAL_H
#define DEEPEP_KERNEL_TESTS_NORMAL_H
#include "reference.h"

struct normal_spec {
  enum pattern pattern;
  enum payload payload;
  int tokens, experts, topk;
  int index_bytes; /* 0: dispatch without top-k */
  uint64_t row_bytes;
  int scales;
  bool columns;      /* scales stored column by column */
  int alignment;     /* of the counts; 0: 1 */
  int spare;         /* > 0: worst case, with this many rows more than the busiest rank receives */
  bool at_once;      /* worst case: the dispatch takes its notify with it */
  bool trust_matrix; /* num_recv_tokens = -1 */
  bool segment;      /* recv_x in a segment, on all ranks but 0 */
  int num_sms, send_chunk, recv_chunk;
  uint64_t nvl_bytes; /* 0: the floor */
};

struct origin {
  int source, token;
};

struct normal {
  const struct normal_spec *spec;
  struct team *team;
  struct routing *routing;
  uint64_t salt;
  int tokens, rows, capacity; /* tokens of this rank; rows that it receives; rows of its outputs */
  struct origin *origins;     /* of each row, from the reference */
  uint32_t absent;            /* bit by rank: lost after the handle was made, so no row goes to or comes from it */
  struct tensor idx, weights, x, scales;
  struct tensor per_rank, per_node, per_expert, in_rank, matrix, head;
  struct tensor recv_x, recv_scales, recv_idx, recv_weights, recv_src;
  int64_t scale_token_stride, scale_stride;
  dk_counts *counts;
  uint64_t counts_at, notify_call;
  struct share *segment;
};

/* Tensors and inputs. The same salt gives the same routing and payload on every rank. */
struct normal *make_normal(struct team *t, const struct normal_spec *spec, uint64_t salt);
/* What the reference expects of calls from the exchange of counts on, where these ranks (a bit each) take no part. */
void leave_out(struct normal *n, uint32_t ranks);
/* Different rows and scales with the same routing, as for a cached dispatch. */
void new_payload(struct normal *n, uint64_t salt);
/* These only enqueue. */
void run_layout(struct normal *n);
void run_notify(struct normal *n);
void run_dispatch(struct normal *n, uint32_t flags);
/* These wait. */
void check_layout(struct normal *n);
void await_counts(struct normal *n);
void check_notify(struct normal *n);
void check_dispatch(struct normal *n, uint32_t flags);
/* Layout, notify, counts (unless worst case) and dispatch, with every check. */
void dispatch_and_check(struct normal *n);
dk_notify_params notify_params(struct normal *n);
dk_dispatch_params dispatch_params(struct normal *n, uint32_t flags);
int busiest(const struct routing *r);
uint32_t scale_of(uint64_t salt, int rank, int token, int column);

struct combine_spec {
  int hidden, biases;
  bool weights;
  int num_sms;
  bool segment; /* x in a segment, on all ranks but 0 */
};
struct combine {
  const struct combine_spec *spec;
  struct normal *normal;
  uint64_t salt;
  struct tensor x, weights, bias[2], out, out_weights;
  struct share *segment;
};
struct combine *make_combine(struct normal *n, const struct combine_spec *spec, uint64_t salt);
void run_combine(struct combine *c);
void check_combine(struct combine *c);
dk_combine_params combine_params(struct combine *c);

/* ---- Random calls (case_random.c) -------------------------------------------------------------------------------- */

/* A random routing and shape, rows of at most 960 bytes: dispatch and combine, then once more over the handle. */
void normal_round(struct team *t, struct dice *d);

#endif
