/* A serving loop in C that loses a rank and takes a new process in its place: the last rank dies without a word, the
 * others go on (among themselves where they are one node), rank 0 starts a process, and all serve together again. Rows
 * are checked in every step. */
#include <time.h>

#include "arrays.h"
#include "deepep.h"
#include "ranks.h"

enum { TOKENS = 16, HIDDEN = 256, EXPERTS = 24, STEPS = 8, PATIENCE_S = 40 };

static const char kKey[] = "DEEPEP_EXAMPLE_KEY"; /* set for the process that joins */

/* Reports the error of a call that failed, and returns from the function. */
#define CHECK(call)                                                                             \
  do {                                                                                          \
    deepep_status_t status_ = (call);                                                           \
    if (status_ != DEEPEP_OK) {                                                                 \
      fprintf(stderr, "%s: %s: %s\n", #call, deepep_status_name(status_), deepep_last_error()); \
      return 1;                                                                                 \
    }                                                                                           \
  } while (0)

typedef struct {
  int rank, size; /* of now */
  deepep_group_t group;
  deepep_buffer_t buffer;
  deepep_event_t done; /* on a GPU the calls only launch: the program waits before it reads */
  unsigned short *x, *received, *combined;
  int64_t *topk_idx, *ranges;
  float *weights;
  int32_t *counts, *source;
  double last, longest; /* end of the last step, longest time from step to step; seconds */
} server;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void nap(void) { nanosleep(&(struct timespec){0, 5000000}, NULL); }

/* key: of the group to join; NULL: the ranks meet in the folder. */
static int open_server(server *s, const char *directory, const char *key) {
  deepep_group_options where = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_buffer_options options = DEEPEP_BUFFER_OPTIONS_INIT;
  where.bootstrap = key != NULL ? DEEPEP_BOOTSTRAP_JOIN : DEEPEP_BOOTSTRAP_FILE;
  where.directory = directory;
  where.name = key;
  where.rank = s->rank;
  where.size = s->size;
  options.engine = where.engine = arrays_open(s->rank, &options.device);
  where.device = options.device;
  options.low_latency_mode = 1;
  CHECK(deepep_low_latency_size_hint(TOKENS, HIDDEN, s->size, EXPERTS, &options.num_rdma_bytes));
  CHECK(deepep_group_create(&where, &s->group));
  CHECK(deepep_buffer_create(s->group, &options, &s->buffer));
  CHECK(deepep_event_create(s->buffer, &s->done));
  return 0;
}

/* The buffer's number and number of ranks change with a regroup, and with them the experts of each rank. */
static int look(server *s) {
  deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT;
  int t, c;
  CHECK(deepep_buffer_info_get(s->buffer, &info));
  s->rank = info.rank;
  s->size = info.size;
  for (t = 0; t < TOKENS; t++) {
    for (c = 0; c < HIDDEN; c++) s->x[t * HIDDEN + c] = to_bf16((float)((s->rank * TOKENS + t + c) % 128));
    s->topk_idx[t] = (t * 5 + s->rank) % EXPERTS;
    s->weights[t] = 1;
  }
  return 0;
}

static void make_arrays(server *s, int size) {
  const size_t rows = (size_t)EXPERTS * TOKENS; /* E / size experts, each with up to size * TOKENS rows */
  s->x = array_new(TOKENS * HIDDEN * sizeof *s->x);
  s->combined = array_new(TOKENS * HIDDEN * sizeof *s->combined);
  s->received = array_new(rows * HIDDEN * sizeof *s->received);
  s->source = array_new(rows * sizeof *s->source);
  s->topk_idx = array_new(TOKENS * sizeof *s->topk_idx);
  s->weights = array_new(TOKENS * sizeof *s->weights);
  s->counts = array_new(EXPERTS * sizeof *s->counts);
  s->ranges = array_new((size_t)EXPERTS * (size_t)size * sizeof *s->ranges);
}

/* Each row goes to its expert (the identity here) and comes back. */
static deepep_status_t round_trip(server *s) {
  deepep_ll_dispatch_args dispatch = DEEPEP_LL_DISPATCH_INIT;
  deepep_ll_combine_args combine = DEEPEP_LL_COMBINE_INIT;
  deepep_status_t status;
  dispatch.num_tokens = dispatch.num_max_tokens = combine.num_tokens = combine.num_max_tokens = TOKENS;
  dispatch.hidden = combine.hidden = HIDDEN;
  dispatch.num_topk = combine.num_topk = 1;
  dispatch.num_experts = combine.num_experts = EXPERTS;
  dispatch.use_fp8 = 0;
  dispatch.x = s->x;
  dispatch.topk_idx = combine.topk_idx = s->topk_idx;
  dispatch.recv_x = s->received;
  combine.x = s->received;
  dispatch.recv_count = s->counts;
  dispatch.src_info = s->source;
  combine.src_info = s->source;
  dispatch.layout_range = s->ranges;
  combine.layout_range = s->ranges;
  combine.topk_weights = s->weights;
  combine.combined_x = s->combined;
  status = deepep_low_latency_dispatch(s->buffer, &dispatch, NULL);
  if (status == DEEPEP_OK) status = deepep_low_latency_combine(s->buffer, &combine, NULL);
  if (status == DEEPEP_OK) status = deepep_event_record(s->done, NULL);
  if (status == DEEPEP_OK) status = deepep_event_wait(s->done, -1);
  if (status == DEEPEP_OK) status = deepep_buffer_check(s->buffer); /* a sum without its rows is no sum */
  return status;
}

/* A step of the loop. *wrong counts values that did not come back. */
static deepep_status_t step(server *s, int *wrong) {
  deepep_status_t status = round_trip(s);
  double now = seconds();
  int i;
  if (status != DEEPEP_OK) return status;
  for (i = 0; i < TOKENS * HIDDEN; i++) *wrong += s->combined[i] != s->x[i];
  if (s->last > 0 && now - s->last > s->longest) s->longest = now - s->last;
  s->last = now;
  return DEEPEP_OK;
}

static int steps(server *s, int *wrong) {
  int i;
  for (i = 0; i < STEPS; i++) CHECK(step(s, wrong));
  return 0;
}

/* Goes on with ranks 0 to size - 1, where one that is lost stands for a process that joins. An attempt fails if none
 * waits yet, or if a member has not heard yet of what another one knows. */
static int regroup(server *s, int size) {
  deepep_regroup_options options = DEEPEP_REGROUP_OPTIONS_INIT;
  const double until = seconds() + PATIENCE_S;
  int32_t members[64];
  for (options.num_members = 0; options.num_members < size; options.num_members++)
    members[options.num_members] = options.num_members;
  options.members = members;
  options.renumber = 1;
  options.timeout_ms = 1000 * PATIENCE_S;
  while (deepep_buffer_regroup(s->buffer, &options) != DEEPEP_OK) {
    if (seconds() > until) CHECK(deepep_buffer_regroup(s->buffer, &options));
    nap();
  }
  return look(s);
}

/* Starts a process that asks for the last rank's place. */
static pid_t start_another(server *s, char *directory, int size) {
  char key[DEEPEP_JOIN_KEY_BYTES], rank[16], ranks[16];
  char *arguments[] = {(char *)"rejoin", (char *)"--rank", rank, ranks, directory, NULL};
  pid_t child = -1;
  snprintf(rank, sizeof rank, "%d", size - 1);
  snprintf(ranks, sizeof ranks, "%d", size);
  if (deepep_buffer_join_key(s->buffer, key, sizeof key) != DEEPEP_OK || setenv(kKey, key, 1) != 0) return -1;
  return posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ) == 0 ? child : -1;
}

/* What a survivor does from the last rank's death until a process has its place. */
static int survive(server *s, const char *directory, int size, int *wrong, pid_t *child) {
  deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT;
  const double until = seconds() + PATIENCE_S;
  deepep_status_t status;
  int32_t waiting = 0;
  while ((status = step(s, wrong)) == DEEPEP_OK && seconds() < until) nap();
  if (status != DEEPEP_ERROR_PEER_DEAD && status != DEEPEP_ERROR_ABORTED) {
    fprintf(stderr, "rank %d: no word of the death: %s\n", s->rank, deepep_last_error());
    return 1;
  }
  s->last = 0; /* detection is not counted */
  if (s->rank == 0 && (*child = start_another(s, (char *)directory, size)) < 0) return 1;
  CHECK(deepep_buffer_info_get(s->buffer, &info));
  if (info.num_rdma_ranks == 1) { /* nodes of equal size: elsewhere the place cannot stay empty */
    if (regroup(s, size - 1) != 0) return 1;
    do {
      CHECK(step(s, wrong));
      CHECK(deepep_buffer_pending_joins(s->buffer, 1, 0, NULL, &waiting)); /* all see a visitor at the same step */
    } while (waiting == 0 && seconds() < until);
  }
  return regroup(s, size);
}

static int one_rank(int rank, int size, const char *directory) {
  const char *key = getenv(kKey);
  server s;
  pid_t child = -1;
  int wrong = 0, status = 0;
  memset(&s, 0, sizeof s);
  s.rank = rank;
  s.size = size;
  if (open_server(&s, directory, key) != 0) return 1;
  make_arrays(&s, size);
  if (look(&s) != 0) return 1;
  if (key == NULL && size > 1) {
    if (rank == size - 1) _exit(steps(&s, &wrong)); /* no goodbye */
    if (survive(&s, directory, size, &wrong, &child) != 0) return 1;
  }
  if (s.rank != rank || s.size != size) wrong++;
  if (steps(&s, &wrong) != 0) return 1;
  printf("rank %d of %d%s: %d wrong values, at most %.0f ms from step to step\n", s.rank, s.size,
         key != NULL ? " (new)" : "", wrong, 1e3 * s.longest);
  fflush(stdout);
  CHECK(deepep_event_destroy(s.done));
  CHECK(deepep_buffer_destroy(s.buffer));
  CHECK(deepep_group_destroy(s.group));
  if (child > 0) waitpid(child, &status, 0);
  return wrong == 0 && status == 0 ? 0 : 1;
}

int main(int argc, char **argv) { return run_ranks(argc, argv, 4, one_rank); }
