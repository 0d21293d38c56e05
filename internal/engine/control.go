package engine

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Clean brings the low-latency slots of a shape (all three 0: of every shape) back to empty on every rank. Collective, on
// the caller's stream.
func (b *Buffer) Clean(numMaxTokens, hidden, experts int32, c *Call) error {
	if numMaxTokens != 0 || hidden != 0 || experts != 0 {
		if err := plan.CheckSlots(numMaxTokens, hidden, experts, b.top, &b.limits); err != nil {
			return err
		}
	}
	stream, err := b.beginLowLatency(c, onCurrent)
	if err != nil {
		return err
	}
	if numMaxTokens != 0 {
		if _, err := b.slot(numMaxTokens, hidden, experts); err != nil {
			return b.abandon(err)
		}
	}
	p := &b.params.clean
	b.header(&p.OpHeader, abi.OpClean, abi.PhaseBoth, stream)
	p.NumMaxTokens, p.Hidden, p.NumExperts = numMaxTokens, hidden, experts
	code := b.opt.Library.Clean(p)
	if code == 0 {
		for op := range b.tickets { // what was sent is gone: nothing is left to receive
			for i := range b.tickets[op] {
				b.tickets[op][i].open = false
			}
		}
	}
	return b.finish(c, onCurrent, stream, b.launched(abi.OpClean, code, p.DeviceError))
}

// Barrier lets the caller's stream go on when every rank's has come there. Collective.
func (b *Buffer) Barrier(c *Call) error {
	stream, err := b.begin(c, onCurrent)
	if err != nil {
		return err
	}
	p := &b.params.barrier
	b.header(&p.OpHeader, abi.OpBarrier, abi.PhaseBoth, stream)
	code := b.opt.Library.Barrier(p)
	return b.finish(c, onCurrent, stream, b.launched(abi.OpBarrier, code, p.DeviceError))
}

// UpdateMask masks a rank (nothing is sent to it or awaited from it) or takes the mask away. Local, on the caller's stream.
func (b *Buffer) UpdateMask(rank int32, masked bool, c *Call) error {
	if rank < 0 || int(rank) >= b.size {
		return status.InvalidArg("rank", rank, fmt.Sprintf("0 to %d", b.size-1))
	}
	value := int32(0)
	if masked {
		value = 1
	}
	return b.mask(abi.MaskUpdate, rank, value, 0, c)
}

// QueryMask fills int32 [R]: 1 = masked. Local, on the caller's stream.
func (b *Buffer) QueryMask(out uintptr, c *Call) error {
	if err := need(given{"mask_status", out, true, 4}); err != nil {
		return err
	}
	return b.mask(abi.MaskQuery, 0, 0, out, c)
}

// CleanMask takes all masks away. Local, on the caller's stream.
func (b *Buffer) CleanMask(c *Call) error { return b.mask(abi.MaskClean, 0, 0, 0, c) }

func (b *Buffer) mask(what, rank, value int32, out uintptr, c *Call) error {
	if !b.opt.Shrink {
		return status.Errorf(status.InvalidState, "masks need a buffer made with enable_shrink")
	}
	stream, err := b.begin(c, onCurrent)
	if err != nil {
		return err
	}
	p := &b.params.mask
	b.header(&p.OpHeader, abi.OpMask, abi.PhaseBoth, stream)
	p.What, p.Rank, p.Value, p.Out = what, rank, value, uint64(out)
	code := b.opt.Library.Mask(p)
	return b.finish(c, onCurrent, stream, b.launched(abi.OpMask, code, p.DeviceError))
}
