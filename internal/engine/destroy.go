package engine

import (
	"sync/atomic"
	"time"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// How long the parts of Destroy may take; together less than the 2 s that it promises.
const (
	startGrace = 500 * time.Millisecond  // for a background start that is cancelled
	finishCall = 1000 * time.Millisecond // for work in flight to end by itself
	leaveCall  = 400 * time.Millisecond  // for kernels to leave their waits after the abort word is set
	deliverAll = 1900 * time.Millisecond // from Destroy's begin: for a healthy buffer's messages to reach peers that wait for them
	deliverNow = 300 * time.Millisecond  // for those of a buffer that failed
	poll       = time.Millisecond
)

// retained keeps the status pages of buffers whose calls were captured into graphs. Their teams and addresses stay as
// well, as after Release: kernels of a replay after Destroy return at once.
var retained atomic.Pointer[[]*device.HostPage]

// Destroy ends the buffer: local, idempotent, bounded by about 2 s. What peers have mapped of its memory stays valid
// for them. Work that does not end in time keeps its memory until the process ends; the error says so.
func (b *Buffer) Destroy() error {
	if b.closed.Swap(true) && !b.stopped.Swap(false) {
		return nil
	}
	if err := b.halt(); err != nil {
		return err
	}
	return b.free()
}

// halt ends what runs, by itself where it does within a second.
func (b *Buffer) halt() error {
	begin := time.Now()
	b.cancel(errDestroyed)
	if !within(startGrace, func() bool { return isClosed(b.ready) }) {
		return status.Errorf(status.Timeout, "the buffer's start-up did not stop within %v: its memory is lost", startGrace)
	}
	if !b.quiesce() {
		return status.Errorf(status.Timeout, "work of the buffer did not end within %v: its memory is lost", finishCall+leaveCall)
	}
	limit := deliverNow
	if b.healthy() {
		limit = max(limit, deliverAll-time.Since(begin))
	}
	if !b.deliver(limit) {
		return status.Errorf(status.Timeout, "messages of the buffer did not leave within %v: its memory is lost", limit)
	}
	return nil
}

// quiesce waits for calls and kernels to end, first by themselves, then after setting the abort word.
func (b *Buffer) quiesce() bool {
	if b.words == nil {
		return true
	}
	marked := false
	idle := func() bool { return b.isIdle(&marked) }
	if b.healthy() && within(finishCall, idle) {
		return true
	}
	atomic.CompareAndSwapUint32(&b.words.AbortWord, 0, uint32(status.Aborted))
	return within(leaveCall, idle)
}

// healthy reports whether no kernel has failed and none was aborted.
func (b *Buffer) healthy() bool {
	return b.words != nil && atomic.LoadUint32(&b.words.Sticky) == 0 && atomic.LoadUint32(&b.words.AbortWord) == 0
}

// isIdle reports whether no thread is inside a call and no work is left on the streams. It records the communication
// stream's end once, which marked remembers: the closed buffer takes no more work, and on a busy host even an idle
// stream takes longer than one poll to reach a new record.
func (b *Buffer) isIdle(marked *bool) bool {
	if b.active.Load() != 0 || !b.mu.TryLock() {
		return false
	}
	defer b.mu.Unlock()
	if b.team == 0 {
		return true
	}
	if !*marked && (b.order.end.Record(b.comm) != nil || b.recordTail() != nil) {
		return true // a device that refuses a record runs nothing any more
	}
	*marked = true
	for _, ev := range []*device.Event{b.order.end, b.order.tail} {
		if done, err := ev.Wait(poll); !done && err == nil {
			return false
		}
	}
	return true
}

// free releases everything, users before what they use. The first error counts.
func (b *Buffer) free() error {
	keep := b.keepForReplays()
	err := b.freeTeam()
	status.Keep(&err, b.freeEvents())
	if b.stats != nil {
		status.Keep(&err, b.stats.close())
	}
	for _, page := range append(b.extra, b.counts) {
		status.Keep(&err, page.Close())
	}
	if b.page != nil {
		if b.captured {
			b.retire()
		} else {
			status.Keep(&err, b.page.Close())
		}
	}
	switch {
	case b.successor.Load() != nil: // it has the block
		status.Keep(&err, b.block.Release())
	case b.symmetricHeap != nil:
		status.Keep(&err, b.freeSymmetricHeap())
	case keep:
		status.Keep(&err, b.block.GiveBack())
		status.Keep(&err, b.block.ReleasePeers())
	case b.viewed.Load() && b.dev.HostStream() && b.block.CanGiveBack() == nil:
		status.Keep(&err, b.block.Leave())
	default:
		status.Keep(&err, b.block.Release())
	}
	for _, m := range b.heirlooms {
		if b.dev.HostStream() || keep {
			status.Keep(&err, m.Leave())
		} else {
			status.Keep(&err, m.Release())
		}
	}
	if b.dev != nil {
		status.Keep(&err, b.dev.Release())
	}
	return err
}

// keepForReplays reports whether the addresses of the buffer's memory must stay: kernels of replays look there before
// they leave. It makes those of this buffer leave, where Stop has not.
func (b *Buffer) keepForReplays() bool {
	if !b.captured && !b.inherits || b.block == nil || b.block.CanGiveBack() != nil {
		return false
	}
	if b.team == 0 || !b.captured {
		return true
	}
	if b.stopTeam() != nil {
		return b.inherits
	}
	b.team = 0 // its own memory stays
	return true
}

// freeTeam ends what sends to the other ranks, and unmaps their segments.
func (b *Buffer) freeTeam() error {
	var err error
	if b.team != 0 {
		p := &abi.TeamDestroyParams{Team: b.team}
		status.Keep(&err, kern.Error("dk_team_destroy", b.opt.Library.TeamDestroy(p), p.DeviceError))
		b.team = 0
	}
	status.Keep(&err, b.closeTransport())
	status.Keep(&err, b.dropSegments())
	return err
}

func (b *Buffer) freeEvents() error {
	var err error
	events := b.idle
	for _, ev := range b.ownEvents() {
		events = append(events, *ev)
	}
	for _, ev := range events {
		if ev == nil {
			continue
		}
		status.Keep(&err, ev.Destroy())
	}
	if b.comm != 0 && !b.borrowed {
		status.Keep(&err, b.dev.DestroyStream(b.comm))
	}
	return err
}

// retire sets the abort word for replays of captured graphs and keeps the status page for them.
func (b *Buffer) retire() {
	atomic.StoreUint32(&b.words.AbortWord, uint32(status.Aborted))
	atomic.CompareAndSwapUint32(&b.words.Sticky, 0, uint32(status.Aborted))
	for {
		old := retained.Load()
		pages := []*device.HostPage{b.page}
		if old != nil {
			pages = append(pages, *old...)
		}
		if retained.CompareAndSwap(old, &pages) {
			return
		}
	}
}

// within polls until a condition holds, or returns false at the limit.
func within(limit time.Duration, holds func() bool) bool {
	for deadline := time.Now().Add(limit); ; time.Sleep(poll) {
		if holds() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
