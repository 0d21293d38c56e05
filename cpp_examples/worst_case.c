/* One-step dispatch from C: the outputs have room for the worst case, so the host does not wait for counts. No program
 * starts the ranks here, and no other library joins them: they meet in a folder. */
#include "arrays.h"
#include "deepep.h"
#include "ranks.h"

enum { TOKENS = 16, HIDDEN = 64, TOPK = 2, EXPERTS = 8 };

/* Reports the error of a call that failed, and returns from the function. */
#define CHECK(call)                                                                             \
  do {                                                                                          \
    deepep_status_t status_ = (call);                                                           \
    if (status_ != DEEPEP_OK) {                                                                 \
      fprintf(stderr, "%s: %s: %s\n", #call, deepep_status_name(status_), deepep_last_error()); \
      return 1;                                                                                 \
    }                                                                                           \
  } while (0)

/* What one rank holds: the library's objects and the step's arrays. */
typedef struct {
  int rank, size, worst; /* worst: rows that can arrive at most */
  deepep_buffer_options options;
  deepep_group_t group;
  deepep_buffer_t buffer;
  deepep_event_t done; /* on a GPU the calls only launch: the program waits before it reads */
  unsigned short *x, *received, *combined;
  int32_t *topk_idx, *received_idx, *per_rank, *per_expert, *matrix, *head, *source;
  float *weights, *received_weights;
  uint8_t *in_rank;
} rank_state;

static int join(rank_state *s, const char *directory) {
  deepep_group_options where = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_config config = DEEPEP_CONFIG_INIT;
  where.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  where.directory = directory;
  where.rank = s->rank;
  where.size = s->size;
  CHECK(deepep_group_create(&where, &s->group));
  s->options.engine = arrays_open(s->rank, &s->options.device);
  CHECK(deepep_config_default(0, s->size, &config));
  CHECK(deepep_config_size_hint(&config, HIDDEN * 2, s->size, 0, &s->options.num_nvl_bytes));
  CHECK(deepep_config_size_hint(&config, HIDDEN * 2, s->size, 1, &s->options.num_rdma_bytes)); /* 0 on one node */
  CHECK(deepep_buffer_create(s->group, &s->options, &s->buffer));
  CHECK(deepep_event_create(s->buffer, &s->done));
  return 0;
}

static void make_arrays(rank_state *s) {
  const size_t size = (size_t)s->size, worst = (size_t)s->worst;
  int t, c;
  s->x = array_new(TOKENS * HIDDEN * sizeof *s->x);
  s->received = array_new(worst * HIDDEN * sizeof *s->received);
  s->combined = array_new(TOKENS * HIDDEN * sizeof *s->combined);
  s->topk_idx = array_new(TOKENS * TOPK * sizeof *s->topk_idx);
  s->received_idx = array_new(worst * TOPK * sizeof *s->received_idx);
  s->weights = array_new(TOKENS * TOPK * sizeof *s->weights);
  s->received_weights = array_new(worst * TOPK * sizeof *s->received_weights);
  s->per_rank = array_new(size * sizeof *s->per_rank);
  s->per_expert = array_new(EXPERTS * sizeof *s->per_expert);
  s->matrix = array_new(size * size * sizeof *s->matrix);
  s->head = array_new(TOKENS * size * sizeof *s->head);
  s->source = array_new(worst * sizeof *s->source);
  s->in_rank = array_new(TOKENS * size);
  for (t = 0; t < TOKENS; t++) {
    for (c = 0; c < HIDDEN; c++) s->x[t * HIDDEN + c] = to_bf16((float)(s->rank * TOKENS + t));
    s->topk_idx[t * TOPK] = (t + s->rank) % EXPERTS;
    s->topk_idx[t * TOPK + 1] = t % 3 == 0 ? -1 : (t * 5) % EXPERTS; /* -1 selects nothing */
    s->weights[t * TOPK] = s->weights[t * TOPK + 1] = 0.5f;
  }
}

/* Layout, counts, dispatch, and back: all launched without a look at the counts. */
static int dispatch_and_combine(rank_state *s) {
  deepep_layout layout = DEEPEP_LAYOUT_INIT;
  deepep_handle handle = DEEPEP_HANDLE_INIT;
  deepep_notify notify = DEEPEP_NOTIFY_INIT;
  deepep_dispatch_args dispatch = DEEPEP_DISPATCH_INIT;
  deepep_combine_args combine = DEEPEP_COMBINE_INIT;
  layout.num_tokens = notify.num_tokens = dispatch.num_tokens = TOKENS;
  layout.num_topk = notify.num_topk = dispatch.num_topk = TOPK;
  layout.num_experts = notify.num_experts = dispatch.num_experts = EXPERTS;
  layout.index_type = dispatch.index_type = DEEPEP_INT32;
  layout.topk_idx = dispatch.topk_idx = s->topk_idx;
  layout.num_tokens_per_rank = s->per_rank;
  layout.num_tokens_per_expert = s->per_expert;
  layout.is_token_in_rank = s->in_rank;
  CHECK(deepep_get_layout(s->buffer, &layout, NULL));

  handle.rank_prefix_matrix = s->matrix;
  handle.send_head = s->head;
  handle.recv_src_idx = s->source;
  handle.num_recv_tokens = s->worst;
  notify.num_worst_tokens = dispatch.num_worst_tokens = s->worst;
  notify.hidden = dispatch.hidden = combine.hidden = HIDDEN;
  notify.num_tokens_per_rank = s->per_rank;
  notify.num_tokens_per_expert = s->per_expert;
  notify.is_token_in_rank = s->in_rank;
  notify.handle = &handle;
  dispatch.x = s->x;
  dispatch.topk_weights = s->weights;
  dispatch.recv_x = s->received;
  dispatch.recv_topk_idx = s->received_idx;
  dispatch.recv_topk_weights = s->received_weights;
  CHECK(deepep_dispatch_at_once(s->buffer, &notify, &dispatch, NULL));

  combine.x = s->received; /* the experts are the identity here */
  combine.handle = &handle;
  combine.combined_x = s->combined;
  CHECK(deepep_combine(s->buffer, &combine, NULL));
  CHECK(deepep_event_record(s->done, NULL));
  CHECK(deepep_event_wait(s->done, -1));
  return 0;
}

static int wrong_values(const rank_state *s) {
  const int rows = s->matrix[(s->size - 1) * s->size + s->rank];
  int t, c, r, row = 0, wrong = 0;
  for (r = 0; r < s->size; r++) {
    for (; row < s->matrix[r * s->size + s->rank]; row++) {
      const unsigned short value = to_bf16((float)(r * TOKENS + s->source[row]));
      for (c = 0; c < HIDDEN; c++) wrong += s->received[row * HIDDEN + c] != value;
    }
  }
  for (row = rows; row < s->worst; row++) {
    wrong += s->received_idx[row * TOPK] != -1 || s->received_idx[row * TOPK + 1] != -1;
  }
  for (t = 0; t < TOKENS; t++) {
    int copies = 0;
    for (r = 0; r < s->size; r++) copies += s->in_rank[t * s->size + r];
    for (c = 0; c < HIDDEN; c++) {
      wrong += s->combined[t * HIDDEN + c] != to_bf16((float)(copies * (s->rank * TOKENS + t)));
    }
  }
  printf("rank %d (%s): %d of at most %d rows, %d wrong values\n", s->rank, s->options.engine, rows, s->worst, wrong);
  return wrong;
}

static int one_rank(int rank, int size, const char *directory) {
  const deepep_buffer_options defaults = DEEPEP_BUFFER_OPTIONS_INIT;
  rank_state s;
  int wrong;
  memset(&s, 0, sizeof s);
  s.rank = rank;
  s.size = size;
  s.worst = TOKENS * size;
  s.options = defaults;
  if (join(&s, directory) != 0) return 1;
  make_arrays(&s);
  if (dispatch_and_combine(&s) != 0) return 1;
  wrong = wrong_values(&s);
  CHECK(deepep_event_destroy(s.done));
  CHECK(deepep_buffer_destroy(s.buffer));
  CHECK(deepep_group_destroy(s.group));
  return wrong == 0 ? 0 : 1;
}

int main(int argc, char **argv) { return run_ranks(argc, argv, 4, one_rank); }
