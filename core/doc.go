// Package core is expert-parallel dispatch and combine for Go programs, and what the C and Python interfaces stand on.
//
// Ranks form a Group (NewGroup), make one or more Buffers in it (Group.NewBuffer), and call its operations: Layout,
// Notify, WaitCounts, Dispatch and Combine in normal mode, LowLatencyDispatch and LowLatencyCombine for few tokens.
// Tensors are addresses of memory that the buffer's engine can reach: plain memory with "cpu", device memory with "cuda".
// Nothing that is given is kept: tensors must live until the call's event is done; AddressOf and runtime.KeepAlive help.
//
// Lifetimes: Destroy is local, idempotent and bounded, for groups and buffers alike; a group outlives its buffers.
// Threads: everything may be called from any goroutine; calls of one buffer are put in order inside.
// Errors: errors.Is tells the kind (ErrTimeout, ErrPeerDead, …), the text names ranks, arguments and values.
//
// The package reads settings through SetGetenv's function, writes to no descriptor that it did not open, and installs no
// signal handler.
package core
