package abi

// Version is DK_ABI_VERSION: engine and kernel library must have the same.
const Version = 3

// Operations (DK_OP_*), as they appear in failure records, statistics and the health pages.
const (
	OpNone       = 0
	OpLayout     = 1
	OpNotify     = 2
	OpDispatch   = 3
	OpCombine    = 4
	OpLLDispatch = 5
	OpLLCombine  = 6
	OpClean      = 7
	OpBarrier    = 8
	OpMask       = 9
	NumOps       = 10
)

// Phases of an operation (DK_PHASE_*).
const (
	PhaseSend = 1
	PhaseRecv = 2
	PhaseBoth = 3
)

// What ranks must agree on (DK_FIELD_*).
const (
	FieldNone        = 0
	FieldHiddenBytes = 1
	FieldNumExperts  = 2
	FieldNumTopK     = 3
	FieldNumScales   = 4
	FieldFormat      = 5
	FieldMaxTokens   = 6
	FieldOperation   = 7
	FieldWorstTokens = 8
	FieldTopKIdx     = 9
)

// Capabilities of a kernel library (DK_CAP_*).
const (
	CapHostStream  = 1
	CapGraph       = 2
	CapPeerRows    = 4
	CapSM90        = 8
	CapFP8Hardware = 16
)

// How memory is shared (DK_SHARE_*).
const (
	ShareNone  = 0
	ShareFD    = 1
	ShareBlob  = 2
	ShareLocal = 3
)

// Flags of a team (DK_TEAM_*), of dispatch, and of the low-latency operations (DK_LL_*).
const (
	TeamShrink      = 1
	TeamLowLatency  = 2
	TeamLLTransport = 4

	DispatchCached = 1

	LLRoundScale = 1
	LLUE8M0      = 2
	LLLogFMT     = 4
	LLZeroCopy   = 8
	LLUnreduced  = 16

	FormatBF16 = 0
	FormatFP8  = 1
	// FormatWeights stands beside the format in a record of FieldFormat of a low-latency dispatch: topk_weights were given.
	FormatWeights = 128

	MaskUpdate = 0
	MaskQuery  = 1
	MaskClean  = 2
)

// What the transport functions take and give: DK_SIGNAL_*, DK_TRANSPORT_*, and the one code (DK_EAGAIN) that is no status
// of the library.
const (
	SignalNone = 0
	SignalSet  = 1
	SignalAdd  = 2

	TransportNoWait = 1
	TransportLate   = 2

	Again = 16
)

// Sizes fixed by the interface.
const (
	MaxRanks    = 1024
	MaxSegments = 64
	NumTickets  = 4
	HistBuckets = 96
	StatusBytes = 4096

	StatsMagic   = 0x3145474150504544 // "DEPPAGE1"
	StatsVersion = 2
)
