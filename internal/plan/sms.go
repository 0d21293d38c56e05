package plan

import "math"

// SMQuery is what is known of a normal-mode call when its SMs are chosen.
type SMQuery struct {
	Topology
	Kind              int    // KindDispatch, KindCombine
	RowBytes          uint64 // of a row, with its scales
	Tokens            int    // of this rank
	TopK              int    // 0: unknown
	RecvTokens        int    // rows that the dispatch brings here and the combine sends back; 0: unknown
	Staged            bool   // dispatch: rows go through staging memory, and the receiver copies them to their places
	AtOnce            bool   // few rows, for which the library has kernels of their own
	Copies            bool   // copy engines move the rows, before or after the call's kernel
	ComputeCapability int    // 90; 0: the device has no SMs to choose from
}

// What one SM takes for a row, in us, whether it crosses a link or stays: a part for each row and a part for each byte,
// at least so much. Fitted to the sweeps of docs/performance.md (4 × H200, 2 to 24 SMs, hidden 2048 to 7168): 4096 tokens
// of 7168 take one SM 2580 us in FP8 and 4416 in BF16, through staging memory 5770 and 9560, combine 7164. Between two
// ranks half of the rows stay: there combine takes 288, 251 and 213 us with 16, 20 and 24 SMs.
type smCost struct{ row, perByte, least float64 }

var (
	directCost  = smCost{0.0405, 17.7e-6, 0.15}
	stagedCost  = smCost{0.115, 36.8e-6, 0}
	combineCost = smCost{0.428, 3.98e-6, 0}
)

const (
	// measuredRanks is the number of ranks of the sweeps.
	measuredRanks = 4.0
	// noBulkFactor is how much longer an SM without bulk copies (below 9.0) takes: 1.7 times in both operations.
	noBulkFactor = 1.7
	// smSlack is the time in us that fewer SMs may cost: a tenth of the 25 us that a call takes whatever it carries.
	smSlack = 2.5
	// leastSMs and mostSMs bound the choice. Beyond 24 no measured call gained.
	leastSMs, mostSMs = 4, 24
	// Rows of more bytes are copied from staging by SMs of their own where there are mostSMs: 505 us with 24, 634 with 20.
	apartBytes = 8192
	// Of few rows an SM copies and adds what arrives, while nothing else runs: 24, 32, 48 and 64 take 66, 62, 57 and 57 us
	// a round of 128 tokens between 4 ranks, of 64 tokens 46, 46, 44 and 44.
	leastAtOnceTokens, mostAtOnceSMs = 96, 48
	// A kernel that only packs or adds what copy engines move: 212 MB of rows (4 ranks, 4096 tokens of 7168 in BF16) take
	// dispatch and combine 665 and 750 us with 24 SMs, 620 and 674 with 32, 564 and 585 with 96; 26 MB as long with any.
	copyBytesPerSM, mostCopySMs = 2.2e6, 96
	// ranksPerSM: each block has 3 warps or more that wait for a rank each, and every rank needs one.
	ranksPerSM = 3
)

// linkBytes are the bytes that leave a GPU in a us when all write to all: measured with NVLink 4 (450 GB/s nominal),
// the others by their nominal rates. A GPU that is not listed counts as one with NVLink 3: SMs to spare cost less than
// SMs that are missing.
func linkBytes(computeCapability int) float64 {
	const measured, nominal = 354e3, 450
	switch computeCapability / 10 {
	case 9:
		return measured
	case 10:
		return measured * 900 / nominal
	}
	return measured * 300 / nominal
}

// NumSMs is the number of SMs of a normal-mode call where neither the program nor a configuration gives one: the
// smallest even number with which the links, not the SMs, bound the time, within smSlack. What has not been measured
// keeps V1's number: calls between nodes and of a single rank. So does a device without SMs, where it changes nothing.
func NumSMs(q SMQuery) int {
	if q.ComputeCapability == 0 || q.Nodes() > 1 || q.Ranks < 2 {
		return int(DefaultConfig.NumSMs)
	}
	if q.AtOnce {
		if q.Tokens < leastAtOnceTokens {
			return mostSMs
		}
		return mostAtOnceSMs
	}
	ranks := float64(q.Ranks)
	// A token goes once to each rank that has one of its experts: with K experts chosen evenly to so many ranks.
	reached := ranks * (1 - math.Pow(1-1/ranks, float64(q.TopK)))
	rows := math.Max(float64(q.Tokens)*reached, float64(q.RecvTokens))
	least := max(leastSMs, (q.Ranks+ranksPerSM-1)/ranksPerSM)
	if q.Copies {
		number := int(math.Ceil(rows * float64(q.RowBytes) / copyBytesPerSM))
		number = max(min(number, mostCopySMs), mostSMs, least)
		return number + number%2
	}
	crossing := rows * (ranks - 1) / ranks
	cost, bytes := combineCost, float64(q.RowBytes)
	if q.Kind == KindDispatch {
		cost, bytes = directCost, bytes+sourceBytes+float64(q.TopK)*(indexBytes+scaleBytes)
		if q.Staged {
			cost = stagedCost
		}
	}
	// Among more than 4 ranks fewer rows stay. What those spare was not measured: SMs to spare cost less than SMs that are
	// missing.
	work := math.Max(rows, crossing*measuredRanks/(measuredRanks-1)) * math.Max(cost.least, cost.row+bytes*cost.perByte)
	if q.ComputeCapability < 90 {
		work *= noBulkFactor
	}
	number := int(math.Ceil(work / (crossing*bytes/linkBytes(q.ComputeCapability) + smSlack)))
	number = max(min(number, mostSMs), least)
	if q.Kind == KindDispatch && q.Staged && q.RowBytes > apartBytes && number >= mostSMs-2 {
		return mostSMs
	}
	return number + number%2
}
