// Package costs predicts calls of this library's kernels from what they were measured to cost, beside the limits of a
// machine: NIC, NVLink, memory, SMs and queue pairs.
//
// A [File] holds the costs, the machines, and the measurements that the costs come from, each with its source. [Predict]
// computes one call: a constant part and the slowest of the limits, which overlap. [File.Fit] finds the costs again from
// the measurements marked fit; all other measurements check. The package is pure: no clock, no environment, and no IO but
// what a caller gives it to read. docs/scale.md shows what comes out.
package costs
