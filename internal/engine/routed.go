package engine

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

func (b *Buffer) checkRouting(r plan.Routing) error {
	if b.opt.Shrink && r.Kind != op.RoutingNone {
		switch {
		case !b.opt.Library.Has(abi.CapRoutedShrink):
			return status.Errorf(status.Unsupported, "handles with a routing do not go with enable_shrink with this kernel library: their calls leave out no masked rank")
		case b.top.Nodes() > 1 && !b.opt.Library.Has(abi.CapRoutedShrinkNodes):
			return status.Errorf(status.Unsupported, "handles with a routing go with enable_shrink on one node with this kernel library: this group has %d", b.top.Nodes())
		}
	}
	if nodes := b.top.Nodes(); nodes > 1 && r.Kind != op.RoutingNone && !b.opt.Library.Has(abi.CapRoutedNodes) {
		return status.Errorf(status.Unsupported, "handles with a routing serve ranks of one node with this kernel library: this group has %d", nodes)
	}
	return r.Check(b.top)
}

// checkRoutedNotify checks what a notify with a routing, which was checked, has instead of a layout's counts.
func (b *Buffer) checkRoutedNotify(a *op.NotifyArgs) error {
	h, some := a.Handle, a.NumTokens > 0
	switch {
	case a.NumTokensPerRank != 0 || a.NumTokensPerExpert != 0 || a.IsTokenInRank != 0:
		return status.InvalidArg("num_tokens_per_rank", "a tensor", "NULL like the layout's other counts: topk_idx says it all")
	case a.NumScaleupRanks != 0 && int(a.NumScaleupRanks) != b.size && int(a.NumScaleupRanks) != b.top.NodeSize():
		return status.InvalidArg("num_scaleup_ranks", a.NumScaleupRanks, fmt.Sprintf("0, all ranks = %d or those of a node = %d", b.size, b.top.NodeSize()))
	case a.NumWorstExpanded < 0:
		return status.InvalidArg("num_worst_expanded", a.NumWorstExpanded, "0 or more")
	}
	bytes := uint64(max(a.NumTokens, 0)) * uint64(a.NumTopK) * uint64(a.IndexType.Size())
	if err := apart(tensor{"topk_idx_copy", a.TopKIdxCopy, bytes}, tensor{"topk_idx", a.TopKIdx, bytes}); err != nil {
		return err
	}
	return need(
		given{"topk_idx", a.TopKIdx, some, uintptr(a.IndexType.Size())}, given{"handle.dst_slot", h.DstSlot, some, 4},
		given{"topk_idx_copy", a.TopKIdxCopy, false, uintptr(a.IndexType.Size())},
		given{"handle.psum_recv_tokens_per_rank", h.PsumRecvTokensPerRank, true, 4},
		given{"handle.psum_recv_tokens_per_expert", h.PsumRecvTokensPerExpert, true, 4},
		given{"handle.num_recv_tokens_per_expert", h.NumRecvTokensPerExpert, true, 4},
		given{"cumulative_recv_stats", a.CumulativeRecvStats, false, 4})
}

// fillRoutedNotify sets the routing's part of the parameters, all of it: they are the last notify's.
func fillRoutedNotify(p *abi.NotifyParams, a *op.NotifyArgs) {
	h := a.Handle
	p.Routing, p.NumMaxTokens, p.NumWorstExpanded = int32(a.Routing), a.NumMaxTokens, a.NumWorstExpanded
	p.TopKIdx, p.IndexBytes, p.CumulativeStats = uint64(a.TopKIdx), a.IndexType.Size(), uint64(a.CumulativeRecvStats)
	p.TopKCopy = uint64(a.TopKIdxCopy)
	p.DstSlot, p.PsumPerRank = uint64(h.DstSlot), uint64(h.PsumRecvTokensPerRank)
	p.NumScaleupRanks = a.NumScaleupRanks
	p.PsumPerExpert, p.NumPerExpert = uint64(h.PsumRecvTokensPerExpert), uint64(h.NumRecvTokensPerExpert)
}

// routingOf is what a dispatch's handle says of the routing; nothing without one.
func routingOf(h *op.Handle) plan.Routing {
	if h.Routing == op.RoutingNone {
		return plan.Routing{}
	}
	return plan.HandleRouting(h)
}

// giveRouting completes the arguments of a dispatch that has no handle of a caller.
func giveRouting(a *op.DispatchArgs, r plan.Routing) {
	h := a.Handle
	h.Routing, h.NumTopK, h.NumExperts, h.IndexType = r.Kind, r.NumTopK, r.NumExperts, r.IndexType
	h.NumMaxTokens, h.ExpertAlignment = r.NumMaxTokens, r.ExpertAlignment
}

// keepRouting notes in the handle what the notify was given.
func keepRouting(h *op.Handle, a *op.NotifyArgs) {
	h.Routing, h.NumTopK, h.NumExperts, h.IndexType = a.Routing, a.NumTopK, a.NumExperts, a.IndexType
	h.NumMaxTokens, h.ExpertAlignment, h.TopKIdx = a.NumMaxTokens, a.ExpertAlignment, a.TopKIdx
}

// checkRoutedDispatch checks a dispatch over a handle with a routing. Its shape was checked.
func (b *Buffer) checkRoutedDispatch(a *op.DispatchArgs) error {
	h := a.Handle
	routing := plan.HandleRouting(h)
	if err := b.checkRouting(routing); err != nil {
		return err
	}
	expanded, cached := routing.Expanded(), a.Cached != 0
	switch {
	case h.NumTokens != a.NumTokens:
		return status.InvalidArg("num_tokens", a.NumTokens, "as many as the handle was made for: "+itoa(h.NumTokens))
	case a.NumTopK != 0 || a.NumExperts != 0 || a.TopKIdx != 0:
		return status.InvalidArg("topk_idx", "given", "none, nor num_topk and num_experts: the handle has a routing")
	case cached && (a.Token != 0 || a.NumWorstTokens != 0):
		return status.InvalidArg("cached", true, "no token or num_worst_tokens: the handle implies them")
	case h.NumExpandedTokens < 0:
		return status.InvalidArg("handle.num_expanded_tokens", h.NumExpandedTokens, "0 or more")
	case expanded && a.RecvTopKIdx != 0:
		return status.InvalidArg("recv_topk_idx", "a tensor", "NULL with expanded rows: a row is of one expert")
	case !expanded && a.DoZeroPadding != 0:
		return status.InvalidArg("do_zero_padding", a.DoZeroPadding, "0 but with expanded rows")
	case a.RecvScaleTokenStride < 0 || a.RecvScaleStride < 0 || (a.RecvScaleTokenStride == 0) != (a.RecvScaleStride == 0):
		return status.InvalidArg("recv_scale_stride", a.RecvScaleStride, "both strides of the received scales above 0, or both 0")
	}
	rows, outputs := h.NumRecvTokens, h.NumRecvTokens
	if a.NumWorstTokens > 0 {
		rows = a.NumWorstTokens
		outputs = rows
	}
	if expanded {
		outputs = h.NumExpandedTokens
	}
	if err := b.checkSegment("recv_segment", a.RecvSegment, a.RecvSegmentOffset, uint64(outputs)*plan.DispatchRows(a).HiddenBytes(), a.RecvX); err != nil {
		return err
	}
	in, out := a.NumTokens > 0, outputs > 0
	return need(
		given{"x", a.X, in, 16}, given{"x_scales", a.XScales, in && a.NumScales > 0, 4}, given{"topk_weights", a.TopKWeights, false, 4},
		given{"recv_x", a.RecvX, out, 16}, given{"recv_x_scales", a.RecvXScales, out && a.NumScales > 0, 4},
		given{"recv_topk_idx", a.RecvTopKIdx, false, uintptr(h.IndexType.Size())},
		given{"recv_topk_weights", a.RecvTopKWeights, out && in && a.TopKWeights != 0, 4},
		given{"topk_weights", a.TopKWeights, in && a.RecvTopKWeights != 0, 4},
		given{"handle.topk_idx", h.TopKIdx, in, uintptr(h.IndexType.Size())}, given{"handle.dst_slot", h.DstSlot, in && expanded, 4},
		given{"handle.psum_recv_tokens_per_expert", h.PsumRecvTokensPerExpert, a.DoZeroPadding != 0, 4},
		given{"handle.recv_src_metadata", h.RecvSrcMetadata, rows > 0 && (expanded || !cached), 4})
}

// fillRoutedDispatch sets the routing's part of the parameters, all of it, after the rest was set.
func fillRoutedDispatch(p *abi.DispatchParams, a *op.DispatchArgs) {
	h := a.Handle
	p.Routing = int32(h.Routing)
	p.NumMaxTokens, p.NumExpandedTokens, p.ExpertAlignment = h.NumMaxTokens, h.NumExpandedTokens, h.ExpertAlignment
	p.DstSlot, p.PsumPerExpert, p.RecvSrcMetadata = uint64(h.DstSlot), uint64(h.PsumRecvTokensPerExpert), uint64(h.RecvSrcMetadata)
	p.RecvScaleTokenStride, p.RecvScaleStride = a.RecvScaleTokenStride, a.RecvScaleStride
	if h.Routing == op.RoutingNone {
		return
	}
	if a.RecvScaleStride == 0 {
		p.RecvScaleTokenStride, p.RecvScaleStride = int64(a.NumScales), 1
	}
	if a.DoZeroPadding != 0 {
		p.Flags |= abi.DispatchZeroPadding
	}
	p.TopKIdx, p.NumTopK, p.NumExperts, p.IndexBytes = uint64(h.TopKIdx), h.NumTopK, h.NumExperts, h.IndexType.Size()
	p.RecvSrcIdx = 0
}

// checkRoutedCombine checks what a combine over a handle with a routing has beyond another one.
func (b *Buffer) checkRoutedCombine(a *op.CombineArgs) error {
	h := a.Handle
	routing := plan.HandleRouting(h)
	if err := b.checkRouting(routing); err != nil {
		return err
	}
	weights := a.TopKWeights != 0 || a.CombinedTopKWeights != 0
	switch {
	case weights && a.NumTopK != h.NumTopK:
		return status.InvalidArg("num_topk", a.NumTopK, "that of the handle with weights: "+itoa(h.NumTopK))
	case !routing.Expanded() && (a.NumXRows != 0 || a.Unreduced == 1):
		return status.InvalidArg("num_x_rows", a.NumXRows, "0, nor unreduced, but with expanded rows")
	case a.Unreduced < 0 || a.Unreduced > unreducedRanks:
		return status.InvalidArg("unreduced", a.Unreduced, "0, 1 (choices) or 2 (ranks of nodes)")
	case a.NumXRows < 0:
		return status.InvalidArg("num_x_rows", a.NumXRows, "0 or more")
	}
	in, out := h.NumRecvTokens > 0, h.NumTokens > 0
	return need(
		given{"handle.topk_idx", h.TopKIdx, out, uintptr(h.IndexType.Size())},
		given{"handle.recv_src_metadata", h.RecvSrcMetadata, in && (routing.Expanded() || b.top.Nodes() > 1), 4})
}

// unreducedRanks: every rank's row reaches the token's rank.
const unreducedRanks = 2

// fillRoutedCombine sets the routing's part of the parameters, all of it, after the rest was set.
func fillRoutedCombine(p *abi.CombineParams, a *op.CombineArgs) {
	h := a.Handle
	p.Routing, p.NumXRows, p.NumExperts, p.IndexBytes = int32(h.Routing), a.NumXRows, h.NumExperts, h.IndexType.Size()
	p.TopKIdx, p.RecvSrcMetadata = uint64(h.TopKIdx), uint64(h.RecvSrcMetadata)
	p.NumMaxTokens = 0
	if h.Routing == op.RoutingNone {
		if tookNotify(h) {
			p.NumMaxTokens = abi.AtOnceRows
		}
		return
	}
	p.NumTopK, p.RecvSrcIdx, p.NumMaxTokens = h.NumTopK, 0, h.NumMaxTokens
	switch a.Unreduced {
	case 1:
		p.Flags |= abi.CombineUnreduced
	case unreducedRanks:
		p.Flags |= abi.CombineApart
	}
}

// combineRow is the bytes of a row that a combine stages.
func combineRow(a *op.CombineArgs) uint64 {
	rows := uint64(1)
	if a.Unreduced == 1 {
		rows = uint64(a.Handle.NumTopK)
	}
	return rows*2*uint64(a.Hidden) + 4*uint64(a.NumTopK)
}
