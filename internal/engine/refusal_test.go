package engine_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/status"
)

func wrongIndex(operation, number uint64) abi.Failure {
	return abi.Failure{Code: uint32(status.InvalidArgument), Op: uint32(operation), Phase: abi.PhaseBoth, Field: abi.FieldTopKIdx, Call: number, Expected: 8, Seen: 1000}
}

// Each of them raises the error of an earlier call, once and by name, and the buffer works on.
func TestRefusalsAreRaisedOnce(t *testing.T) {
	r := newRig(t)
	event, err := r.NewEvent()
	r.must(err)
	defer func() { r.must(event.Destroy()) }()
	call := &engine.Call{Stream: 1}
	for name, raise := range map[string]func() error{
		"next call": func() error { return r.layout(call) }, "check": r.Check, "event": func() error { return event.Wait(time.Millisecond) },
		"send": func() error { _, err := r.half(abi.PhaseSend, 0, 1); return err },
	} {
		r.must(r.layout(call))
		r.read()
		r.refuse(wrongIndex(abi.OpLayout, 7))
		r.must(event.Wait(0)) // it only asks
		err := raise()
		if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "layout #7 on rank 0: argument topk_idx: got an index 1000, allowed -1 to num_experts - 1 = 7") {
			t.Errorf("%s: %v", name, err)
		}
		if strings.Contains(r.read(), "layout") {
			t.Errorf("%s: the call that raised was launched", name)
		}
		r.must(r.layout(call))
		r.must(r.Check())
	}
}

func TestSeveralRefusalsAreRaisedInTurn(t *testing.T) {
	r := newRig(t)
	for number := range uint64(abi.MaxRefusals + 2) {
		r.refuse(wrongIndex(abi.OpLayout, number+1))
	}
	for number := range abi.MaxRefusals {
		if err := r.Check(); err == nil || !strings.Contains(err.Error(), "layout #"+string(rune('1'+number))) {
			t.Errorf("refusal %d: %v", number, err)
		}
	}
	r.must(r.Check())
}

// A receive half and a dispatch belong to what peers are in already: they are launched, and the error waits.
func TestRefusalsDoNotStopSecondParts(t *testing.T) {
	r := newRig(t)
	ticket, err := r.half(abi.PhaseSend, 0, 1)
	r.must(err)
	r.refuse(wrongIndex(abi.OpLLDispatch, 1))
	_, err = r.half(abi.PhaseRecv, ticket, 1)
	r.must(err)
	if err := r.Check(); !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("after the receive half: %v", err)
	}
	r.must(r.Check())
}

func TestRefusalsNameEveryArgument(t *testing.T) {
	r := newRig(t)
	for field, want := range map[uint32]string{
		abi.FieldWorstTokens: "argument num_worst_tokens: got 3, allowed at least 5", abi.FieldTopKIdx: "argument topk_idx: got an index 5",
		abi.FieldTokensPerRank: "argument num_tokens_per_rank: got 5, allowed 3", abi.FieldTokensPerExpert: "argument num_tokens_per_expert: got 5",
		abi.FieldPrefixMatrix: "argument handle: got 5 in a column of rank_prefix_matrix", abi.FieldSendHead: "argument handle: got 5 in send_head",
		abi.FieldSrcIdx: "argument handle: got token 5 in recv_src_idx", abi.FieldHandleRows: "argument handle: got room for 3 rows",
		abi.FieldLayoutRange: "argument handle: got a layout_range of 5 rows", abi.FieldSrcInfo: "argument handle: got token 5 in src_info",
		abi.FieldWorstExpanded: "argument num_worst_expanded: got 3, allowed at least 5", abi.FieldDstSlot: "argument handle: got row 5 in dst_slot",
		abi.FieldSrcMetadata: "argument handle: got row 5 in recv_src_metadata",
	} {
		r.refuse(abi.Failure{Code: uint32(status.InvalidArgument), Op: uint32(op.OpCombine), Call: 2, Field: field, Expected: 3, Seen: 5})
		if err := r.Check(); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), want) {
			t.Errorf("field %d: %v, want %q", field, err, want)
		}
	}
	r.refuse(abi.Failure{Code: uint32(status.InvalidArgument), Op: uint32(op.OpCombine), Call: 2, Peer: 3, Field: abi.FieldPrefixMatrix, Expected: 1, Seen: math.MinInt64})
	if err := r.Check(); err == nil || !strings.Contains(err.Error(), "refused on every rank, for rank 3") || !strings.Contains(err.Error(), "differs from that of rank 1") {
		t.Errorf("another rank's matrix: %v", err)
	}
	r.refuse(abi.Failure{Code: uint32(status.InvalidState), Op: uint32(op.OpBarrier), Call: 2, Peer: 3, Field: abi.FieldMasked, Seen: 3})
	if err := r.Check(); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "barrier #2 on rank 0: left out: rank 3 has masked this rank") {
		t.Errorf("left out: %v", err)
	}
	r.refuse(abi.Failure{Code: uint32(status.Mismatch), Op: uint32(op.OpCombine), Call: 2, Peer: 3, Field: abi.FieldExchange, Expected: 4, Seen: 5})
	if err := r.Check(); !errors.Is(err, status.ErrMismatch) || !strings.Contains(err.Error(), "dispatch #4, rank 3 that of dispatch #5") {
		t.Errorf("two exchanges: %v", err)
	}
}
