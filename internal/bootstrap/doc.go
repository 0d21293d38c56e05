// Package bootstrap connects the ranks of a group, which then exchange small blobs and file descriptors.
//
// It has two halves. An Exchanger is the caller's means to gather one blob from each rank: a callback (torch, MPI), TCP
// to rank 0, a shared folder, or goroutines of one process. A Channel is the library's: Begin gathers the ranks' hellos
// in exactly one gather of the Exchanger and compares what must agree; Connect joins the ranks directly and does not
// use the Exchanger. Ranks of one host (one kernel and one network namespace) are joined by Unix sockets in the
// abstract namespace, which leave no files; others by TCP on an interface that the caller must name.
//
// Trust: a Unix peer must have the user id of this process, a TCP peer must know the nonce that came with the gather;
// neither link is encrypted. Every frame carries the nonce and is bounded, and the reader checks each field before use.
//
// Death: if both processes share a PID namespace, the channel watches the peer's process from the gather on, and across
// namespaces of one host from the handshake on, by a pidfd that the peer sends. A forked child that keeps a dead rank's
// sockets open thus does not hide the death. A stopped process is late, never dead.
//
// Threads: one goroutine at a time may use an Exchanger, any number a Channel. Every goroutine of the package recovers
// from panics and ends with Close. The package does not log, read the environment or change signal handlers.
package bootstrap
