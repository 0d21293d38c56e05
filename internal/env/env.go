package env

import (
	"slices"
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Choices for Settings.Engine.
const (
	EngineAuto = "auto" // CUDA if there is a device and its library, else CPU
	EngineCPU  = "cpu"
	EngineCUDA = "cuda"
)

// LibraryFile is the file of a kernel library by its kind: an engine, or nvshmem.
func LibraryFile(kind string) string { return "libdeepep_" + kind + ".so" }

// OlderLibraryFile is the file of the same library by an older toolkit, for older drivers; "" where there is none.
func OlderLibraryFile(kind string) string {
	if kind == EngineCUDA {
		return LibraryFile("cuda12")
	}
	return ""
}

// Choices for Settings.ISA, the instruction set of the CPU kernels.
const (
	ISAAuto     = "auto" // the newest one that the processor has
	ISABaseline = "baseline"
	ISAAVX2     = "avx2"
	ISAAVX512   = "avx512"
)

// Choices for Settings.LogLevel, in descending verbosity.
const (
	LogDebug = "debug"
	LogInfo  = "info"
	LogWarn  = "warn"
	LogError = "error"
	LogOff   = "off"
)

// Settings holds the settings of the environment. Load fills every field; the comments name variable and default.
type Settings struct {
	Engine       string        // DEEPEP_ENGINE: auto
	Kernels      string        // DEEPEP_KERNELS: folder of the kernel libraries; empty: the usual places
	Timeout      time.Duration // DEEPEP_TIMEOUT_MS: 100 s; limit of a wait for a peer that is alive
	FirstTimeout time.Duration // DEEPEP_FIRST_TIMEOUT_MS: 300 s; the same for the first call of an operation
	LogLevel     string        // DEEPEP_LOG=level[:path]: warn
	LogPath      string        // empty: standard error
	MaxNVLPeers  int           // DEEPEP_NUM_MAX_NVL_PEERS, else NUM_MAX_NVL_PEERS: 8; ranks of one NVLink domain
	RDMA         RDMA
	Interface    string        // DEEPEP_INTERFACE: network interface or its address; empty: loopback only
	Heartbeat    time.Duration // DEEPEP_HEARTBEAT_MS: 100 ms
	Stats        bool          // DEEPEP_STATS: on; statistics pages for other processes
	ISA          string        // DEEPEP_ISA: auto
	RowSegment   int64         // DEEPEP_ZERO_COPY_BYTES: memory for received rows of normal mode; -1: the plan's
	PreinitBytes uint64        // DEEPEP_PREINIT_BYTES: 256 MiB; host memory that preinitialize brings in, of a rank
	LLTransfer   plan.Transfer // DEEPEP_LL_TRANSFER: auto; how low-latency calls in halves run
	LLSMs        int           // DEEPEP_LL_SMS: 0; SMs of a low-latency call, 0: one for each token of a full call
	NormalCopies bool          // DEEPEP_NORMAL_TRANSFER=copy: copy engines move rows of normal mode inside a node
}

// RDMA holds the settings of nodes joined by RDMA. If the first variable is not set, Load reads the next, which is a
// name of V1's sources or of NVSHMEM.
type RDMA struct {
	MaxPeers       int        // DEEPEP_NUM_MAX_RDMA_PEERS, NUM_MAX_RDMA_PEERS: 1024; nodes of a buffer for normal mode alone
	WorkspaceBytes uint64     // DEEPEP_NUM_WORKSPACE_BYTES, NUM_WORKSPACE_BYTES: limit of the bytes of flags and counts; 0: no limit
	QPs            int        // DEEPEP_NUM_QPS_PER_RANK: queue pairs toward a peer, before the caller's number; 0: the caller's
	QPDepth        int        // DEEPEP_QP_DEPTH, NVSHMEM_QP_DEPTH, NVSHMEM_IBGDA_QP_DEPTH; 0: the plan's
	MaxTokens      int        // DEEPEP_NUM_MAX_RDMA_TOKENS, DEEP_EP_NUM_MAX_RDMA_TOKENS: the largest B of a call; 0: no limit
	Order          plan.Order // DEEPEP_QP_ORDER: auto; in which a rank makes its queue pairs
	NICs           NICs
	Seed           uint64 // DEEPEP_SOFTWARE_RDMA=seed[:late], for tests of the software RDMA: 0
	Late           bool   // the software RDMA applies every write as late as its order allows

	DepthFrom, TokensFrom string // the variables that QPDepth and MaxTokens come from; "" where none is set
}

// MaxNICs is more than any host has.
const MaxNICs = 64

// Limits of the numeric settings; the errors print them.
const (
	maxSMs        = 1024                 // more than any GPU has
	maxTimeoutMS  = 7 * 24 * 3600 * 1000 // a week
	maxNodes      = plan.MaxRanks        // a rank each
	maxWorkspace  = 1 << 47              // the address space of a process
	maxRowSegment = 1 << 47              // likewise
	maxTokens     = plan.MaxDepth/2 - 1  // two requests a token and two for their count
	minBeatMS     = 10                   // the end of a process is seen without heartbeats
	maxBeatMS     = 1000                 // below the age at which a heartbeat means death
	maxPreinit    = 1 << 47              // the address space of a process
)

// Load reads all settings through get, which returns "" for a variable that is not set. On error (InvalidArgument)
// every bad variable is named, with its value and what is allowed.
func Load(get func(name string) string) (Settings, error) {
	p := parser{get: get}
	s := Settings{
		Engine:       p.choice("DEEPEP_ENGINE", EngineAuto, EngineCPU, EngineCUDA),
		Kernels:      p.path("DEEPEP_KERNELS"),
		Timeout:      p.millis("DEEPEP_TIMEOUT_MS", 100_000, 1, maxTimeoutMS),
		FirstTimeout: p.millis("DEEPEP_FIRST_TIMEOUT_MS", 300_000, 1, maxTimeoutMS),
		MaxNVLPeers:  p.number(p.firstSet("DEEPEP_NUM_MAX_NVL_PEERS", "NUM_MAX_NVL_PEERS"), plan.DefaultPeers, 1, plan.MaxRanks),
		Interface:    p.netInterface("DEEPEP_INTERFACE"),
		Heartbeat:    p.millis("DEEPEP_HEARTBEAT_MS", 100, minBeatMS, maxBeatMS),
		Stats:        p.onOff("DEEPEP_STATS", true),
		ISA:          p.choice("DEEPEP_ISA", ISAAuto, ISABaseline, ISAAVX2, ISAAVX512),
		RowSegment:   int64(p.number("DEEPEP_ZERO_COPY_BYTES", -1, 0, maxRowSegment)),
		PreinitBytes: uint64(p.number("DEEPEP_PREINIT_BYTES", 256<<20, 0, maxPreinit)),
	}
	s.LogLevel, s.LogPath = p.log("DEEPEP_LOG")
	s.LLTransfer = plan.Transfer(slices.Index(plan.TransferNames(), p.choice("DEEPEP_LL_TRANSFER", plan.TransferNames()...)))
	s.LLSMs = p.number("DEEPEP_LL_SMS", 0, 0, maxSMs)
	s.NormalCopies = p.choice("DEEPEP_NORMAL_TRANSFER", "sm", "copy") == "copy"
	s.RDMA = p.rdma()
	if len(p.bad) > 0 {
		return Settings{}, status.Errorf(status.InvalidArgument, "%s", strings.Join(p.bad, "; "))
	}
	return s, nil
}
