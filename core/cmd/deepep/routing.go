package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// routings are the ways to choose experts for tokens.
var routings = []string{"uniform", "zipf", "one-hot"}

// With zipfExponent the most frequent of 256 experts gets about 42 times the mean expert's tokens.
const zipfExponent = 1.0

// route chooses topK different experts for each of a rank's tokens.
//
//	uniform  every expert is equally likely
//	zipf     expert i with a likelihood proportional to 1/(i+1): the first ranks get most tokens
//	one-hot  all tokens of all ranks choose the first topK experts
//
// Equal arguments give equal choices.
func route(how string, tokens, topK, experts, rank int, seed uint64) ([]int64, error) {
	if topK > experts {
		return nil, fmt.Errorf("top-k: %d; allowed is at most the number of experts, %d", topK, experts)
	}
	index := make([]int64, 0, tokens*topK)
	r := rand.New(rand.NewPCG(seed, uint64(rank)+1))
	weights := make([]float64, experts)
	for e := range weights {
		weights[e] = math.Pow(float64(e+1), -zipfExponent)
	}
	order := make([]int64, experts)
	for e := range order {
		order[e] = int64(e)
	}
	keys := make([]float64, experts)
	for range tokens {
		switch how {
		case "one-hot":
		case "uniform":
			for i := range topK { // the beginning of a shuffle
				j := i + r.IntN(experts-i)
				order[i], order[j] = order[j], order[i]
			}
		case "zipf":
			// The topK smallest of exponential times with these rates are a draw without replacement.
			for e := range keys {
				keys[e] = r.ExpFloat64() / weights[e]
			}
			slices.SortFunc(order, func(a, b int64) int {
				switch x, y := keys[a], keys[b]; {
				case x < y:
					return -1
				case x > y:
					return 1
				}
				return int(a - b)
			})
		default:
			return nil, fmt.Errorf("routing: %q; allowed are uniform, zipf and one-hot", how)
		}
		index = append(index, order[:topK]...)
	}
	return index, nil
}
