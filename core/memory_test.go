package core

import "unsafe"

// memoryAt is a view of memory that a buffer gave.
func memoryAt[T any](address uintptr, n int) []T {
	return unsafe.Slice((*T)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), n)
}
