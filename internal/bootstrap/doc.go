// Package bootstrap lets the ranks of a group find each other and exchange small blobs and file descriptors.
//
// It has two halves. An Exchanger is the caller's way to gather one blob from each rank: a callback (torch, MPI), TCP to
// rank 0, a shared folder, or goroutines of one process. A Channel is the library's own way: Begin spends exactly one
// gather of the Exchanger on the ranks' hellos, compares what must agree, and Connect joins the ranks directly; from
// then on the Exchanger is not used any more. On one host (one kernel and one network namespace) ranks are joined by
// Unix sockets in the abstract namespace, which leave nothing behind; others by TCP on an interface that must be named.
//
// Trust: a Unix peer must have the user id of this process, a TCP peer must know the nonce that came with the gather;
// neither link is encrypted. Every frame carries the nonce and is bounded, and whatever is read is checked first.
//
// Death: where both processes share a PID namespace, the channel watches the process itself from the gather on, and
// across namespaces of one host from the handshake on, by a pidfd that the peer hands over. So a forked child that keeps
// a dead rank's sockets open hides nothing. A stopped process is late, never dead.
//
// Threads: an Exchanger belongs to one goroutine at a time; a Channel serves any number at once. Every goroutine of the
// package recovers from panics and ends with Close. Nothing here logs, reads the environment or changes signal handlers.
package bootstrap
