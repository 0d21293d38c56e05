package monitor

import (
	"time"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
)

// Op is an operation.
type Op = op.Operation

// Ops lists the counted operations.
func Ops() []Op {
	ops := make([]Op, 0, abi.NumOps-1)
	for o := Op(1); o < abi.NumOps; o++ {
		ops = append(ops, o)
	}
	return ops
}

// Stats is one reading of a page.
type Stats struct {
	PID            int
	StartTime      uint64
	Created        time.Time
	Rank, NumRanks int
	Buffer         uint32
	State          State
	Group          string
	Host           string
	Engine         string
	Device         string
	Ops            [abi.NumOps]OpStats // indexed by Op
	Trace          []Call              // the last calls, oldest first
	TraceTotal     uint64              // calls ever traced
}

// OpStats holds the counters of one operation.
type OpStats struct {
	abi.OpStats
	BytesTo []uint64 // payload bytes sent to each rank
	WaitFor []uint64 // ns waited for each rank
}

// Call is one call in the trace.
type Call struct {
	Op       Op
	Phase    uint32 // DK_PHASE_*: 1 send, 2 receive, 3 both
	Number   uint64 // the engine counts the calls of each buffer
	Start    uint64 // ns of CLOCK_MONOTONIC; 0 where the device has no such clock
	Duration time.Duration
}

// Percentile is an upper bound for a share (0.99) of the durations; 0 without calls.
func (s *OpStats) Percentile(share float64) time.Duration {
	return duration(plan.Percentile(&s.Hist, share, s.MaxNS))
}

// Mean is the mean duration; 0 without calls.
func (s *OpStats) Mean() time.Duration {
	if s.Calls == 0 {
		return 0
	}
	return duration(s.TotalNS / s.Calls)
}

// Max is the longest duration since the page was created.
func (s *OpStats) Max() time.Duration { return duration(s.MaxNS) }

// duration keeps a damaged counter from becoming negative.
func duration(ns uint64) time.Duration { return time.Duration(min(ns, 1<<62)) }

// Sub is the difference to an earlier reading of the same page. Counters only grow: if one is smaller than before, the
// page is another one, and Sub returns all of its counts.
func (s *OpStats) Sub(before *OpStats) OpStats {
	d := *s
	if before == nil || s.Calls < before.Calls {
		return d
	}
	d.Calls -= before.Calls
	for _, c := range []struct {
		now  *uint64
		then uint64
	}{
		{&d.Errors, before.Errors}, {&d.TotalNS, before.TotalNS}, {&d.WaitNS, before.WaitNS}, {&d.Bytes, before.Bytes},
	} {
		*c.now -= min(c.then, *c.now)
	}
	for b := range d.Hist {
		d.Hist[b] -= min(before.Hist[b], d.Hist[b])
	}
	d.BytesTo = subtract(s.BytesTo, before.BytesTo)
	d.WaitFor = subtract(s.WaitFor, before.WaitFor)
	return d
}

func subtract(now, then []uint64) []uint64 {
	d := make([]uint64, len(now))
	for i := range now {
		d[i] = now[i]
		if i < len(then) {
			d[i] -= min(then[i], now[i])
		}
	}
	return d
}

// Add adds another rank's counts of the same operation, for a line about all ranks.
func (s *OpStats) Add(o *OpStats) {
	s.Calls = addSaturating(s.Calls, o.Calls)
	s.Errors = addSaturating(s.Errors, o.Errors)
	s.TotalNS = addSaturating(s.TotalNS, o.TotalNS)
	s.WaitNS = addSaturating(s.WaitNS, o.WaitNS)
	s.Bytes = addSaturating(s.Bytes, o.Bytes)
	s.MaxNS = max(s.MaxNS, o.MaxNS)
	s.LastNS = max(s.LastNS, o.LastNS)
	s.LastStartNS = max(s.LastStartNS, o.LastStartNS)
	for b := range s.Hist {
		s.Hist[b] = addSaturating(s.Hist[b], o.Hist[b])
	}
}

// addSaturating keeps sums of damaged counters from overflowing.
func addSaturating(a, b uint64) uint64 {
	if a+b < a {
		return 1<<64 - 1
	}
	return a + b
}
