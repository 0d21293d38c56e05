package core

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

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

// num_nvl_bytes below the documented floor is named; above it rows come in pieces.
func TestSmallBuffers(t *testing.T) {
	onRanks(t, 2, BufferOptions{NumNVLBytes: 64}, func(m *member) {
		f := newFixed(m, 4, 2, 4, 4096)
		f.layout(m)
		_, err := f.notify(m, 0)
		m.check(errors.Is(err, ErrInvalidArgument) && strings.Contains(err.Error(), "num_nvl_bytes = 64"), "%v", err)
	})
}
