package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// shape is the planned model and group.
type shape struct {
	ranks, perNode, experts, hidden, topK, maxTokens, sms, qps, nics, rank int
	memory                                                                 string
	engine                                                                 string
}

// shapeFlags are the names of the flags that make up a shape.
var shapeFlags = []string{"ranks", "ranks-per-node", "experts", "hidden", "top-k", "max-tokens", "sms", "qps", "nics"}

func (s *shape) register(f *pflag.FlagSet) {
	f.IntVar(&s.ranks, "ranks", 8, "ranks of the group")
	f.IntVar(&s.perNode, "ranks-per-node", plan.DefaultPeers, "ranks of one NVLink domain")
	f.IntVar(&s.experts, "experts", 256, "experts of all ranks together")
	f.IntVar(&s.hidden, "hidden", 7168, "hidden size (BF16 elements a row)")
	f.IntVar(&s.topK, "top-k", 8, "experts a token")
	f.IntVar(&s.maxTokens, "max-tokens", 128, "B, num_max_dispatch_tokens_per_rank")
	f.IntVar(&s.sms, "sms", int(plan.DefaultConfig.NumSMs), "multiprocessors for normal mode")
	f.IntVar(&s.qps, "qps", 0, "num_qps_per_rank; 0: as many as the kernels use")
	f.IntVar(&s.nics, "nics", 1, "RDMA devices of a rank")
}

// sizes is the plan of a shape.
type sizes struct {
	Topology plan.Topology `json:"-"`

	Ranks        int    `json:"ranks"`
	Nodes        int    `json:"nodes"`
	Experts      int    `json:"experts"`
	LocalExperts int    `json:"local_experts"`
	Hidden       int    `json:"hidden"`
	TopK         int    `json:"top_k"`
	MaxTokens    int    `json:"max_tokens"`
	SMs          int    `json:"sms"`
	Channels     int    `json:"channels"`
	NVLBytes     uint64 `json:"num_nvl_bytes"`         // normal mode
	RDMABytes    uint64 `json:"num_rdma_bytes_normal"` // normal mode between nodes
	LLBytes      uint64 `json:"num_rdma_bytes_low_latency"`
	Library      string `json:"library"`           // the library of PrivateBytes; "" if no kernel library was found
	PrivateBytes uint64 `json:"private_bytes"`     // flags and staging that the library adds
	TotalBytes   uint64 `json:"total_bytes"`       // one buffer for both modes
	OutputFP8    uint64 `json:"output_bytes_fp8"`  // of one low-latency dispatch
	OutputBF16   uint64 `json:"output_bytes_bf16"` // likewise
	QPsPerPeer   int    `json:"qps_per_peer"`      // 0 on one node
	QPsPerNIC    int    `json:"qps_per_nic"`       // of them on each of a rank's NICs
	RemoteQPs    int    `json:"remote_qps"`        // of one rank, to the ranks of other nodes
	QPs          int    `json:"qps"`               // of one rank, to all others: NVSHMEM makes them inside a node too
	QPDepth      int    `json:"qp_depth"`          // 0: none is deep enough
	QPRank       int    `json:"qp_rank"`
	QPOrder      []int  `json:"qp_order"` // peers of QPRank in the order in which their queue pairs are made
	MemoryBytes  uint64 `json:"memory_bytes,omitempty"`
	LargestB     int    `json:"largest_max_tokens,omitempty"`
	LimitedBy    string `json:"limited_by,omitempty"`
	library      *kern.Library
}

// plan computes the sizes. The error names an argument that is out of range.
func (s *shape) plan() (*sizes, error) {
	for _, n := range []struct {
		name  string
		value int
	}{{"experts", s.experts}, {"hidden", s.hidden}, {"top-k", s.topK}, {"max-tokens", s.maxTokens}, {"sms", s.sms}, {"qps", s.qps}} {
		if n.value < 0 || n.value > math.MaxInt32 {
			return nil, status.InvalidArg(n.name, n.value, fmt.Sprintf("0 to %d", math.MaxInt32))
		}
	}
	t, err := plan.NewTopology(s.ranks, s.perNode)
	if err != nil {
		return nil, err
	}
	if s.nics < 1 || s.nics > maxNICs {
		return nil, status.InvalidArg("nics", s.nics, fmt.Sprintf("1 to %d", maxNICs))
	}
	if s.rank < 0 || s.rank >= s.ranks {
		return nil, status.InvalidArg("rank", s.rank, fmt.Sprintf("0 to %d", s.ranks-1))
	}
	call := plan.LowLatency{NumMaxTokens: int32(s.maxTokens), Hidden: int32(s.hidden), NumTopK: int32(s.topK), NumExperts: int32(s.experts), IndexType: op.Int64}
	if err := call.CheckDispatch(t, nil); err != nil {
		return nil, err
	}
	p := &sizes{
		Topology: t, Ranks: s.ranks, Nodes: t.Nodes(), Experts: s.experts, LocalExperts: s.experts / s.ranks,
		Hidden: s.hidden, TopK: s.topK, MaxTokens: s.maxTokens, SMs: s.sms, Channels: s.sms / 2,
	}
	if err := p.normal(s); err != nil {
		return nil, err
	}
	if err := p.queues(s); err != nil {
		return nil, err
	}
	if err := p.bytes(s.maxTokens); err != nil {
		return nil, err
	}
	return p, nil
}

// normal sizes the buffers of normal mode: the larger of dispatch's and combine's hints.
func (p *sizes) normal(s *shape) error {
	const bytesBF16 = 2
	for _, kind := range []int{plan.KindDispatch, plan.KindCombine} {
		c, err := plan.ConfigFor(kind, s.ranks)
		if err != nil {
			return err
		}
		c.NumSMs = int32(s.sms)
		nvl, err := c.NVLBytes(bytesBF16*int64(s.hidden), p.Topology)
		if err != nil {
			return err
		}
		rdma, err := c.RDMABytes(bytesBF16*int64(s.hidden), p.Topology)
		if err != nil {
			return err
		}
		p.NVLBytes, p.RDMABytes = max(p.NVLBytes, nvl), max(p.RDMABytes, rdma)
	}
	return nil
}

// maxNICs is more than any host has.
const maxNICs = 64

// queues plans the queue pairs, which only nodes joined by RDMA have. If no queue is deep enough for B, the plan says
// so without an error.
func (p *sizes) queues(s *shape) error {
	if p.Nodes == 1 {
		return nil
	}
	o := plan.QueueOptions{PerPeer: s.qps, LocalExperts: p.LocalExperts, Channels: p.Channels}
	if plan.DepthFor(p.MaxTokens) <= plan.MaxDepth {
		o.MaxTokens = p.MaxTokens
	}
	q, err := plan.NewQueues(p.Topology, o)
	if err != nil {
		return err
	}
	p.QPsPerPeer, p.QPsPerNIC = q.PerPeer, q.PerDevice(s.nics)
	p.RemoteQPs, p.QPs = q.PerPeer*p.Topology.NumRemote(), q.PerPeer*(p.Ranks-1)
	p.QPRank, p.QPOrder = s.rank, p.Topology.PeerOrder(s.rank)
	if o.MaxTokens > 0 {
		p.QPDepth = q.Depth
	}
	return nil
}

// bytes computes the sizes that depend on B.
func (p *sizes) bytes(maxTokens int) error {
	ll, err := plan.LowLatencyBytes(int64(maxTokens), int64(p.Hidden), int64(p.Ranks), int64(p.Experts), nil)
	if err != nil {
		return err
	}
	rows := uint64(p.LocalExperts) * uint64(p.Ranks) * uint64(maxTokens)
	p.MaxTokens, p.LLBytes = maxTokens, ll
	p.OutputBF16 = rows * 2 * uint64(p.Hidden)
	p.OutputFP8 = rows * (uint64(p.Hidden) + 4*uint64((p.Hidden+127)/128))
	regions := plan.NewRegions(0, 0, p.NVLBytes, max(p.RDMABytes, p.LLBytes))
	p.TotalBytes = regions.Total
	if p.library == nil {
		return nil
	}
	b := &abi.BlockSizesParams{
		NumRanks: int32(p.Ranks), NumNVLPeers: int32(p.Topology.NodeSize()), Flags: abi.TeamLowLatency,
		NVLBytes: regions.NVL.Bytes, RDMABytes: regions.RDMA.Bytes, MaxRowBytes: 2 * uint64(p.Hidden),
	}
	if err := kern.Error("dk_block_sizes", p.library.BlockSizes(b), b.DeviceError); err != nil {
		return err
	}
	full := plan.NewRegions(b.ControlBytes, b.WireBytes, regions.NVL.Bytes, regions.RDMA.Bytes)
	p.PrivateBytes = full.Control.Bytes + full.Wire.Bytes
	p.TotalBytes = full.Total
	return nil
}

// fit finds the largest B whose buffer fits into memory and whose queues are not too deep, and the limit that binds.
func (p *sizes) fit(memory uint64) error {
	limit, by := math.MaxInt32/p.Ranks, "the index range of a received row"
	if n := 1 << 24; n < limit {
		limit, by = n, "the largest B that the library takes"
	}
	if deepest := plan.MaxDepth/2 - 1; p.Nodes > 1 && deepest < limit {
		limit, by = deepest, fmt.Sprintf("the depth of a queue pair, at most %d, of which B tokens take 2 × (B + 1)", plan.MaxDepth)
	}
	trial := *p
	fits := func(b int) (bool, error) {
		err := trial.bytes(b)
		return trial.TotalBytes <= memory, err
	}
	low, high := 0, limit // B = low fits (0: none tried yet), B = high+1 does not or is not allowed
	for low < high {
		mid := low + (high-low+1)/2
		ok, err := fits(mid)
		if err != nil {
			return err
		}
		if ok {
			low = mid
		} else {
			high = mid - 1
		}
	}
	p.MemoryBytes, p.LargestB, p.LimitedBy = memory, low, by
	switch {
	case low == 0:
		p.LimitedBy = "memory: even B = 1 needs " + sizeText(bytesAt(trial, 1))
	case low < limit:
		p.LimitedBy = "memory: each token of B takes about " + sizeText(bytesAt(trial, low+1)-bytesAt(trial, low))
	}
	return nil
}

func bytesAt(trial sizes, b int) uint64 {
	if trial.bytes(b) != nil {
		return math.MaxUint64
	}
	return trial.TotalBytes
}

// forDoctor is the plan with which doctor compares the host.
func (p *sizes) forDoctor(use doctor.For) doctor.Plan {
	d := doctor.Plan{SMs: p.SMs, QPs: p.QPs, QPDepth: p.QPDepth, MaxTokens: p.MaxTokens}
	if use == doctor.ForCPU {
		d.HostBytes = p.TotalBytes
	} else {
		d.DeviceBytes = p.TotalBytes
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
