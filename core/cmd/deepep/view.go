package main

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/monitor"
)

// rankView is one rank of a buffer over an interval.
type rankView struct {
	*monitor.Stats
	delta   []monitor.OpStats // counted in the interval, indexed by Op
	seconds float64
	dead    bool
	own     bool // of this user
	path    string
}

// bufferView is one buffer: its ranks on this host.
type bufferView struct {
	group    string
	buffer   uint32
	numRanks int
	ranks    []rankView
}

// hostView is all buffers of the host at one time.
type hostView struct {
	buffers []bufferView
	damaged []monitor.Entry
}

// pageKey identifies a page.
type pageKey struct {
	path  string
	start uint64
}

func keyOf(e monitor.Entry) pageKey { return pageKey{e.Path, e.Stats.StartTime} }

// look makes a view of a reading. It counts from before, an earlier reading; for pages that are not in before, and
// without an earlier reading, from the creation of the page. Intervals are those between the owner's writes.
func look(now, before []monitor.Entry) hostView {
	earlier, written := map[pageKey]*monitor.Stats{}, map[pageKey]time.Time{}
	for _, e := range before {
		if e.Stats != nil {
			earlier[keyOf(e)], written[keyOf(e)] = e.Stats, e.At
		}
	}
	var h hostView
	for _, e := range now {
		if e.Stats == nil {
			h.damaged = append(h.damaged, e)
			continue
		}
		r := rankView{Stats: e.Stats, dead: e.Dead, own: e.Own, path: e.Path}
		old, ok := earlier[keyOf(e)]
		since := e.Stats.Created
		if ok {
			since = written[keyOf(e)]
		}
		// The clock may have been set since the page's creation; a rate needs a positive time.
		r.seconds = max(e.At.Sub(since).Seconds(), 1e-3)
		for op := range e.Stats.Ops {
			var oldOp *monitor.OpStats
			if ok {
				oldOp = &old.Ops[op]
			}
			r.delta = append(r.delta, e.Stats.Ops[op].Sub(oldOp))
		}
		h.put(r)
	}
	return h
}

// put adds a rank to its buffer. Pages are sorted; two of the same rank (of a dead job and its restart) follow each
// other.
func (h *hostView) put(r rankView) {
	i := slices.IndexFunc(h.buffers, func(b bufferView) bool {
		return b.group == r.Group && b.buffer == r.Buffer && b.numRanks == r.NumRanks
	})
	if i < 0 {
		h.buffers = append(h.buffers, bufferView{group: r.Group, buffer: r.Buffer, numRanks: r.NumRanks})
		i = len(h.buffers) - 1
	}
	h.buffers[i].ranks = append(h.buffers[i].ranks, r)
}

// sum adds up an operation over the ranks: calls and bytes are sums, times are over all calls. seconds is the longest
// interval of a rank.
func (b *bufferView) sum(op monitor.Op) (total monitor.OpStats, seconds float64) {
	for _, r := range b.ranks {
		total.Add(&r.delta[op])
		seconds = max(seconds, r.seconds)
	}
	return total, seconds
}

// waits is the rank × rank table of the interval.
func (b *bufferView) waits() monitor.Waits {
	readings := map[int][]monitor.OpStats{}
	for _, r := range b.ranks {
		if !r.dead || readings[r.Rank] == nil {
			readings[r.Rank] = r.delta
		}
	}
	return monitor.WaitsOf(b.numRanks, readings)
}

// active reports whether an operation was ever called.
func (b *bufferView) active(op monitor.Op) bool {
	return slices.ContainsFunc(b.ranks, func(r rankView) bool { return r.Ops[op].Calls+r.Ops[op].Errors > 0 })
}

// totals adds up all operations of a rank in the interval.
func (r *rankView) totals() monitor.OpStats {
	var t monitor.OpStats
	for op := range r.delta {
		t.Add(&r.delta[op])
	}
	return t
}

// last is the newest call's operation and time; found is false without calls.
func (r *rankView) last() (op monitor.Op, start uint64, found bool) {
	for _, o := range monitor.Ops() {
		if s := r.Ops[o]; s.Calls > 0 && (!found || s.LastStartNS > start) {
			op, start, found = o, s.LastStartNS, true
		}
	}
	return op, start, found
}

// choose keeps the buffers of groups whose name has a prefix.
func (h *hostView) choose(prefix string) {
	h.buffers = slices.DeleteFunc(h.buffers, func(b bufferView) bool { return !strings.HasPrefix(b.group, prefix) })
	slices.SortStableFunc(h.buffers, func(a, b bufferView) int {
		return cmp.Or(strings.Compare(a.group, b.group), cmp.Compare(a.buffer, b.buffer))
	})
}
