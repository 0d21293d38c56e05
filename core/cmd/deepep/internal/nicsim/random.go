package nicsim

// random is the SplitMix64 generator: one word of state, and the same numbers on every machine and in every release of
// Go.
type random struct{ state uint64 }

const golden = 0x9e3779b97f4a7c15

// mix spreads a word over all its bits.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// seeded makes a generator from several numbers, all of which determine its sequence.
func seeded(parts ...uint64) *random {
	r := &random{}
	for _, p := range parts {
		r.state = mix(r.state + golden + p)
	}
	return r
}

func (r *random) next() uint64 {
	r.state += golden
	return mix(r.state)
}

// below is a number in [0, n). n is far below 2^32, so that the remainder's bias is negligible.
func (r *random) below(n int) int { return int(r.next() % uint64(n)) }

func (r *random) shuffle(s []int) {
	for i := len(s) - 1; i > 0; i-- {
		j := r.below(i + 1)
		s[i], s[j] = s[j], s[i]
	}
}

// router chooses experts for tokens as upstream's benchmarks do: every expert is equally likely, a token's experts are
// different and, with groups > 0, are on that many nodes only, those of the token's best-scored experts. Independent
// scores of one distribution rank the experts in a random permutation; so router draws experts one by one and skips
// those of other nodes once it has groups nodes.
type router struct {
	random  *random
	perNode int // experts of a node
	groups  int // nodes a token may use; 0: all
	order   []int
	chosen  []int
	nodes   []int
}

func newRouter(j *Job, rank int) *router {
	r := &router{random: seeded(j.Seed, 1, uint64(rank)), perNode: j.Experts / j.Topology.Nodes(), groups: j.Groups}
	for e := range j.Experts {
		r.order = append(r.order, e)
	}
	return r
}

// next chooses for one token; the slice is valid until the next call.
func (r *router) next(topK int) []int {
	r.chosen, r.nodes = r.chosen[:0], r.nodes[:0]
	for i := 0; i < len(r.order) && len(r.chosen) < topK; i++ {
		j := i + r.random.below(len(r.order)-i)
		r.order[i], r.order[j] = r.order[j], r.order[i]
		if e := r.order[i]; r.allowed(e / r.perNode) {
			r.chosen = append(r.chosen, e)
		}
	}
	return r.chosen
}

func (r *router) allowed(node int) bool {
	if r.groups == 0 {
		return true
	}
	for _, n := range r.nodes {
		if n == node {
			return true
		}
	}
	if len(r.nodes) == r.groups {
		return false
	}
	r.nodes = append(r.nodes, node)
	return true
}
