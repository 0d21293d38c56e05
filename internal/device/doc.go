// Package device owns what lives on a device: the device itself, streams, events, memory, and memory that ranks share.
//
// Lifetimes: a Device and a Memory are counted; the last Release frees them, so that memory in use outlives the buffer
// it was made for. Streams and events are destroyed once. Close order is memory, streams, events, device. Threads:
// every method may be called from any thread; callers order their launches on a stream themselves.
//
// The package launches no operation and never waits for a peer, except in Share, which exchanges through the function
// that it is given, and in a SymmetricHeap: attaching, sharing, releasing and detaching are collective there.
package device
