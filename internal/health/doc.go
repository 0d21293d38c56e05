// Package health determines which ranks of a group are alive, late, dead, or have left.
//
// Every rank has a page of memory with a heartbeat counter and its last call, packed into one word. Peers on the same
// machine map the page, so that they can read a dead rank's last call. Ranks on other machines get the page's content
// as notes over the channel.
//
// A rank is dead when its process has ended (the channel watches it), or when its heartbeat is older than
// Options.DeadAfter and its connection is closed. A rank that sleeps, is stopped, or computes for minutes is late,
// never dead. A rank that called Close or closed its channel has left, which is not a failure. Ranks that are
// goroutines of this process end by Close alone.
//
// Threads: any goroutine may call all methods. The watcher's goroutine makes the callbacks, in order. The package does
// not touch a device, and SetLastCall takes no lock. The watcher does not close the channel.
package health
