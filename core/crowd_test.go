package core

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// crowdCalls makes so many goroutine ranks that a socket, a descriptor and a mapping for each pair are not to be had, and
// lets them make calls of low-latency mode, then leave one after the other.
func crowdCalls(t *testing.T, ranks, rounds int) {
	t.Helper()
	shape := lowLatencyShape{ranks, 2, 2, 128, 3, 1}
	o := shape.room(t)
	o.Timeout = 2 * time.Minute
	within(t, 2*time.Minute, ranks, 8, o, func(m *member) {
		if rounds > 0 {
			m.lowLatencyRounds(shape, rounds)
		}
		err := m.Release(0)
		m.check(errors.Is(err, ErrUnsupported) && strings.Contains(err.Error(), "more than 64 ranks of one process"), "release: %v", err)
		m.must(m.Barrier(&Call{}))
	})
	goleak.VerifyNone(t)
}

func TestManyGoroutineRanks(t *testing.T) { crowdCalls(t, 72, 2) }

func Test256GoroutineRanks(t *testing.T) {
	if os.Getenv("DEEPEP_TEST_FULL") != "1" {
		t.Skip("a long test: DEEPEP_TEST_FULL=1 runs it")
	}
	crowdCalls(t, 256, 0) // a barrier: rows of so many ranks would keep two cores for minutes
}
