package engine

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Warmup makes calls of each planned mode on memory of its own and reports what it did. Collective; it waits.
func (b *Buffer) Warmup(o op.WarmupOptions) (op.StartupReport, error) {
	if err := b.start(); err != nil {
		return op.StartupReport{}, err
	}
	defer b.leave()
	var err error
	switch o.Part {
	case op.WarmupWhole, op.WarmupBegin:
		err = b.warm(&o)
		if err == nil && o.Part == op.WarmupWhole {
			err = b.endWarmup()
		}
	case op.WarmupEnd:
		err = b.endWarmup()
	default:
		err = status.InvalidArg("part", int32(o.Part), "WHOLE = 0, BEGIN = 1 or END = 2")
	}
	if err != nil {
		return op.StartupReport{}, err
	}
	return b.StartupReport()
}

// warm runs the planned modes.
func (b *Buffer) warm(o *op.WarmupOptions) error {
	switch {
	case o.MaxMS < 0:
		return status.InvalidArg("max_ms", o.MaxMS, "0 (the default) or more")
	case o.NumTokens < 0 || o.Hidden < 0 || o.NumTopK < 0 || o.NumExperts < 0 || o.LLNumMaxTokens < 0 || o.LLHidden < 0 || o.LLNumTopK < 0 || o.LLNumExperts < 0:
		return status.InvalidArg("sizes of a warm-up", fmt.Sprintf("%+v", *o), "0 or more")
	}
	ev, err := b.NewEvent()
	if err != nil {
		return err
	}
	w := &warmup{b: b, stages: newStages(stageConnect), began: time.Now(), fp8: o.UseFP8, call: Call{Async: true, Event: ev}}
	if !b.dev.HostStream() {
		w.call.Stream = uintptr(b.comm)
	}
	b.mu.Lock()
	b.startup.warming = true
	b.mu.Unlock()
	ctx, done := b.limited(context.Background())
	defer done()
	w.ctx = ctx
	if err = w.agreePlan(o); err == nil {
		err = w.runPlan()
	}
	status.Keep(&err, ev.Destroy())
	if err == nil {
		w.report()
		return nil
	}
	b.mu.Lock()
	b.startup.warming = false
	b.mu.Unlock()
	return err
}

// endWarmup ends a warm-up on all ranks at once: the next calls are first calls.
func (b *Buffer) endWarmup() error {
	ctx, done := b.limited(context.Background())
	defer done()
	s := newStages(stageConnect)
	b.mu.Lock()
	warming, left := b.startup.warming, b.startup.left
	b.mu.Unlock()
	if !warming {
		return status.Errorf(status.InvalidState, "no warm-up has begun")
	}
	language := time.Since(left)
	if err := b.agree(ctx, "warmup/end", nil); err != nil {
		return err
	}
	b.endStages(s, op.StartWarmup)
	if err := b.watchFirstCalls(); err != nil {
		return err
	}
	b.mu.Lock()
	r := &b.startup.report
	r.NumWarmups++
	if language > faceShortest {
		r.LanguageNS += uint64(language)
	}
	text := describe(r, op.StartWarmup)
	b.mu.Unlock()
	b.log.Info("warmed up: " + text)
	return nil
}

// faceShortest is less than any call of a language's interface takes, and more than what lies between the parts of a
// whole warm-up.
const faceShortest = 50 * time.Microsecond

// warmup is the state that the steps of a warm-up share.
type warmup struct {
	b      *Buffer
	ctx    context.Context
	stages *stages
	began  time.Time
	plan   plan.Warmup
	fp8    int32
	shape  op.Shape // of the mode that is being warmed
	call   Call
	memory []*device.Memory

	index, weights uintptr
	layout         op.LayoutArgs
	handle         op.Handle
	notify         op.NotifyArgs
	token          uint64
	dispatch       op.DispatchArgs
	combine        op.CombineArgs
	llDispatch     op.LLDispatchArgs
	llCombine      op.LLCombineArgs
}

// agreePlan completes the shapes and compares them with the other ranks'. Where ranks know different things, rank 0's
// count; what they were given must be equal.
func (w *warmup) agreePlan(o *op.WarmupOptions) error {
	b := w.b
	room := plan.Room{
		Topology: b.top, Limits: &b.limits, NVLBytes: b.opt.NVLBytes, RDMABytes: b.opt.RDMABytes, MaxBytes: plan.DefaultWarmupBytes,
		RowFits: func(bytes uint64) bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.fitsRow(bytes) == nil
		},
		SlotFits: func(numMaxTokens, hidden, experts int32) bool {
			if plan.CheckSlots(numMaxTokens, hidden, experts, b.top, &b.limits) != nil || b.checkRDMATokens(numMaxTokens) != nil {
				return false
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			_, err := b.slot(numMaxTokens, hidden, experts)
			return err == nil
		},
	}
	if o.MaxBytes > 0 {
		room.MaxBytes = o.MaxBytes
	}
	allowed := plan.Modes{Normal: b.opt.NVLBytes > 0, LowLatency: b.opt.LowLatency && b.opt.RDMABytes > 0}
	own := plan.NewWarmup(o, b.opt.Shape, b.opt.HintNormal, b.opt.HintLL, allowed, &room)
	if err := room.CheckBytes(&own, o.MaxBytes); err != nil {
		return err
	}
	blob, err := json.Marshal(own)
	if err != nil {
		return status.Errorf(status.Internal, "encoding a warm-up's shapes: %w", err)
	}
	all, err := b.exchanger("warmup/shapes")(w.ctx, blob, nil)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(all[0].Blob, &w.plan); err != nil {
		return status.Errorf(status.Mismatch, "rank 0's shapes of a warm-up cannot be read: %w", err)
	}
	for rank, m := range all {
		var theirs plan.Warmup
		if err := json.Unmarshal(m.Blob, &theirs); err != nil {
			return status.Errorf(status.Mismatch, "rank %d's shapes of a warm-up cannot be read: %w", rank, err)
		}
		if theirs.Given != w.plan.Given {
			return status.Errorf(status.Mismatch, "ranks disagree on the shapes of warmup: rank 0 gave %s, rank %d gave %s", w.plan.Given, rank, theirs.Given)
		}
	}
	w.fp8 = w.plan.UseFP8
	return nil
}

// runPlan warms the modes one after the other. Allocating and freeing may wait for everything on a device, which other
// ranks' kernels may be on; so no rank begins either while another runs kernels that wait for it.
func (w *warmup) runPlan() error {
	p := &w.plan
	if err := w.runs(stageLaunch, w.runBarrier); err != nil {
		return err
	}
	if p.LowLatencyFrom != op.ShapeNone {
		w.shape = p.LowLatency
		if err := w.mode(w.makeLowLatency, w.runLowLatency); err != nil {
			return err
		}
	}
	if p.NormalFrom == op.ShapeNone {
		return nil
	}
	w.shape = p.Normal
	tokens := plan.WarmupTokens(p.Normal.NumTokens, p.NormalFrom != op.ShapeRegion)
	for i, n := range tokens {
		began := time.Now()
		w.shape.NumTokens = n
		if err := w.mode(w.makeCounts, w.runCounts, w.makeRows, w.runRows); err != nil {
			return err
		}
		p.Normal.NumTokens = n
		if i+1 < len(tokens) {
			if enough, err := w.enough(time.Since(began)); enough || err != nil {
				return err
			}
		}
	}
	return nil
}

// mode runs the steps that make and use the tensors of a mode, in turn, and frees them.
func (w *warmup) mode(steps ...func() error) (err error) {
	for i, step := range steps {
		kind := stageMemory
		if i%2 == 1 {
			kind = stageLaunch
		}
		if err = w.runs(kind, step); err != nil {
			break
		}
	}
	end := w.stages.to(stageMemory)
	free := w.free()
	end()
	if err == nil {
		err = w.b.agree(w.ctx, "warmup", free)
	}
	return err
}

// runs runs a step, and waits for it on all ranks.
func (w *warmup) runs(kind stage, step func() error) error {
	end := w.stages.to(kind)
	err := step()
	end()
	return w.b.agree(w.ctx, "warmup", err)
}

// enough reports whether a larger number of tokens would take longer than there is time, on any rank: the last one
// took so long.
func (w *warmup) enough(last time.Duration) (bool, error) {
	limit := time.Duration(w.plan.MaxMS) * time.Millisecond
	next := time.Since(w.began) + plan.WarmupGrowth*last
	all, err := w.b.exchanger("warmup/time")(w.ctx, []byte{byte(op.Bool(next > limit))}, nil)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(all, func(m device.Message) bool { return len(m.Blob) != 1 || m.Blob[0] != 0 }), nil
}

// report adds what was done to the buffer's report.
func (w *warmup) report() {
	b, p := w.b, &w.plan
	b.endStages(w.stages, op.StartWarmup)
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &b.startup.report
	r.UseFP8, r.ShapeFrom, r.LLShapeFrom = p.UseFP8, p.NormalFrom, p.LowLatencyFrom
	r.NumTokens, r.Hidden, r.NumTopK, r.NumExperts = p.Normal.NumTokens, p.Normal.Hidden, p.Normal.NumTopK, p.Normal.NumExperts
	r.LLNumMaxTokens, r.LLHidden, r.LLNumTopK, r.LLNumExperts = p.LowLatency.NumTokens, p.LowLatency.Hidden, p.LowLatency.NumTopK, p.LowLatency.NumExperts
	b.startup.left = time.Now()
}

// free waits for the launched kernels, which write to the memory, and frees it.
func (w *warmup) free() error {
	var err error
	for done := false; !done && err == nil; { // bounded by the kernels' own deadlines
		done, err = w.call.Event.ev.Wait(waitSlice)
	}
	var bytes uint64
	for _, m := range w.memory {
		bytes += m.Bytes
		status.Keep(&err, m.Release())
	}
	w.memory = nil
	w.stages.bytes = max(w.stages.bytes, bytes)
	return err
}

// runBarrier is for the kernel, and for peers that begin at once.
func (w *warmup) runBarrier() error {
	if err := w.b.Barrier(&w.call); err != nil {
		return err
	}
	return w.call.Event.Wait(-1)
}

// tensor allocates zeroed memory for a number of elements. It stores the first error in err.
func (w *warmup) tensor(err *error, elements int64, bytes int64) uintptr {
	if *err != nil {
		return 0
	}
	m, failed := w.b.dev.Alloc(uint64(max(1, elements) * bytes))
	if failed != nil {
		*err = failed
		return 0
	}
	w.memory = append(w.memory, m)
	return uintptr(m.Address)
}

// routing makes top-k indices that spread evenly over the experts, and weights of 1.
func (w *warmup) routing(tokens, topk, experts int32) (err error) {
	n := int64(tokens) * int64(topk)
	w.index, w.weights = w.tensor(&err, n, 8), w.tensor(&err, n, 4)
	if err != nil || n == 0 {
		return err
	}
	page, err := w.b.dev.NewHostPage(int(n) * 12)
	if err != nil {
		return err
	}
	stride := max(1, experts/topk)
	for t := range tokens {
		for k := range topk {
			i := int64(t)*int64(topk) + int64(k)
			expert := int64(-1) // more choices than experts
			if k < experts {
				expert = int64((t + k*stride) % experts)
			}
			binary.LittleEndian.PutUint64(page.Host[8*i:], uint64(expert))
			binary.LittleEndian.PutUint32(page.Host[8*n+4*i:], math.Float32bits(1))
		}
	}
	if err = w.copy(w.index, page.Address, 8*n); err == nil {
		err = w.copy(w.weights, page.Address+uint64(8*n), 4*n)
	}
	if err == nil {
		err = w.call.Event.Wait(-1)
	}
	status.Keep(&err, page.Close())
	return err
}

func (w *warmup) copy(dst uintptr, src uint64, bytes int64) error {
	p := &abi.CopyParams{Device: w.b.dev.Handle(), Stream: uint64(w.b.comm), Dst: uint64(dst), Src: src, Bytes: uint64(bytes)}
	if code := w.b.opt.Library.Copy(p); code != 0 {
		return kern.Error("dk_copy", code, p.DeviceError)
	}
	return w.call.Event.ev.Record(w.b.comm)
}

// makeCounts checks the shapes of normal mode and makes what layout and notify need.
func (w *warmup) makeCounts() error {
	o := &w.shape
	w.notify = op.NotifyArgs{NumTokens: o.NumTokens, NumTopK: o.NumTopK, NumExperts: o.NumExperts, XType: op.BF16, Hidden: int64(o.Hidden),
		ExpertAlignment: 1, Handle: &w.handle}
	if w.fp8 != 0 {
		w.notify.XType, w.notify.NumScales = op.FP8, (o.Hidden+127)/128
	}
	if err := plan.NotifyRows(&w.notify).Check(w.b.top); err != nil {
		return err
	}
	err := w.routing(o.NumTokens, o.NumTopK, o.NumExperts)
	r, t := int64(w.b.size), int64(o.NumTokens)
	w.layout = op.LayoutArgs{
		NumTokens: o.NumTokens, NumTopK: o.NumTopK, NumExperts: o.NumExperts, IndexType: op.Int64, TopKIdx: w.index,
		NumTokensPerRank: w.tensor(&err, r, 4), NumTokensPerExpert: w.tensor(&err, int64(o.NumExperts), 4), IsTokenInRank: w.tensor(&err, t*r, 1),
	}
	n, l := &w.notify, &w.layout
	n.NumTokensPerRank, n.NumTokensPerExpert, n.IsTokenInRank = l.NumTokensPerRank, l.NumTokensPerExpert, l.IsTokenInRank
	w.handle = op.Handle{RankPrefixMatrix: w.tensor(&err, r*r, 4), SendHead: w.tensor(&err, t*r, 4)}
	return err
}

func (w *warmup) runCounts() (err error) {
	if err = w.b.Layout(&w.layout, &w.call); err != nil {
		return err
	}
	w.token, err = w.b.Notify(&w.notify, &w.call)
	if err != nil {
		return err
	}
	received, err := w.b.WaitCounts(w.token, -1, nil)
	if err != nil {
		return err
	}
	w.handle.NumRecvTokens = int32(received)
	return w.call.Event.Wait(-1)
}

// makeRows makes what dispatch and combine need, now that the number of rows is known.
func (w *warmup) makeRows() error {
	var err error
	r := &w.notify
	t, n, h, k, s := int64(r.NumTokens), int64(w.handle.NumRecvTokens), r.Hidden, int64(r.NumTopK), int64(r.NumScales)
	w.handle.RecvSrcIdx = w.tensor(&err, n, 4)
	d := w.notify.Dispatch(w.token)
	d.IndexType, d.X, d.XScales, d.ScaleTokenStride, d.ScaleStride = op.Int64, w.tensor(&err, t*h, 2), w.tensor(&err, t*s, 4), s, 1
	d.TopKIdx, d.TopKWeights, d.RecvX, d.RecvXScales = w.index, w.weights, w.tensor(&err, n*h, 2), w.tensor(&err, n*s, 4)
	d.RecvTopKIdx, d.RecvTopKWeights = w.tensor(&err, n*k, 8), w.tensor(&err, n*k, 4)
	w.dispatch = d
	w.combine = op.CombineArgs{
		NumTopK: r.NumTopK, Hidden: h, X: w.tensor(&err, n*h, 2), TopKWeights: d.RecvTopKWeights, Handle: &w.handle,
		CombinedX: w.tensor(&err, t*h, 2), CombinedTopKWeights: w.tensor(&err, t*k, 4),
	}
	return err
}

func (w *warmup) runRows() error {
	if err := w.b.Dispatch(&w.dispatch, &w.call); err != nil {
		return err
	}
	if err := w.b.Combine(&w.combine, &w.call); err != nil {
		return err
	}
	return w.call.Event.Wait(-1)
}

func (w *warmup) makeLowLatency() error {
	o := &w.shape
	shape := plan.LowLatency{NumTokens: o.NumTokens, NumMaxTokens: o.NumTokens, Hidden: o.Hidden, NumTopK: o.NumTopK,
		NumExperts: o.NumExperts, IndexType: op.Int64, FP8: w.fp8 != 0}
	if err := shape.CheckDispatch(w.b.top, &w.b.limits); err != nil {
		return err
	}
	err := w.routing(o.NumTokens, o.NumTopK, o.NumExperts)
	t, h, local := int64(o.NumTokens), int64(o.Hidden), int64(shape.LocalExperts(w.b.top))
	room := local * int64(w.b.size) * t
	w.llDispatch = op.LLDispatchArgs{
		NumTokens: o.NumTokens, NumMaxTokens: o.NumTokens, Hidden: o.Hidden, NumTopK: o.NumTopK,
		NumExperts: o.NumExperts, IndexType: op.Int64, UseFP8: w.fp8, X: w.tensor(&err, t*h, 2), TopKIdx: w.index, TopKWeights: w.weights,
		RecvX: w.tensor(&err, room*h, 2), RecvXScales: w.tensor(&err, room*((h+127)/128), 4), RecvCount: w.tensor(&err, local, 4),
		SrcInfo: w.tensor(&err, room, 4), LayoutRange: w.tensor(&err, local*int64(w.b.size), 8),
	}
	d := &w.llDispatch
	w.llCombine = op.LLCombineArgs{ // the rows go back as they came: nobody reads the sums
		NumTokens: o.NumTokens, NumMaxTokens: o.NumTokens, Hidden: o.Hidden, NumTopK: o.NumTopK,
		NumExperts: o.NumExperts, IndexType: op.Int64, X: d.RecvX, TopKIdx: w.index, TopKWeights: w.weights,
		SrcInfo: d.SrcInfo, LayoutRange: d.LayoutRange, CombinedX: w.tensor(&err, t*h, 2),
	}
	return err
}

// runLowLatency runs whole calls and halves, two rounds of each: calls alternate between two sets of wire buffers, and
// both have to be warm.
func (w *warmup) runLowLatency() error {
	for range 2 {
		for _, phases := range [][]op.Phase{{op.SendRecv}, {op.Send, op.Recv}} {
			for _, w.llDispatch.Phases = range phases {
				if err := w.b.LowLatencyDispatch(&w.llDispatch, &w.call); err != nil {
					return err
				}
			}
			for _, w.llCombine.Phases = range phases {
				if err := w.b.LowLatencyCombine(&w.llCombine, &w.call); err != nil {
					return err
				}
			}
		}
	}
	return w.call.Event.Wait(-1)
}
