package engine

import (
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Layout counts the tokens for each rank and expert. Local.
func (b *Buffer) Layout(a *op.LayoutArgs, c *Call) error {
	shape := plan.Layout{NumTokens: a.NumTokens, NumTopK: a.NumTopK, NumExperts: a.NumExperts, IndexType: a.IndexType}
	if err := shape.Check(b.top); err != nil {
		return err
	}
	some := a.NumTokens > 0
	if err := need(
		given{"topk_idx", a.TopKIdx, some, uintptr(a.IndexType.Size())}, given{"num_tokens_per_rank", a.NumTokensPerRank, true, 4},
		given{"num_tokens_per_rdma_rank", a.NumTokensPerRDMARank, false, 4}, given{"num_tokens_per_expert", a.NumTokensPerExpert, true, 4},
		given{"is_token_in_rank", a.IsTokenInRank, some, 1}); err != nil {
		return err
	}
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return err
	}
	p := &b.params.layout
	return b.launch(c, abi.OpLayout, placeOfWhole(c), &p.OpHeader, nil, func() int32 {
		p.NumSMs = config.NumSMs
		p.TopKIdx, p.IndexBytes = uint64(a.TopKIdx), a.IndexType.Size()
		p.NumTokens, p.NumTopK, p.NumExperts = a.NumTokens, a.NumTopK, a.NumExperts
		p.TokensPerRank, p.TokensPerNode = uint64(a.NumTokensPerRank), uint64(a.NumTokensPerRDMARank)
		p.TokensPerExpert, p.TokenInRank = uint64(a.NumTokensPerExpert), uint64(a.IsTokenInRank)
		return b.opt.Library.Layout(p)
	})
}

// Combine sums the rows that came from each token. Collective.
func (b *Buffer) Combine(a *op.CombineArgs, c *Call) error {
	if err := b.checkCombine(a); err != nil {
		return err
	}
	config, err := b.config(c, plan.KindCombine)
	if err != nil {
		return err
	}
	p, h := &b.params.combine, a.Handle
	fits := func() error { return b.fitsRow(combineRow(a)) }
	return b.launch(c, abi.OpCombine, placeOfWhole(c), &p.OpHeader, fits, func() int32 {
		copies := h.Routing == op.RoutingNone && b.mayCopy(originOf(h))
		p.NumSMs = b.chooseSMs(&config, plan.SMQuery{
			Kind: plan.KindCombine, RowBytes: 2 * uint64(a.Hidden), Tokens: int(h.NumTokens), TopK: int(max(a.NumTopK, h.NumTopK)), RecvTokens: int(h.NumRecvTokens),
			AtOnce: b.cameAtOnce(h), Copies: copies,
		})
		p.X, p.TopKWeights, p.Bias = uint64(a.X), uint64(a.TopKWeights), [2]uint64{uint64(a.Bias[0]), uint64(a.Bias[1])}
		p.RankPrefixMatrix, p.SendHead, p.RecvSrcIdx = uint64(h.RankPrefixMatrix), uint64(h.SendHead), uint64(h.RecvSrcIdx)
		p.Exchange = originOf(h)
		p.NumTokens, p.NumRecvTokens, p.Hidden, p.NumTopK = h.NumTokens, h.NumRecvTokens, int32(a.Hidden), a.NumTopK
		p.XSegment, p.XSegmentOffset = segmentIndex(a.XSegment), a.XSegmentOffset
		p.CombinedX, p.CombinedTopKWeights = uint64(a.CombinedX), uint64(a.CombinedTopKWeights)
		p.NVLSendChunk, p.NVLRecvChunk = config.NVLSendChunk, config.NVLRecvChunk
		p.RDMASendChunk, p.RDMARecvChunk = config.RDMASendChunk, config.RDMARecvChunk
		fillRoutedCombine(p, a)
		if copies {
			p.Flags |= abi.CombineCopies
		}
		return b.opt.Library.Combine(p)
	})
}

func (b *Buffer) checkCombine(a *op.CombineArgs) error {
	h := a.Handle
	if err := b.checkHandle(h); err != nil {
		return err
	}
	shape := plan.Combine{NumTokens: h.NumTokens, NumRecvTokens: h.NumRecvTokens, NumTopK: a.NumTopK, Hidden: a.Hidden}
	if err := shape.Check(b.top); err != nil {
		return err
	}
	rows, routed := h.NumRecvTokens, h.Routing != op.RoutingNone
	if routed {
		if err := b.checkRoutedCombine(a); err != nil {
			return err
		}
		if h.Routing == op.RoutingExpanded {
			rows = a.NumXRows
		}
	} else if a.NumXRows != 0 || a.Unreduced != 0 {
		return status.InvalidArg("num_x_rows", a.NumXRows, "0, nor unreduced, but with expanded rows")
	}
	if err := b.checkSegment("x_segment", a.XSegment, a.XSegmentOffset, uint64(rows)*2*uint64(a.Hidden), a.X); err != nil {
		return err
	}
	in, out, topk := rows > 0, h.NumTokens > 0, a.NumTopK > 0
	return need(
		given{"x", a.X, in, 16}, given{"topk_weights", a.TopKWeights, in && topk, 4}, given{"bias[0]", a.Bias[0], false, 16},
		given{"bias[1]", a.Bias[1], false, 16}, given{"combined_x", a.CombinedX, out, 16},
		given{"combined_topk_weights", a.CombinedTopKWeights, out && topk, 4}, given{"handle.recv_src_idx", h.RecvSrcIdx, in && !routed, 4})
}
