package libs

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"unsafe"

	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/doctor"
)

// Host is the root of this machine with all libraries.
func Host() doctor.Root {
	r := doctor.Host()
	r.NVML, r.CUDA, r.Verbs = NVML, CUDA, Verbs
	return r
}

// Quiet is the root for checks inside a program that may not want CUDA started: it queries neither libcuda, which does
// not survive a later fork, nor the NICs.
func Quiet() doctor.Root {
	r := doctor.Host()
	r.NVML = NVML
	return r
}

// FirstFail is the text of the first FAIL of a use's checks, which constructors add to their errors; "" if there is
// none before ctx ends. It does not start CUDA.
func FirstFail(ctx context.Context, opt doctor.Options) string {
	line, found := doctor.FirstFail(ctx, Quiet(), opt)
	if !found {
		return ""
	}
	return "deepep doctor says: " + line.String()
}

// library is an open library with its resolved functions.
type library struct {
	lib   *dl.Library
	fns   map[string]uintptr
	wrong func(code uintptr) string // text of an error code
}

// open loads the first library of names that exists.
func open(names ...string) (*library, error) {
	var first error
	for _, name := range names {
		l, err := dl.Open(name)
		if err == nil {
			return &library{lib: l, fns: map[string]uintptr{}}, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// fn resolves a function once.
func (l *library) fn(name string) (uintptr, error) {
	if f, ok := l.fns[name]; ok {
		return f, nil
	}
	f, err := l.lib.Symbol(name)
	if err != nil {
		return 0, err
	}
	l.fns[name] = f
	return f, nil
}

// call runs a function whose result 0 means success.
func (l *library) call(name string, args ...any) error {
	f, err := l.fn(name)
	if err != nil {
		return err
	}
	r := dl.CallArgs(f, args...)
	if code := uintptr(uint32(r)); code != 0 {
		return &failure{name, code, l.wrong(code)}
	}
	return nil
}

// failure is an error code of a library.
type failure struct {
	name string
	code uintptr
	text string
}

func (f *failure) Error() string { return fmt.Sprintf("%s: %s (%d)", f.name, f.text, f.code) }

// text reads a C string in a buffer.
func text(b []byte) string {
	s, _, _ := bytes.Cut(b, []byte{0})
	return string(s)
}

// sysfsBus turns NVML's and CUDA's "00000000:1B:00.0" or "0000:1B:00.0" into "0000:1b:00.0".
func sysfsBus(s string) string {
	s = strings.ToLower(s)
	domain, rest, ok := strings.Cut(s, ":")
	if !ok {
		return s
	}
	if len(domain) > 4 {
		domain = domain[len(domain)-4:]
	}
	return domain + ":" + rest
}

func pointer[T any](v *T) unsafe.Pointer { return unsafe.Pointer(v) }

func stopped(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
