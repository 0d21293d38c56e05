// Package main is libdeepep.so: the C API of include/deepep.h over package core.
//
// shim.c has the public names. It guards against fork and NULL and completes structs, then calls the Go export of the
// same name here (dpgo_*). This package turns C's structs into core's types, keeps the table of handles, recovers
// panics, and decides nothing: what is allowed and what is the default is for core and the packages below. It alone
// uses cgo.
//
// bridge.go is built for tests only (tag capitest).
package main
