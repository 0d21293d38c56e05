package op

import "time"

// SubTeam is a strided set of ranks: Start, Start + Stride … , Size of them. The RDMA sub-team of a rank has the rank of
// its own place on each node, itself among them, in the order of the nodes; rows of normal mode cross between its ranks
// alone. On one node it is the rank itself.
type SubTeam struct {
	Start, Stride, Size int
}

// Ranks lists the ranks of a sub-team.
func (s SubTeam) Ranks() []int {
	ranks := make([]int, s.Size)
	for i := range ranks {
		ranks[i] = s.Start + i*s.Stride
	}
	return ranks
}

// Info describes a buffer. Before its start is complete, fields that are not known yet are zero.
type Info struct {
	Rank, Size   int
	NumNVLPeers  int     // ranks of a node
	RDMARank     int     // this rank's node
	NumRDMARanks int     // nodes
	NVLRank      int     // this rank's place in its node
	RDMATeam     SubTeam // the ranks of this one's place on each node
	QPOrderName  string  // in which queue pairs were made (DEEPEP_QP_ORDER); "" where there are none

	Engine, KernelPath string // "cpu" or "cuda"; the kernel library's file
	DeviceName, ISA    string
	Device             int // ordinal
	NumDeviceSMs       int
	HostStream         bool    // stream 0 is the calling thread: a synchronous call returns when it is done
	PeerRows           bool    // segments are supported
	CommStream         uintptr // the buffer's own stream; 0 where HostStream

	NVLBytes, RDMABytes     uint64 // of the two regions that users may view
	ControlBytes, WireBytes uint64 // of the kernel library's own regions: flags, counts and staging
	TotalBytes              uint64 // of all memory that the ranks share; a device rounds it up to its unit
	RowSegmentBytes         uint64 // of the segment for received rows that DEEPEP_ZERO_COPY_BYTES asks for; 0 without PeerRows

	QPPeers    int // ranks that this one reaches through queue pairs
	QPsPerPeer int // queue pairs toward each of them that calls use in turn
	QPDepth    int // of a queue pair, in operations
	NICs       int // of this rank
	QPsPerNIC  int // toward each peer, on each NIC of this rank; NVSHMEM's NUM_RC_PER_PE
	QPs        int // of this rank in all; NVSHMEM makes them toward all other ranks, also inside a node

	Timeout, FirstTimeout time.Duration // of a wait for a peer; in the first call of an operation

	LowLatency, Shrink bool
	LLCopies           bool // copy engines move rows of low-latency halves (DEEPEP_LL_TRANSFER)
	LLOnStream         bool // a low-latency call in halves runs whole on the communication stream (DEEPEP_LL_TRANSFER=stream)
	NormalCopies       bool // copy engines move rows of normal mode where a call allows it (DEEPEP_NORMAL_TRANSFER)
	Ready              bool // the start is complete
}

// OpStats is what a buffer counted of one operation since it was made.
type OpStats struct {
	Calls, Errors       uint64
	Bytes               uint64        // payload bytes sent
	Wait, Total         time.Duration // waiting for peers; in the operation
	P50, P99, P999, Max time.Duration // percentiles are upper bounds of histogram buckets
	Mean                time.Duration
	BytesToPeer         []uint64
	WaitForPeer         []time.Duration
}
