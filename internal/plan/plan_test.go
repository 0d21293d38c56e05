package plan

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// refused checks that an error names the argument and what is allowed.
func refused(t *testing.T, what string, err error, parts ...string) {
	t.Helper()
	if !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("%s: got %v, want an invalid argument", what, err)
		return
	}
	for _, part := range append(parts, "allowed") {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %q is not in %q", what, part, err)
		}
	}
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestTopology(t *testing.T) {
	for _, c := range []struct {
		ranks, peers          int
		nodes, size, rank     int
		node, local, peersOut int
	}{
		{1, 0, 1, 1, 0, 0, 0, 8}, {6, 8, 1, 6, 5, 0, 5, 8}, {8, 8, 1, 8, 7, 0, 7, 8}, {16, 8, 2, 8, 13, 1, 5, 8}, {6, 2, 3, 2, 5, 2, 1, 2},
	} {
		top := must[Topology](t)(NewTopology(c.ranks, c.peers))
		if top.Nodes() != c.nodes || top.NodeSize() != c.size || top.Node(c.rank) != c.node || top.Local(c.rank) != c.local || top.Peers != c.peersOut {
			t.Errorf("%+v: %+v has %d nodes of %d, rank %d is %d/%d", c, top, top.Nodes(), top.NodeSize(), c.rank, top.Node(c.rank), top.Local(c.rank))
		}
	}
	for _, c := range [][2]int{{0, 8}, {-1, 8}, {1025, 8}, {12, 8}, {4, -1}, {4, 2000}} {
		_, err := NewTopology(c[0], c[1])
		refused(t, "topology", err, "num_")
	}
}

func TestConfigCheck(t *testing.T) {
	good := Config{NumSMs: 0, NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 6, RDMARecvChunk: 13}
	if err := good.Check(); err != nil || good.RDMARecvChunk != 18 {
		t.Errorf("rounded to %d: %v", good.RDMARecvChunk, err)
	}
	for name, c := range map[string]Config{
		"num_sms":                          {NumSMs: 3, NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 1, RDMARecvChunk: 2},
		"num_max_nvl_chunked_send_tokens":  {NVLSendChunk: 2, NVLRecvChunk: 2, RDMASendChunk: 1, RDMARecvChunk: 2},
		"num_max_nvl_chunked_recv_tokens":  {NVLSendChunk: 2, RDMASendChunk: 1, RDMARecvChunk: 2},
		"num_max_rdma_chunked_send_tokens": {NVLSendChunk: 1, NVLRecvChunk: 2, RDMARecvChunk: 2},
		"num_max_rdma_chunked_recv_tokens": {NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 3, RDMARecvChunk: 3},
	} {
		refused(t, name, c.Check(), name)
	}
	negative := DefaultConfig
	negative.NumSMs = -2
	refused(t, "negative", negative.Check(), "num_sms", "-2")
	huge := Config{NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 1<<31 - 2, RDMARecvChunk: 1<<31 - 1}
	refused(t, "overflow", huge.Check(), "num_max_rdma_chunked_recv_tokens")
}

func TestConfigForEveryNumberOfRanks(t *testing.T) {
	for kind := KindDispatch; kind <= KindCombine; kind++ {
		for ranks := 1; ranks <= 300; ranks++ {
			c := must[Config](t)(ConfigFor(kind, ranks))
			if before := c; c.Check() != nil || c != before || c.NumSMs == 0 {
				t.Fatalf("kind %d, %d ranks: %+v does not pass its own check", kind, ranks, c)
			}
		}
	}
	_, err := ConfigFor(2, 8)
	refused(t, "kind", err, "kind")
	_, err = ConfigFor(0, 0)
	refused(t, "ranks", err, "num_ranks")
}

// The sizes that V1 gives are what its users have written into their memory budgets; computed by hand from its layout.
func TestHintsAreThoseOfV1(t *testing.T) {
	one, two := Topology{8, 8}, Topology{16, 8}
	c := Config{NumSMs: 20, NVLSendChunk: 6, NVLRecvChunk: 256, RDMASendChunk: 6, RDMARecvChunk: 128}
	// 10 channels x 8 ranks x (5 counters x 4 + 256 rows x (14336 + 8 + 128x12 + 128x4)).
	if got := must[uint64](t)(c.NVLBytes(14336, one)); got != 10*8*(5*4+256*(14336+8+1536+512))+64 {
		t.Errorf("nvl: %d", got)
	}
	if got := must[uint64](t)(c.RDMABytes(14336, one)); got != 0 {
		t.Errorf("rdma on one node: %d", got)
	}
	if got := must[uint64](t)(c.RDMABytes(14336, two)); got < 2*10*2*132*(14336+8+1536+512+16) {
		t.Errorf("rdma on two nodes: %d", got)
	}
	// 128 tokens x 7168, 8 ranks, 256 experts: send and receive rows of 14560 bytes (56 blocks), twice; signals 1024
	// twice.
	if got := must[uint64](t)(LowLatencyBytes(128, 7168, 8, 256, nil)); got != 2*(2*256*128*14560+1024)+128 {
		t.Errorf("low latency: %d", got)
	}
	var zero Config
	_, err := zero.NVLBytes(16, one)
	refused(t, "unchecked config", err, "nvl")
	_, err = c.NVLBytes(-1, one)
	refused(t, "hidden", err, "hidden_bytes")
	for name, a := range map[string][4]int64{
		"num_max_dispatch_tokens_per_rank": {-1, 128, 8, 8}, "hidden": {1, -1, 8, 8}, "num_ranks": {1, 128, 0, 8}, "num_experts": {1, 128, 8, 9},
	} {
		_, err := LowLatencyBytes(a[0], a[1], a[2], a[3], nil)
		refused(t, name, err, name)
	}
}

func TestHintsGrowWithTheirArguments(t *testing.T) {
	base := must[uint64](t)(LowLatencyBytes(16, 1024, 4, 16, nil))
	for _, a := range [][4]int64{{32, 1024, 4, 16}, {16, 2048, 4, 16}, {16, 1024, 4, 32}} {
		if more := must[uint64](t)(LowLatencyBytes(a[0], a[1], a[2], a[3], nil)); more <= base {
			t.Errorf("%v needs %d, not more than %d", a, more, base)
		}
	}
	zero := DefaultConfig
	zero.NumSMs = 0
	top := Topology{8, 8}
	if must[uint64](t)(zero.NVLBytes(1024, top)) != must[uint64](t)(DefaultConfig.NVLBytes(1024, top)) {
		t.Error("num_sms = 0 leaves the choice to the library: its hint is that of the default")
	}
}

func TestRegionsShareNoPage(t *testing.T) {
	r := NewRegions(8192, 4096, 5000, 1)
	want := Regions{Control: Region{0, 8192}, Wire: Region{8192, 4096}, NVL: Region{12288, 5000}, RDMA: Region{20480, 1}, Total: 24576}
	if r != want {
		t.Errorf("got %+v", r)
	}
}

func TestLayoutChecks(t *testing.T) {
	top := Topology{4, 8}
	good := Layout{NumTokens: 0, NumTopK: 8, NumExperts: 16, IndexType: op.Int64}
	if err := good.Check(top); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Layout){
		"num_tokens": func(l *Layout) { l.NumTokens = -1 }, "num_topk": func(l *Layout) { l.NumTopK = 0 },
		"num_experts": func(l *Layout) { l.NumExperts = 18 }, "index_type": func(l *Layout) { l.IndexType = op.BF16 },
	} {
		l := good
		change(&l)
		refused(t, name, l.Check(top), name)
	}
}

func TestRowsChecks(t *testing.T) {
	top := Topology{4, 8}
	good := Rows{NumTokens: 5, NumTopK: 2, NumExperts: 8, XType: op.BF16, Hidden: 8}
	for _, r := range []Rows{good, {XType: op.FP8, Hidden: 16, NumScales: 3}, {NumTokens: 1, XType: op.Float32, Hidden: 4}} {
		if err := r.Check(top); err != nil {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if got := good.HiddenBytes(); got != 16 {
		t.Errorf("row of %d bytes", got)
	}
	for name, change := range map[string]func(*Rows){
		"num_tokens": func(r *Rows) { r.NumTokens = 1 << 30 }, "num_topk": func(r *Rows) { r.NumTopK = 129 },
		"num_experts": func(r *Rows) { r.NumExperts = 0 }, "num_worst_tokens": func(r *Rows) { r.NumWorstTokens = -1 },
		"num_scales": func(r *Rows) { r.NumScales = -1 }, "x_type": func(r *Rows) { r.XType = op.Int64 }, "hidden": func(r *Rows) { r.Hidden = 12 },
	} {
		r := good
		change(&r)
		refused(t, name, r.Check(top), name)
	}
	worst := Rows{NumWorstTokens: 8, XType: op.BF16, Hidden: 8}
	refused(t, "worst case without top-k", worst.Check(top), "num_worst_tokens")
	refused(t, "alignment", CheckAlignment(0), "expert_alignment")
	refused(t, "combine", Combine{Hidden: 4}.Check(top), "hidden")
	refused(t, "combine", Combine{Hidden: 8, NumRecvTokens: -1}.Check(top), "num_recv_tokens")
}

func TestLowLatencyChecks(t *testing.T) {
	top := Topology{4, 8}
	good := LowLatency{NumTokens: 3, NumMaxTokens: 3, Hidden: 512, NumTopK: 2, NumExperts: 8, IndexType: op.Int32}
	if good.CheckDispatch(top, nil) != nil || good.CheckCombine(top, nil) != nil || good.LocalExperts(top) != 2 {
		t.Error("a good shape is refused")
	}
	dispatch := func(name string, l LowLatency) { t.Helper(); refused(t, name, l.CheckDispatch(top, nil), name) }
	combine := func(name string, l LowLatency) { t.Helper(); refused(t, name, l.CheckCombine(top, nil), name) }
	with := func(change func(*LowLatency)) LowLatency { l := good; change(&l); return l }
	dispatch("num_tokens", with(func(l *LowLatency) { l.NumTokens = 4 }))
	dispatch("num_max_dispatch_tokens_per_rank", with(func(l *LowLatency) { l.NumMaxTokens = 0 }))
	dispatch("hidden", with(func(l *LowLatency) { l.Hidden = 7 }))
	dispatch("hidden", with(func(l *LowLatency) { l.Hidden, l.FP8 = 64, true }))
	dispatch("hidden", with(func(l *LowLatency) { l.Hidden, l.FP8, l.Flags = 384, true, op.LLRoundScale|op.LLUE8M0 }))
	dispatch("use_ue8m0", with(func(l *LowLatency) { l.FP8, l.Flags = true, op.LLUE8M0 }))
	dispatch("flags", with(func(l *LowLatency) { l.Flags = op.LLRoundScale }))
	dispatch("flags", with(func(l *LowLatency) { l.FP8, l.Flags = true, op.LLLogFMT }))
	dispatch("fp4", with(func(l *LowLatency) { l.FP4 = op.FP4Cast + 1 }))
	dispatch("fp4", with(func(l *LowLatency) { l.FP4 = -1 }))
	dispatch("hidden", with(func(l *LowLatency) { l.FP4, l.Hidden = op.FP4Packed, 192 }))
	dispatch("flags", with(func(l *LowLatency) { l.FP4, l.Flags = op.FP4Cast, op.LLRoundScale }))
	dispatch("num_topk", with(func(l *LowLatency) { l.NumTopK = 0 }))
	dispatch("num_experts", with(func(l *LowLatency) { l.NumExperts = 6 }))
	dispatch("index_type", with(func(l *LowLatency) { l.IndexType = 9 }))
	combine("flags", with(func(l *LowLatency) { l.Flags = op.LLUE8M0 }))
	combine("zero_copy", with(func(l *LowLatency) { l.Flags = op.LLLogFMT | op.LLZeroCopy }))
	combine("hidden", with(func(l *LowLatency) { l.Flags, l.Hidden = op.LLLogFMT, 192 }))
}

func TestLimitsOfALibrary(t *testing.T) {
	top := Topology{4, 8}
	limits := &Limits{Library: "libx.so", TopK: 8, Tokens: 100, LocalExperts: 3}
	good := LowLatency{NumTokens: 3, NumMaxTokens: 100, Hidden: 512, NumTopK: 8, NumExperts: 12, IndexType: op.Int32}
	if err := good.CheckDispatch(top, limits); err != nil {
		t.Error(err)
	}
	with := func(change func(*LowLatency)) LowLatency { l := good; change(&l); return l }
	for want, l := range map[string]LowLatency{
		"argument num_topk: got 9, allowed 1 to 8 with libx.so":                             with(func(l *LowLatency) { l.NumTopK = 9 }),
		"argument num_max_dispatch_tokens_per_rank: got 101, allowed 1 to 100 with libx.so": with(func(l *LowLatency) { l.NumMaxTokens = 101 }),
		"argument num_experts: got 16, allowed at most 12 (3 local experts on each of 4 ranks) with libx.so": with(func(l *LowLatency) {
			l.NumExperts = 16
		}),
	} {
		for _, err := range []error{l.CheckDispatch(top, limits), l.CheckCombine(top, limits)} {
			if err == nil || err.Error() != want {
				t.Errorf("got %v, want %s", err, want)
			}
		}
	}
	_, err := LowLatencyBytes(101, 512, 4, 12, limits)
	refused(t, "hint, tokens", err, "allowed 0 to 100 with libx.so")
	_, err = LowLatencyBytes(100, 512, 4, 16, limits)
	refused(t, "hint, experts", err, "allowed at most 12")
	limits.TopK = MaxTopK + 1 // wider than the interface: the interface's limit counts
	l := with(func(l *LowLatency) { l.NumTopK = MaxTopK + 1 })
	refused(t, "wider", l.CheckDispatch(top, limits), "allowed 1 to 128")
}

func TestHistogram(t *testing.T) {
	// Bucket 0 ends at 512 * 5/4; each power of two has four buckets.
	for b, want := range map[int]uint64{0: 640, 3: 1024, 4: 1280, 7: 2048, 8: 2560} {
		if got := BucketEnd(b); got != want {
			t.Errorf("bucket %d ends at %d, want %d", b, got, want)
		}
	}
	var h [HistogramBuckets]uint64
	if Percentile(&h, 0.5, 7) != 0 {
		t.Error("no durations, no percentile")
	}
	h[0], h[4], h[63] = 50, 49, 1
	for share, want := range map[float64]uint64{0: 640, 0.5: 640, 0.51: 1280, 0.99: 1280, 1: 99999} {
		if got := Percentile(&h, share, 99999); got != want {
			t.Errorf("percentile %v: %d, want %d", share, got, want)
		}
	}
	if got := Percentile(&h, 0.5, 600); got != 600 {
		t.Errorf("a percentile above the maximum: %d", got)
	}
}

// For any input a check returns, and a size is a multiple of its unit and does not wrap around.
func FuzzSizes(f *testing.F) {
	f.Add(int64(128), int64(7168), int64(8), int64(256), int32(20), int32(6), int32(256), int32(6), int32(128))
	f.Add(int64(1<<24), int64(1<<20), int64(1024), int64(1<<16), int32(1<<30), int32(1), int32(1<<31-1), int32(1), int32(1<<31-1))
	f.Add(int64(-1), int64(0), int64(1), int64(0), int32(-1), int32(0), int32(0), int32(0), int32(0))
	f.Fuzz(func(t *testing.T, b, h, r, e int64, sms, ns, nr, rs, rr int32) {
		if n, err := LowLatencyBytes(b, h, r, e, nil); err == nil && (n%alignBytes != 0 || n < uint64(b)*uint64(e)*uint64(h)*4) {
			t.Errorf("low latency %d %d %d %d: %d", b, h, r, e, n)
		}
		c := Config{sms, ns, nr, rs, rr}
		if err := c.Check(); err == nil && (c.RDMARecvChunk%c.RDMASendChunk != 0 || c.RDMARecvChunk < 2*c.RDMASendChunk) {
			t.Errorf("%+v passes", c)
		}
		if r < 1 || r > MaxRanks || h < 0 || h > maxHiddenBytes {
			return
		}
		top, err := NewTopology(int(r), DefaultPeers)
		if err != nil || c.Check() != nil || sms > 1<<16 {
			return
		}
		n, err := c.NVLBytes(h, top)
		if err != nil || n%alignBytes != 0 || n < uint64(c.NVLRecvChunk)*uint64(h) {
			t.Errorf("%+v nvl %d: %d %v", c, h, n, err)
		}
		if n, err := c.RDMABytes(h, top); err != nil || n%alignBytes != 0 || (n == 0) != (top.Nodes() == 1) {
			t.Errorf("%+v rdma %d: %d %v", c, h, n, err)
		}
	})
}
