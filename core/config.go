package core

import (
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
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
func CheckConfig(c *Config) error { return (*plan.Config)(c).Check() }

// SizeHint says how many bytes a buffer should have for normal-mode calls: of num_nvl_bytes, or with rdma of
// num_rdma_bytes, which is 0 where the ranks are one node. The node size comes from the environment.
func SizeHint(c Config, hiddenBytes int64, ranks int, rdma bool) (uint64, error) {
	s, err := settings()
	if err != nil {
		return 0, err
	}
	// A hint is asked for before there is a group, also for numbers of ranks that leave a node unfilled: they count whole.
	t, err := plan.NewTopology((ranks+s.MaxNVLPeers-1)/s.MaxNVLPeers*s.MaxNVLPeers, s.MaxNVLPeers)
	if ranks <= s.MaxNVLPeers {
		t, err = plan.NewTopology(ranks, s.MaxNVLPeers)
	}
	if err != nil {
		return 0, err
	}
	if rdma {
		return plan.Config(c).RDMABytes(hiddenBytes, t)
	}
	return plan.Config(c).NVLBytes(hiddenBytes, t)
}

// LowLatencySizeHint says how many num_rdma_bytes a buffer needs for low-latency calls of a shape. The limits are those of the
// engine that DEEPEP_ENGINE or the machine selects, if its kernel library can be loaded.
func LowLatencySizeHint(numMaxTokens, hidden, ranks, experts int64) (uint64, error) {
	s, err := settings()
	if err != nil {
		return 0, err
	}
	var limits plan.Limits
	if library, _, err := chooseEngine(EngineAuto, s); err == nil {
		limits = engine.LimitsOf(library)
	}
	return plan.LowLatencyBytes(numMaxTokens, hidden, ranks, experts, &limits)
}
