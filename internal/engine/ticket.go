package engine

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Which operation a ticket is for.
const (
	opDispatch = 0
	opCombine  = 1
)

// numSends is how many sends of an operation may be without their receive: the number of wire slots.
const numSends = 2

// ticket joins the two halves of a low-latency call. Its id has the slot in the low bits and a generation above, so
// that the id of an earlier call is refused.
type ticket struct {
	open   bool   // sent, not received
	epoch  uint64 // of the send: how many of the operation came before it
	word   uint32 // the slot, as the kernel library counts them
	id     uint32 // as the caller sees it
	number uint64 // of the call
	slot   uint64 // combines sent before it
	stream device.Stream
	shape  plan.LowLatency

	// Where calls in halves run on the communication stream:
	end      *device.Event // of the call, kept from call to call
	captured bool          // the call is in a graph
	outputs  outputs
}

// checkOutputs refuses a receive half that names others than its send half, which writes to them.
func (t *ticket) checkOutputs(h *half) error {
	for i, output := range h.outputs {
		if output != t.outputs[i] {
			return status.InvalidArg(outputNames[h.which][i], fmt.Sprintf("%#x", output), fmt.Sprintf("that of the send half: %#x", t.outputs[i]))
		}
	}
	return nil
}

// ticketFor returns the ticket of a receive half, or a free one with the next call number. b.mu is held.
func (b *Buffer) ticketFor(which int, phases, id uint32, shape *plan.LowLatency, stream device.Stream) (*ticket, error) {
	if phases == abi.PhaseRecv {
		return b.openTicket(which, id, shape, stream)
	}
	if err := b.admit(which); err != nil {
		return nil, err
	}
	for i := range b.tickets[which] {
		t := &b.tickets[which][i]
		if t.open {
			continue
		}
		call := abi.OpLLDispatch + which
		b.calls[call]++
		word := uint32(which*numSends + i)
		*t = ticket{word: word, id: (t.id/abi.NumTickets+1)*abi.NumTickets + word, number: b.calls[call], epoch: b.sends[which], stream: stream, shape: *shape, end: t.end}
		if which == opCombine {
			t.slot = b.combines
		}
		return t, nil
	}
	return nil, status.Errorf(status.Internal, "no free ticket")
}

// admit refuses a send that has no room: sends use the two wire slots in turn, and each keeps its slot until it was
// received. b.mu is held.
func (b *Buffer) admit(which int) error {
	for i := range b.tickets[which] {
		t := &b.tickets[which][i]
		if t.open && b.sends[which]-t.epoch >= numSends {
			call := op.Operation(abi.OpLLDispatch + which)
			return status.Errorf(status.InvalidState, "%s #%d is without its receive half, and its slot is the next one: a third has no room; "+
				"call the hook of that send first, or if it is lost, clean_low_latency_buffer on every rank", call, t.number)
		}
	}
	return nil
}

// openTicket returns the ticket of the send that a receive half belongs to.
func (b *Buffer) openTicket(which int, id uint32, shape *plan.LowLatency, stream device.Stream) (*ticket, error) {
	t := &b.tickets[which][id%numSends]
	switch {
	case t.id != id || !t.open:
		return nil, status.InvalidArg("ticket", id, "that of a send half whose receive half has not been issued yet")
	case t.shape != *shape:
		return nil, status.InvalidArg("shape", fmt.Sprintf("%+v", *shape), fmt.Sprintf("that of the send half: %+v", t.shape))
	case t.stream != stream:
		return nil, status.InvalidArg("stream", fmt.Sprintf("%#x", uint64(stream)), fmt.Sprintf("that of the send half: %#x", uint64(t.stream)))
	}
	return t, nil
}

// updateTicket opens or closes the ticket after a launch that ended with code, and returns its id.
func (b *Buffer) updateTicket(t *ticket, phases uint32, code int32) uint32 {
	switch {
	case code != 0 && phases != abi.PhaseRecv:
		t.open = false
	case code == 0:
		t.open = phases == abi.PhaseSend
		if phases != abi.PhaseRecv {
			b.sends[t.word/numSends]++
		}
		if phases != abi.PhaseRecv && t.word >= numSends {
			b.combines++
		}
	}
	return t.id
}

// closeTickets closes all tickets after a clean: what was sent is gone. b.mu is held.
func (b *Buffer) closeTickets() {
	for which := range b.tickets {
		for i := range b.tickets[which] {
			b.tickets[which][i].open = false
		}
	}
}
