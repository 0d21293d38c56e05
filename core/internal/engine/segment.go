package engine

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/deepep-go/deepep/core/internal/abi"
	"github.com/deepep-go/deepep/core/internal/device"
	"github.com/deepep-go/deepep/core/internal/kern"
	"github.com/deepep-go/deepep/core/internal/status"
)

// Segment is memory of this rank that its peers can write rows into, beside the buffer's own block.
type Segment struct {
	Index   int
	Address uintptr
	Bytes   uint64
	buffer  *Buffer
	memory  *device.Memory // counted: by the buffer's table and by the user
	shared  *device.Symmetric
	used    atomic.Bool // the user has not released it
}

// NewSegment makes one, of the same size on every rank. Collective; it waits.
func (b *Buffer) NewSegment(c context.Context, bytes uint64) (*Segment, error) {
	if bytes == 0 {
		return nil, status.InvalidArg("bytes", bytes, "1 or more")
	}
	if !b.opt.Library.Has(abi.CapPeerRows) {
		return nil, status.Errorf(status.Unsupported, "engine %s cannot write rows into a peer's segment", b.opt.Library.Kind)
	}
	if err := b.start(); err != nil {
		return nil, err
	}
	defer b.leave()
	index, err := b.freeSegment()
	if err != nil {
		return nil, err
	}
	mapped := make([]bool, b.size)
	for rank := range mapped {
		mapped[rank] = b.members.Peer(rank).SameHost
	}
	limited, done := context.WithTimeout(c, b.opt.StartLimit)
	defer done()
	shared, err := b.dev.Share(limited, b.rank, bytes, mapped, b.exchanger(fmt.Sprintf("segment/%d", index)))
	if err != nil {
		b.mu.Lock()
		b.segments[index] = nil
		b.mu.Unlock()
		return nil, err
	}
	s := &Segment{Index: index, Address: uintptr(shared.Local.Address), Bytes: bytes, buffer: b, memory: shared.Local.Retain(), shared: shared}
	s.used.Store(true)
	return s, b.enterSegment(s)
}

// freeSegment reserves the first free number, which is the same on all ranks since making segments is collective.
func (b *Buffer) freeSegment() (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, s := range b.segments {
		if s == nil {
			b.segments[i] = &Segment{Index: i}
			return i, nil
		}
	}
	return 0, status.Errorf(status.InvalidState, "the buffer has %d segments, which is the limit", abi.MaxSegments)
}

func (b *Buffer) enterSegment(s *Segment) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.segments[s.Index] = s
	for owner, address := range s.shared.Addresses {
		if err := b.nameSegment(s.Index, owner, address, s.Bytes); err != nil {
			return err
		}
	}
	return nil
}

func (b *Buffer) nameSegment(index, owner int, address, bytes uint64) error {
	p := &kern.TeamSegmentParams{Team: b.team, Index: int32(index), Owner: int32(owner), Address: address, Bytes: bytes}
	return kern.Error("dk_team_segment", b.opt.Library.TeamSegment(p), p.DeviceError)
}

// Release says that no tensor lies in the segment any more. Its memory goes when the buffer is destroyed too: until then
// peers may still name it. Local; once; also after Destroy.
func (s *Segment) Release() error {
	if !s.used.Swap(false) {
		return status.Errorf(status.InvalidState, "the segment was released before")
	}
	return s.memory.Release()
}

// drop is the buffer's own release.
func (s *Segment) drop() error {
	if s.shared == nil {
		return nil
	}
	return s.shared.Release()
}

// checkSegment checks that rows lie where the caller says. -1: in no segment.
func (b *Buffer) checkSegment(name string, index int32, offset, bytes uint64, address uintptr) error {
	if index == -1 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if index < 0 || index >= abi.MaxSegments || b.segments[index] == nil || b.segments[index].shared == nil {
		return status.InvalidArg(name, index, "-1, or the number of a segment of this buffer")
	}
	s := b.segments[index]
	if offset > s.Bytes || bytes > s.Bytes-offset || bytes > 0 && address != s.Address+uintptr(offset) {
		return status.InvalidArg(name+"_offset", offset, fmt.Sprintf("a place of the segment's %d bytes where %d bytes of rows lie", s.Bytes, bytes))
	}
	return nil
}
