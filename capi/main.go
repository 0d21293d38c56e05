package main

/*
#cgo CFLAGS: -I${SRCDIR}/../include -Wall -Wextra -Werror
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"runtime"
	"runtime/debug"
	"unsafe"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/status"
)

// maxProcs bounds the Go scheduler: a host runs one process a rank, which would compete for the cores.
const maxProcs = 4

func init() {
	runtime.GOMAXPROCS(min(maxProcs, runtime.NumCPU()))
	env.SetSource(getenv)
}

// getenv reads through C's getenv, which sees variables that the host program set after its start.
func getenv(name string) string {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	if value := C.getenv(c); value != nil {
		return C.GoString(value)
	}
	return ""
}

// guard runs an export's body: an error becomes a status and this thread's text, a panic a status too.
func guard(f func() error) (code C.int32_t) {
	defer func() {
		if p := recover(); p != nil {
			code = fail(status.Errorf(status.Internal, "panic: %v\n%s", p, debug.Stack()))
		}
	}()
	if err := f(); err != nil {
		return fail(err)
	}
	return C.DEEPEP_OK
}

func fail(err error) C.int32_t {
	code := status.CodeOf(err)
	if code != C.DEEPEP_PENDING { // no text: PENDING is no failure, and waits return it often
		text := C.CString(err.Error())
		C.dp_set_error(text)
		C.free(unsafe.Pointer(text))
	}
	return C.int32_t(code)
}

func main() {}
