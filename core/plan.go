package core

import (
	"fmt"
	"math"
	"path/filepath"

	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// PlanOptions describe a rank of a group, its buffer and the calls on it. None of them need exist.
type PlanOptions struct {
	Rank, Size        int
	NumNVLPeers       int // ranks of one NVLink domain; 0: DEEPEP_NUM_MAX_NVL_PEERS, or 8
	NICs              int // of a rank; 0: DEEPEP_NUM_NICS, or the rank's share of those that this machine has
	RanksOfHost       int // ranks that share a host's NICs; 0: as many as a node has
	ComputeCapability int // 10 × major + minor of the GPUs; 0: 90

	// Elastic makes the plan that of a V2 buffer, and is for no call of another kind. Ranks, the ranks of an NVLink domain
	// and the compute capability are the plan's own.
	Elastic *ElasticOptions

	// Buffer is what NewBuffer would get. Without bytes of either kind the sizes are the hints for the calls below.
	Buffer BufferOptions

	NumTokens    int // of a rank in normal-mode calls; 0: none
	NumMaxTokens int // B of low-latency calls, for which the buffer is then made; 0: none
	Hidden       int // BF16 elements of a row
	NumTopK      int
	NumExperts   int // of all ranks together
	NumSMs       int // of normal-mode calls, even; 0: the library's choice
}

// BufferPlan is what a buffer would be: its Info, and what its calls take.
type BufferPlan struct {
	Info           // of the buffer, with zeros for what only a device knows
	Library string // file of the kernel library; "": it cannot be loaded, and ControlBytes and WireBytes are 0
	Reason  string // why it cannot be loaded

	NVLHint, RDMAHint, LowLatencyHint uint64  // size hints: NumNVLBytes and NumRDMABytes of normal mode, NumRDMABytes of low-latency mode
	PrivateBytes                      uint64  // of the kernel library: ControlBytes + WireBytes
	OutputFP8, OutputBF16             uint64  // rows (and scales) that one low-latency dispatch returns
	LocalExperts                      int     // of a rank
	NumChannels                       int     // of normal-mode calls: pairs of SMs
	QPsUsed                           int     // queue pairs toward a peer that the calls have use for
	QPDepthForTokens                  int     // depth with which no low-latency call waits for room; 0: no queue pair is so deep
	QPOrder                           []int32 // the peers with queue pairs in the order in which those are made
	Network                           Network // what NVSHMEM is told of the NICs; zero on the CPU engine and without queue pairs

	Elastic ElasticInfo // of a V2 buffer; RowSegmentBytes is 0 on the CPU engine

	DispatchSMsFP8, DispatchSMsBF16, CombineSMs int // of normal-mode calls without a number of their own
}

// Network is what the transport on GPUs is told of the NICs, by the settings of the environment.
type Network struct {
	NICs, NICMapping           string   // those that ranks may use, and those of each rank of a host; "": all, the nearest
	ServiceLevel, TrafficClass int      // of packets
	Lines                      []string // the variables that NVSHMEM gets, "NAME=VALUE"
	Warnings                   []string // settings that others keep from what they ask for
}

// Plan says what NewBuffer would make of the same options, and refuses what it or the calls would refuse. It reads the
// same settings, and calls the same functions. Local; it needs neither a device nor peers.
func Plan(o PlanOptions) (BufferPlan, error) {
	s, err := env.Current()
	if err != nil {
		return BufferPlan{}, err
	}
	g, err := paperGroup(&o, s)
	if err != nil {
		return BufferPlan{}, err
	}
	p := BufferPlan{}
	if err := p.elastic(&o, g.topology, 0); err != nil {
		return BufferPlan{}, err
	}
	if err := p.sizes(&o, g.topology); err != nil {
		return BufferPlan{}, err
	}
	b := &o.Buffer
	if err := g.check(b, s); err != nil {
		return BufferPlan{}, err
	}
	library, name, err := g.paperLibrary(b, s)
	if status.CodeOf(err) == status.InvalidArgument {
		return BufferPlan{}, err
	}
	opt, failed := g.options(b, s)
	if failed != nil {
		return BufferPlan{}, failed
	}
	opt.Library = library
	findNICs(&opt, s)
	if o.NICs > 0 {
		opt.RDMA.RankNICs = o.NICs
	}
	opt.RDMA.RanksOfHost = o.RanksOfHost
	draft, failed := engine.NewDraft(opt, o.Rank)
	if failed != nil {
		return BufferPlan{}, failed
	}
	p.Info, p.Engine = draft.Info(), name
	if p.QPPeers > 0 && name == EngineCUDA {
		p.Network = networkOf(&s.RDMA.NICs)
	}
	if failed := p.elastic(&o, g.topology, gpuOf(name, &o)); failed != nil {
		return BufferPlan{}, failed
	}
	if err != nil {
		p.Reason = err.Error()
	} else {
		p.Library = filepath.Base(library.Path)
	}
	return p, p.calls(&o, g.topology, draft)
}

// paperGroup is a group that connects nobody.
func paperGroup(o *PlanOptions, s env.Settings) (*Group, error) {
	for _, n := range []struct {
		name      string
		value, to int
	}{
		{"num_tokens", o.NumTokens, math.MaxInt32}, {"num_max_dispatch_tokens_per_rank", o.NumMaxTokens, math.MaxInt32}, {"hidden", o.Hidden, math.MaxInt32},
		{"num_topk", o.NumTopK, math.MaxInt32}, {"num_experts", o.NumExperts, math.MaxInt32}, {"num_sms", o.NumSMs, math.MaxInt32},
		{"num_nics", o.NICs, env.MaxNICs}, {"num_local_ranks", o.RanksOfHost, plan.MaxRanks}, {"compute_capability", o.ComputeCapability, maxComputeCapability},
	} {
		if n.value < 0 || n.value > n.to {
			return nil, status.InvalidArg(n.name, n.value, fmt.Sprintf("0 to %d", n.to))
		}
	}
	peers := o.NumNVLPeers
	if peers == 0 {
		peers = s.MaxNVLPeers
	}
	t, err := plan.NewTopology(o.Size, peers)
	if err != nil {
		return nil, err
	}
	if o.Rank < 0 || o.Rank >= o.Size {
		return nil, status.InvalidArg("rank", o.Rank, fmt.Sprintf("0 to %d", o.Size-1))
	}
	return &Group{rank: o.Rank, size: o.Size, topology: t, settings: s, limit: s.FirstTimeout, log: logger(s)}, nil
}

const (
	maxComputeCapability = 999
	usualCapability      = 90
)

// paperLibrary is the kernel library that NewBuffer would choose; here it needs no device. An error other than
// ErrInvalidArgument says why there is none.
func (g *Group) paperLibrary(o *BufferOptions, s env.Settings) (*kern.Library, string, error) {
	library, name, err := chooseEngine(o.Engine, s)
	if err == nil && needsInternode(library, name, g.byQueues(o)) {
		library, err = loadEngine(internodeLibrary, s.Kernels)
	}
	if err != nil {
		return nil, name, err
	}
	return library, name, nil
}

// sizes computes the hints for the calls, and makes them the buffer's sizes if it has none.
func (p *BufferPlan) sizes(o *PlanOptions, t plan.Topology) error {
	const bytesBF16 = 2
	if o.NumTokens > 0 {
		for _, kind := range []int{KindDispatch, KindCombine} {
			c, err := plan.ConfigFor(kind, t.Ranks)
			if err != nil {
				return err
			}
			if o.NumSMs > 0 {
				c.NumSMs = int32(o.NumSMs)
			}
			nvl, err := c.NVLBytes(bytesBF16*int64(o.Hidden), t)
			if err != nil {
				return err
			}
			rdma, err := c.RDMABytes(bytesBF16*int64(o.Hidden), t)
			if err != nil {
				return err
			}
			p.NVLHint, p.RDMAHint, p.NumChannels = max(p.NVLHint, nvl), max(p.RDMAHint, rdma), int(c.NumSMs)/2
		}
	}
	b := &o.Buffer
	if o.NumMaxTokens > 0 {
		hint, err := plan.LowLatencyBytes(int64(o.NumMaxTokens), int64(o.Hidden), int64(t.Ranks), int64(o.NumExperts), nil)
		if err != nil {
			return err
		}
		p.LowLatencyHint, b.LowLatency = hint, true
	}
	if b.NumNVLBytes == 0 && b.NumRDMABytes == 0 {
		b.NumNVLBytes, b.NumRDMABytes = p.NVLHint, max(p.RDMAHint, p.LowLatencyHint)
	}
	return nil
}

// gpuOf is the compute capability that the plan is for; 0: an engine without SMs.
func gpuOf(engine string, o *PlanOptions) int {
	switch {
	case engine != EngineCUDA:
		return 0
	case o.ComputeCapability == 0:
		return usualCapability
	}
	return o.ComputeCapability
}

// elastic computes the numbers of a V2 buffer, and makes its regions the buffer's.
func (p *BufferPlan) elastic(o *PlanOptions, t plan.Topology, computeCapability int) error {
	if o.Elastic == nil {
		return nil
	}
	e := *o.Elastic
	e.NumRanks, e.ComputeCapability = t.Ranks, computeCapability
	i, err := e.sizes(t)
	if err != nil {
		return err
	}
	b := &o.Buffer
	switch {
	case p.Engine != "": // the second time, when the engine is known
		if computeCapability == 0 {
			i.RowSegmentBytes = 0
		}
		p.Elastic, p.RowSegmentBytes = i, i.RowSegmentBytes
	case b.NumNVLBytes != 0 || b.NumRDMABytes != 0 || b.LowLatency || o.NumMaxTokens != 0:
		return status.InvalidArg("elastic", "options of a V2 buffer", "none with sizes or low-latency calls of another")
	default:
		b.NumNVLBytes, b.NumRDMABytes = i.NumNVLBytes, i.NumRDMABytes
	}
	return nil
}

// calls computes what the calls take of the buffer, and refuses those that it refuses.
func (p *BufferPlan) calls(o *PlanOptions, t plan.Topology, draft *engine.Draft) error {
	p.PrivateBytes, p.QPOrder = p.ControlBytes+p.WireBytes, draft.Peers()
	p.LocalExperts = o.NumExperts / t.Ranks
	if o.NumMaxTokens > 0 {
		if err := draft.FitsLowLatency(plan.LowLatency{NumMaxTokens: int32(o.NumMaxTokens), Hidden: int32(o.Hidden), NumTopK: int32(o.NumTopK),
			NumExperts: int32(o.NumExperts), IndexType: Int64}); err != nil {
			return err
		}
		rows, hidden := uint64(p.LocalExperts)*uint64(t.Ranks)*uint64(o.NumMaxTokens), uint64(o.Hidden)
		p.OutputBF16, p.OutputFP8 = rows*2*hidden, rows*plan.FP8RowBytes(hidden)
	}
	if o.NumTokens > 0 {
		if err := p.normal(o, t, draft); err != nil {
			return err
		}
	}
	if p.QPPeers > 0 {
		used := 0
		if o.NumMaxTokens > 0 {
			used = p.LocalExperts
		}
		p.QPsUsed = plan.UsedQueuePairs(used, p.NumChannels)
		if depth := plan.DepthFor(o.NumMaxTokens); o.NumMaxTokens > 0 && depth <= plan.MaxDepth {
			p.QPDepthForTokens = max(plan.MinDepth, depth)
		}
	}
	return nil
}

// normal chooses the SMs of normal-mode calls.
func (p *BufferPlan) normal(o *PlanOptions, t plan.Topology, draft *engine.Draft) error {
	rows := plan.Rows{NumTokens: int32(o.NumTokens), NumTopK: int32(o.NumTopK), NumExperts: int32(o.NumExperts), XType: BF16, Hidden: int64(o.Hidden)}
	if err := rows.Check(t); err != nil {
		return err
	}
	if err := draft.FitsRow(rows.HiddenBytes()); err != nil {
		return err
	}
	if o.NumSMs > 0 {
		p.DispatchSMsFP8, p.DispatchSMsBF16, p.CombineSMs = o.NumSMs, o.NumSMs, o.NumSMs
		return nil
	}
	q := plan.SMQuery{Topology: t, Tokens: o.NumTokens, TopK: o.NumTopK, Staged: p.Library != "" && p.RowSegmentBytes == 0,
		Copies: draft.Info().NormalCopies}
	q.ComputeCapability = gpuOf(p.Engine, o)
	q.Kind, q.RowBytes = KindDispatch, plan.FP8RowBytes(uint64(o.Hidden))
	p.DispatchSMsFP8 = plan.NumSMs(q)
	q.RowBytes = rows.HiddenBytes()
	p.DispatchSMsBF16 = plan.NumSMs(q)
	q.Kind = KindCombine
	p.CombineSMs = plan.NumSMs(q)
	return nil
}

func networkOf(n *env.NICs) Network {
	net := Network{NICs: n.Names, NICMapping: n.Mapping, ServiceLevel: n.ServiceLevel, TrafficClass: n.TrafficClass, Lines: n.Lines()}
	for _, c := range n.Contradictions() {
		net.Warnings = append(net.Warnings, c.Variable+": "+c.Cause)
	}
	return net
}

// findNICs counts the NICs that the library's transport may use. The software RDMA uses none.
func findNICs(o *engine.Options, s env.Settings) {
	o.RDMA.RankNICs = s.RDMA.NICs.OfRank()
	if o.RDMA.RankNICs == 0 && (o.Library == nil || o.Library.HasTransportHeap()) {
		o.RDMA.HostNICs = doctor.NICsHere(env.Get)
	}
}
