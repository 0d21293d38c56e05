package nicsim

import (
	"github.com/deepep-go/deepep/internal/plan"
)

// Order is the order in which a rank makes its queue pairs. It determines their numbers, and thus the NIC's order of
// service.
type Order int

// Orders.
const (
	Planned  Order = iota // plan.Topology.PeerOrder: other nodes first, rotated
	Rotated               // dst = (i + 1 + me) mod n over all ranks, as NVSHMEM does
	Linear                // dst = 0, 1, 2 …
	Shuffled              // another random order on each rank
	Spread                // other nodes first, rotated by node and by index
)

// peers lists the other ranks in the order in which a rank makes its queue pairs toward them.
func (o Order) peers(t plan.Topology, rank int, seed uint64) []int {
	n := t.Ranks
	order := make([]int, 0, n-1)
	switch o {
	case Planned:
		return t.PeerOrder(rank)
	case Spread:
		size := t.NodeSize()
		for i := range n {
			node := (t.Node(rank) + 1 + i/size) % t.Nodes()
			if peer := node*size + (t.Local(rank)+i)%size; peer != rank {
				order = append(order, peer)
			}
		}
		return order
	case Rotated:
		for i := range n - 1 {
			order = append(order, (i+1+rank)%n)
		}
		return order
	}
	for peer := range n {
		if peer != rank {
			order = append(order, peer)
		}
	}
	if o == Shuffled {
		seeded(seed, 2, uint64(rank)).shuffle(order)
	}
	return order
}

// numbering numbers queue pairs.
type numbering struct {
	perPeer, peers int
	inTurn         bool
	place          []int32 // by peer: its index in one rank's order
}

func newNumbering(j *Job, rank int) numbering {
	n := numbering{perPeer: j.Queues, peers: j.Topology.Ranks - 1, inTurn: j.InTurn, place: make([]int32, j.Topology.Ranks)}
	for i, peer := range j.Order.peers(j.Topology, rank, j.Seed) {
		n.place[peer] = int32(i)
	}
	return n
}

// number is the number of a queue pair toward a peer.
func (n *numbering) number(peer, queue int) int32 {
	if n.inTurn {
		return int32(queue*n.peers) + n.place[peer]
	}
	return n.place[peer]*int32(n.perPeer) + int32(queue)
}
