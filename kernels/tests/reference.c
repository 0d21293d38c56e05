/* reference.c - the contract's formulas, one channel at a time. */
#include "reference.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t to_bf16(float value) {
  if (isnan(value)) return 0x7fc0;
  uint32_t bits = bits_of(value), low = bits & 0xffff, high = bits >> 16;
  bool up = low > 0x8000 || (low == 0x8000 && (high & 1));
  return (uint16_t)(high + up);
}

bool bf16_is_nan(uint16_t bits) { return (bits & 0x7fff) > 0x7f80; }

/* E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, the largest number is 448, 0x7f is NaN. Rounds to
 * nearest even and saturates. */
static uint8_t to_e4m3(float value) {
  uint8_t sign = signbit(value) ? 0x80 : 0;
  if (isnan(value)) return 0x7f | sign;
  double magnitude = fabs((double)value);
  if (magnitude >= 448) return 0x7e | sign;
  int exponent = magnitude > 0 ? (int)floor(log2(magnitude)) : -6;
  if (exponent < -6) exponent = -6;
  int steps = (int)nearbyint(ldexp(magnitude, 3 - exponent)); /* 0..16; 16 carries into the exponent */
  int code = (exponent + 6) * 8 + steps;                      /* codes below 8 are subnormal */
  return (uint8_t)(code > 0x7e ? 0x7e : code) | sign;
}

void reference_fp8(const uint16_t *x, bool round_scale, uint8_t *codes, float *scale) {
  float amax = 1e-4f;
  for (int i = 0; i < 128; i++) {
    float magnitude = fabsf(from_bf16(x[i]));
    if (magnitude > amax) amax = magnitude;
  }
  float factor = 448.0f / amax;
  *scale = amax / 448.0f;
  if (round_scale) {
    int exponent;
    float fraction = frexpf(*scale, &exponent); /* in [1/2, 1) */
    *scale = ldexpf(1, fraction == 0.5f ? exponent - 1 : exponent);
    factor = 1.0f / *scale;
  }
  for (int i = 0; i < 128; i++) codes[i] = to_e4m3(from_bf16(x[i]) * factor);
}

void reference_fp4(const uint16_t *x, float factor, uint8_t *codes, uint8_t *scale) {
  static const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  float amax = 0;
  for (int i = 0; i < 16; i++) {
    float magnitude = fabsf(from_bf16(x[i]));
    if (isnan(magnitude) || magnitude > amax) amax = isnan(amax) ? amax : magnitude;
  }
  *scale = to_e4m3(factor * (amax / 6));
  int exponent = *scale >> 3, mantissa = *scale & 7;
  float value =
      *scale == 0x7f ? NAN : ldexpf((float)(exponent ? 8 + mantissa : mantissa), (exponent ? exponent : 1) - 10);
  for (int i = 0; i < 16; i++) {
    float wanted = fabsf(from_bf16(x[i])) * (factor / value);
    int code = 7;
    if (*scale == 0) {
      code = 0;
    } else if (wanted < 6) {
      for (code = 0; magnitudes[code + 1] <= wanted;) code++;
      float below = wanted - magnitudes[code], above = magnitudes[code + 1] - wanted;
      if (above < below || (above == below && code % 2)) code++;
    }
    codes[i] = (uint8_t)(code ? code | (x[i] >> 15) << 3 : 0);
  }
}

void reference_logfmt_error(const uint16_t *x, double *error) {
  double least = INFINITY, greatest = 0;
  for (int i = 0; i < 128; i++) {
    double magnitude = fabs(from_bf16(x[i]));
    if (magnitude < least) least = magnitude; /* not fmin: gcc 12 for aarch64 crashes on it */
    if (magnitude > greatest) greatest = magnitude;
  }
  memset(error, 0, 128 * sizeof *error);
  if (greatest >= 1 || greatest == least) return; /* the block stays BF16 */
  least = fmax(least, ldexp(greatest, -32));
  double step = log2(greatest / least) / 510;
  for (int i = 0; i < 128; i++) {
    double magnitude = fabs(from_bf16(x[i]));
    if (magnitude == 0) continue;
    if (magnitude < least) {
      error[i] = least / 2;
      continue;
    }
    /* With a margin for positions that are computed in FP32. */
    double place = log2(magnitude / least) / step;
    double below = fmax(0, floor(place - 0.01)), above = fmin(510, ceil(place + 0.01));
    error[i] = (least * exp2(above * step) - least * exp2(below * step)) / 2 + magnitude * 1e-5;
  }
}

uint16_t random_bf16(uint64_t bits, int exponent) {
  return (uint16_t)((bits & 0x7f) | (bits >> 7 & 1) << 15 | (uint64_t)(exponent + 127) << 7);
}

/* ---- Routing ----------------------------------------------------------------------------------------------------- */

static int tokens_of(enum pattern pattern, uint64_t salt, int rank, int most) {
  if (pattern == NO_TOKENS || (pattern == SILENT_RANK && rank == 1)) return 0;
  if (pattern == ONE_HOT || pattern == NOBODY) return most;
  return most - (int)(hash(salt, 1, (uint64_t)rank, 0) % (uint64_t)(most / 4 + 1)); /* ranks differ */
}

static bool taken(const int64_t *row, int k, int64_t expert) {
  for (int i = 0; i < k; i++)
    if (row[i] == expert) return true;
  return false;
}

static int64_t any_expert(const struct routing *r, enum pattern pattern, uint64_t bits, int rank) {
  int64_t experts = r->experts, local = experts / r->ranks;
  if (pattern == DUPLICATES && experts > 3) experts = 3;
  if (pattern == SILENT_RANK && r->ranks > 1) experts -= local;
  if (pattern == SKEWED && bits >> 56 < 160)
    return rank == 0 ? (int64_t)(bits % (uint64_t)local) : (int64_t)(bits % 2) % experts;
  return (int64_t)(bits % (uint64_t)experts);
}

static int64_t choose(const struct routing *r, enum pattern pattern, uint64_t salt, int rank, int token, int k,
                      const int64_t *row) {
  if (pattern == NOBODY) return -1;
  if (pattern == ONE_HOT) return k == 0 ? 0 : -1;
  for (uint64_t attempt = 0; attempt < 20; attempt++) {
    uint64_t bits = hash(salt, 2 + attempt, (uint64_t)rank << 32 | (uint64_t)token, (uint64_t)k);
    if ((bits >> 40 & 15) == 0) return -1;
    int64_t expert = any_expert(r, pattern, bits, rank);
    if (pattern == DUPLICATES || !taken(row, k, expert)) return expert;
  }
  return -1;
}

struct routing *make_routing(struct rank *me, enum pattern pattern, uint64_t salt, int tokens, int experts, int topk) {
  struct routing *r = scratch(me, sizeof *r);
  r->ranks = me->count;
  r->experts = experts;
  r->topk = topk;
  for (int rank = 0; rank < r->ranks; rank++) {
    r->tokens[rank] = tokens_of(pattern, salt, rank, tokens);
    size_t entries = (size_t)r->tokens[rank] * (size_t)topk;
    r->index[rank] = scratch(me, entries * sizeof(int64_t));
    r->weight[rank] = scratch(me, entries * sizeof(float));
    for (size_t i = 0; i < entries; i++) {
      int token = (int)(i / (size_t)topk), k = (int)(i % (size_t)topk);
      r->index[rank][i] = choose(r, pattern, salt, rank, token, k, r->index[rank] + (size_t)token * (size_t)topk);
      r->weight[rank][i] = (float)(hash(salt, 99, (uint64_t)rank, i) % 1000 + 1) / 1000.0f;
    }
  }
  return r;
}

int owner_of(const struct routing *r, int64_t expert) {
  return expert < 0 ? -1 : (int)(expert / (r->experts / r->ranks));
}

bool goes_to(const struct routing *r, int source, int token, int rank) {
  for (int k = 0; k < r->topk; k++)
    if (owner_of(r, r->index[source][token * r->topk + k]) == rank) return true;
  return false;
}

int times_named(const struct routing *r, int source, int token, int expert) {
  const int64_t *row = r->index[source] + (size_t)token * (size_t)r->topk;
  int times = 0;
  for (int k = 0; k < r->topk; k++) times += row[k] == expert;
  return times;
}

bool names(const struct routing *r, int source, int token, int expert) {
  return times_named(r, source, token, expert) > 0;
}

int rows_between(const struct routing *r, int source, int rank) {
  int rows = 0;
  for (int t = 0; t < r->tokens[source]; t++) rows += goes_to(r, source, t, rank);
  return rows;
}

/* ---- Payload ----------------------------------------------------------------------------------------------------- */

static uint32_t name_of(uint64_t salt, int rank, int token) {
  return (uint32_t)(salt % 256) << 24 | (uint32_t)rank << 20 | (uint32_t)token;
}

void make_row(void *row, uint64_t bytes, enum payload payload, uint64_t salt, int rank, int token) {
  if (payload != NAMED) {
    memset(row, payload == ALL_ONES ? 0xff : 0, bytes);
    return;
  }
  uint32_t *words = row, name = name_of(salt, rank, token);
  uint64_t start = hash(salt, 7, (uint64_t)rank, (uint64_t)token);
  words[0] = name;
  for (uint64_t i = 1; i < bytes / 4; i++) words[i] = (uint32_t)((start + i) * 0x9e3779b97f4a7c15u >> 32);
}

void expect_row(struct rank *me, const char *what, int row, const void *got, uint64_t bytes, enum payload payload,
                uint64_t salt, int rank, int token) {
  uint64_t words[bytes / 8 + 1];
  make_row(words, bytes, payload, salt, rank, token);
  if (memcmp(words, got, bytes) == 0) return;
  uint64_t at = 0;
  const uint8_t *a = got, *b = (const uint8_t *)words;
  while (a[at] == b[at]) at++;
  uint32_t name;
  memcpy(&name, got, sizeof name);
  if (payload == NAMED && at < 4 && (int)(name >> 20 & 15) < me->count)
    fail(me, "row %d of %s should be token %d of rank %d, but looks like token %u of rank %u%s", row, what, token, rank,
         name & 0xfffff, name >> 20 & 15, name >> 24 == salt % 256 ? "" : " of another call");
  fail(me, "row %d of %s (token %d of rank %d) differs from byte %" PRIu64 " on: 0x%02x, wanted 0x%02x", row, what,
       token, rank, at, a[at], b[at]);
}

/* ---- Sums -------------------------------------------------------------------------------------------------------- */

void add_difference(struct difference *d, double a, double b) {
  d->cross += (a + 1) * (b + 1);
  d->squares += (a + 1) * (a + 1) + (b + 1) * (b + 1);
}

double difference_of(const struct difference *d) { return d->squares > 0 ? 1 - 2 * d->cross / d->squares : 0; }
