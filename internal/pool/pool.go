// Package pool cuts a segment into blocks for torch's pluggable allocator.
package pool

import (
	"slices"
	"sync"

	"github.com/deepep-go/deepep/internal/status"
)

// Segment is the memory that a Pool divides.
type Segment interface {
	// Drain waits for the present work of a stream.
	Drain(stream uintptr) error
	// Release frees the memory.
	Release() error
}

// Pool allocates blocks of a segment, first fit. torch's caching allocator keeps and splits the blocks, so requests are
// few and large. Methods may be called from any goroutine.
type Pool struct {
	segment Segment
	bytes   uint64
	mu      sync.Mutex
	free    []span // sorted by address, neighbours joined
	used    map[uintptr]uint64
	closed  bool
}

type span struct {
	at    uintptr
	bytes uint64
}

// align is the alignment of every block: torch splits blocks at multiples of 512 bytes.
const align = 512

// New takes over a segment of so many bytes at address. The pool releases it with the last block once it is closed.
func New(s Segment, address uintptr, bytes uint64) *Pool {
	return &Pool{segment: s, bytes: bytes, free: []span{{address, bytes}}, used: map[uintptr]uint64{}}
}

// Allocate returns a block's address, 0 if there is no room.
func (p *Pool) Allocate(bytes uint64) uintptr {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes == 0 || bytes > p.bytes || p.closed {
		return 0
	}
	bytes = (bytes + align - 1) / align * align
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

// Room returns the bytes of the largest block that Allocate has room for.
func (p *Pool) Room() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	var room uint64
	if !p.closed {
		for _, s := range p.free {
			room = max(room, s.bytes)
		}
	}
	return room
}

// Holds reports whether address is that of an allocated block of this pool.
func (p *Pool) Holds(at uintptr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.used[at]
	return ok
}

// Drain waits for the present work of the stream that a block was allocated for. torch frees a block as soon as its
// last tensor is gone, while kernels may still use it.
func (p *Pool) Drain(stream uintptr) error { return p.segment.Drain(stream) }

// Free returns a block to the pool.
func (p *Pool) Free(at uintptr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	bytes, ok := p.used[at]
	if !ok {
		return status.InvalidArg("pointer", at, "an allocated block of the pool")
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

// Close ends allocation. The segment is released once the last block is free.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return p.endIfIdle()
}

// Done reports whether the pool is closed and its segment released.
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
