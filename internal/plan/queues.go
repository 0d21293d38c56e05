package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/status"
)

// Limits of queue pairs. Depths are NVSHMEM's: powers of two from 128 to 32768, by default 1024.
const (
	MaxQueuePairs = 1024 // toward one peer

	MinDepth     = 128
	DefaultDepth = 1024
	MaxDepth     = 32768
)

// DefaultQueuePairs is the default of num_qps_per_rank, as in V1.
const DefaultQueuePairs = 24

// QueueOptions are what is known when queue pairs are made. Zero means unknown, or the default.
type QueueOptions struct {
	PerPeer   int   // num_qps_per_rank; 0: DefaultQueuePairs
	MaxTokens int   // largest B (num_max_dispatch_tokens_per_rank) of the calls
	Depth     int   // of a queue, in operations
	Order     Order // of creation

	// Variables of the environment that MaxTokens and Depth come from, which errors then name, and the one that a user
	// should set to change Depth; "": from a caller.
	TokensFrom, DepthFrom, DepthFix string
}

// Queues are the queue pairs of one rank: the same number toward every peer, all of one depth.
//
// Any number works: experts in low-latency mode and channels in normal mode take the queue pairs in turn. Normal mode
// moves rows between ranks of the same index alone; the others have the same number all the same, since one number for
// all peers is what transports offer, and their first queue pair carries counts and barriers.
type Queues struct {
	Topology
	PerPeer int
	Depth   int
	Order   Order
}

// NewQueues plans the queue pairs of a group.
func NewQueues(t Topology, o QueueOptions) (Queues, error) {
	for _, n := range []struct {
		name        string
		value, most int
	}{
		{"num_qps_per_rank", o.PerPeer, MaxQueuePairs}, {"num_max_dispatch_tokens_per_rank", o.MaxTokens, maxTokens}, {"qp_depth", o.Depth, MaxDepth},
	} {
		if n.value < 0 || n.value > n.most {
			return Queues{}, status.InvalidArg(n.name, n.value, fmt.Sprintf("0 to %d", n.most))
		}
	}
	q := Queues{Topology: t, PerPeer: o.PerPeer, Order: o.Order}
	if q.PerPeer == 0 {
		q.PerPeer = DefaultQueuePairs
	}
	need := 0
	if o.MaxTokens > 0 {
		need = DepthFor(o.MaxTokens)
	}
	switch {
	case need > MaxDepth:
		return Queues{}, status.InvalidArg("num_max_dispatch_tokens_per_rank", o.MaxTokens,
			fmt.Sprintf("at most %d between nodes: B tokens need queue pairs of depth 2 (B + 1), and the deepest have %d", MaxDepth/2-1, MaxDepth))
	case o.Depth == 0:
		q.Depth = max(DefaultDepth, need)
	default:
		if q.Depth = powerOfTwo(o.Depth); q.Depth < need {
			return Queues{}, o.tooShallow(need)
		}
	}
	return q, nil
}

// UsedQueuePairs is how many queue pairs toward a peer the calls have use for: one for each of its local experts in
// low-latency mode, one for each channel in normal mode. What a buffer has beyond that stays idle.
func UsedQueuePairs(localExperts, channels int) int {
	return min(max(1, localExperts, channels), MaxQueuePairs)
}

// tooShallow is the error for queues that are shallower than the tokens need. Its fix works as typed, whatever else is
// set.
func (o *QueueOptions) tooShallow(need int) error {
	if o.DepthFrom == "" || o.TokensFrom == "" {
		return status.InvalidArg("qp_depth", o.Depth, fmt.Sprintf("at least %d for %d tokens: each takes two requests, and so does their count", need, o.MaxTokens))
	}
	return status.Errorf(status.InvalidArgument, "variable %s: got %d, allowed at least %d with %s=%d: each token takes two requests, and so does their count; fix: export %s=%d",
		o.DepthFrom, o.Depth, need, o.TokensFrom, o.MaxTokens, o.DepthFix, need)
}

// DepthFor is the minimum depth of a queue pair for B tokens and their count message in flight, two requests each: a
// power of two, perhaps above MaxDepth.
func DepthFor(maxTokens int) int { return powerOfTwo(2 * (maxTokens + 1)) }

// AllowedDepth is the smallest depth of MinDepth to MaxDepth that is not below n; MaxDepth if there is none.
func AllowedDepth(n int) int { return min(MaxDepth, max(MinDepth, powerOfTwo(n))) }

// powerOfTwo is the smallest power of two that is not below n.
func powerOfTwo(n int) int {
	p := 1
	for p < n {
		p *= 2
	}
	return p
}

// OfExpert is the queue pair that carries the rows of a peer's local expert.
func (q Queues) OfExpert(expert int) int { return expert % q.PerPeer }

// OfChannel is the queue pair that carries the rows of a channel.
func (q Queues) OfChannel(channel int) int { return channel % q.PerPeer }

// PerDevice is how many a peer gets on each of a rank's NICs (NVSHMEM_IBGDA_NUM_RC_PER_PE) so that it has PerPeer at
// least. A rank without a known NIC counts as one with one.
func (q Queues) PerDevice(devices int) int {
	devices = max(1, devices)
	return (q.PerPeer + devices - 1) / devices
}

// DevicesOfRank is how many of a host's NICs each of its ranks uses: they are dealt out, and no rank goes without one.
func DevicesOfRank(devices, ranksOfHost int) int { return max(1, devices/max(1, ranksOfHost)) }

// Remote reports whether two ranks are on different nodes.
func (t Topology) Remote(a, b int) bool { return t.Node(a) != t.Node(b) }

// NumRemote is the number of ranks on other nodes.
func (t Topology) NumRemote() int { return t.Ranks - t.NodeSize() }

// Number is the place of a queue pair among its rank's toward all other ranks, in the order of creation, from 0; -1 if
// there is none.
func (q Queues) Number(rank, peer, queue int) int {
	if queue < 0 || queue >= q.PerPeer || peer == rank {
		return -1
	}
	for i, other := range q.PeerOrder(rank) {
		if other == peer {
			return i*q.PerPeer + queue
		}
	}
	return -1
}
