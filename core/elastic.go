package core

import (
	"fmt"
	"math"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// ElasticUnit divides NumBytes of a V2 buffer.
const ElasticUnit = plan.ElasticUnit

// ElasticOptions describe a buffer of V2 (ElasticBuffer in Python): by the shape of its calls, or by NumBytes.
type ElasticOptions struct {
	NumRanks          int    // R
	NumNVLPeers       int    // ranks of one NVLink domain; 0: DEEPEP_NUM_MAX_NVL_PEERS, or 8
	NumMaxTokens      int    // M, the most tokens that a rank dispatches; 0 with NumBytes: not known
	Hidden            int    // H; 0 with NumBytes: not known
	NumTopK           int    // K; 0: 32
	FP8               bool   // for rows of FP8 with scales (use_fp8_dispatch)
	Unreduced         bool   // combine sends a row back for each choice (allow_multiple_reduction=False)
	Direct            bool   // one logical domain of all ranks (allow_hybrid_mode=False)
	NumAllocatedQPs   int    // 0: 129 with several logical domains, else 17
	NumSMs            int    // for NumQPs; 0: the answer's
	NumDeviceSMs      int    // of the GPU; 0: not known
	ComputeCapability int    // 10 × major + minor of the GPU; 0: the CPU engine
	NumBytes          uint64 // a multiple of ElasticUnit; 0: what the shape needs
}

// ElasticInfo are the numbers of a buffer of V2, of one rank.
type ElasticInfo struct {
	NumBytes        uint64 // get_buffer_size_hint
	NumNVLBytes     uint64 // of the buffer: staging. With RowSegmentBytes NumBytes, or up to 12 MiB more
	NumRDMABytes    uint64 // of the buffer; 0 on one node. Beside NumBytes
	RowSegmentBytes uint64 // rows that peers write in place; GPUs alone have it
	NumSMs          int    // get_theoretical_num_sms: even, 4 or more
	NumAllocatedQPs int
	NumQPs          int // get_theoretical_num_qps
}

// ElasticSizes says how large a buffer of V2 is, how it is divided, and what its calls take. Local; it needs neither a
// device nor peers. NewBuffer with NumNVLBytes and NumRDMABytes of it makes that buffer. ErrInvalidArgument names the
// option.
func ElasticSizes(o ElasticOptions) (ElasticInfo, error) {
	for _, n := range []struct {
		name  string
		value int
	}{{"num_device_sms", o.NumDeviceSMs}, {"compute_capability", o.ComputeCapability}} {
		if n.value < 0 {
			return ElasticInfo{}, status.InvalidArg(n.name, n.value, fmt.Sprintf("0 to %d", math.MaxInt32))
		}
	}
	peers := o.NumNVLPeers
	if peers == 0 {
		s, err := env.Current()
		if err != nil {
			return ElasticInfo{}, err
		}
		peers = s.MaxNVLPeers
	}
	t, err := plan.HintTopology(o.NumRanks, peers)
	if err != nil {
		return ElasticInfo{}, err
	}
	return o.sizes(t)
}

func (o *ElasticOptions) sizes(t plan.Topology) (ElasticInfo, error) {
	e := plan.Elastic{NumMaxTokens: o.NumMaxTokens, Hidden: o.Hidden, NumTopK: o.NumTopK, FP8: o.FP8, Unreduced: o.Unreduced, NumBytes: o.NumBytes}
	r, err := e.Regions(o.NumRanks, t)
	if err != nil {
		return ElasticInfo{}, err
	}
	i := ElasticInfo{NumBytes: r.NumBytes, NumNVLBytes: r.NVL, NumRDMABytes: r.RDMA, RowSegmentBytes: r.Rows}
	i.NumSMs = e.SMs(t, o.ComputeCapability, o.NumDeviceSMs, r.Rows)
	sms := o.NumSMs
	if sms == 0 {
		sms = i.NumSMs
	}
	i.NumAllocatedQPs, i.NumQPs, err = plan.ElasticQPs(t.Nodes() > 1 && !o.Direct, o.NumAllocatedQPs, sms)
	return i, err
}
