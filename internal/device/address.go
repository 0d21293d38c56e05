package device

import "unsafe"

// addressOf is the address of memory outside Go's heap.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
