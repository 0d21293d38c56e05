/* shim.h - what shim.c hands to the Go exports: complete structs and plain integers, so that Go never sees a handle as
 * a pointer. */
#ifndef DEEPEP_SHIM_H
#define DEEPEP_SHIM_H
#include "deepep.h"

typedef struct dp_call {
  int32_t is_async, has_config;
  uint64_t stream, previous_event, event;
  deepep_config config;
} dp_call;

/* Stores the text of this thread's last failure. */
void dp_set_error(const char *text);
int32_t dp_allgather(deepep_allgather_fn fn, const void *send, void *recv, size_t bytes, void *user);
void dp_log(deepep_log_fn fn, int32_t level, const char *message, void *user);

#endif
