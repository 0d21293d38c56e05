/* routed.h - one call of normal mode with a routing: notify, dispatch, combine, each with its check against the
 * reference. */
#ifndef DEEPEP_KERNEL_TESTS_ROUTED_H
#define DEEPEP_KERNEL_TESTS_ROUTED_H
#include "reference.h"

struct routed_spec {
  enum pattern pattern;
  int tokens, experts, topk; /* experts of a rank */
  int index_bytes;           /* 0: 8 */
  int hidden;                /* of the combine */
  uint64_t row_bytes;        /* of the dispatch; 0: 2 * hidden */
  int scales;
  bool columns; /* received scales by columns of a multiple of 4 rows */
  bool plain;   /* DK_ROUTING_PLAIN, else EXPANDED */
  int alignment;
  bool padding;   /* zeros between the groups */
  bool weights;   /* with weights, both ways */
  bool worst;     /* no host waits for counts */
  bool at_once;   /* of a worst case: notify and dispatch are one call */
  bool segment;   /* recv_x in a segment, on all ranks but 0 */
  bool unreduced; /* the combine's every row crosses */
  bool negative;  /* numbers below -1 select nothing either */
  int biases, num_sms;
  uint64_t nvl_bytes; /* 0: the floor */
  int sent;           /* tokens that the last rank dispatches before it is lost; 0: all */
};

struct arrival {
  int source, token;
};
struct routed {
  const struct routed_spec *spec;
  struct team *team;
  struct routing *routing;
  uint64_t salt;
  int tokens, rows, expanded; /* of this rank; rows that it receives, in both layouts */
  int capacity, room;         /* rows of its outputs: of metadata; of recv_x */
  int max_tokens;             /* M */
  uint32_t missing;           /* ranks that were lost after the notify, bit by rank */
  struct arrival *arrivals;   /* of each plain row */
  int *slots;                 /* [rows, K] expanded row of each choice, -1: not here */
  int *first;                 /* [L] of each local expert: first row */
  int *count;                 /* [L] */
  struct tensor idx, weights, x, scales;
  struct tensor copy, matrix, head, slot, psum_ranks, psum_experts, num_experts, stats;
  struct tensor recv_x, recv_scales, recv_idx, recv_weights, meta;
  int64_t scale_row_stride, scale_stride; /* of the received */
  dk_counts *counts;
  uint64_t counts_at, notify_call;
  struct share *segment;
  /* The combine. */
  struct tensor y, y_weights, bias[2], out, out_weights;
};

struct routed *make_routed(struct team *t, const struct routed_spec *spec, uint64_t salt);
/* What should come where the notify leaves out ranks (bit by rank); the inputs stay. */
void leave_out_routed(struct routed *n, uint32_t ranks);
void new_routed_payload(struct routed *n, uint64_t salt);
dk_notify_params routed_notify(struct routed *n);
dk_dispatch_params routed_dispatch(struct routed *n, uint32_t flags);
dk_combine_params routed_combine(struct routed *n);
/* These wait. */
void await_routed_counts(struct routed *n);
void check_routed_notify(struct routed *n);
void check_routed_dispatch(struct routed *n, uint32_t flags);
void check_routed_combine(struct routed *n);
/* The exchange of counts, unless the dispatch takes it along, and the dispatch. */
void run_routed_dispatch(struct routed *n);
/* All three with their checks. */
void run_routed(struct routed *n);

#endif
