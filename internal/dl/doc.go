// Package dl opens shared libraries at run time: it finds the file or takes the bytes that the program
// holds, resolves functions and calls them.
//
// It is the only package that imports purego, so that the core builds without cgo. A library that the caller accepted
// stays open until the process ends: its threads and the function addresses need its code. Functions of a kernel
// library take one pointer to a struct and return an int32; any goroutine may call them. A call goes through
// purego.SyscallN or, with the build tag deepep_fastcall, through runtime.cgocall, to which the package then links by
// name.
//
// The package knows no function by name and does not choose the engine.
package dl
