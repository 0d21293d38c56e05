package abi

// Failure is dk_failure: the first failure of a team, Code stored last.
type Failure struct {
	Code     uint32
	Op       uint32
	Phase    uint32
	Rank     int32
	Peer     int32
	Field    uint32
	Call     uint64
	Expected int64
	Seen     int64
	WaitedNS uint64
}

// Status is dk_status: the words through which engine and kernels see each other. It lies in registered host memory of
// StatusBytes bytes. AbortWord, AbortRank and Dead are written by the engine, the rest by kernels; all by atomic access.
type Status struct {
	AbortWord uint32
	AbortRank int32
	Sticky    uint32
	_         uint32
	Progress  uint64
	Failure   Failure
	Dead      [MaxRanks]uint8
}

// Counts is the fixed part of dk_counts; per expert numbers (int32) follow it.
type Counts struct {
	Seq                uint64
	NumRecvTokens      int32
	NumRecvNodesTokens int32
}

// OpStats is dk_op_stats.
type OpStats struct {
	Calls       uint64
	Errors      uint64
	TotalNS     uint64
	MaxNS       uint64
	WaitNS      uint64
	Bytes       uint64
	LastStartNS uint64
	LastNS      uint64
	Hist        [HistBuckets]uint64
}

// TraceRecord is dk_trace_record.
type TraceRecord struct {
	Call       uint64
	StartNS    uint64
	DurationNS uint64
	Op         uint32
	Phase      uint32
}

// StatsPage is dk_stats_page. Arrays of bytes and waits per peer and the trace ring follow at the offsets it names.
type StatsPage struct {
	Magic       uint64
	Version     uint32
	TotalBytes  uint32
	PID         uint32
	NumOps      uint32
	StartTime   uint64
	CreatedNS   uint64
	Rank        int32
	NumRanks    int32
	BufferID    uint32
	State       uint32
	PeersOffset uint64
	TraceOffset uint64
	TraceLen    uint64
	TraceNext   uint64
	Group       [64]byte
	Host        [64]byte
	Engine      [16]byte
	Device      [64]byte
	Ops         [NumOps]OpStats
}
