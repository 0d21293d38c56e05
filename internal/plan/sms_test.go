package plan

import "testing"

// The choice beside what was measured on 4 × H200 with hidden 7168 and top-8: the fewest SMs that reach the time of the
// best count within 2 % (docs/performance.md).
func TestSMsReachTheLinkRate(t *testing.T) {
	const fp8, bf16 = 7168 + 224, 14336
	for _, c := range []struct {
		what string
		q    SMQuery
		want int
	}{
		{"dispatch FP8: 12 SMs 245 us, 10 take 258", SMQuery{RowBytes: fp8, Tokens: 4096}, 12},
		{"dispatch BF16: 10 SMs 463 us, 8 take 552", SMQuery{RowBytes: bf16, Tokens: 4096}, 10},
		{"combine: 16 SMs 475 us, 12 take 597", SMQuery{Kind: KindCombine, RowBytes: bf16, Tokens: 4096}, 16},
		{"staged FP8: 24 SMs 260 us, 20 take 289", SMQuery{RowBytes: fp8, Tokens: 4096, Staged: true}, 24},
		{"staged BF16: 24 SMs 482 us, 20 take 490, 16 take 575", SMQuery{RowBytes: bf16, Tokens: 4096, Staged: true}, 24},
		{"few tokens need fewer", SMQuery{RowBytes: bf16, Tokens: 64}, 8},
		{"few tokens need fewer, FP8", SMQuery{RowBytes: fp8, Tokens: 64}, 8},
		{"few tokens need fewer, combine", SMQuery{Kind: KindCombine, RowBytes: bf16, Tokens: 64}, 12},
		{"no tokens", SMQuery{RowBytes: bf16}, 4},
		{"by copies, dispatch: 96 SMs 564 us, 24 take 665", SMQuery{RowBytes: bf16, Tokens: 4096, Copies: true}, 96},
		{"by copies, combine: 96 SMs 585 us, 24 take 750", SMQuery{Kind: KindCombine, RowBytes: bf16, Tokens: 4096, Copies: true}, 96},
		{"by copies, few tokens", SMQuery{RowBytes: bf16, Tokens: 512, Copies: true}, 24},
	} {
		c.q.Topology, c.q.ComputeCapability, c.q.TopK = Topology{4, 8}, 90, 8
		if got := NumSMs(c.q); got != c.want {
			t.Errorf("%s: %d SMs, want %d", c.what, got, c.want)
		}
	}
}

// Likewise on 2 × H200, where half of the rows stay and still take SMs (docs/gpu-runs.md).
func TestSMsOfTwoRanks(t *testing.T) {
	for _, c := range []struct {
		what string
		q    SMQuery
		want int
	}{
		{"dispatch FP8: 16 SMs 144 us, 24 take 142", SMQuery{RowBytes: 7168 + 224, Tokens: 4096}, 16},
		{"dispatch BF16: 16 SMs 174 us, as 24", SMQuery{RowBytes: 14336, Tokens: 4096}, 16},
		{"combine: 24 SMs 213 us, 20 take 252, 16 take 291", SMQuery{Kind: KindCombine, RowBytes: 14336, Tokens: 4096}, 24},
	} {
		c.q.Topology, c.q.ComputeCapability, c.q.TopK = Topology{2, 8}, 90, 8
		if got := NumSMs(c.q); got != c.want {
			t.Errorf("%s: %d SMs, want %d", c.what, got, c.want)
		}
	}
}

func TestSMsFollowTheirArguments(t *testing.T) {
	base := SMQuery{Topology: Topology{8, 8}, RowBytes: 14336, Tokens: 512, TopK: 8, ComputeCapability: 90, Kind: KindCombine}
	with := func(change func(*SMQuery)) int { q := base; change(&q); return NumSMs(q) }
	few := with(func(q *SMQuery) { q.Tokens = 16 })
	if few >= NumSMs(base) || with(func(q *SMQuery) { q.Tokens, q.TopK = 16, 1 }) >= few {
		t.Errorf("16 tokens take %d SMs, 512 take %d", few, NumSMs(base))
	}
	if n := with(func(q *SMQuery) { q.Tokens, q.RecvTokens = 0, 4096 }); n < NumSMs(base) {
		t.Errorf("rows that this rank sends back count: %d", n)
	}
	if a100, h100, b200 := with(func(q *SMQuery) { q.Kind, q.ComputeCapability = KindDispatch, 80 }), with(func(q *SMQuery) { q.Kind = KindDispatch }),
		with(func(q *SMQuery) { q.Kind, q.ComputeCapability = KindDispatch, 100 }); a100 < h100 || b200 <= h100 {
		t.Errorf("SMs without bulk copies %d, with them %d, with links twice as fast %d", a100, h100, b200)
	}
	for name, n := range map[string]int{
		"nodes":     with(func(q *SMQuery) { q.Topology = Topology{8, 4} }),
		"one rank":  with(func(q *SMQuery) { q.Topology = Topology{1, 8} }),
		"CPU":       with(func(q *SMQuery) { q.ComputeCapability = 0 }),
		"rows of 8": with(func(q *SMQuery) { q.RowBytes = 16 }) - 4,
	} {
		if n != 20 {
			t.Errorf("%s: %d SMs, want 20", name, n)
		}
	}
}

// Every choice can be launched: even, and with a warp for each rank.
func TestSMsAreLaunchable(t *testing.T) {
	for _, ranks := range []int{2, 3, 7, 8, 16, 72, 256, 1024} {
		for _, kind := range []int{KindDispatch, KindCombine} {
			for _, bytes := range []uint64{16, 7392, 1 << 20} {
				for _, tokens := range []int{0, 1, 512, 1 << 24} {
					for _, copies := range []bool{false, true} {
						q := SMQuery{Topology: Topology{ranks, ranks}, Kind: kind, RowBytes: bytes, Tokens: tokens, TopK: 8, ComputeCapability: 90, Copies: copies}
						most := mostSMs
						if copies {
							most = mostCopySMs
						}
						if n := NumSMs(q); n < 4 || n%2 != 0 || n*ranksPerSM < ranks || n > max(most, ranks/2+2) {
							t.Errorf("%+v: %d", q, n)
						}
					}
				}
			}
		}
	}
}
