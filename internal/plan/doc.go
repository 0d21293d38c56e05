// Package plan decides: shapes, offsets, sizes, groups of ranks, configurations, and whether arguments make sense.
//
// Everything here is a pure function of its arguments: no clock, no pointer, no environment, no IO. Argument checks
// return errors that name the argument as the C header does, what came and what is allowed. Numbers that a kernel
// library also computes are compared with it in the engine's tests.
package plan
