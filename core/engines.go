package core

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sync/singleflight"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// Names of engines. EngineAuto is the one that DEEPEP_ENGINE or the machine selects.
const (
	EngineAuto = env.EngineAuto
	EngineCPU  = env.EngineCPU
	EngineCUDA = env.EngineCUDA
)

// EngineInfo describes an engine.
type EngineInfo struct {
	Name         string // of the chosen engine: never "auto"
	Available    bool   // its library was loaded and has a device
	NumDevices   int
	SM90Compiled bool // has code for compute capability 9.0
	Path, Build  string
	Reason       string // why it is not available, with the paths tried
}

// embedded is what EmbedKernels was given.
var embedded atomic.Pointer[[]byte]

// EmbedKernels hands over the CPU engine's kernel library, the bytes of libdeepep_cpu.so, which the program holds: it
// is then loaded from memory, and no file is looked for unless DEEPEP_KERNELS names a folder. Call it from an init
// function; the command deepep-embed (core/cmd/deepep-embed) writes a package that does. The bytes must not change.
func EmbedKernels(library []byte) { embedded.Store(&library) }

// libraries holds the kernel libraries by engine and folder.
var libraries struct {
	loading singleflight.Group
	loaded  sync.Map
}

// loadEngine loads a kernel library once per folder setting: callers of one library share its load, and do not wait for
// that of another. After a failure the next call tries again.
func loadEngine(name, dir string) (*kern.Library, error) {
	key := name + "\x00" + dir
	l, err, _ := libraries.loading.Do(key, func() (any, error) {
		if l, ok := libraries.loaded.Load(key); ok {
			return l, nil
		}
		q := dl.Query{File: env.LibraryFile(name), Dir: dir}
		if image := embedded.Load(); image != nil && name == EngineCPU {
			q.Image = *image
		}
		l, err := kern.LoadOrOlder(q, env.OlderLibraryFile(name))
		if err == nil {
			libraries.loaded.Store(key, l)
		}
		return l, err
	})
	if err != nil {
		return nil, err
	}
	return l.(*kern.Library), nil
}

// chooseEngine loads the library of an engine. "auto" or "" is DEEPEP_ENGINE, and without that CUDA if its library
// loads and has a device, else CPU.
func chooseEngine(name string, s env.Settings) (*kern.Library, string, error) {
	if name == "" || name == EngineAuto {
		name = s.Engine
	}
	switch name {
	case EngineCPU, EngineCUDA:
		l, err := loadEngine(name, s.Kernels)
		return l, name, err
	case EngineAuto:
	default:
		return nil, name, status.InvalidArg("engine", name, "auto, cpu or cuda")
	}
	if l, err := loadEngine(EngineCUDA, s.Kernels); err == nil && l.NumDevices > 0 {
		return l, EngineCUDA, nil
	}
	l, err := loadEngine(EngineCPU, s.Kernels)
	return l, EngineCPU, err
}

// internodeLibrary is the CUDA engine's kernel library for queue pairs: the same kernels, and NVSHMEM.
const internodeLibrary = "nvshmem"

// needsInternode reports whether a buffer takes the library for queue pairs instead of its engine's.
func needsInternode(l *kern.Library, engine string, byQueues bool) bool {
	return byQueues && !l.HasTransport() && engine == EngineCUDA
}

// libraryFor returns the library for a buffer: that of the engine. The CUDA engine has a second one, which needs
// NVSHMEM and is loaded only for buffers with queue pairs.
func libraryFor(l *kern.Library, engine string, byQueues bool, s env.Settings) (*kern.Library, error) {
	if !needsInternode(l, engine, byQueues) {
		return l, nil
	}
	internode, err := loadEngine(internodeLibrary, s.Kernels)
	switch {
	case err != nil:
		return nil, status.Errorf(status.Unsupported, "ranks beyond NVLink are reached through libdeepep_%s.so, which cannot be loaded: %w\nfix: %s", internodeLibrary, err, doctor.BuildNodes)
	case internode.NumDevices == 0:
		return nil, status.Errorf(status.Unsupported, "ranks beyond NVLink are reached through %s, which cannot be used: %s", internode.Path, internode.Reason)
	}
	return internode, nil
}

// QueryEngine loads an engine's library and describes it. Local. A library that is missing is no error: Available is
// false and Reason says why. ErrInvalidArgument for an unknown name or damaged settings.
func QueryEngine(name string) (EngineInfo, error) {
	s, err := env.Current()
	if err != nil {
		return EngineInfo{}, err
	}
	l, chosen, err := chooseEngine(name, s)
	info := EngineInfo{Name: chosen}
	if status.CodeOf(err) == status.InvalidArgument {
		return info, err
	}
	if err != nil {
		info.Reason = err.Error()
		return info, nil
	}
	info.Available, info.NumDevices, info.SM90Compiled = l.NumDevices > 0, l.NumDevices, l.Has(abi.CapSM90)
	info.Path, info.Build, info.Reason = l.Path, l.Build, l.Reason
	return info, nil
}
