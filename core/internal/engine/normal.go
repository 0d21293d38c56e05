package engine

import (
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core/internal/abi"
	"github.com/deepep-go/deepep/core/internal/plan"
	"github.com/deepep-go/deepep/core/internal/status"
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
	return b.finish(c, onComm, stream, launched(abi.OpLayout, code, p.DeviceError))
}

// NotifyArgs are the arguments of Notify, the first step of a dispatch.
type NotifyArgs struct {
	plan.Rows
	ExpertAlignment int32
	TokensPerRank   uintptr // [in] int32 [R]
	TokensPerExpert uintptr // [in] int32 [E] or 0
	TokenInRank     uintptr // [in] uint8 [T,R]
	Handle          *Handle // [inout] matrices filled on the stream; NumTokens, NumRanks set now
}

const numPending = 16

// pending is an exchange of counts whose dispatch has not come yet.
type pending struct {
	token     uint64
	rows      plan.Rows
	received  int32 // rows that arrive, once the counts were waited for; -1: not yet
	perExpert int   // entries that the kernel writes
	page      []byte
	address   uint64
}

// Notify exchanges counts among all ranks and returns a token for WaitCounts and Dispatch. Collective.
func (b *Buffer) Notify(a *NotifyArgs, c *Call) (token uint64, err error) {
	if err := b.checkNotify(a); err != nil {
		return 0, err
	}
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return 0, err
	}
	stream, err := b.begin(c, onComm)
	if err != nil {
		return 0, err
	}
	if err := b.fitsRow(a.HiddenBytes() + 4*uint64(a.NumScales)); err != nil {
		return 0, b.abandon(err)
	}
	p := &b.params.notify
	slot, err := b.reserve(a)
	if err != nil {
		return 0, b.abandon(err)
	}
	b.header(&p.OpHeader, abi.OpNotify, abi.PhaseBoth, stream)
	slot.token = p.Call
	p.NumSMs = config.NumSMs
	p.TokensPerRank, p.TokensPerExpert, p.TokenInRank = uint64(a.TokensPerRank), uint64(a.TokensPerExpert), uint64(a.TokenInRank)
	p.NumTokens, p.NumTopK, p.NumExperts = a.NumTokens, a.NumTopK, a.NumExperts
	p.ExpertAlignment, p.NumWorstTokens, p.NumScales = a.ExpertAlignment, a.NumWorstTokens, a.NumScales
	p.HiddenBytes = a.HiddenBytes()
	p.RankPrefixMatrix, p.SendHead = uint64(a.Handle.RankPrefixMatrix), uint64(a.Handle.SendHead)
	p.HostCounts, p.Counts = 0, 0
	if a.NumWorstTokens == 0 {
		p.HostCounts, p.Counts = hostAddress(slot.page), slot.address
	}
	if a.TokensPerExpert == 0 {
		p.NumExperts = 0
	}
	code := b.opt.Library.Notify(p)
	a.Handle.NumRanks, a.Handle.NumTokens = int32(b.size), a.NumTokens
	token = slot.token
	return token, b.finish(c, onComm, stream, launched(abi.OpNotify, code, p.DeviceError))
}

func (b *Buffer) checkNotify(a *NotifyArgs) error {
	if err := a.Rows.Check(b.top); err != nil {
		return err
	}
	if err := plan.CheckAlignment(a.ExpertAlignment); err != nil {
		return err
	}
	if a.Handle == nil {
		return status.InvalidArg("handle", "NULL", "a handle whose matrices are to be filled")
	}
	return need(
		given{"num_tokens_per_rank", a.TokensPerRank, true, 4},
		given{"num_tokens_per_expert", a.TokensPerExpert, false, 4},
		given{"is_token_in_rank", a.TokenInRank, a.NumTokens > 0, 1},
		given{"handle.rank_prefix_matrix", a.Handle.RankPrefixMatrix, true, 4},
		given{"handle.send_head", a.Handle.SendHead, a.NumTokens > 0, 4})
}

// reserve takes the place of the oldest exchange: nobody has sixteen under way, so that one was given up.
func (b *Buffer) reserve(a *NotifyArgs) (*pending, error) {
	slot := &b.pending[(b.calls[abi.OpNotify]+1)%numPending]
	local := 0
	if a.TokensPerExpert != 0 {
		local = int(a.NumExperts) / b.size
	}
	if err := b.countsRoom(slot, local); err != nil {
		return nil, err
	}
	slot.rows, slot.received, slot.perExpert = a.Rows, -1, local
	return slot, nil
}

// WaitCounts waits up to slice (less than 0: until they are there) for the counts of an exchange: rows that arrive, and
// for each local expert, rounded up to the alignment. Interrupted: not yet. perExpert may be nil.
func (b *Buffer) WaitCounts(token uint64, slice time.Duration, perExpert []int32) (received int, err error) {
	if err := b.start(); err != nil {
		return 0, err
	}
	defer b.leave()
	b.mu.Lock()
	slot, err := b.exchange(token)
	var at pending
	if err == nil {
		at = *slot
	}
	b.mu.Unlock()
	switch {
	case err != nil:
		return 0, err
	case at.rows.NumWorstTokens > 0:
		return 0, status.InvalidArg("token", token, "an exchange without num_worst_tokens: with it nobody waits for counts")
	case perExpert != nil && len(perExpert) != at.perExpert:
		return 0, status.InvalidArg("per_expert", len(perExpert), "one entry for each local expert whose counts were given")
	}
	if err := b.awaitWord(at.page, token, slice); err != nil {
		return 0, err
	}
	head := (*abi.Counts)(unsafe.Pointer(unsafe.SliceData(at.page)))
	if head.NumRecvTokens < 0 {
		if err := b.sticky(); err != nil {
			return 0, err
		}
		return 0, status.Errorf(status.Internal, "notify #%d left no counts and no reason", token)
	}
	copy(perExpert, unsafe.Slice((*int32)(unsafe.Pointer(&at.page[countsHead])), at.perExpert))
	b.mu.Lock()
	if slot.token == token {
		slot.received = head.NumRecvTokens
	}
	b.mu.Unlock()
	return int(head.NumRecvTokens), nil
}

// exchange finds the place of a token. The lock is held.
func (b *Buffer) exchange(token uint64) (*pending, error) {
	slot := &b.pending[token%numPending]
	if token == 0 || slot.token != token {
		return nil, status.InvalidArg("token", token, "that of a notify whose dispatch has not been issued yet")
	}
	return slot, nil
}

// DispatchArgs are the arguments of Dispatch, the second step: the rows.
type DispatchArgs struct {
	plan.Rows                // as in the first step; NumTopK, NumExperts and NumWorstTokens are 0 when cached
	Cached            bool   // as the handle says: no token, no top-k
	Token             uint64 // of Notify; 0 when cached
	IndexType         plan.Type
	X                 uintptr // [in] [T,H]
	XScales           uintptr // [in] [T,S] 4-byte elements or 0, with the strides below in elements
	ScaleTokenStride  int64
	ScaleStride       int64
	TopKIdx           uintptr // [in] [T,K] or 0
	TopKWeights       uintptr // [in] float32 [T,K] or 0
	Handle            *Handle // [in]; RecvSrcIdx is filled unless cached
	RecvSegment       int32   // recv_x lies in this segment; -1: anywhere
	RecvSegmentOffset uint64
	RecvX             uintptr // [out] [N,H]
	RecvXScales       uintptr // [out] [N,S] contiguous
	RecvTopKIdx       uintptr // [out] [N,K] local expert or -1
	RecvTopKWeights   uintptr // [out] float32 [N,K]
}

// Dispatch sends the rows. Collective.
func (b *Buffer) Dispatch(a *DispatchArgs, c *Call) error {
	if err := b.checkDispatch(a); err != nil {
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
	if err := b.claim(a); err != nil {
		return b.abandon(err)
	}
	p := &b.params.dispatch
	b.header(&p.OpHeader, abi.OpDispatch, abi.PhaseBoth, stream)
	if a.Cached {
		p.Flags = abi.DispatchCached
	}
	fillDispatch(p, a, &config)
	code := b.opt.Library.Dispatch(p)
	return b.finish(c, onComm, stream, launched(abi.OpDispatch, code, p.DeviceError))
}

func fillDispatch(p *abi.DispatchParams, a *DispatchArgs, config *plan.Config) {
	h := a.Handle
	p.NumSMs = config.NumSMs
	p.X, p.Scales = uint64(a.X), uint64(a.XScales)
	p.ScaleTokenStride, p.ScaleStride = a.ScaleTokenStride, a.ScaleStride
	p.TopKIdx, p.TopKWeights = uint64(a.TopKIdx), uint64(a.TopKWeights)
	p.RankPrefixMatrix, p.SendHead = uint64(h.RankPrefixMatrix), uint64(h.SendHead)
	p.HiddenBytes = a.HiddenBytes()
	p.NumTokens, p.NumScales, p.NumTopK, p.NumExperts = a.NumTokens, a.NumScales, a.NumTopK, a.NumExperts
	p.IndexBytes = a.IndexType.Size()
	p.NumRecvTokens, p.NumWorstTokens = h.NumRecvTokens, a.NumWorstTokens
	if a.NumWorstTokens > 0 {
		p.NumRecvTokens = a.NumWorstTokens
	}
	p.RecvSegment, p.RecvSegmentOffset = a.RecvSegment, a.RecvSegmentOffset
	p.RecvX, p.RecvScales = uint64(a.RecvX), uint64(a.RecvXScales)
	p.RecvTopKIdx, p.RecvTopKWeights, p.RecvSrcIdx = uint64(a.RecvTopKIdx), uint64(a.RecvTopKWeights), uint64(h.RecvSrcIdx)
	p.NVLSendChunk, p.NVLRecvChunk = config.NVLSendChunk, config.NVLRecvChunk
	p.RDMASendChunk, p.RDMARecvChunk = config.RDMASendChunk, config.RDMARecvChunk
}

func (b *Buffer) checkDispatch(a *DispatchArgs) error {
	if err := a.Rows.Check(b.top); err != nil {
		return err
	}
	h := a.Handle
	if err := b.checkHandle(h); err != nil {
		return err
	}
	switch {
	case h.NumTokens != a.NumTokens:
		return status.InvalidArg("num_tokens", a.NumTokens, "as many as the handle was made for: "+itoa(h.NumTokens))
	case a.Cached && (a.Token != 0 || a.NumTopK != 0 || a.NumWorstTokens != 0 || a.TopKIdx != 0 || a.TopKWeights != 0):
		return status.InvalidArg("cached", true, "neither token nor top-k nor num_worst_tokens: the handle has it all")
	case a.NumTopK == 0 && (a.TopKIdx != 0 || a.TopKWeights != 0 || a.RecvTopKIdx != 0 || a.RecvTopKWeights != 0):
		return status.InvalidArg("num_topk", 0, "1 or more where topk_idx, topk_weights or their outputs are given")
	case a.TopKWeights != 0 && a.TopKIdx == 0:
		return status.InvalidArg("topk_weights", "weights alone", "weights only together with topk_idx")
	case (a.TopKIdx != 0) != (a.TopKWeights != 0) && a.NumTokens > 0:
		return status.InvalidArg("topk_weights", "none", "weights together with topk_idx")
	case a.NumTopK > 0 && a.IndexType != plan.Int32 && a.IndexType != plan.Int64:
		return status.InvalidArg("index_type", int32(a.IndexType), "0 (int32) or 1 (int64)")
	}
	rows := h.NumRecvTokens
	if a.NumWorstTokens > 0 {
		rows = a.NumWorstTokens
	}
	in, out, topk, scaled := a.NumTokens > 0, rows > 0, a.NumTopK > 0, a.NumScales > 0
	index := uintptr(max(1, a.IndexType.Size()))
	if err := b.checkSegment("recv_segment", a.RecvSegment, a.RecvSegmentOffset, uint64(rows)*a.HiddenBytes(), a.RecvX); err != nil {
		return err
	}
	return need(
		given{"x", a.X, in, 16}, given{"x_scales", a.XScales, in && scaled, 4}, given{"topk_idx", a.TopKIdx, in && topk, index},
		given{"topk_weights", a.TopKWeights, in && topk, 4},
		given{"recv_x", a.RecvX, out, 16}, given{"recv_x_scales", a.RecvXScales, out && scaled, 4},
		given{"recv_topk_idx", a.RecvTopKIdx, out && topk, index}, given{"recv_topk_weights", a.RecvTopKWeights, out && topk, 4},
		given{"handle.recv_src_idx", h.RecvSrcIdx, out, 4})
}

func (b *Buffer) checkHandle(h *Handle) error {
	switch {
	case h == nil:
		return status.InvalidArg("handle", "NULL", "the handle of a dispatch")
	case int(h.NumRanks) != b.size:
		return status.InvalidArg("handle.num_ranks", h.NumRanks, "the size of the buffer's group: "+itoa(int32(b.size)))
	case h.NumRecvTokens < 0:
		return status.InvalidArg("handle.num_recv_tokens", h.NumRecvTokens, "0 or more")
	}
	return need(given{"handle.rank_prefix_matrix", h.RankPrefixMatrix, true, 4}, given{"handle.send_head", h.SendHead, h.NumTokens > 0, 4})
}

// claim ends the exchange that the dispatch belongs to, after comparing both steps. The lock is held.
func (b *Buffer) claim(a *DispatchArgs) error {
	if a.Cached {
		return b.fitsRow(a.HiddenBytes() + 4*uint64(a.NumScales))
	}
	slot, err := b.exchange(a.Token)
	if err != nil {
		return err
	}
	switch {
	case slot.rows != a.Rows:
		return status.InvalidArg("shape", a.Rows, "that of the notify: "+rowsText(slot.rows))
	case a.NumWorstTokens == 0 && slot.received < 0:
		return status.Errorf(status.InvalidState, "dispatch before the counts of its exchange were waited for: only they say how many rows arrive")
	case a.NumWorstTokens == 0 && slot.received != a.Handle.NumRecvTokens:
		return status.InvalidArg("handle.num_recv_tokens", a.Handle.NumRecvTokens, "the number that the counts gave: "+itoa(slot.received))
	}
	slot.token = 0
	return nil
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
	return b.finish(c, onComm, stream, launched(abi.OpCombine, code, p.DeviceError))
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
