package engine

import (
	"encoding/binary"
	"math"

	"github.com/deepep-go/deepep/core/internal/abi"
	"github.com/deepep-go/deepep/core/internal/device"
	"github.com/deepep-go/deepep/core/internal/kern"
	"github.com/deepep-go/deepep/core/internal/plan"
	"github.com/deepep-go/deepep/core/internal/status"
)

// WarmupOptions are the shapes to run once so that the first real call is as fast as the steady one. Zero sizes leave
// that mode out. All ranks give the same.
type WarmupOptions struct {
	NumTokens, Hidden, NumTopK, NumExperts         int32 // normal mode
	LLMaxTokens, LLHidden, LLNumTopK, LLNumExperts int32 // low-latency mode
	UseFP8                                         bool  // rows are dispatched as FP8 with scales
}

// Warmup runs one call of each operation with the given shapes, on memory of its own. Collective; it waits.
func (b *Buffer) Warmup(o WarmupOptions) error {
	if err := b.start(); err != nil {
		return err
	}
	defer b.leave()
	ev, err := b.NewEvent()
	if err != nil {
		return err
	}
	w := &warmup{b: b, call: Call{Async: true, Event: ev}}
	if !b.dev.HostStream() {
		w.call.Stream = uintptr(b.comm)
	}
	if o.Hidden != 0 {
		err = w.normal(&o)
	}
	if err == nil && o.LLHidden != 0 {
		err = w.lowLatency(&o)
	}
	if err != nil {
		_ = w.finished() // what was launched before still writes to the memory below; the first error counts
	}
	for _, m := range w.memory {
		if e := m.Release(); err == nil {
			err = e
		}
	}
	if e := ev.Destroy(); err == nil {
		err = e
	}
	return err
}

// warmup keeps the memory of a run together.
type warmup struct {
	b      *Buffer
	call   Call
	memory []*device.Memory
}

// tensor allocates zeroed memory of a number of elements; the first error is kept in err.
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
func (w *warmup) routing(tokens, topk, experts int32) (index, weights uintptr, err error) {
	n := int64(tokens) * int64(topk)
	index, weights = w.tensor(&err, n, 8), w.tensor(&err, n, 4)
	if err != nil || n == 0 {
		return index, weights, err
	}
	page, err := w.b.dev.NewHostPage(int(n) * 12)
	if err != nil {
		return 0, 0, err
	}
	stride := max(1, experts/topk)
	for t := range tokens {
		for k := range topk {
			i := int64(t)*int64(topk) + int64(k)
			expert := int64(-1) // more choices than experts
			if k < experts {
				expert = int64((t + k*stride + k*topk*stride/experts) % experts)
			}
			binary.LittleEndian.PutUint64(page.Host[8*i:], uint64(expert))
			binary.LittleEndian.PutUint32(page.Host[8*n+4*i:], math.Float32bits(1))
		}
	}
	if err = w.copy(index, page.Address, 8*n); err == nil {
		err = w.copy(weights, page.Address+uint64(8*n), 4*n)
	}
	if err == nil {
		err = w.finished()
	}
	if e := page.Close(); err == nil {
		err = e
	}
	return index, weights, err
}

func (w *warmup) copy(dst uintptr, src uint64, bytes int64) error {
	p := &kern.CopyParams{Device: w.b.dev.Handle(), Stream: uint64(w.b.comm), Dst: uint64(dst), Src: src, Bytes: uint64(bytes)}
	if code := w.b.opt.Library.Copy(p); code != 0 {
		return kern.Error("dk_copy", code, p.DeviceError)
	}
	return w.call.Event.ev.Record(w.b.comm)
}

func (w *warmup) finished() error { return w.call.Event.Wait(-1) }

func (w *warmup) normal(o *WarmupOptions) error {
	rows := plan.Rows{NumTokens: o.NumTokens, NumTopK: o.NumTopK, NumExperts: o.NumExperts, XType: plan.BF16, Hidden: int64(o.Hidden)}
	if o.UseFP8 {
		rows.XType, rows.NumScales = plan.FP8, (o.Hidden+127)/128
	}
	if err := rows.Check(w.b.top); err != nil {
		return err
	}
	if o.NumTopK == 0 {
		return status.InvalidArg("num_topk", 0, "1 or more")
	}
	index, weights, err := w.routing(o.NumTokens, o.NumTopK, o.NumExperts)
	if err != nil {
		return err
	}
	r, t := int64(w.b.size), int64(o.NumTokens)
	layout := LayoutArgs{
		NumTokens: o.NumTokens, NumTopK: o.NumTopK, NumExperts: o.NumExperts, IndexType: plan.Int64, TopKIdx: index,
		TokensPerRank: w.tensor(&err, r, 4), TokensPerExpert: w.tensor(&err, int64(o.NumExperts), 4), TokenInRank: w.tensor(&err, t*r, 1),
	}
	handle := Handle{RankPrefixMatrix: w.tensor(&err, r*r, 4), SendHead: w.tensor(&err, t*r, 4)}
	if err != nil {
		return err
	}
	if err := w.b.Layout(&layout, &w.call); err != nil {
		return err
	}
	token, err := w.b.Notify(&NotifyArgs{Rows: rows, ExpertAlignment: 1, TokensPerRank: layout.TokensPerRank,
		TokensPerExpert: layout.TokensPerExpert, TokenInRank: layout.TokenInRank, Handle: &handle}, &w.call)
	if err != nil {
		return err
	}
	received, err := w.b.WaitCounts(token, -1, nil)
	if err != nil {
		return err
	}
	handle.NumRecvTokens = int32(received)
	return w.rows(rows, token, &handle, index, weights)
}

// rows runs dispatch and combine.
func (w *warmup) rows(rows plan.Rows, token uint64, handle *Handle, index, weights uintptr) error {
	var err error
	t, n, h, k, s := int64(rows.NumTokens), int64(handle.NumRecvTokens), rows.Hidden, int64(rows.NumTopK), int64(rows.NumScales)
	handle.RecvSrcIdx = w.tensor(&err, n, 4)
	dispatch := DispatchArgs{
		Rows: rows, Token: token, IndexType: plan.Int64, X: w.tensor(&err, t*h, 2), XScales: w.tensor(&err, t*s, 4), ScaleTokenStride: s,
		ScaleStride: 1, TopKIdx: index, TopKWeights: weights, Handle: handle, RecvSegment: -1, RecvX: w.tensor(&err, n*h, 2),
		RecvXScales: w.tensor(&err, n*s, 4), RecvTopKIdx: w.tensor(&err, n*k, 8), RecvTopKWeights: w.tensor(&err, n*k, 4),
	}
	combine := CombineArgs{
		NumTopK: rows.NumTopK, Hidden: h, XSegment: -1, X: w.tensor(&err, n*h, 2), TopKWeights: dispatch.RecvTopKWeights, Handle: handle,
		CombinedX: w.tensor(&err, t*h, 2), CombinedTopKWeights: w.tensor(&err, t*k, 4),
	}
	if err == nil {
		err = w.b.Dispatch(&dispatch, &w.call)
	}
	if err == nil {
		err = w.b.Combine(&combine, &w.call)
	}
	if err != nil {
		return err
	}
	return w.finished()
}

func (w *warmup) lowLatency(o *WarmupOptions) error {
	shape := plan.LowLatency{NumTokens: o.LLMaxTokens, NumMaxTokens: o.LLMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK,
		NumExperts: o.LLNumExperts, IndexType: plan.Int64, FP8: o.UseFP8}
	if err := shape.CheckDispatch(w.b.top); err != nil {
		return err
	}
	index, weights, err := w.routing(o.LLMaxTokens, o.LLNumTopK, o.LLNumExperts)
	if err != nil {
		return err
	}
	t, h, local := int64(o.LLMaxTokens), int64(o.LLHidden), int64(shape.LocalExperts(w.b.top))
	room := local * int64(w.b.size) * t
	dispatch := LLDispatchArgs{
		Phases: abi.PhaseBoth, NumTokens: o.LLMaxTokens, NumMaxTokens: o.LLMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK,
		NumExperts: o.LLNumExperts, IndexType: plan.Int64, UseFP8: o.UseFP8, X: w.tensor(&err, t*h, 2), TopKIdx: index, TopKWeights: weights,
		RecvX: w.tensor(&err, room*h, 2), RecvXScales: w.tensor(&err, room*((h+127)/128), 4), RecvCount: w.tensor(&err, local, 4),
		SrcInfo: w.tensor(&err, room, 4), LayoutRange: w.tensor(&err, local*int64(w.b.size), 8),
	}
	combine := LLCombineArgs{
		Phases: abi.PhaseBoth, NumTokens: o.LLMaxTokens, NumMaxTokens: o.LLMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK,
		NumExperts: o.LLNumExperts, IndexType: plan.Int64, X: w.tensor(&err, room*h, 2), TopKIdx: index, TopKWeights: weights,
		SrcInfo: dispatch.SrcInfo, LayoutRange: dispatch.LayoutRange, CombinedX: w.tensor(&err, t*h, 2),
	}
	if err == nil {
		err = w.b.LowLatencyDispatch(&dispatch, &w.call)
	}
	if err == nil {
		err = w.b.LowLatencyCombine(&combine, &w.call)
	}
	if err != nil {
		return err
	}
	return w.finished()
}
