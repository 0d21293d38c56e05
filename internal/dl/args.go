package dl

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

// CallArgs runs a C function with up to nine integer or pointer arguments and returns its result. It is for libraries
// of the system; Call is for kernel libraries, whose functions take one struct. Arguments are int, int32, uint32,
// uintptr, or unsafe.Pointer. What a pointer points to is on the heap during the call, and C must not keep the pointer.
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

// pointer converts an address of C's memory, which does not move.
func pointer(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// CString copies a string of C's memory, at most 4096 bytes; "" for address 0.
func CString(address uintptr) string {
	if address == 0 {
		return ""
	}
	var b []byte
	for i := range 4096 {
		c := *(*byte)(unsafe.Add(pointer(address), i))
		if c == 0 {
			break
		}
		b = append(b, c)
	}
	return string(b)
}

// Words copies n pointer-sized words of C's memory.
func Words(address uintptr, n int) []uintptr {
	words := make([]uintptr, n)
	for i := range words {
		words[i] = *(*uintptr)(unsafe.Add(pointer(address), uintptr(i)*unsafe.Sizeof(address)))
	}
	return words
}
