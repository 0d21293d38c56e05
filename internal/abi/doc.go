// Package abi is the Go mirror of kernels/abi/kernels.h: one struct per C struct, field for field, and its constants.
//
// Layouts are equal to those of C on 64-bit Linux; a test compares every offset with kernels.layout, which a C compiler
// made of the header. Addresses are uint64 because they mean memory that Go does not own. The package has data only: no
// function calls a library, and nothing here may change without the header and its ABI version.
package abi
