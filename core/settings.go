package core

import (
	"time"

	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Kinds of configuration for DefaultConfigFor.
const (
	KindDispatch = plan.KindDispatch
	KindCombine  = plan.KindCombine
)

// DefaultConfig is the configuration that V1's Config() has.
func DefaultConfig() Config { return Config(plan.DefaultConfig) }

// DefaultConfigFor is the configuration of a kind of call for any number of ranks from 1 on.
func DefaultConfigFor(kind, ranks int) (Config, error) {
	c, err := plan.ConfigFor(kind, ranks)
	return Config(c), err
}

// CheckConfig refuses a configuration that no call takes, and rounds RDMARecvChunk up to a multiple of RDMASendChunk.
func CheckConfig(c *Config) error {
	if c == nil {
		return status.InvalidArg("c", "nil", "a configuration")
	}
	return (*plan.Config)(c).Check()
}

// SizeHint returns the bytes that a buffer should have for normal-mode calls with rows of hiddenBytes: NumNVLBytes, or
// with rdma NumRDMABytes, which is 0 where the ranks are one node. The node size comes from the environment.
func SizeHint(c Config, hiddenBytes int64, ranks int, rdma bool) (uint64, error) {
	s, err := env.Current()
	if err != nil {
		return 0, err
	}
	t, err := plan.HintTopology(ranks, s.MaxNVLPeers)
	if err != nil {
		return 0, err
	}
	if rdma {
		return plan.Config(c).RDMABytes(hiddenBytes, t)
	}
	bytes, err := plan.Config(c).NVLBytes(hiddenBytes, t)
	if err == nil {
		hints.add(hint{ranks: ranks, bytes: bytes, shape: Shape{Hidden: int32(hiddenBytes / 2)}})
	}
	return bytes, err
}

// LowLatencySizeHint returns the NumRDMABytes that a buffer needs for low-latency calls of a shape. The limits are
// those of the engine that DEEPEP_ENGINE or the machine selects, if its kernel library can be loaded.
func LowLatencySizeHint(numMaxTokens, hidden, ranks, experts int64) (uint64, error) {
	s, err := env.Current()
	if err != nil {
		return 0, err
	}
	var limits plan.Limits
	if library, _, err := chooseEngine(EngineAuto, s); err == nil {
		limits = engine.LimitsOf(library)
	}
	bytes, err := plan.LowLatencyBytes(numMaxTokens, hidden, ranks, experts, &limits)
	if err == nil {
		shape := Shape{NumTokens: int32(numMaxTokens), Hidden: int32(hidden), NumExperts: int32(experts)}
		hints.add(hint{lowLatency: true, ranks: int(ranks), bytes: bytes, shape: shape})
	}
	return bytes, err
}

// deadlines are the timeouts of a buffer: the program's, else the environment's. A program that sets one alone means
// both.
func deadlines(o *BufferOptions, s env.Settings) (steady, first time.Duration) {
	steady, first = o.Timeout, o.FirstTimeout
	if first == 0 {
		first = s.FirstTimeout
		if steady != 0 {
			first = steady
		}
	}
	if steady == 0 {
		steady = s.Timeout
	}
	return steady, first
}

// isaOf is the number of the instruction set in dk_device_open. It is a matter of the CPU engine.
func isaOf(engine string, s env.Settings) uint32 {
	if engine != EngineCPU {
		return 0
	}
	return map[string]uint32{env.ISABaseline: 1, env.ISAAVX2: 2, env.ISAAVX512: 3}[s.ISA]
}
