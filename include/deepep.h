/* deepep.h - expert-parallel dispatch and combine. C99, no dependency.
 *
 * Codes: a function returns a deepep_status_t, 0 for success; deepep_last_error() has the text of the thread's last
 * failure. Every such function may return INVALID_ARGUMENT (an argument is wrong, or a handle is not live), FORK and
 * INTERNAL. "Returns:" in a function's comment lists its other codes, without the prefix DEEPEP_ERROR_, where
 *
 *   - start-up: what deepep_buffer_create may return. With background = 1 the first call that needs the buffer
 *     returns it.
 *   - failure: what ended an operation of the buffer: TIMEOUT, PEER_DEAD, MISMATCH or DEVICE.
 *
 * Structs begin with struct_size: set it through the *_INIT macro. The library completes a struct of an earlier version
 * with defaults, and accepts a larger one if the part that it does not know is zero.
 *
 * Tensors are given by address, in memory of the buffer's engine: device memory with "cuda", plain memory with "cpu".
 * A tensor must stay valid until the event of the call that it was given to is done; the library keeps no address.
 * Shapes are written [in], [out] or [inout], then shape and type: T tokens of this rank, R ranks, E experts, L = E / R
 * local experts, K top-k, H hidden, S scales of a row, B = num_max_dispatch_tokens_per_rank, N received rows. Tensors
 * are row-major, and contiguous unless strides are given.
 *
 * Streams are void *: a cudaStream_t with "cuda"; with "cpu" NULL, which is the calling thread.
 *
 * Words that begin a function's comment:
 *
 *   - collective: every rank of the group calls it, in the same order.
 *   - local: only this rank takes part.
 *   - launches: enqueues work and does not wait for peers (with "cpu" and is_async = 0 it waits for its own work).
 *   - waits: may block the calling thread up to its timeout.
 *
 * Threads: any thread may call any function. The library serialises the calls on one buffer.
 *
 * Compatibility: a function, a constant, a field keeps its place and meaning for as long as the version promises: from
 * 1.0 on within a major version, whose soname is libdeepep.so.MAJOR; before that within a minor one. Additions are
 * functions, constants, fields at the end of a struct with struct_size, names for reserved fields; zero there means
 * what was before. A program and its library need not be of one version; the ranks of a group and their kernel
 * libraries must be. docs/compatibility.md has the whole promise, which `make abi-check` holds.
 *
 * fork: in a child of a process that has loaded the library (linking it loads it) every function returns FORK.
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
/* local. Name of a code, such as "DEEPEP_ERROR_TIMEOUT"; "unknown" for a number that is no code. A static string. */
const char *deepep_status_name(deepep_status_t status);
/* local. Text of a code, as in DEEPEP_STATUS_MAP; "unknown" for a number that is no code. A static string. */
const char *deepep_status_text(deepep_status_t status);
/* local. Text of this thread's last failed call, "" if there is none. Valid until the thread's next call. */
const char *deepep_last_error(void);

/* Takes log lines. level: 0 debug, 1 info, 2 warn, 3 error. The library may call it from threads of its own. */
typedef void (*deepep_log_fn)(int32_t level, const char *message, void *user);
/* local. From now on `fn` takes the log lines instead of the place that DEEPEP_LOG names; NULL: that place again. */
deepep_status_t deepep_set_log_callback(deepep_log_fn fn, void *user);

/* ---- Engines ----------------------------------------------------------------------------------------------------- */

typedef struct deepep_engine_info {
  uint32_t struct_size;
  int32_t available;     /* [out] 1: the kernel library was loaded and has a device */
  int32_t num_devices;   /* [out] */
  int32_t sm90_compiled; /* [out] 1: has code for compute capability 9.0 */
  char name[16];         /* [out] "cpu" or "cuda", also for "auto" */
  char path[256];        /* [out] of the kernel library */
  char build[64];        /* [out] build id; ranks of a group must have the same */
  char reason[512];      /* [out] why it is not available, and what was tried */
} deepep_engine_info;
#define DEEPEP_ENGINE_INFO_INIT {sizeof(deepep_engine_info), 0, 0, 0, {0}, {0}, {0}, {0}}
/* local, waits (loads the kernel library). name: "cpu", "cuda", or "auto": the one that DEEPEP_ENGINE names, else
 * "cuda" where a device is found, else "cpu". An engine that cannot be used is no error: see `available`. */
deepep_status_t deepep_engine_query(const char *name, deepep_engine_info *info);

/* ---- Groups ------------------------------------------------------------------------------------------------------ */

typedef struct deepep_group *deepep_group_t;
typedef struct deepep_buffer *deepep_buffer_t;
typedef struct deepep_event *deepep_event_t;

/* Gathers `bytes` bytes of every rank, in rank order, into recv (size * bytes). bytes is the same on all ranks. Returns
 * 0, or any other number for failure. deepep_group_create calls it once, on the thread that called it. */
typedef int32_t (*deepep_allgather_fn)(const void *send, void *recv, size_t bytes, void *user);

/* How the ranks of a group find each other. */
enum { DEEPEP_BOOTSTRAP_CALLBACK = 0, DEEPEP_BOOTSTRAP_TCP = 1, DEEPEP_BOOTSTRAP_FILE = 2, DEEPEP_BOOTSTRAP_JOIN = 3 };

typedef struct deepep_group_options {
  uint32_t struct_size;
  int32_t bootstrap;  /* DEEPEP_BOOTSTRAP_*. JOIN: the process takes a place in the group of a buffer; see regroup */
  int32_t rank, size; /* JOIN: the lost rank whose place it asks for, or -1 for any; size is ignored */
  deepep_allgather_fn allgather; /* callback */
  void *user;                    /* callback: passed to allgather */
  const char *address;           /* TCP: "host:port" of rank 0. NULL: MASTER_ADDR and MASTER_PORT */
  const char *directory;         /* file: a folder that all ranks see */
  /* file, TCP: distinguishes groups; NULL: "default". TCP: also the secret by which ranks are let in; with
     DEEPEP_INTERFACE "default" is refused. JOIN: the key, of deepep_buffer_join_key. */
  const char *name;
  int32_t num_nvl_peers; /* ranks of one NVLink domain; 0: DEEPEP_NUM_MAX_NVL_PEERS or 8 */
  int32_t background;    /* 1: return after the one exchange; the rest of the start-up goes on meanwhile */
  int64_t timeout_ms;    /* limit of the exchange and the start-up; 0: DEEPEP_FIRST_TIMEOUT_MS or 300000 */
  /* JOIN: of the buffer to come: loaded and opened before the process asks to be let in, so that the others do not
   * wait. As in deepep_buffer_options. */
  const char *engine;
  int32_t device, reserved0;
} deepep_group_options;
#define DEEPEP_GROUP_OPTIONS_INIT \
  {sizeof(deepep_group_options), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, NULL, -1, 0}

/* collective, waits. *group belongs to the caller. With JOIN it returns once the members have called
 * deepep_buffer_regroup, which waits for this process: it creates its buffer at once, with the members' options.
 * Returns: MISMATCH, TIMEOUT, PEER_DEAD, SYSTEM. */
deepep_status_t deepep_group_create(const deepep_group_options *options, deepep_group_t *group);
/* local, bounded. Buffers of the group stay usable until they are destroyed. NULL is fine. Returns: SYSTEM. */
deepep_status_t deepep_group_destroy(deepep_group_t group);

/* ---- Buffers ----------------------------------------------------------------------------------------------------- */

typedef struct deepep_buffer_options {
  uint32_t struct_size;
  int32_t device;           /* ordinal; -1: the current one */
  const char *engine;       /* NULL or "auto", "cpu", "cuda" */
  uint64_t num_nvl_bytes;   /* normal mode; see deepep_config_size_hint */
  uint64_t num_rdma_bytes;  /* low-latency mode and normal mode between nodes: the larger of their hints */
  int32_t low_latency_mode; /* 1: low-latency calls are allowed */
  int32_t num_qps_per_rank; /* queue pairs toward each rank of another node, 1 to 1024; 0: 24. The variable
                               DEEPEP_NUM_QPS_PER_RANK, if set, wins */
  int32_t allow_nvlink_for_low_latency_mode; /* 0: low-latency calls reach also ranks of this node by RDMA */
  int32_t allow_mnnvl;                       /* 1: "cuda", several nodes: NVSHMEM may use NVLink between hosts */
  int32_t use_fabric;                        /* 1: refused (UNSUPPORTED): memory is shared by file descriptors */
  int32_t enable_shrink;                     /* 1: calls go on without lost ranks, which are masked */
  int32_t preinitialize;                     /* 1: bring memory in now that the first calls would bring in: on GPUs the
                                                regions, with "cpu" up to DEEPEP_PREINIT_BYTES (256 MiB) */
  int32_t background;                        /* 1: return at once; the first operation waits for the start-up */
  /* Longest wait for a peer in a call that is not the first of its operation; 0: DEEPEP_TIMEOUT_MS or 100000. */
  int64_t timeout_ms;
  /* In the first call of an operation; 0: DEEPEP_FIRST_TIMEOUT_MS, or timeout_ms if that is given, or 300000. */
  int64_t first_timeout_ms;
  /* The shape of the calls to come, for deepep_buffer_warmup; 0: not known. */
  int32_t num_tokens; /* T; in low-latency mode also B */
  int32_t hidden, num_topk, num_experts;
} deepep_buffer_options;
/* clang-format off */
#define DEEPEP_BUFFER_OPTIONS_INIT \
  {sizeof(deepep_buffer_options), -1, NULL, 0, 0, 0, 24, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/* clang-format on */

/* collective, waits (unless background). Returns: MISMATCH, TIMEOUT, PEER_DEAD, SYSTEM, OUT_OF_MEMORY, NOT_FOUND,
 * VERSION, DEVICE; UNSUPPORTED: ranks lie on several nodes, or NVLink is not allowed, and the engine's library has no
 * transport, or its transport does not reach a rank's host. */
deepep_status_t deepep_buffer_create(deepep_group_t group, const deepep_buffer_options *options,
                                     deepep_buffer_t *buffer);
/* local, bounded (about 2 s at worst); once is enough. Memory that peers have mapped stays valid for them. All ranks
 * free a transport's memory together: the process's end waits up to 2 s for what is not free by then, and else leaves
 * out what was registered for it before. NULL is fine. Returns: TIMEOUT: work did not end, its memory is lost; SYSTEM,
 * DEVICE. */
deepep_status_t deepep_buffer_destroy(deepep_buffer_t buffer);

typedef struct deepep_buffer_info {
  uint32_t struct_size;
  int32_t rank, size, num_nvl_peers;
  int32_t rdma_rank, num_rdma_ranks, nvl_rank; /* node of this rank, number of nodes, place in the node */
  int32_t device;
  int32_t num_device_sms; /* that this process may use */
  int32_t host_stream;    /* 1: streams are NULL, the calling thread ("cpu") */
  int32_t peer_rows;      /* 1: dispatch can write into registered segments */
  int32_t ready;          /* 1: start-up is complete */
  uint64_t num_nvl_bytes, num_rdma_bytes, total_bytes;
  char engine[16], device_name[64];
  void *comm_stream; /* the buffer's communication stream; NULL with "cpu" */
  /* The kernel library's own regions: flags and counts, staging. */
  uint64_t control_bytes, wire_bytes;
  /* Of the segment for received rows that DEEPEP_ZERO_COPY_BYTES asks for; 0 without peer_rows. deepep_segment_create
   * makes it. */
  uint64_t row_segment_bytes;
  int32_t num_qp_peers;     /* ranks that this one reaches through queue pairs */
  int32_t num_qps_per_peer; /* queue pairs toward each of them, which calls use in turn */
  int32_t qp_depth;         /* operations in flight on one of them */
  int32_t num_nics;         /* of this rank; the software RDMA is one */
  int32_t num_qps_per_nic;  /* toward each peer, on each NIC */
  int32_t num_qps;          /* in all; NVSHMEM makes them toward all other ranks, also inside a node */
  int64_t timeout_ms, first_timeout_ms;
  /* This rank's RDMA sub-team, the rank of its place on each node: start, start + stride ... , size of them. Rows of
   * normal mode cross between these ranks alone. On one node it is this rank. */
  int32_t rdma_team_start, rdma_team_stride, rdma_team_size, reserved0;
  int32_t ll_copies;     /* 1: copy engines move rows of low-latency halves (DEEPEP_LL_TRANSFER); 0: SMs do */
  int32_t normal_copies; /* 1: copy engines move rows of normal mode where a call allows it (DEEPEP_NORMAL_TRANSFER) */
  int32_t ll_on_stream;  /* 1: low-latency calls in halves run whole on comm_stream (DEEPEP_LL_TRANSFER=stream) */
  int32_t reserved1;
} deepep_buffer_info;
/* clang-format off */
#define DEEPEP_BUFFER_INFO_INIT                                                                                     \
  {sizeof(deepep_buffer_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, {0}, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
   0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/* clang-format on */
/* local. Never waits: before start-up is complete, fields that are not known yet are 0. */
deepep_status_t deepep_buffer_info_get(deepep_buffer_t buffer, deepep_buffer_info *info);
/* local, waits up to slice_ms (< 0: until done). OK: start-up is complete. Returns: PENDING: not yet; start-up. */
deepep_status_t deepep_buffer_wait_ready(deepep_buffer_t buffer, int64_t slice_ms);
/* local. OK, or the failure that made the buffer unusable; or, once, the error of an earlier call that the kernels have
 * refused (INVALID_ARGUMENT, MISMATCH), after which the buffer works on; or, once, INVALID_STATE after a replay of a
 * graph of before deepep_buffer_regroup. Returns: INVALID_STATE; failure. */
deepep_status_t deepep_buffer_check(deepep_buffer_t buffer);
/* local. Address and size of a raw region of this rank; rdma: 0 the nvl region, 1 the rdma region. The caller may
 * overwrite it while no call is in flight; if calls have a routing, none on any rank, for a peer's rows may be here
 * before this rank's call. On GPUs, after writing anything but zeros to the rdma region, call
 * deepep_clean_low_latency_buffer before the next low-latency call. Returns: INVALID_STATE; start-up. */
deepep_status_t deepep_buffer_region(deepep_buffer_t buffer, int32_t rdma, void **address, uint64_t *bytes);
/* local, waits up to slice_ms (< 0: until done) for this rank's calls in flight. Gives back the memory of the buffer,
 * of this device and of this host, and keeps its addresses and the group; all of it is free once every rank has called.
 * Until deepep_buffer_restore calls are refused, replays of graphs that were captured before leave at once (counts 0,
 * sums NaN), and what a caller writes into a region is lost. Segments: peers let go of them, their numbers end, each
 * rank's own memory stays until deepep_segment_release. Once released: OK. Returns: PENDING: calls are in flight;
 * INVALID_STATE: a low-latency call is without its receive half, a graph is being captured, destroyed; UNSUPPORTED:
 * GPUs on several nodes, or without virtual memory; start-up. */
deepep_status_t deepep_buffer_release(deepep_buffer_t buffer, int64_t slice_ms);
/* collective, waits up to slice_ms (< 0: until done). The memory again, zeroed, at the same addresses; calls are
 * numbered anew, masks are lifted, a failure of before is over, statistics go on. Handles and tokens of before are
 * refused; graphs of before may be replayed. Not released: OK. Returns: PENDING: it goes on, call again; OUT_OF_MEMORY,
 * PEER_DEAD, TIMEOUT with the ranks: the buffer stays released, and every rank may call again; INVALID_STATE: a peer
 * has released, this rank has not; destroyed. */
deepep_status_t deepep_buffer_restore(deepep_buffer_t buffer, int64_t slice_ms);

/* ---- Regroup: buffers go on without lost ranks, and take new processes in -----------------------------------------
 */

#define DEEPEP_JOIN_KEY_BYTES 64
/* local. Writes the text by which processes of this host and user find the buffer (DEEPEP_BOOTSTRAP_JOIN), ended by 0,
 * and from now on lets this rank hear of them. It is the same on all ranks and stays with regroup. A process comes to
 * whichever member lives and has called this. bytes: of `key`, at least DEEPEP_JOIN_KEY_BYTES. Returns: SYSTEM. */
deepep_status_t deepep_buffer_join_key(deepep_buffer_t buffer, char *key, uint64_t bytes);
/* The processes that wait to be let in: *num_joins of them [out], and in ranks [capacity, out; may be NULL] the lost
 * rank that each asks for, ascending, -1 for any. agreed 0: local, those that wait at this rank; ranks see them at
 * different times. agreed 1: collective among the ranks that live, waits; all get the same. Returns: TIMEOUT. */
deepep_status_t deepep_buffer_pending_joins(deepep_buffer_t buffer, int32_t agreed, int32_t capacity, int32_t *ranks,
                                            int32_t *num_joins);

/* local. The ranks that have died or left, or whose place is empty, as far as this rank has heard: *num_lost of them
 * [out], and in ranks [capacity, out; may be NULL] their numbers, ascending. Returns: INVALID_STATE; start-up. */
deepep_status_t deepep_buffer_lost_ranks(deepep_buffer_t buffer, int32_t capacity, int32_t *ranks, int32_t *num_lost);

typedef struct deepep_regroup_options {
  uint32_t struct_size;
  /* Of the new group, by their present numbers. One that is lost, or with renumber a number from the group's size on,
   * stands for a process that waits to join. */
  int32_t num_members;
  const int32_t *members;
  /* 1: a member's place in the list is its new number. 0: numbers stay, and a rank that is not in the list stays as a
   * masked place, which needs enable_shrink. */
  int32_t renumber, reserved0;
  int64_t timeout_ms; /* 0: DEEPEP_FIRST_TIMEOUT_MS or 300000 */
} deepep_regroup_options;
#define DEEPEP_REGROUP_OPTIONS_INIT {sizeof(deepep_regroup_options), 0, NULL, 0, 0, 0}
/* collective among the members that live, waits. Moves the buffer into a group of these and of the processes that join,
 * over the library's own channel. Calls that still run are aborted; memory that fits, the communication stream, events
 * and the callers' segments' own memory stay; masks, statistics, tokens and tickets begin anew, and segments are no
 * segments of the buffer any more. deepep_buffer_info_get then gives the new rank and size. Handles of before are
 * refused if ranks were renumbered; replays of graphs of before leave at once. The group handle that the buffer was
 * created with keeps its old group. Returns: MISMATCH: members disagree; TIMEOUT, PEER_DEAD: a member is late or died;
 * INVALID_STATE: no process waits for a lost rank's place; UNSUPPORTED: GPUs of several nodes (NVSHMEM). After an error
 * it may be called again; where ranks had stopped their calls by then, calls are refused until it succeeds. */
deepep_status_t deepep_buffer_regroup(deepep_buffer_t buffer, const deepep_regroup_options *options);

/* Bytes of a V2 buffer are a multiple of it. */
#define DEEPEP_ELASTIC_UNIT 2097152
/* A buffer of V2 (ElasticBuffer in Python): by the shape of its calls, or by num_bytes. */
typedef struct deepep_elastic_options {
  uint32_t struct_size;
  int32_t num_ranks;          /* R, 1 or more; in deepep_plan the plan's */
  int32_t num_nvl_peers;      /* as in deepep_group_options; in deepep_plan the plan's */
  int32_t num_max_tokens;     /* M, the most tokens that a rank dispatches; 0 with num_bytes: not known */
  int32_t hidden;             /* H; 0 with num_bytes: not known */
  int32_t num_topk;           /* K; 0: 32 */
  int32_t use_fp8_dispatch;   /* 1: for rows of FP8 with scales */
  int32_t unreduced;          /* 1: combine sends a row back for each choice (allow_multiple_reduction=False) */
  int32_t is_direct;          /* 1: one logical domain of all ranks (allow_hybrid_mode=False) */
  int32_t num_allocated_qps;  /* 0: 129 with several logical domains, else 17 */
  int32_t num_sms;            /* for num_qps; 0: the answer's */
  int32_t num_device_sms;     /* of the GPU; 0: not known */
  int32_t compute_capability; /* 10 * major + minor of the GPU; 0: "cpu"; in deepep_plan the plan's */
  uint64_t num_bytes;         /* a multiple of DEEPEP_ELASTIC_UNIT; 0: what the shape needs */
} deepep_elastic_options;
#define DEEPEP_ELASTIC_OPTIONS_INIT {sizeof(deepep_elastic_options), 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct deepep_elastic_info {
  uint32_t struct_size;
  int32_t num_sms;            /* [out] get_theoretical_num_sms: even, 4 or more */
  int32_t num_allocated_qps;  /* [out] queue pairs that calls may name */
  int32_t num_qps;            /* [out] get_theoretical_num_qps */
  uint64_t num_bytes;         /* [out] get_buffer_size_hint */
  uint64_t num_nvl_bytes;     /* [out] of the buffer: staging */
  uint64_t num_rdma_bytes;    /* [out] of the buffer; 0 on one node */
  uint64_t row_segment_bytes; /* [out] rows that peers write in place; GPUs alone have it */
} deepep_elastic_info;
#define DEEPEP_ELASTIC_INFO_INIT {sizeof(deepep_elastic_info), 0, 0, 0, 0, 0, 0, 0}
/* local. Says how large a buffer of V2 is, how it is divided, and what its calls take. Needs neither a GPU nor peers.
 * deepep_buffer_create with num_nvl_bytes and num_rdma_bytes of it makes that buffer. */
deepep_status_t deepep_elastic_sizes(const deepep_elastic_options *options, deepep_elastic_info *info);

/* A rank of a group, its buffer and the calls on it, none of which need exist. */
typedef struct deepep_plan_options {
  uint32_t struct_size;
  int32_t rank, size;
  int32_t num_nvl_peers;      /* as in deepep_group_options */
  int32_t num_nics;           /* of a rank; 0: as the settings say, else 1 */
  int32_t num_local_ranks;    /* ranks that share a host's NICs; 0: as many as a node has */
  int32_t compute_capability; /* of the GPUs, 10 * major + minor; 0: 90 */
  int32_t num_tokens;         /* T of normal-mode calls; 0: there are none */
  int32_t num_max_tokens;     /* B of low-latency calls, for which the buffer is then made; 0: there are none */
  int32_t hidden;             /* H, in BF16 */
  int32_t num_topk;           /* K */
  int32_t num_experts;        /* E */
  int32_t num_sms;            /* of normal-mode calls, even; 0: the library's choice */
  /* As for deepep_buffer_create; NULL: the defaults. With num_nvl_bytes and num_rdma_bytes both 0 the sizes are the
   * hints for the calls. */
  const deepep_buffer_options *buffer;
  /* The plan is for a buffer of V2, whose sizes are its hints; NULL: it is not. */
  const deepep_elastic_options *elastic;
} deepep_plan_options;
#define DEEPEP_PLAN_OPTIONS_INIT {sizeof(deepep_plan_options), 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL}

typedef struct deepep_plan_info {
  uint32_t struct_size;
  /* [out] Nodes, ranks of a node, node of this rank, its place in the node. */
  int32_t num_rdma_ranks, num_nvl_peers, rdma_rank, nvl_rank;
  int32_t num_local_experts; /* [out] L */
  int32_t num_channels;      /* [out] of normal-mode calls: pairs of SMs */
  /* [out] Of normal-mode calls without a number of their own. */
  int32_t dispatch_sms_fp8, dispatch_sms_bf16, combine_sms;
  /* [out] As in deepep_buffer_info. */
  int32_t num_qp_peers, num_qps_per_peer, qp_depth, num_nics, num_qps_per_nic, num_qps;
  int32_t num_qps_used;         /* [out] queue pairs toward a peer that the calls have use for */
  int32_t qp_depth_for_tokens;  /* [out] with which no low-latency call waits for room; 0: none is so deep */
  uint64_t nvl_hint, rdma_hint; /* [out] num_nvl_bytes and num_rdma_bytes that normal-mode calls should have */
  uint64_t low_latency_hint;    /* [out] num_rdma_bytes that low-latency calls need */
  uint64_t num_nvl_bytes;       /* [out] of the buffer */
  uint64_t num_rdma_bytes;      /* [out] of the buffer */
  uint64_t control_bytes;       /* [out] flags and counts of the kernel library */
  uint64_t wire_bytes;          /* [out] staging of the kernel library */
  uint64_t total_bytes;         /* [out] all of the buffer; a device rounds it up to its unit */
  uint64_t row_segment_bytes;   /* [out] as in deepep_buffer_info */
  uint64_t output_bytes_fp8;    /* [out] rows and scales that one low-latency dispatch returns */
  uint64_t output_bytes_bf16;   /* [out] likewise */
  int64_t timeout_ms;           /* [out] of a wait for a peer */
  int64_t first_timeout_ms;     /* [out] in the first call of an operation */
  char engine[16];              /* [out] "cpu" or "cuda", also for "auto" */
  char library[64]; /* [out] file of the kernel library. "": control_bytes and wire_bytes are 0, see reason */
  char reason[512]; /* [out] why no kernel library can be loaded */
  /* [out] With elastic, as in deepep_elastic_info; row_segment_bytes is that of V2 then, 0 with "cpu". */
  uint64_t elastic_bytes;
  int32_t elastic_sms, elastic_qps;
} deepep_plan_info;
/* clang-format off */
#define DEEPEP_PLAN_INFO_INIT                                                                                      \
  {sizeof(deepep_plan_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
   0, {0}, {0}, {0}, 0, 0, 0}
/* clang-format on */
/* local. Says what deepep_buffer_create would make of the same options, by the same settings of the environment, and
 * refuses what that or the calls would refuse. It needs neither a GPU nor peers. Returns: UNSUPPORTED, as
 * deepep_buffer_create. qp_order: [out] [size - 1] or NULL: the peers with queue pairs, in the order in which those
 * are made; past num_qp_peers entries stay as they are. */
deepep_status_t deepep_plan(const deepep_plan_options *options, deepep_plan_info *plan, int32_t *qp_order);

/* What a warm-up runs. A mode is planned if one of its four sizes is given; where neither is, every mode that the
 * buffer allows is. A size of 0 is that of the buffer's options, else that of the size hint which this process asked
 * for and which fits the buffer's bytes, else the largest that the buffer's memory holds and the limits allow. All
 * ranks give the same; where what they know differs, rank 0's counts. */
typedef struct deepep_warmup_options {
  uint32_t struct_size;
  int32_t num_tokens, hidden, num_topk, num_experts;                 /* normal mode */
  int32_t ll_num_max_tokens, ll_hidden, ll_num_topk, ll_num_experts; /* low-latency mode */
  int32_t use_fp8;                                                   /* 1: dispatch rows as FP8 with scales */
  /* Time after which no larger number of tokens is tried where it was not known; 0: 2000. */
  int32_t max_ms;
  int32_t part; /* DEEPEP_WARMUP_* */
  /* Bytes of tensors of a rank. 0: 1 GiB where a shape was not known, no limit where it was. */
  uint64_t max_bytes;
} deepep_warmup_options;
#define DEEPEP_WARMUP_OPTIONS_INIT {sizeof(deepep_warmup_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/* Parts of a warm-up: a language's interface that makes calls of its own for it makes them between two parts. */
enum {
  DEEPEP_WARMUP_WHOLE = 0,
  DEEPEP_WARMUP_BEGIN = 1, /* as WHOLE, and calls from now on still belong to it */
  DEEPEP_WARMUP_END = 2    /* ends it: the next calls are first calls */
};
/* collective, waits. Makes calls of each planned mode on memory of its own, as often as both slots need, so that the
 * first real call is as fast as a later one. What it did is in deepep_buffer_startup_report, and in the log (info).
 * Returns: MISMATCH, INVALID_STATE, OUT_OF_MEMORY, ABORTED; start-up; failure. */
deepep_status_t deepep_buffer_warmup(deepep_buffer_t buffer, const deepep_warmup_options *options);

/* When start-up work was done, for the arrays of deepep_startup_report. */
enum {
  DEEPEP_START_CONSTRUCTION = 0,
  DEEPEP_START_WARMUP = 1,
  DEEPEP_START_FIRST_CALLS = 2 /* the first call of each operation since construction or the last warm-up */
};
/* How a warm-up knew its shape; of its four sizes the one that was least certain. */
enum {
  DEEPEP_SHAPE_NONE = 0, /* the mode was not warmed */
  DEEPEP_SHAPE_GIVEN = 1,
  DEEPEP_SHAPE_OPTIONS = 2, /* the buffer's options */
  DEEPEP_SHAPE_HINT = 3,    /* a size hint that this process asked for */
  DEEPEP_SHAPE_REGION = 4   /* the largest that the buffer's memory holds and the limits allow */
};
/* Where the time of start-up goes. Times are this rank's, in ns. */
typedef struct deepep_startup_report {
  uint32_t struct_size;
  int32_t preinitialized;                                            /* [out] 1: the buffer was made so */
  int32_t num_warmups;                                               /* [out] that have ended */
  int32_t shape_from, ll_shape_from;                                 /* [out] DEEPEP_SHAPE_* of the last warm-up */
  int32_t num_tokens, hidden, num_topk, num_experts;                 /* [out] its normal mode; T is what was reached */
  int32_t ll_num_max_tokens, ll_hidden, ll_num_topk, ll_num_experts; /* [out] its low-latency mode */
  int32_t use_fp8;                                                   /* [out] of the last warm-up */
  /* [out] by DEEPEP_START_*: opening the kernel library and the device, and loading the kernels. */
  uint64_t load_ns[3];
  /* [out] allocating, mapping and bringing in memory. First calls: page_faults, each at what a new page costs here. */
  uint64_t memory_ns[3];
  uint64_t connect_ns[3]; /* [out] joining the group, exchanges among the ranks, queue pairs */
  uint64_t launch_ns[3];  /* [out] warm-up: its calls. First calls: the host's time in their launches */
  uint64_t language_ns;   /* [out] warm-up: calls between its two parts */
  uint64_t bytes[3];      /* [out] of the memory that was brought in, or that a warm-up's tensors took */
  /* [out] of this process meanwhile; first calls: from launch to end, on GPUs the calling thread's in the launch. */
  uint64_t page_faults[3];
  /* [out] by DEEPEP_OP_*: time in the kernels of the first call, and the mean of those after it; 0: not known yet. */
  uint64_t first_ns[10], later_ns[10];
} deepep_startup_report;
#define DEEPEP_STARTUP_REPORT_INIT \
  {sizeof(deepep_startup_report), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, {0}, {0}, {0}, 0, {0}, {0}, {0}, {0}}
/* local. Waits for no call; on GPUs it may wait up to 50 ms for a busy device. Returns: INVALID_STATE, DEVICE;
 * start-up. */
deepep_status_t deepep_buffer_startup_report(deepep_buffer_t buffer, deepep_startup_report *report);

/* ---- Events ------------------------------------------------------------------------------------------------------ */

/* local. *event belongs to the caller and counts as done until it is recorded. Returns: INVALID_STATE, DEVICE;
 * start-up. */
deepep_status_t deepep_event_create(deepep_buffer_t buffer, deepep_event_t *event);
/* local. Work that waits for the event is not affected. NULL is fine. Returns: DEVICE. */
deepep_status_t deepep_event_destroy(deepep_event_t event);
/* local, launches. Marks the present end of `stream`; NULL with "cpu": done at once. Returns: DEVICE. */
deepep_status_t deepep_event_record(deepep_event_t event, void *stream);
/* local, launches: `stream` waits for the event. With "cpu" the calling thread is the stream: the call waits. Returns:
 * DEVICE; with "cpu" failure. */
deepep_status_t deepep_event_stream_wait(deepep_event_t event, void *stream);
/* local, waits up to slice_ms (0: only asks; < 0: until done). OK: the event is done and the buffer has not failed.
 * Returns: PENDING: not yet; DEVICE; failure; unless it only asks, once the error of a refused call, as
 * deepep_buffer_check. */
deepep_status_t deepep_event_wait(deepep_event_t event, int64_t slice_ms);

/* ---- Common to operations ---------------------------------------------------------------------------------------- */

/* How a normal-mode call spends SMs and cuts its transfers. Chunks count tokens. */
typedef struct deepep_config {
  int32_t num_sms;         /* even, 0 or more; 0: the library's choice */
  int32_t nvl_send_chunk;  /* over NVLink: 1 or more, less than nvl_recv_chunk */
  int32_t nvl_recv_chunk;  /* over NVLink: room at the receiver */
  int32_t rdma_send_chunk; /* over RDMA: 1 or more */
  int32_t rdma_recv_chunk; /* over RDMA: a multiple of rdma_send_chunk, at least twice it */
} deepep_config;
#define DEEPEP_CONFIG_INIT {20, 6, 256, 6, 256}
/* local, pure. INVALID_ARGUMENT names the field. Rounds rdma_recv_chunk up to a multiple of rdma_send_chunk, as V1 of
 * DeepEP does. */
deepep_status_t deepep_config_check(deepep_config *config);
/* local, pure. The default for num_ranks ranks, 1 or more. kind: 0 dispatch, 1 combine. */
deepep_status_t deepep_config_default(int32_t kind, int32_t num_ranks, deepep_config *config);
/* local, pure. Bytes that rows of hidden_bytes need with this config; rdma: 0 for num_nvl_bytes, 1 for num_rdma_bytes
 * (0 where the ranks are one node). DEEPEP_NUM_MAX_NVL_PEERS says how many ranks are a node. */
deepep_status_t deepep_config_size_hint(const deepep_config *config, int64_t hidden_bytes, int32_t num_ranks,
                                        int32_t rdma, uint64_t *bytes);
/* local. Bytes of num_rdma_bytes for low-latency calls of this shape. INVALID_ARGUMENT names also the limits of the
 * kernel library that DEEPEP_ENGINE or the machine selects, if it can be loaded. */
deepep_status_t deepep_low_latency_size_hint(int32_t num_max_tokens, int32_t hidden, int32_t num_ranks,
                                             int32_t num_experts, uint64_t *bytes);

/* How a call is ordered. It runs on the buffer's communication stream, after previous_event, or without one after the
 * present end of `stream`. */
typedef struct deepep_call {
  uint32_t struct_size;
  int32_t is_async;              /* 0: `stream` waits for the call (with "cpu" the call returns when it is done); 1: the
                                    caller waits through `event` */
  void *stream;                  /* [in] the caller's current stream */
  deepep_event_t previous_event; /* [in] or NULL */
  deepep_event_t event;          /* [in] recorded at the call's end, or NULL. Made by deepep_event_create */
  const deepep_config *config;   /* [in] NULL: the chunks of deepep_config_default, and the library's choice of SMs */
} deepep_call;
#define DEEPEP_CALL_INIT {sizeof(deepep_call), 0, NULL, NULL, NULL, NULL}

/* Element types. */
enum {
  DEEPEP_INT32 = 0,
  DEEPEP_INT64 = 1,
  DEEPEP_BF16 = 2,
  DEEPEP_FP8_E4M3 = 3, /* 8 bits: sign, 4 of exponent, 3 of mantissa */
  DEEPEP_FLOAT32 = 4,
  DEEPEP_UINT8 = 5
};

/* ---- Normal mode ------------------------------------------------------------------------------------------------- */

/* Operations return, beside what is listed: INVALID_STATE (the buffer was destroyed), ABORTED (an earlier operation of
 * the buffer failed), DEVICE; start-up. With "cpu" and is_async = 0 they wait, and return failure as well. */

/* Arguments of deepep_get_layout, which counts how many of this rank's tokens go to each rank and expert. */
typedef struct deepep_layout {
  uint32_t struct_size;
  int32_t num_tokens;                /* T */
  int32_t num_topk;                  /* K, 1 or more */
  int32_t num_experts;               /* E, a multiple of R */
  int32_t index_type;                /* of topk_idx: DEEPEP_INT32 or DEEPEP_INT64 */
  const void *topk_idx;              /* [in] [T,K] experts; -1 selects nothing */
  int32_t *num_tokens_per_rank;      /* [out] [R] */
  int32_t *num_tokens_per_rdma_rank; /* [out] [nodes] or NULL */
  int32_t *num_tokens_per_expert;    /* [out] [E]; a token that names an expert twice counts twice */
  uint8_t *is_token_in_rank;         /* [out] [T,R] 1: the token goes to the rank */
} deepep_layout;
#define DEEPEP_LAYOUT_INIT {sizeof(deepep_layout), 0, 0, 0, DEEPEP_INT64, NULL, NULL, NULL, NULL, NULL}
/* local, launches. */
deepep_status_t deepep_get_layout(deepep_buffer_t buffer, const deepep_layout *layout, const deepep_call *call);

/* What a handle keeps of the routing, and with it the order of received rows. Ranks agree on it. */
enum {
  DEEPEP_ROUTING_NONE = 0, /* nothing: rows by source rank, then by token; counts come from deepep_get_layout */
  /* topk_idx and where each choice went; rows as above. recv_topk_weights are all K as sent, and combine adds the
   * biases first, then the rows of the ranks in the order of the token's last choice of each. */
  DEEPEP_ROUTING_PLAIN = 1,
  /* The same, with a row for each choice: rows by local expert, then by source rank, token and choice. The first row of
   * an expert is a multiple of expert_alignment. */
  DEEPEP_ROUTING_EXPANDED = 2
};

#define DEEPEP_HANDLE_MAGIC 0x44504548u
#define DEEPEP_HANDLE_VERSION 1u
/* What a dispatch leaves for combine and for cached dispatch. Data only: valid on any buffer of the same ranks. The
 * caller owns the memory. */
typedef struct deepep_handle {
  uint32_t struct_size, magic, version;
  int32_t num_ranks;           /* R */
  int32_t num_tokens;          /* T, at the source */
  int32_t num_recv_tokens;     /* rows of recv_x: N, or num_worst_tokens */
  int32_t *rank_prefix_matrix; /* [inout] [R,R]: [i][j] = rows that ranks 0..i send to rank j */
  int32_t *send_head;          /* [inout] [T,R]: the token's place among this rank's rows to that rank, -1: not sent */
  int32_t *recv_src_idx;       /* [inout] [N]: the row's token index at its source */
  /* [inout] The exchange of counts that the handle is from, as deepep_notify_counts numbers it: calls whose ranks have
   * handles of different ones are refused (MISMATCH). 0: not known, not compared. */
  uint64_t exchange;
  /* DEEPEP_ROUTING_*. This and what follows is of use with one other than NONE; recv_src_idx is not then.
   * deepep_notify_counts sets the numbers but num_expanded_tokens, and topk_idx. */
  int32_t routing;
  int32_t num_topk;            /* K */
  int32_t num_experts;         /* E */
  int32_t index_type;          /* of topk_idx: DEEPEP_INT32 or DEEPEP_INT64 */
  int32_t num_max_tokens;      /* M: token t of rank s has the number s * M + t; at least every rank's T */
  int32_t expert_alignment;    /* of the expanded layout */
  int32_t num_expanded_tokens; /* expanded: rows X of recv_x, from the counts of experts or num_worst_expanded */
  int32_t reserved0;
  const void *topk_idx; /* [in] [T,K] index_type: experts; a negative number selects nothing */
  /* [inout] [T,K] Plain: at the last choice of each rank, this rank * M + the token's place among this rank's rows
   * there, else -1. Expanded: the choice's row at its rank, -1: nothing selected. */
  int32_t *dst_slot;
  /* [inout] [R] rows from ranks 0..i; the last entry is N. [U] with num_scaleup_ranks of the notify. */
  int32_t *psum_recv_tokens_per_rank;
  /* [inout] [L] Plain: tokens of local experts 0..e, each count rounded up to expert_alignment. Expanded: the expert's
   * first row + its real count. */
  int32_t *psum_recv_tokens_per_expert;
  int32_t *num_recv_tokens_per_expert; /* [inout] [L] tokens for each local expert, not rounded */
  /* [inout] [N,K+2] of the token that came as row i (expanded: that would be row i of the plain layout): its number;
   * its rank * K + its last choice here; then, expanded, the row of each choice, -1 where that is not here (plain:
   * not written). Dispatch fills it unless cached. */
  int32_t *recv_src_metadata;
} deepep_handle;
/* clang-format off */
#define DEEPEP_HANDLE_INIT                                                                                           \
  {sizeof(deepep_handle), DEEPEP_HANDLE_MAGIC, DEEPEP_HANDLE_VERSION, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, \
   0, 0, NULL, NULL, NULL, NULL, NULL, NULL}
/* clang-format on */

/* Arguments of deepep_notify_counts, the first step of a dispatch: the ranks exchange counts, and the call fills the
 * handle's rank_prefix_matrix and send_head. */
typedef struct deepep_notify {
  uint32_t struct_size;
  int32_t num_tokens;                   /* T */
  int32_t num_topk;                     /* K; 0: without top-k */
  int32_t num_experts;                  /* E, a multiple of R; may be 0 without top-k */
  int32_t expert_alignment;             /* 1 or more: counts for experts are rounded up to a multiple */
  int32_t num_worst_tokens;             /* > 0: outputs have room for so many rows, and no host waits for counts */
  int32_t x_type;                       /* of the rows: any type of 1, 2 or 4 bytes; rows are moved as they are */
  int32_t num_scales;                   /* S or 0 */
  int64_t hidden;                       /* H; the bytes of a row are a multiple of 16 */
  const int32_t *num_tokens_per_rank;   /* [in] [R] of the layout */
  const int32_t *num_tokens_per_expert; /* [in] [E] of the layout, or NULL: no counts for experts */
  const uint8_t *is_token_in_rank;      /* [in] [T,R] of the layout */
  deepep_handle *handle; /* [inout] matrices are filled on the stream; num_tokens, num_ranks and exchange now */
  /* DEEPEP_ROUTING_*. With one other than NONE the three counts above are NULL, for they are taken from topk_idx, and
   * the addresses of the handle from dst_slot to num_recv_tokens_per_expert are filled on the stream. E is at most
   * 2048 then. */
  int32_t routing;
  int32_t index_type;             /* of topk_idx: DEEPEP_INT32 or DEEPEP_INT64 */
  int32_t num_max_tokens;         /* M, T or more, the same on all ranks */
  int32_t num_worst_expanded;     /* with num_worst_tokens, expanded: outputs have room for so many expanded rows */
  const void *topk_idx;           /* [in] [T,K] experts; a negative number selects nothing */
  int32_t *cumulative_recv_stats; /* [inout] [L] += tokens for each local expert, not rounded; or NULL */
  /* Entries of the handle's psum_recv_tokens_per_rank: 0 or R; or U, the ranks of a node: entry i counts the rows from
   * the ranks with places 0..i in their nodes. */
  int32_t num_scaleup_ranks;
  int32_t reserved0;
  void *topk_idx_copy; /* [out] [T,K] index_type: gets what topk_idx has, for a caller that changes it; or NULL */
} deepep_notify;
/* clang-format off */
#define DEEPEP_NOTIFY_INIT                                                                                          \
  {sizeof(deepep_notify), 0, 0, 0, 1, 0, DEEPEP_BF16, 0, 0, NULL, NULL, NULL, NULL, 0, DEEPEP_INT64, 0, 0, NULL, NULL, 0, 0, \
   NULL}
/* clang-format on */
/* collective, launches. *token names the exchange for deepep_wait_counts and deepep_dispatch. */
deepep_status_t deepep_notify_counts(deepep_buffer_t buffer, const deepep_notify *notify, const deepep_call *call,
                                     uint64_t *token);
/* local, waits up to slice_ms (< 0: until done or failed). *num_recv_tokens = N; per_expert: [out] [L] the
 * ranks' num_tokens_per_expert added, rounded up to expert_alignment, or NULL. Returns: PENDING: not yet;
 * INVALID_STATE; failure. */
deepep_status_t deepep_wait_counts(deepep_buffer_t buffer, uint64_t token, int64_t slice_ms, int32_t *num_recv_tokens,
                                   int32_t *per_expert);

/* Arguments of deepep_dispatch, the second step: the rows. A cached dispatch takes the handle of an earlier one, and
 * neither token nor top-k. */
typedef struct deepep_dispatch_args {
  uint32_t struct_size;
  int32_t cached;               /* 1: rows go as the handle says */
  uint64_t token;               /* of the notify; 0 when cached */
  int32_t x_type;               /* of x: as in the notify */
  int32_t num_scales;           /* S or 0 */
  int64_t hidden;               /* H */
  int32_t num_tokens;           /* T */
  int32_t num_topk;             /* K; 0: without top-k, or cached */
  int32_t num_experts;          /* E; 0 when cached */
  int32_t index_type;           /* of topk_idx: DEEPEP_INT32 or DEEPEP_INT64 */
  int32_t num_worst_tokens;     /* as in the notify; 0 when cached */
  int32_t recv_segment;         /* the segment in which recv_x lies: peers write the rows there; 0 or -1: in none */
  uint64_t recv_segment_offset; /* bytes from the start of the segment to recv_x */
  const void *x;                /* [in] [T,H] x_type */
  const void *x_scales;         /* [in] [T,S] 4-byte elements, or NULL */
  int64_t scale_token_stride;   /* elements from a token's scales to the next token's */
  int64_t scale_stride;         /* elements from a scale to the next one of the token */
  const void *topk_idx;         /* [in] [T,K] index_type, or NULL */
  const float *topk_weights;    /* [in] [T,K]; with topk_idx, and only with it */
  deepep_handle *handle;        /* [in] num_recv_tokens is N; recv_src_idx is filled unless cached */
  void *recv_x;                 /* [out] [N,H] x_type, ordered by source rank, then by token index there */
  void *recv_x_scales;          /* [out] [N,S] contiguous, or NULL */
  void *recv_topk_idx;          /* [out] [N,K] index_type: local expert, or -1 */
  float *recv_topk_weights;     /* [out] [N,K] */
  /* With a routing in the handle: num_topk, num_experts and topk_idx are 0 here, for the handle has them; topk_weights
   * may be given alone, also when cached; recv_topk_idx (plain only) may be asked for when cached too. Expanded: recv_x
   * is [X,H], recv_x_scales X rows, recv_topk_weights [X]. With a worst case rows past the real ones are not written,
   * but for indices -1.
   *
   * Elements from the scales of a row to those of the next row; with the stride below 0: contiguous. */
  int64_t recv_scale_token_stride;
  int64_t recv_scale_stride; /* elements from a scale of a row to its next one */
  int32_t do_zero_padding;   /* expanded, 1: rows between the experts' groups become 0, scales and weights too */
  int32_t reserved0;
} deepep_dispatch_args;
/* clang-format off */
#define DEEPEP_DISPATCH_INIT                                                                                        \
  {sizeof(deepep_dispatch_args), 0, 0, DEEPEP_BF16, 0, 0, 0, 0, 0, DEEPEP_INT64, 0, 0, 0, NULL, NULL, 0, 0, NULL, NULL, \
   NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0}
/* clang-format on */
/* collective, launches. */
deepep_status_t deepep_dispatch(deepep_buffer_t buffer, const deepep_dispatch_args *args, const deepep_call *call);

/* collective, launches: both steps of a dispatch whose outputs have room for any routing (num_worst_tokens above 0), in
 * place of deepep_notify_counts and deepep_dispatch. All ranks make the call like this or none does; on GPUs one kernel
 * counts and sends few rows, in half the time: with a routing num_max_tokens × ranks up to 1024, without one room for
 * up to 1024 rows, which then all ranks have, or all have room for more (else MISMATCH). `args` has no token, and its
 * handle is the notify's, or NULL: the call fills its matrices and recv_src_idx or recv_src_metadata. */
deepep_status_t deepep_dispatch_at_once(deepep_buffer_t buffer, const deepep_notify *notify,
                                        const deepep_dispatch_args *args, const deepep_call *call);

/* collective with the other ranks' deepep_dispatch of the token, launches. In place of deepep_dispatch on a rank that
 * cannot go on after deepep_notify_counts, for example because it has no memory for the rows: the others refuse that
 * dispatch at once (ABORTED), their text names this rank and `reason`, a DEEPEP_ERROR_* or 0; no row moves, all buffers
 * work on. The handle's matrices must stay until it is done, as with deepep_dispatch. Returns: INVALID_ARGUMENT for a
 * token whose dispatch was issued or refused. */
deepep_status_t deepep_cancel_dispatch(deepep_buffer_t buffer, uint64_t token, deepep_status_t reason,
                                       const deepep_call *call);

/* Arguments of deepep_combine, which sums the rows that came from each token. */
typedef struct deepep_combine_args {
  uint32_t struct_size;
  int32_t num_topk;  /* K of topk_weights; 0: none */
  int64_t hidden;    /* H */
  int32_t x_segment; /* the segment in which x lies: peers read the rows there; 0 or -1: in none */
  int32_t reserved0;
  uint64_t x_segment_offset;    /* bytes from the start of the segment to x */
  const void *x;                /* [in] [N,H] BF16 */
  const float *topk_weights;    /* [in] [N,K] or NULL */
  const void *bias[2];          /* [in] [T,H] BF16, added to the sums, or NULL */
  const deepep_handle *handle;  /* [in] of the dispatch */
  void *combined_x;             /* [out] [T,H] BF16: sum in FP32 of the token's rows, plus the biases */
  float *combined_topk_weights; /* [out] [T,K] or NULL */
  /* With a routing in the handle: combined_topk_weights has for each choice what its rank gave, 0 where nothing is
   * selected. Expanded: x is [num_x_rows, H], topk_weights [num_x_rows], the rows of a token are those that
   * recv_src_metadata names; they are added in FP32 in the order of the choices, at their rank and rounded to BF16
   * there, and the ranks' sums then at the token's rank, after the biases.
   *
   * Expanded: rows of x. */
  int32_t num_x_rows;
  /* 1: expanded, every row crosses, and all are added at the token's rank. 2: among nodes, every rank's row does; else
   * a node's rows of a token are added there. */
  int32_t unreduced;
} deepep_combine_args;
/* clang-format off */
#define DEEPEP_COMBINE_INIT \
  {sizeof(deepep_combine_args), 0, 0, 0, 0, 0, NULL, NULL, {NULL, NULL}, NULL, NULL, NULL, 0, 0}
/* clang-format on */
/* collective, launches. */
deepep_status_t deepep_combine(deepep_buffer_t buffer, const deepep_combine_args *args, const deepep_call *call);

/* ---- Experts' copies --------------------------------------------------------------------------------------------- */

/* Tensors of a rank in a deepep_balance_args. */
#define DEEPEP_MAX_BALANCED 16
/* Arguments of deepep_prefetch_weights and deepep_reduce_grads: tensors of experts, and of copies of them that other
 * ranks have in slots ("redundant experts"). R is at most 32. */
typedef struct deepep_balance_args {
  uint32_t struct_size;
  int32_t num_tensors;       /* 1 to DEEPEP_MAX_BALANCED */
  int32_t num_slots;         /* C, of a rank, 1 or more */
  int32_t num_local_experts; /* L, 1 or more */
  /* [in] [R,C] the same on all ranks: the expert, rank * L + local, whose copy the slot is; any other number: of none
   */
  const int32_t *mapping;
  uint64_t expert_bytes[16]; /* of a tensor's expert: a multiple of 16, equal on all ranks */
  void *copies[16];          /* [C, expert_bytes] the copies that this rank has; written by deepep_prefetch_weights */
  void *experts[16];         /* [L, expert_bytes] this rank's experts; written by deepep_reduce_grads */
  void *workspace;           /* of the library's use until the call is done; begins on 16 bytes */
  uint64_t workspace_bytes;  /* what deepep_balance_workspace says, or more */
} deepep_balance_args;
#define DEEPEP_BALANCE_INIT {sizeof(deepep_balance_args), 0, 0, 0, NULL, {0}, {NULL}, {NULL}, NULL, 0}
/* local. Bytes of workspace that the call needs; reduce: 0 for deepep_prefetch_weights, 1 for deepep_reduce_grads. Of
 * args it reads the numbers alone. Returns: INVALID_STATE; start-up. */
deepep_status_t deepep_balance_workspace(deepep_buffer_t buffer, const deepep_balance_args *args, int32_t reduce,
                                         uint64_t *bytes);
/* collective, launches. Every slot gets the bytes of its expert; slots of none stay. An expert's bytes cross to a rank
 * once for up to 32 / R of its slots. It counts as calls of dispatch. Returns: UNSUPPORTED, as deepep_dispatch with a
 * routing. */
deepep_status_t deepep_prefetch_weights(deepep_buffer_t buffer, const deepep_balance_args *args,
                                        const deepep_call *call);
/* collective, launches. Adds, as float32, the copies of an expert to it, in the order of rank and slot, so that the
 * result repeats bit for bit. A call that was refused has added nothing. Otherwise as deepep_prefetch_weights. */
deepep_status_t deepep_reduce_grads(deepep_buffer_t buffer, const deepep_balance_args *args, const deepep_call *call);

/* ---- Low-latency mode -------------------------------------------------------------------------------------------- */

/* These operations need low_latency_mode (else INVALID_STATE), and return the codes of normal mode's operations. */

/* Phases of a low-latency call: a send half, a receive half, or both in one. */
enum { DEEPEP_SEND = 1, DEEPEP_RECV = 2, DEEPEP_SEND_RECV = 3 };
/* Flags of low-latency calls. */
enum {
  DEEPEP_LL_ROUND_SCALE = 1, /* dispatch to FP8: scales are powers of two */
  DEEPEP_LL_UE8M0 = 2,       /* dispatch to FP8: four such scales in an int32; needs DEEPEP_LL_ROUND_SCALE */
  DEEPEP_LL_LOGFMT = 4,      /* combine: rows, or their sums, travel in a logarithmic format of 10 bits */
  DEEPEP_LL_ZERO_COPY = 8,   /* combine: rows were written to deepep_next_low_latency_combine_buffer */
  DEEPEP_LL_UNREDUCED = 16   /* combine: every expert's row travels; none are summed at the expert's rank */
};

/* FP4 rows of low-latency dispatch. */
enum {
  DEEPEP_FP4_PACKED = 1, /* x and x_scales are FP4 already: their bytes are moved */
  DEEPEP_FP4_CAST = 2    /* rows of BF16 are cast to NVFP4 */
};

/* Arguments of deepep_low_latency_dispatch, which sends every token to the experts that it names. */
typedef struct deepep_ll_dispatch_args {
  uint32_t struct_size;
  /* DEEPEP_SEND_RECV or 0: both halves; or DEEPEP_SEND, and later DEEPEP_RECV with the same struct. */
  int32_t phases;
  uint32_t ticket;        /* [out] of the send half, [in] of the receive half */
  int32_t flags;          /* DEEPEP_LL_ROUND_SCALE, DEEPEP_LL_UE8M0 */
  int32_t num_tokens;     /* T, at most num_max_tokens */
  int32_t num_max_tokens; /* B, the same on all ranks */
  int32_t hidden;         /* H, a multiple of 8; of 128 with use_fp8, of 512 with DEEPEP_LL_UE8M0 */
  int32_t num_topk;       /* K, 1 or more */
  int32_t num_experts;    /* E, a multiple of R */
  int32_t index_type;     /* of topk_idx: DEEPEP_INT32 or DEEPEP_INT64 */
  int32_t use_fp8;        /* 1: rows are cast to e4m3, with a scale for 128 channels */
  /* 0, DEEPEP_FP4_PACKED or DEEPEP_FP4_CAST: rows of e2m1, two in a byte (the lower channel in the lower half), with a
   * byte of scale for 16 channels. H is a multiple of 128, flags are 0, use_fp8 does not count. */
  int32_t fp4;
  const void *x;        /* [in] [T,H] BF16; with DEEPEP_FP4_PACKED [T, H/2] bytes */
  const void *topk_idx; /* [in] [T,K] index_type: experts; -1 selects nothing */
  /* [in] [T,K] or NULL: sent along, so that the send half of combine can sum a token's rows at the experts' rank. */
  const float *topk_weights;
  void *recv_x; /* [out] [L, R*B, H] BF16 or e4m3, [L, R*B, H/2] bytes of e2m1 */
  /* [out] float32 [L, H/128, R*B] in memory, or int32 [L, H/512, R*B] with DEEPEP_LL_UE8M0. DEEPEP_FP4_PACKED: bytes
   * [L, R*B, H/16]. DEEPEP_FP4_CAST: e4m3 [L, ceil(R*B/128), H/64, 32, 4, 4], the tiles of 128 rows x 4 scales that
   * GEMM kernels read; that of row r for channels 16 c to 16 c + 15 is at [r/128][c/4][r%32][r/32%4][c%4]. */
  void *recv_x_scales;
  int32_t *recv_count;            /* [out] [L] rows for each local expert */
  int32_t *src_info;              /* [out] [L, R*B] token index at the source */
  int64_t *layout_range;          /* [out] [L, R]: (first row << 32) | count, of the source rank's rows */
  int32_t *cumulative_recv_stats; /* [inout] [L] += recv_count, or NULL */
  int64_t *wait_recv_cost_stats;  /* [inout] [R] += ns waited for that rank, or NULL */
  /* [in] DEEPEP_FP4_PACKED: [T, H/16] bytes. DEEPEP_FP4_CAST: one float32, g, or NULL: g is 1. With a the greatest
   * magnitude of 16 channels, their scale s is g * (a / 6), not above 448, rounded to e4m3, and a channel becomes
   * x * (g / s), rounded to e2m1 (to nearest even, not above 6, -0 becomes 0): a value is q * s / g. */
  const void *x_scales;
} deepep_ll_dispatch_args;
/* clang-format off */
#define DEEPEP_LL_DISPATCH_INIT                                                                                      \
  {sizeof(deepep_ll_dispatch_args), DEEPEP_SEND_RECV, 0, 0, 0, 0, 0, 0, 0, DEEPEP_INT64, 1, 0, NULL, NULL, NULL, NULL, \
   NULL, NULL, NULL, NULL, NULL, NULL, NULL}
/* clang-format on */
/* collective, launches. A call with both phases runs on the communication stream, as `call` says, if it is asynchronous
 * or has a previous_event; else on call->stream, which would wait for it anyway. Halves run on call->stream, and the
 * receive half on the stream of its send half. At most two sends may be without their receive half: a third is
 * INVALID_STATE. The send half writes args->ticket.
 *
 * In a buffer with ll_on_stream the send half issues the whole call on the communication stream, behind what
 * call->stream has to do, and the receive half makes call->stream wait for its end. The send half needs all arguments
 * then; between the halves the call reads its inputs and writes its outputs, which the receive half must name alike.
 * Both halves belong into the same capture of a graph, or outside of any (else INVALID_STATE). */
deepep_status_t deepep_low_latency_dispatch(deepep_buffer_t buffer, deepep_ll_dispatch_args *args,
                                            const deepep_call *call);

/* Arguments of deepep_low_latency_combine, which brings the experts' rows back and sums them by weight. */
typedef struct deepep_ll_combine_args {
  uint32_t struct_size;
  int32_t phases;                /* as in the dispatch */
  uint32_t ticket;               /* [out] of the send half, [in] of the receive half */
  int32_t flags;                 /* DEEPEP_LL_LOGFMT, DEEPEP_LL_ZERO_COPY, DEEPEP_LL_UNREDUCED */
  int32_t num_tokens;            /* T, at most num_max_tokens */
  int32_t num_max_tokens;        /* B, the same on all ranks */
  int32_t hidden;                /* H, a multiple of 8; of 128 with DEEPEP_LL_LOGFMT */
  int32_t num_topk;              /* K, 1 or more */
  int32_t num_experts;           /* E, a multiple of R */
  int32_t index_type;            /* of topk_idx: DEEPEP_INT32 or DEEPEP_INT64 */
  const void *x;                 /* [in] [L, R*B, H] BF16; ignored with DEEPEP_LL_ZERO_COPY */
  const void *topk_idx;          /* [in] [T,K] index_type, of the dispatch */
  const float *topk_weights;     /* [in] [T,K] */
  const int32_t *src_info;       /* [in] [L, R*B] of the dispatch */
  const int64_t *layout_range;   /* [in] [L, R] of the dispatch */
  void *combined_x;              /* [out] [T,H] BF16, apart from what the call reads */
  int64_t *wait_recv_cost_stats; /* [inout] [R] += ns waited for that rank, or NULL */
} deepep_ll_combine_args;
/* clang-format off */
#define DEEPEP_LL_COMBINE_INIT                                                                                      \
  {sizeof(deepep_ll_combine_args), DEEPEP_SEND_RECV, 0, 0, 0, 0, 0, 0, 0, DEEPEP_INT64, NULL, NULL, NULL, NULL, NULL, \
   NULL, NULL}
/* clang-format on */
/* collective, launches. Streams, halves and ticket as in deepep_low_latency_dispatch. In a buffer with ll_copies a
 * stream of the buffer may read x, src_info and layout_range after the send half: until the receive half, in the order
 * of its stream, nothing writes to them. So it is in a buffer with ll_on_stream, for all that the call reads. */
deepep_status_t deepep_low_latency_combine(deepep_buffer_t buffer, deepep_ll_combine_args *args,
                                           const deepep_call *call);

/* local. Where the rows of the next combine may be written for DEEPEP_LL_ZERO_COPY: [L, R*B, H] BF16, row_stride bytes
 * from row to row. Valid until that combine is issued. Returns: INVALID_STATE; start-up. */
deepep_status_t deepep_next_low_latency_combine_buffer(deepep_buffer_t buffer, int32_t num_max_tokens, int32_t hidden,
                                                       int32_t num_experts, void **address, uint64_t *row_stride);
/* collective, launches on call->stream. Empties the low-latency slots of this shape on every rank; of every shape if
 * all three are 0. Sends without a receive half are forgotten. */
deepep_status_t deepep_clean_low_latency_buffer(deepep_buffer_t buffer, int32_t num_max_tokens, int32_t hidden,
                                                int32_t num_experts, const deepep_call *call);
/* collective, launches on call->stream: that goes on when every rank's stream has come there. */
deepep_status_t deepep_barrier(deepep_buffer_t buffer, const deepep_call *call);

/* The mask functions need enable_shrink (else INVALID_STATE). Calls send nothing to a masked rank and wait for nothing
 * from it, and what it sends meanwhile is ignored. In normal mode and in deepep_barrier a rank that one rank has masked
 * is masked by all that take part in the call; the rank itself gets INVALID_STATE, which names who masked it, at once,
 * and in a barrier at the deadline: the others may lift their masks until then. To take it back, all ranks, the masked
 * one too, lift their masks and meet (deepep_barrier) before the next call: a low-latency call that one sends before
 * another has lifted its mask is ignored there, and waited for until the deadline. Among nodes normal mode fails by
 * name instead. */

/* local, launches on call->stream. masked: 1 masks the rank, 0 lifts the mask. */
deepep_status_t deepep_update_mask(deepep_buffer_t buffer, int32_t rank, int32_t masked, const deepep_call *call);
/* local, launches on call->stream. mask_status: [out] [R] 1: masked. */
deepep_status_t deepep_query_mask(deepep_buffer_t buffer, int32_t *mask_status, const deepep_call *call);
/* local, launches on call->stream. Lifts all masks. */
deepep_status_t deepep_clean_mask(deepep_buffer_t buffer, const deepep_call *call);

/* ---- Segments: memory that peers can write rows into ------------------------------------------------------------- */

/* collective, waits. Allocates `bytes` bytes that every rank of the node maps; *segment is its number, 1 or more, for
 * recv_segment and x_segment. Returns: UNSUPPORTED: the engine has no peer_rows; INVALID_STATE: destroyed, or 64
 * segments are in use; OUT_OF_MEMORY, SYSTEM; start-up; failure. */
deepep_status_t deepep_segment_create(deepep_buffer_t buffer, uint64_t bytes, int32_t *segment, void **address);
/* local. Frees the memory once peers have unmapped it; no tensor may lie in it any more. Works also after the buffer
 * was destroyed. Returns: DEVICE. */
deepep_status_t deepep_segment_release(void *address);

/* For torch's CUDAPluggableAllocator: tensors of a torch memory pool lie in a segment. These functions are local. */

/* The segment becomes a pool: the pool releases it, not deepep_segment_release. */
deepep_status_t deepep_pool_open(void *segment);
/* This thread allocates from the segment from now on; NULL: from none. */
deepep_status_t deepep_pool_select(void *segment);
/* The bytes of the largest block that the pool has room for; 0 if there is no such pool. */
uint64_t deepep_pool_room(void *segment);
/* The pool gives out no more blocks, and releases the segment with its last block. Returns: DEVICE. */
deepep_status_t deepep_pool_close(void *segment);
/* A block of the segment that deepep_pool_select named last on this thread; NULL if there is none, or no room. */
void *deepep_pool_allocate(size_t bytes, int device, void *stream);
/* Waits for the present work of `stream`, then takes the block back. */
void deepep_pool_free(void *pointer, size_t bytes, int device, void *stream);

/* ---- Statistics -------------------------------------------------------------------------------------------------- */

/* X(name, value, text). The text is the operation's one name in errors, statistics, metrics and traces. */
#define DEEPEP_OP_MAP(X)                    \
  X(NONE, 0, "none")                        \
  X(LAYOUT, 1, "layout")                    \
  X(NOTIFY, 2, "notify")                    \
  X(DISPATCH, 3, "dispatch")                \
  X(COMBINE, 4, "combine")                  \
  X(LL_DISPATCH, 5, "low_latency_dispatch") \
  X(LL_COMBINE, 6, "low_latency_combine")   \
  X(CLEAN, 7, "clean")                      \
  X(BARRIER, 8, "barrier")                  \
  X(MASK, 9, "mask")

/* Operations, for statistics. */
enum {
#define DEEPEP_X(name, value, text) DEEPEP_OP_##name = value,
  DEEPEP_OP_MAP(DEEPEP_X)
#undef DEEPEP_X
      DEEPEP_OP_COUNT = 10
};

typedef struct deepep_op_stats {
  uint32_t struct_size;
  int32_t op;                             /* [in] DEEPEP_OP_*, not NONE */
  uint64_t calls, errors;                 /* [out] */
  uint64_t bytes;                         /* [out] payload bytes sent */
  uint64_t wait_ns;                       /* [out] of total_ns: waiting for peers */
  uint64_t total_ns;                      /* [out] time in the operation's kernels */
  double mean_us;                         /* [out] */
  double p50_us, p99_us, p999_us, max_us; /* [out] percentiles are upper bounds of histogram buckets */
} deepep_op_stats;
#define DEEPEP_OP_STATS_INIT {sizeof(deepep_op_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/* local. Counters since the buffer was made. bytes_to_peer, wait_ns_per_peer: [out] [R] or NULL. Waits for no call; on
 * GPUs it may wait up to 50 ms for a busy device. Returns: INVALID_STATE, DEVICE; start-up. */
deepep_status_t deepep_stats(deepep_buffer_t buffer, deepep_op_stats *stats, uint64_t *bytes_to_peer,
                             uint64_t *wait_ns_per_peer);

#ifdef __cplusplus
}
#endif
#endif
