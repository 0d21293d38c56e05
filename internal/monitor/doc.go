// Package monitor keeps the statistics pages through which other processes observe a buffer.
//
// A page is memory of its process, and a small file in a folder under /dev/shm that the owner alone may open. The engine
// creates it with [Create] and passes its memory to the kernel library, which counts calls, bytes, waits and latencies
// in it; its layout is dk_stats_page in kernels/abi/kernels.h. A goroutine, which runs while the process has pages,
// copies them to their files every [PublishEvery]. Any process of the same user may read a file: [List] finds the pages
// of a host, checks every field before use, recognises dead processes by pid and start time, and removes their pages
// half a minute later; Create removes them too. Neither changes anything in another user's folder. [Stats] is one
// reading; its methods compute differences, sums and percentiles.
//
// A page's file exists from Create to Remove; its memory until Unmap, because running kernels write to it. The buffer's
// owner creates and removes pages; any goroutine and process may read them. The package never waits, and after Create
// writes only a page's state and its file.
package monitor
