package engine

import (
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Dispatch sends the rows. Collective.
func (b *Buffer) Dispatch(a *op.DispatchArgs, c *Call) error {
	if err := b.checkDispatch(a); err != nil {
		return err
	}
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return err
	}
	p := &b.params.dispatch
	launch := b.launch
	if a.Token != 0 { // peers that have this rank's counts wait for its rows
		launch = b.launchRest
	}
	return launch(c, abi.OpDispatch, placeOfWhole(c), &p.OpHeader, func() error { return b.endExchange(a) }, func() int32 {
		b.fillRows(p, a, &config, false)
		return b.opt.Library.Dispatch(p)
	})
}

// DispatchAtOnce is a Notify whose counts no host waits for, and its Dispatch. Where the library has a kernel that does
// both, for few rows, it is one launch. Collective.
func (b *Buffer) DispatchAtOnce(n *op.NotifyArgs, d *op.DispatchArgs, c *Call) error {
	if err := b.checkNotify(n); err != nil {
		return err
	}
	if d.Handle != nil && d.Handle != n.Handle {
		return status.InvalidArg("handle", "another handle", "that of the notify")
	}
	h, counts, rows := *n.Handle, *n, *d // the caller's stay as they are if the call is refused
	counts.Handle, rows.Handle = &h, &h
	keepRouting(&h, n)
	h.NumRanks, h.NumTokens, h.Exchange = int32(b.size), n.NumTokens, 0
	if err := b.checkAtOnce(&counts, &rows); err != nil {
		return err
	}
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return err
	}
	p, q := &b.params.dispatch, &b.params.notify
	fits := func() error { return b.fitsRow(plan.DispatchRows(&rows).HiddenBytes() + 4*uint64(rows.NumScales)) }
	var cut error // of a dispatch whose notify was launched
	err = b.launch(c, abi.OpDispatch, placeOfWhole(c), &p.OpHeader, fits, func() int32 {
		b.calls[abi.OpNotify]++
		rows.Token = b.calls[abi.OpNotify]
		q.OpHeader = p.OpHeader
		q.Call = rows.Token
		h.Exchange = b.handleOf(q.Call, device.Stream(q.Stream))
		b.fillNotify(q, &counts, &config)
		b.fillRows(p, &rows, &config, b.goesAtOnce(&h, n.NumWorstTokens))
		code, notified := b.dispatchAtOnce(p, q)
		if !notified && h.Routing == op.RoutingNone {
			h.Exchange |= wentAtOnce
		}
		if code == 0 || !notified {
			return code
		}
		cut = b.launched(abi.OpDispatch, code, p.DeviceError) // peers have this rank's counts, and its tensors are in use
		b.fillCancelled(p, &pending{rows: plan.DispatchRows(&rows), routing: routingOf(&h), matrix: h.RankPrefixMatrix}, rows.Token, code, &config)
		return b.opt.Library.Dispatch(p)
	})
	if err == nil && cut != nil {
		if c.Async && c.Event != nil {
			_ = c.Event.Wait(b.opt.Timeout)
		}
		err = cut
	}
	if err == nil {
		*n.Handle = h
	}
	return err
}

func (b *Buffer) checkAtOnce(n *op.NotifyArgs, d *op.DispatchArgs) error {
	switch shape := plan.DispatchRows(d); {
	case n.NumWorstTokens == 0:
		return status.InvalidArg("num_worst_tokens", 0, "1 or more: else a rank waits for counts between notify and dispatch")
	case d.Cached != 0:
		return status.InvalidArg("cached", true, "false: the call makes the handle")
	case d.Token != 0:
		return status.InvalidArg("token", d.Token, "0: the call is its own notify")
	case shape != plan.NotifyRows(n):
		return status.InvalidArg("shape", rowsText(shape), "that of the notify: "+rowsText(plan.NotifyRows(n)))
	}
	return b.checkDispatch(d)
}

// dispatchAtOnce launches one kernel, or those of a notify and its dispatch; notified: of the notify at least. b.mu is held.
func (b *Buffer) dispatchAtOnce(p *abi.DispatchParams, q *abi.NotifyParams) (code int32, notified bool) {
	if b.opt.Library.Has(abi.CapAtOnce) {
		q.Size = uint32(unsafe.Sizeof(*q))
		p.Notify = uint64(uintptr(unsafe.Pointer(q)))
		code = b.opt.Library.Dispatch(p)
		p.Notify = 0
		if code != int32(status.Unsupported) {
			return code, false
		}
	}
	if code = b.opt.Library.Notify(q); code != 0 {
		p.DeviceError = q.DeviceError
		return code, false
	}
	return b.opt.Library.Dispatch(p), true
}

// goesAtOnce reports whether a dispatch with room for `worst` rows brings so few that there is a kernel of their own.
func (b *Buffer) goesAtOnce(h *op.Handle, worst int32) bool {
	rows := int64(worst)
	if h.Routing != op.RoutingNone {
		rows = int64(h.NumMaxTokens) * int64(b.size)
	}
	return rows <= abi.AtOnceRows && b.opt.Library.Has(abi.CapAtOnce)
}

// cameAtOnce reports whether the combine of a handle has a kernel of few rows.
func (b *Buffer) cameAtOnce(h *op.Handle) bool {
	if h.Routing == op.RoutingNone {
		return tookNotify(h)
	}
	return b.goesAtOnce(h, 0)
}

// CancelDispatch is this rank's part of a dispatch that it cannot make: the peers, which have its counts, are told why
// and refuse the dispatch; no row moves. Collective with their Dispatch.
func (b *Buffer) CancelDispatch(token uint64, reason error, c *Call) error {
	config, err := b.config(&Call{}, plan.KindDispatch)
	if err != nil {
		return err
	}
	p := &b.params.dispatch
	var found pending
	take := func() error {
		slot, err := b.pendingOf(token)
		if err != nil {
			return err
		}
		found, slot.token = *slot, 0
		return nil
	}
	return b.launchRest(c, abi.OpDispatch, placeOfWhole(c), &p.OpHeader, take, func() int32 {
		b.fillCancelled(p, &found, token, int32(status.CodeOf(reason)), &config)
		return b.opt.Library.Dispatch(p)
	})
}

// fillCancelled sets the parameters of a dispatch that this rank cannot make.
func (b *Buffer) fillCancelled(p *abi.DispatchParams, exchange *pending, token uint64, reason int32, config *plan.Config) {
	rows := exchange.rows
	a := op.DispatchArgs{
		Token: token, RecvSegment: -1, XType: rows.XType, NumScales: rows.NumScales, Hidden: rows.Hidden, NumTopK: rows.NumTopK,
		NumExperts: rows.NumExperts, Handle: &op.Handle{RankPrefixMatrix: exchange.matrix},
	}
	giveRouting(&a, exchange.routing)
	b.fillDispatch(p, &a, config)
	p.Flags, p.Reason, p.IndexBytes, p.NumSMs = abi.DispatchCancelled, reason, 8, 0
}

// fillRows sets the parameters of a dispatch that sends rows.
func (b *Buffer) fillRows(p *abi.DispatchParams, a *op.DispatchArgs, config *plan.Config, atOnce bool) {
	b.fillDispatch(p, a, config)
	p.NumSMs = b.chooseSMs(config, plan.SMQuery{
		Kind: plan.KindDispatch, RowBytes: p.HiddenBytes + 4*uint64(a.NumScales), Tokens: int(a.NumTokens), TopK: int(plan.DispatchRows(a).NumTopK),
		RecvTokens: knownRows(a), Staged: p.RecvSegment < 0, AtOnce: atOnce,
		Copies: p.Flags&abi.DispatchCopies != 0 && a.NumWorstTokens == 0 && a.Handle.Routing != op.RoutingExpanded,
	})
}

func (b *Buffer) fillDispatch(p *abi.DispatchParams, a *op.DispatchArgs, config *plan.Config) {
	h := a.Handle
	p.Reason = 0
	if a.Cached != 0 {
		p.Flags = abi.DispatchCached
	}
	p.X, p.Scales = uint64(a.X), uint64(a.XScales)
	p.ScaleTokenStride, p.ScaleStride = a.ScaleTokenStride, a.ScaleStride
	p.TopKIdx, p.TopKWeights = uint64(a.TopKIdx), uint64(a.TopKWeights)
	p.RankPrefixMatrix, p.SendHead = uint64(h.RankPrefixMatrix), uint64(h.SendHead)
	p.Exchange, p.XType = originOf(h), int32(a.XType)
	if a.Token != 0 {
		p.Exchange = b.exchangeOf(a.Token)
	}
	if b.mayCopy(p.Exchange) {
		p.Flags |= abi.DispatchCopies
	}
	p.HiddenBytes = plan.DispatchRows(a).HiddenBytes()
	p.NumTokens, p.NumScales, p.NumTopK, p.NumExperts = a.NumTokens, a.NumScales, a.NumTopK, a.NumExperts
	p.IndexBytes = a.IndexType.Size()
	p.NumRecvTokens, p.NumWorstTokens = h.NumRecvTokens, a.NumWorstTokens
	if a.NumWorstTokens > 0 {
		p.NumRecvTokens = a.NumWorstTokens
	}
	p.RecvSegment, p.RecvSegmentOffset = segmentIndex(a.RecvSegment), a.RecvSegmentOffset
	p.RecvX, p.RecvScales = uint64(a.RecvX), uint64(a.RecvXScales)
	p.RecvTopKIdx, p.RecvTopKWeights, p.RecvSrcIdx = uint64(a.RecvTopKIdx), uint64(a.RecvTopKWeights), uint64(h.RecvSrcIdx)
	p.NVLSendChunk, p.NVLRecvChunk = config.NVLSendChunk, config.NVLRecvChunk
	p.RDMASendChunk, p.RDMARecvChunk = config.RDMASendChunk, config.RDMARecvChunk
	fillRoutedDispatch(p, a)
}

// knownRows is how many rows a dispatch brings; 0 in a worst case, where the host does not know it.
func knownRows(a *op.DispatchArgs) int {
	if a.NumWorstTokens > 0 {
		return 0
	}
	return int(a.Handle.NumRecvTokens)
}

func (b *Buffer) checkDispatch(a *op.DispatchArgs) error {
	shape := plan.DispatchRows(a)
	if err := shape.Check(b.top); err != nil {
		return err
	}
	h := a.Handle
	if err := b.checkHandle(h); err != nil {
		return err
	}
	if h.Routing != op.RoutingNone {
		return b.checkRoutedDispatch(a)
	}
	switch {
	case h.NumTokens != a.NumTokens:
		return status.InvalidArg("num_tokens", a.NumTokens, "as many as the handle was made for: "+itoa(h.NumTokens))
	case a.Cached != 0 && (a.Token != 0 || a.NumTopK != 0 || a.NumWorstTokens != 0 || a.TopKIdx != 0 || a.TopKWeights != 0):
		return status.InvalidArg("cached", true, "no token, top-k or num_worst_tokens: the handle implies them")
	case a.NumTopK == 0 && (a.TopKIdx != 0 || a.TopKWeights != 0 || a.RecvTopKIdx != 0 || a.RecvTopKWeights != 0):
		return status.InvalidArg("num_topk", 0, "1 or more where topk_idx, topk_weights or their outputs are given")
	case a.TopKWeights != 0 && a.TopKIdx == 0:
		return status.InvalidArg("topk_weights", "weights alone", "weights only together with topk_idx")
	case (a.TopKIdx != 0) != (a.TopKWeights != 0) && a.NumTokens > 0:
		return status.InvalidArg("topk_weights", "none", "weights together with topk_idx")
	case a.NumTopK > 0 && a.IndexType != op.Int32 && a.IndexType != op.Int64:
		return status.InvalidArg("index_type", int32(a.IndexType), "0 (int32) or 1 (int64)")
	}
	rows := h.NumRecvTokens
	if a.NumWorstTokens > 0 {
		rows = a.NumWorstTokens
	}
	in, out, topk, scaled := a.NumTokens > 0, rows > 0, a.NumTopK > 0, a.NumScales > 0
	index := uintptr(max(1, a.IndexType.Size()))
	if err := b.checkSegment("recv_segment", a.RecvSegment, a.RecvSegmentOffset, uint64(rows)*shape.HiddenBytes(), a.RecvX); err != nil {
		return err
	}
	return need(
		given{"x", a.X, in, 16}, given{"x_scales", a.XScales, in && scaled, 4}, given{"topk_idx", a.TopKIdx, in && topk, index},
		given{"topk_weights", a.TopKWeights, in && topk, 4},
		given{"recv_x", a.RecvX, out, 16}, given{"recv_x_scales", a.RecvXScales, out && scaled, 4},
		given{"recv_topk_idx", a.RecvTopKIdx, out && topk, index}, given{"recv_topk_weights", a.RecvTopKWeights, out && topk, 4},
		given{"handle.recv_src_idx", h.RecvSrcIdx, out, 4})
}

func (b *Buffer) checkHandle(h *op.Handle) error {
	switch {
	case h == nil:
		return status.InvalidArg("handle", "NULL", "the handle of a dispatch")
	case int(h.NumRanks) != b.size:
		return status.InvalidArg("handle.num_ranks", h.NumRanks, "the size of the buffer's group: "+itoa(int32(b.size)))
	case h.NumRecvTokens < 0:
		return status.InvalidArg("handle.num_recv_tokens", h.NumRecvTokens, "0 or more")
	case b.outdated(h):
		return status.InvalidArg("handle", "one of before release(), or of before regroup() renumbered the ranks", "that of a dispatch since")
	}
	return need(given{"handle.rank_prefix_matrix", h.RankPrefixMatrix, true, 4}, given{"handle.send_head", h.SendHead, h.NumTokens > 0, 4})
}

// endExchange compares the dispatch with the exchange of counts that it belongs to, and ends that. b.mu is held.
func (b *Buffer) endExchange(a *op.DispatchArgs) error {
	shape := plan.DispatchRows(a)
	if a.Cached != 0 {
		return b.fitsRow(shape.HiddenBytes() + 4*uint64(a.NumScales))
	}
	slot, err := b.pendingOf(a.Token)
	if err != nil {
		return err
	}
	switch {
	case slot.rows != shape:
		return status.InvalidArg("shape", rowsText(shape), "that of the notify: "+rowsText(slot.rows))
	case slot.routing != routingOf(a.Handle):
		return status.InvalidArg("handle", "another routing", "that of the notify")
	case a.NumWorstTokens == 0 && slot.received < 0:
		return status.Errorf(status.InvalidState, "dispatch before WaitCounts: the number of rows that arrive is not known yet")
	case a.NumWorstTokens == 0 && slot.received != a.Handle.NumRecvTokens:
		return status.InvalidArg("handle.num_recv_tokens", a.Handle.NumRecvTokens, "the number that the counts gave: "+itoa(slot.received))
	}
	slot.token = 0
	return nil
}
