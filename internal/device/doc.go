// Package device owns what lives on a device: the device itself, streams, events, memory, and memory that ranks share.
//
// Lifetimes: a Device and a Memory are counted; the last Release frees them, so memory that somebody still uses outlives
// the buffer it was made for. Streams and events are destroyed once. Close order is memory, streams, events, device.
// Threads: every method may be called from any thread; who launches on a stream orders the calls himself.
//
// The package launches no operation and never waits for a peer, except in Share, which exchanges through the function
// it is given, and in what a SymmetricHeap does: attaching, sharing, releasing and detaching are collective there.
package device
