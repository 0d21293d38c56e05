/* lowlat.h - low-latency calls: dispatch and combine in both halves, each with its check against the reference. */
#ifndef DEEPEP_KERNEL_TESTS_LOWLAT_H
#define DEEPEP_KERNEL_TESTS_LOWLAT_H
#include "reference.h"

enum values {
  ANY_BITS, /* BF16, FP4: rows that name their origin; FP8, NVFP4: numbers of many sizes, zero rows, tiny rows */
  SPECIALS  /* FP8, NVFP4: some rows have NaN and infinities */
};
/* A bit of the salt of the experts' rows: values about normally distributed, as activations are. Without it, values of
 * all kinds. */
#define USUAL_ROWS ((uint64_t)1 << 63)

struct ll_spec {
  enum pattern pattern;
  enum payload payload; /* BF16, FP4 */
  enum values values;
  int tokens, max_tokens, hidden, experts, topk, index_bytes;
  int format;     /* DK_FORMAT_* */
  uint32_t flags; /* of dispatch: DK_LL_ROUND_SCALE, DK_LL_UE8M0 */
  bool weights;   /* sent along with dispatch */
  uint32_t combine_flags;
};

struct ll {
  const struct ll_spec *spec;
  struct team *team;
  struct routing *routing;
  uint64_t salt, row_salt;
  int tokens, local, rows; /* mine; experts of a rank; R * B */
  uint32_t absent;         /* bit by rank: no rows come from it, and its experts add nothing */
  int voided;              /* 1 + the token whose index is wrong in combine: its sums are NaN; 0: none */
  bool whole_combine;      /* the newest combine was not in halves */
  int dispatches;          /* whose counts cumulative_stats has */
  struct tensor x, x_scales, idx, weights, recv_x, recv_scales, recv_count, src_info, layout_range, cumulative, waits;
  struct tensor y, out, combine_waits;
  dk_ll_layout_params layout;
};

struct team *make_ll_team(struct rank *me, const struct ll_spec *largest, uint32_t flags);
struct ll *make_ll(struct team *t, const struct ll_spec *spec, uint64_t salt);
/* Other rows with the same routing. */
void new_ll_payload(struct ll *l, uint64_t salt);
/* These only enqueue. */
void run_ll_dispatch(struct ll *l, uint32_t phases, uint32_t ticket);
void run_ll_combine(struct ll *l, uint32_t phases, uint32_t ticket);
dk_ll_dispatch_params ll_dispatch_params(struct ll *l, uint32_t phases, uint32_t ticket);
dk_ll_combine_params ll_combine_params(struct ll *l, uint32_t phases, uint32_t ticket);
/* These wait. The experts' rows are made by the reference: valid ones by the salt, all others NaN. */
void check_ll_dispatch(struct ll *l);
void make_expert_rows(struct ll *l, uint64_t salt);
void check_ll_combine(struct ll *l);
/* Dispatch, check, the experts' rows. */
void ll_dispatch_and_answer(struct ll *l, uint64_t salt);
/* The same, combine, check; the second with a pause now and then between the halves of a call. */
void ll_round(struct ll *l, uint64_t salt);
void ll_round_in_halves(struct ll *l, uint64_t salt);
/* A random shape no larger than the largest. */
struct ll_spec random_ll_spec(struct dice *d, int ranks, enum pattern pattern, const struct ll_spec *largest);
/* What an aborted call leaves. */
void expect_no_rows(struct ll *l);
void expect_nan(struct ll *l);

#define NVFP4_FACTOR 96.5f
/* The bytes of a row's values, and of its scales. */
uint64_t ll_value_bytes(const struct ll_spec *spec);
uint64_t ll_scale_bytes(const struct ll_spec *spec);
enum payload ll_scale_payload(const struct ll_spec *spec, int token);
void make_numbers(const struct ll *l, int source, int token, uint16_t *row);
uint16_t expert_value(uint64_t salt, int expert, int source, int token, int channel);

#endif
