package abi

// OpHeader begins the parameters of every operation (DK_OP_HEADER).
type OpHeader struct {
	Header
	Team      uint64
	Stream    uint64
	Call      uint64
	TimeoutNS uint64
	NumSMs    int32
	Flags     uint32
}

// LayoutParams is dk_layout_params.
type LayoutParams struct {
	OpHeader
	TopKIdx         uint64
	IndexBytes      int32
	NumTokens       int32
	NumTopK         int32
	NumExperts      int32
	TokensPerRank   uint64
	TokensPerNode   uint64
	TokensPerExpert uint64
	TokenInRank     uint64
}

// NotifyParams is dk_notify_params.
type NotifyParams struct {
	OpHeader
	TokensPerRank    uint64
	TokensPerExpert  uint64
	TokenInRank      uint64
	NumTokens        int32
	NumTopK          int32
	NumExperts       int32
	ExpertAlignment  int32
	NumWorstTokens   int32
	NumScales        int32
	HiddenBytes      uint64
	RankPrefixMatrix uint64
	SendHead         uint64
	HostCounts       uint64
	Counts           uint64
}

// DispatchParams is dk_dispatch_params.
type DispatchParams struct {
	OpHeader
	X                 uint64
	Scales            uint64
	ScaleTokenStride  int64
	ScaleStride       int64
	TopKIdx           uint64
	TopKWeights       uint64
	RankPrefixMatrix  uint64
	SendHead          uint64
	HiddenBytes       uint64
	NumTokens         int32
	NumScales         int32
	NumTopK           int32
	IndexBytes        int32
	NumExperts        int32
	NumRecvTokens     int32
	NumWorstTokens    int32
	RecvSegment       int32
	RecvSegmentOffset uint64
	RecvX             uint64
	RecvScales        uint64
	RecvTopKIdx       uint64
	RecvTopKWeights   uint64
	RecvSrcIdx        uint64
	NVLSendChunk      int32
	NVLRecvChunk      int32
	RDMASendChunk     int32
	RDMARecvChunk     int32
}

// CombineParams is dk_combine_params.
type CombineParams struct {
	OpHeader
	X                   uint64
	TopKWeights         uint64
	Bias                [2]uint64
	RankPrefixMatrix    uint64
	SendHead            uint64
	RecvSrcIdx          uint64
	NumTokens           int32
	NumRecvTokens       int32
	Hidden              int32
	NumTopK             int32
	XSegment            int32
	_                   int32
	XSegmentOffset      uint64
	CombinedX           uint64
	CombinedTopKWeights uint64
	NVLSendChunk        int32
	NVLRecvChunk        int32
	RDMASendChunk       int32
	RDMARecvChunk       int32
}

// LLDispatchParams is dk_ll_dispatch_params.
type LLDispatchParams struct {
	OpHeader
	Phases          uint32
	Ticket          uint32
	X               uint64
	TopKIdx         uint64
	TopKWeights     uint64
	NumTokens       int32
	NumTopK         int32
	IndexBytes      int32
	Format          int32
	NumMaxTokens    int32
	Hidden          int32
	NumExperts      int32
	_               int32
	RecvX           uint64
	RecvScales      uint64
	RecvCount       uint64
	SrcInfo         uint64
	LayoutRange     uint64
	CumulativeStats uint64
	WaitStats       uint64
}

// LLCombineParams is dk_ll_combine_params.
type LLCombineParams struct {
	OpHeader
	Phases       uint32
	Ticket       uint32
	X            uint64
	XRowStride   uint64
	TopKIdx      uint64
	TopKWeights  uint64
	SrcInfo      uint64
	LayoutRange  uint64
	NumTokens    int32
	NumTopK      int32
	IndexBytes   int32
	NumMaxTokens int32
	Hidden       int32
	NumExperts   int32
	CombinedX    uint64
	WaitStats    uint64
}

// CleanParams is dk_clean_params.
type CleanParams struct {
	OpHeader
	NumMaxTokens int32
	Hidden       int32
	NumExperts   int32
	_            int32
}

// BarrierParams is dk_barrier_params.
type BarrierParams struct {
	OpHeader
}

// MaskParams is dk_mask_params.
type MaskParams struct {
	OpHeader
	What  int32
	Rank  int32
	Value int32
	_     int32
	Out   uint64
}
