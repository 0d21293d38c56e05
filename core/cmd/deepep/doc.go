// Command deepep tells what is wrong with a host and shows what expert
// parallelism does on it.
//
//	deepep doctor   examine the host; --compare lays hosts side by side
//	deepep top      all buffers of the host, live; who waits for whom
//	deepep metrics  the same for Prometheus
//	deepep trace    the last calls as a Chrome trace
//	deepep plan     sizes of buffers and queues for a shape; no GPU needed
//	deepep bench    latency of the operations among local ranks
//	deepep sim      the network between nodes, simulated
//
// Deciding and measuring live in the packages below core; here is what belongs
// to a terminal: flags, tables, pictures, an HTTP server. The program writes
// nothing but its output, and reads statistics pages of its own user only.
package main
