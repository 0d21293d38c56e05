package engine

import (
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
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
		b.fillDispatch(p, a, &config)
		p.NumSMs = b.chooseSMs(&config, plan.SMQuery{
			Kind: plan.KindDispatch, RowBytes: p.HiddenBytes + 4*uint64(a.NumScales), Tokens: int(a.NumTokens), TopK: int(plan.DispatchRows(a).NumTopK),
			RecvTokens: knownRows(a), Staged: p.RecvSegment < 0,
		})
		return b.opt.Library.Dispatch(p)
	})
}

// CancelDispatch is this rank's part of a dispatch that it cannot make: the peers, which have its counts, are told why
// and refuse the dispatch; no row moves. Collective with their Dispatch.
func (b *Buffer) CancelDispatch(token uint64, reason error, c *Call) error {
	config, err := b.config(&Call{}, plan.KindDispatch)
	if err != nil {
		return err
	}
	p := &b.params.dispatch
	a := op.DispatchArgs{Token: token, RecvSegment: -1, Handle: &op.Handle{}}
	take := func() error {
		slot, err := b.pendingOf(token)
		if err != nil {
			return err
		}
		rows := slot.rows
		a.XType, a.NumScales, a.Hidden, a.NumTopK, a.NumExperts = rows.XType, rows.NumScales, rows.Hidden, rows.NumTopK, rows.NumExperts
		a.Handle.RankPrefixMatrix, slot.token = slot.matrix, 0
		giveRouting(&a, slot.routing)
		return nil
	}
	return b.launchRest(c, abi.OpDispatch, placeOfWhole(c), &p.OpHeader, take, func() int32 {
		b.fillDispatch(p, &a, &config)
		p.Flags, p.Reason, p.IndexBytes, p.NumSMs = abi.DispatchCancelled, int32(status.CodeOf(reason)), 8, 0
		return b.opt.Library.Dispatch(p)
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
	p.Exchange, p.XType = h.Exchange, int32(a.XType)
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
	case b.outdated(h.Exchange):
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
