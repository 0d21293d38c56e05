/* kernels.h - the interface between the Go engine and a kernel library (libdeepep_cpu.so, libdeepep_cuda.so, ...).
 *
 * A library exports functions of the form `int32_t dk_NAME(dk_NAME_params *p)`: one struct has arguments and results.
 * Rules for every function:
 *
 *   - Fields have fixed widths; addresses are 64-bit integers, 0 for none. The host dereferences the addresses whose
 *     name begins with `host`, the device all others (in the CPU library both are plain pointers). The function
 *     writes the fields marked [out].
 *   - `size` is sizeof the struct as the caller was compiled. A size below the library's own is DK_EVERSION.
 *   - The result is a DK_* code. `device_error` [out] is the device's own error number (errno or cudaError_t), or 0.
 *   - Once a team exists, no function allocates memory that the caller does not know of. None exits, throws, prints or
 *     traps, and the current device stays as it was.
 *   - Operations only enqueue on the given stream; they never wait for a peer on the host.
 *   - Any thread may call. The caller serialises calls for one team.
 *
 * What rows, orders and formats mean is the public contract (include/deepep.h); this header says what crosses the
 * boundary. T, R, E, L, K, H, S, B and N in shapes are those of deepep.h.
 */
#ifndef DEEPEP_KERNELS_H
#define DEEPEP_KERNELS_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DK_ABI_VERSION 6u

/* Codes: the numbers of the status codes of deepep.h. */
enum {
  DK_OK = 0,
  DK_EINVAL = 1,
  DK_ESTATE = 2,
  DK_EUNSUPPORTED = 3,
  DK_ENOMEM = 4,
  DK_ESYSTEM = 5,
  DK_ETIMEOUT = 6, /* a wait reached its deadline: a peer is late, or the slice of a dk_*_wait function is over */
  DK_EPEERDEAD = 7,
  DK_EMISMATCH = 8,
  DK_EABORTED = 9,
  DK_ENOTFOUND = 10,
  DK_EVERSION = 11,
  DK_EDEVICE = 14,
  DK_EINTERNAL = 15
};

/* Operations, in failure records, statistics and the health pages. */
enum {
  DK_OP_NONE = 0,
  DK_OP_LAYOUT = 1,
  DK_OP_NOTIFY = 2,
  DK_OP_DISPATCH = 3,
  DK_OP_COMBINE = 4,
  DK_OP_LL_DISPATCH = 5,
  DK_OP_LL_COMBINE = 6,
  DK_OP_CLEAN = 7,
  DK_OP_BARRIER = 8,
  DK_OP_MASK = 9,
  DK_NUM_OPS = 10
};
/* Phases of an operation. */
enum { DK_PHASE_SEND = 1, DK_PHASE_RECV = 2, DK_PHASE_BOTH = 3 };

/* What ranks must agree on. It travels inside the count messages; a difference ends the call with DK_EMISMATCH. */
enum {
  DK_FIELD_NONE = 0,
  DK_FIELD_HIDDEN_BYTES = 1,
  DK_FIELD_NUM_EXPERTS = 2,
  DK_FIELD_NUM_TOPK = 3,
  DK_FIELD_NUM_SCALES = 4,
  DK_FIELD_FORMAT = 5,     /* low latency: DK_FORMAT_* and flags; normal mode: whether weights were given */
  DK_FIELD_MAX_TOKENS = 6, /* B, num_max_dispatch_tokens_per_rank */
  DK_FIELD_OPERATION = 7,  /* the operation, and whether a dispatch is cached */
  DK_FIELD_X_TYPE = 8,     /* normal mode: the type of x, as given */
  DK_FIELD_EXCHANGE = 9,   /* combine, cached dispatch: the exchange of counts that the handle is from */
  DK_FIELD_ALIGNMENT = 10, /* normal mode with a routing: expert_alignment */
  DK_FIELD_ROUTING = 11,   /* normal mode: DK_ROUTING_*; of combine DK_COMBINE_UNREDUCED << 8 too */
  DK_NUM_COMPARED = 12
};
/* What makes a call refused: contents that only a kernel sees. peer: the rank whose argument it is. */
enum {
  DK_FIELD_WORST_TOKENS = 16,      /* more rows arrive than num_worst_tokens: expected = allowed, seen = arriving */
  DK_FIELD_TOPK_IDX = 17,          /* an index outside [-1, E): expected = E, seen = the index */
  DK_FIELD_TOKENS_PER_RANK = 18,   /* differs from token_in_rank: expected = tokens there, seen = the count given */
  DK_FIELD_TOKENS_PER_EXPERT = 19, /* a negative count: seen */
  DK_FIELD_PREFIX_MATRIX = 20,     /* rank_prefix_matrix of a handle: a column descends or begins below 0, seen = the
                                      entry; or INT64_MIN: it differs from that of rank `expected` */
  DK_FIELD_SEND_HEAD = 21,         /* send_head of a handle: expected = the next place toward that rank, seen = the
                                      entry, or the number of entries where the matrix says `expected` */
  DK_FIELD_SRC_IDX = 22,           /* recv_src_idx of a handle: tokens of a source do not ascend: seen = the entry */
  DK_FIELD_HANDLE_ROWS = 23,       /* the handle has room for fewer rows: expected = room, seen = rows that arrive */
  DK_FIELD_LAYOUT_RANGE = 24,      /* a range outside its expert's rows: expected = rows that fit, seen = the entry */
  DK_FIELD_SRC_INFO = 25,          /* a token number outside [0, B): expected = B, seen = the entry */
  DK_FIELD_CANCELLED = 26,         /* DK_DISPATCH_CANCELLED: seen = `reason`. The rank itself records nothing */
  DK_FIELD_WORST_EXPANDED = 27,    /* more expanded rows arrive than there is room: expected = room, seen = arriving */
  DK_FIELD_DST_SLOT = 28,          /* dst_slot of a handle: a row outside its rank's rows, or none where topk_idx
                                      selects an expert: expected = the rows there, seen = the entry */
  DK_FIELD_SRC_METADATA = 29, /* recv_src_metadata of a handle: a row outside x: expected = rows, seen = the entry */
  DK_FIELD_MASKED = 30        /* with DK_ESTATE: rank `seen` has masked this one, which has no part in the call */
};

/* ---- Host-visible memory shared by engine and kernels ------------------------------------------------------------ */

/* The first failure of a team. The kernel that leaves early writes it once, `code` last with release; the engine reads
 * it. */
typedef struct dk_failure {
  uint32_t code; /* DK_ETIMEOUT, DK_EPEERDEAD, DK_EABORTED, DK_EMISMATCH, DK_EINVAL; 0: none */
  uint32_t op, phase;
  int32_t rank;     /* this rank */
  int32_t peer;     /* the rank that was waited for or disagreed; -1: none */
  uint32_t field;   /* DK_FIELD_* with DK_EMISMATCH and DK_EINVAL */
  uint64_t call;    /* the operation's call number, as given */
  int64_t expected; /* the counter's awaited value; this rank's value of `field`; or with DK_EABORTED the peer's code */
  int64_t seen;     /* the counter's value; the peer's value of `field`; or with DK_EABORTED the peer's operation */
  uint64_t waited_ns; /* how long the wait lasted */
} dk_failure;

#define DK_MAX_RANKS 1024
#define DK_MAX_REFUSALS 8
/* The status block of a team: page-aligned host memory of DK_STATUS_BYTES bytes, zeroed, registered with
 * dk_host_register. The engine writes abort_word, abort_rank and dead, and clears `refused` and codes of refusals;
 * dk_team_destroy sets abort_word, too, where the team's kernels still wait; kernels write the rest; all access is
 * atomic. */
typedef struct dk_status {
  uint32_t abort_word; /* not 0: kernels leave every wait now, and record this DK_* code */
  int32_t abort_rank;  /* the rank to record as the culprit, -1: none */
  /* DK_* code of the first failure, stored after `failure` is complete. While it is not 0 every operation of the team
   * leaves at once (counts 0, sums NaN). */
  uint32_t sticky;
  uint32_t refused;  /* 1: a refusal was written since the engine last looked */
  uint64_t progress; /* operations finished */
  dk_failure failure;
  uint8_t dead[DK_MAX_RANKS]; /* 1: the rank is known to be dead; with shrink kernels mask it without waiting */
  /* Calls with wrong contents (DK_EINVAL, DK_EMISMATCH) or that left this rank out (DK_ESTATE), after which the team
   * goes on. A kernel writes the first entry whose code is 0, `code` last with release, then `refused`; without a free
   * entry it writes nothing. */
  dk_failure refusals[DK_MAX_REFUSALS];
} dk_status;
#define DK_STATUS_BYTES 4096

/* Counts that notify writes for the host, at the address in its params. The kernel stores seq last, with release. */
typedef struct dk_counts {
  uint64_t seq;                  /* the notify's `call` once the rest is valid */
  int32_t num_recv_tokens;       /* rows that arrive; -1: the notify failed */
  int32_t num_recv_nodes_tokens; /* of them: over RDMA; 0 on one node */
  int32_t per_expert[];          /* L entries, each rounded up to a multiple of expert_alignment */
} dk_counts;

/* "DEPPAGE1" */
#define DK_STATS_MAGIC 0x3145474150504544ull
#define DK_STATS_VERSION 2u
/* Buckets of a histogram of durations d in ns: 4 * floor(log2(d / 512)) + the next two bits of d, clamped to 0..95
 * (7.5 s). */
#define DK_HIST_BUCKETS 96
/* What kernels count of one operation. Counters only grow. */
typedef struct dk_op_stats {
  uint64_t calls, errors; /* a call counts when its last phase ends */
  uint64_t total_ns;      /* time in the operation's own kernels, send and receive; not the gap between two halves */
  uint64_t max_ns;        /* the longest call */
  uint64_t wait_ns;       /* of total_ns: waiting for peers */
  uint64_t bytes;         /* payload bytes sent to all peers, this rank included */
  uint64_t last_start_ns; /* CLOCK_MONOTONIC at the last call's start; 0 where the device has no such clock */
  uint64_t last_ns;       /* duration of the last call */
  uint64_t hist[DK_HIST_BUCKETS];
} dk_op_stats;
/* One call in the trace. */
typedef struct dk_trace_record {
  uint64_t call;
  uint64_t start_ns;
  uint64_t duration_ns;
  uint32_t op;
  uint32_t phase;
} dk_trace_record;
/* States of a statistics page. */
enum { DK_PAGE_LIVE = 1, DK_PAGE_FAILED = 2, DK_PAGE_DESTROYED = 3 };
/* The statistics page: registered host memory. The engine fills the header, kernels count in `ops` and behind the
 * header: at peers_offset uint64_t bytes[DK_NUM_OPS][num_ranks], then uint64_t wait_ns[DK_NUM_OPS][num_ranks]; at
 * trace_offset a ring of trace_len records, in which call i of the page is at index i % trace_len. */
typedef struct dk_stats_page {
  uint64_t magic;
  uint32_t version, total_bytes;
  uint32_t pid, num_ops;
  uint64_t start_time; /* of the process, field 22 of /proc/pid/stat: a later process with the same pid has another */
  uint64_t created_ns; /* CLOCK_REALTIME */
  int32_t rank, num_ranks;
  uint32_t buffer_id;
  uint32_t state; /* DK_PAGE_* */
  uint64_t peers_offset, trace_offset;
  uint64_t trace_len;
  uint64_t trace_next; /* records ever written */
  char group[64], host[64], engine[16], device[64];
  dk_op_stats ops[DK_NUM_OPS];
} dk_stats_page;

/* ---- Library and device ------------------------------------------------------------------------------------------ */

/* Begins every parameter struct. */
#define DK_HEADER \
  uint32_t size;  \
  int32_t device_error

/* Capabilities of a kernel library. */
enum {
  DK_CAP_HOST_STREAM = 1, /* stream 0 is the calling thread; it has no queue, and the engine waits on the host */
  DK_CAP_GRAPH = 2,       /* streams can be captured */
  DK_CAP_PEER_ROWS = 4,   /* dispatch can write straight into a registered segment of the receiver (recv_segment) */
  DK_CAP_SM90 = 8,
  DK_CAP_FP8_HARDWARE = 16,
  DK_CAP_CHUNKS = 32,       /* normal mode moves rows in chunks of the size that a call names, not of its own choice */
  DK_CAP_ROUTED_NODES = 64, /* teams that span nodes take calls with a routing */
  DK_CAP_ROUTED_SHRINK = 128,        /* teams that shrink, on one node, take calls with a routing */
  DK_CAP_LL_COPY = 256,              /* DK_TEAM_LL_COPY changes how rows cross */
  DK_CAP_NORMAL_COPY = 512,          /* likewise DK_TEAM_NORMAL_COPY */
  DK_CAP_SHRINK_NODES = 1024,        /* normal mode of teams that shrink and span nodes goes on without lost ranks */
  DK_CAP_ROUTED_SHRINK_NODES = 2048, /* likewise calls with a routing */
  DK_CAP_AT_ONCE = 4096              /* a dispatch takes its notify with it (dk_dispatch_params.notify) */
};
typedef struct dk_info_params {
  DK_HEADER;
  uint32_t abi_version, caps; /* [out] */
  int32_t num_devices;        /* [out] 0: the library loads, but no device can be used, for `reason` */
  uint32_t reserved0;
  char kind[16];                /* [out] "cpu", "cuda" */
  char build[64];               /* [out] build id; ranks must agree on it */
  char reason[256];             /* [out] */
  int32_t max_ll_topk;          /* [out] limit of low-latency calls: K */
  int32_t max_ll_tokens;        /* [out] limit of low-latency calls: B */
  int32_t max_ll_local_experts; /* [out] limit of low-latency calls: L */
  int32_t reserved1;
} dk_info_params;
int32_t dk_info(dk_info_params *p);

typedef struct dk_device_open_params {
  DK_HEADER;
  int32_t ordinal;      /* -1: the current device */
  uint32_t isa;         /* 0: the best. CPU: 1 baseline, 2 AVX2, 3 AVX-512; CUDA: 80, 90 */
  uint64_t device;      /* [out] handle */
  int32_t out_ordinal;  /* [out] */
  int32_t num_sms;      /* [out] SMs that this process may use (of a MIG slice); CPU: 1 */
  int32_t cc_major;     /* [out] compute capability */
  int32_t cc_minor;     /* [out] */
  uint64_t total_bytes; /* [out] memory of the device */
  uint64_t free_bytes;  /* [out] */
  uint8_t uuid[16];     /* [out] ranks with equal uuid share the device */
  char name[64];        /* [out] */
  char isa_name[32];    /* [out] */
} dk_device_open_params;
/* Opens a device and loads every kernel of the library. */
int32_t dk_device_open(dk_device_open_params *p);
typedef struct dk_device_close_params {
  DK_HEADER;
  uint64_t device;
} dk_device_close_params;
int32_t dk_device_close(dk_device_close_params *p);

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* How memory is shared among processes. */
enum {
  DK_SHARE_NONE = 0,
  DK_SHARE_FD = 1,
  DK_SHARE_BLOB = 2,
  DK_SHARE_LOCAL = 3 /* same process: blob holds the address */
};
typedef struct dk_mem_alloc_params {
  DK_HEADER;
  uint64_t device, bytes;
  uint64_t mem;       /* [out] handle */
  uint64_t address;   /* [out] zeroed memory, at least 2 MiB aligned on CUDA, page aligned on the CPU */
  uint64_t out_bytes; /* [out] bytes rounded up to the granularity */
} dk_mem_alloc_params;
int32_t dk_mem_alloc(dk_mem_alloc_params *p);
typedef struct dk_mem_export_params {
  DK_HEADER;
  uint64_t mem;
  uint32_t kind;    /* DK_SHARE_* */
  int32_t fd;       /* [out] a new descriptor, which the caller closes; -1: none */
  uint8_t blob[64]; /* [out] */
} dk_mem_export_params;
int32_t dk_mem_export(dk_mem_export_params *p);
typedef struct dk_mem_import_params {
  DK_HEADER;
  uint64_t device, bytes;
  uint32_t kind; /* DK_SHARE_* */
  int32_t fd;    /* stays the caller's */
  uint8_t blob[64];
  uint64_t mem;     /* [out] handle */
  uint64_t address; /* [out] stays valid after the owner has freed the memory or died */
} dk_mem_import_params;
int32_t dk_mem_import(dk_mem_import_params *p);
typedef struct dk_mem_free_params {
  DK_HEADER;
  uint64_t mem;
} dk_mem_free_params;
/* Frees allocated or imported memory. Does not wait: the caller knows that no work uses it. */
int32_t dk_mem_free(dk_mem_free_params *p);

typedef struct dk_mem_release_params {
  DK_HEADER;
  uint64_t mem;
} dk_mem_release_params;
/* Gives memory back, or a peer's mapping, and keeps its addresses. No operation uses it; of allocated memory callers
 * may have views, so a device waits for all its work here and in dk_mem_restore. At those addresses there are pages of
 * no meaning until dk_mem_restore, so that an access does no harm. What peers have mapped stays theirs, with its
 * content, until they release it. DK_EUNSUPPORTED: the device has no virtual memory; DK_ESTATE: released already. */
int32_t dk_mem_release(dk_mem_release_params *p);
typedef struct dk_mem_restore_params {
  DK_HEADER;
  uint64_t mem;
  uint32_t kind; /* of imported memory: as in dk_mem_import, the owner's new export; else DK_SHARE_NONE */
  int32_t fd;    /* stays the caller's */
  uint8_t blob[64];
} dk_mem_restore_params;
/* Memory of the same size at the same addresses: new and zeroed, or the owner's. After an error it is still released.
 * DK_ESTATE: it is not released. */
int32_t dk_mem_restore(dk_mem_restore_params *p);

typedef struct dk_host_register_params {
  DK_HEADER;
  uint64_t device;
  uint64_t host;
  uint64_t bytes;
  uint64_t address; /* [out] for the device */
} dk_host_register_params;
int32_t dk_host_register(dk_host_register_params *p);
typedef struct dk_host_unregister_params {
  DK_HEADER;
  uint64_t device;
  uint64_t host;
} dk_host_unregister_params;
int32_t dk_host_unregister(dk_host_unregister_params *p);

typedef struct dk_host_wait_params {
  DK_HEADER;
  uint64_t device;
  uint64_t host_word;
  uint64_t at_least;
  uint64_t host_status; /* dk_status */
  uint64_t timeout_ns;
} dk_host_wait_params;
/* Waits on the host until *(uint64_t *)host_word >= at_least (acquire). DK_OK: reached; DK_ETIMEOUT: timeout_ns is
 * over; DK_EABORTED: `sticky` or `abort_word` of the status is set, so the word will not be written. Spins briefly,
 * then sleeps. */
int32_t dk_host_wait(dk_host_wait_params *p);

/* ---- Streams and events ------------------------------------------------------------------------------------------ */

typedef struct dk_stream_create_params {
  DK_HEADER;
  uint64_t device;
  int32_t high_priority;
  int32_t reserved0;
  uint64_t stream; /* [out] */
} dk_stream_create_params;
int32_t dk_stream_create(dk_stream_create_params *p);
typedef struct dk_stream_destroy_params {
  DK_HEADER;
  uint64_t device, stream;
} dk_stream_destroy_params;
/* CPU: waits for the work in the stream. */
int32_t dk_stream_destroy(dk_stream_destroy_params *p);
typedef struct dk_stream_query_params {
  DK_HEADER;
  uint64_t device, stream;
  int32_t capturing; /* [out] */
  int32_t idle;      /* [out]; -1 on entry: not asked */
} dk_stream_query_params;
int32_t dk_stream_query(dk_stream_query_params *p);
typedef struct dk_event_create_params {
  DK_HEADER;
  uint64_t device;
  uint64_t event; /* [out] */
} dk_event_create_params;
int32_t dk_event_create(dk_event_create_params *p);
typedef struct dk_event_destroy_params {
  DK_HEADER;
  uint64_t device, event;
} dk_event_destroy_params;
/* Allowed while the event is recorded or waited for. */
int32_t dk_event_destroy(dk_event_destroy_params *p);
typedef struct dk_event_record_params {
  DK_HEADER;
  uint64_t device, event, stream;
} dk_event_record_params;
/* CPU, stream 0: done at once. */
int32_t dk_event_record(dk_event_record_params *p);
typedef struct dk_stream_wait_event_params {
  DK_HEADER;
  uint64_t device, stream, event;
} dk_stream_wait_event_params;
/* CPU, stream 0: DK_EUNSUPPORTED; the engine waits on the host. */
int32_t dk_stream_wait_event(dk_stream_wait_event_params *p);
typedef struct dk_event_wait_params {
  DK_HEADER;
  uint64_t device, event;
  uint64_t timeout_ns; /* 0: only asks */
} dk_event_wait_params;
/* Waits on the host. DK_ETIMEOUT: not yet. An event that was never recorded is done. */
int32_t dk_event_wait(dk_event_wait_params *p);

typedef struct dk_copy_params {
  DK_HEADER;
  uint64_t device, stream, dst, src, bytes;
} dk_copy_params;
/* Enqueues a copy between any two addresses that the device can reach. */
int32_t dk_copy(dk_copy_params *p);
typedef struct dk_fill_params {
  DK_HEADER;
  uint64_t device, stream, dst, bytes;
  uint32_t value; /* of each byte */
  uint32_t reserved0;
} dk_fill_params;
/* Enqueues a fill. */
int32_t dk_fill(dk_fill_params *p);

/* ---- Transport: ranks that loads and stores do not reach --------------------------------------------------------- */

/* A transport moves bytes into the blocks of remote ranks through queue pairs (QPs), num_qps of them toward each peer.
 * Optional: a library without these functions reaches only ranks whose memory is mapped.
 *
 *   - Operations of one QP take effect in order: a reader that sees what a later one wrote or signalled also sees all
 *     that earlier ones wrote. Bytes of one put arrive in any order. Operations of different QPs have no order.
 *   - A put's source is read some time before the operation completes, and must not change until then (see quiet). An
 *     operation completes after it has taken effect, perhaps long after. Completions of one QP come in order.
 *   - Blocks are symmetric: destinations are offsets from the start of the peer's block.
 *   - There is no receive queue and no completion at the receiver: the receiver sees arrival in signals, aligned 64-bit
 *     words, which it reads with acquire. ADD is atomic against ADD of every rank, not against SET or stores.
 *   - An operation is refused with DK_EINVAL, and nothing is posted, for unknown peers, QPs and flags, for bytes or
 *     signals outside the block, for a signal that is not aligned, and for neither bytes nor signal.
 *   - Toward a lost peer nothing is sent and nothing waits: with stream 0 the call returns DK_EPEERDEAD. What is
 *     enqueued or queued is dropped and counts as completed, and its sources are free.
 *   - An enqueued operation cannot return a code. If its wait ends without room, or without quiet, its QP breaks: this
 *     operation and all later ones of the QP are dropped as if the peer were lost, query reports the QP, and calls
 *     return DK_ETIMEOUT. So no reader sees a later signal of a QP without what came before it.
 *   - Calls may come from several threads; two threads' operations on one QP take effect in the order of their calls.
 *     close comes after all of them, and after what was enqueued.
 *   - In a child made by fork every function but query and close returns DK_ESTATE. */

/* What a put does to the signal word. */
enum { DK_SIGNAL_NONE = 0, DK_SIGNAL_SET = 1, DK_SIGNAL_ADD = 2 };
/* Flags of a transport and of its operations. */
enum {
  DK_TRANSPORT_NOWAIT = 1, /* of one operation, with stream 0 alone: a full QP is DK_EAGAIN, not a wait for room */
  /* Of a transport of software RDMA, for tests: operations take effect as late, and in as strange an order among QPs,
   * as the rules allow; a put whose source changed before it completed breaks its QP with DK_EMISMATCH. */
  DK_TRANSPORT_LATE = 2,
  DK_TRANSPORT_MNNVL = 4 /* of a start: NVLink between hosts may be used where there is one (allow_mnnvl) */
};
/* A code of this interface alone: not a status code of deepep.h. */
enum { DK_EAGAIN = 16 };
typedef struct dk_transport_open_params {
  DK_HEADER;
  uint64_t device;
  int32_t rank, num_ranks;
  int32_t num_qps;  /* QPs toward each peer: 1 to 65536, at most 2^18 for all peers together */
  int32_t qp_depth; /* operations that may be in flight on a QP: 1 to 2^20 */
  int32_t num_peers;
  uint32_t flags;
  /* host: int32_t[num_peers]: remote ranks, each once, not this rank. QPs are created in this order: all of the first
   * peer, then all of the second. */
  uint64_t host_peers;
  /* host: uint64_t[num_ranks]: each rank's block as this rank's NIC sees it, this rank's too; 0: not a peer. The blocks
   * stay until close. */
  uint64_t host_blocks;
  uint64_t block_bytes; /* of every block; what lies outside is refused */
  uint64_t seed;        /* of delays and orders, where the library makes them */
  uint64_t transport;   /* [out] */
} dk_transport_open_params;
int32_t dk_transport_open(dk_transport_open_params *p);
typedef struct dk_transport_close_params {
  DK_HEADER;
  uint64_t transport;
} dk_transport_close_params;
/* Drops what is still queued; never waits for a peer. */
int32_t dk_transport_close(dk_transport_close_params *p);

typedef struct dk_transport_put_params {
  DK_HEADER;
  uint64_t transport;
  uint64_t stream; /* the operation is enqueued there; 0 on the CPU: now, on this thread */
  int32_t peer, qp;
  uint64_t dst_offset, src;
  uint64_t bytes; /* 0: the signal alone */
  uint64_t signal_offset;
  uint64_t signal_value; /* takes effect after the bytes have arrived */
  uint32_t signal_op;    /* DK_SIGNAL_* */
  uint32_t flags;        /* DK_TRANSPORT_NOWAIT */
  uint64_t timeout_ns;   /* of the wait for room in the QP, from the operation's turn; then DK_ETIMEOUT */
} dk_transport_put_params;
int32_t dk_transport_put(dk_transport_put_params *p);
typedef struct dk_transport_quiet_params {
  DK_HEADER;
  uint64_t transport, stream;
  int32_t peer, qp;    /* -1: all */
  uint64_t timeout_ns; /* 0: only asks */
} dk_transport_quiet_params;
/* Waits until what was posted there before has completed: the peer can see it, and sources are free. DK_ETIMEOUT: not
 * yet. A lost peer is DK_EPEERDEAD if it was named, and is passed over if peer is -1. */
int32_t dk_transport_quiet(dk_transport_quiet_params *p);
typedef struct dk_transport_query_params {
  DK_HEADER;
  uint64_t transport;
  int32_t peer, qp;    /* -1: the sums over all */
  uint64_t posted;     /* [out] operations so far, without those refused or dropped by the call */
  uint64_t completed;  /* [out] of them: completed */
  uint64_t bytes;      /* [out] payload bytes of the posted */
  uint64_t max_queued; /* [out] most operations that were in flight at once on one QP */
  int32_t created;     /* [out] place in the order of creation among all QPs; -1 for sums */
  int32_t lost;        /* [out] 0: works. 1: the peer was lost; else the DK_* code that broke the QP, or one of them */
} dk_transport_query_params;
int32_t dk_transport_query(dk_transport_query_params *p);
typedef struct dk_transport_lose_params {
  DK_HEADER;
  uint64_t transport;
  int32_t peer, reserved0;
} dk_transport_lose_params;
/* From now on operations toward the peer fail at once with DK_EPEERDEAD; what is queued for it is dropped. */
int32_t dk_transport_lose(dk_transport_lose_params *p);

/* Some transports have a start and memory of their own (NVSHMEM): ranks attach before they allocate, and blocks come
 * from the transport's heap instead of dk_mem_alloc. Optional as a group. With it the functions above need an
 * attachment, take blocks of dk_transport_alloc alone, and read only this rank's entry of host_blocks.
 *
 *   1. One rank gets an id, and the caller sends it to all ranks.
 *   2. All ranks attach (collective).
 *   3. All ranks allocate, in the same order, the same sizes (collective).
 *   4. Each rank opens its transport, as above.
 *   5. All ranks free (collective).
 *   6. All ranks detach. The last attachment of a process ends the transport's library (then collective). */

#define DK_TRANSPORT_ID_BYTES 128
typedef struct dk_transport_unique_id_params {
  DK_HEADER;
  int32_t num_ranks;
  int32_t num_nvl_peers; /* ranks of a node. num_ranks not above it: one node, and no NIC is looked for */
  /* QPs toward each peer on each NIC of this rank; taken when the transport's library starts for the first time. */
  int32_t num_qps_per_nic;
  int32_t qp_depth; /* likewise */
  /* [out] While something is attached in this process: the id that it was attached by. */
  uint8_t id[DK_TRANSPORT_ID_BYTES];
  char reason[512]; /* [out] what went wrong, or which settings of the user contradict what is wanted; "": nothing */
  uint32_t flags;   /* DK_TRANSPORT_MNNVL */
  uint32_t reserved0;
  /* host: text, a line "NAME=VALUE" for each further variable that the transport's library reads when it starts; 0:
   * none. A user's own value of NAME stays, and `reason` says so where it differs. */
  uint64_t host_settings;
} dk_transport_unique_id_params;
int32_t dk_transport_unique_id(dk_transport_unique_id_params *p);
typedef struct dk_transport_attach_params {
  DK_HEADER;
  uint64_t device; /* of dk_device_open; a process stays with one device */
  int32_t rank, num_ranks;
  int32_t num_nvl_peers, num_qps_per_nic, qp_depth; /* as in dk_transport_unique_id */
  uint32_t flags;                                   /* likewise */
  /* Of dk_transport_unique_id on one rank. A second attach with equal id, rank and num_ranks shares the first one's
   * attachment. */
  uint8_t id[DK_TRANSPORT_ID_BYTES];
  uint64_t attachment;    /* [out] */
  char version[64];       /* [out] of the transport's library */
  char reason[512];       /* [out] as in dk_transport_unique_id */
  uint64_t host_settings; /* as in dk_transport_unique_id */
} dk_transport_attach_params;
int32_t dk_transport_attach(dk_transport_attach_params *p);
typedef struct dk_transport_detach_params {
  DK_HEADER;
  uint64_t attachment;
} dk_transport_detach_params;
/* DK_ESTATE: some of its memory was not freed. */
int32_t dk_transport_detach(dk_transport_detach_params *p);
typedef struct dk_transport_alloc_params {
  DK_HEADER;
  uint64_t attachment, bytes;
  uint64_t host_peer_blocks; /* host: uint64_t[num_ranks] [out] each rank's memory for loads and stores; 0: none */
  uint64_t mem;              /* [out] handle */
  uint64_t address;          /* [out] zeroed; peers may write there once every rank has returned from this call */
  uint64_t out_bytes;        /* [out] bytes rounded up to the granularity */
} dk_transport_alloc_params;
int32_t dk_transport_alloc(dk_transport_alloc_params *p);
typedef struct dk_transport_free_params {
  DK_HEADER;
  uint64_t mem;
} dk_transport_free_params;
int32_t dk_transport_free(dk_transport_free_params *p);

/* ---- Teams: the ranks of one buffer ------------------------------------------------------------------------------ */

/* A rank has one symmetric block, laid out alike on all ranks: control | wire | nvl | rdma.
 *
 *   - control: flags, counts, epochs and masks.
 *   - wire: staging that users never see. The library alone decides how it uses control and wire; dk_block_sizes says
 *     how much it needs.
 *   - nvl and rdma: users may view them, and overwrite them while no call is in flight. On GPUs low-latency calls need
 *     a clean after anything but zeros was written to rdma. */

#define DK_MAX_WIRE_PARTS 16
typedef struct dk_block_sizes_params {
  DK_HEADER;
  int32_t num_ranks, num_nvl_peers;
  uint64_t nvl_bytes, rdma_bytes;
  uint64_t control_bytes;  /* [out] a multiple of 4096 */
  uint64_t wire_bytes;     /* [out] a multiple of 4096 */
  uint64_t min_nvl_bytes;  /* [out] with less, a normal-mode row of max_row_bytes cannot be staged */
  uint64_t max_row_bytes;  /* hidden bytes + scales of the largest row */
  uint64_t min_rdma_bytes; /* [out] the same for rows that cross nodes; 0 on one node */
  uint32_t flags;          /* DK_TEAM_*, as in dk_team_create */
  uint32_t num_wire_parts; /* [out] */
  /* [out] Where in the wire region the parts begin that calls fill from their beginning, ascending: what a start-up
   * brings in. */
  uint64_t wire_part[DK_MAX_WIRE_PARTS];
} dk_block_sizes_params;
int32_t dk_block_sizes(dk_block_sizes_params *p);

typedef struct dk_ll_layout_params {
  DK_HEADER;
  int32_t num_ranks, num_max_tokens, hidden, num_experts;
  uint64_t rdma_bytes;           /* [out] bytes of the rdma region that calls of this shape use: at most V1's hint */
  uint64_t wire_bytes;           /* [out] bytes of the wire region */
  uint64_t zero_copy_offset[2];  /* [out] from the start of the rdma region: combine's rows [L, R*B, H] BF16, by slot */
  uint64_t zero_copy_row_stride; /* [out] bytes from row to row */
  int32_t num_nvl_peers;         /* of the team; 0: one node */
  uint32_t flags;                /* of the team: DK_TEAM_LL_TRANSPORT counts */
} dk_ll_layout_params;
/* Says where low-latency data of a shape lies in the rdma region. Pure. */
int32_t dk_ll_layout(dk_ll_layout_params *p);

/* Flags of a team. */
enum {
  DK_TEAM_SHRINK = 1,
  DK_TEAM_LOW_LATENCY = 2,
  DK_TEAM_LL_TRANSPORT = 4, /* low-latency calls reach every other rank through the transport, mapped or not */
  DK_TEAM_LL_COPY = 8,      /* rows of low-latency send halves cross by copy engines; all ranks have it or none */
  DK_TEAM_NORMAL_COPY = 16 /* rows of dispatches with DK_DISPATCH_COPIES and of combines with DK_COMBINE_COPIES cross by
                              copy engines, for which the second half of the nvl region holds those at their sender and
                              these at their receiver; all ranks have it or none */
};
typedef struct dk_team_create_params {
  DK_HEADER;
  uint64_t device;
  int32_t rank, num_ranks, num_nvl_peers;
  uint32_t flags;            /* DK_TEAM_* */
  uint64_t host_peer_blocks; /* host: uint64_t[num_ranks]: address of each rank's block here; 0: not mapped */
  uint64_t control_offset, control_bytes, wire_offset, wire_bytes, nvl_offset, nvl_bytes, rdma_offset, rdma_bytes;
  uint64_t host_status;   /* dk_status */
  uint64_t status;        /* its registered address */
  uint64_t host_stats;    /* dk_stats_page; 0: no statistics */
  uint64_t stats;         /* its registered address */
  int32_t sm_share;       /* ranks on this device, which get disjoint shares of its SMs */
  int32_t sm_share_index; /* which of them this rank is */
  uint64_t team;          /* [out] */
  /* Of dk_transport_open, connected to every rank that is not mapped or that the flags name; 0: none. The caller closes
   * it after the team. */
  uint64_t transport;
} dk_team_create_params;
/* All blocks are zeroed and mapped. Touches the device's scratch memory, so that no operation allocates. */
int32_t dk_team_create(dk_team_create_params *p);
typedef struct dk_team_destroy_params {
  DK_HEADER;
  uint64_t team;
} dk_team_destroy_params;
int32_t dk_team_destroy(dk_team_destroy_params *p);
typedef struct dk_team_release_params {
  DK_HEADER;
  uint64_t team;
  int32_t captured; /* 1: operations were captured into graphs: waits for all work of the device, which may be theirs */
  int32_t reserved0;
} dk_team_release_params;
/* From now on operations of the team, also those of graphs that were captured before, leave at once (counts 0, sums
 * NaN, no record) and touch no peer's block. The caller knows that none runs. The team keeps its scratch memory. The
 * transport may be closed afterwards. DK_EUNSUPPORTED: a team whose blocks are memory of a transport. */
int32_t dk_team_release(dk_team_release_params *p);
typedef struct dk_team_restore_params {
  DK_HEADER;
  uint64_t team;
  uint64_t transport; /* as in dk_team_create */
} dk_team_restore_params;
/* The team is as new: all blocks are zeroed and mapped at the addresses of dk_team_create; no rank is masked, no
 * segment registered; calls are numbered anew. Statistics go on. */
int32_t dk_team_restore(dk_team_restore_params *p);

#define DK_MAX_SEGMENTS 64
typedef struct dk_team_segment_params {
  DK_HEADER;
  uint64_t team;
  int32_t index;    /* 0 to DK_MAX_SEGMENTS - 1 */
  int32_t owner;    /* the rank whose memory it is */
  uint64_t address; /* as mapped here; 0: the segment is gone */
  uint64_t bytes;
} dk_team_segment_params;
/* Registers a further symmetric segment (rows of torch's pool), for recv_segment and x_segment. */
int32_t dk_team_segment(dk_team_segment_params *p);
typedef struct dk_stats_flush_params {
  DK_HEADER;
  uint64_t team;
  uint64_t timeout_ns;
} dk_stats_flush_params;
/* Brings the team's statistics page up to date: kernels may keep the newest call's counters in device memory. Waits on
 * the host for at most timeout_ns (DK_ETIMEOUT: the device was busy, and the page is unchanged). */
int32_t dk_stats_flush(dk_stats_flush_params *p);

/* ---- Operations -------------------------------------------------------------------------------------------------- */

/* Begins an operation's parameter struct. call: the operation's number for records, counted by the engine; timeout_ns:
 * how long one wait may last; num_sms: 0 for a number that suits tests, the engine gives its own in normal mode. */
#define DK_OP_HEADER                       \
  DK_HEADER;                               \
  uint64_t team, stream, call, timeout_ns; \
  int32_t num_sms;                         \
  uint32_t flags

typedef struct dk_layout_params {
  DK_OP_HEADER;
  uint64_t topk_idx;   /* [T,K] integers of index_bytes bytes, -1 = none */
  int32_t index_bytes; /* 4 or 8 */
  int32_t num_tokens, num_topk, num_experts;
  uint64_t tokens_per_rank;   /* [out] int32[R] */
  uint64_t tokens_per_node;   /* [out] int32[nodes]; 0: not wanted */
  uint64_t tokens_per_expert; /* [out] int32[E]: entries of topk_idx, so that a token counts as often as it names e */
  uint64_t token_in_rank;     /* [out] uint8[T,R] */
} dk_layout_params;
int32_t dk_layout(dk_layout_params *p);

/* As DEEPEP_ROUTING_* in deepep.h. Teams that span nodes need DK_ROUTING_NONE, or DK_CAP_ROUTED_NODES. */
enum { DK_ROUTING_NONE = 0, DK_ROUTING_PLAIN = 1, DK_ROUTING_EXPANDED = 2 };
#define DK_MAX_ROUTED_EXPERTS 2048
/* With DK_CAP_AT_ONCE: so many rows may come to a rank where few have kernels of their own; without a routing all ranks
 * have room for so many at most, or all for more. */
#define DK_AT_ONCE_ROWS 1024
typedef struct dk_notify_params {
  DK_OP_HEADER;
  uint64_t tokens_per_rank;   /* int32[R] */
  uint64_t tokens_per_expert; /* int32[E]; E = 0: absent */
  uint64_t token_in_rank;     /* uint8[T,R] */
  int32_t num_tokens, num_topk, num_experts, expert_alignment;
  int32_t num_worst_tokens, num_scales;
  uint64_t hidden_bytes;       /* bytes of one row of x */
  int32_t x_type;              /* of x, as given: only compared */
  int32_t num_scaleup_ranks;   /* entries of psum_per_rank; 0: R */
  uint64_t rank_prefix_matrix; /* [out] int32[R,R]: [i][j] = rows that ranks 0..i send to rank j */
  uint64_t send_head;     /* [out] int32[T,R]: the token's place among this rank's rows to that rank, -1: not sent */
  uint64_t host_counts;   /* [out] dk_counts; 0: not wanted (worst case) */
  uint64_t counts;        /* its registered address */
  int32_t routing;        /* DK_ROUTING_*. Not NONE: the three counts above are 0, topk_idx says it all */
  int32_t index_bytes;    /* 4 or 8 */
  int32_t num_max_tokens; /* M */
  int32_t num_worst_expanded; /* expanded, with num_worst_tokens: room for expanded rows */
  uint64_t topk_idx;          /* [T,K] integers of index_bytes bytes; a negative number selects nothing */
  uint64_t dst_slot;          /* [out] int32[T,K], as in deepep.h */
  /* [out] int32[num_scaleup_ranks]: rows from ranks 0..i; with fewer than R from those of each run of so many ranks. */
  uint64_t psum_per_rank;
  uint64_t psum_per_expert;  /* [out] int32[L], as in deepep.h */
  uint64_t num_per_expert;   /* [out] int32[L], not rounded */
  uint64_t cumulative_stats; /* [inout] int32[L] += num_per_expert; 0: not wanted */
  uint64_t topk_copy;        /* [out] [T,K] like topk_idx, whose entries it gets; 0: not wanted */
} dk_notify_params;
/* Exchanges counts: every rank gets the whole matrix of rows from rank i to rank j; with a routing also every rank's
 * counts of all experts, from which it knows the row of each of its choices at the receiver.
 * In a team that shrinks, this and
 * the other calls of normal mode go on without ranks that are masked, dead or late: all that take part agree which
 * these are, nothing is counted from or for them, and rows that do not come are zeros that name no expert. A rank that
 * is left out refuses the call (DK_FIELD_MASKED). */
int32_t dk_notify(dk_notify_params *p);

/* Flags of a dispatch. CANCELLED: this rank gives up the exchange of counts `exchange`: it has neither rows nor
 * outputs, and every rank refuses the dispatch. COPIES, with DK_TEAM_NORMAL_COPY: the exchange is of this team, so this
 * rank may bring its rows by copy engines; it does where the host knows how many come from each rank. */
enum { DK_DISPATCH_CACHED = 1, DK_DISPATCH_CANCELLED = 2, DK_DISPATCH_ZERO_PADDING = 4, DK_DISPATCH_COPIES = 8 };
typedef struct dk_dispatch_params {
  DK_OP_HEADER;
  uint64_t x;                  /* [T, hidden_bytes] */
  uint64_t scales;             /* [T,S] 4-byte elements, or 0 */
  int64_t scale_token_stride;  /* elements */
  int64_t scale_stride;        /* elements */
  uint64_t topk_idx;           /* [T,K] or 0 */
  uint64_t topk_weights;       /* [T,K] or 0 */
  uint64_t rank_prefix_matrix; /* of the notify or the handle */
  uint64_t send_head;          /* of the notify or the handle */
  uint64_t hidden_bytes;
  uint64_t exchange; /* number of the exchange of counts that the handle is from, as given; 0: not known. Its lower half
                        is the number of the notify */
  int32_t x_type;    /* of x, as given: only compared */
  int32_t reason;    /* DK_DISPATCH_CANCELLED: a code for the peers' records */
  int32_t num_tokens, num_scales, num_topk, index_bytes, num_experts;
  int32_t num_recv_tokens;  /* rows of the outputs: N, or num_worst_tokens; -1: as many as the matrix says */
  int32_t num_worst_tokens; /* > 0: rows past N get index -1, weight 0 */
  int32_t recv_segment;     /* recv_x lies in this rank's segment of this index, and peers write there; -1: staged */
  uint64_t recv_segment_offset;
  uint64_t recv_x;            /* [out] [N, hidden_bytes] */
  uint64_t recv_scales;       /* [out] [N,S] contiguous; 0: not wanted */
  uint64_t recv_topk_idx;     /* [out] [N,K]; 0: not wanted */
  uint64_t recv_topk_weights; /* [out] [N,K]; 0: not wanted */
  uint64_t recv_src_idx;      /* [out] int32[N]; 0: not wanted */
  /* Of the config, in tokens. */
  int32_t nvl_send_chunk, nvl_recv_chunk, rdma_send_chunk, rdma_recv_chunk;
  /* With a routing topk_idx is that of the handle, cached or not; topk_weights and recv_topk_idx are optional, and
   * recv_src_idx is 0. Expanded: recv_x, recv_scales and recv_topk_weights have num_expanded_tokens rows, the last one
   * entry each; recv_topk_idx is 0. routing: DK_ROUTING_*. */
  int32_t routing;
  int32_t num_max_tokens;          /* M */
  int32_t num_expanded_tokens;     /* rows of the expanded outputs */
  int32_t expert_alignment;        /* with DK_DISPATCH_ZERO_PADDING */
  int64_t recv_scale_token_stride; /* elements; with a routing */
  int64_t recv_scale_stride;       /* elements; with a routing */
  uint64_t dst_slot;               /* int32[T,K] of the notify or the handle; expanded only */
  uint64_t psum_per_expert;        /* int32[L] of the notify or the handle, with DK_DISPATCH_ZERO_PADDING or shrink */
  uint64_t recv_src_metadata;      /* int32[N,K+2]; [out] unless cached; 0: not wanted (plain) */
  /* With DK_CAP_AT_ONCE and num_worst_tokens: host: the dk_notify_params of a notify that has not been
   * called, of the same tensors, whose counts the host does not want; the call does what both do, under this one's
   * number. DK_EUNSUPPORTED: not for these sizes, on any rank, and nothing was done. 0: the notify was called. */
  uint64_t notify;
} dk_dispatch_params;
int32_t dk_dispatch(dk_dispatch_params *p);

/* Flags of a combine. */
enum {
  DK_COMBINE_UNREDUCED = 1, /* expanded: every row crosses the link */
  DK_COMBINE_APART = 2, /* with a routing, among nodes: every rank's row crosses, and no node adds its ranks' rows */
  /* With DK_TEAM_NORMAL_COPY: the exchange is of this team, so this rank may send its rows by copy engines; it does
   * where the host knows how many go to each rank. */
  DK_COMBINE_COPIES = 4
};
typedef struct dk_combine_params {
  DK_OP_HEADER;
  uint64_t x;            /* [N,H] BF16 */
  uint64_t topk_weights; /* [N,K] float32 or 0 */
  uint64_t bias[2];      /* [T,H] BF16 or 0 */
  uint64_t rank_prefix_matrix, send_head, recv_src_idx;
  uint64_t exchange; /* as in dispatch */
  int32_t num_tokens, num_recv_tokens, hidden, num_topk;
  int32_t x_segment;      /* x lies in this rank's segment of this index; -1: in none */
  int32_t num_max_tokens; /* with a routing that of the notify; else DK_AT_ONCE_ROWS if the dispatch took its notify
                             along, or 0 */
  uint64_t x_segment_offset;
  uint64_t combined_x;            /* [out] [T,H] BF16 */
  uint64_t combined_topk_weights; /* [out] [T,K] float32 */
  /* Of the config, in tokens. */
  int32_t nvl_send_chunk, nvl_recv_chunk, rdma_send_chunk, rdma_recv_chunk;
  /* DK_ROUTING_*. With one num_topk is that of topk_idx, and topk_weights are [num_x_rows] if expanded. */
  int32_t routing;
  int32_t num_x_rows;         /* expanded: rows of x */
  int32_t num_experts;        /* with a routing */
  int32_t index_bytes;        /* likewise */
  uint64_t topk_idx;          /* [T,K] of the token's rank, with a routing */
  uint64_t recv_src_metadata; /* int32[num_recv_tokens, K+2], expanded or among nodes */
} dk_combine_params;
int32_t dk_combine(dk_combine_params *p);

/* What dk_balance does. The first two make the handle of a cached expanded dispatch of rows of row_bytes. */
enum {
  DK_BALANCE_COPIES = 0, /* T = num_local * num_rows: this rank's experts, to the slots that are copies of them */
  DK_BALANCE_GRADS = 1,  /* T = num_slots * num_rows: this rank's slots, to the ranks of their experts, which get copy
                            after copy in the order of rank and slot, `count` rows of each */
  DK_BALANCE_ADD = 2     /* adds what came by such a handle to this rank's experts, in that order */
};
#define DK_MAX_BALANCED_SLOTS 4096 /* of all ranks */
typedef struct dk_balance_params {
  DK_HEADER;
  uint64_t device, stream;
  uint64_t mapping; /* int32[R, num_slots]: the expert, rank * num_local + local, of a slot; another number: none */
  int32_t what;     /* DK_BALANCE_* */
  int32_t rank, num_ranks;
  int32_t num_slots; /* of a rank; at most DK_MAX_BALANCED_SLOTS of all ranks */
  int32_t num_local; /* experts of a rank */
  int32_t num_rows;  /* of an expert */
  /* The part of the work. COPIES: slots `first` to `first` + `count` - 1 of each rank, K = R * count, where expert
   * rank * count + i of the handle is slot first + i. Else these rows of each expert, K = 1, where expert r is rank r.
   */
  int32_t first;
  int32_t count;
  uint64_t rank_prefix_matrix; /* [out] int32[R,R], of the first two, as all to topk_weights */
  uint64_t send_head;          /* [out] int32[T,R] */
  uint64_t topk_idx;           /* [out] int32[T,K] */
  uint64_t dst_slot;           /* [out] int32[T,K] */
  uint64_t topk_weights;       /* [out] float32[T,K]: 1 */
  uint64_t rows;               /* ADD: [copies of this rank's experts * count, row_bytes] */
  uint64_t arrived;            /* ADD: float32, the weight of each of these rows; other than 1: it has not come */
  uint64_t experts;            /* ADD: [inout] [num_local, num_rows, row_bytes] float32 */
  uint64_t row_bytes;
} dk_balance_params;
/* Local, enqueued. The same mapping on all ranks gives them the same matrix. */
int32_t dk_balance(dk_balance_params *p);

/* Format of the rows of a low-latency dispatch. FP4: two e2m1 in a byte, the lower channel in the lower half, and one
 * byte of scale for 16 channels. Its rows take 9/16 bytes a channel on every link. */
enum {
  DK_FORMAT_BF16 = 0,
  DK_FORMAT_FP8 = 1,
  DK_FORMAT_FP4 = 2,  /* x and its scales are bytes that are moved as they are; scales by row */
  DK_FORMAT_NVFP4 = 3 /* x is BF16 and is cast: scales are e4m3, in tiles of 128 rows x 4 scales */
};
/* In a record of DK_FIELD_FORMAT, beside the format: topk_weights were given. The record also has DK_LL_* << 8. */
enum { DK_FORMAT_WEIGHTS = 128 };
/* Flags of the low-latency operations. */
enum {
  DK_LL_ROUND_SCALE = 1,
  DK_LL_UE8M0 = 2,
  DK_LL_LOGFMT = 4,
  DK_LL_ZERO_COPY = 8,
  DK_LL_UNREDUCED = 16 /* combine: every expert's row crosses the wire, even where the weights are known at its rank */
};
#define DK_NUM_TICKETS 4
typedef struct dk_ll_dispatch_params {
  DK_OP_HEADER; /* flags: DK_LL_* */
  uint32_t phases;
  uint32_t ticket;   /* the send half stores its epoch and slot in device word `ticket`; the receive half loads them */
  uint64_t x;        /* [T,H] BF16; with DK_FORMAT_FP4 [T, H/2] bytes */
  uint64_t topk_idx; /* [T,K] */
  uint64_t topk_weights; /* [T,K] float32, sent along so that combine can sum at the experts' rank; or 0 */
  int32_t num_tokens, num_topk, index_bytes;
  int32_t format; /* DK_FORMAT_* */
  int32_t num_max_tokens, hidden, num_experts, reserved0;
  uint64_t recv_x; /* [out] [L, R*B, H]; FP4: [L, R*B, H/2] bytes */
  /* [out] float32 [L, H/128, R*B] or int32 [L, H/512, R*B] in memory. DK_FORMAT_FP4: bytes [L, R*B, H/16].
   * DK_FORMAT_NVFP4: bytes [L, ceil(R*B/128), H/64, 32, 4, 4]; the scale of row r for channels 16 c to 16 c + 15 is at
   * [r/128][c/4][r%32][r/32%4][c%4]. */
  uint64_t recv_scales;
  uint64_t recv_count;       /* [out] int32[L] */
  uint64_t src_info;         /* [out] int32[L, R*B] */
  uint64_t layout_range;     /* [out] int64[L,R] */
  uint64_t cumulative_stats; /* [inout] int32[L] += count; 0: not wanted */
  uint64_t wait_stats;       /* [inout] int64[R] += ns; 0: not wanted */
  /* DK_FORMAT_FP4: [T, H/16] bytes. DK_FORMAT_NVFP4: one float32, the factor g that scales were made for, or 0: g is 1.
   * With a the greatest magnitude of 16 channels the scale s is g * (a / 6), not above 448, as e4m3; a channel becomes
   * x * (g / s) as e2m1, to nearest even, not above 6; -0 becomes 0. NaN makes s NaN. */
  uint64_t x_scales;
} dk_ll_dispatch_params;
int32_t dk_ll_dispatch(dk_ll_dispatch_params *p);

typedef struct dk_ll_combine_params {
  DK_OP_HEADER; /* flags: DK_LL_* */
  uint32_t phases, ticket;
  uint64_t x;            /* [L, R*B, H] BF16; with DK_LL_ZERO_COPY inside the rdma region */
  uint64_t x_row_stride; /* bytes from row to row */
  uint64_t topk_idx;     /* [T,K] at the token's own rank */
  uint64_t topk_weights; /* [T,K] at the token's own rank */
  uint64_t src_info, layout_range;
  int32_t num_tokens, num_topk, index_bytes, num_max_tokens, hidden, num_experts;
  uint64_t combined_x; /* [out] [T,H] BF16 */
  uint64_t wait_stats; /* [inout] int64[R] += ns; 0: not wanted */
} dk_ll_combine_params;
/* With DK_TEAM_LL_COPY a stream of the team reads x, src_info and layout_range between the halves: they stay as they
 * are until the receive half, which waits for it, in the order of its stream. */
int32_t dk_ll_combine(dk_ll_combine_params *p);

typedef struct dk_clean_params {
  DK_OP_HEADER;
  int32_t num_max_tokens, hidden, num_experts, reserved0;
} dk_clean_params;
/* Collective: empties the low-latency slots of this shape (0,0,0: all) on every rank; waits for all unmasked ranks. */
int32_t dk_clean(dk_clean_params *p);
typedef struct dk_barrier_params {
  DK_OP_HEADER;
} dk_barrier_params;
int32_t dk_barrier(dk_barrier_params *p);

/* What dk_mask does. */
enum { DK_MASK_UPDATE = 0, DK_MASK_QUERY = 1, DK_MASK_CLEAN = 2 };
typedef struct dk_mask_params {
  DK_OP_HEADER;
  int32_t what;             /* DK_MASK_* */
  int32_t rank;             /* of DK_MASK_UPDATE */
  int32_t value, reserved0; /* 1: masked */
  uint64_t out;             /* [out] int32[R] of DK_MASK_QUERY */
} dk_mask_params;
int32_t dk_mask(dk_mask_params *p);

#ifdef __cplusplus
}
#endif
#endif
