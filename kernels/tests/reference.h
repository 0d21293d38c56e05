/* reference.h - the contract's formulas as plain scalar arithmetic, and every rank's routing and payload. Shares no
 * code with any library. */
#ifndef DEEPEP_KERNEL_TESTS_REFERENCE_H
#define DEEPEP_KERNEL_TESTS_REFERENCE_H
#include "suite.h"

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

float from_bf16(uint16_t bits);
uint16_t to_bf16(float value); /* to nearest even; NaN stays NaN */
bool bf16_is_nan(uint16_t bits);

/* One block of 128 channels to FP8: codes and the scale that gives the values back. */
void reference_fp8(const uint16_t *x, bool round_scale, uint8_t *codes, float *scale);
/* NVFP4 of 16 channels: codes 0 to 15, and the scale as e4m3. */
void reference_fp4(const uint16_t *x, float factor, uint8_t *codes, uint8_t *scale);
/* How far a LogFMT-10 channel may be from what was encoded: half the distance between the codes around it. */
void reference_logfmt_error(const uint16_t *x, double *error);

/* Random numbers as BF16 in +-[1, 2) * 2^exponent. */
uint16_t random_bf16(uint64_t bits, int exponent);

/* ---- Routing ----------------------------------------------------------------------------------------------------- */

enum pattern {
  UNIFORM,     /* random experts, each at most once a token, sometimes -1 */
  NOBODY,      /* all -1 */
  ONE_HOT,     /* all tokens to expert 0 alone */
  SKEWED,      /* most to few experts, rank 0's tokens to its own */
  DUPLICATES,  /* few experts, so that a token has some more than once */
  SILENT_RANK, /* uniform, but rank 1 has no tokens, and none go to the last rank */
  NO_TOKENS    /* no rank has tokens */
};
struct routing {
  int ranks, experts, topk, tokens[MAX_SEATS];
  int64_t *index[MAX_SEATS]; /* [T,K] of each rank */
  float *weight[MAX_SEATS];
};
/* Every rank computes every rank's routing from the salt. `tokens`: the most of a rank. */
struct routing *make_routing(struct rank *me, enum pattern pattern, uint64_t salt, int tokens, int experts, int topk);
int owner_of(const struct routing *r, int64_t expert); /* -1 for -1 */
bool goes_to(const struct routing *r, int source, int token, int rank);
bool names(const struct routing *r, int source, int token, int expert);
int times_named(const struct routing *r, int source, int token, int expert);
int rows_between(const struct routing *r, int source, int rank); /* normal mode */

/* ---- Payload ----------------------------------------------------------------------------------------------------- */

/* Bytes of a row: its first word encodes rank and token; or all bytes are equal, which no kernel may take for a flag.
 * */
enum payload { NAMED, ALL_ONES, ALL_ZEROS };
void make_row(void *row, uint64_t bytes, enum payload payload, uint64_t salt, int rank, int token);
/* Compares; if they differ, fails with the row's actual origin. */
void expect_row(struct rank *me, const char *what, int row, const void *got, uint64_t bytes, enum payload payload,
                uint64_t salt, int rank, int token);

/* ---- Sums -------------------------------------------------------------------------------------------------------- */

/* 1 - 2 sum((a+1)(b+1)) / sum((a+1)^2 + (b+1)^2), in float64 (calc_diff of the contract). */
struct difference {
  double cross, squares;
};
void add_difference(struct difference *d, double a, double b);
double difference_of(const struct difference *d);

#endif
