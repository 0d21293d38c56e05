//go:build !deepep_fastcall

package dl

import (
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
)

// arguments is the argument list of one call. SyscallN would allocate a list for every call.
type arguments struct {
	params unsafe.Pointer
	words  [1]uintptr
}

var idleArguments = sync.Pool{New: func() any { return new(arguments) }}

// Call runs `int32_t fn(void *params)` on this thread. What params points to is on the heap, where it stays in place
// during the call. C must not keep the pointer and must not call Go.
//
// It costs 0.10 us; with the build tag deepep_fastcall, which enters C through runtime.cgocall, 0.03 us. A low-latency
// call on the CPU engine makes two or three and takes 0.15 us longer than with the tag (0.56 us in place of 0.41 us
// until it returns; bench/hostcost, Xeon of 2 cores).
func Call(fn uintptr, params unsafe.Pointer) int32 {
	a := idleArguments.Get().(*arguments)
	a.params, a.words[0] = params, uintptr(params) // the store makes the compiler put the struct on the heap
	r, _, _ := purego.SyscallN(fn, a.words[:]...)
	a.params = nil
	idleArguments.Put(a)
	return int32(r)
}
