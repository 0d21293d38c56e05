/* A kernel library that only records its calls, for tests of the order in which the engine makes them. Its
 * streams are queues like those of a GPU (no DK_CAP_HOST_STREAM) and can be "captured". One process, one rank. Built
 * with HEAP its transport has memory of its own, with NO_TRANSPORT there is none. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

static char trace[1 << 16];
static size_t used;
static int quiet;
static uint64_t next_stream = 100, next_event = 1, capturing;

/* A release in the background writes its lines while the test reads. */
static char locked;
static void lock(void) {
  while (__atomic_test_and_set(&locked, __ATOMIC_ACQUIRE)) usleep(100);
}
static void unlock(void) { __atomic_clear(&locked, __ATOMIC_RELEASE); }

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  lock();
  used += (size_t)vsnprintf(trace + used, sizeof trace - used, format, arguments);
  unlock();
  va_end(arguments);
}
#define NOTE(...) (quiet ? (void)0 : note(__VA_ARGS__))

/* For the test: reads and clears the trace; sets which stream is captured; writes nothing down from now on. */
int32_t fake_trace(char *out) {
  lock();
  strcpy(out, trace);
  trace[used = 0] = 0;
  unlock();
  return 0;
}
int32_t fake_quiet(int *on) {
  quiet = *on;
  return 0;
}
/* Stand for torch's guard of a stream. */
int32_t fake_enter_stream(void *stream, int32_t device, void **guard) {
  (void)device;
  *guard = stream;
  return 0;
}
int32_t fake_leave_stream(void *guard) { return guard == NULL; }
/* Stands for torch's record of a stream. */
void fake_record_stream(void *tensor, uint64_t device, int64_t stream) { (void)tensor, (void)device, (void)stream; }
static dk_status *status, *before; /* of the newest team, and of the one before it */
/* A graph of the team before runs a call. */
int32_t fake_replay(void *unused) {
  (void)unused;
  before->progress++;
  return 0;
}
/* A kernel refuses the call: the entry as it would write it. */
int32_t fake_refuse(const dk_failure *refusal) {
  for (int i = 0; i < DK_MAX_REFUSALS; i++) {
    if (status->refusals[i].code) continue;
    status->refusals[i] = *refusal;
    status->refused = 1;
    return 0;
  }
  return 1;
}
/* A kernel fails: the record as it would write it. */
int32_t fake_fail(const dk_failure *failure) {
  status->failure = *failure;
  status->sticky = failure->code;
  return 0;
}
int32_t fake_capture(uint64_t *stream) {
  capturing = *stream;
  return 0;
}

int32_t dk_info(dk_info_params *p) {
  p->abi_version = DK_ABI_VERSION;
  p->caps = DK_CAP_GRAPH | DK_CAP_PEER_ROWS | DK_CAP_LL_COPY | DK_CAP_NORMAL_COPY;
#ifdef OLD_DRIVER
  p->device_error = 35;  // cudaErrorInsufficientDriver
  strcpy(p->reason, "the driver is too old");
#else
  p->num_devices = 1;
#endif
  strcpy(p->kind, "fake");
  strcpy(p->build, "1");
  p->max_ll_topk = 32;
  p->max_ll_tokens = 65535;
  p->max_ll_local_experts = 256;
  return 0;
}
int32_t dk_device_open(dk_device_open_params *p) {
  p->device = 1;
  p->num_sms = 8;
  strcpy(p->name, "fake");
  return 0;
}
int32_t dk_device_close(dk_device_close_params *p) {
  (void)p;
  return 0;
}
int32_t dk_mem_alloc(dk_mem_alloc_params *p) {
  p->mem = p->address = (uint64_t)(uintptr_t)calloc(1, p->bytes);
  p->out_bytes = p->bytes;
  return p->mem ? 0 : DK_ENOMEM;
}
int32_t dk_mem_export(dk_mem_export_params *p) {
  p->kind = DK_SHARE_LOCAL;
  p->fd = -1;
  return 0;
}
int32_t dk_mem_import(dk_mem_import_params *p) {
  p->mem = p->address = (uint64_t)(uintptr_t)calloc(1, p->bytes);
  return p->mem ? 0 : DK_ENOMEM;
}
int32_t dk_mem_free(dk_mem_free_params *p) {
  free((void *)(uintptr_t)p->mem);
  return 0;
}
int32_t dk_mem_release(dk_mem_release_params *p) {
  (void)p;
  NOTE("memory goes\n");
  return 0;
}
int32_t dk_mem_restore(dk_mem_restore_params *p) {
  (void)p;
  NOTE("memory comes\n");
  return 0;
}
int32_t dk_host_register(dk_host_register_params *p) {
  p->address = p->host;
  return 0;
}
int32_t dk_host_unregister(dk_host_unregister_params *p) {
  (void)p;
  return 0;
}
int32_t dk_host_wait(dk_host_wait_params *p) {
  return *(uint64_t *)(uintptr_t)p->host_word >= p->at_least ? 0 : DK_ETIMEOUT;
}

int32_t dk_stream_create(dk_stream_create_params *p) {
  p->stream = next_stream++;
  return 0;
}
int32_t dk_stream_destroy(dk_stream_destroy_params *p) {
  (void)p;
  return 0;
}
int32_t dk_stream_query(dk_stream_query_params *p) {
  p->capturing = p->stream == capturing && capturing;
  p->idle = 1;
  return 0;
}
int32_t dk_event_create(dk_event_create_params *p) {
  p->event = next_event++;
  return 0;
}
int32_t dk_event_destroy(dk_event_destroy_params *p) {
  (void)p;
  return 0;
}
int32_t dk_event_record(dk_event_record_params *p) {
  NOTE("record e%d on %d\n", (int)p->event, (int)p->stream);
  return 0;
}
int32_t dk_stream_wait_event(dk_stream_wait_event_params *p) {
  NOTE("%d waits e%d\n", (int)p->stream, (int)p->event);
  return 0;
}
int32_t dk_event_wait(dk_event_wait_params *p) {
  NOTE("wait e%d\n", (int)p->event);
  return 0;
}
int32_t dk_copy(dk_copy_params *p) {
  (void)p;
  return 0;
}
int32_t dk_fill(dk_fill_params *p) {
  (void)p;
  return 0;
}
int32_t dk_balance(dk_balance_params *p) {
  (void)p;
  return 0;
}

/* The wire region grows by a KiB for each MiB of the rdma region, and 256 experts need 6144 of it. */
int32_t dk_block_sizes(dk_block_sizes_params *p) {
  p->control_bytes = 4096;
  p->wire_bytes = 4096 + (p->rdma_bytes >> 20 << 10);
  p->min_nvl_bytes = p->max_row_bytes * 2;
  p->min_rdma_bytes = p->num_ranks > p->num_nvl_peers ? p->max_row_bytes * 3 : 0;
  return 0;
}
int32_t dk_ll_layout(dk_ll_layout_params *p) {
  p->rdma_bytes = (uint64_t)p->num_max_tokens * p->hidden * 2;
  p->wire_bytes = p->num_experts < 256 ? 64 : 6144;
  p->zero_copy_offset[0] = 256;
  p->zero_copy_offset[1] = 512;
  p->zero_copy_row_stride = 2 * (uint64_t)p->hidden;
  return 0;
}
/* Which of the blocks are given: a digit for each rank. */
static const char *given(const uint64_t *blocks, int32_t ranks) {
  static char text[DK_MAX_RANKS + 1];
  for (int32_t i = 0; i < ranks; i++) text[i] = blocks[i] ? '1' : '0';
  text[ranks] = 0;
  return text;
}
static uint32_t team_flags;
int32_t dk_team_create(dk_team_create_params *p) {
  team_flags = p->flags;
  if (p->transport && p->num_ranks == 5)
    return DK_EUNSUPPORTED; /* the number of ranks that stands for kernels without a transport */
  NOTE("team flags %d blocks %s transport %d\n", (int)p->flags,
       given((const uint64_t *)(uintptr_t)p->host_peer_blocks, p->num_ranks), (int)p->transport);
  before = status;
  status = (dk_status *)(uintptr_t)p->host_status;
  p->team = 7;
  return 0;
}
int32_t dk_team_destroy(dk_team_destroy_params *p) {
  (void)p;
  NOTE("team ends\n");
  return 0;
}

int32_t dk_team_release(dk_team_release_params *p) {
  if (p->captured && team_flags & DK_TEAM_LL_COPY) return DK_EUNSUPPORTED;
  NOTE("team stops%s\n", p->captured ? " after graphs" : "");
  return 0;
}
int32_t dk_team_restore(dk_team_restore_params *p) {
  (void)p;
  NOTE("team goes on\n");
  return 0;
}

#ifndef NO_TRANSPORT
int32_t dk_transport_open(dk_transport_open_params *p) {
  if (p->seed == 99) return DK_EUNSUPPORTED; /* stands for hardware */
  NOTE("transport %d x %d seed %d flags %d blocks %s peers", p->num_qps, p->qp_depth, (int)p->seed, (int)p->flags,
       given((const uint64_t *)(uintptr_t)p->host_blocks, p->num_ranks));
  for (int32_t i = 0; i < p->num_peers; i++) NOTE(" %d", ((const int32_t *)(uintptr_t)p->host_peers)[i]);
  NOTE("\n");
  p->transport = 9;
  return 0;
}
int32_t dk_transport_close(dk_transport_close_params *p) {
  NOTE("transport %d ends\n", (int)p->transport);
  return 0;
}
int32_t dk_transport_put(dk_transport_put_params *p) {
  (void)p;
  return DK_EUNSUPPORTED;
}
int32_t dk_transport_quiet(dk_transport_quiet_params *p) {
  NOTE("transport %d quiet, peer %d\n", (int)p->transport, p->peer);
  return 0;
}
int32_t dk_transport_query(dk_transport_query_params *p) {
  (void)p;
  return DK_EUNSUPPORTED;
}
int32_t dk_transport_lose(dk_transport_lose_params *p) {
  NOTE("transport %d loses %d\n", (int)p->transport, p->peer);
  return 0;
}
#endif

#ifdef HEAP
/* For the test: how the heap behaves. */
enum { HEAP_WELL, HEAP_NO_ID, HEAP_NO_START, HEAP_STUCK_START, HEAP_FULL, HEAP_FAR, HEAP_STUCK_FREE };
static int heap_mood, heap_ranks;
static volatile int heap_released;
int32_t fake_heap(int *mood) {
  heap_mood = *mood;
  heap_released = *mood == HEAP_WELL;
  return 0;
}
static void stick(void) {
  while (!heap_released) usleep(1000);
}
/* A transport does not survive its own end while a thread frees its memory. */
__attribute__((destructor)) static void end(void) {
  if (heap_mood == HEAP_STUCK_FREE && !heap_released) abort();
}

static const char *settings(uint64_t text) {
  static char shown[256];
  shown[0] = 0;
  if (*(const char *)(uintptr_t)text) snprintf(shown, sizeof shown, " [%s]", (const char *)(uintptr_t)text);
  return shown;
}
int32_t dk_transport_unique_id(dk_transport_unique_id_params *p) {
  if (heap_mood == HEAP_NO_ID) {
    strcpy(p->reason, "3.3.8 is too old");
    return DK_EVERSION;
  }
  memset(p->id, 'i', sizeof p->id);
  NOTE("id for %d ranks, %d a node, %d x %d flags %d%s\n", p->num_ranks, p->num_nvl_peers, p->num_qps_per_nic,
       p->qp_depth, (int)p->flags, settings(p->host_settings));
  return 0;
}
int32_t dk_transport_attach(dk_transport_attach_params *p) {
  if (heap_mood == HEAP_NO_START) {
    strcpy(p->reason, "no NIC");
    return DK_ESYSTEM;
  }
  if (heap_mood == HEAP_STUCK_START) stick();
  NOTE("attach %d of %d by %c%c flags %d%s\n", p->rank, p->num_ranks, p->id[0], p->id[DK_TRANSPORT_ID_BYTES - 1],
       (int)p->flags, settings(p->host_settings));
  strcpy(p->version, "fake 1");
  heap_ranks = p->num_ranks;
  p->attachment = 5;
  return 0;
}
int32_t dk_transport_detach(dk_transport_detach_params *p) {
  NOTE("detach %d\n", (int)p->attachment);
  return 0;
}
int32_t dk_transport_alloc(dk_transport_alloc_params *p) {
  if (heap_mood == HEAP_FULL) return DK_ENOMEM;
  NOTE("heap %d\n", (int)p->attachment);
  p->mem = p->address = (uint64_t)(uintptr_t)calloc(1, p->bytes);
  p->out_bytes = p->bytes;
  for (int i = 0; i < (heap_mood == HEAP_FAR ? 1 : heap_ranks); i++)
    ((uint64_t *)(uintptr_t)p->host_peer_blocks)[i] = p->address;
  return p->mem ? 0 : DK_ENOMEM;
}
int32_t dk_transport_free(dk_transport_free_params *p) {
  if (heap_mood == HEAP_STUCK_FREE) stick();
  free((void *)(uintptr_t)p->mem);
  NOTE("heap freed\n");
  return 0;
}
#endif
int32_t dk_stats_flush(dk_stats_flush_params *p) {
  NOTE("statistics of team %d\n", (int)p->team);
  return 0;
}
int32_t dk_team_segment(dk_team_segment_params *p) {
  NOTE("segment %d of %d: %d bytes\n", p->index, p->owner, (int)p->bytes);
  return 0;
}

#define OPERATION(name, format, ...)                                                   \
  int32_t dk_##name(dk_##name##_params *p) {                                           \
    NOTE(#name " #%d on %d" format "\n", (int)p->call, (int)p->stream, ##__VA_ARGS__); \
    return 0;                                                                          \
  }
OPERATION(layout, "")
OPERATION(combine, "%s", p->flags &DK_COMBINE_COPIES ? " copies" : "")
static const char *sms(int n) {
  static char text[32];
  snprintf(text, sizeof text, n == 0 ? "" : " sms %d", n);
  return text;
}
OPERATION(ll_dispatch, " phases %d ticket %d%s", p->phases, p->ticket, sms(p->num_sms))
OPERATION(ll_combine, " phases %d ticket %d%s x+%d", p->phases, p->ticket, sms(p->num_sms), (int)(p->x & 1023))
OPERATION(clean, "")
OPERATION(barrier, " limit %d ms", (int)(p->timeout_ns / 1000000))
OPERATION(mask, "")
static int cannot_dispatch;
/* From now on dispatches cannot be launched, or can. */
int32_t fake_cannot_dispatch(int *on) {
  cannot_dispatch = *on;
  return 0;
}
int32_t dk_dispatch(dk_dispatch_params *p) {
  NOTE("dispatch #%d on %d%s\n", (int)p->call, (int)p->stream, p->flags & DK_DISPATCH_COPIES ? " copies" : "");
  return cannot_dispatch ? DK_EUNSUPPORTED : 0;
}
int32_t dk_notify(dk_notify_params *p) {
  NOTE("notify #%d on %d\n", (int)p->call, (int)p->stream);
  if (p->host_counts) {
    dk_counts *c = (dk_counts *)(uintptr_t)p->host_counts;
    c->num_recv_tokens = p->num_tokens;
    c->seq = p->call;
  }
  return 0;
}
