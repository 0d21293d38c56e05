// Package health knows which ranks of a group live, which are late, which are dead and which have left.
//
// Every rank has a page of memory that its peers on the same machine map: a heartbeat counter and the call that the
// rank made last, packed into one word. Ranks on other machines get the page's content as notes over the channel. So a
// dead rank can still be asked what it was doing.
//
// A rank is dead when the system says that its process has ended (the channel watches that), or when its heartbeat is
// older than Options.DeadAfter and its connection is closed too. A rank that only sleeps, or is stopped, or computes for
// minutes, is late and never dead. A rank that called Close, or closed its channel in order, has left: not a failure.
// Ranks that are goroutines of this process end by Close alone.
//
// Threads: all methods may be called from any goroutine. Callbacks come from the watcher's own one, in order. Nothing
// here touches a device, and SetLastCall takes no lock. The channel outlives the watcher and is not closed by it.
package health
