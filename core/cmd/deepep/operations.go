package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// caller makes one rank's calls and waits for each on the host.
type caller struct {
	*core.Buffer
	mem   *tensors
	event *core.Event // nil if the engine's stream is the calling thread: a call then returns when it is done
	spec  *benchSpec

	starts []rankStart
}

func newCaller(b *core.Buffer, spec *benchSpec) (*caller, error) {
	mem, err := openTensors(b)
	if err != nil {
		return nil, err
	}
	c := &caller{Buffer: b, mem: mem, spec: spec}
	if !b.Info().HostStream {
		c.event, err = b.NewEvent()
	}
	return c, err
}

func (c *caller) close() error {
	var err error
	if c.event != nil {
		err = c.event.Destroy()
	}
	status.Keep(&err, c.mem.close())
	return err
}

// call orders each operation: on the communication stream, with an event to wait for.
func (c *caller) call() *core.Call { return &core.Call{Async: c.event != nil, Event: c.event} }

// finish waits for a call whose launch returned err.
func (c *caller) finish(err error) error {
	if err != nil || c.event == nil {
		return err
	}
	return c.wait()
}

// spinFor is how long a wait polls before it sleeps. A sleeping wait ended about 70 us late, which is twice the time of
// a low-latency call.
const spinFor = 5 * time.Millisecond

// wait waits for the event.
func (c *caller) wait() error {
	for start := time.Now(); time.Since(start) < spinFor; {
		if err := c.event.Wait(0); !errors.Is(err, core.ErrInterrupted) {
			return err
		}
	}
	return c.event.Wait(-1)
}

// together is a barrier of all ranks, so that they go on at once.
func (c *caller) together() error {
	call := &core.Call{}
	if c.event == nil {
		return c.Barrier(call)
	}
	call.Stream = c.Info().CommStream
	if err := c.Barrier(call); err != nil {
		return err
	}
	return c.finish(c.event.Record(call.Stream))
}

// normalCalls are the operations of normal mode with tensors for one shape.
type normalCalls struct {
	*caller
	perExpert                         []int32
	layout                            core.LayoutArgs
	notify                            core.NotifyArgs
	dispatch                          core.DispatchArgs
	combine                           core.CombineArgs
	handle                            core.Handle
	x, index, weights, out, outWeight uintptr
	received                          int // rows of the allocated outputs
}

func (c *caller) normal(tokens int) (*normalCalls, error) {
	s := c.spec
	index, err := route(s.Routing, tokens, s.TopK, s.Experts, s.Rank, s.Seed)
	if err != nil {
		return nil, err
	}
	n := &normalCalls{caller: c, received: -1, perExpert: make([]int32, s.Experts/s.Ranks)}
	n.x, n.index, n.weights = c.mem.alloc(tokens*s.Hidden*2), from(c.mem, index), c.mem.alloc(tokens*s.TopK*4)
	n.out, n.outWeight = c.mem.alloc(tokens*s.Hidden*2), c.mem.alloc(tokens*s.TopK*4)
	perRank, perExpert, inRank := c.mem.alloc(s.Ranks*4), c.mem.alloc(s.Experts*4), c.mem.alloc(tokens*s.Ranks)
	n.handle = core.Handle{RankPrefixMatrix: c.mem.alloc(s.Ranks * s.Ranks * 4), SendHead: c.mem.alloc(tokens * s.Ranks * 4)}
	n.layout = core.LayoutArgs{NumTokens: int32(tokens), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts), IndexType: core.Int64,
		TopKIdx: n.index, NumTokensPerRank: perRank, NumTokensPerExpert: perExpert, IsTokenInRank: inRank}
	n.notify = core.NotifyArgs{NumTokens: int32(tokens), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts), ExpertAlignment: 1,
		XType: core.BF16, Hidden: int64(s.Hidden), NumTokensPerRank: perRank, NumTokensPerExpert: perExpert, IsTokenInRank: inRank, Handle: &n.handle}
	return n, c.mem.err
}

// Dispatch makes all calls that bring a layer's tokens to their experts: layout, exchange of counts, the host's wait
// for them, and the rows.
func (n *normalCalls) Dispatch() error { return n.dispatchRows(false) }

// dispatchRows is Dispatch. With reuse it keeps the outputs, which are large enough for any routing.
func (n *normalCalls) dispatchRows(reuse bool) error {
	if err := n.Layout(&n.layout, n.call()); err != nil {
		return err
	}
	token, err := n.Notify(&n.notify, n.call())
	if err != nil {
		return err
	}
	rows, err := n.WaitCounts(token, -1, n.perExpert)
	if err != nil {
		return err
	}
	if n.handle.NumRecvTokens = int32(rows); !reuse {
		if err := n.outputs(rows); err != nil {
			return err
		}
	}
	n.dispatch.Token = token
	return n.finish(n.Buffer.Dispatch(&n.dispatch, n.call()))
}

// outputs allocates the outputs. The routing is equal in each call, so that it allocates once.
func (n *normalCalls) outputs(rows int) error {
	if rows == n.received {
		return nil
	}
	s := n.spec
	n.received = rows
	n.handle.RecvSrcIdx = n.mem.alloc(rows * 4)
	x, weights := n.mem.alloc(rows*s.Hidden*2), n.mem.alloc(rows*s.TopK*4)
	n.dispatch = n.notify.Dispatch(0) // the token is each call's own
	n.dispatch.IndexType, n.dispatch.X, n.dispatch.TopKIdx, n.dispatch.TopKWeights = core.Int64, n.x, n.index, n.weights
	n.dispatch.RecvX, n.dispatch.RecvTopKIdx, n.dispatch.RecvTopKWeights = x, n.mem.alloc(rows*s.TopK*8), weights
	n.combine = core.CombineArgs{NumTopK: int32(s.TopK), Hidden: int64(s.Hidden), X: x, TopKWeights: weights,
		Handle: &n.handle, CombinedX: n.out, CombinedTopKWeights: n.outWeight}
	return n.mem.err
}

// Cached sends the same rows again with the handle, without an exchange of counts.
func (n *normalCalls) Cached() error {
	args := n.dispatch
	args.Cached, args.Token, args.TopKIdx, args.TopKWeights, args.RecvTopKIdx, args.RecvTopKWeights = 1, 0, 0, 0, 0, 0
	args.NumTopK, args.NumExperts = 0, 0
	return n.finish(n.Buffer.Dispatch(&args, n.call()))
}

// Combine sends the rows back and sums them.
func (n *normalCalls) Combine() error {
	return n.finish(n.Buffer.Combine(&n.combine, n.call()))
}

// lowLatencyCalls are the operations of low-latency mode; B is the number of tokens.
type lowLatencyCalls struct {
	*caller
	dispatch core.LLDispatchArgs
	combine  core.LLCombineArgs
}

func (c *caller) lowLatency(tokens int) (*lowLatencyCalls, error) {
	s := c.spec
	index, err := route(s.Routing, tokens, s.TopK, s.Experts, s.Rank, s.Seed)
	if err != nil {
		return nil, err
	}
	local := s.Experts / s.Ranks
	slots := local * s.Ranks * tokens
	x, topK, weights := c.mem.alloc(tokens*s.Hidden*2), from(c.mem, index), c.mem.alloc(tokens*s.TopK*4)
	src, layout := c.mem.alloc(slots*4), c.mem.alloc(local*s.Ranks*8)
	l := &lowLatencyCalls{caller: c}
	l.dispatch = core.LLDispatchArgs{
		Phases: core.SendRecv, NumTokens: int32(tokens), NumMaxTokens: int32(tokens), Hidden: int32(s.Hidden), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts),
		IndexType: core.Int64, UseFP8: op.Bool(s.FP8), X: x, TopKIdx: topK, RecvX: c.mem.alloc(slots * s.Hidden * 2), RecvCount: c.mem.alloc(local * 4), SrcInfo: src, LayoutRange: layout,
	}
	if s.FP8 {
		l.dispatch.RecvXScales = c.mem.alloc(slots * (s.Hidden + 127) / 128 * 4)
	}
	l.combine = core.LLCombineArgs{
		Phases: core.SendRecv, NumTokens: int32(tokens), NumMaxTokens: int32(tokens), Hidden: int32(s.Hidden), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts),
		IndexType: core.Int64, X: c.mem.alloc(slots * s.Hidden * 2), TopKIdx: topK, TopKWeights: weights, SrcInfo: src, LayoutRange: layout, CombinedX: c.mem.alloc(tokens * s.Hidden * 2),
	}
	return l, c.mem.err
}

func (l *lowLatencyCalls) Dispatch() error {
	return l.finish(l.LowLatencyDispatch(&l.dispatch, l.call()))
}

func (l *lowLatencyCalls) Combine() error {
	return l.finish(l.LowLatencyCombine(&l.combine, l.call()))
}

// roundTrip is a dispatch and its combine.
func (l *lowLatencyCalls) roundTrip() error {
	if err := l.Dispatch(); err != nil {
		return err
	}
	return l.Combine()
}

// samples times an operation on the host, each time after a barrier. prepare, which may be nil, runs before each and is
// not timed.
func (c *caller) samples(iterations, warmup int, prepare, op func() error) ([]int64, error) {
	times := make([]int64, 0, iterations)
	for i := range warmup + iterations {
		if prepare != nil {
			if err := prepare(); err != nil {
				return nil, err
			}
		}
		if err := c.together(); err != nil {
			return nil, err
		}
		start := time.Now()
		if err := op(); err != nil {
			return nil, fmt.Errorf("iteration %d: %w", i, err)
		}
		if i >= warmup {
			times = append(times, time.Since(start).Nanoseconds())
		}
	}
	return times, nil
}
