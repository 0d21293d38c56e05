// Package env reads the DEEPEP_* settings into one struct.
//
// Load is pure: it asks the function it is given and touches nothing else, because Go's own os.Getenv does not see what
// a host program sets after the library was loaded (the C API passes the C library's getenv). An unset and an empty
// variable mean the default. A value that is not understood is an error that names it; nothing is ever guessed.
package env
