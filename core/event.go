package core

import (
	"time"

	"github.com/deepep-go/deepep/internal/engine"
)

// Call orders an operation among other work. nil is the zero value: synchronous, after stream 0.
type Call struct {
	// Async: the operation is done when Event is. Otherwise Stream waits for it; where the engine's stream is the
	// calling thread (Info.HostStream), the call returns when it is done.
	Async    bool
	Stream   uintptr // the caller's current stream; 0: the default one
	Previous *Event  // the operation begins after this event instead of after the present work of Stream
	Event    *Event  // recorded at the operation's end
	Config   *Config // of normal-mode operations; nil: the default chunks, and the library's choice of SMs
}

// engine is the call in the engine's types.
func (c *Call) engine() *engine.Call {
	if c == nil {
		return &engine.Call{}
	}
	return &engine.Call{Async: c.Async, Stream: c.Stream, Previous: (*engine.Event)(c.Previous), Event: (*engine.Event)(c.Event), Config: c.Config}
}

// Event is a point in a stream. Methods may be called from any goroutine. An event may outlive the buffer that made it.
type Event engine.Event

// Record moves the event to the present end of a stream of the caller. On stream 0 of an engine whose stream is the
// calling thread it is done at once.
func (e *Event) Record(stream uintptr) error { return (*engine.Event)(e).Record(stream) }

// StreamWait lets a stream wait for the event. Where the stream is the calling thread, StreamWait returns when the
// event is done.
func (e *Event) StreamWait(stream uintptr) error { return (*engine.Event)(e).StreamWait(stream) }

// Wait waits on the host up to slice, without a limit if slice is negative. nil: the event is done and the buffer has
// not failed. ErrInterrupted: it is not done yet. Any other error is the buffer's failure, which may be that of an
// earlier call.
func (e *Event) Wait(slice time.Duration) error { return (*engine.Event)(e).Wait(slice) }

// Destroy frees the event, once. Work that waits for it goes on.
func (e *Event) Destroy() error { return (*engine.Event)(e).Destroy() }

// Segment is memory of this rank, beside the buffer's own, that peers write rows into and read rows from. It belongs to
// the caller until Release.
type Segment struct {
	Number  int32 // RecvSegment or XSegment of a call: 1 or more, equal on all ranks
	Address uintptr
	Bytes   uint64
	engine  *engine.Segment
}

// Drain waits on the host for the present work of a stream of the caller, which may still use rows of the segment.
func (s *Segment) Drain(stream uintptr) error { return s.engine.Drain(stream) }

// Release frees the memory on this rank, once, also after the buffer's Destroy. No call may use the segment any more.
// Local.
func (s *Segment) Release() error { return s.engine.Release() }
