package engine

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Copies of experts on other ranks. Their rows go by cached dispatches in the expanded layout, whose handles the kernel
// library makes of the mapping: rows of weights to their final places, copies of gradients to the workspace, from where
// they are added. The host never learns the mapping.

// PrefetchWeights fills the slots for copies of experts. Collective.
func (b *Buffer) PrefetchWeights(a *op.BalanceArgs, c *Call) error { return b.balance(a, c, false) }

// ReduceGrads adds what was made of the copies to the experts. Collective.
func (b *Buffer) ReduceGrads(a *op.BalanceArgs, c *Call) error { return b.balance(a, c, true) }

// BalanceWorkspace is how many bytes of workspace a call needs. Local.
func (b *Buffer) BalanceWorkspace(a *op.BalanceArgs, reduce bool) (uint64, error) {
	if err := b.start(); err != nil {
		return 0, err
	}
	defer b.leave()
	tensors, err := b.balanceTensors(a, reduce)
	if err != nil {
		return 0, err
	}
	return workspaceOf(tensors), nil
}

func workspaceOf(tensors []plan.BalanceTensor) (bytes uint64) {
	for i := range tensors {
		bytes = max(bytes, tensors[i].Bytes)
	}
	return bytes
}

// balanceTensors checks the numbers of a call and says how its tensors travel.
func (b *Buffer) balanceTensors(a *op.BalanceArgs, reduce bool) ([]plan.BalanceTensor, error) {
	shape := plan.Balance{NumSlots: a.NumSlots, NumLocal: a.NumLocalExperts, Reduce: reduce}
	if err := shape.Check(a, b.top); err != nil {
		return nil, err
	}
	if b.opt.Shrink {
		return nil, status.Errorf(status.Unsupported, "copies of experts do not go with enable_shrink: a copy of a masked rank's expert would not come")
	}
	if err := b.checkRouting(plan.Routing{
		Kind: op.RoutingExpanded, NumTopK: 1, NumExperts: int32(b.size), IndexType: op.Int32, NumMaxTokens: 1, ExpertAlignment: 1,
	}); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	tensors := make([]plan.BalanceTensor, a.NumTensors)
	for i := range tensors {
		var err error
		if tensors[i], err = shape.Tensor(i, a.ExpertBytes[i], b.top, func(row uint64) bool { return b.fitsRow(row) == nil }); err != nil {
			return nil, err
		}
	}
	return tensors, b.fitsRow(16)
}

func checkBalance(a *op.BalanceArgs, needs uint64) error {
	if err := need(given{"mapping", a.Mapping, true, 4}, given{"workspace", a.Workspace, true, 16}); err != nil {
		return err
	}
	for i := range a.NumTensors {
		copies, experts := fmt.Sprintf("copies[%d]", i), fmt.Sprintf("experts[%d]", i)
		if err := need(given{copies, a.Copies[i], true, 16}, given{experts, a.Experts[i], true, 16}); err != nil {
			return err
		}
	}
	for i, one := range a.Copies[:a.NumTensors] {
		for j, other := range a.Experts[:a.NumTensors] {
			if overlap(one, uint64(a.NumSlots)*a.ExpertBytes[i], other, uint64(a.NumLocalExperts)*a.ExpertBytes[j]) {
				return status.InvalidArg(fmt.Sprintf("copies[%d]", i), fmt.Sprintf("memory of experts[%d]", j), "tensors apart: one of the two is written while the other is read")
			}
		}
	}
	if a.WorkspaceBytes < needs {
		return status.InvalidArg("workspace_bytes", a.WorkspaceBytes, fmt.Sprintf("at least %d", needs))
	}
	return nil
}

// overlap reports whether two tensors have a byte in common.
func overlap[P ~uintptr](one P, bytes uint64, other P, others uint64) bool {
	return uint64(one) < uint64(other)+others && uint64(other) < uint64(one)+bytes
}

func (b *Buffer) balance(a *op.BalanceArgs, c *Call, reduce bool) error {
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return err
	}
	if err := b.startAwake(); err != nil {
		return err
	}
	defer b.leave()
	tensors, err := b.balanceTensors(a, reduce)
	if err != nil {
		return err
	}
	if err := checkBalance(a, workspaceOf(tensors)); err != nil {
		return err
	}
	where := placeOfWhole(c)
	stream, err := b.begin(c, abi.OpDispatch, where, false)
	if err != nil {
		return err
	}
	w := balancing{b: b, a: a, reduce: reduce, stream: stream, config: &config, numbers: numbersOf(a, reduce), first: b.calls[abi.OpDispatch] + 1}
	for i := range tensors {
		if err = w.move(i, &tensors[i]); err != nil {
			break
		}
	}
	last := b.calls[abi.OpDispatch]
	b.spans.add(w.first, last)
	return b.finish(c, where, stream, callID{uint32(abi.OpDispatch), last}, err)
}

// balancing is one call, with b.mu held.
type balancing struct {
	b       *Buffer
	a       *op.BalanceArgs
	reduce  bool
	stream  device.Stream
	config  *plan.Config
	numbers uint64 // see numbersOf
	first   uint64 // number of its first dispatch
}

// move launches a tensor's dispatches, and the sums.
func (w *balancing) move(number int, d *plan.BalanceTensor) error {
	a, at := w.a, uint64(w.a.Workspace)
	p := &w.b.params.balance
	*p = abi.BalanceParams{
		Device: w.b.dev.Handle(), Stream: uint64(w.stream), Mapping: uint64(a.Mapping), Rank: int32(w.b.rank), NumRanks: int32(w.b.size),
		NumSlots: a.NumSlots, NumLocal: a.NumLocalExperts, NumRows: d.NumRows, RankPrefixMatrix: at + d.Matrix, SendHead: at + d.Head,
		TopKIdx: at + d.Index, DstSlot: at + d.Slot, TopKWeights: at + d.Weights, Rows: at + d.Rows, Arrived: at + d.Arrived,
		Experts: uint64(a.Experts[number]), RowBytes: d.RowBytes,
	}
	whole := a.NumSlots
	if w.reduce {
		whole = d.NumRows
	}
	for part := range d.Parts {
		p.First = part * d.Part
		p.Count = min(d.Part, whole-p.First)
		p.What = abi.BalanceCopies
		if w.reduce {
			p.What = abi.BalanceGrads
		}
		if err := w.enqueue(); err != nil {
			return err
		}
		if err := w.dispatch(number, d); err != nil {
			return err
		}
		if !w.reduce {
			continue
		}
		p.What = abi.BalanceAdd
		if err := w.enqueue(); err != nil {
			return err
		}
	}
	return nil
}

func (w *balancing) enqueue() error {
	p := &w.b.params.balance
	return kern.Error("dk_balance", w.b.opt.Library.Balance(p), p.DeviceError)
}

// What balancing has in place of an exchange of counts: a number that no notify has.
const (
	balanceBits = 24
	balanceMark = uint64(1)<<exchangeBits - 1<<balanceBits
)

// numbersOf is a number that ranks have alike if the numbers of their calls are: kernels compare it as they compare the
// exchanges of handles.
func numbersOf(a *op.BalanceArgs, reduce bool) uint64 {
	h := fnv.New32a()
	numbers := []int64{int64(a.NumTensors), int64(a.NumSlots), int64(a.NumLocalExperts)}
	_ = binary.Write(h, binary.LittleEndian, reduce)
	_ = binary.Write(h, binary.LittleEndian, numbers)
	_ = binary.Write(h, binary.LittleEndian, a.ExpertBytes[:a.NumTensors])
	return balanceMark | uint64(h.Sum32())&(1<<balanceBits-1)
}

// isBalance reports whether an exchange, or its lower half, is one of numbersOf.
func isBalance(exchange int64) bool {
	return uint64(exchange)&(1<<exchangeBits-1)>>balanceBits == balanceMark>>balanceBits
}

// dispatch moves the rows of the part that params.balance has.
func (w *balancing) dispatch(number int, d *plan.BalanceTensor) error {
	b, part, p := w.b, &w.b.params.balance, &w.b.params.dispatch
	ranks := int32(b.size)
	*p = abi.DispatchParams{
		RankPrefixMatrix: part.RankPrefixMatrix, SendHead: part.SendHead, TopKIdx: part.TopKIdx, DstSlot: part.DstSlot,
		HiddenBytes: d.RowBytes, XType: int32(op.Uint8), NumTokens: d.NumTokens, NumMaxTokens: d.NumTokens, IndexBytes: 4,
		NumRecvTokens: -1, RecvSegment: -1, Routing: int32(op.RoutingExpanded), ExpertAlignment: 1,
		NVLSendChunk: w.config.NVLSendChunk, NVLRecvChunk: w.config.NVLRecvChunk,
		RDMASendChunk: w.config.RDMASendChunk, RDMARecvChunk: w.config.RDMARecvChunk,
	}
	if w.reduce {
		p.X, p.RecvX = uint64(w.a.Copies[number]), part.Rows
		p.NumTopK, p.NumExperts, p.NumExpandedTokens = 1, ranks, ranks*w.a.NumSlots*part.Count
		p.TopKWeights, p.RecvTopKWeights = part.TopKWeights, part.Arrived
	} else {
		p.X, p.RecvX = uint64(w.a.Experts[number]), uint64(w.a.Copies[number])
		p.NumTopK, p.NumExperts, p.NumExpandedTokens = ranks*part.Count, ranks*part.Count, w.a.NumSlots*d.NumRows
	}
	p.RecvScaleStride, p.RecvScaleTokenStride = 1, 0
	p.Exchange = w.numbers
	b.calls[abi.OpDispatch]++
	call := b.calls[abi.OpDispatch]
	b.header(&p.OpHeader, abi.OpDispatch, abi.PhaseBoth, w.stream, call)
	p.Flags = abi.DispatchCached
	p.NumSMs = b.chooseSMs(w.config, plan.SMQuery{
		Kind: plan.KindDispatch, RowBytes: d.RowBytes, Tokens: int(d.NumTokens), TopK: int(p.NumTopK), Staged: true,
	})
	first := b.beforeLaunch(abi.OpDispatch)
	code := b.opt.Library.Dispatch(p)
	b.afterLaunch(first)
	return b.launched(abi.OpDispatch, code, p.DeviceError)
}

// callSpans are the numbers of the dispatches of the newest calls that made several, of which one refusal is raised.
type callSpans struct {
	all  [8]callSpan
	next int
}

type callSpan struct {
	first, last uint64
	raised      bool // a refusal of one of them
}

func (s *callSpans) add(first, last uint64) {
	if last <= first {
		return
	}
	s.all[s.next%len(s.all)] = callSpan{first: first, last: last}
	s.next++
}

// of returns the span of a dispatch; nil if it was one alone.
func (s *callSpans) of(call callID) *callSpan {
	for i := range s.all {
		if span := &s.all[i]; call.op == abi.OpDispatch && span.last != 0 && call.number >= span.first && call.number <= span.last {
			return span
		}
	}
	return nil
}
