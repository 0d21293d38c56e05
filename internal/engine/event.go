package engine

import (
	"time"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/status"
)

// waitSlice is how long one wait on the host may keep a thread before somebody looks around.
const waitSlice = 50 * time.Millisecond

// Event is a point in a stream. It may outlive the buffer that it came from.
type Event struct {
	buffer *Buffer
	ev     *device.Event
}

// NewEvent makes an event that was not recorded yet, which counts as done.
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

// Destroy frees the event. Once; work that waits for it goes on.
func (e *Event) Destroy() error { return e.ev.Destroy() }

// Record marks the present end of the stream; of stream 0 of a host-stream engine: done at once.
func (e *Event) Record(stream uintptr) error {
	if err := e.buffer.checkStream(stream); err != nil {
		return err
	}
	return e.ev.Record(device.Stream(stream))
}

// StreamWait lets the stream wait. Where the stream is the calling thread, it waits until the event is done.
func (e *Event) StreamWait(stream uintptr) error {
	if err := e.buffer.checkStream(stream); err != nil {
		return err
	}
	if e.buffer.opt.Library.Has(abi.CapHostStream) {
		return e.Wait(-1)
	}
	return e.ev.Join(device.Stream(stream))
}

// Wait waits on the host up to slice (less than 0: until done). nil: done, and the buffer has not failed; Interrupted:
// not yet; else the buffer's failure.
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
		case done:
			return e.buffer.sticky()
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

// takeEvent gives an internal event for one wait on the host; the buffer's lock is held.
func (b *Buffer) takeEvent() (*device.Event, error) {
	if n := len(b.idle); n > 0 {
		ev := b.idle[n-1]
		b.idle = b.idle[:n-1]
		return ev, nil
	}
	return b.dev.NewEvent()
}

// giveEvent takes it back after the wait; the lock is not held.
func (b *Buffer) giveEvent(ev *device.Event) {
	b.mu.Lock()
	b.idle = append(b.idle, ev)
	b.mu.Unlock()
}
