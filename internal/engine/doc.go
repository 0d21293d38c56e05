// Package engine is the operations of a buffer: who launches what on which stream, in which order, and what went wrong.
//
// A Buffer is made collectively by all ranks of a group (New), used by any number of threads, and destroyed locally
// (Destroy: idempotent and bounded). Calls of one buffer are put in order by a mutex, launch on the caller's thread and
// run in the order in which they were issued, on whatever streams. No call waits for a peer, except on an engine whose
// stream 0 is the calling thread, and except the functions named Wait.
//
// Failures live in host memory that kernels write. They are looked at when a call begins and when a wait ends; from then
// on the buffer refuses calls and says why. Peers' deaths come from the group (PeerDied, PeerLeft), from any goroutine.
//
// Ranks of other nodes are reached through a transport of the kernel library: queue pairs by the plan, opened before the
// library's team and closed after it. Loads and stores never see such a rank's memory, also where it is mapped here.
//
// The package knows no CUDA, reads no environment, and never panics on bad input. Its goroutines are that of the background
// start, which recovers, and those for calls of a transport that know no limit.
package engine
