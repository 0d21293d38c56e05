// Package nicsim computes how long the messages of dispatch and combine take on a network that nobody here has: NICs that
// serve queue pairs in turn, links, leaf and spine switches, and NVLink inside a node.
//
// [Run] carries out one call of all ranks as a discrete-event simulation and is a pure function of its arguments: time is
// counted in whole picoseconds, events of the same time happen in the order in which they were made, and random choices come
// from a seed. Runs share nothing, so any number may go on at once. What is sent, over which queue pair and in which order
// queue pairs were made comes from package plan. Every run ends with an audit (all bytes arrived, no link was faster than
// its rate, nothing is left in a queue); a run that fails it is an error, not a result.
//
// The package knows nothing of terminals: tables and pictures belong to the command-line program. docs/simulation.md says
// what is modelled, what is not, and where the constants come from.
package nicsim
