package monitor

import "slices"

// Waits holds the waits among the ranks of one buffer: Mean[i][j] is the mean time in ns that rank i waited for rank j
// in a round, which is one call of each operation that waits. Ranks without a page on this host have Seen false and a
// row of zeros.
type Waits struct {
	Mean [][]float64
	Seen []bool
}

// WaitsOf computes the table from one reading of each rank, over the given operations.
func WaitsOf(ranks int, readings map[int][]OpStats) Waits {
	w := Waits{Mean: make([][]float64, ranks), Seen: make([]bool, ranks)}
	for i := range w.Mean {
		w.Mean[i] = make([]float64, ranks)
		ops, ok := readings[i]
		if !ok {
			continue
		}
		w.Seen[i] = true
		rounds := uint64(1)
		for _, o := range ops {
			waited := uint64(0)
			for j, ns := range o.WaitFor {
				if j < ranks {
					w.Mean[i][j] += float64(ns)
					waited |= ns
				}
			}
			if waited > 0 { // operations without waits do not count as rounds
				rounds = max(rounds, o.Calls)
			}
		}
		for j := range w.Mean[i] {
			w.Mean[i][j] /= float64(rounds)
		}
	}
	return w
}

// Slow is the rank that the others wait for.
type Slow struct {
	Rank   int
	Mean   float64 // ns that another rank waits for it in a round
	Others float64 // median of the same mean over the other ranks
}

// A rank is slow if the others wait for it three times as long as for the median rank, and at least 50 us a round:
// below that, uneven routing alone makes such differences.
const (
	slowFactor = 3
	slowFloor  = 50_000
)

// Slowest finds the slow rank; found is false if there is none.
func (w Waits) Slowest() (slow Slow, found bool) {
	columns := make([]float64, len(w.Mean))
	for j := range columns {
		columns[j] = w.MeanFor(j)
	}
	if len(columns) < 2 {
		return Slow{}, false
	}
	slow.Rank = 0
	for j, c := range columns {
		if c > columns[slow.Rank] {
			slow.Rank = j
		}
	}
	slow.Mean = columns[slow.Rank]
	others := slices.Delete(slices.Clone(columns), slow.Rank, slow.Rank+1)
	slices.Sort(others)
	slow.Others = others[len(others)/2]
	return slow, slow.Mean >= slowFloor && slow.Mean >= slowFactor*slow.Others
}

// MeanFor is how long, on average, another rank waited for rank j in a round, in ns.
func (w Waits) MeanFor(j int) float64 {
	sum, n := 0.0, 0
	for i, row := range w.Mean {
		if i != j && w.Seen[i] {
			sum += row[j]
			n++
		}
	}
	return sum / float64(max(n, 1))
}
