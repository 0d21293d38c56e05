package nicsim

// Counts are a call's rows by where they go. Means are over the ranks; the others are of the busiest rank, whichever of
// sending and receiving is more.
type Counts struct {
	RankRows    float64 // mean (token, rank) pairs, the token's own rank included
	NodeRows    float64 // mean (token, node) pairs, the token's own node included
	ExpertRows  float64 // mean (token, expert) pairs
	FarNodes    float64 // busiest: (token, node) pairs of other nodes
	FarRanks    float64 // busiest: (token, rank) pairs of other nodes
	FarExperts  float64 // busiest: (token, expert) pairs of other nodes
	NearRanks   float64 // busiest: (token, rank) pairs of the other ranks of the node
	NearExperts float64 // busiest: (token, expert) pairs of the other ranks of the node
	Forwarded   float64 // busiest: rows that the rank of the sender's index hands to other ranks of its node
	StreamRows  float64 // rows of the busiest rank for one other node, mean over the nodes
}

// flow counts rows out of each rank and into it.
type flow struct{ out, in []int64 }

func newFlow(ranks int) flow { return flow{make([]int64, ranks), make([]int64, ranks)} }

func (f flow) add(from, to int, rows int64) { f.out[from] += rows; f.in[to] += rows }

func (f flow) busiest() float64 {
	var most int64
	for r := range f.out {
		most = max(most, f.out[r], f.in[r])
	}
	return float64(most)
}

// Count routes the tokens of a call as [Run] does, and counts its rows.
func Count(j Job) (Counts, error) {
	if err := j.Check(); err != nil {
		return Counts{}, err
	}
	t, size := j.Topology, j.Topology.NodeSize()
	farNodes, farRanks, farExperts := newFlow(t.Ranks), newFlow(t.Ranks), newFlow(t.Ranks)
	nearRanks, nearExperts, forwarded := newFlow(t.Ranks), newFlow(t.Ranks), newFlow(t.Ranks)
	var rankRows, nodeRows, expertRows int64
	experts, perRank := make([]int64, t.Ranks), j.Experts/t.Ranks
	for src := range t.Ranks {
		route := newRouter(&j, src)
		for range j.Tokens {
			clear(experts)
			for _, e := range route.next(j.TopK) {
				experts[e/perRank]++
				expertRows++
			}
			for node := range t.Nodes() {
				partner := node*size + t.Local(src)
				reached := false
				for dst := node * size; dst < (node+1)*size; dst++ {
					n := experts[dst]
					if n == 0 {
						continue
					}
					reached = true
					rankRows++
					if dst != partner {
						forwarded.add(partner, dst, 1)
					}
					switch {
					case dst == src:
					case t.Remote(src, dst):
						farRanks.add(src, dst, 1)
						farExperts.add(src, dst, n)
					default:
						nearRanks.add(src, dst, 1)
						nearExperts.add(src, dst, n)
					}
				}
				if reached {
					nodeRows++
					if node != t.Node(src) {
						farNodes.add(src, partner, 1)
					}
				}
			}
		}
	}
	ranks := float64(t.Ranks)
	c := Counts{
		RankRows: float64(rankRows) / ranks, NodeRows: float64(nodeRows) / ranks, ExpertRows: float64(expertRows) / ranks,
		FarNodes: farNodes.busiest(), FarRanks: farRanks.busiest(), FarExperts: farExperts.busiest(),
		NearRanks: nearRanks.busiest(), NearExperts: nearExperts.busiest(), Forwarded: forwarded.busiest(),
	}
	if t.Nodes() > 1 {
		c.StreamRows = c.FarNodes / float64(t.Nodes()-1)
	}
	return c, nil
}
