/* The C API as one process sees it: wrong arguments, life cycle, two-step dispatch with itself, fork, errors of this
 * thread. */
#include "deepep.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int passed, failed;
static void expect(int holds, const char *what, int line) {
  if (holds) {
    passed++;
  } else {
    failed++;
    printf("FAIL line %d: %s (last error: %s)\n", line, what, deepep_last_error());
  }
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)
#define SAYS(part) (strstr(deepep_last_error(), part) != NULL)

static void test_status(void) {
  EXPECT(deepep_version() == DEEPEP_VERSION_MAJOR * 10000 + DEEPEP_VERSION_MINOR * 100 + DEEPEP_VERSION_PATCH);
  EXPECT(strcmp(deepep_status_name(DEEPEP_ERROR_TIMEOUT), "DEEPEP_ERROR_TIMEOUT") == 0);
  EXPECT(strcmp(deepep_status_name(99), "unknown") == 0 && strcmp(deepep_status_text(-1), "unknown") == 0);
}

static void test_arguments(void) {
  deepep_group_options options = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_group_t group = NULL;
  deepep_config config = DEEPEP_CONFIG_INIT;
  uint64_t bytes = 0;
  EXPECT(deepep_group_create(NULL, &group) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("options"));
  EXPECT(deepep_group_create(&options, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("group"));
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("size"));
  options.size = 2;
  options.rank = 2;
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("rank"));
  options.rank = 0;
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("allgather"));
  options.bootstrap = 7;
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("bootstrap"));
  options.struct_size = 1;
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("struct_size"));
  {
    deepep_call call = DEEPEP_CALL_INIT;
    call.config = &config;
    call.struct_size = offsetof(deepep_call, config) + sizeof(void *) / 2; /* half a pointer */
    EXPECT(deepep_barrier(NULL, &call) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("struct_size"));
  }
  EXPECT(deepep_buffer_create((deepep_group_t)(uintptr_t)12345, NULL, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT);
  EXPECT(deepep_buffer_check((deepep_buffer_t)(uintptr_t)12345) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("buffer"));
  EXPECT(deepep_group_destroy(NULL) == DEEPEP_OK && deepep_buffer_destroy(NULL) == DEEPEP_OK &&
         deepep_event_destroy(NULL) == DEEPEP_OK);
  config.num_sms = 3;
  EXPECT(deepep_config_check(&config) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("num_sms"));
  config = (deepep_config)DEEPEP_CONFIG_INIT;
  EXPECT(deepep_config_check(&config) == DEEPEP_OK && config.rdma_recv_chunk == 258);
  EXPECT(deepep_config_default(0, 5, &config) == DEEPEP_OK &&
         deepep_config_default(2, 5, &config) == DEEPEP_ERROR_INVALID_ARGUMENT);
  EXPECT(deepep_low_latency_size_hint(128, 7168, 4, 256, &bytes) == DEEPEP_OK && bytes > 0);
  EXPECT(deepep_low_latency_size_hint(128, 7168, 3, 256, &bytes) == DEEPEP_ERROR_INVALID_ARGUMENT);
}

static int gather_alone(const void *send, void *recv, size_t bytes, void *user) {
  memcpy(recv, send, bytes);
  ++*(int *)user;
  return 0;
}
static int32_t gather_fails(const void *send, void *recv, size_t bytes, void *user) {
  (void)send;
  (void)recv;
  (void)bytes;
  (void)user;
  return 5;
}

static deepep_group_t alone(int *calls) {
  deepep_group_options options = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_group_t group = NULL;
  options.size = 1;
  options.allgather = gather_alone;
  options.user = calls;
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_OK && group != NULL);
  return group;
}

/* Plans a buffer of one rank and compares it with the one that is made. */
static void test_plan(void) {
  deepep_buffer_options buffer = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_plan_options options = DEEPEP_PLAN_OPTIONS_INIT;
  deepep_plan_info plan = DEEPEP_PLAN_INFO_INIT, small;
  int32_t order[15], calls = 0;
  deepep_group_t group = alone(&calls);
  deepep_buffer_t made = NULL;
  deepep_ll_dispatch_args sent = DEEPEP_LL_DISPATCH_INIT;
  deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT, old;
  buffer.engine = "cpu";
  buffer.timeout_ms = 4321;
  options.num_tokens = 32, options.num_max_tokens = 8, options.hidden = 256, options.num_topk = 2;
  options.num_experts = 16;
  options.buffer = &buffer;
  EXPECT(deepep_plan(&options, &plan, NULL) == DEEPEP_OK && strcmp(plan.library, "libdeepep_cpu.so") == 0);
  EXPECT(plan.nvl_hint == plan.num_nvl_bytes && plan.low_latency_hint == plan.num_rdma_bytes && plan.reason[0] == 0);
  buffer.num_nvl_bytes = plan.num_nvl_bytes, buffer.num_rdma_bytes = plan.num_rdma_bytes, buffer.low_latency_mode = 1;
  EXPECT(deepep_buffer_create(group, &buffer, &made) == DEEPEP_OK);
  EXPECT(deepep_buffer_info_get(made, &info) == DEEPEP_OK);
  memset(&old, 0, sizeof old);
  old.struct_size = offsetof(deepep_buffer_info, control_bytes); /* of a program that was built with version 0.1 */
  EXPECT(deepep_buffer_info_get(made, &old) == DEEPEP_OK && old.size == 1 && old.total_bytes == info.total_bytes &&
         old.control_bytes == 0);
  sent.struct_size = offsetof(deepep_ll_dispatch_args, x_scales); /* likewise */
  EXPECT(deepep_low_latency_dispatch(made, &sent, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("num_max"));
  sent.struct_size--;
  EXPECT(deepep_low_latency_dispatch(made, &sent, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("struct_size"));
  sent.struct_size = sizeof sent, sent.num_max_tokens = 4, sent.hidden = 128, sent.num_topk = 1, sent.num_experts = 4;
  sent.fp4 = 3;
  EXPECT(deepep_low_latency_dispatch(made, &sent, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("fp4"));
  EXPECT(info.total_bytes == plan.total_bytes && info.control_bytes == plan.control_bytes && plan.control_bytes > 0 &&
         info.wire_bytes == plan.wire_bytes && info.timeout_ms == 4321 && plan.timeout_ms == 4321 &&
         info.first_timeout_ms == plan.first_timeout_ms && info.num_qps == 0);
  EXPECT(deepep_buffer_destroy(made) == DEEPEP_OK && deepep_group_destroy(group) == DEEPEP_OK);

  options.size = 16, options.rank = 9, options.num_nics = 2;
  EXPECT(deepep_plan(&options, &plan, order) == DEEPEP_OK && plan.num_rdma_ranks == 2 && plan.rdma_rank == 1);
  EXPECT(plan.num_qp_peers == 8 && plan.num_qps_per_peer == 24 && plan.num_qps == 24 * 8 && order[0] >= 0 &&
         order[0] < 8);
  memset(&small, 0, sizeof small);
  small.struct_size = offsetof(deepep_plan_info, num_local_experts);
  EXPECT(deepep_plan(&options, &small, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("struct_size"));
  EXPECT(deepep_plan(&options, NULL, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("plan"));
  options.num_experts = 17;
  EXPECT(deepep_plan(&options, &plan, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("num_experts"));
}

/* The sizes of a V2 buffer, and the plan of one. Structs of version 0.1 have no word of it. */
static void test_elastic_sizes(void) {
  deepep_elastic_options elastic = DEEPEP_ELASTIC_OPTIONS_INIT;
  deepep_elastic_info info = DEEPEP_ELASTIC_INFO_INIT;
  deepep_buffer_options buffer = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_plan_options options = DEEPEP_PLAN_OPTIONS_INIT;
  deepep_plan_info plan = DEEPEP_PLAN_INFO_INIT, old;
  elastic.num_ranks = 4, elastic.num_max_tokens = 4096, elastic.hidden = 7168, elastic.num_topk = 8;
  EXPECT(deepep_elastic_sizes(&elastic, &info) == DEEPEP_OK && info.num_bytes == 113 * (uint64_t)DEEPEP_ELASTIC_UNIT);
  EXPECT(info.num_nvl_bytes + info.row_segment_bytes == info.num_bytes + (12 << 20) && info.num_rdma_bytes == 0);
  EXPECT(info.num_allocated_qps == 17 && info.num_sms == 20 && info.num_qps == 9);
  elastic.num_nvl_peers = 2, elastic.num_sms = 4;
  EXPECT(deepep_elastic_sizes(&elastic, &info) == DEEPEP_OK && info.num_rdma_bytes > 0 && info.num_qps == 65);
  elastic.num_bytes = 5;
  EXPECT(deepep_elastic_sizes(&elastic, &info) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("num_bytes"));
  EXPECT(deepep_elastic_sizes(NULL, &info) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("options"));
  EXPECT(deepep_elastic_sizes(&elastic, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("info"));
  elastic.num_bytes = 0, elastic.num_nvl_peers = 0;
  EXPECT(deepep_elastic_sizes(&elastic, &info) == DEEPEP_OK);
  buffer.engine = "cpu", options.size = 4, options.buffer = &buffer, options.elastic = &elastic;
  EXPECT(deepep_plan(&options, &plan, NULL) == DEEPEP_OK && plan.elastic_bytes == info.num_bytes &&
         plan.num_nvl_bytes == info.num_nvl_bytes && plan.row_segment_bytes == 0 && plan.elastic_sms == 20);
  memset(&old, 0, sizeof old);
  old.struct_size = offsetof(deepep_plan_info, elastic_bytes);
  options.struct_size = offsetof(deepep_plan_options, elastic);
  EXPECT(deepep_plan(&options, &old, NULL) == DEEPEP_OK && old.elastic_bytes == 0 && old.num_nvl_bytes == 0);
  buffer.num_nvl_bytes = 4096, options.struct_size = sizeof options;
  EXPECT(deepep_plan(&options, &plan, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("elastic"));
}

enum { T = 6, H = 32, K = 2, E = 4 };

static void run_dispatch(deepep_buffer_t buffer) {
  unsigned short x[T * H], received[T * H], combined[T * H];
  int64_t topk_idx[T * K];
  float weights[T * K], received_weights[T * K];
  int64_t received_idx[T * K];
  int32_t per_rank[1], per_expert[E], local[E], matrix[1], head[T], source[T], rows = 0;
  uint8_t in_rank[T];
  uint64_t token = 0;
  int i;
  deepep_layout layout = DEEPEP_LAYOUT_INIT;
  deepep_handle handle = DEEPEP_HANDLE_INIT;
  deepep_notify notify = DEEPEP_NOTIFY_INIT;
  deepep_dispatch_args dispatch = DEEPEP_DISPATCH_INIT;
  deepep_combine_args combine = DEEPEP_COMBINE_INIT;
  for (i = 0; i < T * H; i++) x[i] = (unsigned short)(0x3f80 + i % 64);
  for (i = 0; i < T * K; i++) {
    topk_idx[i] = i == 4 || i == 5 ? -1 : i % E;
    weights[i] = 0.5f;
  } /* token 2 goes nowhere */
  layout.num_tokens = notify.num_tokens = dispatch.num_tokens = T;
  layout.num_topk = notify.num_topk = dispatch.num_topk = K;
  layout.num_experts = notify.num_experts = dispatch.num_experts = E;
  notify.hidden = dispatch.hidden = combine.hidden = H;
  layout.topk_idx = dispatch.topk_idx = topk_idx;
  layout.num_tokens_per_rank = per_rank;
  layout.num_tokens_per_expert = per_expert;
  layout.is_token_in_rank = in_rank;
  EXPECT(deepep_get_layout(buffer, &layout, NULL) == DEEPEP_OK && per_rank[0] == T - 1 && in_rank[2] == 0);
  handle.rank_prefix_matrix = matrix;
  handle.send_head = head;
  handle.recv_src_idx = source;
  notify.num_tokens_per_rank = per_rank;
  notify.num_tokens_per_expert = per_expert;
  notify.is_token_in_rank = in_rank;
  notify.handle = &handle;
  EXPECT(deepep_notify_counts(buffer, &notify, NULL, &token) == DEEPEP_OK && handle.num_tokens == T &&
         handle.num_ranks == 1);
  EXPECT(deepep_wait_counts(buffer, token, -1, &rows, local) == DEEPEP_OK && rows == T - 1);
  EXPECT(deepep_wait_counts(buffer, token + 1, 0, &rows, local) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("token"));
  EXPECT(deepep_cancel_dispatch(buffer, token + 1, DEEPEP_ERROR_OUT_OF_MEMORY, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT &&
         SAYS("token"));
  EXPECT(deepep_cancel_dispatch(buffer, token, DEEPEP_ERROR_OUT_OF_MEMORY, NULL) == DEEPEP_OK);
  EXPECT(deepep_cancel_dispatch(buffer, token, 0, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("token"));
  EXPECT(deepep_buffer_check(buffer) == DEEPEP_OK);
  EXPECT(deepep_notify_counts(buffer, &notify, NULL, &token) == DEEPEP_OK);
  EXPECT(deepep_wait_counts(buffer, token, -1, &rows, local) == DEEPEP_OK && rows == T - 1);
  handle.num_recv_tokens = T - 1;
  dispatch.token = token;
  dispatch.x = x;
  dispatch.topk_weights = weights;
  dispatch.handle = &handle;
  dispatch.recv_x = received;
  dispatch.recv_topk_idx = received_idx;
  dispatch.recv_topk_weights = received_weights;
  EXPECT(deepep_dispatch(buffer, &dispatch, NULL) == DEEPEP_OK);
  EXPECT(memcmp(received, x, 2 * H * 2) == 0 && memcmp(received + 2 * H, x + 3 * H, 3 * H * 2) == 0 && source[2] == 3);
  combine.x = received;
  combine.handle = &handle;
  combine.combined_x = combined;
  EXPECT(deepep_combine(buffer, &combine, NULL) == DEEPEP_OK);
  EXPECT(memcmp(combined, x, 2 * H * 2) == 0 && combined[2 * H] == 0 &&
         memcmp(combined + 3 * H, x + 3 * H, 3 * H * 2) == 0);
  handle.magic = 1;
  EXPECT(deepep_combine(buffer, &combine, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("handle"));
}

/* A row for each choice, in the order of experts, and back; then the same rows through the handle. */
static void run_expanded(deepep_buffer_t buffer) {
  enum { ALIGN = 4, ROOM = T * K + E * ALIGN };
  unsigned short x[T * H], combined[T * H];
  static unsigned short received[ROOM * H], again[ROOM * H];
  int64_t topk_idx[T * K], copy[T * K] = {0};
  float weights[T * K], received_weights[ROOM], returned[T * K];
  int32_t matrix[1], head[T], slot[T * K], by_rank[1], by_expert[E], num[E], meta[T * (K + 2)], local[E],
      stats[E] = {0};
  int32_t rows = 0, end = 0, i, k;
  uint64_t token = 0;
  deepep_handle handle = DEEPEP_HANDLE_INIT, other;
  deepep_notify notify = DEEPEP_NOTIFY_INIT;
  deepep_dispatch_args dispatch = DEEPEP_DISPATCH_INIT;
  deepep_combine_args combine = DEEPEP_COMBINE_INIT;
  for (i = 0; i < T * H; i++) x[i] = (unsigned short)(0x3f80 + i / H); /* less than two, so that twice it is exact */
  for (i = 0; i < T * K; i++) {
    topk_idx[i] = i == 4 || i == 5 ? -7 : i % E; /* token 2 goes nowhere */
    weights[i] = (float)i;
  }
  handle.rank_prefix_matrix = matrix;
  handle.send_head = head;
  handle.dst_slot = slot;
  handle.psum_recv_tokens_per_rank = by_rank;
  handle.psum_recv_tokens_per_expert = by_expert;
  handle.num_recv_tokens_per_expert = num;
  handle.recv_src_metadata = meta;
  notify.num_tokens = notify.num_max_tokens = dispatch.num_tokens = T;
  notify.num_topk = K;
  notify.num_experts = E;
  notify.hidden = dispatch.hidden = combine.hidden = H;
  notify.expert_alignment = ALIGN;
  notify.routing = DEEPEP_ROUTING_EXPANDED;
  notify.topk_idx = topk_idx;
  notify.cumulative_recv_stats = stats;
  notify.handle = &handle;
  notify.num_tokens_per_rank = by_rank;
  EXPECT(deepep_notify_counts(buffer, &notify, NULL, &token) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("topk_idx"));
  notify.num_tokens_per_rank = NULL;
  notify.num_max_tokens = T - 1;
  EXPECT(deepep_notify_counts(buffer, &notify, NULL, &token) == DEEPEP_ERROR_INVALID_ARGUMENT &&
         SAYS("num_max_tokens"));
  notify.num_max_tokens = T;
  notify.topk_idx_copy = topk_idx + 1;
  EXPECT(deepep_notify_counts(buffer, &notify, NULL, &token) == DEEPEP_ERROR_INVALID_ARGUMENT &&
         SAYS("topk_idx_copy") && SAYS("overlap"));
  notify.topk_idx_copy = copy;
  EXPECT(deepep_notify_counts(buffer, &notify, NULL, &token) == DEEPEP_OK);
  EXPECT(deepep_wait_counts(buffer, token, -1, &rows, local) == DEEPEP_OK && rows == T - 1 && local[0] == ALIGN);
  EXPECT(memcmp(copy, topk_idx, sizeof copy) == 0);
  EXPECT(handle.routing == DEEPEP_ROUTING_EXPANDED && handle.num_topk == K && handle.topk_idx == topk_idx);
  EXPECT(by_rank[0] == T - 1 && num[0] == 2 && num[3] == 3 && by_expert[1] == ALIGN + 2 && stats[2] == 3);
  handle.num_recv_tokens = rows;
  for (i = 0; i < E; i++) handle.num_expanded_tokens += local[i];
  dispatch.token = token;
  dispatch.x = x;
  dispatch.topk_weights = weights;
  dispatch.handle = &handle;
  dispatch.recv_x = received;
  dispatch.recv_topk_weights = received_weights;
  dispatch.do_zero_padding = 1;
  EXPECT(deepep_dispatch(buffer, &dispatch, NULL) == DEEPEP_OK);
  for (i = 0; i < T; i++)
    for (k = 0; k < K; k++) {
      int32_t at = slot[i * K + k];
      EXPECT(i == 2 ? at == -1 : at / ALIGN == topk_idx[i * K + k]); /* each expert has four rows */
      EXPECT(at < 0 ||
             (memcmp(received + at * H, x + i * H, 2 * H) == 0 && received_weights[at] == weights[i * K + k]));
    }
  for (i = 0; i < E; i++)
    for (end = by_expert[i]; end % ALIGN; end++) EXPECT(received[end * H + 3] == 0 && received_weights[end] == 0);
  EXPECT(meta[2 * (K + 2)] == 3 && meta[2 * (K + 2) + 1] == 1 && meta[2 * (K + 2) + 2] == slot[3 * K]);
  combine.x = received;
  combine.num_x_rows = handle.num_expanded_tokens;
  combine.num_topk = K;
  combine.topk_weights = received_weights;
  combine.handle = &handle;
  combine.combined_x = combined;
  combine.combined_topk_weights = returned;
  EXPECT(deepep_combine(buffer, &combine, NULL) == DEEPEP_OK);
  for (i = 0; i < T * H; i++) EXPECT(combined[i] == (i / H == 2 ? 0 : x[i] + 0x80)); /* twice the row */
  for (i = 0; i < T * K; i++) EXPECT(returned[i] == (i / K == 2 ? 0 : weights[i]));
  dispatch.cached = 1;
  dispatch.token = 0;
  dispatch.recv_x = again;
  EXPECT(deepep_dispatch(buffer, &dispatch, NULL) == DEEPEP_OK);
  EXPECT(memcmp(again, received, (size_t)handle.num_expanded_tokens * H * 2) == 0);
  meta[2] = combine.num_x_rows; /* outside x */
  EXPECT(deepep_combine(buffer, &combine, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("recv_src_metadata"));
  EXPECT(deepep_buffer_check(buffer) == DEEPEP_OK);
  dispatch.cached = 0; /* the same tokens, both steps at once, into room for any routing */
  memset(again, 0, sizeof again);
  memset(slot, 0, sizeof slot);
  EXPECT(deepep_dispatch_at_once(buffer, &notify, &dispatch, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT &&
         SAYS("num_worst_tokens"));
  notify.num_worst_tokens = dispatch.num_worst_tokens = handle.num_recv_tokens = T;
  notify.num_worst_expanded = ROOM;
  other = handle;
  dispatch.handle = &other;
  EXPECT(deepep_dispatch_at_once(buffer, &notify, &dispatch, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT &&
         SAYS("args.handle"));
  dispatch.handle = NULL;
  EXPECT(deepep_dispatch_at_once(buffer, &notify, &dispatch, NULL) == DEEPEP_OK);
  for (i = 0; i < T * K; i++)
    EXPECT(i / K == 2 ? slot[i] == -1 : memcmp(again + slot[i] * H, x + i / K * H, 2 * H) == 0);
  EXPECT(handle.exchange != other.exchange && handle.num_tokens == T && stats[2] == 6);
}

/* Copies of experts: two tensors come to the slots, and what was added to the copies comes back. */
static void run_balance(deepep_buffer_t buffer) {
  enum { SLOTS = 3, LOCAL = 2, WORDS = 8 };
  const int32_t mapping[SLOTS] = {1, -1, 1};
  float experts[2][LOCAL * WORDS], copies[2][SLOTS * WORDS];
  static _Alignas(16) char workspace[1 << 16];
  uint64_t bytes = 0, more = 0;
  int32_t i, n;
  deepep_balance_args args = DEEPEP_BALANCE_INIT;
  for (n = 0; n < 2; n++) {
    for (i = 0; i < LOCAL * WORDS; i++) experts[n][i] = (float)(100 * n + i);
    for (i = 0; i < SLOTS * WORDS; i++) copies[n][i] = -1;
    args.experts[n] = experts[n];
    args.copies[n] = copies[n];
    args.expert_bytes[n] = sizeof(float) * WORDS;
  }
  args.num_tensors = 2;
  args.num_slots = SLOTS;
  args.mapping = mapping;
  args.workspace = workspace;
  args.workspace_bytes = sizeof workspace;
  EXPECT(deepep_prefetch_weights(buffer, &args, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("num_local_experts"));
  args.num_local_experts = LOCAL;
  args.expert_bytes[1]--;
  EXPECT(deepep_prefetch_weights(buffer, &args, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("expert_bytes[1]"));
  args.expert_bytes[1]++;
  EXPECT(deepep_balance_workspace(buffer, &args, 0, &bytes) == DEEPEP_OK && bytes > 0 && bytes < sizeof workspace);
  EXPECT(deepep_balance_workspace(buffer, &args, 1, &more) == DEEPEP_OK && more > bytes && more < sizeof workspace);
  args.workspace_bytes = bytes - 1;
  EXPECT(deepep_prefetch_weights(buffer, &args, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("workspace_bytes"));
  args.workspace_bytes = sizeof workspace;
  args.copies[1] = NULL;
  EXPECT(deepep_prefetch_weights(buffer, &args, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("copies[1]"));
  args.copies[1] = copies[1];
  EXPECT(deepep_prefetch_weights(buffer, &args, NULL) == DEEPEP_OK);
  for (n = 0; n < 2; n++)
    for (i = 0; i < SLOTS * WORDS; i++) EXPECT(copies[n][i] == (i / WORDS == 1 ? -1 : experts[n][WORDS + i % WORDS]));
  EXPECT(deepep_reduce_grads(buffer, &args, NULL) == DEEPEP_OK);
  for (n = 0; n < 2; n++)
    for (i = 0; i < LOCAL * WORDS; i++) EXPECT(experts[n][i] == (float)((i < WORDS ? 1 : 3) * (100 * n + i)));
  EXPECT(deepep_balance_workspace(buffer, &args, 0, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("bytes"));
}

/* What a program types first, then with a shape of its own. */
static void test_startup(deepep_buffer_t buffer) {
  deepep_warmup_options warmup = DEEPEP_WARMUP_OPTIONS_INIT;
  deepep_startup_report report = DEEPEP_STARTUP_REPORT_INIT;
  deepep_op_stats stats = DEEPEP_OP_STATS_INIT;
  EXPECT(deepep_buffer_startup_report(buffer, &report) == DEEPEP_OK && report.preinitialized == 1 &&
         report.num_warmups == 0 && report.bytes[DEEPEP_START_CONSTRUCTION] > 0);
  EXPECT(deepep_buffer_warmup(buffer, &warmup) == DEEPEP_OK);
  stats.op = DEEPEP_OP_COMBINE;
  EXPECT(deepep_stats(buffer, &stats, NULL, NULL) == DEEPEP_OK && stats.calls == 1);
  EXPECT(deepep_buffer_startup_report(buffer, &report) == DEEPEP_OK && report.num_warmups == 1 &&
         report.shape_from == DEEPEP_SHAPE_OPTIONS && report.num_tokens == 6 && report.hidden == 32 &&
         report.num_topk == 2 && report.num_experts == 4 && report.ll_shape_from == DEEPEP_SHAPE_NONE);
  EXPECT(report.launch_ns[DEEPEP_START_WARMUP] > 0 && report.first_ns[DEEPEP_OP_COMBINE] == 0);
  warmup.num_tokens = 9;
  EXPECT(deepep_buffer_warmup(buffer, &warmup) == DEEPEP_OK);
  EXPECT(deepep_buffer_startup_report(buffer, &report) == DEEPEP_OK && report.num_warmups == 2 &&
         report.num_tokens == 9 && report.hidden == 32);
  warmup.num_experts = -1;
  EXPECT(deepep_buffer_warmup(buffer, &warmup) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("0 or more"));
  EXPECT(deepep_buffer_startup_report(buffer, NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("report"));
}

static void test_release(deepep_buffer_t buffer, void *region) {
  void *address = NULL;
  uint64_t bytes = 0;
  EXPECT(deepep_buffer_restore(buffer, -1) == DEEPEP_OK); /* there is nothing to do */
  for (int round = 0; round < 3; round++) {
    *(volatile char *)region = 1;
    EXPECT(deepep_buffer_release(buffer, -1) == DEEPEP_OK && deepep_buffer_release(buffer, 0) == DEEPEP_OK);
    EXPECT(deepep_barrier(buffer, NULL) == DEEPEP_ERROR_INVALID_STATE && SAYS("released"));
    EXPECT(deepep_buffer_check(buffer) == DEEPEP_ERROR_INVALID_STATE && SAYS("restore()"));
    EXPECT(deepep_buffer_region(buffer, 0, &address, &bytes) == DEEPEP_ERROR_INVALID_STATE);
    *(volatile char *)region = 2; /* the address stays */
    EXPECT(deepep_buffer_restore(buffer, -1) == DEEPEP_OK && deepep_buffer_check(buffer) == DEEPEP_OK);
    EXPECT(deepep_buffer_region(buffer, 0, &address, &bytes) == DEEPEP_OK && address == region);
    EXPECT(*(volatile char *)region == 0);
    run_dispatch(buffer);
    run_expanded(buffer);
  }
}

static void test_life(void) {
  int calls = 0;
  deepep_group_t group = alone(&calls);
  deepep_buffer_options options = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT;
  deepep_op_stats stats = DEEPEP_OP_STATS_INIT;
  deepep_startup_report report = DEEPEP_STARTUP_REPORT_INIT;
  deepep_buffer_t buffer = NULL;
  deepep_event_t event = NULL;
  deepep_call call = DEEPEP_CALL_INIT;
  void *address = NULL;
  uint64_t bytes = 0, sent[1], waited[1];
  EXPECT(calls == 1);
  options.engine = "tpu";
  EXPECT(deepep_buffer_create(group, &options, &buffer) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("engine"));
  options.engine = "cpu";
  options.num_nvl_bytes = 1 << 20;
  options.preinitialize = 1;
  options.num_tokens = 6;
  options.hidden = 32;
  options.num_topk = 2;
  options.num_experts = 4;
  EXPECT(deepep_buffer_create(group, &options, &buffer) == DEEPEP_OK);
  EXPECT(deepep_buffer_wait_ready(buffer, -1) == DEEPEP_OK && deepep_buffer_check(buffer) == DEEPEP_OK);
  EXPECT(info.rdma_team_size == 0);
  EXPECT(deepep_buffer_info_get(buffer, &info) == DEEPEP_OK && info.rdma_team_start == 0 &&
         info.rdma_team_stride == 1 && info.rdma_team_size == 1);
  EXPECT(deepep_buffer_info_get(buffer, &info) == DEEPEP_OK && info.size == 1 && info.host_stream == 1 &&
         strcmp(info.engine, "cpu") == 0);
  EXPECT(deepep_buffer_region(buffer, 0, &address, &bytes) == DEEPEP_OK && bytes == 1 << 20 && address != NULL);
  memset(address, 0xff, bytes); /* the caller may */
  test_startup(buffer);
  run_dispatch(buffer);
  run_expanded(buffer);
  test_release(buffer, address);
  run_balance(buffer);
  EXPECT(deepep_buffer_startup_report(buffer, &report) == DEEPEP_OK && report.first_ns[DEEPEP_OP_DISPATCH] > 0);
  EXPECT(deepep_event_create(buffer, &event) == DEEPEP_OK && deepep_event_wait(event, 0) == DEEPEP_OK);
  call.is_async = 1;
  call.event = event;
  EXPECT(deepep_barrier(buffer, &call) == DEEPEP_OK && deepep_event_wait(event, -1) == DEEPEP_OK);
  EXPECT(deepep_query_mask(buffer, (int32_t *)sent, NULL) == DEEPEP_ERROR_INVALID_STATE && SAYS("shrink"));
  stats.op = DEEPEP_OP_DISPATCH;
  EXPECT(deepep_stats(buffer, &stats, sent, waited) == DEEPEP_OK && stats.calls == 26 && sent[0] > 0 &&
         stats.p99_us >= stats.p50_us);
  EXPECT(deepep_event_destroy(event) == DEEPEP_OK && deepep_event_wait(event, 0) == DEEPEP_ERROR_INVALID_ARGUMENT);
  EXPECT(deepep_group_destroy(group) == DEEPEP_OK); /* buffers of the group live on */
  EXPECT(deepep_barrier(buffer, NULL) == DEEPEP_OK);
  EXPECT(deepep_buffer_destroy(buffer) == DEEPEP_OK);
  EXPECT(deepep_buffer_destroy(buffer) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("buffer"));
}

static void test_callback_failure(void) {
  deepep_group_options options = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_group_t group = NULL;
  options.size = 2;
  options.allgather = gather_fails;
  EXPECT(deepep_group_create(&options, &group) == DEEPEP_ERROR_SYSTEM && SAYS("5") && group == NULL);
}

static void test_fork(void) {
  int status = 0;
  pid_t child = fork();
  if (child == 0) {
    deepep_config config = DEEPEP_CONFIG_INIT;
    _exit(deepep_config_check(&config) == DEEPEP_ERROR_FORK && SAYS("spawn") ? 0 : 1);
  }
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void *other_thread(void *unused) {
  (void)unused;
  return (void *)(uintptr_t)(deepep_last_error()[0] == 0);
}
static void test_thread_errors(void) {
  pthread_t thread;
  void *empty = NULL;
  EXPECT(deepep_config_check(NULL) == DEEPEP_ERROR_INVALID_ARGUMENT && SAYS("config"));
  pthread_create(&thread, NULL, other_thread, NULL);
  pthread_join(thread, &empty);
  EXPECT(empty != NULL && SAYS("config"));
}

static int lines;
static void count_line(int32_t level, const char *message, void *user) {
  (void)level;
  (void)message;
  __atomic_add_fetch((int *)user, 1, __ATOMIC_RELAXED);
}
static void test_log(void) {
  EXPECT(deepep_set_log_callback(count_line, &lines) == DEEPEP_OK);
  test_life();
  EXPECT(deepep_set_log_callback(NULL, NULL) == DEEPEP_OK);
}

int main(void) {
  test_status();
  test_arguments();
  test_life();
  test_plan();
  test_elastic_sizes();
  test_callback_failure();
  test_fork();
  test_thread_errors();
  test_log();
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
