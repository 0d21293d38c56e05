package engine_test

import (
	"testing"

	"github.com/deepep-go/deepep/internal/engine"
)

func TestNormalModeStreams(t *testing.T) {
	r := newRig(t)
	r.must(r.layout(&engine.Call{Stream: 1}))
	r.expect("synchronous", "layout #1 on 1", "record a on 1")
	ev, err := r.NewEvent()
	r.must(err)
	defer func() { r.must(ev.Destroy()) }()
	r.must(r.layout(&engine.Call{Stream: 1, Async: true, Event: ev}))
	r.expect("asynchronous", "record a on 1", "C waits a", "layout #2 on C", "record b on C")
	r.must(ev.StreamWait(2))
	r.must(r.layout(&engine.Call{Stream: 1, Async: true, Previous: ev}))
	r.expect("after an event", "2 waits a", "C waits a", "layout #3 on C")
	r.must(r.layout(&engine.Call{Stream: r.Info().CommStream}))
	r.expect("on the communication stream itself", "layout #4 on C")
}

func TestCallsRunInOrderOnWhateverStreams(t *testing.T) {
	r := newRig(t)
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.expect("one stream", "barrier #1 on 1 limit 7 ms", "record a on 1", "barrier #2 on 1 limit 5 ms", "record a on 1")
	r.must(r.Barrier(&engine.Call{Stream: 2}))
	r.expect("another", "2 waits a", "barrier #3 on 2 limit 5 ms", "record a on 2")
	r.must(r.layout(&engine.Call{Stream: 2, Async: true}))
	r.expect("then the communication stream", "record a on 2", "C waits a", "layout #1 on C")
	r.must(r.Barrier(&engine.Call{Stream: 3}))
	r.expect("and back", "record a on C", "3 waits a", "barrier #4 on 3 limit 5 ms", "record a on 3")
}

// The default stream is spared a record for each call until another stream follows it, and waits for its present end.
func TestDefaultStreamIsSparedRecords(t *testing.T) {
	r := newRig(t)
	r.must(r.Barrier(&engine.Call{}))
	r.must(r.Barrier(&engine.Call{}))
	r.expect("the default stream", "barrier #1 on 0 limit 7 ms", "barrier #2 on 0 limit 5 ms")
	r.must(r.layout(&engine.Call{Async: true}))
	r.expect("the communication stream after it", "record a on 0", "C waits a", "layout #1 on C")
	r.must(r.Barrier(&engine.Call{}))
	r.expect("and back", "record a on C", "0 waits a", "barrier #3 on 0 limit 5 ms")
	ev, err := r.NewEvent()
	r.must(err)
	defer func() { r.must(ev.Destroy()) }()
	r.must(r.layout(&engine.Call{Async: true, Previous: ev}))
	r.expect("the communication stream, after an event alone", "C waits a", "record b on 0", "C waits b", "layout #2 on C")
	r.must(r.Barrier(&engine.Call{}))
	r.expect("from then on", "record a on C", "0 waits a", "barrier #4 on 0 limit 5 ms", "record a on 0")
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.expect("another stream", "1 waits a", "barrier #5 on 1 limit 5 ms", "record a on 1")
	for range 70 {
		r.must(r.Barrier(&engine.Call{}))
	}
	r.read()
	r.must(r.Barrier(&engine.Call{}))
	r.expect("alone again", "barrier #76 on 0 limit 5 ms")
}

func TestAnotherStreamFollowsTheDefaultOne(t *testing.T) {
	r := newRig(t)
	r.must(r.Barrier(&engine.Call{}))
	r.read()
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.expect("another stream", "record a on 0", "1 waits a", "barrier #2 on 1 limit 5 ms", "record a on 1")
}

// Work inside a capture and work outside of it never wait for each other; a capture that ended leaves nothing to wait
// for.
func TestCapturesStandApart(t *testing.T) {
	r := newRig(t)
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.read()
	r.capturing(2)
	r.must(r.Barrier(&engine.Call{Stream: 2}))
	r.expect("captured after plain", "barrier #2 on 2 limit 5 ms", "record a on 2")
	r.must(r.Barrier(&engine.Call{Stream: 3}))
	r.expect("plain after captured", "barrier #3 on 3 limit 5 ms", "record a on 3")
	r.must(r.Barrier(&engine.Call{Stream: 2}))
	r.read()
	r.capturing(4)
	r.must(r.Barrier(&engine.Call{Stream: 4}))
	r.expect("a second capture", "barrier #5 on 4 limit 5 ms", "record a on 4")
}
