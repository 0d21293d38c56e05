package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/status"
)

// Kernels blame a rank that waits in an exchange for a third one, as in a warm-up, which they do not see: the error
// names the third one. A rank that waits for this one stays the late one, and ranks in a circle are no endless chain. A
// rank that has made the call, and waits afterwards for one that lacks its rows too, has a network that delivers nothing.
func TestRankThatWaitsInAnExchangeIsNotBlamed(t *testing.T) {
	for _, c := range []struct {
		awaits map[int]int
		called engine.LastCall // of rank 1
		want   string
	}{
		{nil, engine.LastCall{}, "rank 1 (test) did not arrive"},
		{map[int]int{1: 2, 2: 4}, engine.LastCall{}, "rank 4 (test) did not arrive"},
		{map[int]int{1: 3}, engine.LastCall{}, "rank 1 (test) did not arrive"},
		{map[int]int{1: 2, 2: 1}, engine.LastCall{}, "rank 1 (test) did not arrive"},
		{map[int]int{1: 2}, engine.LastCall{Op: uint32(op.OpNotify), Number: 2, Buffer: 1}, "rank 1 (test) did not arrive"},
		{map[int]int{1: 2}, engine.LastCall{Op: uint32(op.OpNotify), Number: 1, Buffer: 1}, "rank 2 (test) did not arrive"},
		{map[int]int{1: 2}, engine.LastCall{Op: uint32(op.OpNotify), Number: 2, Buffer: 2}, "rank 2 (test) did not arrive"},
	} {
		r, err := nodes(t, &among{rank: 3, size: 6, awaits: c.awaits, called: map[int]engine.LastCall{1: c.called}}, 6, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.fail(abi.Failure{Code: uint32(status.Timeout), Op: uint32(op.OpNotify), Phase: abi.PhaseBoth, Rank: 3, Peer: 1, Call: 2, WaitedNS: 1e9})
		if err := r.Check(); !errors.Is(err, status.ErrTimeout) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, %v: %v, want %q", c.awaits, c.called, err, c.want)
		}
	}
}
