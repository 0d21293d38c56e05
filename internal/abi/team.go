package abi

// BlockSizesParams is dk_block_sizes_params.
type BlockSizesParams struct {
	Header
	NumRanks     int32
	NumNVLPeers  int32
	NVLBytes     uint64
	RDMABytes    uint64
	ControlBytes uint64
	WireBytes    uint64
	MinNVLBytes  uint64
	MaxRowBytes  uint64
	MinRDMABytes uint64
	Flags        uint32
	_            uint32
}

// LLLayoutParams is dk_ll_layout_params.
type LLLayoutParams struct {
	Header
	NumRanks          int32
	NumMaxTokens      int32
	Hidden            int32
	NumExperts        int32
	RDMABytes         uint64
	WireBytes         uint64
	ZeroCopyOffset    [2]uint64
	ZeroCopyRowStride uint64
}

// TeamCreateParams is dk_team_create_params.
type TeamCreateParams struct {
	Header
	Device         uint64
	Rank           int32
	NumRanks       int32
	NumNVLPeers    int32
	Flags          uint32
	HostPeerBlocks uint64
	ControlOffset  uint64
	ControlBytes   uint64
	WireOffset     uint64
	WireBytes      uint64
	NVLOffset      uint64
	NVLBytes       uint64
	RDMAOffset     uint64
	RDMABytes      uint64
	HostStatus     uint64
	Status         uint64
	HostStats      uint64
	Stats          uint64
	SMShare        int32
	SMShareIndex   int32
	Team           uint64
	Transport      uint64
}

// TeamDestroyParams is dk_team_destroy_params.
type TeamDestroyParams struct {
	Header
	Team uint64
}

// TeamSegmentParams is dk_team_segment_params.
type TeamSegmentParams struct {
	Header
	Team    uint64
	Index   int32
	Owner   int32
	Address uint64
	Bytes   uint64
}

// StatsFlushParams is dk_stats_flush_params.
type StatsFlushParams struct {
	Header
	Team      uint64
	TimeoutNS uint64
}
