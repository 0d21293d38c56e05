/* One-step dispatch from C: the outputs have room for the worst case, so nobody waits for counts. A callback starts
 * nothing here: the ranks meet in a folder. */
#include "arrays.h"
#include "deepep.h"
#include "ranks.h"

enum { TOKENS = 16, HIDDEN = 64, TOPK = 2, EXPERTS = 8 };

#define CHECK(call)                                                                                 \
  do {                                                                                              \
    deepep_status_t status_ = (call);                                                               \
    if (status_ != DEEPEP_OK) {                                                                     \
      fprintf(stderr, "rank %d: %s: %s\n", rank, deepep_status_name(status_), deepep_last_error()); \
      return 1;                                                                                     \
    }                                                                                               \
  } while (0)

static int one_rank(int rank, int size, const char *directory) {
  deepep_group_options where = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_buffer_options options = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_config config = DEEPEP_CONFIG_INIT;
  deepep_layout layout = DEEPEP_LAYOUT_INIT;
  deepep_handle handle = DEEPEP_HANDLE_INIT;
  deepep_notify notify = DEEPEP_NOTIFY_INIT;
  deepep_dispatch_args dispatch = DEEPEP_DISPATCH_INIT;
  deepep_combine_args combine = DEEPEP_COMBINE_INIT;
  deepep_group_t group = NULL;
  deepep_buffer_t buffer = NULL;
  const int worst = TOKENS * size;
  unsigned short *x, *received, *combined;
  int32_t *topk_idx, *received_idx, *per_rank, *per_expert, *matrix, *head, *source;
  float *weights, *received_weights;
  uint8_t *in_rank;
  deepep_event_t done = NULL; /* on a GPU the calls only launch: the program waits before it reads */
  uint64_t token = 0;
  int t, c, r, row, rows, wrong = 0;

  where.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  where.directory = directory;
  where.rank = rank;
  where.size = size;
  CHECK(deepep_group_create(&where, &group));
  options.engine = arrays_open(rank, &options.device);
  CHECK(deepep_config_default(0, size, &config));
  CHECK(deepep_config_size_hint(&config, HIDDEN * 2, size, 0, &options.num_nvl_bytes));
  CHECK(deepep_config_size_hint(&config, HIDDEN * 2, size, 1, &options.num_rdma_bytes)); /* 0 on one node */
  CHECK(deepep_buffer_create(group, &options, &buffer));
  CHECK(deepep_event_create(buffer, &done));

  x = array_new(TOKENS * HIDDEN * sizeof *x);
  received = array_new((size_t)worst * HIDDEN * sizeof *received);
  combined = array_new(TOKENS * HIDDEN * sizeof *combined);
  topk_idx = array_new(TOKENS * TOPK * sizeof *topk_idx);
  received_idx = array_new((size_t)worst * TOPK * sizeof *received_idx);
  weights = array_new(TOKENS * TOPK * sizeof *weights);
  received_weights = array_new((size_t)worst * TOPK * sizeof *received_weights);
  per_rank = array_new((size_t)size * sizeof *per_rank);
  per_expert = array_new(EXPERTS * sizeof *per_expert);
  matrix = array_new((size_t)(size * size) * sizeof *matrix);
  head = array_new((size_t)(TOKENS * size) * sizeof *head);
  source = array_new((size_t)worst * sizeof *source);
  in_rank = array_new((size_t)(TOKENS * size));
  for (t = 0; t < TOKENS; t++) {
    for (c = 0; c < HIDDEN; c++) x[t * HIDDEN + c] = to_bf16((float)(rank * TOKENS + t));
    topk_idx[t * TOPK] = (t + rank) % EXPERTS;
    topk_idx[t * TOPK + 1] = t % 3 == 0 ? -1 : (t * 5) % EXPERTS; /* -1 selects nothing */
    weights[t * TOPK] = weights[t * TOPK + 1] = 0.5f;
  }
  layout.num_tokens = notify.num_tokens = dispatch.num_tokens = TOKENS;
  layout.num_topk = notify.num_topk = dispatch.num_topk = TOPK;
  layout.num_experts = notify.num_experts = dispatch.num_experts = EXPERTS;
  layout.index_type = dispatch.index_type = DEEPEP_INT32;
  layout.topk_idx = dispatch.topk_idx = topk_idx;
  layout.num_tokens_per_rank = per_rank;
  layout.num_tokens_per_expert = per_expert;
  layout.is_token_in_rank = in_rank;
  CHECK(deepep_get_layout(buffer, &layout, NULL));

  handle.rank_prefix_matrix = matrix;
  handle.send_head = head;
  handle.recv_src_idx = source;
  handle.num_recv_tokens = worst;
  notify.num_worst_tokens = dispatch.num_worst_tokens = worst;
  notify.hidden = dispatch.hidden = combine.hidden = HIDDEN;
  notify.num_tokens_per_rank = per_rank;
  notify.num_tokens_per_expert = per_expert;
  notify.is_token_in_rank = in_rank;
  notify.handle = dispatch.handle = &handle;
  CHECK(deepep_notify_counts(buffer, &notify, NULL, &token));
  dispatch.token = token;
  dispatch.x = x;
  dispatch.topk_weights = weights;
  dispatch.recv_x = received;
  dispatch.recv_topk_idx = received_idx;
  dispatch.recv_topk_weights = received_weights;
  CHECK(deepep_dispatch(buffer, &dispatch, NULL));
  CHECK(deepep_event_record(done, NULL));
  CHECK(deepep_event_wait(done, -1));

  rows = matrix[(size - 1) * size + rank];
  for (r = 0, row = 0; r < size; r++) {
    for (; row < matrix[r * size + rank]; row++) {
      for (c = 0; c < HIDDEN; c++) wrong += received[row * HIDDEN + c] != to_bf16((float)(r * TOKENS + source[row]));
    }
  }
  for (row = rows; row < worst; row++) wrong += received_idx[row * TOPK] != -1 || received_idx[row * TOPK + 1] != -1;

  combine.x = received;
  combine.handle = &handle;
  combine.combined_x = combined;
  CHECK(deepep_combine(buffer, &combine, NULL));
  CHECK(deepep_event_record(done, NULL));
  CHECK(deepep_event_wait(done, -1));
  for (t = 0; t < TOKENS; t++) {
    int copies = 0;
    for (r = 0; r < size; r++) copies += in_rank[t * size + r];
    for (c = 0; c < HIDDEN; c++) wrong += combined[t * HIDDEN + c] != to_bf16((float)(copies * (rank * TOKENS + t)));
  }
  printf("rank %d (%s): %d of at most %d rows, %d wrong values\n", rank, options.engine, rows, worst, wrong);
  CHECK(deepep_event_destroy(done));
  CHECK(deepep_buffer_destroy(buffer));
  CHECK(deepep_group_destroy(group));
  return wrong == 0 ? 0 : 1;
}

int main(int argc, char **argv) { return run_ranks(argc, argv, 4, one_rank); }
