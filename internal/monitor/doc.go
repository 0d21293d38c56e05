// Package monitor keeps the statistics pages through which other processes observe a buffer.
//
// A page is a small file in a folder under /dev/shm that the owner alone may open. The engine creates it with [Create]
// and passes its memory to the kernel library, which counts calls, bytes, waits and latencies in it; its layout is
// dk_stats_page in kernels/abi/kernels.h. Any process of the same user may read it: [List] finds the pages of a host,
// checks every field before use, recognises dead processes by pid and start time, and removes their pages half a minute
// later; Create removes them too. [Stats] is one reading; its methods compute differences, sums and percentiles.
//
// A page exists from Create to Remove; its memory until Unmap, because running kernels write to it. The buffer's owner
// creates and removes pages; any goroutine and process may read them. The package starts no goroutine, never waits, and
// after Create writes only a page's state.
package monitor
