/* testtransport.h - functions of the plugin for tests, which find them by dlsym. Setting:
 *   DEEPEP_TESTTRANSPORT=SEED[:MICROSECONDS[:QUEUES]]   delays each operation by up to MICROSECONDS and keeps only the
 * order of its queue pair and of fences. Without it every operation takes effect at once, in order. */
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

#ifdef __cplusplus
}
#endif
#endif
