package monitor

import (
	"math"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/testutil/pagetest"
)

// job makes four pages and records n dispatches of every rank, for which one rank is late.
func job(t *testing.T, dir string, slow int, late time.Duration, n int) []*Page {
	t.Helper()
	var pages []*Page
	for r := range 4 {
		m := meta
		m.Rank = r
		pages = append(pages, create(t, dir, m))
	}
	for range n {
		for r, p := range pages {
			wait := make([]time.Duration, 4)
			took := 300 * time.Microsecond
			for j := range wait {
				wait[j] = time.Duration(5+j) * time.Microsecond
			}
			if r != slow && slow >= 0 {
				wait[slow] = late
				took += late
			}
			pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpDispatch, Duration: took, BytesTo: []uint64{100, 100, 100, 100}, WaitFor: wait})
		}
	}
	for _, p := range pages {
		publish(t, p)
	}
	return pages
}

func readings(t *testing.T, dir string) map[int][]OpStats {
	t.Helper()
	entries, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	m := map[int][]OpStats{}
	for _, e := range entries {
		m[e.Stats.Rank] = e.Stats.Ops[:]
	}
	return m
}

func TestSlowRankIsFound(t *testing.T) {
	for slow := range 4 {
		dir := folder(t)
		job(t, dir, slow, 20*time.Millisecond, 5)
		w := WaitsOf(4, readings(t, dir))
		got, found := w.Slowest()
		if !found || got.Rank != slow || math.Abs(got.Mean-20e6) > 1e5 {
			t.Errorf("slow rank %d: %+v %v", slow, got, found)
		}
	}
	dir := folder(t)
	job(t, dir, -1, 0, 5)
	if got, found := WaitsOf(4, readings(t, dir)).Slowest(); found {
		t.Errorf("an even job has a slow rank: %+v", got)
	}
	if _, found := WaitsOf(1, nil).Slowest(); found {
		t.Error("a slow rank among one")
	}
}

func TestSubCountsTheInterval(t *testing.T) {
	dir := folder(t)
	p := job(t, dir, -1, 0, 5)[0]
	before, err := p.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpDispatch, Duration: 20 * time.Millisecond, BytesTo: []uint64{1, 0, 0, 0}, WaitFor: []time.Duration{0, 9, 0, 0}})
	now, err := p.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	d := now.Ops[abi.OpDispatch].Sub(&before.Ops[abi.OpDispatch])
	if d.Calls != 1 || d.Bytes != 1 || d.WaitNS != 9 || d.BytesTo[0] != 1 || d.WaitFor[1] != 9 || d.Mean() != 20*time.Millisecond || d.Percentile(0.5) != 20*time.Millisecond {
		t.Errorf("%+v", d)
	}
	// A new page counts from zero.
	if d := before.Ops[abi.OpDispatch].Sub(&now.Ops[abi.OpDispatch]); d.Calls != 5 {
		t.Errorf("%d calls", d.Calls)
	}
	var sum OpStats
	sum.Add(&now.Ops[abi.OpDispatch])
	sum.Add(&now.Ops[abi.OpDispatch])
	if sum.Calls != 12 || sum.Max() != 20*time.Millisecond {
		t.Errorf("%+v", sum)
	}
}

func TestPercentilesOfAKnownSpread(t *testing.T) {
	p := create(t, folder(t), meta)
	for i := range 1000 {
		pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpCombine, Duration: time.Duration(i+1) * time.Microsecond})
	}
	s, err := p.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	o := s.Ops[abi.OpCombine]
	for share, exact := range map[float64]time.Duration{0.5: 500 * time.Microsecond, 0.99: 990 * time.Microsecond, 0.999: 999 * time.Microsecond} {
		got := o.Percentile(share)
		if got < exact || float64(got) > 1.25*float64(exact) { // a bucket is at most a quarter wide
			t.Errorf("%v: %v, exactly %v", share, got, exact)
		}
	}
	if o.Max() != time.Millisecond || o.Percentile(1) != time.Millisecond {
		t.Errorf("max %v, p100 %v", o.Max(), o.Percentile(1))
	}
}

// The cost of recording a call among 8 ranks: the stores of a kernel library, which are exchanges in Go's atomics.
func BenchmarkRecord(b *testing.B) {
	m := meta
	m.NumRanks, m.TraceLen = 8, 0
	p, err := Create(b.TempDir()+"/pages", m)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _, _ = p.Remove(), p.Unmap() }()
	c := pagetest.Call{Op: abi.OpLLDispatch, Duration: 20 * time.Microsecond, BytesTo: make([]uint64, 8), WaitFor: make([]time.Duration, 8)}
	for b.Loop() {
		pagetest.Record(p.Bytes(), c)
	}
}

// The cost of one reading of 8 ranks by `deepep top`.
func BenchmarkList(b *testing.B) {
	dir := b.TempDir() + "/pages"
	for r := range 8 {
		m := meta
		m.Rank, m.NumRanks, m.TraceLen = r, 8, 0
		p, err := Create(dir, m)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _, _ = p.Remove(), p.Unmap() }()
	}
	for b.Loop() {
		if entries, err := List(dir); err != nil || len(entries) != 8 {
			b.Fatal(err)
		}
	}
}
