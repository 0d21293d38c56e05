package core

import "testing"

// What a rank's memory takes grows with the number of ranks, apart from the matrix of normal mode's counts: three numbers
// of 4 bytes for each pair of ranks, 12 in all.
func TestMemoryOfARankGrowsWithTheRanks(t *testing.T) {
	type sizes struct{ control, wire, total uint64 }
	of := func(ranks, experts int) sizes {
		t.Helper()
		p, err := Plan(PlanOptions{Size: ranks, NumNVLPeers: 8, NumTokens: 4096, NumMaxTokens: 128, Hidden: 7168, NumTopK: 8, NumExperts: experts,
			Buffer: BufferOptions{Engine: EngineCPU}})
		if err != nil {
			t.Fatal(err)
		}
		matrix := 12 * uint64(ranks) * uint64(ranks)
		if p.Info.ControlBytes <= matrix {
			t.Fatalf("%d ranks: %d bytes of flags and counts hold no matrix of %d", ranks, p.Info.ControlBytes, matrix)
		}
		return sizes{p.Info.ControlBytes - matrix, p.Info.WireBytes, p.Info.NVLBytes + p.Info.RDMABytes + p.Info.ControlBytes + p.Info.WireBytes - matrix}
	}
	at := func(ranks, experts int, what string, now, before uint64, most float64) {
		if float64(now) > most*float64(before) {
			t.Errorf("%d ranks, %d experts: %s is %d bytes, %.2f times that of half the ranks; at most %.2f", ranks, experts, what, now, float64(now)/float64(before), most)
		}
	}
	for ranks := 32; ranks <= 1024; ranks *= 2 {
		// A fixed number of experts for each rank: twice the ranks, at most twice the memory, and 1/20 for what is rounded up.
		now, before := of(ranks, 4*ranks), of(ranks/2, 2*ranks)
		at(ranks, 4*ranks, "flags and counts", now.control, before.control, 2.1)
		at(ranks, 4*ranks, "staging", now.wire, before.wire, 2.1)
		at(ranks, 4*ranks, "the buffer", now.total, before.total, 2.1)
		// The same experts on more ranks: rows need no more memory.
		now, before = of(ranks, 1024), of(ranks/2, 1024)
		at(ranks, 1024, "the buffer", now.total, before.total, 1.1)
	}
}
