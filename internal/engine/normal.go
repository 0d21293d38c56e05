package engine

import (
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
)

// Handle is what a dispatch leaves for combine and cached dispatch: data only, valid on any buffer of the same ranks.
type Handle struct {
	NumRanks         int32
	NumTokens        int32   // T, at the source
	NumRecvTokens    int32   // rows of recv_x: N, or NumWorstTokens
	RankPrefixMatrix uintptr // int32 [R,R]: [i][j] = rows that ranks 0..i send to rank j
	SendHead         uintptr // int32 [T,R]: number of the token's row among mine to that rank, -1: not sent
	RecvSrcIdx       uintptr // int32 [N]: the row's token index at its source
}

// LayoutArgs are the arguments of Layout. Addresses are of the buffer's engine.
type LayoutArgs struct {
	NumTokens, NumTopK, NumExperts int32
	IndexType                      plan.Type
	TopKIdx                        uintptr // [in] [T,K]; -1 selects nothing
	TokensPerRank                  uintptr // [out] int32 [R]
	TokensPerNode                  uintptr // [out] int32 [nodes] or 0
	TokensPerExpert                uintptr // [out] int32 [E]
	TokenInRank                    uintptr // [out] uint8 [T,R]
}

// Layout counts what goes where. Local.
func (b *Buffer) Layout(a *LayoutArgs, c *Call) error {
	shape := plan.Layout{NumTokens: a.NumTokens, NumTopK: a.NumTopK, NumExperts: a.NumExperts, IndexType: a.IndexType}
	if err := shape.Check(b.top); err != nil {
		return err
	}
	some := a.NumTokens > 0
	if err := need(
		given{"topk_idx", a.TopKIdx, some, uintptr(a.IndexType.Size())}, given{"num_tokens_per_rank", a.TokensPerRank, true, 4},
		given{"num_tokens_per_rdma_rank", a.TokensPerNode, false, 4}, given{"num_tokens_per_expert", a.TokensPerExpert, true, 4},
		given{"is_token_in_rank", a.TokenInRank, some, 1}); err != nil {
		return err
	}
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return err
	}
	stream, err := b.begin(c, onComm)
	if err != nil {
		return err
	}
	p := &b.params.layout
	b.header(&p.OpHeader, abi.OpLayout, abi.PhaseBoth, stream)
	p.NumSMs = config.NumSMs
	p.TopKIdx, p.IndexBytes = uint64(a.TopKIdx), a.IndexType.Size()
	p.NumTokens, p.NumTopK, p.NumExperts = a.NumTokens, a.NumTopK, a.NumExperts
	p.TokensPerRank, p.TokensPerNode = uint64(a.TokensPerRank), uint64(a.TokensPerNode)
	p.TokensPerExpert, p.TokenInRank = uint64(a.TokensPerExpert), uint64(a.TokenInRank)
	code := b.opt.Library.Layout(p)
	return b.finish(c, onComm, stream, b.launched(abi.OpLayout, code, p.DeviceError))
}

// CombineArgs are the arguments of Combine.
type CombineArgs struct {
	NumTopK             int32 // K of TopKWeights; 0: none
	Hidden              int64
	XSegment            int32 // x lies in this segment; -1: anywhere
	XSegmentOffset      uint64
	X                   uintptr    // [in] [N,H] BF16
	TopKWeights         uintptr    // [in] float32 [N,K] or 0
	Bias                [2]uintptr // [in] [T,H] BF16 or 0
	Handle              *Handle    // [in]
	CombinedX           uintptr    // [out] [T,H] BF16
	CombinedTopKWeights uintptr    // [out] float32 [T,K] or 0
}

// Combine sums the rows that came from each token. Collective.
func (b *Buffer) Combine(a *CombineArgs, c *Call) error {
	if err := b.checkCombine(a); err != nil {
		return err
	}
	config, err := b.config(c, plan.KindCombine)
	if err != nil {
		return err
	}
	stream, err := b.begin(c, onComm)
	if err != nil {
		return err
	}
	if err := b.fitsRow(2*uint64(a.Hidden) + 4*uint64(a.NumTopK)); err != nil {
		return b.abandon(err)
	}
	p, h := &b.params.combine, a.Handle
	b.header(&p.OpHeader, abi.OpCombine, abi.PhaseBoth, stream)
	p.NumSMs = config.NumSMs
	p.X, p.TopKWeights, p.Bias = uint64(a.X), uint64(a.TopKWeights), [2]uint64{uint64(a.Bias[0]), uint64(a.Bias[1])}
	p.RankPrefixMatrix, p.SendHead, p.RecvSrcIdx = uint64(h.RankPrefixMatrix), uint64(h.SendHead), uint64(h.RecvSrcIdx)
	p.NumTokens, p.NumRecvTokens, p.Hidden, p.NumTopK = h.NumTokens, h.NumRecvTokens, int32(a.Hidden), a.NumTopK
	p.XSegment, p.XSegmentOffset = a.XSegment, a.XSegmentOffset
	p.CombinedX, p.CombinedTopKWeights = uint64(a.CombinedX), uint64(a.CombinedTopKWeights)
	p.NVLSendChunk, p.NVLRecvChunk = config.NVLSendChunk, config.NVLRecvChunk
	p.RDMASendChunk, p.RDMARecvChunk = config.RDMASendChunk, config.RDMARecvChunk
	code := b.opt.Library.Combine(p)
	return b.finish(c, onComm, stream, b.launched(abi.OpCombine, code, p.DeviceError))
}

func (b *Buffer) checkCombine(a *CombineArgs) error {
	h := a.Handle
	if err := b.checkHandle(h); err != nil {
		return err
	}
	shape := plan.Combine{NumTokens: h.NumTokens, NumRecvTokens: h.NumRecvTokens, NumTopK: a.NumTopK, Hidden: a.Hidden}
	if err := shape.Check(b.top); err != nil {
		return err
	}
	if err := b.checkSegment("x_segment", a.XSegment, a.XSegmentOffset, uint64(h.NumRecvTokens)*2*uint64(a.Hidden), a.X); err != nil {
		return err
	}
	in, out, topk := h.NumRecvTokens > 0, h.NumTokens > 0, a.NumTopK > 0
	return need(
		given{"x", a.X, in, 16}, given{"topk_weights", a.TopKWeights, in && topk, 4}, given{"bias[0]", a.Bias[0], false, 16},
		given{"bias[1]", a.Bias[1], false, 16}, given{"combined_x", a.CombinedX, out, 16},
		given{"combined_topk_weights", a.CombinedTopKWeights, out && topk, 4}, given{"handle.recv_src_idx", h.RecvSrcIdx, in, 4})
}
