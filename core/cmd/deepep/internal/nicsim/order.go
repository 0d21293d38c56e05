package nicsim

import (
	"github.com/deepep-go/deepep/internal/plan"
)

// Order is the order in which a rank makes its queue pairs. It determines their numbers, and thus the NIC's order of
// service.
type Order int

// Orders: plan's, whose zero value is the library's default, and one more.
const (
	Default  = Order(plan.DefaultOrder)
	Linear   = Order(plan.Linear)
	Planned  = Order(plan.Planned)
	Rotated  = Order(plan.Rotated)
	Spread   = Order(plan.Spread)
	Shuffled = Spread + 1 // another random order on each rank
)

// peers lists the other ranks in the order in which a rank makes its queue pairs toward them.
func (o Order) peers(t plan.Topology, rank int, seed uint64) []int {
	if o != Shuffled {
		return plan.Order(o).Peers(t, rank)
	}
	order := plan.Linear.Peers(t, rank)
	seeded(seed, 2, uint64(rank)).shuffle(order)
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
