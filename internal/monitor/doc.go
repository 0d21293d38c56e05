// Package monitor keeps the statistics pages through which other processes see
// what a buffer does.
//
// A page is a small file of the owner alone in a folder under /dev/shm. The
// engine creates it with [Create] and hands its bytes to the kernel library,
// which counts calls, bytes, waits and latencies in it; its form is
// dk_stats_page in kernels/abi/kernels.h. Anybody with the same user may read
// it: [List] finds the pages of a host, validates every field before it is
// used, tells dead processes by pid and start time, and removes what they left
// half a minute later; Create removes it too.
// [Stats] is one reading; Sub and Merge make rates and sums of them.
//
// A page lives from Create to Remove; its memory until Unmap, since kernels that
// still run write to it. Creating and removing belong to the buffer's owner,
// reading is free to all goroutines and processes. The package starts no
// goroutine, never waits, and never writes to a page after Create except its
// state.
package monitor
