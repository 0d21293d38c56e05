package core

import (
	"slices"
	"sync"
)

// hint is a size hint that this process asked for: a buffer of so many bytes is for calls of this shape.
type hint struct {
	lowLatency bool
	ranks      int
	bytes      uint64
	shape      Shape
}

// hintsKept is more than a program asks for between two buffers.
const hintsKept = 32

// hintList holds the newest hints, for warm-ups that are not told a shape.
type hintList struct {
	mu  sync.Mutex
	all []hint
}

var hints hintList

func (l *hintList) add(h hint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = slices.DeleteFunc(l.all, func(old hint) bool { return old == h })
	if len(l.all) == hintsKept {
		l.all = l.all[1:]
	}
	l.all = append(l.all, h)
}

// find returns the shapes of the largest hints that these bytes hold: programs that ask for several take the largest.
// Of equal ones the newest counts.
func (l *hintList) find(ranks int, nvlBytes, rdmaBytes uint64) (normal, lowLatency Shape) {
	l.mu.Lock()
	defer l.mu.Unlock()
	largest := func(isLowLatency bool, limit uint64) Shape {
		var best hint
		for _, h := range l.all {
			if h.lowLatency == isLowLatency && h.ranks == ranks && h.bytes <= limit && h.bytes >= best.bytes {
				best = h
			}
		}
		return best.shape
	}
	return largest(false, nvlBytes), largest(true, rdmaBytes)
}
