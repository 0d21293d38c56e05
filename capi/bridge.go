//go:build capitest

package main

/*
#include <stdlib.h>
#include <string.h>
#include "deepep.h"

// Calls one public function with a struct of any bytes.
static int32_t dp_call_with(int32_t which, void *bytes) {
  deepep_group_t group = NULL;
  deepep_buffer_t buffer = NULL;
  uint64_t token = 0;
  switch (which) {
    case 0: return deepep_engine_query("cpu", bytes);
    case 1: return deepep_buffer_create(group, bytes, &buffer);
    case 2: return deepep_buffer_info_get(buffer, bytes);
    case 3: return deepep_buffer_warmup(buffer, bytes);
    case 4: return deepep_get_layout(buffer, bytes, NULL);
    case 5: return deepep_barrier(buffer, bytes);
    case 6: return deepep_stats(buffer, bytes, NULL, NULL);
    case 7: return deepep_low_latency_dispatch(buffer, bytes, NULL);
    case 8: return deepep_low_latency_combine(buffer, bytes, NULL);
    case 9: { // the test passes an address of its own, or NULL
      deepep_notify notify = DEEPEP_NOTIFY_INIT;
      notify.handle = bytes;
      return deepep_notify_counts(buffer, &notify, NULL, &token);
    }
    case 10: return deepep_buffer_startup_report(buffer, bytes);
  }
  return -1;
}
*/
import "C"

import (
	"runtime"
	"unsafe"
)

// bridged is how many functions bridge reaches.
const bridged = 11

// bridge calls a public function with a struct of these bytes. Test files cannot use cgo, so it is a product file
// behind the tag capitest, which only the test build sets. Zeros follow the bytes, enough for any struct_size that is
// accepted.
func bridge(which int, data []byte) (status int32, text string) {
	runtime.LockOSThread() // the text of an error is the thread's
	defer runtime.UnlockOSThread()
	const room = 1 << 17
	memory := C.calloc(1, room)
	defer C.free(memory)
	copy(unsafe.Slice((*byte)(memory), room), data)
	status = int32(C.dp_call_with(C.int32_t(which), memory))
	return status, C.GoString(C.deepep_last_error())
}
