package plan

import "fmt"

// Order is the order in which a rank makes its queue pairs toward the other ranks, all of one peer together. NICs number
// queue pairs as they are made, and some serve low numbers first: then ranks that begin with the same receiver wait for
// its port.
type Order int

// Orders. The zero value is the default.
const (
	DefaultOrder Order = iota // Spread, which the simulator shows to be the best, or within 1 % of it, for 2 to 32 nodes
	Linear                    // 0, 1, 2 …
	Planned                   // other nodes first, each part by (i + 1 + rank) mod ranks
	Rotated                   // (i + 1 + rank) mod ranks over all ranks, as NVSHMEM makes its own
	Spread                    // other nodes first, rotated by node and by index
)

// OrderNames are the orders' names, in the order of the constants.
func OrderNames() []string { return []string{"auto", "linear", "planned", "rotated", "spread"} }

func (o Order) String() string {
	if o == DefaultOrder {
		o = Spread
	}
	if names := OrderNames(); o > 0 && int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("Order(%d)", int(o))
}

// Peers lists the other ranks in the order in which a rank makes its queue pairs toward them. Planned and Spread begin
// with the ranks of other nodes, Topology.NumRemote of them.
func (o Order) Peers(t Topology, rank int) []int {
	order := make([]int, 0, t.Ranks-1)
	add := func(peer int) {
		if peer != rank {
			order = append(order, peer)
		}
	}
	switch o {
	case Linear:
		for peer := range t.Ranks {
			add(peer)
		}
	case Rotated:
		for i := range t.Ranks {
			add((i + 1 + rank) % t.Ranks)
		}
	case Planned:
		for _, remote := range []bool{true, false} {
			for i := range t.Ranks - 1 {
				if peer := (i + 1 + rank) % t.Ranks; t.Remote(rank, peer) == remote {
					add(peer)
				}
			}
		}
	default:
		size := t.NodeSize()
		for i := range t.Ranks {
			node := (t.Node(rank) + 1 + i/size) % t.Nodes()
			add(node*size + (t.Local(rank)+i)%size)
		}
	}
	return order
}

// PeerOrder is the default order of a rank's peers.
func (t Topology) PeerOrder(rank int) []int { return DefaultOrder.Peers(t, rank) }

// PeerOrder is the order in which a rank makes these queue pairs.
func (q Queues) PeerOrder(rank int) []int { return q.Order.Peers(q.Topology, rank) }

// RemotePeers are the ranks of other nodes, in the order of creation.
func (q Queues) RemotePeers(rank int) []int {
	remote := make([]int, 0, q.NumRemote())
	for _, peer := range q.PeerOrder(rank) {
		if q.Remote(rank, peer) {
			remote = append(remote, peer)
		}
	}
	return remote
}
