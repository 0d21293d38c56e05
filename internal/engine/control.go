package engine

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Clean empties the low-latency slots of a shape on every rank, of all shapes if the three sizes are 0. Collective, on
// the caller's stream.
func (b *Buffer) Clean(numMaxTokens, hidden, experts int32, c *Call) error {
	if numMaxTokens != 0 || hidden != 0 || experts != 0 {
		if err := plan.CheckSlots(numMaxTokens, hidden, experts, b.top, &b.limits); err != nil {
			return err
		}
	}
	if err := b.checkLowLatency(); err != nil {
		return err
	}
	fits := func() (err error) {
		if numMaxTokens != 0 {
			_, err = b.slot(numMaxTokens, hidden, experts)
		}
		return err
	}
	p := &b.params.clean
	return b.launch(c, abi.OpClean, onCurrent, &p.OpHeader, fits, func() int32 {
		p.NumMaxTokens, p.Hidden, p.NumExperts = numMaxTokens, hidden, experts
		code := b.opt.Library.Clean(p)
		if code == 0 {
			b.closeTickets()
		}
		return code
	})
}

// Barrier lets the caller's stream go on once the streams of all ranks have come to their Barrier. Collective.
func (b *Buffer) Barrier(c *Call) error {
	p := &b.params.barrier
	return b.launch(c, abi.OpBarrier, onCurrent, &p.OpHeader, nil, func() int32 { return b.opt.Library.Barrier(p) })
}

// UpdateMask masks a rank, so that low-latency calls neither send to it nor wait for it, or lifts the mask. Local, on
// the caller's stream.
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

// CleanMask lifts all masks. Local, on the caller's stream.
func (b *Buffer) CleanMask(c *Call) error { return b.mask(abi.MaskClean, 0, 0, 0, c) }

func (b *Buffer) mask(what, rank, value int32, out uintptr, c *Call) error {
	if !b.opt.Shrink {
		return status.Errorf(status.InvalidState, "masks need a buffer made with enable_shrink")
	}
	p := &b.params.mask
	return b.launch(c, abi.OpMask, onCurrent, &p.OpHeader, nil, func() int32 {
		p.What, p.Rank, p.Value, p.Out = what, rank, value, uint64(out)
		return b.opt.Library.Mask(p)
	})
}
