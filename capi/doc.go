// Package main is libdeepep.so: the C API of include/deepep.h over package core.
//
// shim.c has the public names; it guards against fork and NULL and completes structs, then calls the Go export of the
// same name here (dpgo_*). This package converts structs, keeps the table of handles, recovers panics, and decides
// nothing. It is the only package that uses cgo.
package main
