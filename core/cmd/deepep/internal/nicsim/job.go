package nicsim

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Operation is the ranks' call.
type Operation int

// Operations.
const (
	LowLatencyDispatch Operation = iota // a row for each (token, expert), FP8 with scales
	LowLatencyCombine                   // the rows of a dispatch back, BF16
	Dispatch                            // a row for each (token, node) over RDMA, then NVLink; FP8 with scales
	Combine                             // rows summed inside the node, then one for each (token, node) back; BF16
)

func (o Operation) String() string {
	return [...]string{"low-latency dispatch", "low-latency combine", "dispatch", "combine"}[o]
}

func (o Operation) lowLatency() bool { return o <= LowLatencyCombine }

// Job is one call of all ranks.
type Job struct {
	Operation Operation
	Topology  plan.Topology
	Tokens    int // of each rank
	Hidden    int
	TopK      int
	Experts   int
	Groups    int // nodes that a token may use; 0: all
	SMs       int // normal mode's
	Queues    int // queue pairs toward each peer; 0: as many as the call has use for
	Order     Order
	InTurn    bool // ranks make one queue pair of each peer in turn, instead of all of one peer together
	AllRDMA   bool // low-latency rows within a node go through the NIC too
	Skew      Time // ranks start at random within this time
	Seed      uint64

	queues plan.Queues // set by Check
}

// Shape of the published figures.
const (
	PublishedHidden  = 7168
	PublishedTopK    = 8
	PublishedExperts = 256
	PublishedSMs     = 24
	PublishedGroups  = 4 // of normal mode
)

// PublishedJob is the call of upstream's tables. The number of ranks must be a multiple of 8, the ranks of a node.
func PublishedJob(o Operation, ranks int) (Job, error) {
	t, err := plan.NewTopology(ranks, plan.DefaultPeers)
	j := Job{
		Operation: o, Topology: t, Tokens: 4096, Hidden: PublishedHidden, TopK: PublishedTopK, Experts: PublishedExperts,
		Groups: PublishedGroups, SMs: PublishedSMs, Seed: 1, Order: Planned, // much like NVSHMEM's own, which the figures were taken with
	}
	if o.lowLatency() {
		j.Tokens, j.Groups = 128, 0
	}
	if ranks > j.Experts {
		j.Experts = ranks // one a rank, as in upstream's largest group
	}
	return j, err
}

const mostSkew = 1000 * 1000 * Microsecond

// Check refuses values out of range, and sets the planned number of queue pairs.
func (j *Job) Check() error {
	if j.Operation < LowLatencyDispatch || j.Operation > Combine {
		return status.InvalidArg("operation", int(j.Operation), "0 to 3")
	}
	t, err := plan.NewTopology(j.Topology.Ranks, j.Topology.Peers)
	if err != nil {
		return err
	}
	j.Topology = t
	const most = 1 << 16
	for _, n := range []struct {
		name        string
		value, high int
	}{{"tokens", j.Tokens, most}, {"hidden", j.Hidden, most}, {"top-k", j.TopK, plan.MaxTopK}, {"experts", j.Experts, most}} {
		if n.value < 1 || n.value > n.high {
			return status.InvalidArg(n.name, n.value, fmt.Sprintf("1 to %d", n.high))
		}
	}
	switch nodes := t.Nodes(); {
	case j.Experts%t.Ranks != 0:
		return status.InvalidArg("experts", j.Experts, fmt.Sprintf("a multiple of ranks = %d", t.Ranks))
	case j.Groups < 0 || j.Groups > plan.MaxRanks:
		return status.InvalidArg("groups", j.Groups, fmt.Sprintf("0 (all nodes) to %d", plan.MaxRanks))
	case j.TopK > j.Experts || j.Groups > 0 && j.TopK > min(j.Groups, nodes)*j.Experts/nodes:
		return status.InvalidArg("top-k", j.TopK, "at most the experts of the nodes that a token may use")
	case j.Operation >= Dispatch && (j.SMs < 2 || j.SMs%2 != 0 || j.SMs > plan.MaxRanks):
		return status.InvalidArg("sms", j.SMs, fmt.Sprintf("an even number, 2 to %d", plan.MaxRanks))
	case j.Order < Default || j.Order > Shuffled:
		return status.InvalidArg("order", int(j.Order), fmt.Sprintf("0 to %d", Shuffled))
	case j.Skew < 0 || j.Skew > mostSkew:
		return status.InvalidArg("skew", int64(j.Skew), fmt.Sprintf("0 to %d picoseconds", mostSkew))
	}
	o := plan.QueueOptions{PerPeer: j.Queues, MaxTokens: j.Tokens}
	localExperts, channels := j.Experts/t.Ranks, 0
	if !j.Operation.lowLatency() {
		localExperts, channels, o.MaxTokens = 0, j.SMs/2, 0 // windows bound the tokens in flight
	}
	if o.PerPeer == 0 {
		o.PerPeer = plan.UsedQueuePairs(localExperts, channels)
	}
	q, err := plan.NewQueues(t, o)
	j.queues, j.Queues = q, q.PerPeer
	return err
}

// Row sizes on the wire.
const (
	scaleChannels = 128
	scaleBytes    = 4
	bf16          = 2
	messageHead   = 16 // a low-latency row's source, with padding
	flagBytes     = 8
	sourceBytes   = 8     // a normal-mode row's source
	choiceBytes   = 8 + 4 // index and weight of each expert
)

func (j *Job) fp8Bytes() int64 {
	return int64(j.Hidden) + int64((j.Hidden+scaleChannels-1)/scaleChannels)*scaleBytes
}

// rowBytes is the size of a row on the wire.
func (j *Job) rowBytes() int64 {
	switch j.Operation {
	case LowLatencyDispatch:
		return j.fp8Bytes() + messageHead
	case Dispatch:
		return j.fp8Bytes() + sourceBytes + int64(j.TopK)*choiceBytes
	case Combine:
		return int64(j.Hidden)*bf16 + int64(j.TopK)*scaleBytes
	}
	return int64(j.Hidden) * bf16
}

// payloadBytes is the size of a row as upstream counts it.
func (j *Job) payloadBytes() int64 {
	switch j.Operation {
	case LowLatencyDispatch:
		return j.rowBytes()
	case Dispatch:
		return j.fp8Bytes()
	}
	return int64(j.Hidden) * bf16
}
