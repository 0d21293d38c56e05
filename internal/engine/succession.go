package engine

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Succession makes a buffer in the place of one whose group has changed. It takes over the device, the communication
// stream, this rank's block and the mappings of those peers that keep theirs; flags, counts and staging begin anew.
type Succession struct {
	From  *Buffer // nil: the buffer has no predecessor, and the rest is ignored
	Was   []int   // by rank: its number in From's group; -1: it is new
	Fresh bool    // somebody who is not among the ranks may still write to From's blocks: none is kept
	// Commit is the last exchange, after which the buffer has taken From's place: it goes on without a rank whose process
	// ends meanwhile, so that all others come to the same end. The buffer then treats that rank as dead.
	Commit func(ctx context.Context, tag string, blob []byte) ([]device.Message, error)
}

var errStopped = status.Errorf(status.InvalidState,
	"the buffer is between two groups: a regroup is under way or has failed; regroup again, or destroy the buffer")

// CanRegroup refuses kernel libraries whose memory is allocated and freed by all ranks together.
func (b *Buffer) CanRegroup() error {
	if b.opt.Library.HasTransportHeap() && b.usesTransport() {
		return status.Errorf(status.Unsupported, "regroup: the memory of the transport (%s) can neither drop nor add a rank; "+
			"low-latency calls go on without lost ranks by masks (enable_shrink)", b.opt.Library.Build)
	}
	return nil
}

// Stop ends what runs of a buffer that another one is about to follow: calls from now on are refused. Idempotent; a
// Destroy must follow. Peers' processes may write to its memory until they have stopped too.
func (b *Buffer) Stop() error {
	if b.closed.Swap(true) {
		if b.stopped.Load() {
			return nil
		}
		return errDestroyed
	}
	b.stopped.Store(true)
	err := b.halt()
	if err != nil {
		b.stopped.Store(false) // what still runs keeps its memory
		return err
	}
	if b.captured { // replays leave at once, for which the team's own memory stays
		if err := b.stopTeam(); err != nil {
			return err
		}
		b.team = 0
		b.progress = atomic.LoadUint64(&b.words.Progress)
	}
	return b.freeTeam()
}

// elder is what a buffer knows of one that it or its predecessor has followed, and whose calls were captured.
type elder struct {
	words *abi.Status // retained
	seen  atomic.Uint64
	next  *elder
}

// elderReplayed tells, once, that a graph of before a regroup has been replayed since the last time.
func (b *Buffer) elderReplayed() error {
	replayed := false
	for e := b.elders.Load(); e != nil; e = e.next {
		now := atomic.LoadUint64(&e.words.Progress)
		replayed = e.seen.Swap(now) != now || replayed
	}
	if !replayed {
		return nil
	}
	return status.Errorf(status.InvalidState, "a graph of before regroup() was replayed: its calls left at once (counts 0, sums NaN); capture it again")
}

// Succeeded gives what is left of the buffer to the one that has taken its place.
func (b *Buffer) Succeeded(by *Buffer) {
	b.comm, by.borrowed = 0, false
	by.inherits = b.captured || b.inherits
	elders := b.elders.Load()
	if b.captured {
		elders = &elder{words: b.words, next: elders}
		elders.seen.Store(b.progress)
	}
	by.elders.Store(elders)
	by.heirlooms = b.heirlooms
	if !by.block.Kept() {
		by.heirlooms = append(by.heirlooms, b.block.Local.Retain())
	} else if b.viewed.Load() {
		by.viewed.Store(true)
	}
	b.heirlooms = nil
	b.successor.Store(by)
	by.opt.Succession = Succession{} // each would keep all before it
}

// absent reports whether a rank is a place without a process. The group is joined.
func (b *Buffer) absent(rank int) bool { return b.members.Peer(rank).Absent }

func (b *Buffer) absentRanks() []bool {
	absent := make([]bool, b.size)
	for rank := range absent {
		absent[rank] = b.absent(rank)
	}
	return absent
}

// places says which memory this buffer keeps of its predecessor's.
func (b *Buffer) places() device.Places {
	p := device.Places{Rank: b.rank, Mapped: b.onThisHost(), Absent: b.absentRanks(), Crowd: b.crowd(), Describe: b.members.Describe}
	if from := b.opt.From; from != nil && from.awake() == nil { // else its memory is given back
		p.Before, p.Was, p.Fresh = from.block, b.opt.Was, b.opt.Fresh
	}
	return p
}

// resetLimit bounds the clearing of memory that is kept, and the masking.
const resetLimit = 10 * time.Second

// reset clears what calls of before have left in the block. All ranks have stopped, and none sends before the start has
// ended. The NVL region, and on an engine whose memory is the host's the RDMA region, need no clearing: users may
// overwrite them.
func (b *Buffer) reset() error {
	r := &b.regions
	if b.dev.HostStream() {
		b.block.Local.Zero(r.Control.Offset, r.Control.Bytes)
		b.block.Local.Zero(r.Wire.Offset, r.Wire.Bytes)
		return nil
	}
	for _, part := range []plan.Region{r.Control, r.Wire, r.RDMA} {
		if part.Bytes == 0 {
			continue
		}
		p := &abi.FillParams{Device: b.dev.Handle(), Stream: uint64(b.comm), Dst: b.block.Local.Address + part.Offset, Bytes: part.Bytes}
		if code := b.opt.Library.Fill(p); code != 0 {
			return kern.Error("dk_fill", code, p.DeviceError)
		}
	}
	return b.settle()
}

// settle waits until the communication stream is idle.
func (b *Buffer) settle() error {
	if err := b.order.end.Record(b.comm); err != nil {
		return err
	}
	for deadline := time.Now().Add(resetLimit); ; {
		done, err := b.order.end.Wait(waitSlice)
		if done || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return status.Errorf(status.Timeout, "the preparation of the buffer's memory took more than %v", resetLimit)
		}
	}
}

// maskAbsent masks the places without a process, so that the first calls do not have to find out.
func (b *Buffer) maskAbsent() error {
	if !b.opt.Shrink {
		return nil
	}
	masked := false
	for rank := range b.size {
		if !b.absent(rank) {
			continue
		}
		masked = true
		p := &abi.MaskParams{What: abi.MaskUpdate, Rank: int32(rank), Value: 1}
		p.Team, p.Stream, p.TimeoutNS = b.team, uint64(b.comm), uint64(b.opt.FirstTimeout)
		if code := b.opt.Library.Mask(p); code != 0 {
			return kern.Error("dk_mask", code, p.DeviceError)
		}
	}
	if !masked {
		return nil
	}
	return b.settle()
}

// WaitStart waits for the start, and refuses a buffer that was destroyed; one that was stopped is fine.
func (b *Buffer) WaitStart() error {
	if b.closed.Load() && !b.stopped.Load() {
		return errDestroyed
	}
	<-b.ready
	return b.buildErr
}

// Origin is what handles say of the buffer beside the number of their dispatch.
func (b *Buffer) Origin() (maker uint32, generation uint64) {
	return b.opt.Maker, b.sleep.generation.Load()
}

// OwnRegions are the bytes of the control and the wire region.
func (b *Buffer) OwnRegions() (control, wire uint64) {
	return b.regions.Control.Bytes, b.regions.Wire.Bytes
}

// Number is the buffer's number in its group.
func (b *Buffer) Number() uint32 { return b.opt.ID }

// Inherit fills in what a successor's options take from this buffer.
func (b *Buffer) Inherit(o *Options) {
	o.Library, o.ISA, o.Ordinal = b.opt.Library, b.opt.ISA, b.opt.Ordinal
}
