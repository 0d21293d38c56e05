package core

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/status"
)

func TestRanksThatDisagreeAreNamed(t *testing.T) {
	needEngine(t)
	exchangers := NewLocal(3)
	var ranks sync.WaitGroup
	for rank := range 3 {
		ranks.Go(func() {
			defer reportFail(t)
			m := &member{t: t, rank: rank}
			g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], Timeout: 10 * time.Second})
			m.must(err)
			defer func() { m.must(g.Destroy()) }()
			o := BufferOptions{Engine: EngineCPU, Device: -1, NumNVLBytes: 1 << 20}
			if rank == 2 {
				o.NumNVLBytes = 1 << 21
			}
			_, err = g.NewBuffer(context.Background(), o)
			m.check(errors.Is(err, ErrMismatch) && strings.Contains(err.Error(), "num_nvl_bytes: ranks 0, 1 have 1048576, rank 2 has 2097152"), "%v", err)
			o.NumNVLBytes = 1 << 20
			b, err := g.NewBuffer(context.Background(), o)
			m.must(err)
			m.must(b.Destroy())
		})
	}
	ranks.Wait()
}

func TestRanksThatDisagreeInACall(t *testing.T) {
	onRanks(t, 3, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
		f := newFixed(m, 4, 2, 6, 32)
		f.layout(m)
		if m.rank == 1 {
			f.hidden = 16
		}
		token, err := f.notify(m, 0)
		if err == nil {
			_, err = m.WaitCounts(token, -1, nil)
		}
		m.check(errors.Is(err, ErrMismatch), "%v", err)
		m.check(strings.Contains(err.Error(), "hidden") && strings.Contains(err.Error(), "rank 1 has 16"), "%v", err)
		m.check(errors.Is(m.Check(), ErrMismatch), "check: %v", m.Check())
		err = m.Barrier(&Call{})
		m.check(status.CodeOf(err) == status.Aborted && errors.Is(err, ErrMismatch), "after the failure: %v", err)
	})
}

// The name of a TCP group is its secret: over the network the default, which everybody knows, is refused.
func TestSecrets(t *testing.T) {
	t.Setenv("DEEPEP_INTERFACE", "")
	for _, c := range []struct {
		secret, nic, variable, want string
	}{
		{"", "lo", "", "argument name: got \"default\", allowed with a network interface (DEEPEP_INTERFACE) a name that others do not know"},
		{"default", "", "lo", "argument name: got \"default\""},
		{"a\x00b", "", "", "argument name: got \"a\\x00b\", allowed a text without NUL"},
		{"s", "nosuch0", "", "argument interface (DEEPEP_INTERFACE): got nosuch0"},
		{"s", "", "nosuch0", "argument interface (DEEPEP_INTERFACE): got nosuch0"},
	} {
		t.Setenv("DEEPEP_INTERFACE", c.variable)
		_, err := DialTCP(context.Background(), TCPOptions{Size: 2, Address: "127.0.0.1:9", Secret: c.secret, Interface: c.nic})
		if status.CodeOf(err) != status.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v", c.want, err)
		}
	}
}

// A rank that is late for the start is named, whichever of two deadlines comes first.
func TestLateRankInConstructionIsNamed(t *testing.T) {
	needEngine(t)
	const limit = 300 * time.Millisecond
	exchangers := NewLocal(2)
	errs := make([]error, 2)
	var ranks sync.WaitGroup
	for rank := range 2 {
		ranks.Go(func() {
			if rank == 1 { // it takes part in the exchange, and never connects
				p, err := bootstrap.Begin(context.Background(), exchangers[1], bootstrap.HelloOptions{Version: versionText(), Extra: []byte("8")})
				if errs[1] = err; err == nil {
					t.Cleanup(func() { p.Close() })
				}
				return
			}
			o := GroupOptions{Exchanger: exchangers[0], Background: true, Timeout: limit, NumNVLPeers: 8}
			g, err := NewGroup(context.Background(), o)
			if err != nil {
				errs[0] = err
				return
			}
			defer g.Destroy()
			ctx, cancel := context.WithTimeout(context.Background(), limit-50*time.Millisecond)
			defer cancel()
			_, errs[0] = g.NewBuffer(ctx, BufferOptions{Engine: EngineCPU, Device: -1, NumNVLBytes: 1 << 20})
		})
	}
	ranks.Wait()
	if errs[0] == nil || !strings.Contains(errs[0].Error(), "rank 1 (host ") || status.CodeOf(errs[0]) != status.Timeout {
		t.Errorf("%v", errs[0])
	}
}

// A wrong argument is named, and the buffer works on.
func TestWrongArguments(t *testing.T) {
	o := roomFor(t, 2, 8, 128, 4)
	onRanks(t, 2, o, func(m *member) {
		f := newFixed(m, 4, 2, 4, 32)
		l := newLowLatency(&m.pin, m.rank, 2, 4, 8, 128, 2, 4)
		wrong := func(err error, parts ...string) {
			m.check(errors.Is(err, ErrInvalidArgument), "got %v", err)
			for _, part := range parts {
				m.check(strings.Contains(err.Error(), part), "%q is not in %q", part, err)
			}
		}
		wrong(m.Layout(&LayoutArgs{NumTokens: 4, NumTopK: 2, NumExperts: 5, IndexType: Int64}, &Call{}), "num_experts", "got 5", "multiple of num_ranks = 2")
		wrong(m.Layout(&LayoutArgs{NumTokens: 4, NumTopK: 2, NumExperts: 4, IndexType: Int64}, &Call{}), "topk_idx", "NULL")
		wrong(m.Layout(&LayoutArgs{NumTopK: 2, NumExperts: 4, IndexType: Int64, NumTokensPerRank: 6}, &Call{}), "num_tokens_per_rank", "multiple of 4 bytes")
		wrong(m.Barrier(&Call{Stream: 5}), "stream")
		odd := Config{NumSMs: 3}
		wrong(m.Layout(&LayoutArgs{NumTopK: 2, NumExperts: 4, IndexType: Int64, NumTokensPerRank: address(m, f.perRank),
			NumTokensPerExpert: address(m, f.perExpert)}, &Call{Config: &odd}), "num_sms", "got 3")
		big := l.dispatch(SendRecv, false)
		big.NumMaxTokens = 1 << 20
		wrong(m.LowLatencyDispatch(big, &Call{}), "num_rdma_bytes", "get_low_latency_rdma_size_hint")
		phases := l.dispatch(4, false)
		wrong(m.LowLatencyDispatch(phases, &Call{}), "phases")
		elsewhere := f.dispatchArgs(99, 0, nil)
		elsewhere.Handle = &Handle{NumRanks: 3}
		wrong(m.Dispatch(&elsewhere, &Call{}), "handle.num_ranks", "got 3")
		_, err := m.WaitCounts(99, 0, nil)
		wrong(err, "token")
		_, err = m.Stats(0)
		wrong(err, "op")
		m.check(errors.Is(m.UpdateMask(0, true, &Call{}), ErrInvalidState), "masks without enable_shrink")
		_, err = m.NewSegment(context.Background(), 1)
		m.check(errors.Is(err, ErrUnsupported), "segments: %v", err)
		m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, false), &Call{}))
		l.checkRows(m, false)
	})
}

func TestTooMuchMemory(t *testing.T) {
	onRanks(t, 2, BufferOptions{NumNVLBytes: 1 << 10}, func(m *member) {
		_, err := m.group.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1, NumNVLBytes: 1 << 60})
		m.check(errors.Is(err, ErrInvalidArgument) && strings.Contains(err.Error(), "num_nvl_bytes: got 1152921504606846976"), "%v", err)
		_, err = m.group.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1, NumRDMABytes: 1 << 47})
		m.check(errors.Is(err, ErrOutOfMemory) && strings.Contains(err.Error(), "num_rdma_bytes = 140737488355328 are too much"), "%v", err)
		b, err := m.group.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1})
		m.must(err)
		m.must(b.Destroy())
	})
}

// No arguments, and slices whose numbers have no memory, are refused, and the buffer works on.
func TestNoArguments(t *testing.T) {
	onRanks(t, 1, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
		in := Tokens{NumTopK: 2, NumExperts: 4, Hidden: 8, TopKIdx: []int64{0, 1}, TopKWeights: []float32{1, 1}, X: make([]uint16, 8)}
		var arrived Arrived
		m.must(m.DispatchTokens(&in, &arrived))
		many := Tokens{NumTopK: 1, NumExperts: math.MaxInt64, Hidden: 8}
		most := many
		most.NumExperts = math.MaxInt32
		wide := Tokens{NumTopK: math.MaxInt64, NumExperts: 4, Hidden: 8}
		_, notified := m.Notify(nil, nil)
		_, sized := m.BalanceWorkspace(nil, false)
		for name, err := range map[string]error{
			"Layout": m.Layout(nil, nil), "Notify": notified, "Dispatch": m.Dispatch(nil, nil), "Combine": m.Combine(nil, nil),
			"BalanceWorkspace": sized, "PrefetchWeights": m.PrefetchWeights(nil, nil), "ReduceGrads": m.ReduceGrads(nil, nil),
			"LowLatencyDispatch": m.LowLatencyDispatch(nil, nil), "LowLatencyCombine": m.LowLatencyCombine(nil, nil),
			"DispatchTokens": m.DispatchTokens(nil, &arrived), "DispatchTokens to nowhere": m.DispatchTokens(&in, nil),
			"CombineTokens": m.CombineTokens(arrived.X, nil, nil, new(Combined)), "CombineTokens to nowhere": m.CombineTokens(arrived.X, nil, &arrived, nil),
			"2^63 experts": m.DispatchTokens(&many, new(Arrived)), "2^31 experts": m.DispatchTokens(&most, new(Arrived)),
			"2^63 choices": m.DispatchTokens(&wide, new(Arrived)), "CheckConfig": CheckConfig(nil),
		} {
			m.check(status.CodeOf(err) == status.InvalidArgument, "%s: %v", name, err)
		}
		var sums Combined
		m.must(m.CombineTokens(arrived.X, nil, &arrived, &sums))
	})
}

// num_nvl_bytes below the documented floor is named; above it rows come in pieces.
func TestSmallBuffers(t *testing.T) {
	onRanks(t, 2, BufferOptions{NumNVLBytes: 64}, func(m *member) {
		f := newFixed(m, 4, 2, 4, 4096)
		f.layout(m)
		_, err := f.notify(m, 0)
		m.check(errors.Is(err, ErrInvalidArgument) && strings.Contains(err.Error(), "num_nvl_bytes = 64"), "%v", err)
	})
}
