package dl

import (
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/deepep-go/deepep/internal/status"
)

// Library is an open shared library.
type Library struct {
	Path   string // as it was opened
	handle uintptr
}

// Open loads one file; a name without a slash is searched by the system's loader. All symbols are bound at once and stay
// private to the library.
func Open(path string) (*Library, error) {
	// dlerror is kept per thread: the goroutine must not move between dlopen and dlerror.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, status.Errorf(status.NotFound, "cannot load %s: %w", path, err)
	}
	return &Library{Path: path, handle: handle}, nil
}

// Symbol gives the address of a function. A missing one is named.
func (l *Library) Symbol(name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	address, err := purego.Dlsym(l.handle, name)
	if err != nil || address == 0 {
		return 0, status.Errorf(status.NotFound, "%s has no function %s: built from other sources?", l.Path, name)
	}
	return address, nil
}

// Close unloads a library that was not accepted. One whose functions have run threads must stay.
func (l *Library) Close() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = purego.Dlclose(l.handle) // a failure leaves the library loaded, which harms nobody
}

// Call runs `int32_t fn(void *params)` on this thread, which costs a third of purego's SyscallN: one argument needs no list.
// params may point into Go memory, a goroutine's stack too: neither moves nor goes away during the call. C must not keep it,
// and must not call Go, since then the stack might move.
func Call(fn uintptr, params unsafe.Pointer) int32 {
	r := cgocall(fn, params)
	runtime.KeepAlive(params)
	return r
}

// cgocall is what cgo's own calls go through, and purego's: it leaves Go for a function of C that takes one pointer and
// returns an int. The runtime promises its signature to packages that reach it so.
//
//go:noescape
//go:linkname cgocall runtime.cgocall
func cgocall(fn uintptr, arg unsafe.Pointer) int32
