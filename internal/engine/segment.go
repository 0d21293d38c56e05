package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync/atomic"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// Segment is memory of this rank, beside the buffer's block, that peers write rows into and read rows from.
type Segment struct {
	Number  int32 // in RecvSegment and XSegment: 1 or more, the same on all ranks
	Address uintptr
	Bytes   uint64
	buffer  *Buffer
	memory  *device.Memory    // the user's count
	shared  *device.Symmetric // the buffer's count, and the peers' mappings
	used    atomic.Bool       // the user has not released it
}

// NewSegment makes a segment of the same size on every rank. Collective; it waits.
func (b *Buffer) NewSegment(ctx context.Context, bytes uint64) (*Segment, error) {
	if bytes == 0 {
		return nil, status.InvalidArg("bytes", bytes, "1 or more")
	}
	if !b.opt.Library.Has(abi.CapPeerRows) {
		return nil, status.Errorf(status.Unsupported, "engine %s cannot write rows into a peer's segment", b.opt.Library.Kind)
	}
	if err := b.startAwake(); err != nil {
		return nil, err
	}
	defer b.leave()
	mapped := b.onThisHost()
	absent := b.absentRanks()
	for rank := range mapped { // rows that cross nodes are staged
		mapped[rank] = mapped[rank] && !absent[rank] && !b.top.Remote(b.rank, rank)
	}
	number, free := b.offerSegments()
	exchange := b.exchanger(fmt.Sprintf("segment/%d", number))
	index := -1
	limited, done := b.limited(ctx)
	defer done()
	shared, err := b.dev.ShareAmong(limited, device.Places{Rank: b.rank, Mapped: mapped, Absent: absent, Describe: b.members.Describe}, bytes, func(ctx context.Context, blob []byte, fds []int) ([]device.Message, error) {
		all, err := exchange(ctx, append(binary.LittleEndian.AppendUint64(nil, free), blob...), fds)
		if err == nil {
			index, err = commonSegment(all, absent)
		}
		return all, err
	})
	if err != nil {
		return nil, err
	}
	s := &Segment{Number: int32(index) + 1, Address: uintptr(shared.Local.Address), Bytes: bytes, buffer: b, memory: shared.Local.Retain(), shared: shared}
	s.used.Store(true)
	return s, b.enterSegment(s)
}

// offerSegments counts the collective call and returns the indices that are free here, as bits.
func (b *Buffer) offerSegments() (number uint64, free uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.segmentsMade++
	for i, s := range b.segments {
		if s == nil || !s.used.Load() {
			free |= 1 << i
		}
	}
	return b.segmentsMade, free
}

// commonSegment takes the free numbers off the messages' heads and finds the first that is free on every rank.
func commonSegment(all []device.Message, absent []bool) (int, error) {
	free := ^uint64(0)
	for rank := range all {
		m := &all[rank]
		if absent[rank] {
			continue
		}
		if len(m.Blob) < 8 {
			return -1, status.Errorf(status.Internal, "rank %d offered a segment in %d bytes", rank, len(m.Blob))
		}
		free &= binary.LittleEndian.Uint64(m.Blob)
		m.Blob = m.Blob[8:]
	}
	if free == 0 {
		return -1, status.Errorf(status.InvalidState, "the buffer has %d segments that are not released on every rank, which is the limit", abi.MaxSegments)
	}
	return bits.TrailingZeros64(free), nil
}

// enterSegment gives the segment's addresses to the kernel library, in place of a released one of the same number, of
// which only the peers' mappings are left.
func (b *Buffer) enterSegment(s *Segment) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	index := segmentIndex(s.Number)
	old := b.segments[index]
	b.segments[index] = s
	for owner, address := range s.shared.Addresses {
		if err := b.nameSegment(index, owner, address, s.Bytes); err != nil {
			return err
		}
	}
	if old != nil {
		return old.shared.Release()
	}
	return nil
}

func (b *Buffer) nameSegment(index int32, owner int, address, bytes uint64) error {
	p := &abi.TeamSegmentParams{Team: b.team, Index: index, Owner: int32(owner), Address: address, Bytes: bytes}
	return kern.Error("dk_team_segment", b.opt.Library.TeamSegment(p), p.DeviceError)
}

// Drain waits for the present work of a stream of the caller, which may still use rows that are about to be given back.
func (s *Segment) Drain(stream uintptr) error { return s.memory.Drain(device.Stream(stream)) }

// Release frees the segment's memory on this rank, once, also after Destroy. No call may use it any more. Local.
func (s *Segment) Release() error {
	if !s.used.Swap(false) {
		return status.Errorf(status.InvalidState, "the segment was released before")
	}
	var err error
	if b := s.buffer; b.enter() == nil {
		b.mu.Lock()
		if b.segments[segmentIndex(s.Number)] == s { // else the buffer was released meanwhile, and has let go of it
			if err = b.nameSegment(segmentIndex(s.Number), b.rank, 0, 0); err == nil {
				err = s.shared.ReleaseLocal()
			}
		}
		b.mu.Unlock()
		b.leave()
	}
	status.Keep(&err, s.memory.Release())
	return err
}

// segmentIndex is a segment's place in the buffer and in the kernel library, -1 for none.
func segmentIndex(number int32) int32 { return max(number-1, -1) }

// checkSegment checks that rows lie inside the segment that the caller names. 0 or -1: none.
func (b *Buffer) checkSegment(name string, number int32, offset, bytes uint64, address uintptr) error {
	if number == 0 || number == -1 {
		return nil
	}
	index := number - 1
	b.mu.Lock()
	defer b.mu.Unlock()
	if index < 0 || index >= abi.MaxSegments || b.segments[index] == nil || !b.segments[index].used.Load() {
		return status.InvalidArg(name, number, "0, or the number of a segment of this buffer")
	}
	s := b.segments[index]
	if offset > s.Bytes || bytes > s.Bytes-offset || bytes > 0 && address != s.Address+uintptr(offset) {
		return status.InvalidArg(name+"_offset", offset, fmt.Sprintf("a place in the segment's %d bytes where %d bytes of rows lie", s.Bytes, bytes))
	}
	return nil
}
