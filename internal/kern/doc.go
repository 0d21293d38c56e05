// Package kern binds a kernel library: one Go function for each dk_* function of kernels/abi/kernels.h, and no logic.
//
// A function fills in the struct's size, calls, and returns the DK_* code as it came; Error turns a code into an error
// where somebody wants one. Parameter structs belong to the caller and live on the heap; a struct serves one call at a
// time. A library may lack the functions of a transport, or of a transport's heap, as a whole: HasTransport and
// HasTransportHeap tell. A Library is immutable after Load and serves any number of goroutines, under the rules that kernels.h states.
package kern
