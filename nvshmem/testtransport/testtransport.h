/* testtransport.h - functions of the plugin for tests, which find them by dlsym. Setting:
 *   DEEPEP_TESTTRANSPORT=SEED[:MICROSECONDS[:QUEUES]]   delays each operation by up to MICROSECONDS and keeps only the
 * order of its queue pair and of fences. Without it every operation takes effect at once, in order.
 *   DEEPEP_TESTTRANSPORT=nic:LATENCY_US:GB_PER_S[:POSTS_PER_US]   a NIC for each PE: its port sends so many bytes and
 * begins so many operations in a time, takes what waits for different peers in turn, and what it has sent takes effect
 * LATENCY_US later. Operations toward a PE keep their order. A rate of 0: without a limit. */
#ifndef DEEPEP_TESTTRANSPORT_H
#define DEEPEP_TESTTRANSPORT_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct testtransport_counts {
  uint64_t puts, gets, values, atomics, fences, quiets, bytes; /* toward one PE */
  uint64_t overtaken; /* operations that took effect before one that was posted earlier */
  uint64_t dropped;   /* dropped, since the PE was lost */
} testtransport_counts;
/* Writes the counts of a PE to *out. Not 0: there is no such PE, or no transport yet. */
int testtransport_count(int pe, testtransport_counts *out);
/* From now on operations toward the PE are dropped. Not 0: there is no such PE, or no transport yet. */
int testtransport_lose(int pe);
typedef struct testtransport_nic {
  uint64_t launches, chunks, arrivals; /* of the worker; copies of at most 8 KiB; words and completions */
  uint64_t late_ns, latest_ns;         /* after arrivals were due: all together, and the most */
  uint64_t tick_ns;                    /* of the GPU's clock */
} testtransport_nic;
/* Writes the counts of this PE's NIC, as of the last time that it was idle, to *out. Not 0: no NIC is played. */
int testtransport_read_nic(testtransport_nic *out);
/* What kernels need to post by themselves (post.cuh), a WorkerState in device memory. Null: no NIC is played. */
void *testtransport_worker(void);

#ifdef __cplusplus
}
#endif
#endif
