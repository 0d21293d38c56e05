/* deepep.h - expert-parallel dispatch and combine. C99, no dependency.
 *
 * Conventions
 *   Return value: a deepep_status_t, 0 is success. deepep_last_error() has the text of this thread's last failure.
 *   Structs begin with struct_size: set it through the *_INIT macro. A smaller struct is filled up with defaults, a
 *   larger one is
 *   accepted if the part unknown here is zero.
 *   Pointers to tensors are addresses of the buffer's engine: device memory with "cuda", plain memory with "cpu".
 *   Streams are void *: a cudaStream_t with "cuda"; with "cpu" NULL, which means the calling thread.
 *   [in], [out], [inout] with shape and type: T tokens here, R ranks, E experts, L = E / R local experts, K top-k, H
 *   hidden,
 *   B = num_max_dispatch_tokens_per_rank, N rows received. Shapes are row-major and contiguous unless strides are
 *   named.
 *   Tags of a function:
 *     collective  every rank of the group calls it, in the same order; local  only this rank takes part
 *     launches    enqueues work and does not wait for peers (with "cpu" and is_async = 0 it waits for its own work)
 *     waits       may block up to its timeout
 *   Threads: every function may be called from any thread. Calls on one buffer are serialised inside.
 *   Lifetimes: tensors given to a launching call must live until its event is done. Nothing is kept by the library
 *   afterwards.
 *   fork: a child of a process that has used the library gets DEEPEP_ERROR_FORK from every function.
 */
#ifndef DEEPEP_H
#define DEEPEP_H
#include <stddef.h>
#include <stdint.h>

#define DEEPEP_VERSION_MAJOR 0
#define DEEPEP_VERSION_MINOR 1
#define DEEPEP_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ------------------------------------------------------------------------------------------------------ */

/* X(name, value, text) */
#define DEEPEP_STATUS_MAP(X)                                              \
  X(OK, 0, "success")                                                     \
  X(ERROR_INVALID_ARGUMENT, 1, "invalid argument")                        \
  X(ERROR_INVALID_STATE, 2, "not possible in this state")                 \
  X(ERROR_UNSUPPORTED, 3, "not supported here")                           \
  X(ERROR_OUT_OF_MEMORY, 4, "out of memory")                              \
  X(ERROR_SYSTEM, 5, "operating system error")                            \
  X(ERROR_TIMEOUT, 6, "a wait ended at its deadline")                     \
  X(ERROR_PEER_DEAD, 7, "a peer died")                                    \
  X(ERROR_MISMATCH, 8, "ranks disagree")                                  \
  X(ERROR_ABORTED, 9, "the buffer failed before")                         \
  X(ERROR_NOT_FOUND, 10, "library or symbol not found")                   \
  X(ERROR_VERSION, 11, "versions do not match")                           \
  X(ERROR_FORK, 12, "used in a forked child; start processes with spawn") \
  X(PENDING, 13, "not yet: the slice of waiting is over, call again")     \
  X(ERROR_DEVICE, 14, "device error")                                     \
  X(ERROR_INTERNAL, 15, "internal error")

typedef int32_t deepep_status_t;
enum {
#define DEEPEP_X(name, value, text) DEEPEP_##name = value,
  DEEPEP_STATUS_MAP(DEEPEP_X)
#undef DEEPEP_X
      DEEPEP_STATUS_COUNT = 16
};

/* local. Version of the loaded library: major * 10000 + minor * 100 + patch. */
int32_t deepep_version(void);
/* local. Name ("DEEPEP_ERROR_TIMEOUT") and text of a code; "unknown" for others. Static strings. */
const char *deepep_status_name(deepep_status_t status);
const char *deepep_status_text(deepep_status_t status);
/* local. Text of this thread's last failed call, "" if none. Valid until the thread's next call. */
const char *deepep_last_error(void);

/* local. Receives log lines (level 0 debug, 1 info, 2 warn, 3 error) instead of DEEPEP_LOG's place; NULL: back to that.
 * May be called from the library's own threads. */
typedef void (*deepep_log_fn)(int32_t level, const char *message, void *user);
deepep_status_t deepep_set_log_callback(deepep_log_fn fn, void *user);

/* ---- Engines ----------------------------------------------------------------------------------------------------- */

typedef struct deepep_engine_info {
  uint32_t struct_size;
  int32_t available;     /* [out] 1: library found and a device can be used */
  int32_t num_devices;   /* [out] */
  int32_t sm90_compiled; /* [out] 1: has code for compute capability 9.0 */
  char name[16];         /* [out] */
  char path[256];        /* [out] of the kernel library */
  char build[64];        /* [out] */
  char reason[512];      /* [out] why it is not available; what was tried */
} deepep_engine_info;
#define DEEPEP_ENGINE_INFO_INIT {sizeof(deepep_engine_info), 0, 0, 0, {0}, {0}, {0}, {0}}
/* local, waits (loads the kernel library). name: "cpu", "cuda", or "auto" = the one that DEEPEP_ENGINE or the machine
 * selects. */
deepep_status_t deepep_engine_query(const char *name, deepep_engine_info *info);

/* ---- Groups ------------------------------------------------------------------------------------------------------ */

typedef struct deepep_group *deepep_group_t;
typedef struct deepep_buffer *deepep_buffer_t;
typedef struct deepep_event *deepep_event_t;

/* Gathers `bytes` bytes of every rank, in rank order, into recv (size * bytes). bytes is the same on all ranks.
 * Returns 0, or anything else for failure. Called on the thread that calls deepep_group_create, once. */
typedef int32_t (*deepep_allgather_fn)(const void *send, void *recv, size_t bytes, void *user);

enum { DEEPEP_BOOTSTRAP_CALLBACK = 0, DEEPEP_BOOTSTRAP_TCP = 1, DEEPEP_BOOTSTRAP_FILE = 2 };

typedef struct deepep_group_options {
  uint32_t struct_size;
  int32_t bootstrap; /* DEEPEP_BOOTSTRAP_* */
  int32_t rank, size;
  deepep_allgather_fn allgather; /* callback */
  void *user;
  const char *address;   /* TCP: "host:port" of rank 0. NULL: MASTER_ADDR and MASTER_PORT */
  const char *directory; /* file: a folder that all ranks see */
  const char *name;      /* file, TCP: distinguishes groups; NULL: "default" */
  int32_t num_nvl_peers; /* ranks of one NVLink domain; 0: DEEPEP_NUM_MAX_NVL_PEERS or 8 */
  int32_t background;    /* 1: return after the one exchange; what remains goes on behind */
  int64_t timeout_ms;    /* for the exchange and the start; 0: default */
} deepep_group_options;
#define DEEPEP_GROUP_OPTIONS_INIT {sizeof(deepep_group_options), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, 0, 0}

/* collective, waits. *group belongs to the caller. Errors: INVALID_ARGUMENT, MISMATCH, TIMEOUT, PEER_DEAD, SYSTEM. */
deepep_status_t deepep_group_create(const deepep_group_options *options, deepep_group_t *group);
/* local, bounded. Buffers of the group stay usable until they are destroyed. NULL is fine. */
deepep_status_t deepep_group_destroy(deepep_group_t group);

/* ---- Buffers ----------------------------------------------------------------------------------------------------- */

typedef struct deepep_buffer_options {
  uint32_t struct_size;
  int32_t device;          /* ordinal; -1: the current one */
  const char *engine;      /* NULL or "auto", "cpu", "cuda" */
  uint64_t num_nvl_bytes;  /* normal mode; see deepep_config_size_hint */
  uint64_t num_rdma_bytes; /* low-latency mode and normal mode between nodes: the larger of their hints */
  int32_t low_latency_mode;
  int32_t num_qps_per_rank; /* queue pairs toward each rank of another node, 1 to 1024; 0: 24. DEEPEP_NUM_QPS_PER_RANK
                               wins */
  int32_t allow_nvlink_for_low_latency_mode; /* 0: low-latency calls go by RDMA to every other rank, those of the own
                                                node too */
  int32_t allow_mnnvl, use_fabric, enable_shrink;
  int32_t preinitialize;    /* do everything now that the first call would do */
  int32_t background;       /* 1: return at once; the first operation waits for the rest */
  int64_t timeout_ms;       /* longest wait for a living peer in a steady call; 0: DEEPEP_TIMEOUT_MS or 100000 */
  int64_t first_timeout_ms; /* in the first call of an operation; 0: DEEPEP_FIRST_TIMEOUT_MS, or timeout_ms if that is
                               given, or 300000 */
} deepep_buffer_options;
#define DEEPEP_BUFFER_OPTIONS_INIT {sizeof(deepep_buffer_options), -1, NULL, 0, 0, 0, 24, 1, 0, 0, 0, 0, 0, 0, 0}

/* collective, waits (unless background). Errors also: OUT_OF_MEMORY, NOT_FOUND, VERSION, DEVICE; UNSUPPORTED: there
 * are several
 * nodes, or NVLink is not allowed, and the engine's library has no transport; or a rank is on a host that it does not
 * reach. */
deepep_status_t deepep_buffer_create(deepep_group_t group, const deepep_buffer_options *options,
                                     deepep_buffer_t *buffer);
/* local, bounded (about 2 s at worst), once is enough. What peers have mapped stays valid for them. NULL is fine. */
deepep_status_t deepep_buffer_destroy(deepep_buffer_t buffer);

typedef struct deepep_buffer_info {
  uint32_t struct_size;
  int32_t rank, size, num_nvl_peers;
  int32_t rdma_rank, num_rdma_ranks, nvl_rank, device;
  int32_t num_device_sms; /* that this process may use */
  int32_t host_stream;    /* 1: streams are NULL, the calling thread ("cpu") */
  int32_t peer_rows;      /* 1: dispatch can write into registered segments */
  int32_t ready;          /* 1: start-up is complete */
  uint64_t num_nvl_bytes, num_rdma_bytes, total_bytes;
  char engine[16], device_name[64];
  void *comm_stream; /* a stream of the engine; NULL with "cpu" */
} deepep_buffer_info;
#define DEEPEP_BUFFER_INFO_INIT {sizeof(deepep_buffer_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, {0}, NULL}
/* local. Before start-up is complete the engine's fields are those known so far. */
deepep_status_t deepep_buffer_info_get(deepep_buffer_t buffer, deepep_buffer_info *info);
/* local, waits up to slice_ms (< 0: until done). OK: ready; PENDING: not yet; else why it failed. */
deepep_status_t deepep_buffer_wait_ready(deepep_buffer_t buffer, int64_t slice_ms);
/* local. OK, or the failure that made the buffer unusable. */
deepep_status_t deepep_buffer_check(deepep_buffer_t buffer);
/* local. The caller's view of the raw region: rdma = 0 nvl, 1 rdma. Free to be overwritten while no call is under
 * way; on GPUs
 * deepep_clean_low_latency_buffer comes before the next low-latency call where anything but zeros was written to the
 * rdma region. */
deepep_status_t deepep_buffer_region(deepep_buffer_t buffer, int32_t rdma, void **address, uint64_t *bytes);

/* Shapes to run once so that the first real call is as fast as the steady one. Zero sizes: that mode is left out. */
typedef struct deepep_warmup_options {
  uint32_t struct_size;
  int32_t num_tokens, hidden, num_topk, num_experts;                 /* normal mode */
  int32_t ll_num_max_tokens, ll_hidden, ll_num_topk, ll_num_experts; /* low-latency mode */
  int32_t use_fp8;
} deepep_warmup_options;
#define DEEPEP_WARMUP_OPTIONS_INIT {sizeof(deepep_warmup_options), 0, 0, 0, 0, 0, 0, 0, 0, 0}
/* collective, waits. */
deepep_status_t deepep_buffer_warmup(deepep_buffer_t buffer, const deepep_warmup_options *options);

/* ---- Events ------------------------------------------------------------------------------------------------------ */

/* local. */
deepep_status_t deepep_event_create(deepep_buffer_t buffer, deepep_event_t *event);
deepep_status_t deepep_event_destroy(deepep_event_t event);
/* local, launches. Marks the present end of `stream`; NULL with "cpu": done at once. */
deepep_status_t deepep_event_record(deepep_event_t event, void *stream);
/* local, launches; with "cpu" waits (the calling thread is the stream). */
deepep_status_t deepep_event_stream_wait(deepep_event_t event, void *stream);
/* local, waits up to slice_ms (0: only asks; < 0: until done). OK: done; PENDING: not yet; else the buffer's failure.
 * */
deepep_status_t deepep_event_wait(deepep_event_t event, int64_t slice_ms);

/* ---- Common to operations ---------------------------------------------------------------------------------------- */

typedef struct deepep_config {
  int32_t num_sms;                          /* even, >= 0; 0: the library's choice */
  int32_t nvl_send_chunk, nvl_recv_chunk;   /* tokens; > 0, send < recv */
  int32_t rdma_send_chunk, rdma_recv_chunk; /* recv a multiple of send and at least twice it */
} deepep_config;
#define DEEPEP_CONFIG_INIT {20, 6, 256, 6, 256}
/* local, pure. Errors: INVALID_ARGUMENT that names the field; rounds rdma_recv_chunk up as V1 does. */
deepep_status_t deepep_config_check(deepep_config *config);
/* local, pure. kind: 0 dispatch, 1 combine; any num_ranks >= 1. */
deepep_status_t deepep_config_default(int32_t kind, int32_t num_ranks, deepep_config *config);
/* local, pure. rdma = 0: nvl bytes, 1: rdma bytes (0 where the ranks are one node). Nodes are those of
 * DEEPEP_NUM_MAX_NVL_PEERS. */
deepep_status_t deepep_config_size_hint(const deepep_config *config, int64_t hidden_bytes, int32_t num_ranks,
                                        int32_t rdma, uint64_t *bytes);
/* local, pure. Bytes of num_rdma_bytes for low-latency calls of this shape. */
deepep_status_t deepep_low_latency_size_hint(int32_t num_max_tokens, int32_t hidden, int32_t num_ranks,
                                             int32_t num_experts, uint64_t *bytes);

/* How a call is ordered. It runs on the buffer's communication stream, after previous_event, or after `stream` if
 * that is NULL.
 * is_async = 0: `stream` then waits for it (with "cpu": the call returns when it is done). 1: the caller waits
 * through *event. */
typedef struct deepep_call {
  uint32_t struct_size;
  int32_t is_async;
  void *stream;                  /* [in] the caller's current stream */
  deepep_event_t previous_event; /* [in] or NULL */
  deepep_event_t event;          /* [in] recorded at the call's end, or NULL. Made by deepep_event_create */
  const deepep_config *config;   /* [in] NULL: the default for this many ranks */
} deepep_call;
#define DEEPEP_CALL_INIT {sizeof(deepep_call), 0, NULL, NULL, NULL, NULL}

enum { DEEPEP_INT32 = 0, DEEPEP_INT64 = 1, DEEPEP_BF16 = 2, DEEPEP_FP8_E4M3 = 3, DEEPEP_FLOAT32 = 4, DEEPEP_UINT8 = 5 };

/* ---- Normal mode ------------------------------------------------------------------------------------------------- */

typedef struct deepep_layout {
  uint32_t struct_size;
  int32_t num_tokens, num_topk, num_experts;
  int32_t index_type;                /* DEEPEP_INT32 or DEEPEP_INT64 */
  const void *topk_idx;              /* [in] [T,K]; -1 selects nothing */
  int32_t *num_tokens_per_rank;      /* [out] [R] */
  int32_t *num_tokens_per_rdma_rank; /* [out] [nodes] or NULL */
  int32_t *num_tokens_per_expert;    /* [out] [E] */
  uint8_t *is_token_in_rank;         /* [out] [T,R] */
} deepep_layout;
#define DEEPEP_LAYOUT_INIT {sizeof(deepep_layout), 0, 0, 0, DEEPEP_INT64, NULL, NULL, NULL, NULL, NULL}
/* local, launches. */
deepep_status_t deepep_get_layout(deepep_buffer_t buffer, const deepep_layout *layout, const deepep_call *call);

/* What dispatch leaves for combine and cached dispatch. Data only: valid on any buffer of the same ranks. The caller
 * owns the memory. */
#define DEEPEP_HANDLE_MAGIC 0x44504548u
#define DEEPEP_HANDLE_VERSION 1u
typedef struct deepep_handle {
  uint32_t struct_size, magic, version;
  int32_t num_ranks;
  int32_t num_tokens;          /* T, at the source */
  int32_t num_recv_tokens;     /* rows of recv_x: N, or num_worst_tokens */
  int32_t *rank_prefix_matrix; /* [R,R]: [i][j] = rows that ranks 0..i send to rank j */
  int32_t *send_head;          /* [T,R]: number of the token's row among mine to that rank, -1: not sent */
  int32_t *recv_src_idx;       /* [N]: the row's token index at its source */
} deepep_handle;
#define DEEPEP_HANDLE_INIT \
  {sizeof(deepep_handle), DEEPEP_HANDLE_MAGIC, DEEPEP_HANDLE_VERSION, 0, 0, 0, NULL, NULL, NULL}

/* First step: exchanges counts, fills handle->rank_prefix_matrix and send_head. */
typedef struct deepep_notify {
  uint32_t struct_size;
  int32_t num_tokens, num_topk, num_experts; /* K = 0: without top-k */
  int32_t expert_alignment;                  /* >= 1 */
  int32_t num_worst_tokens;                  /* > 0: nobody waits for counts */
  int32_t x_type; /* DEEPEP_BF16, DEEPEP_FP8_E4M3: of the dispatch that follows; any 1-, 2-, 4-byte type is moved as it
                     is */
  int32_t num_scales;                   /* S or 0 */
  int64_t hidden;                       /* elements of a row; hidden * itemsize is a multiple of 16 */
  const int32_t *num_tokens_per_rank;   /* [in] [R] */
  const int32_t *num_tokens_per_expert; /* [in] [E] or NULL */
  const uint8_t *is_token_in_rank;      /* [in] [T,R] */
  deepep_handle *handle;                /* [inout] matrices filled on the stream; num_tokens, num_ranks set now */
} deepep_notify;
#define DEEPEP_NOTIFY_INIT {sizeof(deepep_notify), 0, 0, 0, 1, 0, DEEPEP_BF16, 0, 0, NULL, NULL, NULL, NULL}
/* collective, launches. *token names the exchange for deepep_wait_counts and deepep_dispatch. */
deepep_status_t deepep_notify_counts(deepep_buffer_t buffer, const deepep_notify *notify, const deepep_call *call,
                                     uint64_t *token);
/* local, waits up to slice_ms (< 0: until done or failed). *num_recv_tokens = N; per_expert [L] or NULL, each rounded
 * up to
 * expert_alignment. PENDING: not yet. Errors: TIMEOUT, PEER_DEAD, MISMATCH that name the rank. */
deepep_status_t deepep_wait_counts(deepep_buffer_t buffer, uint64_t token, int64_t slice_ms, int32_t *num_recv_tokens,
                                   int32_t *per_expert);

/* Second step: the rows. Cached: the handle of an earlier dispatch, no token, no top-k. */
typedef struct deepep_dispatch_args {
  uint32_t struct_size;
  int32_t cached; /* 1: as the handle says */
  uint64_t token; /* of deepep_notify_counts; 0 when cached */
  int32_t x_type, num_scales;
  int64_t hidden;
  int32_t num_tokens, num_topk, num_experts, index_type;
  int32_t num_worst_tokens;
  int32_t recv_segment; /* recv_x lies in this registered segment; -1: anywhere */
  uint64_t recv_segment_offset;
  const void *x;        /* [in] [T,H] */
  const void *x_scales; /* [in] [T,S] 4-byte elements with the strides below (elements), or NULL */
  int64_t scale_token_stride, scale_stride;
  const void *topk_idx;      /* [in] [T,K] or NULL */
  const float *topk_weights; /* [in] [T,K] or NULL; needs topk_idx */
  deepep_handle *handle;     /* [in] recv_src_idx [out] filled unless cached; num_recv_tokens is N */
  void *recv_x;              /* [out] [N,H] */
  void *recv_x_scales;       /* [out] [N,S] contiguous or NULL */
  void *recv_topk_idx;       /* [out] [N,K] local expert or -1 */
  float *recv_topk_weights;  /* [out] [N,K] */
} deepep_dispatch_args;
#define DEEPEP_DISPATCH_INIT     \
  {sizeof(deepep_dispatch_args), \
   0,                            \
   0,                            \
   DEEPEP_BF16,                  \
   0,                            \
   0,                            \
   0,                            \
   0,                            \
   0,                            \
   DEEPEP_INT64,                 \
   0,                            \
   -1,                           \
   0,                            \
   NULL,                         \
   NULL,                         \
   0,                            \
   0,                            \
   NULL,                         \
   NULL,                         \
   NULL,                         \
   NULL,                         \
   NULL,                         \
   NULL,                         \
   NULL}
/* collective, launches. Rows ordered by source rank, then by token index there. */
deepep_status_t deepep_dispatch(deepep_buffer_t buffer, const deepep_dispatch_args *args, const deepep_call *call);

typedef struct deepep_combine_args {
  uint32_t struct_size;
  int32_t num_topk; /* K of topk_weights, 0: none */
  int64_t hidden;
  int32_t x_segment; /* x lies in this registered segment; -1: anywhere */
  int32_t reserved0;
  uint64_t x_segment_offset;
  const void *x;                /* [in] [N,H] BF16 */
  const float *topk_weights;    /* [in] [N,K] or NULL */
  const void *bias[2];          /* [in] [T,H] BF16 or NULL */
  const deepep_handle *handle;  /* [in] */
  void *combined_x;             /* [out] [T,H] BF16: sum in FP32 of the rows that came from the token, plus biases */
  float *combined_topk_weights; /* [out] [T,K] or NULL */
} deepep_combine_args;
#define DEEPEP_COMBINE_INIT {sizeof(deepep_combine_args), 0, 0, -1, 0, 0, NULL, NULL, {NULL, NULL}, NULL, NULL, NULL}
/* collective, launches. */
deepep_status_t deepep_combine(deepep_buffer_t buffer, const deepep_combine_args *args, const deepep_call *call);

/* ---- Low-latency mode -------------------------------------------------------------------------------------------- */

enum { DEEPEP_SEND = 1, DEEPEP_RECV = 2, DEEPEP_SEND_RECV = 3 };
enum {
  DEEPEP_LL_ROUND_SCALE = 1,
  DEEPEP_LL_UE8M0 = 2,
  DEEPEP_LL_LOGFMT = 4,
  DEEPEP_LL_ZERO_COPY = 8,
  DEEPEP_LL_UNREDUCED = 16
};

typedef struct deepep_ll_dispatch_args {
  uint32_t struct_size;
  int32_t phases;  /* DEEPEP_SEND_RECV; or SEND now and RECV later with the same struct */
  uint32_t ticket; /* [out] of SEND, [in] of RECV */
  int32_t flags;   /* DEEPEP_LL_ROUND_SCALE, DEEPEP_LL_UE8M0 */
  int32_t num_tokens, num_max_tokens, hidden, num_topk, num_experts, index_type;
  int32_t use_fp8;
  int32_t reserved0;
  const void *x;        /* [in] [T,H] BF16 */
  const void *topk_idx; /* [in] [T,K] */
  const float *
      topk_weights; /* [in] [T,K] or NULL: sent along so that combine's send half too may reduce at the expert's rank */
  void *recv_x;     /* [out] [L, R*B, H] BF16 or e4m3 */
  void *recv_x_scales;            /* [out] float32 [L, H/128, R*B] in memory, or int32 [L, H/512, R*B] with UE8M0 */
  int32_t *recv_count;            /* [out] [L] */
  int32_t *src_info;              /* [out] [L, R*B] token index at the source */
  int64_t *layout_range;          /* [out] [L, R]: (first row << 32) | count */
  int32_t *cumulative_recv_stats; /* [inout] [L] += recv_count, or NULL */
  int64_t *wait_recv_cost_stats;  /* [inout] [R] += ns waited for that rank, or NULL */
} deepep_ll_dispatch_args;
#define DEEPEP_LL_DISPATCH_INIT     \
  {sizeof(deepep_ll_dispatch_args), \
   DEEPEP_SEND_RECV,                \
   0,                               \
   0,                               \
   0,                               \
   0,                               \
   0,                               \
   0,                               \
   0,                               \
   DEEPEP_INT64,                    \
   1,                               \
   0,                               \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL,                            \
   NULL}
/* collective, launches. With phases = SEND_RECV on the communication stream as `call` says if it is asynchronous or
 * has a
 * previous_event, else on call->stream, which would only wait for it; halves run on call->stream, and RECV must be
 * issued on the
 * stream of its SEND. At most two sends may be without their receive. args->ticket is written by SEND. */
deepep_status_t deepep_low_latency_dispatch(deepep_buffer_t buffer, deepep_ll_dispatch_args *args,
                                            const deepep_call *call);

typedef struct deepep_ll_combine_args {
  uint32_t struct_size;
  int32_t phases;
  uint32_t ticket;
  int32_t flags; /* DEEPEP_LL_LOGFMT, DEEPEP_LL_ZERO_COPY, DEEPEP_LL_UNREDUCED */
  int32_t num_tokens, num_max_tokens, hidden, num_topk, num_experts, index_type;
  const void *x;                 /* [in] [L, R*B, H] BF16; ignored with ZERO_COPY */
  const void *topk_idx;          /* [in] [T,K] */
  const float *topk_weights;     /* [in] [T,K] */
  const int32_t *src_info;       /* [in] of the dispatch */
  const int64_t *layout_range;   /* [in] of the dispatch */
  void *combined_x;              /* [out] [T,H] BF16 */
  int64_t *wait_recv_cost_stats; /* [inout] [R] or NULL */
} deepep_ll_combine_args;
#define DEEPEP_LL_COMBINE_INIT     \
  {sizeof(deepep_ll_combine_args), \
   DEEPEP_SEND_RECV,               \
   0,                              \
   0,                              \
   0,                              \
   0,                              \
   0,                              \
   0,                              \
   0,                              \
   DEEPEP_INT64,                   \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   NULL}
/* collective, launches. */
deepep_status_t deepep_low_latency_combine(deepep_buffer_t buffer, deepep_ll_combine_args *args,
                                           const deepep_call *call);

/* local. Where the rows of the next combine may be written for DEEPEP_LL_ZERO_COPY: [L, R*B, H] BF16, row_stride
 * bytes apart. */
deepep_status_t deepep_next_low_latency_combine_buffer(deepep_buffer_t buffer, int32_t num_max_tokens, int32_t hidden,
                                                       int32_t num_experts, void **address, uint64_t *row_stride);
/* collective, launches on call->stream. */
deepep_status_t deepep_clean_low_latency_buffer(deepep_buffer_t buffer, int32_t num_max_tokens, int32_t hidden,
                                                int32_t num_experts, const deepep_call *call);
/* collective, launches on call->stream. */
deepep_status_t deepep_barrier(deepep_buffer_t buffer, const deepep_call *call);

/* local, launch on call->stream; need enable_shrink (else INVALID_STATE). 1 = masked: nothing is sent to or awaited
 * from that rank. */
deepep_status_t deepep_update_mask(deepep_buffer_t buffer, int32_t rank, int32_t masked, const deepep_call *call);
deepep_status_t deepep_query_mask(deepep_buffer_t buffer, int32_t *mask_status /* [out] [R] */,
                                  const deepep_call *call);
deepep_status_t deepep_clean_mask(deepep_buffer_t buffer, const deepep_call *call);

/* ---- Segments: memory that peers can write rows into ------------------------------------------------------------- */

/* collective, waits. Allocates `bytes` that every rank maps; *segment is its number in recv_segment and x_segment.
 * Needs peer_rows. */
deepep_status_t deepep_segment_create(deepep_buffer_t buffer, uint64_t bytes, int32_t *segment, void **address);
/* local. The memory is freed once the last user let go: call when no tensor lies in it any more. Works after destroy
 * of the buffer. */
deepep_status_t deepep_segment_release(void *address);

/* Functions for torch's CUDAPluggableAllocator, so that tensors of a torch memory pool lie in a segment. Blocks come
 * from the segment
 * that deepep_pool_select named last on this thread; NULL if that is none, or full. The segment is released with its
 * last block once
 * deepep_pool_close was called. local. */
deepep_status_t deepep_pool_open(
    void *segment); /* the segment is the pool's from now on: deepep_segment_release is not for it */
deepep_status_t deepep_pool_select(void *segment); /* NULL: none */
deepep_status_t deepep_pool_close(void *segment);
void *deepep_pool_allocate(size_t bytes, int device, void *stream);
void deepep_pool_free(void *pointer, size_t bytes, int device, void *stream);

/* ---- Statistics -------------------------------------------------------------------------------------------------- */

enum {
  DEEPEP_OP_LAYOUT = 1,
  DEEPEP_OP_NOTIFY = 2,
  DEEPEP_OP_DISPATCH = 3,
  DEEPEP_OP_COMBINE = 4,
  DEEPEP_OP_LL_DISPATCH = 5,
  DEEPEP_OP_LL_COMBINE = 6,
  DEEPEP_OP_CLEAN = 7,
  DEEPEP_OP_BARRIER = 8,
  DEEPEP_OP_MASK = 9,
  DEEPEP_OP_COUNT = 10
};
typedef struct deepep_op_stats {
  uint32_t struct_size;
  int32_t op;                        /* [in] DEEPEP_OP_* */
  uint64_t calls, errors;            /* [out] */
  uint64_t bytes, wait_ns, total_ns; /* [out] payload bytes sent; waiting for peers; time in the operation's kernels */
  double mean_us, p50_us, p99_us, p999_us, max_us; /* [out] percentiles are upper bounds of histogram buckets */
} deepep_op_stats;
#define DEEPEP_OP_STATS_INIT {sizeof(deepep_op_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/* local. bytes_to_peer and wait_ns_per_peer: [out] [R] or NULL. */
deepep_status_t deepep_stats(deepep_buffer_t buffer, deepep_op_stats *stats, uint64_t *bytes_to_peer,
                             uint64_t *wait_ns_per_peer);

#ifdef __cplusplus
}
#endif
#endif
