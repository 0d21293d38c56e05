package engine

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

const numPending = 16

// pending is an exchange of counts whose dispatch was not issued yet.
type pending struct {
	token     uint64
	rows      plan.Rows
	routing   plan.Routing
	received  int32 // rows that arrive, once the counts were waited for; -1: not yet
	perExpert int   // entries that the kernel writes
	matrix    uintptr
	page      []byte
	address   uint64
}

// Notify exchanges counts among all ranks and returns a token for WaitCounts and Dispatch. Collective.
func (b *Buffer) Notify(a *op.NotifyArgs, c *Call) (token uint64, err error) {
	if err := b.checkNotify(a); err != nil {
		return 0, err
	}
	config, err := b.config(c, plan.KindDispatch)
	if err != nil {
		return 0, err
	}
	p := &b.params.notify
	var slot *pending
	reserve := func() (err error) {
		if err = b.fitsRow(plan.NotifyRows(a).HiddenBytes() + 4*uint64(a.NumScales)); err == nil {
			slot, err = b.reservePending(a)
		}
		return err
	}
	err = b.launch(c, abi.OpNotify, placeOfWhole(c), &p.OpHeader, reserve, func() int32 {
		token, slot.token = p.Call, p.Call
		b.fillNotify(p, a, &config)
		if a.NumWorstTokens == 0 {
			p.HostCounts, p.Counts = hostAddress(slot.page), slot.address
		}
		keepRouting(a.Handle, a)
		a.Handle.NumRanks, a.Handle.NumTokens, a.Handle.Exchange = int32(b.size), a.NumTokens, b.handleOf(p.Call, device.Stream(p.Stream))
		return b.opt.Library.Notify(p)
	})
	return token, err
}

// fillNotify sets the parameters of a notify but for the host's counts.
func (b *Buffer) fillNotify(p *abi.NotifyParams, a *op.NotifyArgs, config *plan.Config) {
	p.NumSMs = config.NumSMs
	p.TokensPerRank, p.TokensPerExpert, p.TokenInRank = uint64(a.NumTokensPerRank), uint64(a.NumTokensPerExpert), uint64(a.IsTokenInRank)
	p.NumTokens, p.NumTopK, p.NumExperts = a.NumTokens, a.NumTopK, a.NumExperts
	p.ExpertAlignment, p.NumWorstTokens, p.NumScales = a.ExpertAlignment, a.NumWorstTokens, a.NumScales
	p.HiddenBytes, p.XType = plan.NotifyRows(a).HiddenBytes(), int32(a.XType)
	p.RankPrefixMatrix, p.SendHead = uint64(a.Handle.RankPrefixMatrix), uint64(a.Handle.SendHead)
	p.HostCounts, p.Counts = 0, 0
	if a.NumTokensPerExpert == 0 && a.Routing == op.RoutingNone {
		p.NumExperts = 0
	}
	fillRoutedNotify(p, a)
}

func (b *Buffer) checkNotify(a *op.NotifyArgs) error {
	if err := b.checkRouting(plan.NotifyRouting(a)); err != nil {
		return err
	}
	if err := plan.NotifyRows(a).Check(b.top); err != nil {
		return err
	}
	if err := plan.CheckAlignment(a.ExpertAlignment); err != nil {
		return err
	}
	if a.Handle == nil {
		return status.InvalidArg("handle", "NULL", "a handle whose matrices are to be filled")
	}
	counted := a.Routing == op.RoutingNone
	if counted && a.TopKIdxCopy != 0 {
		return status.InvalidArg("topk_idx_copy", "a tensor", "NULL without a routing, which has no topk_idx")
	}
	if !counted {
		if err := b.checkRoutedNotify(a); err != nil {
			return err
		}
	}
	return need(
		given{"num_tokens_per_rank", a.NumTokensPerRank, counted, 4},
		given{"num_tokens_per_expert", a.NumTokensPerExpert, false, 4},
		given{"is_token_in_rank", a.IsTokenInRank, counted && a.NumTokens > 0, 1},
		given{"handle.rank_prefix_matrix", a.Handle.RankPrefixMatrix, true, 4},
		given{"handle.send_head", a.Handle.SendHead, a.NumTokens > 0, 4})
}

// reservePending takes a free slot, or that of the oldest exchange, which counts as given up: callers have far fewer than
// sixteen in flight. b.mu is held.
func (b *Buffer) reservePending(a *op.NotifyArgs) (*pending, error) {
	slot := &b.pending[(b.calls[abi.OpNotify]+1)%numPending]
	for i := range b.pending {
		if b.pending[i].token < slot.token { // a thread may be late with its dispatch while others make many
			slot = &b.pending[i]
		}
	}
	local := 0
	if a.NumTokensPerExpert != 0 || a.Routing != op.RoutingNone {
		local = int(a.NumExperts) / b.size
	}
	if err := b.countsRoom(slot, local); err != nil {
		return nil, err
	}
	slot.rows, slot.received, slot.perExpert, slot.matrix = plan.NotifyRows(a), -1, local, a.Handle.RankPrefixMatrix
	slot.routing = plan.Routing{}
	if a.Routing != op.RoutingNone {
		slot.routing = plan.NotifyRouting(a)
	}
	return slot, nil
}

// WaitCounts waits up to slice, without a limit if slice is negative, for the counts of an exchange: the rows that
// arrive, and those for each local expert, rounded up to the alignment. Interrupted: not there yet. perExpert may be
// nil.
func (b *Buffer) WaitCounts(token uint64, slice time.Duration, perExpert []int32) (received int, err error) {
	if err := b.startAwake(); err != nil {
		return 0, err
	}
	defer b.leave()
	b.mu.Lock()
	slot, err := b.pendingOf(token)
	var found pending
	if err == nil {
		found = *slot
	}
	b.mu.Unlock()
	switch {
	case err != nil:
		return 0, err
	case found.rows.NumWorstTokens > 0:
		return 0, status.InvalidArg("token", token, "an exchange without num_worst_tokens: with it no counts are written")
	case perExpert != nil && len(perExpert) != found.perExpert:
		return 0, status.InvalidArg("per_expert", len(perExpert), "one entry for each local expert whose counts were given")
	}
	if err := b.awaitWord(found.page, token, slice); err != nil {
		return 0, err
	}
	head := (*abi.Counts)(unsafe.Pointer(unsafe.SliceData(found.page)))
	if head.NumRecvTokens < 0 {
		b.endRefused(slot, token)
		if err := b.outcome(callID{uint32(op.OpNotify), token}); err != nil {
			return 0, err
		}
		return 0, status.Errorf(status.Aborted, "notify #%d was refused, as another wait has been told", token)
	}
	copy(perExpert, unsafe.Slice((*int32)(unsafe.Pointer(&found.page[countsHead])), found.perExpert))
	b.mu.Lock()
	if slot.token == token {
		slot.received = head.NumRecvTokens
	}
	b.mu.Unlock()
	return int(head.NumRecvTokens), nil
}

// endRefused ends an exchange that every rank has refused: no rank dispatches it.
func (b *Buffer) endRefused(slot *pending, token uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if slot.token == token {
		slot.token = 0
	}
}

// pendingOf returns the exchange of a token. b.mu is held.
func (b *Buffer) pendingOf(token uint64) (*pending, error) {
	slot := &b.pending[token%numPending]
	for i := 0; slot.token != token && i < numPending; i++ {
		slot = &b.pending[i]
	}
	if token == 0 || slot.token != token {
		return nil, status.InvalidArg("token", token, fmt.Sprintf("that of a notify whose dispatch has not been issued yet, one of the last %d", numPending))
	}
	return slot, nil
}
