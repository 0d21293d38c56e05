/* The public names of deepep.h: fork guard, struct sizes and NULL checks, then the Go export of the same name. */
#include "shim.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_cgo_export.h"

#define DP_PUBLIC __attribute__((visibility("default")))
#define DP_ERROR_BYTES 4096
/* What the Go runtime's signal handlers may use: a stack of its own threads has 32 KB. */
#define DP_SIGNAL_STACK_BYTES (32u << 10)
#ifndef AT_MINSIGSTKSZ
#define AT_MINSIGSTKSZ 51
#endif
#define DP_MAX_STRUCT 65536u /* a struct_size above this is not a size */

/* A pointer only: a library that is opened late has little static thread-local storage. The text goes with its thread.
 */
static _Thread_local char *last_error;
static pthread_key_t error_key, signal_stack_key;
static _Thread_local char signal_stack_seen;
static volatile int forked; /* set in a child: the Go runtime does not survive fork */

static void mark_forked(void) { forked = 1; }
/* Other destructors of the thread may still call in. */
static void free_error(void *text) {
  last_error = NULL;
  free(text);
}

/* What the kernel puts on a signal's stack depends on the processor: 11 KB with AMX. */
static size_t signal_stack_bytes(void) {
  return (getauxval(AT_MINSIGSTKSZ) + DP_SIGNAL_STACK_BYTES + 0xffff) & ~(size_t)0xffff;
}

static void free_signal_stack(void *stack) {
  stack_t now;
  const stack_t none = {.ss_flags = SS_DISABLE};
  if (sigaltstack(NULL, &now) == 0 && now.ss_sp == stack && sigaltstack(&none, NULL) != 0) return; /* it is in use */
  munmap(stack, signal_stack_bytes());
}

/* The Go runtime interrupts its threads by signals, also this one while it is inside, and takes the thread's alternate
 * stack where there is one. A small one (of Python's faulthandler, of a Rust thread) would be a crash, at a random
 * moment: this thread gets a larger one in its place. */
static void look_at_signal_stack(void) {
  stack_t now, larger = {.ss_size = signal_stack_bytes()};
  signal_stack_seen = 1;
  if (sigaltstack(NULL, &now) != 0 || (now.ss_flags & (SS_DISABLE | SS_ONSTACK)) != 0) return;
  if (now.ss_size >= getauxval(AT_MINSIGSTKSZ) + DP_SIGNAL_STACK_BYTES) return;
  larger.ss_sp = mmap(NULL, larger.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (larger.ss_sp == MAP_FAILED) return;
  if (pthread_setspecific(signal_stack_key, larger.ss_sp) != 0 || sigaltstack(&larger, NULL) != 0) {
    pthread_setspecific(signal_stack_key, NULL);
    munmap(larger.ss_sp, larger.ss_size);
  }
}

/* The host's signals are for the host's threads: one that waits for them (sigwait), or a handler that would find a
 * goroutine's small stack. All threads of the Go runtime have the mask of the thread that starts it, which is the one
 * that opens this library: it blocks what is not the runtime's own (SIGURG) or a fault of the thread, from before the
 * runtime's constructor until after it. */
static sigset_t mask_of_opener;

__attribute__((constructor(101))) static void block_signals(void) {
  static const int open_signals[] = {SIGURG, SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS};
  sigset_t blocked;
  size_t i;
  sigfillset(&blocked);
  for (i = 0; i < sizeof open_signals / sizeof *open_signals; i++) sigdelset(&blocked, open_signals[i]);
  pthread_sigmask(SIG_BLOCK, &blocked, &mask_of_opener);
}

__attribute__((constructor)) static void prepare(void) {
  pthread_sigmask(SIG_SETMASK, &mask_of_opener, NULL);
  pthread_key_create(&error_key, free_error);
  pthread_key_create(&signal_stack_key, free_signal_stack);
  pthread_atfork(NULL, NULL, mark_forked);
}

void dp_set_error(const char *text) {
  if (last_error == NULL) {
    last_error = malloc(DP_ERROR_BYTES);
    pthread_setspecific(error_key, last_error);
  }
  if (last_error != NULL) snprintf(last_error, DP_ERROR_BYTES, "%s", text);
}

int32_t dp_allgather(deepep_allgather_fn fn, const void *send, void *recv, size_t bytes, void *user) {
  return fn(send, recv, bytes, user);
}

void dp_log(deepep_log_fn fn, int32_t level, const char *message, void *user) { fn(level, message, user); }

static deepep_status_t invalid(const char *name, const char *given, const char *allowed) {
  char text[512];
  snprintf(text, sizeof text, "argument %s: got %s, allowed %s", name, given, allowed);
  dp_set_error(text);
  return DEEPEP_ERROR_INVALID_ARGUMENT;
}

/* Copies a caller's struct over the defaults in `full`: a shorter one, of an earlier version, is filled up; a longer
 * one must be zero past what is known here. first_size: the struct of version 0.1; no field is taken in part. */
static deepep_status_t take_struct(void *full, uint32_t full_size, uint32_t first_size, const void *given,
                                   const char *name) {
  uint32_t size, i;
  if (given == NULL) return invalid(name, "NULL", "a struct made with its _INIT macro");
  memcpy(&size, given, sizeof size);
  if ((size < full_size && size != first_size) || size > DP_MAX_STRUCT) {
    char number[48];
    snprintf(number, sizeof number, "struct_size %u", size);
    return invalid(name, number, "the size of the struct, set by its _INIT macro");
  }
  for (i = full_size; i < size; i++) {
    if (((const char *)given)[i] != 0) return invalid(name, "fields this version does not know", "zero there");
  }
  memcpy(full, given, size < full_size ? size : full_size);
  memcpy(full, &full_size, sizeof full_size);
  return DEEPEP_OK;
}
#define take(full, full_size, given, name) take_struct(full, full_size, full_size, given, name)
/* Structs that have grown since version 0.1. */
#define HANDLE_SIZE_0_1 offsetof(deepep_handle, exchange)
#define BUFFER_INFO_SIZE_0_1 offsetof(deepep_buffer_info, control_bytes)
#define PLAN_OPTIONS_SIZE_0_1 offsetof(deepep_plan_options, elastic)
#define PLAN_INFO_SIZE_0_1 offsetof(deepep_plan_info, elastic_bytes)
#define NOTIFY_SIZE_0_1 offsetof(deepep_notify, routing)
#define DISPATCH_SIZE_0_1 offsetof(deepep_dispatch_args, recv_scale_token_stride)
#define LL_DISPATCH_SIZE_0_1 offsetof(deepep_ll_dispatch_args, x_scales)
#define COMBINE_SIZE_0_1 offsetof(deepep_combine_args, num_x_rows)

/* Writes a filled struct back into the caller's, as far as that reaches. */
static void give(void *given, const void *full, uint32_t full_size) {
  uint32_t size;
  memcpy(&size, given, sizeof size);
  if (size > full_size) size = full_size;
  memcpy((char *)given + sizeof size, (const char *)full + sizeof size, size - sizeof size);
}

static deepep_status_t take_call(dp_call *out, const deepep_call *call) {
  deepep_call full = DEEPEP_CALL_INIT;
  memset(out, 0, sizeof *out);
  if (call != NULL) { /* NULL: not asynchronous, after the default stream */
    deepep_status_t status = take(&full, sizeof full, call, "call");
    if (status != DEEPEP_OK) return status;
  }
  out->is_async = full.is_async;
  out->stream = (uintptr_t)full.stream;
  out->previous_event = (uintptr_t)full.previous_event;
  out->event = (uintptr_t)full.event;
  if (full.config != NULL) {
    out->has_config = 1;
    out->config = *full.config;
  }
  return DEEPEP_OK;
}

/* Completes a handle into `out`, which the struct that names it then points to: Go reads C's structs as they lie. */
static deepep_status_t take_handle(deepep_handle *out, const deepep_handle *handle) {
  deepep_handle full = DEEPEP_HANDLE_INIT;
  deepep_status_t status = take_struct(&full, sizeof full, HANDLE_SIZE_0_1, handle, "handle");
  if (status != DEEPEP_OK) return status;
  if (full.magic != DEEPEP_HANDLE_MAGIC)
    return invalid("handle", "something else", "a deepep_handle made with DEEPEP_HANDLE_INIT");
  if (full.version != DEEPEP_HANDLE_VERSION) return invalid("handle", "a handle of another version", "version 1");
  *out = full;
  return DEEPEP_OK;
}

static deepep_status_t enter(void) {
  if (forked) {
    dp_set_error(
        "this process was forked from one that has loaded libdeepep.so (linking the library loads it), and the "
        "threads of its Go runtime are missing here: start processes with spawn, or load it after the fork");
    return DEEPEP_ERROR_FORK;
  }
  if (last_error != NULL) last_error[0] = 0;
  if (!signal_stack_seen) look_at_signal_stack();
  return DEEPEP_OK;
}

#define TRY(call)                             \
  do {                                        \
    deepep_status_t status_ = (call);         \
    if (status_ != DEEPEP_OK) return status_; \
  } while (0)
#define REQUIRE(pointer)                                                   \
  do {                                                                     \
    if ((pointer) == NULL) return invalid(#pointer, "NULL", "an address"); \
  } while (0)
#define ID(handle) ((uintptr_t)(handle))

/* ---- Status ---- */

DP_PUBLIC int32_t deepep_version(void) {
  return DEEPEP_VERSION_MAJOR * 10000 + DEEPEP_VERSION_MINOR * 100 + DEEPEP_VERSION_PATCH;
}

DP_PUBLIC const char *deepep_status_name(deepep_status_t status) {
  switch (status) {
#define X(name, value, text) \
  case value: return "DEEPEP_" #name;
    DEEPEP_STATUS_MAP(X)
#undef X
  }
  return "unknown";
}

DP_PUBLIC const char *deepep_status_text(deepep_status_t status) {
  switch (status) {
#define X(name, value, text) \
  case value: return text;
    DEEPEP_STATUS_MAP(X)
#undef X
  }
  return "unknown";
}

DP_PUBLIC const char *deepep_last_error(void) { return last_error != NULL ? last_error : ""; }

DP_PUBLIC deepep_status_t deepep_set_log_callback(deepep_log_fn fn, void *user) {
  TRY(enter());
  return dpgo_set_log_callback(fn, user);
}

/* ---- Engines, groups, buffers ---- */

DP_PUBLIC deepep_status_t deepep_engine_query(const char *name, deepep_engine_info *info) {
  deepep_engine_info full = DEEPEP_ENGINE_INFO_INIT;
  TRY(enter());
  REQUIRE(name);
  TRY(take(&full, sizeof full, info, "info"));
  TRY(dpgo_engine_query((char *)name, &full));
  give(info, &full, sizeof full);
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_group_create(const deepep_group_options *options, deepep_group_t *group) {
  deepep_group_options full = DEEPEP_GROUP_OPTIONS_INIT;
  uintptr_t id = 0;
  TRY(enter());
  REQUIRE(group);
  TRY(take(&full, sizeof full, options, "options"));
  TRY(dpgo_group_create(&full, &id));
  *group = (deepep_group_t)id;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_group_destroy(deepep_group_t group) {
  TRY(enter());
  return dpgo_group_destroy(ID(group));
}

DP_PUBLIC deepep_status_t deepep_buffer_create(deepep_group_t group, const deepep_buffer_options *options,
                                               deepep_buffer_t *buffer) {
  deepep_buffer_options full = DEEPEP_BUFFER_OPTIONS_INIT;
  uintptr_t id = 0;
  TRY(enter());
  REQUIRE(buffer);
  TRY(take(&full, sizeof full, options, "options"));
  TRY(dpgo_buffer_create(ID(group), &full, &id));
  *buffer = (deepep_buffer_t)id;
  return DEEPEP_OK;
}

/* All ranks free a transport's memory together, so a buffer may be gone before it is free. What libraries have
 * registered for the end of the process would take them from under the thread that frees; so this one, which is
 * registered after they were loaded and runs before theirs, waits for the thread, and else ends the process at once:
 * other ranks free theirs at the same time, and one of them may be dead. */
enum { FREES_AT_EXIT_MS = 2000 };
static void end_after_frees(int status, void *unused) {
  (void)unused;
  if (forked || dpgo_await_frees(FREES_AT_EXIT_MS) != 0) return;
  fflush(NULL);
  _exit(status);
}
static void watch_end(void) { (void)on_exit(end_after_frees, NULL); }

DP_PUBLIC deepep_status_t deepep_buffer_destroy(deepep_buffer_t buffer) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  TRY(enter());
  const deepep_status_t status = dpgo_buffer_destroy(ID(buffer));
  if (dpgo_await_frees(0) == 0) pthread_once(&once, watch_end);
  return status;
}

DP_PUBLIC deepep_status_t deepep_buffer_info_get(deepep_buffer_t buffer, deepep_buffer_info *info) {
  deepep_buffer_info full = DEEPEP_BUFFER_INFO_INIT;
  TRY(enter());
  TRY(take_struct(&full, sizeof full, BUFFER_INFO_SIZE_0_1, info, "info"));
  TRY(dpgo_buffer_info_get(ID(buffer), &full));
  give(info, &full, sizeof full);
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_elastic_sizes(const deepep_elastic_options *options, deepep_elastic_info *info) {
  deepep_elastic_options full = DEEPEP_ELASTIC_OPTIONS_INIT;
  deepep_elastic_info found = DEEPEP_ELASTIC_INFO_INIT;
  TRY(enter());
  TRY(take(&full, sizeof full, options, "options"));
  TRY(take(&found, sizeof found, info, "info"));
  TRY(dpgo_elastic_sizes(&full, &found));
  give(info, &found, sizeof found);
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_plan(const deepep_plan_options *options, deepep_plan_info *plan, int32_t *qp_order) {
  deepep_plan_options full = DEEPEP_PLAN_OPTIONS_INIT;
  deepep_buffer_options buffer = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_elastic_options elastic = DEEPEP_ELASTIC_OPTIONS_INIT;
  deepep_plan_info found = DEEPEP_PLAN_INFO_INIT;
  TRY(enter());
  TRY(take_struct(&full, sizeof full, PLAN_OPTIONS_SIZE_0_1, options, "options"));
  if (full.buffer != NULL) TRY(take(&buffer, sizeof buffer, full.buffer, "buffer"));
  if (full.elastic != NULL) TRY(take(&elastic, sizeof elastic, full.elastic, "elastic"));
  TRY(take_struct(&found, sizeof found, PLAN_INFO_SIZE_0_1, plan, "plan"));
  TRY(dpgo_plan(&full, &buffer, full.elastic != NULL ? &elastic : NULL, &found, qp_order));
  give(plan, &found, sizeof found);
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_buffer_join_key(deepep_buffer_t buffer, char *key, uint64_t bytes) {
  TRY(enter());
  REQUIRE(key);
  if (bytes < DEEPEP_JOIN_KEY_BYTES) return invalid("bytes", "less", "at least DEEPEP_JOIN_KEY_BYTES");
  return dpgo_buffer_join_key(ID(buffer), key, bytes);
}

DP_PUBLIC deepep_status_t deepep_buffer_pending_joins(deepep_buffer_t buffer, int32_t agreed, int32_t capacity,
                                                      int32_t *ranks, int32_t *num_joins) {
  TRY(enter());
  REQUIRE(num_joins);
  return dpgo_buffer_pending_joins(ID(buffer), agreed, ranks != NULL ? capacity : 0, ranks, num_joins);
}

DP_PUBLIC deepep_status_t deepep_buffer_lost_ranks(deepep_buffer_t buffer, int32_t capacity, int32_t *ranks,
                                                   int32_t *num_lost) {
  TRY(enter());
  REQUIRE(num_lost);
  return dpgo_buffer_lost_ranks(ID(buffer), ranks != NULL ? capacity : 0, ranks, num_lost);
}

DP_PUBLIC deepep_status_t deepep_buffer_regroup(deepep_buffer_t buffer, const deepep_regroup_options *options) {
  deepep_regroup_options full = DEEPEP_REGROUP_OPTIONS_INIT;
  TRY(enter());
  TRY(take(&full, sizeof full, options, "options"));
  if (full.num_members > 0) REQUIRE(full.members);
  return dpgo_buffer_regroup(ID(buffer), &full);
}

DP_PUBLIC deepep_status_t deepep_buffer_wait_ready(deepep_buffer_t buffer, int64_t slice_ms) {
  TRY(enter());
  return dpgo_buffer_wait_ready(ID(buffer), slice_ms);
}

DP_PUBLIC deepep_status_t deepep_buffer_release(deepep_buffer_t buffer, int64_t slice_ms) {
  TRY(enter());
  return dpgo_buffer_release(ID(buffer), slice_ms);
}

DP_PUBLIC deepep_status_t deepep_buffer_restore(deepep_buffer_t buffer, int64_t slice_ms) {
  TRY(enter());
  return dpgo_buffer_restore(ID(buffer), slice_ms);
}

DP_PUBLIC deepep_status_t deepep_buffer_check(deepep_buffer_t buffer) {
  TRY(enter());
  return dpgo_buffer_check(ID(buffer));
}

DP_PUBLIC deepep_status_t deepep_buffer_region(deepep_buffer_t buffer, int32_t rdma, void **address, uint64_t *bytes) {
  uint64_t found = 0;
  TRY(enter());
  REQUIRE(address);
  REQUIRE(bytes);
  TRY(dpgo_buffer_region(ID(buffer), rdma, &found, bytes));
  *address = (void *)(uintptr_t)found;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_buffer_warmup(deepep_buffer_t buffer, const deepep_warmup_options *options) {
  deepep_warmup_options full = DEEPEP_WARMUP_OPTIONS_INIT;
  TRY(enter());
  TRY(take(&full, sizeof full, options, "options"));
  return dpgo_buffer_warmup(ID(buffer), &full);
}

DP_PUBLIC deepep_status_t deepep_buffer_startup_report(deepep_buffer_t buffer, deepep_startup_report *report) {
  deepep_startup_report full = DEEPEP_STARTUP_REPORT_INIT;
  TRY(enter());
  TRY(take(&full, sizeof full, report, "report"));
  TRY(dpgo_buffer_startup_report(ID(buffer), &full));
  give(report, &full, sizeof full);
  return DEEPEP_OK;
}

/* ---- Events ---- */

DP_PUBLIC deepep_status_t deepep_event_create(deepep_buffer_t buffer, deepep_event_t *event) {
  uintptr_t id = 0;
  TRY(enter());
  REQUIRE(event);
  TRY(dpgo_event_create(ID(buffer), &id));
  *event = (deepep_event_t)id;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_event_destroy(deepep_event_t event) {
  TRY(enter());
  return dpgo_event_destroy(ID(event));
}

DP_PUBLIC deepep_status_t deepep_event_record(deepep_event_t event, void *stream) {
  TRY(enter());
  return dpgo_event_record(ID(event), ID(stream));
}

DP_PUBLIC deepep_status_t deepep_event_stream_wait(deepep_event_t event, void *stream) {
  TRY(enter());
  return dpgo_event_stream_wait(ID(event), ID(stream));
}

DP_PUBLIC deepep_status_t deepep_event_wait(deepep_event_t event, int64_t slice_ms) {
  TRY(enter());
  return dpgo_event_wait(ID(event), slice_ms);
}

/* ---- Configs ---- */

DP_PUBLIC deepep_status_t deepep_config_check(deepep_config *config) {
  TRY(enter());
  REQUIRE(config);
  return dpgo_config_check(config);
}

DP_PUBLIC deepep_status_t deepep_config_default(int32_t kind, int32_t num_ranks, deepep_config *config) {
  TRY(enter());
  REQUIRE(config);
  return dpgo_config_default(kind, num_ranks, config);
}

DP_PUBLIC deepep_status_t deepep_config_size_hint(const deepep_config *config, int64_t hidden_bytes, int32_t num_ranks,
                                                  int32_t rdma, uint64_t *bytes) {
  deepep_config copy;
  TRY(enter());
  REQUIRE(config);
  REQUIRE(bytes);
  copy = *config;
  return dpgo_config_size_hint(&copy, hidden_bytes, num_ranks, rdma, bytes);
}

DP_PUBLIC deepep_status_t deepep_low_latency_size_hint(int32_t num_max_tokens, int32_t hidden, int32_t num_ranks,
                                                       int32_t num_experts, uint64_t *bytes) {
  TRY(enter());
  REQUIRE(bytes);
  return dpgo_low_latency_size_hint(num_max_tokens, hidden, num_ranks, num_experts, bytes);
}

/* ---- Normal mode ---- */

DP_PUBLIC deepep_status_t deepep_get_layout(deepep_buffer_t buffer, const deepep_layout *layout,
                                            const deepep_call *call) {
  deepep_layout full = DEEPEP_LAYOUT_INIT;
  dp_call order;
  TRY(enter());
  TRY(take(&full, sizeof full, layout, "layout"));
  TRY(take_call(&order, call));
  return dpgo_get_layout(ID(buffer), &full, &order);
}

DP_PUBLIC deepep_status_t deepep_notify_counts(deepep_buffer_t buffer, const deepep_notify *notify,
                                               const deepep_call *call, uint64_t *token) {
  deepep_notify full = DEEPEP_NOTIFY_INIT;
  deepep_handle handle, *theirs;
  dp_call order;
  TRY(enter());
  REQUIRE(token);
  TRY(take_struct(&full, sizeof full, NOTIFY_SIZE_0_1, notify, "notify"));
  theirs = full.handle;
  TRY(take_handle(&handle, theirs));
  TRY(take_call(&order, call));
  full.handle = &handle;
  TRY(dpgo_notify_counts(ID(buffer), &full, &order, token));
  give(theirs, &handle, sizeof handle);
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_wait_counts(deepep_buffer_t buffer, uint64_t token, int64_t slice_ms,
                                             int32_t *num_recv_tokens, int32_t *per_expert) {
  TRY(enter());
  REQUIRE(num_recv_tokens);
  return dpgo_wait_counts(ID(buffer), token, slice_ms, num_recv_tokens, per_expert);
}

DP_PUBLIC deepep_status_t deepep_dispatch(deepep_buffer_t buffer, const deepep_dispatch_args *args,
                                          const deepep_call *call) {
  deepep_dispatch_args full = DEEPEP_DISPATCH_INIT;
  deepep_handle handle;
  dp_call order;
  TRY(enter());
  TRY(take_struct(&full, sizeof full, DISPATCH_SIZE_0_1, args, "args"));
  TRY(take_handle(&handle, full.handle));
  TRY(take_call(&order, call));
  full.handle = &handle;
  return dpgo_dispatch(ID(buffer), &full, &order);
}

DP_PUBLIC deepep_status_t deepep_dispatch_at_once(deepep_buffer_t buffer, const deepep_notify *notify,
                                                  const deepep_dispatch_args *args, const deepep_call *call) {
  deepep_notify counts = DEEPEP_NOTIFY_INIT;
  deepep_dispatch_args full = DEEPEP_DISPATCH_INIT;
  deepep_handle handle, *theirs;
  dp_call order;
  TRY(enter());
  TRY(take_struct(&counts, sizeof counts, NOTIFY_SIZE_0_1, notify, "notify"));
  TRY(take_struct(&full, sizeof full, DISPATCH_SIZE_0_1, args, "args"));
  theirs = counts.handle;
  if (full.handle != NULL && full.handle != theirs)
    return invalid("args.handle", "another handle", "that of the notify, or NULL");
  TRY(take_handle(&handle, theirs));
  TRY(take_call(&order, call));
  counts.handle = full.handle = &handle;
  TRY(dpgo_dispatch_at_once(ID(buffer), &counts, &full, &order));
  give(theirs, &handle, sizeof handle);
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_cancel_dispatch(deepep_buffer_t buffer, uint64_t token, deepep_status_t reason,
                                                 const deepep_call *call) {
  dp_call order;
  TRY(enter());
  TRY(take_call(&order, call));
  return dpgo_cancel_dispatch(ID(buffer), token, reason, &order);
}

DP_PUBLIC deepep_status_t deepep_combine(deepep_buffer_t buffer, const deepep_combine_args *args,
                                         const deepep_call *call) {
  deepep_combine_args full = DEEPEP_COMBINE_INIT;
  deepep_handle handle;
  dp_call order;
  TRY(enter());
  TRY(take_struct(&full, sizeof full, COMBINE_SIZE_0_1, args, "args"));
  TRY(take_handle(&handle, full.handle));
  TRY(take_call(&order, call));
  full.handle = &handle;
  return dpgo_combine(ID(buffer), &full, &order);
}

/* ---- Experts' copies ---- */

DP_PUBLIC deepep_status_t deepep_balance_workspace(deepep_buffer_t buffer, const deepep_balance_args *args,
                                                   int32_t reduce, uint64_t *bytes) {
  deepep_balance_args full = DEEPEP_BALANCE_INIT;
  TRY(enter());
  REQUIRE(bytes);
  TRY(take(&full, sizeof full, args, "args"));
  return dpgo_balance_workspace(ID(buffer), &full, reduce, bytes);
}

DP_PUBLIC deepep_status_t deepep_prefetch_weights(deepep_buffer_t buffer, const deepep_balance_args *args,
                                                  const deepep_call *call) {
  deepep_balance_args full = DEEPEP_BALANCE_INIT;
  dp_call order;
  TRY(enter());
  TRY(take(&full, sizeof full, args, "args"));
  TRY(take_call(&order, call));
  return dpgo_prefetch_weights(ID(buffer), &full, &order);
}

DP_PUBLIC deepep_status_t deepep_reduce_grads(deepep_buffer_t buffer, const deepep_balance_args *args,
                                              const deepep_call *call) {
  deepep_balance_args full = DEEPEP_BALANCE_INIT;
  dp_call order;
  TRY(enter());
  TRY(take(&full, sizeof full, args, "args"));
  TRY(take_call(&order, call));
  return dpgo_reduce_grads(ID(buffer), &full, &order);
}

/* ---- Low-latency mode ---- */

DP_PUBLIC deepep_status_t deepep_low_latency_dispatch(deepep_buffer_t buffer, deepep_ll_dispatch_args *args,
                                                      const deepep_call *call) {
  deepep_ll_dispatch_args full = DEEPEP_LL_DISPATCH_INIT;
  dp_call order;
  TRY(enter());
  TRY(take_struct(&full, sizeof full, LL_DISPATCH_SIZE_0_1, args, "args"));
  TRY(take_call(&order, call));
  TRY(dpgo_low_latency_dispatch(ID(buffer), &full, &order));
  args->ticket = full.ticket;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_low_latency_combine(deepep_buffer_t buffer, deepep_ll_combine_args *args,
                                                     const deepep_call *call) {
  deepep_ll_combine_args full = DEEPEP_LL_COMBINE_INIT;
  dp_call order;
  TRY(enter());
  TRY(take(&full, sizeof full, args, "args"));
  TRY(take_call(&order, call));
  TRY(dpgo_low_latency_combine(ID(buffer), &full, &order));
  args->ticket = full.ticket;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_next_low_latency_combine_buffer(deepep_buffer_t buffer, int32_t num_max_tokens,
                                                                 int32_t hidden, int32_t num_experts, void **address,
                                                                 uint64_t *row_stride) {
  uint64_t found = 0;
  TRY(enter());
  REQUIRE(address);
  REQUIRE(row_stride);
  TRY(dpgo_next_low_latency_combine_buffer(ID(buffer), num_max_tokens, hidden, num_experts, &found, row_stride));
  *address = (void *)(uintptr_t)found;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_clean_low_latency_buffer(deepep_buffer_t buffer, int32_t num_max_tokens,
                                                          int32_t hidden, int32_t num_experts,
                                                          const deepep_call *call) {
  dp_call order;
  TRY(enter());
  TRY(take_call(&order, call));
  return dpgo_clean_low_latency_buffer(ID(buffer), num_max_tokens, hidden, num_experts, &order);
}

DP_PUBLIC deepep_status_t deepep_barrier(deepep_buffer_t buffer, const deepep_call *call) {
  dp_call order;
  TRY(enter());
  TRY(take_call(&order, call));
  return dpgo_barrier(ID(buffer), &order);
}

DP_PUBLIC deepep_status_t deepep_update_mask(deepep_buffer_t buffer, int32_t rank, int32_t masked,
                                             const deepep_call *call) {
  dp_call order;
  TRY(enter());
  TRY(take_call(&order, call));
  return dpgo_update_mask(ID(buffer), rank, masked, &order);
}

DP_PUBLIC deepep_status_t deepep_query_mask(deepep_buffer_t buffer, int32_t *mask_status, const deepep_call *call) {
  dp_call order;
  TRY(enter());
  REQUIRE(mask_status);
  TRY(take_call(&order, call));
  return dpgo_query_mask(ID(buffer), ID(mask_status), &order);
}

DP_PUBLIC deepep_status_t deepep_clean_mask(deepep_buffer_t buffer, const deepep_call *call) {
  dp_call order;
  TRY(enter());
  TRY(take_call(&order, call));
  return dpgo_clean_mask(ID(buffer), &order);
}

/* ---- Segments, statistics ---- */

DP_PUBLIC deepep_status_t deepep_segment_create(deepep_buffer_t buffer, uint64_t bytes, int32_t *segment,
                                                void **address) {
  uint64_t found = 0;
  TRY(enter());
  REQUIRE(segment);
  REQUIRE(address);
  TRY(dpgo_segment_create(ID(buffer), bytes, segment, &found));
  *address = (void *)(uintptr_t)found;
  return DEEPEP_OK;
}

DP_PUBLIC deepep_status_t deepep_segment_release(void *address) {
  TRY(enter());
  return dpgo_segment_release(ID(address));
}

static _Thread_local uintptr_t selected_pool; /* the segment that this thread allocates from */

DP_PUBLIC deepep_status_t deepep_pool_open(void *segment) {
  TRY(enter());
  return dpgo_pool_open(ID(segment));
}

DP_PUBLIC deepep_status_t deepep_pool_select(void *segment) {
  TRY(enter());
  selected_pool = ID(segment);
  return DEEPEP_OK;
}

DP_PUBLIC uint64_t deepep_pool_room(void *segment) { return enter() == DEEPEP_OK ? dpgo_pool_room(ID(segment)) : 0; }

DP_PUBLIC deepep_status_t deepep_pool_close(void *segment) {
  TRY(enter());
  return dpgo_pool_close(ID(segment));
}

DP_PUBLIC void *deepep_pool_allocate(size_t bytes, int device, void *stream) {
  (void)device;
  (void)stream;
  if (enter() != DEEPEP_OK || selected_pool == 0) return NULL;
  return (void *)dpgo_pool_allocate(selected_pool, bytes);
}

DP_PUBLIC void deepep_pool_free(void *pointer, size_t bytes, int device, void *stream) {
  (void)bytes;
  (void)device;
  if (enter() == DEEPEP_OK && pointer != NULL) dpgo_pool_free(ID(pointer), ID(stream));
}

DP_PUBLIC deepep_status_t deepep_stats(deepep_buffer_t buffer, deepep_op_stats *stats, uint64_t *bytes_to_peer,
                                       uint64_t *wait_ns_per_peer) {
  deepep_op_stats full = DEEPEP_OP_STATS_INIT;
  TRY(enter());
  TRY(take(&full, sizeof full, stats, "stats"));
  TRY(dpgo_stats(ID(buffer), &full, bytes_to_peer, wait_ns_per_peer));
  give(stats, &full, sizeof full);
  return DEEPEP_OK;
}
