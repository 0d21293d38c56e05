/* testtransport.h - what tests ask of the plugin, found with dlsym. The environment says how it behaves:
 *   DEEPEP_TESTTRANSPORT=SEED[:MICROSECONDS[:QUEUES]]   each operation takes effect up to so much later, in the order
 * of its queue pair alone; fences hold. Without it everything takes effect at once, in order. */
#ifndef DEEPEP_TESTTRANSPORT_H
#define DEEPEP_TESTTRANSPORT_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct testtransport_counts {
  uint64_t puts, gets, values, atomics, fences, quiets, bytes; /* toward one PE */
  uint64_t overtaken; /* operations that took effect before one that was posted earlier */
  uint64_t dropped;   /* that went nowhere, since the PE was lost */
} testtransport_counts;
/* 0: counts of a PE are in *out; else there is no such PE, or no transport yet. */
int testtransport_count(int pe, testtransport_counts *out);
/* From now on operations toward the PE go nowhere. 0: done. */
int testtransport_lose(int pe);

#ifdef __cplusplus
}
#endif
#endif
