package core

import (
	"slices"
	"sync"

	"github.com/deepep-go/deepep/internal/status"
)

// Pool cuts a segment into blocks, first fit. It is what torch's pluggable allocator asks, which itself keeps and splits
// what it gets, so requests are few and large.
type Pool struct {
	segment *Segment
	mu      sync.Mutex
	free    []span // sorted by address, neighbours joined
	used    map[uintptr]uint64
	closed  bool
}

type span struct {
	at    uintptr
	bytes uint64
}

// poolAlign is what every block begins at: torch splits blocks at multiples of 512 bytes.
const poolAlign = 512

// NewPool takes over a segment: it is released with the last block once the pool is closed.
func NewPool(s *Segment) *Pool {
	return &Pool{segment: s, free: []span{{s.Address, s.Bytes}}, used: map[uintptr]uint64{}}
}

// Allocate returns a block's address, 0 if there is no room.
func (p *Pool) Allocate(bytes uint64) uintptr {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes == 0 || bytes > p.segment.Bytes || p.closed {
		return 0
	}
	bytes = (bytes + poolAlign - 1) / poolAlign * poolAlign
	for i, s := range p.free {
		if s.bytes < bytes {
			continue
		}
		if s.bytes == bytes {
			p.free = slices.Delete(p.free, i, i+1)
		} else {
			p.free[i] = span{s.at + uintptr(bytes), s.bytes - bytes}
		}
		p.used[s.at] = bytes
		return s.at
	}
	return 0
}

// Holds says whether an address is that of a block of this pool.
func (p *Pool) Holds(at uintptr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.used[at]
	return ok
}

// Drain waits for the present work of the stream that a block was made for. Whoever frees device memory may count on that:
// torch gives a block back as soon as nobody holds its tensors, while kernels may still be using it.
func (p *Pool) Drain(stream uintptr) error { return p.segment.Drain(stream) }

// Free gives a block back.
func (p *Pool) Free(at uintptr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	bytes, ok := p.used[at]
	if !ok {
		return status.InvalidArg("pointer", at, "a block of the pool that was not freed before")
	}
	delete(p.used, at)
	i, _ := slices.BinarySearchFunc(p.free, at, func(s span, at uintptr) int {
		if s.at < at {
			return -1
		}
		return 1
	})
	p.free = slices.Insert(p.free, i, span{at, bytes})
	p.join(i)
	if i > 0 {
		p.join(i - 1)
	}
	return p.endIfIdle()
}

// join merges span i with the next one if they touch.
func (p *Pool) join(i int) {
	if i+1 < len(p.free) && p.free[i].at+uintptr(p.free[i].bytes) == p.free[i+1].at {
		p.free[i].bytes += p.free[i+1].bytes
		p.free = slices.Delete(p.free, i+1, i+2)
	}
}

// Close gives out no more blocks; the segment goes with the last one.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return p.endIfIdle()
}

// Done says that the pool is closed and its segment released.
func (p *Pool) Done() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed && len(p.used) == 0
}

func (p *Pool) endIfIdle() error {
	if !p.closed || len(p.used) > 0 {
		return nil
	}
	return p.segment.Release()
}
