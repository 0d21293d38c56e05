package dl

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

// CallArgs runs a C function with up to nine integer or pointer arguments and gives its result. It is for the system's own
// libraries, which do not take one struct; a kernel library is called through Call. Arguments are int, int32, uint32,
// uintptr, or unsafe.Pointer; what a pointer leads to lives on the heap during the call and C must not keep it.
func CallArgs(fn uintptr, args ...any) uintptr {
	words := make([]uintptr, len(args))
	for i, a := range args {
		switch v := a.(type) {
		case int:
			words[i] = uintptr(v)
		case int32:
			words[i] = uintptr(v)
		case uint32:
			words[i] = uintptr(v)
		case uintptr:
			words[i] = v
		case unsafe.Pointer: // an interface holds it, so that it has escaped to the heap
			words[i] = uintptr(v)
		default:
			panic(fmt.Sprintf("dl: argument %d is a %T", i, a))
		}
	}
	r, _, _ := purego.SyscallN(fn, words...)
	runtime.KeepAlive(args)
	return r
}

// at turns an address that C gave into a pointer; the memory is C's and does not move.
func at(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// CString copies a string that C owns, at most 4096 bytes of it; address 0 gives "".
func CString(address uintptr) string {
	if address == 0 {
		return ""
	}
	var b []byte
	for i := range 4096 {
		c := *(*byte)(unsafe.Add(at(address), i))
		if c == 0 {
			break
		}
		b = append(b, c)
	}
	return string(b)
}

// Words copies n pointer-sized words that C owns.
func Words(address uintptr, n int) []uintptr {
	words := make([]uintptr, n)
	for i := range words {
		words[i] = *(*uintptr)(unsafe.Add(at(address), uintptr(i)*unsafe.Sizeof(address)))
	}
	return words
}
