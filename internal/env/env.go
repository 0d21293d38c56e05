package env

import (
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// Choices for Settings.Engine.
const (
	EngineAuto = "auto" // CUDA where a device and its library are there, else CPU
	EngineCPU  = "cpu"
	EngineCUDA = "cuda"
)

// Choices for Settings.ISA, the instruction set of the CPU kernels.
const (
	ISAAuto     = "auto" // the best that the processor has
	ISABaseline = "baseline"
	ISAAVX2     = "avx2"
	ISAAVX512   = "avx512"
)

// Choices for Settings.LogLevel, least to most silent.
const (
	LogDebug = "debug"
	LogInfo  = "info"
	LogWarn  = "warn"
	LogError = "error"
	LogOff   = "off"
)

// Settings is what the environment asks for. Load fills every field; the comments give variable and default.
type Settings struct {
	Engine       string        // DEEPEP_ENGINE: auto
	Kernels      string        // DEEPEP_KERNELS: folder of the kernel libraries; empty: the usual places
	Timeout      time.Duration // DEEPEP_TIMEOUT_MS: 100 s; how long a wait for a living peer may last
	FirstTimeout time.Duration // DEEPEP_FIRST_TIMEOUT_MS: 300 s; the same for the first call of an operation
	LogLevel     string        // DEEPEP_LOG=level[:path]: warn
	LogPath      string        // empty: a duplicate of standard error
	MaxNVLPeers  int           // DEEPEP_NUM_MAX_NVL_PEERS, else NUM_MAX_NVL_PEERS: 8; ranks of one NVLink domain
	RDMA         RDMA
	Interface    string        // DEEPEP_INTERFACE: network interface or its address; empty: loopback only
	Heartbeat    time.Duration // DEEPEP_HEARTBEAT_MS: 100 ms
	Stats        bool          // DEEPEP_STATS: on; statistics pages that other processes can read
	ISA          string        // DEEPEP_ISA: auto
}

// RDMA is the part of the settings that concerns nodes joined by RDMA. A name of V1's sources or of NVSHMEM counts where the
// library's own is not set.
type RDMA struct {
	MaxPeers       int    // DEEPEP_NUM_MAX_RDMA_PEERS, NUM_MAX_RDMA_PEERS: 1024; nodes of a buffer for normal mode alone
	WorkspaceBytes uint64 // DEEPEP_NUM_WORKSPACE_BYTES, NUM_WORKSPACE_BYTES: what flags and counts may take at most; 0: no limit
	QPs            int    // DEEPEP_NUM_QPS_PER_RANK: queue pairs toward a peer, whatever the program asks for; 0: as it asks
	QPDepth        int    // DEEPEP_QP_DEPTH, NVSHMEM_QP_DEPTH, NVSHMEM_IBGDA_QP_DEPTH; 0: the plan's
	MaxTokens      int    // DEEPEP_NUM_MAX_RDMA_TOKENS, DEEP_EP_NUM_MAX_RDMA_TOKENS: the largest B of a call; 0: no limit
	Seed           uint64 // DEEPEP_SOFTWARE_RDMA=seed[:late], for tests of the software RDMA: 0
	Late           bool   // everything takes effect as late as it may
}

// Limits of the numeric settings; the errors print them.
const (
	maxTimeoutMS = 7 * 24 * 3600 * 1000 // a week
	maxNVLPeers  = 1024                 // as many ranks as a group may have
	maxNodes     = 1024                 // a rank each
	maxWorkspace = 1 << 47              // the address space of a process
	maxQPs       = 1024                 // toward one peer
	maxDepth     = 32768                // of a queue pair, NVSHMEM's limit
	maxTokens    = maxDepth/2 - 1       // two requests a token and two for their count
	minBeatMS    = 10                   // faster beats only burn time: a death is seen without them
	maxBeatMS    = 1000                 // slower ones reach the limit after which silence counts as death
)

// Load reads all settings through get, which returns "" for a variable that is not set.
// On error (InvalidArgument) every bad variable is named, with its value and what is allowed.
func Load(get func(name string) string) (Settings, error) {
	p := parser{get: get}
	s := Settings{
		Engine:       p.choice("DEEPEP_ENGINE", EngineAuto, EngineCPU, EngineCUDA),
		Kernels:      p.path("DEEPEP_KERNELS"),
		Timeout:      p.millis("DEEPEP_TIMEOUT_MS", 100_000, 1, maxTimeoutMS),
		FirstTimeout: p.millis("DEEPEP_FIRST_TIMEOUT_MS", 300_000, 1, maxTimeoutMS),
		MaxNVLPeers:  p.number(p.firstSet("DEEPEP_NUM_MAX_NVL_PEERS", "NUM_MAX_NVL_PEERS"), 8, 1, maxNVLPeers),
		Interface:    p.netInterface("DEEPEP_INTERFACE"),
		Heartbeat:    p.millis("DEEPEP_HEARTBEAT_MS", 100, minBeatMS, maxBeatMS),
		Stats:        p.onOff("DEEPEP_STATS", true),
		ISA:          p.choice("DEEPEP_ISA", ISAAuto, ISABaseline, ISAAVX2, ISAAVX512),
	}
	s.LogLevel, s.LogPath = p.log("DEEPEP_LOG")
	s.RDMA = p.rdma()
	if len(p.bad) > 0 {
		return Settings{}, status.Errorf(status.InvalidArgument, "%s", strings.Join(p.bad, "; "))
	}
	return s, nil
}
