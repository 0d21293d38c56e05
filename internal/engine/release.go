package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// A buffer without its memory: Release gives it back, Restore has it again, at the same addresses.
//
// Release is local: what peers have mapped of this rank's memory stays valid for them, with its content, until they
// release it, so that a rank which still receives what this one has sent finds it. Restore is collective, and
// afterwards all is as in a new buffer: memory zeroed, calls of kernels numbered anew, a failure of before over. Between
// the two kernels of graphs that were captured before leave at once, and calls are refused.

// sleep is what a buffer knows of released memory, its own and its peers'.
type sleep struct {
	turn       sync.Mutex            // one Release, or one look at a Restore, at a time
	why        atomic.Pointer[error] // why calls are refused: this rank's memory is released; nil: it is there
	generation atomic.Uint64         // Restores so far, the same on all ranks
	away       atomic.Int32          // peers that have released their memory and not restored it
	restoring  chan error            // has the outcome of a Restore that runs; nil: none. turn is held
	mu         sync.Mutex
	released   []uint64 // by rank: its newest Release came in this generation, plus 1. mu is held
}

var errReleased = status.Errorf(status.InvalidState, "the buffer's memory is released: restore() on every rank comes first")

// awake returns why no call can begin here, nil if one can.
func (b *Buffer) awake() error {
	if why := b.sleep.why.Load(); why != nil {
		return *why
	}
	return nil
}

// startAwake is start for what needs the memory. Without an error the caller must leave.
func (b *Buffer) startAwake() error {
	err := b.start()
	if err == nil {
		if err = b.awake(); err != nil {
			b.leave()
		}
	}
	return err
}

// peersAwake refuses a collective call while a peer's memory is released: that peer takes no part. The second half of a
// call that the peer has completed goes on.
func (b *Buffer) peersAwake(number op.Operation, rest bool) error {
	if b.sleep.away.Load() == 0 || rest || number == op.OpLayout || number == op.OpMask {
		return nil
	}
	var names []string
	for rank := range b.size {
		if b.hasReleased(rank) {
			names = append(names, b.members.Describe(rank))
		}
	}
	if names == nil {
		return nil // restored meanwhile
	}
	return status.Errorf(status.InvalidState, "%s: released the buffer's memory by %s, which takes no part: release() here too, then restore() on every rank",
		number, strings.Join(names, ", "))
}

// hasReleased reports whether a rank's memory is released, as far as this rank has heard.
func (b *Buffer) hasReleased(rank int) bool {
	b.sleep.mu.Lock()
	defer b.sleep.mu.Unlock()
	return b.sleep.released != nil && b.sleep.released[rank] > b.sleep.generation.Load()
}

// releasedTag is the tag by which ranks tell each other of a Release.
func (b *Buffer) releasedTag() string { return fmt.Sprintf("buffer/%d/released", b.opt.ID) }

// Told takes a word of another rank. The group calls it, from any goroutine.
func (b *Buffer) Told(rank int, tag string, word []byte) {
	if tag != b.releasedTag() || len(word) != 8 || rank < 0 || rank >= b.size || b.enter() != nil {
		return
	}
	defer b.leave()
	b.sleep.mu.Lock()
	if b.sleep.released == nil {
		b.sleep.released = make([]uint64, b.size)
	}
	b.sleep.released[rank] = binary.LittleEndian.Uint64(word) // words of a rank come in order
	b.sleep.mu.Unlock()
	b.markReleased()
}

// markReleased lets kernels of this rank not wait for a released one: what it has already sent may complete the call.
func (b *Buffer) markReleased() {
	b.sleep.mu.Lock()
	defer b.sleep.mu.Unlock()
	away := int32(0)
	for rank, generation := range b.sleep.released {
		gone := generation > b.sleep.generation.Load()
		if gone {
			away++
		}
		if !b.watching.Load() {
			continue
		}
		if gone {
			markDead(b.words, rank)
		} else if state, _ := b.members.State(rank); state == PeerAlive {
			unmarkDead(b.words, rank)
		}
	}
	b.sleep.away.Store(away)
}

// Release gives back the buffer's memory and the peers' mappings, and keeps the addresses and the group. Local; it
// waits up to slice, without a limit if slice is negative, for this rank's calls to end. Interrupted: they have not.
// Once released it does nothing.
func (b *Buffer) Release(slice time.Duration) error {
	deadline := time.Now().Add(slice)
	over := func() bool { return slice >= 0 && !time.Now().Before(deadline) }
	for !b.sleep.turn.TryLock() {
		if over() {
			return errNotYet
		}
		time.Sleep(poll)
	}
	defer b.sleep.turn.Unlock()
	if err := b.enter(); err != nil {
		return err
	}
	defer b.leave()
	if err := b.awaitReady(slice); err != nil {
		return err
	}
	if !b.restoreEnded() {
		return status.Errorf(status.InvalidState, "release: restore() has not ended")
	}
	if b.awake() != nil {
		return nil
	}
	if err := b.canRelease(); err != nil {
		return err
	}
	for {
		idle, err := b.closeDoor()
		if err != nil {
			return err
		}
		if idle {
			return b.giveBack()
		}
		if b.closed.Load() {
			return errDestroyed
		}
		if over() {
			return errNotYet
		}
		time.Sleep(poll)
	}
}

// canRelease refuses memory that cannot be given back, and rows that would be lost.
func (b *Buffer) canRelease() error {
	if b.symmetricHeap != nil {
		return status.Errorf(status.Unsupported, "release: the buffer's memory is of %s, which all ranks free together, at destroy()", b.symmetricHeap.Version)
	}
	for rank := range b.size {
		if b.absent(rank) {
			return status.Errorf(status.InvalidState, "release: the place of %s is empty: regroup with a process in it, or renumber", b.members.Describe(rank))
		}
	}
	if err := b.block.CanGiveBack(); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for which := range b.tickets {
		for i := range b.tickets[which] {
			if t := &b.tickets[which][i]; t.open && b.healthy() {
				return status.Errorf(status.InvalidState, "release: %s #%d is without its receive half, whose rows would be lost: call its hook first, "+
					"or if it is lost, clean_low_latency_buffer on every rank", op.Operation(abi.OpLLDispatch+which), t.number)
			}
		}
	}
	return nil
}

// closeDoor refuses calls from now on if no thread is inside one and no work is left on the streams; else it changes
// nothing. The caller is inside, once.
func (b *Buffer) closeDoor() (idle bool, err error) {
	if b.active.Load() != 1 || !b.mu.TryLock() {
		return false, nil
	}
	defer b.mu.Unlock()
	if capturing, err := b.isCapturing(); capturing || err != nil {
		if err == nil {
			err = status.Errorf(status.InvalidState, "release: a graph is being captured from a stream of the buffer")
		}
		return false, err
	}
	if err := b.order.end.Record(b.comm); err != nil {
		return false, err
	}
	if err := b.recordTail(); err != nil {
		return false, err
	}
	if done, err := b.order.end.Wait(poll); !done || err != nil {
		return false, err
	}
	if !b.order.capturing { // an event of a capture cannot be asked; stopTeam waits for the device then
		if done, err := b.order.tail.Wait(poll); !done || err != nil {
			return false, err
		}
	}
	b.watching.Store(false)
	b.sleep.why.Store(&errReleased)
	if b.active.Load() != 1 { // a thread came in before it could see that
		b.openDoor()
		return false, nil
	}
	return true, nil
}

func (b *Buffer) openDoor() {
	b.sleep.why.Store(nil)
	b.watching.Store(true)
	b.readStates()
	b.markReleased()
}

// isCapturing reports whether a graph is being captured from a stream that the buffer's newest calls ran on.
func (b *Buffer) isCapturing() (bool, error) {
	capturing, err := b.dev.Capturing(b.comm)
	if capturing || err != nil || !b.order.used || !b.order.capturing {
		return capturing, err
	}
	capturing, err = b.dev.Capturing(b.order.last)
	return capturing && err == nil, nil // the caller may have destroyed that stream: then nothing is captured there
}

// giveBack does the work of Release. Nobody is inside a call.
func (b *Buffer) giveBack() error {
	if err := b.failure(); err != nil { // logs it
		b.log.Warn("release after a failure: restore() makes the buffer anew")
	}
	b.deliver(deliverAll)
	b.tellReleased(1) // first: the device may run kernels of ranks that wait for this one
	if err := b.stopTeam(); err != nil {
		b.tellReleased(0)
		b.openDoor()
		return fmt.Errorf("release: %w", err)
	}
	err := b.dropSegments()
	status.Keep(&err, b.closeTransport())
	status.Keep(&err, b.block.GiveBack())
	b.forgetCalls()
	b.log.Info(fmt.Sprintf("released %d bytes", b.block.Local.Bytes))
	return err
}

// tellReleased tells the peers that this rank's memory is away until so many more Restores.
func (b *Buffer) tellReleased(restores uint64) {
	word := binary.LittleEndian.AppendUint64(nil, b.sleep.generation.Load()+restores)
	if err := b.members.Tell(b.releasedTag(), word); err != nil {
		b.log.Warn("release: " + err.Error()) // they learn it from Restore
	}
}

// stopTeam makes the team's kernels leave at once from now on, those of replayed graphs among them, and without touching
// a block. Nothing of this rank is in flight.
func (b *Buffer) stopTeam() error {
	p := &abi.TeamReleaseParams{Team: b.team}
	if b.captured {
		p.Captured = 1
	}
	code := b.opt.Library.TeamRelease(p)
	if status.Code(code) == status.Unsupported && b.captured && b.copiesRows() {
		return status.Errorf(status.Unsupported, "graphs hold copies of low-latency rows (DEEPEP_LL_TRANSFER=copy), which replays would go on with: destroy the buffer and make a new one")
	}
	if status.Code(code) == status.Unsupported && b.captured && b.copiesNormal() {
		return status.Errorf(status.Unsupported, "graphs hold copies of rows (DEEPEP_NORMAL_TRANSFER=copy), which replays would go on with: destroy the buffer and make a new one")
	}
	return kern.Error("dk_team_release", code, p.DeviceError)
}

// dropSegments ends the use of all segments: a rank's own stays its user's, the peers' mappings go.
func (b *Buffer) dropSegments() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var err error
	for i, s := range b.segments {
		if s != nil {
			b.segments[i] = nil
			status.Keep(&err, s.shared.Release())
		}
	}
	return err
}

// forgetCalls forgets what calls have left: exchanges of counts without their dispatch, and the places that low-latency
// calls use in turn.
func (b *Buffer) forgetCalls() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closeTickets()
	for i := range b.pending {
		b.pending[i].token = 0
	}
	b.sends, b.combines = [2]uint64{}, 0
	b.handles.age(b.captured)
}

// Restore has the memory again, new and zeroed, at the addresses of before. Collective; it waits up to slice, without a
// limit if slice is negative. Interrupted: it goes on, and the next call waits for it. After an error the buffer stays
// released, and all ranks may call it again.
func (b *Buffer) Restore(slice time.Duration) error {
	deadline := time.Now().Add(slice)
	for !b.sleep.turn.TryLock() {
		if slice >= 0 && !time.Now().Before(deadline) {
			return errNotYet
		}
		time.Sleep(poll)
	}
	defer b.sleep.turn.Unlock()
	if err := b.enter(); err != nil {
		return err
	}
	defer b.leave()
	if err := b.awaitReady(slice); err != nil {
		return err
	}
	if b.sleep.restoring == nil && b.awake() == nil {
		return b.peersAwakeForRestore()
	}
	if b.sleep.restoring == nil {
		b.sleep.restoring = make(chan error, 1)
		go b.runRestore(b.sleep.restoring)
	}
	var limit <-chan time.Time
	if slice >= 0 {
		timer := time.NewTimer(max(0, time.Until(deadline)))
		defer timer.Stop()
		limit = timer.C
	}
	select {
	case err := <-b.sleep.restoring:
		b.sleep.restoring = nil
		return err
	case <-limit:
		return errNotYet
	case <-b.life.Done():
		return errDestroyed
	}
}

// restoreEnded reports whether no Restore runs. One whose caller has given up waiting for it may have ended since.
func (b *Buffer) restoreEnded() bool {
	if b.sleep.restoring == nil {
		return true
	}
	select {
	case <-b.sleep.restoring:
		b.sleep.restoring = nil
		return true
	default:
		return false
	}
}

// peersAwakeForRestore: there is nothing to restore here. If a peer has released, it waits for this rank in vain.
func (b *Buffer) peersAwakeForRestore() error {
	for rank := range b.size {
		if b.hasReleased(rank) {
			return status.Errorf(status.InvalidState, "restore: %s has released the buffer's memory, and this rank has not: release() comes first", b.members.Describe(rank))
		}
	}
	return nil
}

func (b *Buffer) runRestore(done chan<- error) {
	o := <-inBackground("restore", func() (struct{}, error) {
		if b.enter() != nil {
			return struct{}{}, errDestroyed
		}
		defer b.leave()
		ctx, cancel := b.limited(context.Background())
		defer cancel()
		return struct{}{}, b.restore(ctx)
	})
	if o.err != nil {
		o.err = fmt.Errorf("restore: %w", o.err)
	}
	done <- o.err
}

// restore takes part in both exchanges also after an error, so that the ranks stay in step.
func (b *Buffer) restore(ctx context.Context) error {
	began := time.Now()
	err := b.block.Again(ctx, b.withCalls(b.exchanger("restore")))
	if err == nil {
		err = b.startTeam()
	}
	if err != nil {
		limited, cancel := context.WithCancel(ctx)
		cancel() // only tells: the others may not come
		_ = b.agree(limited, "restored", err)
	} else {
		err = b.agree(ctx, "restored", nil)
	}
	if err != nil {
		if b.opt.Explain != nil {
			err = b.opt.Explain(err)
		}
		undone := b.stopTeam()
		status.Keep(&undone, b.closeTransport())
		status.Keep(&undone, b.block.GiveBack())
		if undone != nil {
			b.log.Warn("after a restore that failed: " + undone.Error())
		}
		return err
	}
	b.wake()
	b.log.Info(fmt.Sprintf("restored %d bytes in %.1f ms", b.block.Local.Bytes, float64(time.Since(began))/1e6))
	return nil
}

// withCalls puts the numbers of this rank's newest calls before a message, and goes on from the greatest: ranks may have
// begun calls that others took no part in.
func (b *Buffer) withCalls(exchange device.Exchange) device.Exchange {
	return func(ctx context.Context, blob []byte, fds []int) ([]device.Message, error) {
		b.mu.Lock()
		head := make([]byte, 0, 8*len(b.calls))
		for _, number := range b.calls {
			head = binary.LittleEndian.AppendUint64(head, number)
		}
		b.mu.Unlock()
		all, err := exchange(ctx, append(head, blob...), fds)
		if err != nil {
			return nil, err
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		for rank := range all {
			m := &all[rank]
			if len(m.Blob) < len(head) {
				return all, status.Errorf(status.Internal, "rank %d sent %d bytes of its calls", rank, len(m.Blob))
			}
			for i := range b.calls {
				b.calls[i] = max(b.calls[i], binary.LittleEndian.Uint64(m.Blob[8*i:]))
			}
			m.Blob = m.Blob[len(head):]
		}
		return all, nil
	}
}

// startTeam connects the queue pairs and lets the kernels begin anew.
func (b *Buffer) startTeam() error {
	if err := b.openTransport(); err != nil {
		return err
	}
	b.clearStatus()
	p := &abi.TeamRestoreParams{Team: b.team, Transport: b.transport}
	return kern.Error("dk_team_restore", b.opt.Library.TeamRestore(p), p.DeviceError)
}

// clearStatus takes back what ended calls before. No kernel runs that could look at it.
func (b *Buffer) clearStatus() {
	atomic.StoreUint32(&b.words.AbortWord, 0)
	atomic.StoreInt32(&b.words.AbortRank, -1)
	b.words.Dead = [abi.MaxRanks]uint8{}
	b.words.Failure = abi.Failure{}
	atomic.StoreUint32(&b.words.Sticky, 0)
	b.failed.Store(nil)
	b.death.Store(nil)
	b.stats.setState(abi.PageLive)
}

// wake lets calls begin again, once every rank has restored.
func (b *Buffer) wake() {
	b.sleep.generation.Add(1)
	b.openDoor()
}

// What a handle says of its origin, in op.Handle.Exchange: from the lowest bit on the number of the notify, the number of
// Restores before it, and Options.Maker. Kernels compare the first alone, or all. Then whether the dispatch went at once,
// as its combine does, too: also where nothing else is known.
const (
	exchangeBits   = 32
	generationBits = 8
	makerBits      = 62 - exchangeBits - generationBits
	wentAtOnce     = 1 << 62 // a positive number for the kernels
)

// originOf is a handle's Exchange without how its dispatch went.
func originOf(h *op.Handle) uint64 { return h.Exchange &^ wentAtOnce }

// tookNotify reports whether the handle is of a dispatch without a routing that went at once.
func tookNotify(h *op.Handle) bool { return h.Exchange&wentAtOnce != 0 }

// exchangeOf is the number of an exchange of counts of this buffer, as handles have it.
func (b *Buffer) exchangeOf(notify uint64) uint64 {
	maker := uint64(b.opt.Maker) & (1<<makerBits - 1)
	return (maker<<generationBits|b.sleep.generation.Load()&(1<<generationBits-1))<<exchangeBits | notify&(1<<exchangeBits-1)
}

// outdated reports whether a handle is of a dispatch of this buffer from before a Release, or a renumbering. One that does not say where
// it is from passes, and so does one of another buffer.
func (b *Buffer) outdated(h *op.Handle) bool {
	exchange := originOf(h)
	origin, mine := exchange>>exchangeBits, b.exchangeOf(0)>>exchangeBits
	return exchange != 0 && origin>>generationBits == mine>>generationBits && origin != mine
}

// handleOf is exchangeOf for the handle of a notify, 0 (not known) for one that a graph captures: each replay makes the
// handle anew, also after a Restore.
func (b *Buffer) handleOf(notify uint64, stream device.Stream) uint64 {
	if capturing, err := b.dev.Capturing(stream); capturing || err != nil {
		return 0
	}
	return b.exchangeOf(notify)
}

// numKnownHandles is how many low-latency handles a buffer knows again: they are two addresses, without room for more.
const numKnownHandles = 64

// knownHandles are the src_info of low-latency dispatches. b.mu is held.
type knownHandles struct {
	newest [numKnownHandles]uint64
	made   int
	old    map[uint64]bool // of before the newest Release
}

func (k *knownHandles) add(srcInfo uint64) {
	k.newest[k.made%numKnownHandles] = srcInfo
	k.made++
	if len(k.old) > 0 {
		delete(k.old, srcInfo)
	}
}

// age makes all known handles old ones. captured: a graph may make any of them anew.
func (k *knownHandles) age(captured bool) {
	if k.old == nil {
		k.old = map[uint64]bool{}
	}
	for _, srcInfo := range k.newest[:min(k.made, numKnownHandles)] {
		k.old[srcInfo] = true
	}
	if captured {
		clear(k.old)
	}
	k.made = 0
}

func (k *knownHandles) check(srcInfo uint64) error {
	if len(k.old) > 0 && k.old[srcInfo] {
		return status.InvalidArg("handle", "one of before release()", "that of a low-latency dispatch since restore()")
	}
	return nil
}
