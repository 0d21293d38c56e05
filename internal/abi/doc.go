// Package abi is the Go mirror of kernels/abi/kernels.h: its structs, field for field, and its constants.
//
// All of it is generated from the header (make generate). Layouts are equal to those of C on 64-bit Linux: a test compares
// every offset with kernels.layout, which a C compiler made of the header. Addresses are uint64 because they mean memory
// that Go does not own. The package has data only.
package abi
