// Command deepep examines a host for expert parallelism and shows what the buffers on it do.
//
//	deepep doctor   examine the host; --compare compares hosts
//	deepep top      all buffers of the host, live; who waits for whom
//	deepep metrics  statistics of the buffers for Prometheus
//	deepep trace    the last calls as a Chrome trace
//	deepep plan     sizes of buffers and queues for a shape; no GPU needed
//	deepep bench    latency of the operations among local ranks
//	deepep sim      the network between nodes, simulated
//
// The packages below core decide and measure; this one has flags, tables, pictures and an HTTP server. The program
// writes only its output, and reads only its user's statistics pages.
package main
