// Package op has the arguments of operations, as structs that lie in memory like those of include/deepep.h.
//
// Structs and constants are generated from the header, field comments included; the C API hands C's structs to the engine
// by a pointer, without a copy. Addresses are uintptr: memory of the buffer's engine (device memory, or plain memory with
// "cpu"), which must stay valid until the call's event is done. Letters of shapes: T tokens of this rank, R ranks, E
// experts, L = E / R local experts, K top-k, H hidden, S scales of a row, B the largest number of tokens of any rank in a
// low-latency call, N received rows. Where a field may stay zero, its comment says what 0 means.
//
// The engine reads these structs in Go: no C function is given the address of one, so that a struct in Go's memory may
// point to a Handle in Go's memory. The package holds data only and imports no other package of the module.
package op
