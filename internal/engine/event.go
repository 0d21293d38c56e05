package engine

import (
	"time"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/status"
)

// waitSlice bounds one wait inside the kernel library; between slices the engine checks for failures and Destroy.
const waitSlice = 50 * time.Millisecond

// Event is a point in a stream. It may outlive the buffer that it came from.
type Event struct {
	buffer *Buffer
	ev     *device.Event
}

// home is the buffer whose failures the event's waits report: the one that it came from, or what took its place.
func (e *Event) home() *Buffer {
	b := e.buffer
	for next := b.successor.Load(); next != nil; next = b.successor.Load() {
		b = next
	}
	return b
}

// NewEvent makes an event, which counts as done until it is recorded.
func (b *Buffer) NewEvent() (*Event, error) {
	if err := b.start(); err != nil {
		return nil, err
	}
	defer b.leave()
	ev, err := b.dev.NewEvent()
	if err != nil {
		return nil, err
	}
	return &Event{b, ev}, nil
}

// Destroy frees the event, once. Work that waits for it goes on.
func (e *Event) Destroy() error { return e.ev.Destroy() }

// Record moves the event to the present end of the stream. On stream 0 of a host-stream engine it is done at once.
func (e *Event) Record(stream uintptr) error {
	if err := e.home().checkStream(stream); err != nil {
		return err
	}
	return e.ev.Record(device.Stream(stream))
}

// StreamWait lets the stream wait for the event. Where the stream is the calling thread, StreamWait returns when it is
// done.
func (e *Event) StreamWait(stream uintptr) error {
	if err := e.home().checkStream(stream); err != nil {
		return err
	}
	if e.buffer.opt.Library.Has(abi.CapHostStream) {
		return e.Wait(-1)
	}
	return e.ev.Join(device.Stream(stream))
}

// Wait waits on the host up to slice, without a limit if slice is negative. nil: the event is done and the buffer has
// not failed. Interrupted: not done yet. Any other error is the buffer's failure, or the refusal of an earlier call,
// which a slice of 0 leaves to later calls.
func (e *Event) Wait(slice time.Duration) error {
	deadline := time.Now().Add(slice)
	for {
		step := waitSlice
		if slice >= 0 {
			step = max(0, min(step, time.Until(deadline)))
		}
		done, err := e.ev.Wait(step)
		switch {
		case err != nil:
			return err
		case done && slice == 0: // only asked: a refusal waits for who wants to know
			return e.home().broken()
		case done:
			e.home().endWindow()
			return e.home().outcome(callID{})
		case slice >= 0 && time.Until(deadline) <= 0:
			return errNotYet
		}
	}
}

// checkStream refuses what is no stream of this engine.
func (b *Buffer) checkStream(stream uintptr) error {
	if stream != 0 && b.opt.Library.Has(abi.CapHostStream) {
		return status.InvalidArg("stream", stream, "NULL: on this engine the calling thread is the stream")
	}
	return nil
}

// ownEvents are those that the buffer keeps from its start to its end.
func (b *Buffer) ownEvents() []**device.Event {
	events := []**device.Event{&b.order.begin, &b.order.end, &b.order.tail}
	if b.halvesOnStream() {
		for which := range b.tickets {
			for i := range b.tickets[which] {
				events = append(events, &b.tickets[which][i].end)
			}
		}
	}
	return events
}

// takeEvent returns an internal event for one wait on the host. b.mu is held.
func (b *Buffer) takeEvent() (*device.Event, error) {
	if n := len(b.idle); n > 0 {
		ev := b.idle[n-1]
		b.idle = b.idle[:n-1]
		return ev, nil
	}
	return b.dev.NewEvent()
}

// giveEvent keeps the event of a call that was waited for, for the next wait. b.mu is not held.
func (b *Buffer) giveEvent(ev *device.Event, own callID) {
	b.mu.Lock()
	b.forget(own)
	b.idle = append(b.idle, ev)
	b.mu.Unlock()
}
