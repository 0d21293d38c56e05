// Package nicsim simulates the messages of dispatch and combine on a network of many nodes: NICs that serve queue pairs
// in turn, links, leaf and spine switches, and NVLink inside a node.
//
// [Run] simulates one call of all ranks as discrete events and is a pure function of its arguments: time is counted in
// whole picoseconds, events of the same time happen in the order in which they were made, and a seed determines random
// choices. Runs share nothing, so that any number may run at once. Package plan determines the messages, their queue
// pairs and the order in which ranks make queue pairs. Every run ends with an audit (all bytes arrived, no link was
// faster than its rate, all queues are empty); a run that fails it returns an error.
//
// Tables and pictures belong to the command. docs/simulation.md describes what is modelled, what is not, and the
// sources of the constants.
package nicsim
