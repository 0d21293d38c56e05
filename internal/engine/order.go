package engine

import (
	"time"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/status"
)

// Call orders an operation among other work.
type Call struct {
	// Async: the caller waits through Event. Otherwise Stream waits for the operation, which on a host-stream engine
	// means that the call returns when it is done.
	Async    bool
	Stream   uintptr    // the caller's current stream
	Previous *Event     // the operation begins after it, instead of after Stream
	Event    *Event     // recorded at the operation's end
	Config   *op.Config // nil: the default chunks for this many ranks, and the library's choice of SMs
}

// order is where the newest operation runs. The next one is ordered after it, on any stream.
type order struct {
	begin, end *device.Event // of the caller's stream before, of the communication stream after
	tail       *device.Event // end of the newest operation on a stream of the caller
	last       device.Stream
	used       bool // last is set
	capturing  bool // the newest operation on a caller's stream was captured
	unrecorded bool // tail is not recorded yet: last is the default stream
	records    int  // so many more calls on the default stream record their end
}

// defaultStream is CUDA's, which nobody can destroy or capture. As long as calls come from no other stream, nothing has
// to know where on it the newest one ended, and an event for each call takes the host as long as a third of its launch.
// The first call from elsewhere waits for the stream's present end; after it the next recordsAfter calls have events.
const defaultStream device.Stream = 0

const recordsAfter = 64

// place is where an operation runs.
type place int

const (
	onComm    place = iota // on the communication stream, after the caller's stream
	onCurrent              // on the caller's stream; on a host-stream engine on the communication stream
)

// placeOfWhole returns where a call that is no half of one runs. What the caller's stream waits for anyway runs on that
// stream: changing to the communication stream and back would cost two more waits between streams, each of which takes
// the host and the device about as long as a launch.
func placeOfWhole(c *Call) place {
	if !c.Async && c.Previous == nil {
		return onCurrent
	}
	return onComm
}

// addDependencies makes the next launch wait for Previous or the caller's stream, and for the newest operation, and
// returns its stream. b.mu is held.
func (b *Buffer) addDependencies(c *Call, where place) (device.Stream, error) {
	if err := b.checkStream(c.Stream); err != nil {
		return 0, err
	}
	current := device.Stream(c.Stream)
	stream := b.comm
	if where == onCurrent && !b.dev.HostStream() {
		stream = current
	}
	switch {
	case c.Previous != nil:
		if err := c.Previous.ev.Join(stream); err != nil {
			return 0, err
		}
	case stream == b.comm && current != b.comm && !b.dev.HostStream():
		if err := b.follow(b.order.begin, current, stream); err != nil {
			return 0, err
		}
		if b.order.last == current { // and so the newest operation
			return stream, nil
		}
	}
	return stream, b.afterNewest(stream)
}

// follow makes stream after wait for the present end of stream before.
func (b *Buffer) follow(ev *device.Event, before, after device.Stream) error {
	if err := ev.Record(before); err != nil {
		return err
	}
	return ev.Join(after)
}

// afterNewest makes stream wait for the buffer's newest operation if that runs elsewhere. Work that was captured into a
// graph and work that was not never wait for each other: the caller orders the graph's launches.
func (b *Buffer) afterNewest(stream device.Stream) error {
	o := &b.order
	if !o.used || o.last == stream || b.dev.HostStream() {
		return nil
	}
	capturing, err := b.dev.Capturing(stream)
	if err != nil {
		return err
	}
	before, err := b.dev.Capturing(o.last)
	if err != nil {
		return err
	}
	if o.last == b.comm {
		if before != capturing {
			return nil
		}
		return b.follow(o.tail, o.last, stream)
	}
	if o.capturing != capturing || o.capturing && !before {
		return nil
	}
	o.records = recordsAfter
	if err := b.recordTail(); err != nil {
		return err
	}
	return o.tail.Join(stream)
}

// recordTail makes up for the record of tail that the default stream was spared. b.mu is held.
func (b *Buffer) recordTail() error {
	if !b.order.unrecorded {
		return nil
	}
	b.order.unrecorded = false
	return b.order.tail.Record(b.order.last)
}

// recordLaunch records the launch as the newest one, records c.Event, and makes c.Stream wait for it. On a host-stream
// engine it returns the event that a synchronous call waits for.
func (b *Buffer) recordLaunch(c *Call, where place, stream device.Stream) (*device.Event, error) {
	b.order.last, b.order.used, b.order.unrecorded = stream, true, false
	if b.dev.HostStream() {
		return b.recordHostLaunch(c)
	}
	if c.Event != nil {
		if err := c.Event.ev.Record(stream); err != nil {
			return nil, err
		}
	}
	if stream == defaultStream {
		if b.order.records == 0 {
			b.order.capturing, b.order.unrecorded = false, true
			return nil, nil
		}
		b.order.records--
	}
	if stream != b.comm { // the caller may destroy the stream or queue long work on it: record its present end
		capturing, err := b.dev.Capturing(stream)
		if err != nil {
			return nil, err
		}
		b.order.capturing = capturing
		b.captured = b.captured || capturing
		return nil, b.order.tail.Record(stream)
	}
	if b.dev.Graphs() && !b.captured {
		capturing, err := b.dev.Capturing(stream)
		if err != nil {
			return nil, err
		}
		b.captured = capturing
	}
	if where == onCurrent || c.Async || device.Stream(c.Stream) == b.comm {
		return nil, nil
	}
	return nil, b.follow(b.order.end, stream, device.Stream(c.Stream))
}

func (b *Buffer) recordHostLaunch(c *Call) (*device.Event, error) {
	if c.Event != nil {
		if err := c.Event.ev.Record(b.comm); err != nil {
			return nil, err
		}
	}
	if c.Async {
		return nil, nil
	}
	ev, err := b.takeEvent()
	if err != nil {
		return nil, err
	}
	if err := ev.Record(b.comm); err != nil {
		b.idle = append(b.idle, ev)
		return nil, err
	}
	return ev, nil
}

// hostWait waits for the end of a launch where the caller's stream is the calling thread. It never returns earlier: the
// kernel may write to the caller's memory. The kernels' deadlines bound it, and Destroy aborts them.
func (b *Buffer) hostWait(ev *device.Event, own callID) error {
	if ev == nil {
		return nil
	}
	defer b.giveEvent(ev, own)
	for {
		done, err := ev.Wait(waitSlice)
		switch {
		case err != nil:
			return err
		case done:
			b.endWindow()
			return b.outcome(own)
		}
	}
}

// begin checks that the buffer is usable, takes b.mu and adds the launch's dependencies. On success the caller launches
// and calls finish, or abandon; on error nothing is held. rest: the call is the second part of one that peers are in
// already; it does not stop for the refusal of an earlier call.
func (b *Buffer) begin(c *Call, number op.Operation, where place, rest bool) (device.Stream, error) {
	if err := b.lockFor(number, rest); err != nil {
		return 0, err
	}
	stream, err := b.addDependencies(c, where)
	if err != nil {
		return 0, b.abandon(err)
	}
	return stream, nil
}

// lockFor is begin without dependencies: on success b.mu is held, until abandon or finish.
func (b *Buffer) lockFor(number op.Operation, rest bool) error {
	if err := b.start(); err != nil {
		return err
	}
	usable := b.usable
	if rest {
		usable = b.intact
	}
	if err := usable(); err != nil { // without b.mu: it may log, and a log function may wait for other threads
		b.leave()
		return err
	}
	if err := b.peersAwake(number, rest); err != nil {
		b.leave()
		return err
	}
	b.mu.Lock()
	return nil
}

// finish ends what begin began. own is the call, err the launch's. The wait on the host happens without b.mu.
func (b *Buffer) finish(c *Call, where place, stream device.Stream, own callID, err error) error {
	var ev *device.Event
	if err == nil {
		ev, err = b.recordLaunch(c, where, stream)
	}
	if ev != nil {
		b.await(own)
	}
	b.mu.Unlock()
	if err == nil {
		err = b.hostWait(ev, own)
	}
	b.leave()
	return err
}

// abandon ends what begin or lockFor began if nothing was launched.
func (b *Buffer) abandon(err error) error {
	b.mu.Unlock()
	b.leave()
	return err
}

// launch runs an operation: it orders the launch after earlier work, calls check for what has to be checked with b.mu
// held (nil: nothing), fills the header, and calls run, which fills the other parameters and enters the kernel library.
func (b *Buffer) launch(c *Call, number op.Operation, where place, h *abi.OpHeader, check func() error, run func() int32) error {
	return b.launchPart(c, number, where, h, check, run, false)
}

// launchRest is launch for an operation that completes one which peers are in already.
func (b *Buffer) launchRest(c *Call, number op.Operation, where place, h *abi.OpHeader, check func() error, run func() int32) error {
	return b.launchPart(c, number, where, h, check, run, true)
}

func (b *Buffer) launchPart(c *Call, number op.Operation, where place, h *abi.OpHeader, check func() error, run func() int32, rest bool) error {
	stream, err := b.begin(c, number, where, rest)
	if err != nil {
		return err
	}
	if check != nil {
		if err := check(); err != nil {
			return b.abandon(err)
		}
	}
	b.calls[number]++
	b.header(h, uint32(number), abi.PhaseBoth, stream, b.calls[number])
	own := callID{uint32(number), b.calls[number]}
	first := b.beforeLaunch(number)
	code := run()
	b.afterLaunch(first)
	return b.finish(c, where, stream, own, b.launched(number, code, h.DeviceError))
}

// header fills what all operations have in common, and publishes the call. The halves of a call have one number. b.mu
// is held.
func (b *Buffer) header(h *abi.OpHeader, op, phase uint32, stream device.Stream, number uint64) {
	limit := b.opt.Timeout
	if number == 1 {
		limit = b.opt.FirstTimeout
	}
	h.Team, h.Stream, h.Call, h.TimeoutNS, h.NumSMs, h.Flags = b.team, uint64(stream), number, uint64(limit), 0, 0
	b.members.Publish(LastCall{Op: op, Phase: phase, Number: number, Buffer: b.opt.ID})
}

// launched turns a launch's code into an error. Limits that depend on several sizes at once (shared memory) are known
// to the kernel library alone; it answers Unsupported.
func (b *Buffer) launched(number op.Operation, code, deviceError int32) error {
	switch {
	case code == 0:
		return nil
	case deviceError != 0:
		return status.Errorf(status.Code(code), "%s could not be launched: %v (device error %d)", number, status.Code(code), deviceError)
	case status.Code(code) == status.Unsupported:
		return status.Errorf(status.Unsupported, "%s could not be launched: %s has no kernel for these sizes (experts, top-k, scales, hidden)",
			number, b.limits.Library)
	}
	return status.Errorf(status.Code(code), "%s could not be launched: %v", number, status.Code(code))
}

// atLeastMillisecond raises a timeout to a millisecond: the kernels take 0 for "do not wait at all".
func atLeastMillisecond(d time.Duration) time.Duration { return max(d, time.Millisecond) }
