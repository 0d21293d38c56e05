package engine

import (
	"context"
	"encoding/binary"
	"math"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Warmup runs one call of each operation with the given shapes, on memory of its own. Collective; it waits.
func (b *Buffer) Warmup(o op.WarmupOptions) error {
	if err := b.start(); err != nil {
		return err
	}
	defer b.leave()
	ev, err := b.NewEvent()
	if err != nil {
		return err
	}
	limited, done := b.limited(context.Background())
	defer done()
	w := &warmup{b: b, o: o, call: Call{Async: true, Event: ev}}
	if !b.dev.HostStream() {
		w.call.Stream = uintptr(b.comm)
	}
	// Allocating and freeing may wait for everything on a device, which other ranks' kernels may be on; so no rank
	// begins either while another runs kernels that wait for it.
	for _, step := range w.steps() {
		if err = b.agree(limited, "warmup", step()); err != nil {
			break
		}
	}
	free := w.free()
	if err == nil {
		err = b.agree(limited, "warmup", free)
	}
	status.Keep(&err, ev.Destroy())
	return err
}

// warmup is the state that the steps of a warm-up share.
type warmup struct {
	b      *Buffer
	o      op.WarmupOptions
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

func (w *warmup) steps() (all []func() error) {
	if w.o.Hidden != 0 {
		all = append(all, w.makeCounts, w.runCounts, w.makeRows, w.runRows)
	}
	if w.o.LLHidden != 0 {
		all = append(all, w.makeLowLatency, w.runLowLatency)
	}
	return all
}

// free waits for the launched kernels, which write to the memory, and frees it.
func (w *warmup) free() error {
	var err error
	for done := false; !done && err == nil; { // bounded by the kernels' own deadlines
		done, err = w.call.Event.ev.Wait(waitSlice)
	}
	for _, m := range w.memory {
		status.Keep(&err, m.Release())
	}
	return err
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
	o := &w.o
	w.notify = op.NotifyArgs{NumTokens: o.NumTokens, NumTopK: o.NumTopK, NumExperts: o.NumExperts, XType: op.BF16, Hidden: int64(o.Hidden),
		ExpertAlignment: 1, Handle: &w.handle}
	if o.UseFP8 != 0 {
		w.notify.XType, w.notify.NumScales = op.FP8, (o.Hidden+127)/128
	}
	if err := plan.NotifyRows(&w.notify).Check(w.b.top); err != nil {
		return err
	}
	if o.NumTopK == 0 {
		return status.InvalidArg("num_topk", 0, "1 or more")
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
	o := &w.o
	shape := plan.LowLatency{NumTokens: o.LLNumMaxTokens, NumMaxTokens: o.LLNumMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK,
		NumExperts: o.LLNumExperts, IndexType: op.Int64, FP8: o.UseFP8 != 0}
	if err := shape.CheckDispatch(w.b.top, &w.b.limits); err != nil {
		return err
	}
	err := w.routing(o.LLNumMaxTokens, o.LLNumTopK, o.LLNumExperts)
	t, h, local := int64(o.LLNumMaxTokens), int64(o.LLHidden), int64(shape.LocalExperts(w.b.top))
	room := local * int64(w.b.size) * t
	w.llDispatch = op.LLDispatchArgs{
		NumTokens: o.LLNumMaxTokens, NumMaxTokens: o.LLNumMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK,
		NumExperts: o.LLNumExperts, IndexType: op.Int64, UseFP8: o.UseFP8, X: w.tensor(&err, t*h, 2), TopKIdx: w.index, TopKWeights: w.weights,
		RecvX: w.tensor(&err, room*h, 2), RecvXScales: w.tensor(&err, room*((h+127)/128), 4), RecvCount: w.tensor(&err, local, 4),
		SrcInfo: w.tensor(&err, room, 4), LayoutRange: w.tensor(&err, local*int64(w.b.size), 8),
	}
	d := &w.llDispatch
	w.llCombine = op.LLCombineArgs{
		NumTokens: o.LLNumMaxTokens, NumMaxTokens: o.LLNumMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK,
		NumExperts: o.LLNumExperts, IndexType: op.Int64, X: w.tensor(&err, room*h, 2), TopKIdx: w.index, TopKWeights: w.weights,
		SrcInfo: d.SrcInfo, LayoutRange: d.LayoutRange, CombinedX: w.tensor(&err, t*h, 2),
	}
	return err
}

// runLowLatency runs two rounds: calls alternate between two sets of wire buffers, and both have to be warm.
func (w *warmup) runLowLatency() error {
	for range 2 {
		if err := w.b.LowLatencyDispatch(&w.llDispatch, &w.call); err != nil {
			return err
		}
		if err := w.b.LowLatencyCombine(&w.llCombine, &w.call); err != nil {
			return err
		}
	}
	return w.call.Event.Wait(-1)
}
