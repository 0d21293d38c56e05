package engine_test

import (
	"testing"

	"github.com/deepep-go/deepep/internal/engine"
)

// Waiting for an event asks the library for that alone. Bringing the counters up to date is Stats's request, once a
// call.
func TestOnlyStatsFlushesStatistics(t *testing.T) {
	r := newRig(t)
	ev, err := r.NewEvent()
	r.must(err)
	defer func() { r.must(ev.Destroy()) }()
	r.must(r.layout(&engine.Call{Stream: 1, Async: true, Event: ev}))
	r.read()
	r.must(ev.Wait(-1))
	r.expect("a wait until done", "wait a")
	r.must(ev.Wait(0))
	r.expect("a question", "wait a")
	for range 2 {
		_, err = r.Stats(1)
		r.must(err)
		r.expect("statistics", "statistics of team 7")
	}
}
