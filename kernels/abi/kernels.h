/* kernels.h - the interface between the Go engine and a kernel library (libdeepep_cpu.so, libdeepep_cuda.so, ...).
 *
 * One C function `int32_t dk_NAME(dk_NAME_params *p)` each; parameters and results travel in one struct.
 * Rules for every function:
 *   - Fields are fixed-width; addresses are 64-bit integers (0 = absent). `host` addresses are dereferenced by the
 *   host,
 *     all others by the device (on the CPU engine both are plain pointers). Fields marked [out] are written.
 *   - `size` is sizeof the struct in the caller's eyes; a smaller one than the library's is DK_EVERSION.
 *   - Returns a DK_* code. `device_error` [out] carries the device's own error number (errno or cudaError_t) where
 *   there is one.
 *   - Nothing allocates behind the caller's back once a team exists, exits, throws, prints or traps. Operations only
 *   enqueue on
 *     the stream given; they never wait for a peer on the host. The current device is left as it was found.
 *   - Any thread may call; calls for one team are serialised by the caller.
 * Semantics of rows, orders and formats: the public contract (include/deepep.h). This header says what crosses the
 * boundary.
 */
#ifndef DEEPEP_KERNELS_H
#define DEEPEP_KERNELS_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DK_ABI_VERSION 3u

/* Codes: the same numbers as the status codes of deepep.h. */
enum {
  DK_OK = 0,
  DK_EINVAL = 1,
  DK_ESTATE = 2,
  DK_EUNSUPPORTED = 3,
  DK_ENOMEM = 4,
  DK_ESYSTEM = 5,
  DK_ETIMEOUT = 6, /* a wait's time ended (a peer is late; or, from dk_*_wait functions, the slice is over) */
  DK_EPEERDEAD = 7,
  DK_EMISMATCH = 8,
  DK_EABORTED = 9,
  DK_ENOTFOUND = 10,
  DK_EVERSION = 11,
  DK_EDEVICE = 14,
  DK_EINTERNAL = 15
};

/* Operations, as they appear in failure records, statistics and the health pages. */
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
enum { DK_PHASE_SEND = 1, DK_PHASE_RECV = 2, DK_PHASE_BOTH = 3 };

/* What ranks must agree on: travels inside the count messages; a difference ends the call with DK_EMISMATCH. */
enum {
  DK_FIELD_NONE = 0,
  DK_FIELD_HIDDEN_BYTES = 1,
  DK_FIELD_NUM_EXPERTS = 2,
  DK_FIELD_NUM_TOPK = 3,
  DK_FIELD_NUM_SCALES = 4,
  DK_FIELD_FORMAT = 5,       /* DK_FORMAT_* and flags of low latency; weights given or not in normal mode */
  DK_FIELD_MAX_TOKENS = 6,   /* B, num_max_dispatch_tokens_per_rank */
  DK_FIELD_OPERATION = 7,    /* cached against not cached */
  DK_FIELD_WORST_TOKENS = 8, /* more rows arrive than num_worst_tokens: mine = allowed, theirs = arriving */
  DK_FIELD_TOPK_IDX = 9      /* an index outside [-1, E): mine = E, theirs = the index, call's own rank as peer */
};

/* ---- Host-visible memory shared by engine and kernels ------------------------------------------------------------ */

/* First failure of a team. Written once by the kernel that leaves early (code last, release), read by the engine. */
typedef struct dk_failure {
  uint32_t code; /* DK_ETIMEOUT, DK_EPEERDEAD, DK_EABORTED, DK_EMISMATCH, DK_EINVAL; 0: none */
  uint32_t op, phase;
  int32_t rank, peer;     /* own rank; the rank waited for or disagreed with; -1: none */
  uint32_t field;         /* DK_FIELD_* with DK_EMISMATCH / DK_EINVAL */
  uint64_t call;          /* the operation's call number as given */
  int64_t expected, seen; /* counter awaited and found; or mine and theirs */
  uint64_t waited_ns;
} dk_failure;

/* The status block of a team: page-aligned host memory registered with dk_host_register, DK_STATUS_BYTES long,
 * zeroed. */
#define DK_MAX_RANKS 1024
typedef struct dk_status {
  uint32_t abort_word; /* engine -> kernels: not 0: leave every wait now; the value is the DK_* code to record */
  int32_t abort_rank;  /* engine -> kernels: the culprit to record, -1: none */
  uint32_t sticky; /* kernels -> engine: DK_* code of the first failure; set after `failure` is complete. While it is
                      not 0 every operation of the team leaves at once (counts 0, sums NaN) */
  uint32_t reserved0;
  uint64_t progress; /* kernels -> engine: operations finished */
  dk_failure failure;
  uint8_t dead[DK_MAX_RANKS]; /* engine -> kernels: 1: rank is known dead. With shrink: mask it at once instead of
                                 waiting */
} dk_status;
#define DK_STATUS_BYTES 4096

/* Counts that notify leaves for the host (host-visible memory given in its params): seq is stored last, with release.
 * */
typedef struct dk_counts {
  uint64_t seq; /* = the notify's `call` once the rest is valid (also when it failed: num_recv_tokens = -1) */
  int32_t num_recv_tokens;
  int32_t num_recv_nodes_tokens; /* rows that arrive over RDMA; 0 on one node */
  int32_t per_expert[];          /* L entries, each rounded up to a multiple of expert_alignment */
} dk_counts;

/* Statistics page: host memory, registered; header filled by the engine, op records by the kernels. All counters only
 * grow.
 * Per-peer arrays: uint64_t bytes[DK_NUM_OPS][num_ranks] at peers_offset, then uint64_t wait_ns[DK_NUM_OPS][num_ranks].
 * Trace: ring of trace_len records at trace_offset; record i of the stream of calls is at index i % trace_len. */
#define DK_STATS_MAGIC 0x3145474150504544ull /* "DEPPAGE1" */
#define DK_STATS_VERSION 2u
#define DK_HIST_BUCKETS \
  96 /* bucket b: durations d (ns) with: b = 4*floor(log2(d/512)) + next two bits of d, clamped to 0..95 (7.5 s) */
typedef struct dk_op_stats {
  uint64_t calls, errors; /* a call counts when its last phase ends */
  uint64_t total_ns,
      max_ns;       /* time in the operation's own kernels, send + receive; not the gap between the two halves */
  uint64_t wait_ns; /* of it: waiting for peers */
  uint64_t bytes;   /* payload bytes sent to all peers, self included */
  uint64_t last_start_ns,
      last_ns; /* CLOCK_MONOTONIC start of the last call (0 where the device has no such clock), its time */
  uint64_t hist[DK_HIST_BUCKETS];
} dk_op_stats;
typedef struct dk_trace_record {
  uint64_t call;
  uint64_t start_ns;
  uint64_t duration_ns;
  uint32_t op;
  uint32_t phase;
} dk_trace_record;
/* States of a statistics page. */
enum { DK_PAGE_LIVE = 1, DK_PAGE_FAILED = 2, DK_PAGE_DESTROYED = 3 };
typedef struct dk_stats_page {
  uint64_t magic;
  uint32_t version, total_bytes;
  uint32_t pid, num_ops;
  uint64_t start_time; /* field 22 of /proc/pid/stat: tells a reused pid */
  uint64_t created_ns; /* CLOCK_REALTIME */
  int32_t rank, num_ranks;
  uint32_t buffer_id, state; /* state: DK_PAGE_* */
  uint64_t peers_offset, trace_offset;
  uint64_t trace_len, trace_next; /* trace_next: records ever written */
  char group[64], host[64], engine[16], device[64];
  dk_op_stats ops[DK_NUM_OPS];
} dk_stats_page;

/* ---- Library and device ------------------------------------------------------------------------------------------ */

#define DK_HEADER \
  uint32_t size;  \
  int32_t device_error

enum {
  DK_CAP_HOST_STREAM =
      1,            /* stream 0 is the calling thread itself: it has no queue; the engine waits on the host instead */
  DK_CAP_GRAPH = 2, /* streams can be captured */
  DK_CAP_PEER_ROWS = 4, /* dispatch can write straight into a registered segment of the receiver (recv_segment) */
  DK_CAP_SM90 = 8,
  DK_CAP_FP8_HARDWARE = 16
};
typedef struct dk_info_params {
  DK_HEADER;
  uint32_t abi_version, caps; /* [out] */
  int32_t num_devices;        /* [out] 0: the library loads but no device can be used; then `reason` says why */
  uint32_t reserved0;
  char kind[16], build[64], reason[256]; /* [out] "cpu", "cuda"; build id: ranks must agree on it */
  /* [out] The library's limits for low-latency calls: top-k, B (num_max_dispatch_tokens_per_rank), local experts. */
  int32_t max_ll_topk, max_ll_tokens, max_ll_local_experts;
  int32_t reserved1;
} dk_info_params;
int32_t dk_info(dk_info_params *p);

typedef struct dk_device_open_params {
  DK_HEADER;
  int32_t ordinal;                  /* -1: the current device */
  uint32_t isa;                     /* CPU: 0 best, 1 baseline, 2 AVX2, 3 AVX-512; CUDA: 0 best, 80, 90: force a path */
  uint64_t device;                  /* [out] handle */
  int32_t out_ordinal, num_sms;     /* [out] SMs this process may use (MIG slice); CPU: 1 */
  int32_t cc_major, cc_minor;       /* [out] */
  uint64_t total_bytes, free_bytes; /* [out] */
  uint8_t uuid[16];                 /* [out] ranks with equal uuid share the device */
  char name[64], isa_name[32];      /* [out] */
} dk_device_open_params;
int32_t dk_device_open(dk_device_open_params *p); /* also makes sure that every kernel of the library is loaded */
typedef struct dk_device_close_params {
  DK_HEADER;
  uint64_t device;
} dk_device_close_params;
int32_t dk_device_close(dk_device_close_params *p);

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

enum {
  DK_SHARE_NONE = 0,
  DK_SHARE_FD = 1,
  DK_SHARE_BLOB = 2,
  DK_SHARE_LOCAL = 3 /* same process: blob holds the address */
};
typedef struct dk_mem_alloc_params {
  DK_HEADER;
  uint64_t device, bytes;
  uint64_t mem, address; /* [out] zeroed memory, at least 2 MiB aligned on CUDA, page aligned on CPU */
  uint64_t out_bytes;    /* [out] bytes rounded up to the granularity */
} dk_mem_alloc_params;
int32_t dk_mem_alloc(dk_mem_alloc_params *p);
typedef struct dk_mem_export_params {
  DK_HEADER;
  uint64_t mem;
  uint32_t kind;
  int32_t fd;       /* [out] fd: a new descriptor, the caller closes it; -1 if none */
  uint8_t blob[64]; /* [out] */
} dk_mem_export_params;
int32_t dk_mem_export(dk_mem_export_params *p);
typedef struct dk_mem_import_params {
  DK_HEADER;
  uint64_t device, bytes;
  uint32_t kind;
  int32_t fd; /* fd stays the caller's */
  uint8_t blob[64];
  uint64_t mem, address; /* [out] stays valid after the owner freed it or died */
} dk_mem_import_params;
int32_t dk_mem_import(dk_mem_import_params *p);
typedef struct dk_mem_free_params {
  DK_HEADER;
  uint64_t mem;
} dk_mem_free_params;
int32_t dk_mem_free(
    dk_mem_free_params *p); /* allocated or imported; waits for nothing: the caller made sure it is idle */

typedef struct dk_host_register_params {
  DK_HEADER;
  uint64_t device;
  uint64_t host;
  uint64_t bytes;
  uint64_t address; /* [out] */
} dk_host_register_params;
int32_t dk_host_register(dk_host_register_params *p);
typedef struct dk_host_unregister_params {
  DK_HEADER;
  uint64_t device;
  uint64_t host;
} dk_host_unregister_params;
int32_t dk_host_unregister(dk_host_unregister_params *p);

/* Waits on the host until *(uint64_t *)word >= at_least (acquire), `status`->sticky or abort_word is set, or
 * timeout_ns is over.
 * DK_OK: reached; DK_ETIMEOUT: the slice is over; DK_EABORTED: status says that it will not come. Spins briefly, then
 * sleeps. */
typedef struct dk_host_wait_params {
  DK_HEADER;
  uint64_t device;
  uint64_t host_word;
  uint64_t at_least;
  uint64_t host_status;
  uint64_t timeout_ns;
} dk_host_wait_params;
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
int32_t dk_stream_destroy(dk_stream_destroy_params *p); /* CPU: after the work in it has ended */
typedef struct dk_stream_query_params {
  DK_HEADER;
  uint64_t device, stream;
  int32_t capturing, idle; /* [out]; idle -1 on entry: not asked */
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
int32_t dk_event_destroy(dk_event_destroy_params *p); /* fine while recorded or waited for */
typedef struct dk_event_record_params {
  DK_HEADER;
  uint64_t device, event, stream;
} dk_event_record_params;
int32_t dk_event_record(dk_event_record_params *p); /* CPU stream 0: done at once */
typedef struct dk_stream_wait_event_params {
  DK_HEADER;
  uint64_t device, stream, event;
} dk_stream_wait_event_params;
int32_t dk_stream_wait_event(
    dk_stream_wait_event_params *p); /* CPU stream 0: DK_EUNSUPPORTED, the engine waits on the host */
typedef struct dk_event_wait_params {
  DK_HEADER;
  uint64_t device, event;
  uint64_t timeout_ns;
} dk_event_wait_params;
int32_t dk_event_wait(
    dk_event_wait_params *p); /* host wait; timeout 0 asks only; DK_ETIMEOUT: not yet. Never recorded: done */

typedef struct dk_copy_params {
  DK_HEADER;
  uint64_t device, stream, dst, src, bytes;
} dk_copy_params;
int32_t dk_copy(dk_copy_params *p); /* between any two addresses known to the device; enqueued */
typedef struct dk_fill_params {
  DK_HEADER;
  uint64_t device, stream, dst, bytes;
  uint32_t value;
  uint32_t reserved0;
} dk_fill_params;
int32_t dk_fill(dk_fill_params *p); /* byte value; enqueued */

/* ---- Transport: ranks that loads and stores do not reach ------------------------------------------------------------
 * A transport moves bytes into the blocks of remote ranks through queue pairs (QPs): num_qps of them toward each peer.
 *   - Operations of one QP take effect in order: whoever sees what a later one wrote or signalled also sees all that
 *   earlier
 *     ones wrote. Bytes of one put arrive in any order. Operations of different QPs have no order whatsoever.
 *   - A put's source is read some time before the operation completes, and must stay as it is until then (quiet tells).
 *     An operation completes after it has taken effect, perhaps long after. Completions of one QP come in order.
 *   - Blocks are symmetric: destinations are offsets from the start of the peer's block.
 *   - No receive queue, no completion at the receiver: arrival is seen in signals (aligned 64-bit words). A word that
 *   is signalled
 *     is read with acquire; ADD is atomic against ADD of every rank, not against a SET or stores of another.
 *   - Arguments that are refused are DK_EINVAL, and nothing is posted: unknown peers and QPs, bytes or signals
 *   outside the block, a
 *     signal that is not aligned, an operation of no bytes and no signal, unknown flags.
 *   - Toward a lost peer nothing gets through and nothing waits: DK_EPEERDEAD with stream 0 and for what is enqueued
 *   later. What is
 *     queued or enqueued already is dropped, counts as completed, and its sources are free.
 *   - An enqueued operation cannot return a code any more. If its wait ends without room, or without quiet, its QP
 *   breaks: this
 *     operation and all later ones of the QP are dropped as if the peer were lost, query tells, and calls return that
 *     DK_ETIMEOUT. So
 *     nobody sees a later signal of a QP without what came before it.
 *   - Calls may come from several threads. What two of them post on one QP has the order in which the calls got
 *   there. close comes
 *     after all of them, and after what was enqueued. A child made by fork has no transport: DK_ESTATE, but for query
 *     and close.
 * Optional: a library without these functions reaches mapped ranks alone. */

enum { DK_SIGNAL_NONE = 0, DK_SIGNAL_SET = 1, DK_SIGNAL_ADD = 2 };
enum {
  DK_TRANSPORT_NOWAIT =
      1,                /* of one operation, with stream 0 alone: a full QP is DK_EAGAIN instead of a wait for room */
  DK_TRANSPORT_LATE = 2 /* of a transport, for tests: every operation takes effect as late, and in as strange an order
                           among QPs, as the rules above allow, and a put whose source was written to before it
                           completed breaks its QP with DK_EMISMATCH; software RDMA alone */
};
enum { DK_EAGAIN = 16 }; /* of this interface alone: not a status code of deepep.h */
typedef struct dk_transport_open_params {
  DK_HEADER;
  uint64_t device;
  int32_t rank, num_ranks;
  int32_t num_qps, qp_depth; /* QPs toward each peer, 1..65536 and not above 2^18 for all peers together; operations
                                that may be under way on one of them, 1..2^20 */
  int32_t num_peers;
  uint32_t flags;
  uint64_t host_peers;  /* host: int32_t[num_peers]: remote ranks, each once, in the order in which their QPs are
                           created: all of the first peer, then all of the second; not this rank */
  uint64_t host_blocks; /* host: uint64_t[num_ranks]: each rank's block as this rank's NIC sees it, this rank's own too;
                           0: not a peer. They stay until close */
  uint64_t block_bytes; /* what lies outside is refused */
  uint64_t seed;        /* of delays and orders, where the library makes them */
  uint64_t transport;   /* [out] */
} dk_transport_open_params;
int32_t dk_transport_open(dk_transport_open_params *p);
typedef struct dk_transport_close_params {
  DK_HEADER;
  uint64_t transport;
} dk_transport_close_params;
int32_t dk_transport_close(dk_transport_close_params *p); /* what is still queued is dropped; never waits for a peer */

typedef struct dk_transport_put_params {
  DK_HEADER;
  uint64_t transport, stream; /* enqueued on the stream like any operation; 0 on the CPU: now, on this thread */
  int32_t peer, qp;
  uint64_t dst_offset, src, bytes;      /* bytes 0: the signal alone */
  uint64_t signal_offset, signal_value; /* takes effect after the bytes are there */
  uint32_t signal_op, flags;
  uint64_t timeout_ns; /* of the wait for room in the QP, from when its turn has come: then DK_ETIMEOUT */
} dk_transport_put_params;
int32_t dk_transport_put(dk_transport_put_params *p);
typedef struct dk_transport_quiet_params {
  DK_HEADER;
  uint64_t transport, stream;
  int32_t peer, qp;    /* -1: all */
  uint64_t timeout_ns; /* 0: asks only */
} dk_transport_quiet_params;
/* Until all that was posted there before is done: seen by the peer, sources free. DK_ETIMEOUT: not yet. A peer that
 * is lost is
 * DK_EPEERDEAD if it was named, and passed over if all were meant. */
int32_t dk_transport_quiet(dk_transport_quiet_params *p);
typedef struct dk_transport_query_params {
  DK_HEADER;
  uint64_t transport;
  int32_t peer, qp; /* -1: the sums over all */
  uint64_t posted, completed,
      bytes;           /* [out] operations and payload bytes so far, without what was refused or dropped at the call */
  uint64_t max_queued; /* [out] most operations that were under way at once on one QP */
  int32_t created, lost; /* [out] place in the order of creation among all QPs, -1 for sums; not 0: nothing gets through
                            any more (on one of them): 1: the peer was lost, else the DK_* code that broke the QP */
} dk_transport_query_params;
int32_t dk_transport_query(dk_transport_query_params *p);
/* From now on operations toward the peer fail at once with DK_EPEERDEAD, and what is queued for it is dropped. */
typedef struct dk_transport_lose_params {
  DK_HEADER;
  uint64_t transport;
  int32_t peer, reserved0;
} dk_transport_lose_params;
int32_t dk_transport_lose(dk_transport_lose_params *p);

/* Some transports have a start and memory of their own (NVSHMEM): ranks attach before they allocate, and blocks come
 * from the
 * transport's heap instead of dk_mem_alloc. Optional as a group; a library without it has neither. The transport
 * functions above
 * then need an attachment, take blocks of dk_transport_alloc alone, and of host_blocks read this rank's entry only.
 *   1. one rank asks for an id, and everybody gets it through the caller's exchange;   2. all ranks attach
 *   (collective);
 *   3. all ranks allocate, in the same order, the same sizes (collective);   4. dk_transport_open, and so on;
 *   5. all ranks free (collective);   6. all ranks detach; the last of a process ends the transport's library
 *   (collective then). */
#define DK_TRANSPORT_ID_BYTES 128
typedef struct dk_transport_unique_id_params {
  DK_HEADER;
  int32_t num_ranks;
  int32_t num_nvl_peers;     /* ranks of a node. num_ranks not above it: one node, and no NIC is looked for */
  int32_t num_qps, qp_depth; /* wanted toward each peer; taken when the transport's library starts, the first time */
  uint8_t
      id[DK_TRANSPORT_ID_BYTES]; /* [out] while something is attached in this process: the id that it was attached by */
  char reason[512]; /* [out] what went wrong, or which settings of the user stand against what is wanted; "": nothing */
} dk_transport_unique_id_params;
int32_t dk_transport_unique_id(dk_transport_unique_id_params *p);
typedef struct dk_transport_attach_params {
  DK_HEADER;
  uint64_t device; /* of dk_device_open; a process stays with one device */
  int32_t rank, num_ranks;
  int32_t num_nvl_peers, num_qps, qp_depth, reserved0; /* as above */
  uint8_t id[DK_TRANSPORT_ID_BYTES]; /* of the one rank. Whoever is attached already shares that, if id, rank and
                                        num_ranks are equal */
  uint64_t attachment;               /* [out] */
  char version[64], reason[512];     /* [out] of the transport's library; as above */
} dk_transport_attach_params;
int32_t dk_transport_attach(dk_transport_attach_params *p);
typedef struct dk_transport_detach_params {
  DK_HEADER;
  uint64_t attachment;
} dk_transport_detach_params;
int32_t dk_transport_detach(dk_transport_detach_params *p); /* DK_ESTATE: some of its memory was not freed */
typedef struct dk_transport_alloc_params {
  DK_HEADER;
  uint64_t attachment, bytes;
  uint64_t host_peer_blocks; /* host: uint64_t[num_ranks] [out]: where loads and stores reach each rank's memory; 0:
                                nowhere */
  uint64_t mem, address,
      out_bytes; /* [out] zeroed: peers may write there once every rank has returned from this call */
} dk_transport_alloc_params;
int32_t dk_transport_alloc(dk_transport_alloc_params *p);
typedef struct dk_transport_free_params {
  DK_HEADER;
  uint64_t mem;
} dk_transport_free_params;
int32_t dk_transport_free(dk_transport_free_params *p);

/* ---- Teams: the ranks of one buffer ------------------------------------------------------------------------------ */

/* The symmetric block of a rank, the same on all: control | wire | nvl | rdma. nvl and rdma are what users may view
 * and overwrite
 * while idle (with anything but zeros in the rdma region a GPU's low-latency calls need a clean first); flags,
 * counts, epochs, masks
 * live in control, private staging in wire. How control and wire are used is the library's own affair: dk_block_sizes
 * says how much
 * it needs. */
typedef struct dk_block_sizes_params {
  DK_HEADER;
  int32_t num_ranks, num_nvl_peers;
  uint64_t nvl_bytes, rdma_bytes;
  uint64_t control_bytes, wire_bytes; /* [out] multiples of 4096 */
  uint64_t min_nvl_bytes;             /* [out] floor under which a normal-mode row of max_row_bytes cannot be staged */
  uint64_t max_row_bytes;             /* hidden bytes + scales of the largest row asked about */
  uint64_t min_rdma_bytes;            /* [out] likewise for rows that cross nodes; 0 on one node */
  uint32_t flags, reserved0;          /* DK_TEAM_*, as in dk_team_create */
} dk_block_sizes_params;
int32_t dk_block_sizes(dk_block_sizes_params *p);

/* Where low-latency data lies in the rdma region for a shape. Pure. bytes is never above upstream's hint for the same
 * shape. */
typedef struct dk_ll_layout_params {
  DK_HEADER;
  int32_t num_ranks, num_max_tokens, hidden, num_experts;
  uint64_t rdma_bytes;           /* [out] bytes of the rdma region that calls of this shape use */
  uint64_t wire_bytes;           /* [out] bytes of the wire region */
  uint64_t zero_copy_offset[2];  /* [out] from the start of the rdma region: combine buffers [L, R*B, H] BF16 of slot 0
                                    and 1 */
  uint64_t zero_copy_row_stride; /* [out] bytes between rows */
} dk_ll_layout_params;
int32_t dk_ll_layout(dk_ll_layout_params *p);

enum {
  DK_TEAM_SHRINK = 1,
  DK_TEAM_LOW_LATENCY = 2,
  DK_TEAM_LL_TRANSPORT = 4 /* low-latency calls reach every other rank through the transport, mapped or not */
};
typedef struct dk_team_create_params {
  DK_HEADER;
  uint64_t device;
  int32_t rank, num_ranks, num_nvl_peers;
  uint32_t flags;
  uint64_t host_peer_blocks; /* host: uint64_t[num_ranks], address of each rank's block here; 0: not reachable by
                                load/store */
  uint64_t control_offset, control_bytes, wire_offset, wire_bytes, nvl_offset, nvl_bytes, rdma_offset, rdma_bytes;
  uint64_t host_status, status; /* dk_status: host pointer and registered address */
  uint64_t host_stats, stats;   /* dk_stats_page, likewise; 0: none kept */
  int32_t sm_share,
      sm_share_index; /* ranks of this process on this device, and which of them this is: disjoint shares of SMs */
  uint64_t team;      /* [out] */
  uint64_t transport; /* of dk_transport_open, connected to every rank that is not mapped and that the flags need;
                         0: none. Stays the caller's, and is closed after the team */
} dk_team_create_params;
int32_t dk_team_create(dk_team_create_params *p); /* all blocks are zeroed and mapped; touches the device's scratch */
typedef struct dk_team_destroy_params {
  DK_HEADER;
  uint64_t team;
} dk_team_destroy_params;
int32_t dk_team_destroy(dk_team_destroy_params *p);

/* A further symmetric segment (rows of torch's pool): recv_segment / x_segment of dispatch and combine name it. */
#define DK_MAX_SEGMENTS 64
typedef struct dk_team_segment_params {
  DK_HEADER;
  uint64_t team;
  int32_t index, owner;    /* segment `index` of rank `owner` */
  uint64_t address, bytes; /* its address here; 0: forget it */
} dk_team_segment_params;
int32_t dk_team_segment(dk_team_segment_params *p);
/* Brings the team's statistics page up to date: kernels may keep the newest call's counters in device memory. Waits on
 * the host for at most timeout_ns (DK_ETIMEOUT: the device was busy; the page holds what it held). */
typedef struct dk_stats_flush_params {
  DK_HEADER;
  uint64_t team;
  uint64_t timeout_ns;
} dk_stats_flush_params;
int32_t dk_stats_flush(dk_stats_flush_params *p);

/* ---- Operations -------------------------------------------------------------------------------------------------- */

/* timeout_ns: how long one wait may last. num_sms: 0 = library's choice. call: number for records, counted by the
 * engine. */
#define DK_OP_HEADER                       \
  DK_HEADER;                               \
  uint64_t team, stream, call, timeout_ns; \
  int32_t num_sms;                         \
  uint32_t flags

typedef struct dk_layout_params {
  DK_OP_HEADER;
  uint64_t topk_idx; /* [T,K] int32/int64, -1 = none */
  int32_t index_bytes, num_tokens, num_topk, num_experts;
  uint64_t tokens_per_rank;   /* [out] int32[R] */
  uint64_t tokens_per_node;   /* [out] int32[nodes]; 0: not wanted */
  uint64_t tokens_per_expert; /* [out] int32[E] */
  uint64_t token_in_rank;     /* [out] uint8[T,R] */
} dk_layout_params;
int32_t dk_layout(dk_layout_params *p);

/* Exchange of counts. Every rank learns the whole matrix of rows i -> j. */
typedef struct dk_notify_params {
  DK_OP_HEADER;
  uint64_t tokens_per_rank, tokens_per_expert; /* int32[R], int32[E] (E = 0: absent) */
  uint64_t token_in_rank;                      /* uint8[T,R] */
  int32_t num_tokens, num_topk, num_experts, expert_alignment;
  int32_t num_worst_tokens, num_scales;
  uint64_t hidden_bytes;        /* bytes of one row of x */
  uint64_t rank_prefix_matrix;  /* [out] int32[R,R]: [i][j] = rows that ranks 0..i send to rank j */
  uint64_t send_head;           /* [out] int32[T,R]: number of the token's row among mine to that rank, -1: not sent */
  uint64_t host_counts, counts; /* [out] dk_counts; 0: not wanted (worst case) */
} dk_notify_params;
int32_t dk_notify(dk_notify_params *p);

enum { DK_DISPATCH_CACHED = 1 };
typedef struct dk_dispatch_params {
  DK_OP_HEADER;
  uint64_t x;      /* [T, hidden_bytes] */
  uint64_t scales; /* 0 or 4-byte elements; strides in elements */
  int64_t scale_token_stride, scale_stride;
  uint64_t topk_idx, topk_weights;        /* [T,K] or 0 */
  uint64_t rank_prefix_matrix, send_head; /* from notify or the handle */
  uint64_t hidden_bytes;
  int32_t num_tokens, num_scales, num_topk, index_bytes, num_experts;
  int32_t
      num_recv_tokens; /* rows of the outputs: N, or num_worst_tokens, or -1: take the matrix's word (never past it) */
  int32_t num_worst_tokens; /* > 0: rows past N get index -1, weight 0 */
  int32_t recv_segment;     /* recv_x lies in my segment of this number: peers write there; -1: staged */
  uint64_t recv_segment_offset;
  uint64_t recv_x, recv_scales, recv_topk_idx, recv_topk_weights,
      recv_src_idx; /* [out] scales contiguous [N,S]; 0: not wanted */
  int32_t nvl_send_chunk, nvl_recv_chunk, rdma_send_chunk, rdma_recv_chunk; /* Config */
} dk_dispatch_params;
int32_t dk_dispatch(dk_dispatch_params *p);

typedef struct dk_combine_params {
  DK_OP_HEADER;
  uint64_t x;            /* [N,H] BF16 */
  uint64_t topk_weights; /* [N,K] float32 or 0 */
  uint64_t bias[2];      /* [T,H] BF16 or 0 */
  uint64_t rank_prefix_matrix, send_head, recv_src_idx;
  int32_t num_tokens, num_recv_tokens, hidden, num_topk;
  int32_t x_segment;
  int32_t reserved0; /* x lies in my segment of this number; -1: it does not */
  uint64_t x_segment_offset;
  uint64_t combined_x, combined_topk_weights; /* [out] [T,H] BF16, [T,K] float32 */
  int32_t nvl_send_chunk, nvl_recv_chunk, rdma_send_chunk, rdma_recv_chunk;
} dk_combine_params;
int32_t dk_combine(dk_combine_params *p);

enum { DK_FORMAT_BF16 = 0, DK_FORMAT_FP8 = 1 };
enum {
  DK_FORMAT_WEIGHTS = 128
}; /* beside the format in a record of DK_FIELD_FORMAT: topk_weights were given; DK_LL_* << 8 too */
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
  uint32_t phases,
      ticket; /* the send half leaves its epoch and slot in device word `ticket`, the receive half takes them up */
  uint64_t x, topk_idx,
      topk_weights; /* [T,H] BF16, [T,K], [T,K] float32 or 0 (sent along for combine's pre-reduction) */
  int32_t num_tokens, num_topk, index_bytes, format;
  int32_t num_max_tokens, hidden, num_experts, reserved0;
  uint64_t recv_x, recv_scales; /* [out] [L, R*B, H]; float32 [L, H/128, R*B] or int32 [L, H/512, R*B] in memory */
  uint64_t recv_count, src_info, layout_range; /* [out] int32[L], int32[L, R*B], int64[L,R] */
  uint64_t cumulative_stats, wait_stats;       /* in/out: int32[L] +=, int64[R] += ns; 0: not wanted */
} dk_ll_dispatch_params;
int32_t dk_ll_dispatch(dk_ll_dispatch_params *p);

typedef struct dk_ll_combine_params {
  DK_OP_HEADER;
  uint32_t phases, ticket;
  uint64_t x;            /* [L, R*B, H] BF16; with DK_LL_ZERO_COPY inside the rdma region, x_row_stride apart */
  uint64_t x_row_stride; /* bytes */
  uint64_t topk_idx, topk_weights; /* [T,K] at the token's own rank */
  uint64_t src_info, layout_range;
  int32_t num_tokens, num_topk, index_bytes, num_max_tokens, hidden, num_experts;
  uint64_t combined_x; /* [out] [T,H] BF16 */
  uint64_t wait_stats;
} dk_ll_combine_params;
int32_t dk_ll_combine(dk_ll_combine_params *p);

/* Collective: brings the low-latency slots of this shape (0,0,0: all) back to empty on every rank; waits for all
 * unmasked ranks. */
typedef struct dk_clean_params {
  DK_OP_HEADER;
  int32_t num_max_tokens, hidden, num_experts, reserved0;
} dk_clean_params;
int32_t dk_clean(dk_clean_params *p);
typedef struct dk_barrier_params {
  DK_OP_HEADER;
} dk_barrier_params;
int32_t dk_barrier(dk_barrier_params *p);

enum { DK_MASK_UPDATE = 0, DK_MASK_QUERY = 1, DK_MASK_CLEAN = 2 };
typedef struct dk_mask_params {
  DK_OP_HEADER;
  int32_t what, rank, value, reserved0; /* value: 1 masked */
  uint64_t out;                         /* [out] int32[R] of DK_MASK_QUERY */
} dk_mask_params;
int32_t dk_mask(dk_mask_params *p);

#ifdef __cplusplus
}
#endif
#endif
