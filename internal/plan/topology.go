package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

// DefaultPeers is the default number of ranks of one NVLink domain.
const DefaultPeers = 8

// MaxRanks is the largest group.
const MaxRanks = abi.MaxRanks

// Topology groups ranks into NVLink domains ("nodes") of Peers ranks each. Ranks <= Peers is one node.
type Topology struct {
	Ranks, Peers int
}

// NewTopology checks a group's size against the size of a node. peers = 0 means DefaultPeers.
func NewTopology(ranks, peers int) (Topology, error) {
	if peers == 0 {
		peers = DefaultPeers
	}
	switch {
	case ranks < 1 || ranks > MaxRanks:
		return Topology{}, status.InvalidArg("num_ranks", ranks, fmt.Sprintf("1 to %d", MaxRanks))
	case peers < 1 || peers > MaxRanks:
		return Topology{}, status.InvalidArg("num_nvl_peers", peers, fmt.Sprintf("1 to %d", MaxRanks))
	case ranks > peers && ranks%peers != 0:
		return Topology{}, status.InvalidArg("num_ranks", ranks,
			fmt.Sprintf("at most %d ranks, or a multiple of %d: every node must be full", peers, peers))
	}
	return Topology{ranks, peers}, nil
}

// Nodes is the number of nodes.
func (t Topology) Nodes() int { return (t.Ranks + t.Peers - 1) / t.Peers }

// NodeSize is the number of ranks of a node.
func (t Topology) NodeSize() int { return min(t.Ranks, t.Peers) }

// Node is the node of a rank (rdma_rank).
func (t Topology) Node(rank int) int { return rank / t.Peers }

// Local is a rank's place in its node (nvl_rank).
func (t Topology) Local(rank int) int { return rank % t.Peers }

// ByQueues reports whether any rank is reached through queue pairs. everywhere: low-latency calls use them inside a
// node too.
func (t Topology) ByQueues(everywhere bool) bool { return t.Ranks > 1 && (t.Nodes() > 1 || everywhere) }

// RDMATeam is a rank's RDMA sub-team.
func (t Topology) RDMATeam(rank int) op.SubTeam {
	return op.SubTeam{Start: t.Local(rank), Stride: t.NodeSize(), Size: t.Nodes()}
}
