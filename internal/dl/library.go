package dl

import (
	"runtime"

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
