package device

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// Stream is the library's handle of a queue of work; 0 is the default stream, or the calling thread where HostStream.
type Stream uint64

// spare keeps streams that no buffer uses any more. A caller's allocator may use a stream after its buffer is destroyed
// (torch records an event on it when it frees a tensor), so streams of real devices are kept for the next buffer, not
// destroyed.
var spare struct {
	sync.Mutex
	streams map[place][]Stream
}

type place struct {
	library string
	ordinal int
}

func (d *Device) place() place { return place{d.Lib.Path, d.Ordinal} }

// NewStream returns a stream of high priority, new or spare.
func (d *Device) NewStream() (Stream, error) {
	spare.Lock()
	defer spare.Unlock()
	if idle := spare.streams[d.place()]; len(idle) > 0 {
		spare.streams[d.place()] = idle[:len(idle)-1]
		return idle[len(idle)-1], nil
	}
	p := &abi.StreamCreateParams{Device: d.handle, HighPriority: 1}
	code := d.Lib.StreamCreate(p)
	return Stream(p.Stream), kern.Error("dk_stream_create", code, p.DeviceError)
}

// DestroyStream ends the use of a stream whose work is done.
func (d *Device) DestroyStream(s Stream) error {
	if !d.hostStream {
		spare.Lock()
		defer spare.Unlock()
		if spare.streams == nil {
			spare.streams = map[place][]Stream{}
		}
		spare.streams[d.place()] = append(spare.streams[d.place()], s)
		return nil
	}
	p := &abi.StreamDestroyParams{Device: d.handle, Stream: uint64(s)}
	return kern.Error("dk_stream_destroy", d.Lib.StreamDestroy(p), p.DeviceError)
}

// Parameters of the calls that launches make.
var (
	streamQueries params[abi.StreamQueryParams]
	eventRecords  params[abi.EventRecordParams]
	streamWaits   params[abi.StreamWaitEventParams]
	eventWaits    params[abi.EventWaitParams]
)

// Capturing reports whether a graph is being captured from the stream.
func (d *Device) Capturing(s Stream) (bool, error) {
	if !d.canBeGraphed {
		return false, nil
	}
	p := streamQueries.take(abi.StreamQueryParams{Device: d.handle, Stream: uint64(s), Idle: -1}) // not queried: it would cost more than the rest
	defer streamQueries.give(p)
	code := d.Lib.StreamQuery(p)
	return p.Capturing != 0, kern.Error("dk_stream_query", code, p.DeviceError)
}

// Event is a point in a stream. One that was never recorded counts as done. Other threads may use it while one destroys
// it.
type Event struct {
	dev    *Device
	handle uint64
	closed atomic.Bool
	users  atomic.Int64 // calls inside, and the owner until Destroy; the one that makes it 0 frees the event
}

var errEventDestroyed = status.Errorf(status.InvalidState, "the event was destroyed")

// enter counts a call in; false: the event is gone.
func (e *Event) enter() bool {
	for {
		n := e.users.Load()
		if n == 0 {
			return false
		}
		if e.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// leave counts a call out.
func (e *Event) leave() error {
	if e.users.Add(-1) != 0 {
		return nil
	}
	p := &abi.EventDestroyParams{Device: e.dev.handle, Event: e.handle}
	err := kern.Error("dk_event_destroy", e.dev.Lib.EventDestroy(p), p.DeviceError)
	status.Keep(&err, e.dev.Release())
	return err
}

// NewEvent makes an event. It keeps the device open until Destroy.
func (d *Device) NewEvent() (*Event, error) {
	p := &abi.EventCreateParams{Device: d.handle}
	if code := d.Lib.EventCreate(p); code != 0 {
		return nil, kern.Error("dk_event_create", code, p.DeviceError)
	}
	e := &Event{dev: d.Retain(), handle: p.Event}
	e.users.Store(1)
	return e, nil
}

// Destroy frees the event, once, when the last call that uses it ends. The event may be recorded and waited for.
func (e *Event) Destroy() error {
	if e.closed.Swap(true) {
		return nil
	}
	return e.leave()
}

// Record moves the event to the present end of the stream.
func (e *Event) Record(s Stream) error {
	if !e.enter() {
		return errEventDestroyed
	}
	defer func() { _ = e.leave() }() // Destroy has returned: nobody takes the error
	p := eventRecords.take(abi.EventRecordParams{Device: e.dev.handle, Event: e.handle, Stream: uint64(s)})
	defer eventRecords.give(p)
	if code := e.dev.Lib.EventRecord(p); code != 0 {
		return kern.Error("dk_event_record", code, p.DeviceError)
	}
	return nil
}

// Join lets the stream wait for the event. Not for stream 0 where HostStream.
func (e *Event) Join(s Stream) error {
	if !e.enter() {
		return errEventDestroyed
	}
	defer func() { _ = e.leave() }() // Destroy has returned: nobody takes the error
	p := streamWaits.take(abi.StreamWaitEventParams{Device: e.dev.handle, Stream: uint64(s), Event: e.handle})
	defer streamWaits.give(p)
	if code := e.dev.Lib.StreamWaitEvent(p); code != 0 {
		return kern.Error("dk_stream_wait_event", code, p.DeviceError)
	}
	return nil
}

// Wait blocks the calling thread until the event is done or limit ends. 0 queries.
func (e *Event) Wait(limit time.Duration) (done bool, err error) {
	if !e.enter() {
		return false, errEventDestroyed
	}
	defer func() { _ = e.leave() }() // Destroy has returned: nobody takes the error
	p := eventWaits.take(abi.EventWaitParams{Device: e.dev.handle, Event: e.handle, TimeoutNS: uint64(max(0, limit))})
	defer eventWaits.give(p)
	switch code := e.dev.Lib.EventWait(p); status.Code(code) {
	case status.OK:
		return true, nil
	case status.Timeout:
		return false, nil
	default:
		return false, kern.Error("dk_event_wait", code, p.DeviceError)
	}
}
