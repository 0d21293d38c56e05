package dl

import (
	"runtime"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/status"
)

// Library is an open shared library.
type Library struct {
	Path   string // the path that Open was given, or what OpenImage calls it
	handle uintptr
	memory int // descriptor of the image's memory; 0 for a library from a file
}

// Open loads one file. The system's loader searches for a name without a slash. All symbols are bound at once and are
// local to the library.
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

// Symbol returns the address of a function. The error names a missing one.
func (l *Library) Symbol(name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	address, err := purego.Dlsym(l.handle, name)
	if err != nil || address == 0 {
		return 0, status.Errorf(status.NotFound, "%s has no function %s: built from other sources?", l.Path, name)
	}
	return address, nil
}

// Close unloads a library that the caller refused. A library whose functions have started threads must stay open.
func (l *Library) Close() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = purego.Dlclose(l.handle) // after an error the library stays loaded
	if l.memory != 0 {
		unix.Close(l.memory)
	}
}
