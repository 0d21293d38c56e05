/* suite.h - the harness of kernel_tests: a library under test, ranks, their memory and their teams.
 *
 * A case is one function that every rank runs on a thread of its own (or in a process of its own, process.c). It never
 * dereferences an address of the device: what it gives and gets are tensors, each with a copy on the host.
 * A failed expectation leaves the case at once, by longjmp to the rank's beginning; the other ranks leave at their next
 * wait. Every wait is bounded. What a case made (memory, teams) is taken down by the harness.
 */
#ifndef DEEPEP_KERNEL_TESTS_SUITE_H
#define DEEPEP_KERNEL_TESTS_SUITE_H
#include <pthread.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/kernels.h"

/* Tables of cases give defaults first and override them. */
#pragma GCC diagnostic ignored "-Woverride-init"

#define MAX_SEATS 8 /* ranks of one case */
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- The library under test (library.c) -------------------------------------------------------------------------- */

#define SUITE_FUNCTIONS(X) \
  X(info)                  \
  X(device_open)           \
  X(device_close)          \
  X(mem_alloc)             \
  X(mem_export)            \
  X(mem_import)            \
  X(mem_free)              \
  X(mem_release)           \
  X(mem_restore)           \
  X(host_register)         \
  X(host_unregister)       \
  X(host_wait)             \
  X(stream_create)         \
  X(stream_destroy)        \
  X(stream_query)          \
  X(event_create)          \
  X(event_destroy)         \
  X(event_record)          \
  X(stream_wait_event)     \
  X(event_wait)            \
  X(copy)                  \
  X(fill)                  \
  X(block_sizes)           \
  X(ll_layout)             \
  X(team_create)           \
  X(team_destroy)          \
  X(team_release)          \
  X(team_restore)          \
  X(team_segment)          \
  X(stats_flush)           \
  X(layout)                \
  X(notify)                \
  X(dispatch)              \
  X(combine)               \
  X(balance)               \
  X(ll_dispatch)           \
  X(ll_combine)            \
  X(clean)                 \
  X(barrier)               \
  X(mask)
/* Null where the library lacks them. */
#define SUITE_OPTIONAL(X) \
  X(transport_open)       \
  X(transport_close)      \
  X(transport_put)        \
  X(transport_quiet)      \
  X(transport_query)      \
  X(transport_lose)

struct library {
#define SUITE_MEMBER(name) int32_t (*name)(dk_##name##_params * p);
  SUITE_FUNCTIONS(SUITE_MEMBER)
  SUITE_OPTIONAL(SUITE_MEMBER)
#undef SUITE_MEMBER
};
extern struct library dk;
extern dk_info_params library; /* what dk_info said */

/* False, with the reason: it cannot be loaded, lacks a function, or has no device. */
bool library_open(const char *path, char *why, size_t size);
const char *code_name(int32_t code);
const char *op_name(uint32_t op);
const char *field_name(uint32_t field);

/* ---- Cases (main.c) ---------------------------------------------------------------------------------------------- */

struct rank;
enum weight {
  QUICK, /* always */
  USUAL, /* not under compute-sanitizer */
  HEAVY  /* not under any sanitizer */
};
struct test_case {
  const char *name; /* topic/what */
  void (*run)(struct rank *me);
  int ranks;
  const void *arg; /* me->test->arg */
  enum weight weight;
  uint32_t needs; /* DK_CAP_*: skipped where the library lacks it */
  uint32_t isa;   /* of dk_device_open; 0: that of the settings */
};
struct group {
  const struct test_case *cases;
  int count;
};
#define GROUP(name) const struct group name = {cases, COUNT(cases)}

struct settings {
  const char *library_path, *filter;
  int device, max_ranks; /* device -1: rank r on device r modulo their number */
  uint32_t isa;          /* of dk_device_open */
  uint64_t seed;
  int seeds;  /* for cases that try many; 0: each case's default */
  int rounds; /* the most of a random case; 0: its default */
  enum weight heaviest;
  int share, shares; /* of the chosen cases this program runs every shares-th, from number share on */
  double patience;   /* factor for every time limit: sanitizers are slow */
  bool full;         /* more rounds of random cases */
  bool stop;         /* after the first failure */
  bool threads;      /* no ranks as processes */
  bool one_mapping;  /* all ranks use one mapping of a block: TSan cannot match two mappings of it */
};
extern struct settings settings;
enum verdict { PASSED, FAILED, SKIPPED };

/* ---- Ranks (ranks.c) --------------------------------------------------------------------------------------------- */

struct seat;
struct world;
struct share;
struct team;
struct team_spec;
#define MAX_TENSORS 256
#define MAX_SHARES 8
#define MAX_TEAMS 8
struct guarded {
  const char *name;
  uint64_t offset, bytes;
};
struct mark {
  int tensors, teams, transports, shares;
  uint64_t used, words;
  struct block *block;
};

struct block {
  struct block *next;
};
struct rank {
  int index, count;
  const struct test_case *test;
  const struct team_spec *split; /* not null: nodes and transport of every team of the case */
  struct seat *seat;
  struct world *world; /* ranks of this process */
  int socket;          /* to the exchange of processes; -1: ranks are threads */
  uint64_t stream;     /* the stream of its operations */
  uint64_t random;
  uint64_t seed;              /* seed that a case is trying, for its messages; 0: none */
  const char *volatile doing; /* for the watchdog */
  jmp_buf leave;
  char message[512];
  enum verdict verdict;
  /* freed after the case */
  struct guarded tensors[MAX_TENSORS];
  int num_tensors, num_shares, num_teams, num_transports;
  struct share *shares[MAX_SHARES];
  struct team *teams[MAX_TEAMS];
  uint64_t transports[MAX_TEAMS];
  struct block *blocks;
};

/* Runs one case with its ranks as threads. `why` receives the text of the first failure. */
enum verdict run_threads(const struct test_case *test, char *why, size_t size);
/* The same with a process each (process.c), forked before the library is opened. */
enum verdict run_processes(const struct test_case *test, char *why, size_t size);
/* Runs one rank on the calling thread. */
void run_rank(struct rank *me);
void print_state(void); /* what each rank of the running case is doing */
void close_seats(void);

_Noreturn void fail(struct rank *me, const char *format, ...) __attribute__((format(printf, 2, 3)));
_Noreturn void skip(struct rank *me, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define expect(me, condition, ...) ((condition) ? (void)0 : fail(me, __VA_ARGS__))
/* Calls dk.name(p) and expects DK_OK. */
#define CALL(me, name, p) check_code(me, "dk_" #name, dk.name(p), (p)->device_error)
void check_code(struct rank *me, const char *function, int32_t code, int32_t device_error);

/* All ranks of the case meet; a rank that failed makes the others leave. */
void meet(struct rank *me);
/* Gathers up to 120 bytes and one descriptor (-1: none) of every rank, in rank order. The caller owns the descriptors
 * that it receives. */
void gather(struct rank *me, const void *mine, size_t bytes, int fd, void *all, int *fds);
bool others_failed(struct rank *me);
void keep_team(struct rank *me, struct team *t); /* to be freed after the case */
void drop_teams(struct rank *me,
                struct mark mark); /* collective: those made after the mark, with transports and memory */
void keep_transport(struct rank *me, uint64_t transport); /* likewise: after the teams, before the memory */
void pause_ms(int milliseconds);
uint64_t now_ns(void);
uint64_t limit_ns(double seconds); /* with the factor for sanitizers */
uint64_t soon_ns(void); /* for deadlines that have to pass: longer than a rank is ever late on a busy machine */
void *scratch(struct rank *me, size_t bytes); /* zeroed; freed after the case, or when the mark before it is restored */
void drop_scratch(struct rank *me, struct block *until);
/* Number of seeds to try: --seeds, else 1000 with DEEPEP_TEST_FULL, or `usual`; fewer under a sanitizer. */
int seeds_of(int usual);

uint64_t mix(uint64_t x);
uint64_t hash(uint64_t salt, uint64_t a, uint64_t b, uint64_t c);
uint64_t draw(struct rank *me, uint64_t below); /* the rank's own random numbers */
void jitter(struct rank *me);                   /* sometimes pauses */
struct dice {
  uint64_t state;
}; /* random numbers that are equal on all ranks */
uint64_t roll(struct dice *d, uint64_t below);

/* ---- Memory (memory.c) ------------------------------------------------------------------------------------------- */

struct tensor {
  void *host;         /* the copy here */
  uint64_t at, bytes; /* on the device; 0 bytes: at is 0 */
};
/* Filled with 0xa5 on the device, with guards around it that are checked after the case. */
struct tensor tensor(struct rank *me, const char *name, uint64_t bytes);
void send_tensor(struct rank *me, struct tensor t);  /* host to device, enqueued */
void fetch_tensor(struct rank *me, struct tensor t); /* device to host, enqueued */
void poison(struct rank *me, struct tensor t);       /* 0xa5 again, enqueued */
/* A mark, and back to it: frees what was made after it. No operation may use that any more; guards are checked first.
 * Collective if teams were made. */
struct mark set_mark(struct rank *me);
void back_to(struct rank *me, struct mark mark);
/* Zeroed host memory that the device can reach. */
void *host_words(struct rank *me, uint64_t bytes, uint64_t align, uint64_t *at);
void copy(struct rank *me, uint64_t dst, uint64_t src, uint64_t bytes);
void fill(struct rank *me, uint64_t at, uint64_t bytes, uint32_t value);
/* Waits until everything enqueued on me->stream is done. */
void finish(struct rank *me);
bool stream_done(struct seat *seat, uint64_t stream, double seconds);
void check_guards(struct rank *me);

/* Memory of every rank, mapped by every rank. */
struct share {
  uint64_t bytes, mem, peers[MAX_SEATS], at[MAX_SEATS];
};
struct share *share(struct rank *me, uint64_t bytes);
/* Gives a share and its mappings back, and makes it anew (collective). */
void release_share(struct rank *me, struct share *s);
void restore_share(struct rank *me, struct share *s);
void drop_share(struct share *s, int self, bool own);

/* Fails or skips the case where the device cannot be opened. */
void open_seat(struct rank *me);
void reset_seat(struct seat *seat);
void close_seat(struct seat *seat);
struct seat *new_seat(int index);
uint64_t seat_device(const struct seat *seat);
uint64_t seat_stream(const struct seat *seat);
int seat_ordinal(const struct seat *seat);

/* ---- Teams (team.c) ---------------------------------------------------------------------------------------------- */

struct team_spec {
  uint64_t nvl_bytes, rdma_bytes;
  uint64_t min_row; /* not 0: nvl_bytes is the minimum for rows of this size */
  uint32_t flags;   /* DK_TEAM_* */
  int trace;        /* records; -1: no statistics page */
  /* Ranks of a node; 0: all are on one. Ranks of other nodes, and with DK_TEAM_LL_TRANSPORT all, are reached by a
   * transport. */
  int node;
  int qps, qp_depth;        /* of the transport; 0: 3 to each peer, 64 deep */
  uint32_t transport_flags; /* DK_TRANSPORT_LATE */
  uint64_t seed;            /* of its delays and orders */
  bool weights;             /* of a rerun: low-latency dispatches of the cases of masks bring them */
};
struct team {
  struct rank *me;
  uint64_t handle;
  struct share *block;
  uint64_t nvl_offset, nvl_bytes, rdma_offset, rdma_bytes;
  int node, qps;      /* ranks of a node; QPs to each peer */
  uint32_t flags;     /* DK_TEAM_* */
  uint64_t transport; /* 0: none */
  dk_status *status;
  dk_stats_page *stats;
  uint64_t calls[DK_NUM_OPS], combines, timeout_ns;
};
struct team *make_team(struct rank *me, const struct team_spec *spec);
void flush_stats(struct team *t); /* updates t->stats */
uint64_t peer_bytes(const struct team *t, uint32_t op, int peer);
uint64_t peer_wait(const struct team *t, uint32_t op, int peer);
uint64_t rdma_bytes_for(struct rank *me, int max_tokens, int hidden, int experts);
/* Parameters of an operation with its header filled in; counts the call. */
#define PARAMS(name, team_, op)                                                                 \
  (dk_##name##_params) {                                                                        \
    .size = sizeof(dk_##name##_params), .team = (team_)->handle, .stream = (team_)->me->stream, \
    .call = ++(team_)->calls[op], .timeout_ns = (team_)->timeout_ns                             \
  }
/* Waits until this rank's work is done and its puts to other nodes have completed: it may leave. */
void deliver(struct team *t);
/* Fails the case with the failure record's text if the team has failed. */
void expect_healthy(struct team *t);
/* The team has failed: code, operation, peer (-2: any) as given. */
void expect_failure(struct team *t, int32_t code, uint32_t op, int peer);
/* The newest call was refused, and the team goes on: code, operation, peer (-2: any) and field as given. The record is
 * returned, and its entry is free again, as after the engine has raised it. */
dk_failure expect_refusal(struct team *t, int32_t code, uint32_t op, int peer, uint32_t field);
/* Nothing was refused since. */
void expect_no_refusal(struct team *t);
void run_barrier(struct team *t);
void run_clean(struct team *t, int max_tokens, int hidden, int experts);
void run_mask(struct team *t, int what, int rank, int value, uint64_t out);
/* Waits, and expects that just these ranks are masked (bit by rank). */
void expect_masks(struct team *t, uint32_t masked);
void set_abort(struct team *t, int32_t code, int culprit);

#endif
