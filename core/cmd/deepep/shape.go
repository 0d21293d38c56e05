package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/plan"
)

// shape is the planned model and group.
type shape struct {
	ranks, perNode, onHost, experts, hidden, topK, tokens, maxTokens, sms, qps, nics, rank int
	memory                                                                                 string
	engine                                                                                 string
	rdmaOnly                                                                               bool
	elastic                                                                                core.ElasticOptions // NumMaxTokens > 0: the buffer is V2's
}

// shapeFlags are the names of the flags that make up a shape.
var shapeFlags = []string{"ranks", "ranks-per-node", "ranks-per-host", "experts", "hidden", "top-k", "tokens", "max-tokens", "sms", "qps", "nics", "no-nvlink"}

func (s *shape) register(f *pflag.FlagSet) {
	f.IntVar(&s.ranks, "ranks", 8, "ranks of the group")
	f.IntVar(&s.perNode, "ranks-per-node", 0, "ranks of one NVLink domain; 0: DEEPEP_NUM_MAX_NVL_PEERS, or 8")
	f.IntVar(&s.onHost, "ranks-per-host", 0, "ranks that share a host's NICs; 0: as many as a node has")
	f.IntVar(&s.experts, "experts", 256, "experts of all ranks together")
	f.IntVar(&s.hidden, "hidden", 7168, "hidden size (BF16 elements a row)")
	f.IntVar(&s.topK, "top-k", 8, "experts a token")
	f.IntVar(&s.tokens, "tokens", 4096, "tokens of a rank in normal mode; 0: no normal mode")
	f.IntVar(&s.maxTokens, "max-tokens", 128, "B, num_max_dispatch_tokens_per_rank; 0: no low-latency mode")
	f.IntVar(&s.sms, "sms", 0, "SMs for normal mode; 0: by formula, and 20 for the sizes of buffers")
	f.IntVar(&s.qps, "qps", 0, fmt.Sprintf("num_qps_per_rank; 0: %d", plan.DefaultQueuePairs))
	f.IntVar(&s.nics, "nics", 0, "RDMA devices of a rank; 0: DEEPEP_NUM_NICS, or its share of those found here")
	f.BoolVar(&s.rdmaOnly, "no-nvlink", false, "low-latency calls use RDMA inside a node too (allow_nvlink_for_low_latency_mode=False)")
}

// options are those of core.Plan.
func (s *shape) options() core.PlanOptions {
	if s.elastic.NumMaxTokens != 0 {
		e := s.elastic
		e.Hidden, e.NumTopK = s.hidden, s.topK
		return core.PlanOptions{
			Rank: s.rank, Size: s.ranks, NumNVLPeers: s.perNode, NICs: s.nics, RanksOfHost: s.onHost, Elastic: &e, NumExperts: s.experts,
			Buffer: core.BufferOptions{Engine: s.engine, NumQPsPerRank: s.qps},
		}
	}
	return core.PlanOptions{
		Rank: s.rank, Size: s.ranks, NumNVLPeers: s.perNode, NICs: s.nics, RanksOfHost: s.onHost, NumTokens: s.tokens, NumMaxTokens: s.maxTokens,
		Hidden: s.hidden, NumTopK: s.topK, NumExperts: s.experts, NumSMs: s.sms,
		Buffer: core.BufferOptions{Engine: s.engine, NumQPsPerRank: s.qps, DisableNVLink: s.rdmaOnly},
	}
}

// sizes is the plan of a shape.
type sizes struct {
	core.BufferPlan `json:"-"`

	Ranks            int      `json:"ranks"`
	Nodes            int      `json:"nodes"`
	Experts          int      `json:"experts"`
	LocalExperts     int      `json:"local_experts"`
	Hidden           int      `json:"hidden"`
	TopK             int      `json:"top_k"`
	Tokens           int      `json:"tokens"`
	MaxTokens        int      `json:"max_tokens"`
	Engine           string   `json:"engine"`
	DispatchSMsFP8   int      `json:"sms_dispatch_fp8"` // of normal-mode calls without a number of their own
	DispatchSMsBF16  int      `json:"sms_dispatch_bf16"`
	CombineSMs       int      `json:"sms_combine"`
	Channels         int      `json:"channels"`
	NVLBytes         uint64   `json:"num_nvl_bytes"`         // normal mode
	RDMABytes        uint64   `json:"num_rdma_bytes_normal"` // normal mode between nodes
	LLBytes          uint64   `json:"num_rdma_bytes_low_latency"`
	Library          string   `json:"library"`           // the file of PrivateBytes; "" if no kernel library was found
	Reason           string   `json:"reason,omitempty"`  // why none was found
	ControlBytes     uint64   `json:"control_bytes"`     // flags and counts that the library adds
	WireBytes        uint64   `json:"wire_bytes"`        // staging that the library adds
	PrivateBytes     uint64   `json:"private_bytes"`     // both
	TotalBytes       uint64   `json:"total_bytes"`       // one buffer for both modes
	RowSegmentBytes  uint64   `json:"row_segment_bytes"` // for received rows of normal mode, beside the buffer
	ElasticBytes     uint64   `json:"elastic_bytes"`     // num_bytes of a V2 buffer; 0: of V1's
	ElasticSMs       int      `json:"elastic_sms"`       // of its calls, at most
	OutputFP8        uint64   `json:"output_bytes_fp8"`  // of one low-latency dispatch
	OutputBF16       uint64   `json:"output_bytes_bf16"` // likewise
	QPsPerPeer       int      `json:"qps_per_peer"`      // 0 without queue pairs
	QPsUsed          int      `json:"qps_used"`          // of them the calls have use for so many
	NICs             int      `json:"nics"`              // of a rank
	QPsPerNIC        int      `json:"qps_per_nic"`       // toward a peer, on each of a rank's NICs
	Network          *network `json:"network,omitempty"` // what NVSHMEM is told of the NICs
	QPPeers          int      `json:"qp_peers"`          // ranks that one rank reaches through queue pairs
	QPs              int      `json:"qps"`               // of one rank in all: NVSHMEM makes them inside a node too
	QPDepth          int      `json:"qp_depth"`
	QPDepthForTokens int      `json:"qp_depth_for_tokens"` // with which no call waits for room; 0: none is deep enough
	QPRank           int      `json:"qp_rank"`
	RDMATeam         []int    `json:"rdma_team"` // of QPRank: the rank of its index on each node
	QPOrder          []int32  `json:"qp_order"`  // peers of QPRank in the order in which their queue pairs are made
	TimeoutMS        int64    `json:"timeout_ms"`
	FirstTimeoutMS   int64    `json:"first_timeout_ms"`
	MemoryBytes      uint64   `json:"memory_bytes,omitempty"`
	LargestB         int      `json:"largest_max_tokens,omitempty"`
	LimitedBy        string   `json:"limited_by,omitempty"`
}

// network is core.Network.
type network struct {
	NICs         string   `json:"nics"`        // those that ranks may use; "": all
	NICMapping   string   `json:"nic_mapping"` // those of each rank of a host; "": the nearest
	ServiceLevel int      `json:"service_level"`
	TrafficClass int      `json:"traffic_class"`
	Variables    []string `json:"variables"` // that NVSHMEM gets, "NAME=VALUE"
	Warnings     []string `json:"warnings,omitempty"`
}

// plan computes the sizes. The error names an argument or a setting that is out of range.
func (s *shape) plan() (*sizes, error) {
	p, err := core.Plan(s.options())
	if err != nil {
		return nil, err
	}
	tokens, maxTokens, nvl, rdma := s.tokens, s.maxTokens, p.NVLHint, p.RDMAHint
	if s.elastic.NumMaxTokens != 0 { // the plan is for V2's calls alone
		tokens, maxTokens, nvl, rdma = 0, 0, p.Info.NVLBytes, p.Info.RDMABytes
	}
	var net *network
	if n := p.Network; p.QPPeers > 0 && p.Engine == core.EngineCUDA {
		net = &network{n.NICs, n.NICMapping, n.ServiceLevel, n.TrafficClass, append([]string{}, n.Lines...), n.Warnings}
	}
	return &sizes{
		Network:    net,
		BufferPlan: p, Ranks: s.ranks, Nodes: p.NumRDMARanks, Experts: s.experts, LocalExperts: p.LocalExperts, Hidden: s.hidden, TopK: s.topK,
		Tokens: tokens, MaxTokens: maxTokens, Engine: p.Engine, DispatchSMsFP8: p.DispatchSMsFP8, DispatchSMsBF16: p.DispatchSMsBF16,
		CombineSMs: p.CombineSMs, Channels: p.NumChannels, NVLBytes: nvl, RDMABytes: rdma, LLBytes: p.LowLatencyHint,
		Library: p.Library, Reason: p.Reason, ControlBytes: p.ControlBytes, WireBytes: p.WireBytes, PrivateBytes: p.PrivateBytes,
		ElasticBytes: p.Elastic.NumBytes, ElasticSMs: p.Elastic.NumSMs,
		TotalBytes: p.TotalBytes, RowSegmentBytes: p.RowSegmentBytes, OutputFP8: p.OutputFP8, OutputBF16: p.OutputBF16,
		QPsPerPeer: p.QPsPerPeer, QPsUsed: p.QPsUsed, NICs: p.NICs, QPsPerNIC: p.QPsPerNIC, QPPeers: p.QPPeers, QPs: p.QPs,
		QPDepth: p.QPDepth, QPDepthForTokens: p.QPDepthForTokens, QPRank: s.rank, RDMATeam: p.RDMATeam.Ranks(), QPOrder: p.QPOrder,
		TimeoutMS: p.Timeout.Milliseconds(), FirstTimeoutMS: p.FirstTimeout.Milliseconds(),
	}, nil
}

// fit finds the largest B whose buffer fits into memory and whose queues are not too deep, and the limit that binds.
func (p *sizes) fit(s *shape, memory uint64) error {
	limit, by := math.MaxInt32/p.Ranks, "the index range of a received row"
	if n := 1 << 24; n < limit {
		limit, by = n, "the largest B that the library takes"
	}
	if deepest := plan.MaxDepth/2 - 1; p.QPPeers > 0 && deepest < limit {
		limit, by = deepest, fmt.Sprintf("the depth of a queue pair, at most %d, of which B tokens take 2 × (B + 1)", plan.MaxDepth)
	}
	trial := *s
	bytes := func(b int) (uint64, error) {
		trial.maxTokens = b
		q, err := trial.plan()
		if err != nil {
			return 0, err
		}
		return q.TotalBytes, nil
	}
	low, high := 0, limit // B = low fits (0: none tried yet), B = high+1 does not or is not allowed
	for low < high {
		mid := low + (high-low+1)/2
		switch n, err := bytes(mid); {
		case err != nil && mid == 1:
			return err
		case err == nil && n <= memory:
			low = mid
		default:
			if err != nil { // a setting or the kernel library takes no more
				limit, by = mid-1, err.Error()
			}
			high = mid - 1
		}
	}
	p.MemoryBytes, p.LargestB, p.LimitedBy = memory, low, by
	switch {
	case low == 0:
		n, err := bytes(1)
		if err != nil {
			return err
		}
		p.LimitedBy = "memory: even B = 1 needs " + sizeText(n)
	case low < limit:
		now, err := bytes(low)
		if err != nil {
			return err
		}
		if next, err := bytes(low + 1); err == nil {
			p.LimitedBy = "memory: each token of B takes about " + sizeText(next-now)
		}
	}
	return nil
}

// forDoctor is the plan with which doctor compares the host. It divides the queue pairs over the NICs that it finds
// there, unless the flag gives their number.
func (p *sizes) forDoctor(use doctor.For, nics int) doctor.Plan {
	d := doctor.Plan{SMs: max(p.DispatchSMsFP8, p.DispatchSMsBF16, p.CombineSMs), QPsPerPeer: p.QPsPerPeer, QPDepth: p.QPDepth, MaxTokens: p.MaxTokens, NICs: nics}
	if p.QPPeers > 0 { // NVSHMEM connects all ranks
		d.QPPeers = p.Ranks - 1
	}
	if use == doctor.ForCPU {
		d.HostBytes = p.TotalBytes
	} else {
		d.DeviceBytes = p.TotalBytes + p.RowSegmentBytes
	}
	return d
}

// parseSize parses 80GiB, 512M, 1.5g or a number of bytes; units are binary.
func parseSize(s string) (uint64, error) {
	word := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(strings.TrimSpace(s)), "B"), "I")
	shift := 0
	for i, unit := range []string{"K", "M", "G", "T"} {
		if rest, ok := strings.CutSuffix(word, unit); ok {
			word, shift = rest, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(word), 64)
	if err != nil || !(n > 0) || math.IsInf(n, 0) || n*math.Pow(2, float64(shift)) >= 1<<62 {
		return 0, fmt.Errorf("memory: %q; allowed is a size like 80GiB, 512M or a number of bytes", s)
	}
	return uint64(n * math.Pow(2, float64(shift))), nil
}
