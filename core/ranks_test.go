package core

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"
)

// needEngine skips where the CPU library was not built.
func needEngine(t testing.TB) {
	t.Helper()
	info, err := QueryEngine(EngineCPU)
	if err != nil {
		t.Fatal(err)
	}
	if !info.Available {
		t.Skipf("needs the CPU kernel library (make kernels): %s", info.Reason)
	}
}

// member is one rank of a test: a goroutine with a group and a buffer of its own.
type member struct {
	*Buffer
	t          testing.TB
	rank, size int
	group      *Group
	rng        *rand.Rand
	pin        runtime.Pinner // until the rank's part of the test ends
}

// address is that of a slice which stays in place as long as the rank runs.
func address[T any](m *member, s []T) uintptr { return AddressOf(&m.pin, s) }

// must ends the rank's part of the test with the first error.
func (m *member) must(err error) {
	if err != nil {
		panic(fail{fmt.Errorf("rank %d: %w", m.rank, err)})
	}
}

func (m *member) check(ok bool, format string, args ...any) {
	if !ok {
		panic(fail{fmt.Errorf("rank %d: %s", m.rank, fmt.Sprintf(format, args...))})
	}
}

// fail carries an error out of a rank's goroutine, where t.FailNow must not be called.
type fail struct{ err error }

// onRanks runs f on n goroutines' ranks that share a group, each with a buffer, and takes both down afterwards.
func onRanks(t testing.TB, n int, o BufferOptions, f func(m *member)) {
	t.Helper()
	onNodes(t, n, 0, o, f)
}

// onNodes is onRanks with nodes of so many ranks; 0: the usual size.
func onNodes(t testing.TB, n, perNode int, o BufferOptions, f func(m *member)) {
	t.Helper()
	within(t, 20*time.Second, n, perNode, o, f)
}

// within is onNodes with a limit for what a group or a buffer waits for on the host.
func within(t testing.TB, limit time.Duration, n, perNode int, o BufferOptions, f func(m *member)) {
	t.Helper()
	needEngine(t)
	if o.Engine == "" {
		o.Engine, o.Device = EngineCPU, -1
	}
	if o.Timeout == 0 {
		o.Timeout = 20 * time.Second // of a test that fails
	}
	exchangers := NewLocal(n)
	var ranks sync.WaitGroup
	for rank := range n {
		ranks.Go(func() {
			defer reportFail(t)
			m := &member{t: t, rank: rank, size: n, rng: rand.New(rand.NewPCG(7, uint64(rank)))}
			defer m.pin.Unpin()
			var err error
			m.group, err = NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], NumNVLPeers: perNode, Timeout: limit})
			m.must(err)
			defer func() { m.must(m.group.Destroy()) }()
			m.Buffer, err = m.group.NewBuffer(context.Background(), o)
			m.must(err)
			defer func() { m.must(m.Destroy()) }()
			f(m)
		})
	}
	ranks.Wait()
}

func reportFail(t testing.TB) {
	switch p := recover().(type) {
	case nil:
	case fail:
		t.Error(p.err)
	default:
		panic(p)
	}
}

// elem is a value that names its row: every element of a row is the same small integer, which BF16 holds exactly, so that
// ranks 15 apart have the same.
func elem(rank, token int) float32 { return float32(rank%15*16 + token%16 + 1) }

// route is the routing of one rank, equal for all who make it.
type route struct {
	index   []int64
	weights []float32
	tokens  int
}

// routing gives every rank's routing of a round: random, with nothing chosen here and there and experts chosen twice.
func routing(round, ranks, tokens, k, experts int) []route {
	all := make([]route, ranks)
	for rank := range all {
		rng := rand.New(rand.NewPCG(uint64(round)+1, uint64(rank)))
		r := &all[rank]
		r.tokens = rng.IntN(tokens + 1)
		for range r.tokens * k {
			choice := int64(rng.IntN(experts))
			if rng.IntN(8) == 0 {
				choice = -1
			}
			r.index = append(r.index, choice)
			r.weights = append(r.weights, float32(rng.IntN(16))/4)
		}
	}
	return all
}

// sends reports whether a token has an expert at rank to.
func (r *route) sends(token, k, to, local int) bool {
	for _, e := range r.index[token*k : (token+1)*k] {
		if e >= 0 && int(e)/local == to {
			return true
		}
	}
	return false
}
