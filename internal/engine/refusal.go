package engine

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

// launched call, as failure records name it. The zero value is none.
type callID struct {
	op     uint32
	number uint64
}

// refusal returns the error of a call that the kernels have refused, once; nil if there is none. The buffer works on.
// own is the caller's call, whose refusal comes first; those of calls that other threads wait for are left to them.
// b.mu is not held, and the buffer is not destroyed.
func (b *Buffer) refusal(own callID) error {
	if atomic.LoadUint32(&b.words.Refused) == 0 {
		return nil
	}
	found, ok := b.takeRefusal(own)
	if !ok {
		return nil
	}
	err := b.explainRefusal(&found) // without b.mu: it asks the group
	b.log.Debug(err.Error())        // the caller gets it
	return err
}

// takeRefusal frees the entry that it returns.
func (b *Buffer) takeRefusal(own callID) (abi.Failure, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	atomic.StoreUint32(&b.words.Refused, 0)
	chosen, entries := -1, 0
	for i := range b.words.Refusals {
		r := &b.words.Refusals[i]
		if atomic.LoadUint32(&r.Code) == 0 {
			continue
		}
		call := callID{r.Op, r.Call}
		span := b.spans.of(call)
		if span != nil && span.raised {
			atomic.StoreUint32(&r.Code, 0)
			continue
		}
		entries++
		switch {
		case call == own:
			chosen = i
		case chosen < 0 && !slices.Contains(b.awaited, call):
			chosen = i
		}
	}
	if entries > 1 || entries == 1 && chosen < 0 {
		atomic.StoreUint32(&b.words.Refused, 1) // to be raised later
	}
	if chosen < 0 {
		return abi.Failure{}, false
	}
	found := b.words.Refusals[chosen]
	if span := b.spans.of(callID{found.Op, found.Call}); span != nil {
		span.raised = true // its others are not, when they are seen
	}
	atomic.StoreUint32(&b.words.Refusals[chosen].Code, 0)
	return found, true
}

// await and forget list the calls that a thread waits for. b.mu is held.
func (b *Buffer) await(own callID) { b.awaited = append(b.awaited, own) }

func (b *Buffer) forget(own callID) {
	if i := slices.Index(b.awaited, own); i >= 0 {
		b.awaited = slices.Delete(b.awaited, i, i+1)
	}
}

// explainRefusal names the rank whose argument is wrong, the argument, what it is and what is allowed.
func (b *Buffer) explainRefusal(f *abi.Failure) error {
	head := fmt.Sprintf("%s #%d%s on rank %d", op.Operation(f.Op), f.Call, phaseText(f.Op, f.Phase), b.rank)
	if f.Field == abi.FieldExchange && (isBalance(f.Expected) || isBalance(f.Seen)) {
		return status.Errorf(status.Mismatch, "%s: ranks disagree on copies of experts: rank %d has other numbers (num_tensors, num_slots, "+
			"num_local_experts, expert_bytes, or the call itself); no rank moved a row", head, f.Peer)
	}
	if f.Field == abi.FieldExchange {
		return status.Errorf(status.Mismatch, "%s: ranks disagree on the handle: one has that of dispatch #%d, rank %d that of dispatch #%d; no rank moved a row",
			head, f.Expected&(1<<exchangeBits-1), f.Peer, f.Seen&(1<<exchangeBits-1))
	}
	if f.Field == abi.FieldCancelled {
		reason := "its program gave it up"
		if f.Seen != 0 {
			reason = status.Code(f.Seen).String()
		}
		return status.Errorf(status.Aborted, "%s: refused on every rank: rank %d has cancelled it after the exchange of counts: %s; no row was moved, the buffer works on",
			head, f.Peer, reason)
	}
	if f.Field == abi.FieldMasked {
		return status.Errorf(status.InvalidState, "%s: left out: rank %d has masked this rank, which was late or was masked by its caller. "+
			"To take it back, every rank lifts its masks (clean_mask) and calls barrier", head, f.Seen)
	}
	if int(f.Peer) != b.rank && f.Peer >= 0 {
		head += fmt.Sprintf(": refused on every rank, for rank %d has a wrong argument", f.Peer)
	}
	return explainArgument(head, f)
}

// explainArgument is the text for an argument whose contents only kernels see.
func explainArgument(head string, f *abi.Failure) error {
	wrong := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "%s: argument "+format, append([]any{head}, args...)...)
	}
	switch f.Field {
	case abi.FieldWorstTokens:
		return wrong("num_worst_tokens: got %d, allowed at least %d: so many rows arrive", f.Expected, f.Seen)
	case abi.FieldTopKIdx:
		return wrong("topk_idx: got an index %d, allowed -1 to num_experts - 1 = %d", f.Seen, f.Expected-1)
	case abi.FieldTokensPerRank:
		return wrong("num_tokens_per_rank: got %d, allowed %d: so many tokens are marked in is_token_in_rank", f.Seen, f.Expected)
	case abi.FieldTokensPerExpert:
		return wrong("num_tokens_per_expert: got %d, allowed 0 or more", f.Seen)
	case abi.FieldPrefixMatrix:
		if f.Seen == math.MinInt64 {
			return wrong("handle: got a rank_prefix_matrix that differs from that of rank %d, allowed that of the same dispatch", f.Expected)
		}
		return wrong("handle: got %d in a column of rank_prefix_matrix, allowed at least %d: columns ascend", f.Seen, f.Expected)
	case abi.FieldSendHead:
		return wrong("handle: got %d in send_head, allowed %d: places toward a rank ascend by one, as many as rank_prefix_matrix says", f.Seen, f.Expected)
	case abi.FieldSrcIdx:
		return wrong("handle: got token %d in recv_src_idx, allowed at least %d: tokens of a source ascend", f.Seen, f.Expected)
	case abi.FieldHandleRows:
		return wrong("handle: got room for %d rows, allowed at least %d: so many arrive", f.Expected, f.Seen)
	case abi.FieldLayoutRange:
		return wrong("handle: got a layout_range of %d rows from row %d, allowed at most %d rows, among those of their expert",
			uint32(f.Seen), f.Seen>>32, f.Expected)
	case abi.FieldSrcInfo:
		return wrong("handle: got token %d in src_info, allowed ascending numbers below %d", f.Seen, f.Expected)
	case abi.FieldWorstExpanded:
		return wrong("num_worst_expanded: got %d, allowed at least %d: so many expanded rows arrive "+
			"(in V2 without CPU sync there is room for tokens that name no expert twice)", f.Expected, f.Seen)
	case abi.FieldDstSlot:
		return wrong("handle: got row %d in dst_slot, allowed what the dispatch wrote: a row below %d for each selected expert, -1 elsewhere", f.Seen, f.Expected)
	case abi.FieldSrcMetadata:
		return wrong("handle: got row %d in recv_src_metadata, allowed rows of x, below %d", f.Seen, f.Expected)
	case abi.FieldOperation:
		return status.Errorf(status.InvalidArgument, "%s: two sends are without their receive half: call the hooks, or clean_low_latency_buffer", head)
	}
	return status.Errorf(status.InvalidArgument, "%s: argument %d: got %d, allowed %d", head, f.Field, f.Seen, f.Expected)
}
