//go:build deepep_fastcall

package dl

import (
	"runtime"
	"unsafe"
)

// Call runs `int32_t fn(void *params)` on this thread. params may point into Go memory, a goroutine's stack included:
// the collector neither moves nor frees it during the call. C must not keep the pointer and must not call Go, because
// Go code on this goroutine may move its stack.
func Call(fn uintptr, params unsafe.Pointer) int32 {
	r := cgocall(fn, params)
	runtime.KeepAlive(params)
	return r
}

// cgocall is the runtime's entry into C, which cgo and purego use as well. It takes a C function of one pointer that
// returns an int. The runtime keeps this signature for packages that link to it by name; it is not part of Go's API.
//
//go:noescape
//go:linkname cgocall runtime.cgocall
func cgocall(fn uintptr, arg unsafe.Pointer) int32
