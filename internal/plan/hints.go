package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/status"
)

const (
	maxInt32 = 1<<31 - 1

	// MaxTopK, MaxScales: what the size hints reserve for a row's top-k and scales, as V1 does.
	MaxTopK   = 128
	MaxScales = 128

	// Bounds that keep every size far inside 63 bits. No machine has memory for them.
	maxHiddenBytes = 1 << 20
	maxTokens      = 1 << 24
	maxExperts     = 1 << 16

	sourceBytes    = 8   // where a row came from, internode
	indexBytes     = 8   // a top-k index
	scaleBytes     = 4   // a scale or a weight
	alignBytes     = 128 // sizes are multiples of this
	scaleChannels  = 128 // channels that share a scale
	controlMessage = 16  // what travels with a low-latency row
	bytesBF16      = 2
)

// NVLBytes is get_nvl_buffer_size_hint: bytes of num_nvl_bytes for normal-mode calls with rows of hiddenBytes bytes.
func (c Config) NVLBytes(hiddenBytes int64, t Topology) (uint64, error) {
	if err := c.checkHint(hiddenBytes); err != nil {
		return 0, err
	}
	lanes := c.channels() * uint64(t.NodeSize())
	row := uint64(hiddenBytes) + sourceBytes + MaxTopK*(indexBytes+scaleBytes) + MaxScales*scaleBytes
	counters := uint64(2*t.Nodes()+3) * 4
	// V1's lanes are those of a node. Staging needs at least one row for each rank: more than the lanes where chunks
	// are tiny and nodes many.
	return align(max(lanes*(counters+uint64(c.NVLRecvChunk)*row), uint64(t.Ranks)*align(row, alignBytes)), alignBytes), nil
}

// RDMABytes is get_rdma_buffer_size_hint: 0 where the ranks are one node.
func (c Config) RDMABytes(hiddenBytes int64, t Topology) (uint64, error) {
	if err := c.checkHint(hiddenBytes); err != nil || t.Nodes() == 1 {
		return 0, err
	}
	lanes := c.channels() * uint64(t.Nodes())
	row := uint64(hiddenBytes) + sourceBytes + MaxTopK*(indexBytes+scaleBytes) + MaxScales*scaleBytes + controlMessage
	counters := uint64(t.Peers*2+2) * 4
	const spare = 1 << 20
	// A row for each rank, as a buffer with enable_shrink needs: more than the lanes where chunks are tiny.
	floor := uint64(t.Ranks) * align(row+4*uint64(t.NodeSize()), alignBytes)
	return align(max(2*lanes*(counters+uint64(c.RDMARecvChunk)*row)+spare, floor), alignBytes), nil
}

// HintTopology is the topology that size hints assume: its last node counts as full, for hints are asked for before there
// is a group, for any size.
func HintTopology(ranks, peers int) (Topology, error) {
	if peers == 0 {
		peers = DefaultPeers
	}
	if peers > 0 && ranks > peers && ranks <= MaxRanks {
		ranks = (ranks + peers - 1) / peers * peers
	}
	return NewTopology(ranks, peers)
}

// channels counts pairs of SMs; where the library chooses, V1's default stands in.
func (c Config) channels() uint64 {
	if c.NumSMs == 0 {
		return uint64(DefaultConfig.NumSMs) / 2
	}
	return uint64(c.NumSMs) / 2
}

func (c *Config) checkHint(hiddenBytes int64) error {
	if hiddenBytes < 0 || hiddenBytes > maxHiddenBytes {
		return status.InvalidArg("hidden_bytes", hiddenBytes, fmt.Sprintf("0 to %d", maxHiddenBytes))
	}
	return c.Check()
}

// LowLatencyBytes is get_low_latency_rdma_size_hint: bytes of num_rdma_bytes that low-latency calls of a shape need at
// most. Two slots of send rows, received rows and signals, each as large as dispatch or combine may want them.
func LowLatencyBytes(numMaxTokens, hidden, ranks, experts int64, limits *Limits) (uint64, error) {
	limit, whose := limits.tokens(maxTokens)
	switch {
	case numMaxTokens < 0 || numMaxTokens > int64(limit):
		return 0, status.InvalidArg("num_max_dispatch_tokens_per_rank", numMaxTokens, fmt.Sprintf("0 to %d%s", limit, whose.with()))
	case hidden < 0 || hidden > maxHiddenBytes:
		return 0, status.InvalidArg("hidden", hidden, fmt.Sprintf("0 to %d", maxHiddenBytes))
	case ranks < 1 || ranks > MaxRanks:
		return 0, status.InvalidArg("num_ranks", ranks, fmt.Sprintf("1 to %d", MaxRanks))
	case experts < 0 || experts > maxExperts || experts%ranks != 0:
		return 0, status.InvalidArg("num_experts", experts, fmt.Sprintf("a multiple of num_ranks = %d, at most %d", ranks, maxExperts))
	}
	if err := limits.checkExperts(experts, int(ranks)); err != nil {
		return 0, err
	}
	b, h, e := uint64(numMaxTokens), uint64(hidden), uint64(experts)
	scales := (h + scaleChannels - 1) / scaleChannels
	dispatchRow := controlMessage + max(2*h, h+scales*scaleBytes)
	combineRow := 2*h + scales*4 // minimum and maximum of each block as BF16
	send := max(b*dispatchRow, e*b*combineRow)
	recv := e * b * max(dispatchRow, combineRow)
	signals := align(e*4, alignBytes)
	return align(2*(send+recv+signals)+1, alignBytes), nil
}

// FP8RowBytes are the bytes of a row of FP8 elements with a scale for each 128 of them.
func FP8RowBytes(hidden uint64) uint64 {
	return hidden + scaleBytes*((hidden+scaleChannels-1)/scaleChannels)
}

func align(n, to uint64) uint64 { return (n + to - 1) / to * to }
