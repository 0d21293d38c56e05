/* fuzz.c - damaged structs, handles and events on live buffers: every function of deepep.h that takes them. Whatever a
 * call gets is wrong in a few places: numbers, struct_size, addresses that are NULL or odd, handles that are stale or
 * of another kind. Addresses lie close together in an arena that is large enough for every shape that is given: inputs
 * and outputs overlap often, in some batches a thread writes there meanwhile, and a signal is the library's doing.
 * Between the calls the buffer is released, restored and regrouped. A batch is a process: its parent sees how it ended.
 *
 *   fuzz [SECONDS] [SEED]   prints each failed batch with the seed that repeats it, then "1 passed, 0 failed" */
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "deepep.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
enum { kArenaBytes = 64 << 20, kPlaces = 4096, kCalls = 2500, kEvents = 8, kLimitSeconds = 60 };

/* ---- Random values ----------------------------------------------------------------------------------------------- */

static _Thread_local uint64_t state;
static uint64_t draw(void) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}
static uint32_t below(uint32_t n) { return (uint32_t)(draw() % n); }

static int32_t wrong32(int32_t right) {
  static const int32_t others[] = {0,   -1,        1,         2,       7,     9,     127,        129,
                                   255, INT32_MAX, INT32_MIN, 1 << 24, 65536, 65537, 0x7fffff00, 1 << 20};
  return below(4) ? right : others[below(COUNT(others))];
}
static int64_t wrong64(int64_t right) {
  static const int64_t others[] = {0, -1, 1, 8, 24, INT64_MAX, INT64_MIN, (int64_t)1 << 32, ((int64_t)1 << 32) + 256};
  return below(4) ? right : others[below(COUNT(others))];
}
static uint32_t wrong_size(size_t right) {
  switch (below(12)) {
    case 0: return below((uint32_t)right + 1);
    case 1: return (uint32_t)right + 4 * below(16);
    case 2: return 0xffffffffu;
    default: return (uint32_t)right;
  }
}

static char *arena;
static size_t spread; /* of this batch: units of 16 bytes that addresses lie in */
static void *address(void) {
  switch (below(12)) {
    case 0: return NULL;
    case 1: return arena + 16 * below(64) + 1 + below(15);
    case 2: return arena + 4 * (size_t)below(kPlaces);
    default: return arena + 16 * (size_t)below((uint32_t)spread);
  }
}
static void *place(void) { /* as address(), never NULL */
  void *at = address();
  return at ? at : arena;
}
/* Small shapes, which the arena holds, or wrong ones. */
static int32_t tokens(void) {
  int32_t t = wrong32((int32_t)below(9));
  return t > 4096 && t <= 1 << 24 ? 5 : t;
}
/* Rows of a tensor, wrong ones too: as many as the arena holds. */
static int32_t claim(void) { return (int32_t)below(4096) - (int32_t)below(8) / 7; }
static int32_t hidden(void) {
  int32_t h = wrong32(256);
  return h > 4096 && h <= 1 << 20 ? 512 : h;
}

/* ---- What the parent sees ---------------------------------------------------------------------------------------- */

static struct progress {
  uint64_t call, function, calls, accepted, silent, internal;
} *progress;

static void note(deepep_status_t status) {
  progress->calls++;
  progress->accepted += status == DEEPEP_OK;
  if (status != DEEPEP_OK && status != DEEPEP_PENDING && deepep_last_error()[0] == 0) progress->silent++;
  if (status == DEEPEP_ERROR_INTERNAL) {
    progress->internal++;
    fprintf(stderr, "INTERNAL: %.500s\n", deepep_last_error());
  }
}

/* ---- A group of one rank ----------------------------------------------------------------------------------------- */

static deepep_group_t group;
static deepep_buffer_t buffer;
static deepep_event_t events[kEvents];
static uint64_t token;

static int32_t gather(const void *send, void *recv, size_t bytes, void *user) {
  (void)user;
  memcpy(recv, send, bytes);
  return 0;
}
static void quiet(int32_t level, const char *message, void *user) {
  (void)level;
  (void)message;
  (void)user;
}
static void make(void) {
  deepep_group_options g = DEEPEP_GROUP_OPTIONS_INIT;
  g.size = 1;
  g.allgather = gather;
  deepep_buffer_options b = DEEPEP_BUFFER_OPTIONS_INIT;
  b.engine = "cpu";
  b.num_nvl_bytes = 1 << 20;
  b.num_rdma_bytes = 8 << 20;
  b.low_latency_mode = 1;
  b.enable_shrink = (int32_t)below(2);
  b.timeout_ms = 300;
  deepep_set_log_callback(quiet, NULL);
  if (deepep_group_create(&g, &group) || deepep_buffer_create(group, &b, &buffer)) {
    fprintf(stderr, "%s\n", deepep_last_error());
    _exit(3);
  }
}
static void drop(void) {
  for (int i = 0; i < kEvents; i++) {
    note(deepep_event_destroy(events[i]));
    events[i] = NULL;
  }
  note(deepep_buffer_destroy(buffer));
  note(deepep_group_destroy(group));
}

/* ---- One call ---------------------------------------------------------------------------------------------------- */

static deepep_buffer_t some_buffer(void) {
  return below(12) ? buffer : below(2) ? NULL : (deepep_buffer_t)(uintptr_t)(below(2) ? below(64) : draw());
}
static deepep_event_t some_event(void) {
  return below(6) ? events[below(kEvents)] : (deepep_event_t)(uintptr_t)(below(2) ? below(99) : draw());
}
static void *some_stream(void) { return below(8) ? NULL : (void *)(uintptr_t)draw(); }

static deepep_config some_config(void) {
  return (deepep_config){wrong32(20), wrong32(6), wrong32(256), wrong32(6), wrong32(256)};
}
static deepep_call some_call(deepep_config *config) {
  deepep_call c = DEEPEP_CALL_INIT;
  c.struct_size = wrong_size(sizeof c);
  c.is_async = (int32_t)below(2);
  c.stream = some_stream();
  c.previous_event = below(4) ? NULL : some_event();
  c.event = below(3) ? NULL : some_event();
  *config = some_config();
  c.config = below(4) ? NULL : config;
  return c;
}
static deepep_handle some_handle(void) {
  deepep_handle h = DEEPEP_HANDLE_INIT;
  h.struct_size = wrong_size(sizeof h);
  if (below(10) == 0) h.magic = (uint32_t)draw();
  if (below(10) == 0) h.version = below(4);
  h.num_ranks = wrong32(1);
  h.num_tokens = tokens();
  h.num_recv_tokens = tokens();
  h.rank_prefix_matrix = address();
  h.send_head = address();
  h.recv_src_idx = address();
  h.exchange = below(2) ? 0 : draw();
  if (below(2)) return h;
  h.routing = wrong32((int32_t)below(3));
  h.num_topk = wrong32(2);
  h.num_experts = wrong32(8);
  h.index_type = wrong32(1);
  h.num_max_tokens = tokens();
  h.expert_alignment = wrong32(4);
  h.num_expanded_tokens = claim();
  h.topk_idx = address();
  h.dst_slot = address();
  h.psum_recv_tokens_per_rank = address();
  h.psum_recv_tokens_per_expert = address();
  h.num_recv_tokens_per_expert = address();
  h.recv_src_metadata = address();
  return h;
}

static void call_layout(deepep_call *call) {
  deepep_layout a = DEEPEP_LAYOUT_INIT;
  a.struct_size = wrong_size(sizeof a);
  a.num_tokens = tokens();
  a.num_topk = wrong32(2);
  a.num_experts = wrong32(8);
  a.index_type = wrong32(1);
  a.topk_idx = address();
  a.num_tokens_per_rank = address();
  a.num_tokens_per_rdma_rank = address();
  a.num_tokens_per_expert = address();
  a.is_token_in_rank = address();
  note(deepep_get_layout(some_buffer(), below(30) ? &a : NULL, call));
}
static void call_notify(deepep_call *call) {
  deepep_handle handle = some_handle();
  deepep_notify a = DEEPEP_NOTIFY_INIT;
  uint64_t given = 0;
  a.struct_size = wrong_size(sizeof a);
  a.num_tokens = tokens();
  a.num_topk = wrong32(2);
  a.num_experts = wrong32(8);
  a.expert_alignment = wrong32(1);
  a.num_worst_tokens = below(2) ? 0 : tokens();
  a.x_type = wrong32(2);
  a.num_scales = wrong32(0);
  a.hidden = hidden();
  a.num_tokens_per_rank = address();
  a.num_tokens_per_expert = address();
  a.is_token_in_rank = address();
  a.handle = below(10) ? &handle : NULL;
  a.topk_idx_copy = below(4) ? NULL : place();
  note(deepep_notify_counts(some_buffer(), below(30) ? &a : NULL, call, below(30) ? &given : NULL));
  if (given) token = given;
}
static void call_dispatch(deepep_call *call) {
  deepep_handle handle = some_handle();
  deepep_dispatch_args a = DEEPEP_DISPATCH_INIT;
  a.struct_size = wrong_size(sizeof a);
  a.cached = (int32_t)below(2);
  a.token = a.cached && below(8) ? 0 : below(3) ? token : draw();
  a.x_type = wrong32(2);
  a.num_scales = wrong32(0) & 0xff;
  a.hidden = hidden();
  a.num_tokens = handle.num_tokens;
  a.num_topk = a.cached && below(8) ? 0 : wrong32(2);
  a.num_experts = a.cached && below(8) ? 0 : wrong32(8);
  a.index_type = wrong32(1);
  a.num_worst_tokens = below(2) ? 0 : tokens();
  a.recv_segment = wrong32(-1);
  a.recv_segment_offset = draw() >> below(64);
  a.x = address();
  a.x_scales = address();
  a.scale_token_stride = below(4);
  a.scale_stride = below(4);
  a.topk_idx = a.num_topk ? address() : NULL;
  a.topk_weights = a.num_topk ? address() : NULL;
  a.handle = below(10) ? &handle : NULL;
  a.recv_x = address();
  a.recv_x_scales = address();
  a.recv_topk_idx = a.num_topk ? address() : NULL;
  a.recv_topk_weights = a.num_topk ? address() : NULL;
  note(deepep_dispatch(some_buffer(), below(30) ? &a : NULL, call));
}
static void call_combine(deepep_call *call) {
  deepep_handle handle = some_handle();
  deepep_combine_args a = DEEPEP_COMBINE_INIT;
  a.struct_size = wrong_size(sizeof a);
  a.num_topk = below(2) ? 0 : wrong32(2);
  a.hidden = wrong64(256);
  a.x_segment = wrong32(-1);
  a.x_segment_offset = draw() >> below(64);
  a.x = address();
  a.topk_weights = a.num_topk ? address() : NULL;
  a.bias[0] = below(2) ? NULL : address();
  a.bias[1] = below(2) ? NULL : address();
  a.handle = below(10) ? &handle : NULL;
  a.combined_x = address();
  a.combined_topk_weights = a.num_topk ? address() : NULL;
  note(deepep_combine(some_buffer(), below(30) ? &a : NULL, call));
}

/* ---- A round with a routing -------------------------------------------------------------------------------------- */

/* Notify, dispatch and combine of one exchange, right but for places that overlap; now and then something is wrong. */
static int rarely(void) { return below(24) == 0; }

static deepep_handle routed_handle(int32_t num_tokens, int32_t num_topk, int32_t num_experts) {
  deepep_handle h = DEEPEP_HANDLE_INIT;
  h.routing = 1 + (int32_t)below(2);
  h.num_tokens = num_tokens;
  h.num_topk = num_topk;
  h.num_experts = num_experts;
  h.index_type = (int32_t)below(2);
  h.num_max_tokens = num_tokens + (int32_t)below(4);
  h.expert_alignment = 1 << below(4);
  h.rank_prefix_matrix = place();
  h.send_head = place();
  h.topk_idx = place();
  h.dst_slot = place();
  h.psum_recv_tokens_per_rank = place();
  h.psum_recv_tokens_per_expert = place();
  h.num_recv_tokens_per_expert = place();
  h.recv_src_metadata = place();
  int8_t *entry = (int8_t *)(uintptr_t)h.topk_idx;
  size_t entry_bytes = h.index_type == DEEPEP_INT64 ? 8 : 4;
  for (int32_t i = 0; i < num_tokens * num_topk; i++, entry += entry_bytes) {
    int64_t expert = (int64_t)below((uint32_t)num_experts + 1) - 1;
    memcpy(entry, &expert, entry_bytes);
  }
  return h;
}

static deepep_notify routed_counts(deepep_handle *h, int64_t hidden_size, int32_t worst) {
  deepep_notify a = DEEPEP_NOTIFY_INIT;
  a.num_tokens = h->num_tokens;
  a.num_topk = h->num_topk;
  a.num_experts = h->num_experts;
  a.expert_alignment = h->expert_alignment;
  a.num_worst_tokens = worst;
  a.num_worst_expanded = worst && h->routing == 2 ? h->num_tokens * h->num_topk + h->num_experts * 8 : 0;
  a.hidden = hidden_size;
  a.routing = h->routing;
  a.index_type = h->index_type;
  a.num_max_tokens = rarely() ? tokens() : h->num_max_tokens;
  a.topk_idx = h->topk_idx;
  a.cumulative_recv_stats = below(2) ? place() : NULL;
  a.topk_idx_copy = below(2) ? place() : NULL;
  a.handle = h;
  return a;
}

static bool notify_routed(deepep_handle *h, deepep_call *call, int64_t hidden_size, int32_t worst) {
  deepep_notify a = routed_counts(h, hidden_size, worst);
  token = 0;
  deepep_status_t status = deepep_notify_counts(buffer, &a, call, &token);
  note(status);
  return status == DEEPEP_OK;
}

/* The rows of the outputs, as the counts say; within the arena. */
static bool learn_counts(deepep_handle *h, int32_t worst) {
  int32_t rows = worst, per_expert[64] = {0}, expanded_rows = 0;
  deepep_status_t status = DEEPEP_OK;
  for (int i = 0;
       !worst && i < 100 && (status = deepep_wait_counts(buffer, token, 20, &rows, per_expert)) == DEEPEP_PENDING;
       i++) {
  }
  note(status);
  for (int32_t e = 0; e < h->num_experts; e++) expanded_rows += per_expert[e];
  h->num_recv_tokens = rarely() ? claim() : rows;
  h->num_expanded_tokens = worst ? h->num_tokens * h->num_topk + h->num_experts * 8 : expanded_rows;
  if (h->routing == 1) h->num_expanded_tokens = 0;
  return status == DEEPEP_OK && rows >= 0 && rows <= 4096 && expanded_rows >= 0 && expanded_rows <= 4096;
}

static void call_routed(deepep_call *call) {
  deepep_handle h = routed_handle((int32_t)below(9), 1 + (int32_t)below(4), 1 + (int32_t)below(16));
  int32_t worst = below(3) ? 0 : h.num_tokens * 2 + 1;
  int64_t hidden_size = 8 * (1 + (int64_t)below(40));
  deepep_call plain = DEEPEP_CALL_INIT;
  plain.is_async = (int32_t)below(2);
  if (call && !rarely()) call = &plain;
  bool once = worst && below(2);
  deepep_notify both = routed_counts(&h, hidden_size, worst);
  bool counted = (once || notify_routed(&h, call, hidden_size, worst)) && learn_counts(&h, worst);
  for (int turn = 0; counted && turn < 1 + (int)below(3); turn++) {
    deepep_dispatch_args d = DEEPEP_DISPATCH_INIT;
    d.cached = turn > 0 || rarely();
    d.token = d.cached || once ? 0 : token;
    d.hidden = hidden_size;
    d.num_tokens = h.num_tokens;
    d.num_worst_tokens = d.cached ? 0 : worst;
    d.num_scales = below(3) ? 0 : 1 + (int32_t)below(3);
    d.scale_token_stride = below(4);
    d.scale_stride = below(3);
    d.recv_scale_token_stride = (int64_t)below(5) - 1;
    d.recv_scale_stride = (int64_t)below(5) - 1;
    d.x = place();
    d.x_scales = d.num_scales ? place() : NULL;
    d.topk_weights = below(2) ? place() : NULL;
    d.handle = &h;
    d.recv_x = place();
    d.recv_x_scales = d.num_scales ? place() : NULL;
    d.recv_topk_idx = h.routing == 1 && below(2) ? place() : NULL;
    d.recv_topk_weights = d.topk_weights ? place() : NULL;
    d.do_zero_padding = h.routing == 2 && below(2);
    note(once && turn == 0 ? deepep_dispatch_at_once(buffer, &both, &d, call) : deepep_dispatch(buffer, &d, call));
    if (rarely()) h.recv_src_metadata = address();
    if (rarely()) h.num_expanded_tokens = claim();
    deepep_combine_args c = DEEPEP_COMBINE_INIT;
    c.hidden = hidden_size;
    c.x = place();
    c.topk_weights = below(2) ? place() : NULL;
    c.num_topk = c.topk_weights ? h.num_topk : 0;
    c.bias[0] = below(2) ? place() : NULL;
    c.handle = &h;
    c.combined_x = place();
    c.combined_topk_weights = c.topk_weights ? place() : NULL;
    c.num_x_rows = h.routing == 2 ? h.num_expanded_tokens : 0;
    c.unreduced = h.routing == 2 ? (int32_t)below(3) : 0;
    note(deepep_combine(buffer, &c, call));
  }
  deepep_barrier(buffer, NULL); /* the structs' addresses are read at once, the tensors until here */
}

/* A right exchange without a routing, of places that overlap. */
static void call_plain(deepep_call *call) {
  deepep_handle h = DEEPEP_HANDLE_INIT;
  deepep_layout l = DEEPEP_LAYOUT_INIT;
  deepep_notify n = DEEPEP_NOTIFY_INIT;
  int32_t rows = 0, num_tokens = (int32_t)below(9), topk = 1 + (int32_t)below(4), experts = 1 + (int32_t)below(16);
  int64_t *idx = (int64_t *)(void *)(arena + 64 * below(64));
  (void)call;
  for (int32_t i = 0; i < num_tokens * topk; i++) idx[i] = (int64_t)below((uint32_t)experts + 1) - 1;
  l.num_tokens = n.num_tokens = num_tokens;
  l.num_topk = n.num_topk = topk;
  l.num_experts = n.num_experts = experts;
  l.topk_idx = idx;
  l.num_tokens_per_rank = place();
  l.num_tokens_per_expert = place();
  l.is_token_in_rank = place();
  note(deepep_get_layout(buffer, &l, NULL));
  n.hidden = 8 * (1 + (int64_t)below(40));
  n.num_tokens_per_rank = l.num_tokens_per_rank;
  n.num_tokens_per_expert = l.num_tokens_per_expert;
  n.is_token_in_rank = l.is_token_in_rank;
  h.rank_prefix_matrix = place();
  h.send_head = place();
  h.recv_src_idx = place();
  n.handle = &h;
  deepep_status_t status = deepep_notify_counts(buffer, &n, NULL, &token);
  note(status);
  for (int i = 0; !status && i < 100 && (status = deepep_wait_counts(buffer, token, 20, &rows, NULL)) == DEEPEP_PENDING;
       i++) {
  }
  note(status);
  if (status || rows < 0 || rows > 4096) return;
  h.num_recv_tokens = rows;
  deepep_dispatch_args d = DEEPEP_DISPATCH_INIT;
  d.token = token;
  d.hidden = n.hidden;
  d.num_tokens = num_tokens;
  d.num_topk = topk;
  d.num_experts = experts;
  d.x = place();
  d.topk_idx = idx;
  d.topk_weights = place();
  d.handle = &h;
  d.recv_x = place();
  d.recv_topk_idx = place();
  d.recv_topk_weights = place();
  note(deepep_dispatch(buffer, &d, NULL));
  deepep_combine_args c = DEEPEP_COMBINE_INIT;
  c.num_topk = topk;
  c.hidden = n.hidden;
  c.x = place();
  c.topk_weights = place();
  c.handle = &h;
  c.combined_x = place();
  c.combined_topk_weights = place();
  note(deepep_combine(buffer, &c, NULL));
}
static void call_balance(deepep_call *call) {
  static const uint64_t sizes[] = {16, 16, 48, 256, 0, 24, (uint64_t)1 << 62, UINT64_MAX};
  deepep_balance_args a = DEEPEP_BALANCE_INIT;
  uint64_t bytes = 0;
  int32_t reduce = (int32_t)below(2);
  a.struct_size = wrong_size(sizeof a);
  a.num_tensors = wrong32(2);
  a.num_slots = wrong32(3);
  a.num_local_experts = wrong32(2);
  a.mapping = (const int32_t *)address();
  a.workspace = address();
  a.workspace_bytes = below(4) ? 32 << 20 : below(4096);
  for (int i = 0; i < 3; i++) {
    a.expert_bytes[i] = sizes[below(COUNT(sizes))];
    a.copies[i] = address();
    a.experts[i] = address();
  }
  note(deepep_balance_workspace(some_buffer(), below(30) ? &a : NULL, reduce, below(9) ? &bytes : NULL));
  if (reduce)
    note(deepep_reduce_grads(some_buffer(), below(30) ? &a : NULL, call));
  else
    note(deepep_prefetch_weights(some_buffer(), below(30) ? &a : NULL, call));
}
static uint32_t ticket;
static void call_ll_dispatch(deepep_call *call) {
  deepep_ll_dispatch_args a = DEEPEP_LL_DISPATCH_INIT;
  a.struct_size = wrong_size(sizeof a);
  a.phases = below(2) ? 3 : wrong32(1 + (int32_t)below(3));
  a.ticket = below(3) ? ticket : (uint32_t)draw();
  a.flags = wrong32(0);
  a.num_tokens = tokens();
  a.num_max_tokens = wrong32(8);
  a.hidden = hidden();
  a.num_topk = wrong32(2);
  a.num_experts = wrong32(8);
  a.index_type = wrong32(1);
  a.use_fp8 = (int32_t)below(2);
  a.fp4 = below(2) ? 0 : wrong32((int32_t)below(3));
  a.x_scales = address();
  a.x = address();
  a.topk_idx = address();
  a.topk_weights = address();
  a.recv_x = address();
  a.recv_x_scales = address();
  a.recv_count = address();
  a.src_info = address();
  a.layout_range = address();
  a.cumulative_recv_stats = address();
  a.wait_recv_cost_stats = address();
  note(deepep_low_latency_dispatch(some_buffer(), below(30) ? &a : NULL, call));
  ticket = a.ticket;
}
static void call_ll_combine(deepep_call *call) {
  deepep_ll_combine_args a = DEEPEP_LL_COMBINE_INIT;
  a.struct_size = wrong_size(sizeof a);
  a.phases = below(2) ? 3 : wrong32(1 + (int32_t)below(3));
  a.ticket = below(3) ? ticket : (uint32_t)draw();
  a.flags = wrong32(0);
  a.num_tokens = tokens();
  a.num_max_tokens = wrong32(8);
  a.hidden = hidden();
  a.num_topk = wrong32(2);
  a.num_experts = wrong32(8);
  a.index_type = wrong32(1);
  a.x = address();
  a.topk_idx = address();
  a.topk_weights = address();
  a.src_info = address();
  a.layout_range = address();
  a.combined_x = address();
  a.wait_recv_cost_stats = address();
  note(deepep_low_latency_combine(some_buffer(), below(30) ? &a : NULL, call));
  ticket = a.ticket;
}
static void call_small(deepep_call *call) {
  deepep_buffer_t b = some_buffer();
  void *at = NULL;
  uint64_t number = 0;
  int32_t rows = 0;
  note(deepep_wait_counts(b, below(2) ? token : draw(), (int64_t)below(3), below(9) ? &rows : NULL,
                          below(2) ? NULL : (int32_t *)(void *)(arena + 4096)));
  note(deepep_cancel_dispatch(b, below(2) ? token : draw(), wrong32(4), call));
  note(deepep_next_low_latency_combine_buffer(b, wrong32(8), wrong32(256), wrong32(8), below(9) ? &at : NULL, &number));
  note(deepep_clean_low_latency_buffer(b, wrong32(8), wrong32(256), wrong32(8), call));
  note(deepep_barrier(b, call));
  note(below(2) ? deepep_update_mask(b, wrong32(0), 0, call) : deepep_clean_mask(b, call));
  note(deepep_query_mask(b, (int32_t *)address(), call));
  note(deepep_buffer_region(b, wrong32(0), below(9) ? &at : NULL, &number));
  note(deepep_buffer_check(b));
}
static void call_queries(deepep_call *call) {
  (void)call;
  deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT;
  deepep_op_stats stats = DEEPEP_OP_STATS_INIT;
  deepep_engine_info engine = DEEPEP_ENGINE_INFO_INIT;
  deepep_warmup_options warmup = DEEPEP_WARMUP_OPTIONS_INIT;
  deepep_config config = some_config();
  uint64_t bytes = 0;
  static const char *const names[] = {"cpu", "auto", "", "cpu\n", "../../x", NULL};
  info.struct_size = wrong_size(sizeof info);
  stats.struct_size = wrong_size(sizeof stats);
  stats.op = wrong32(1);
  engine.struct_size = wrong_size(sizeof engine);
  warmup.struct_size = wrong_size(sizeof warmup);
  warmup.num_tokens = tokens() % 64;
  warmup.hidden = hidden();
  warmup.num_topk = wrong32(2);
  warmup.num_experts = wrong32(8);
  note(deepep_buffer_info_get(some_buffer(), below(9) ? &info : NULL));
  note(deepep_stats(some_buffer(), below(9) ? &stats : NULL, NULL, below(2) ? NULL : (uint64_t *)(void *)arena));
  note(deepep_engine_query(names[below(COUNT(names))], below(9) ? &engine : NULL));
  if (below(20) == 0) note(deepep_buffer_warmup(some_buffer(), &warmup));
  note(deepep_config_check(&config));
  note(deepep_config_size_hint(&config, wrong64(512), wrong32(4), wrong32(0), below(9) ? &bytes : NULL));
  note(deepep_config_default(wrong32(0), wrong32(4), &config));
}
static void call_events(deepep_call *call) {
  (void)call;
  deepep_event_t *event = &events[below(kEvents)], other = some_event();
  if (*event && below(3) == 0) {
    note(deepep_event_destroy(*event));
    if (below(2)) *event = NULL; /* else it is used after its end */
  } else if (!*event) {
    note(deepep_event_create(some_buffer(), below(9) ? event : NULL));
  }
  note(deepep_event_record(other, some_stream()));
  note(deepep_event_stream_wait(other, some_stream()));
  note(deepep_event_wait(other, (int64_t)below(3)));
}
static void call_ends(deepep_call *call) { /* handles of other kinds */
  (void)call;
  note(deepep_event_destroy((deepep_event_t)buffer));
  note(deepep_buffer_destroy((deepep_buffer_t)(below(2) ? (void *)group : (void *)events[0])));
  note(deepep_group_destroy((deepep_group_t)buffer));
  note(deepep_segment_release(address()));
  note(deepep_pool_open(address()));
  (void)deepep_pool_room(address());
  note(deepep_pool_close(address()));
}

/* The buffer's memory and its group come and go. */
static void call_life(deepep_call *call) {
  (void)call;
  deepep_regroup_options r = DEEPEP_REGROUP_OPTIONS_INIT;
  int32_t members[4] = {wrong32(0), wrong32(0), 1, -1}, ranks[4], count = 0;
  char key[DEEPEP_JOIN_KEY_BYTES];
  r.struct_size = wrong_size(sizeof r);
  r.num_members = below(4) ? 1 : (int32_t)below(6) - 1;
  r.members = below(9) ? members : NULL;
  r.renumber = below(4) ? (int32_t)below(2) : wrong32(0);
  r.timeout_ms = below(8) ? 50 : -(int64_t)below(3);
  if (r.num_members > 4) r.num_members = 4;
  switch (below(6)) {
    case 0: note(deepep_buffer_regroup(some_buffer(), below(20) ? &r : NULL)); break;
    case 1:
      note(deepep_buffer_lost_ranks(some_buffer(), wrong32(4) & 3, below(4) ? ranks : NULL, below(9) ? &count : NULL));
      break;
    case 2:
      note(deepep_buffer_join_key(some_buffer(), below(9) ? key : NULL, below(4) ? sizeof key : below(64)));
      break;
    case 3: note(deepep_buffer_pending_joins(some_buffer(), 0, wrong32(4) & 3, ranks, below(9) ? &count : NULL)); break;
    default:
      note(deepep_clean_low_latency_buffer(buffer, 8, 256, 8, NULL));
      note(deepep_buffer_release(some_buffer(), (int64_t)below(3)));
  }
  if (below(2)) note(deepep_buffer_restore(some_buffer(), (int64_t)below(3)));
}
static void call_sizes(deepep_call *call) {
  (void)call;
  deepep_elastic_options o = DEEPEP_ELASTIC_OPTIONS_INIT;
  deepep_elastic_info info = DEEPEP_ELASTIC_INFO_INIT;
  deepep_plan_options p = DEEPEP_PLAN_OPTIONS_INIT;
  deepep_plan_info plan = DEEPEP_PLAN_INFO_INIT;
  o.struct_size = wrong_size(sizeof o);
  info.struct_size = wrong_size(sizeof info);
  o.num_ranks = wrong32(8);
  o.num_nvl_peers = wrong32(4);
  o.num_max_tokens = wrong32(128);
  o.hidden = wrong32(7168);
  o.num_topk = wrong32(8);
  o.use_fp8_dispatch = wrong32(0);
  o.unreduced = wrong32(0);
  o.is_direct = wrong32(0);
  o.num_allocated_qps = wrong32(0);
  o.num_sms = wrong32(0);
  o.num_device_sms = wrong32(132);
  o.compute_capability = wrong32(90);
  o.num_bytes = below(2) ? 0 : (uint64_t)wrong64(4 << 20);
  note(deepep_elastic_sizes(below(20) ? &o : NULL, below(20) ? &info : NULL));
  p.struct_size = wrong_size(sizeof p);
  plan.struct_size = wrong_size(sizeof plan);
  p.elastic = below(2) ? &o : NULL;
  note(deepep_plan(below(20) ? &p : NULL, below(20) ? &plan : NULL, NULL));
}

static void (*const functions[])(deepep_call *) = {
    call_layout,     call_notify,     call_dispatch, call_dispatch, call_combine, call_combine, call_ll_dispatch,
    call_ll_combine, call_ll_combine, call_small,    call_queries,  call_events,  call_ends,    call_routed,
    call_routed,     call_plain,      call_life,     call_sizes,    call_balance};

static _Atomic bool over;

/* The tensors change while calls run. */
static void *scribble(void *seed) {
  state = *(uint64_t *)seed;
  while (!over) {
    uint64_t bits = draw();
    memcpy(arena + 4 * below(kPlaces * 4), &bits, below(3) ? 4 : 8);
    for (volatile int i = 0; i < 200; i++) {
    }
  }
  return NULL;
}

/* After a failure, and now and then where the buffer is released: a new buffer, or its memory again. */
static void look_after_the_buffer(void) {
  deepep_status_t status = deepep_buffer_check(buffer);
  if (status) status = deepep_buffer_check(buffer); /* a refused call says so once */
  if (status) status = deepep_buffer_restore(buffer, 2000);
  if (status == DEEPEP_OK) status = deepep_buffer_check(buffer);
  if (status == DEEPEP_OK) return;
  drop();
  make();
}

static void structs(void) {
  pthread_t writer;
  uint64_t writers_seed = draw() | 1;
  bool writes = below(3) == 0;
  spread = (size_t)1 << (5 + below(8)); /* 512 bytes to 64 KiB */
  make();
  if (writes) pthread_create(&writer, NULL, scribble, &writers_seed);
  for (int i = 0; i < kCalls; i++) {
    deepep_config config;
    deepep_call call = some_call(&config);
    progress->call = (uint64_t)i;
    progress->function = below(COUNT(functions));
    functions[progress->function](below(6) ? &call : NULL);
    for (int n = 0; n < 16; n++) arena[below(1 << 16)] = (char)below(256); /* the tensors that handles name */
    if (i % 16 == 0) look_after_the_buffer();
  }
  over = true;
  if (writes) pthread_join(writer, NULL);
  drop();
}

/* ---- Events that end beside their users -------------------------------------------------------------------------- */

static _Atomic(deepep_event_t) shared_event;

static void *use_event(void *unused) {
  (void)unused;
  deepep_call call = DEEPEP_CALL_INIT;
  call.is_async = 1;
  while (!over) {
    deepep_event_wait(shared_event, 0);
    deepep_event_record(shared_event, NULL);
    call.event = shared_event;
    deepep_barrier(buffer, &call);
  }
  return NULL;
}
static void event_ends(void) {
  pthread_t users[3];
  deepep_event_t first = NULL;
  make();
  note(deepep_event_create(buffer, &first));
  shared_event = first;
  for (size_t i = 0; i < COUNT(users); i++) pthread_create(&users[i], NULL, use_event, NULL);
  for (progress->call = 0; progress->call < 4000; progress->call++) {
    deepep_event_t fresh = NULL, old = shared_event;
    note(deepep_event_create(buffer, &fresh));
    shared_event = fresh;
    note(deepep_event_destroy(old));
  }
  over = true;
  for (size_t i = 0; i < COUNT(users); i++) pthread_join(users[i], NULL);
  drop();
}

/* ---- Batches ----------------------------------------------------------------------------------------------------- */

static int run_batch(char *program, int fd, uint64_t seed) {
  pid_t child = fork();
  if (child == 0) {
    char number[32], descriptor[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)seed);
    snprintf(descriptor, sizeof descriptor, "%d", fd);
    execl("/proc/self/exe", program, "batch", number, descriptor, (char *)NULL);
    _exit(127);
  }
  int status = 0;
  for (int waited = 0; waitpid(child, &status, WNOHANG) == 0; waited++) {
    usleep(5000);
    if (waited < kLimitSeconds * 200) continue;
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    printf("seed %llu: hung in call %llu\n", (unsigned long long)seed, (unsigned long long)progress->call);
    return 1;
  }
  if (!status && !progress->silent && !progress->internal) return 0;
  printf("seed %llu: signal %d, status %d, in call %llu of function %llu; %llu errors without text, %llu internal\n",
         (unsigned long long)seed, WTERMSIG(status), WEXITSTATUS(status), (unsigned long long)progress->call,
         (unsigned long long)progress->function, (unsigned long long)progress->silent,
         (unsigned long long)progress->internal);
  return 1;
}

int main(int argc, char **argv) {
  bool batch = argc > 3 && strcmp(argv[1], "batch") == 0;
  int fd = batch ? atoi(argv[3]) : memfd_create("progress", 0);
  if (fd < 0 || (!batch && ftruncate(fd, 4096))) return 2;
  progress = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
  if (batch) {
    arena = mmap(NULL, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    state = seed * 2654435761u + 12345;
    seed % 5 ? structs() : event_ends();
    _exit(0);
  }
  time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 15);
  uint64_t passed = 0, failed = 0, calls = 0, accepted = 0;
  for (; time(NULL) < end || passed + failed < 2; seed++) {
    memset(progress, 0, 4096);
    run_batch(argv[0], fd, seed) ? failed++ : passed++;
    calls += progress->calls;
    accepted += progress->accepted;
  }
  printf("fuzz: %llu calls, %llu of them accepted, in %llu batches\n", (unsigned long long)calls,
         (unsigned long long)accepted, (unsigned long long)(passed + failed));
  printf("%d passed, %llu failed\n", failed == 0, (unsigned long long)failed);
  return failed != 0;
}
