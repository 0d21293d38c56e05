// Package engine runs the operations of a buffer: it checks them, orders them among streams, launches them in the
// kernel library, and explains their failures.
//
// A Buffer is made collectively by all ranks of a group (New), used by any number of threads, and destroyed locally
// (Destroy: idempotent and bounded). Calls of one buffer are put in order by a mutex, launch on the caller's thread and
// run in the order in which they were issued, on whatever streams. No call waits for a peer, except on an engine whose
// stream 0 is the calling thread, and except the functions named Wait.
//
// Kernels write failures to host memory (the status page). The engine reads it when a call begins and when a wait ends;
// after a failure the buffer refuses calls with that reason. The group reports peers' deaths (PeerDied, PeerLeft) from
// any goroutine.
//
// Ranks of other nodes are reached through a transport of the kernel library: queue pairs by the plan, opened before
// the library's team and closed after it. Loads and stores never see such a rank's memory, also where it is mapped
// here.
//
// The package names no engine, reads no environment, and never panics on bad input. Its goroutines are that of the
// background start and those for a transport's calls without a limit (symmetric_heap.go); both recover.
package engine
