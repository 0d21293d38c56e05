// Package core is expert-parallel dispatch and combine for Go programs, and the base of the C and Python interfaces.
//
// Ranks form a Group (NewGroup) and make Buffers in it (Group.NewBuffer). A Buffer's operations move tokens to the
// ranks of their experts and back: Layout, Notify, WaitCounts, Dispatch and Combine in normal mode, LowLatencyDispatch
// and LowLatencyCombine for few tokens. DispatchTokens and CombineTokens do normal mode over Go slices.
//
// Tensors are addresses of memory that the buffer's engine can reach: plain memory with "cpu" (AddressOf pins a slice),
// device memory with "cuda". The package keeps none of them: they must stay valid until the call's event is done.
//
// Lifetimes: Destroy is local, idempotent and bounded, for groups and buffers alike; a group outlives its buffers.
// Threads: all functions and methods may be called from any goroutine; a buffer puts its calls in order.
// Errors: errors.Is tests for a kind (ErrTimeout, ErrPeerDead, …); the text names ranks, arguments and values.
//
// A kernel library is looked for in the folder that DEEPEP_KERNELS names; without it in the program itself
// (EmbedKernels), beside it, in the lib and lib64 beside its bin, in the checkout that the program was built from, by the
// loader, and in /usr/local/lib.
//
// The package reads the DEEPEP_* settings of the environment, writes to no descriptor that it did not open, and
// installs no signal handler.
package core
