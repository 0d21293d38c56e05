// Package dl opens shared libraries at run time: it finds the file, resolves functions and calls them.
//
// It is the only package that imports purego, so that the core builds without cgo. A library stays open for the life of
// the process once it was accepted: its threads and the addresses handed out must not lose their code. Functions take
// one pointer to a struct and return an int32; any goroutine may call them. Such a call goes through runtime.cgocall
// itself, as purego's do: a low-latency call makes three, and its caller waits for them.
//
// The package knows no function by name and never decides which engine is wanted.
package dl
