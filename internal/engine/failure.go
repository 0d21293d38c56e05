package engine

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

var fieldNames = map[uint32]string{
	abi.FieldHiddenBytes: "bytes of a row (hidden)", abi.FieldNumExperts: "num_experts", abi.FieldNumTopK: "num_topk",
	abi.FieldNumScales: "num_scales", abi.FieldFormat: "the format",
	abi.FieldMaxTokens: "num_max_dispatch_tokens_per_rank", abi.FieldOperation: "the operation", abi.FieldXType: "the type of x",
	abi.FieldAlignment: "expert_alignment", abi.FieldRouting: "the layout of rows",
}

// usable returns why no operation can begin, nil if one can; once, that an earlier call was refused. b.mu is not held.
func (b *Buffer) usable() error {
	if err := b.intact(); err != nil {
		return err
	}
	return b.refusal(callID{})
}

// intact returns the error of a buffer that has failed or has no memory, nil if it can be used.
func (b *Buffer) intact() error {
	if err := b.awake(); err != nil {
		return err
	}
	if atomic.LoadUint32(&b.words.Sticky) == 0 && atomic.LoadUint32(&b.words.AbortWord) == 0 {
		return nil
	}
	return status.Errorf(status.Aborted, "the buffer failed before: %w", b.failure())
}

// outcome returns the buffer's failure, or the refusal of a call (see refusal); nil if there is neither. Every completed
// wait asks it.
func (b *Buffer) outcome(own callID) error {
	if err := b.broken(); err != nil || b.enter() != nil {
		return err
	}
	defer b.leave()
	if b.words == nil {
		return nil
	}
	return b.refusal(own)
}

// broken returns the buffer's failure, nil if it has none.
func (b *Buffer) broken() error {
	if b.enter() != nil { // destroyed: the status page is gone, a failure found before is not
		if known := b.failed.Load(); known != nil {
			return *known
		}
		return nil
	}
	defer b.leave()
	if b.words == nil || atomic.LoadUint32(&b.words.Sticky) == 0 {
		return nil
	}
	return b.failure()
}

// Check returns the failure that made the buffer unusable, or once the refusal of an earlier call or the replay of a
// graph of before a regroup; nil if there is none. It does not wait.
func (b *Buffer) Check() error {
	if err := b.enter(); err != nil {
		return err
	}
	defer b.leave()
	if err := b.awaitReady(0); err != nil {
		if status.CodeOf(err) == status.Interrupted {
			return nil // still starting
		}
		return err
	}
	if err := b.failure(); err != nil {
		return err
	}
	if err := b.awake(); err != nil {
		return err
	}
	if err := b.refusal(callID{}); err != nil {
		return err
	}
	return b.elderReplayed()
}

// failure returns the buffer's first failure, from the kernel's record or the death of a peer, and keeps it.
func (b *Buffer) failure() error {
	if known := b.failed.Load(); known != nil {
		return *known
	}
	var err error
	switch {
	case atomic.LoadUint32(&b.words.Sticky) != 0:
		err = b.explain(&b.words.Failure)
	case b.death.Load() != nil:
		err = *b.death.Load()
	default:
		return nil
	}
	if b.failed.CompareAndSwap(nil, &err) {
		if b.stats != nil {
			b.stats.setState(abi.PageFailed)
		}
		b.log.Error(err.Error())
	}
	return *b.failed.Load()
}

// explain turns a kernel's failure record into an error.
func (b *Buffer) explain(f *abi.Failure) error {
	head := fmt.Sprintf("%s #%d%s on rank %d", op.Operation(f.Op), f.Call, phaseText(f.Op, f.Phase), b.rank)
	switch code := status.Code(f.Code); code {
	case status.Timeout, status.PeerDead:
		err := b.explainPeer(head, code, f)
		normal := f.Op == abi.OpNotify || f.Op == abi.OpDispatch || f.Op == abi.OpCombine
		if normal && b.opt.Shrink && b.top.Nodes() > 1 && !b.opt.Library.Has(abi.CapShrinkNodes) && f.Peer >= 0 && int(f.Peer) != b.rank { // not this rank's own network
			return status.Errorf(status.CodeOf(err), "%w; normal mode among nodes cannot go on without a rank with this kernel library, enable_shrink does so inside a node", err)
		}
		return err
	case status.Mismatch:
		return b.explainMismatch(head, f)
	case status.InvalidArgument:
		return explainArgument(head, f)
	case status.Aborted:
		if death := b.death.Load(); death != nil {
			return status.Errorf(status.CodeOf(*death), "%s was stopped: %w", head, *death)
		}
		if f.Peer >= 0 && int(f.Peer) < b.size && f.Expected > 0 {
			return status.Errorf(code, "%s was stopped: %s gave up before: its %s failed with %v", head,
				b.members.Describe(int(f.Peer)), op.Operation(f.Seen), status.Code(f.Expected))
		}
		return status.Errorf(code, "%s was stopped: the buffer was destroyed meanwhile, or a rank failed", head)
	default:
		return status.Errorf(code, "%s failed: %v", head, code)
	}
}

// explainPeer names the peer that was missing, by its present state: it may have died or left just before the deadline.
func (b *Buffer) explainPeer(head string, code status.Code, f *abi.Failure) error {
	if f.Peer < 0 || int(f.Peer) >= b.size {
		return status.Errorf(code, "%s: a peer did not arrive within %v", head, seconds(f.WaitedNS))
	}
	peer := int(f.Peer)
	if code == status.Timeout {
		peer = b.blame(peer, f)
	}
	who := b.members.Describe(peer)
	if peer == b.rank {
		return status.Errorf(code, "%s: the network of this rank, %s, has delivered nothing of what it sent within %v", head, who, seconds(f.WaitedNS))
	}
	switch state, how := b.members.State(peer); {
	case state == PeerGone:
		return status.Errorf(status.PeerDead, "%s: %s has left the group: it destroyed its buffer", head, who)
	case state == PeerDead:
		return status.Errorf(status.PeerDead, "%s: %s died: %s", head, who, how)
	case b.hasReleased(peer):
		return status.Errorf(status.InvalidState, "%s: %s has released the buffer's memory and takes no part: release() here too, then restore() on every rank",
			head, who)
	case code == status.PeerDead:
		return status.Errorf(status.PeerDead, "%s: %s died", head, who)
	}
	return status.Errorf(status.Timeout, "%s: %s did not arrive within %v: it is alive but late", head, who, seconds(f.WaitedNS))
}

// blame follows "waits for rank r" in exchanges, which kernels do not see: a rank that waits there is late, but not to
// blame. One that has made the failed call before it came to the exchange does not send for another reason: its network
// delivers nothing, and whom it waits for in the exchange waits for it.
func (b *Buffer) blame(peer int, f *abi.Failure) int {
	if b.hasMade(peer, f) {
		return peer
	}
	for range b.size {
		next := b.members.Awaits(peer)
		if next < 0 || next == b.rank {
			break
		}
		peer = next
	}
	return peer
}

// hasMade reports whether a rank has made the failed call.
func (b *Buffer) hasMade(peer int, f *abi.Failure) bool {
	last := b.members.Called(peer)
	return last.Buffer == b.opt.ID && last.Op == f.Op && last.Number >= f.Call
}

func (b *Buffer) explainMismatch(head string, f *abi.Failure) error {
	name, ok := fieldNames[f.Field]
	mine, theirs := fieldValue(f.Op, f.Field, f.Expected), fieldValue(f.Op, f.Field, f.Seen)
	normal := f.Op == abi.OpNotify || f.Op == abi.OpDispatch || f.Op == abi.OpCombine
	switch {
	case f.Field == abi.FieldMaxTokens && f.Op == abi.OpCombine && (f.Expected == 0 || f.Seen == 0):
		name = "the kind of handle"
		mine, theirs = handleText(f.Expected), handleText(f.Seen)
	case f.Field == abi.FieldMaxTokens && normal:
		name = "num_max_tokens_per_rank"
	case f.Field == abi.FieldOperation && f.Op != abi.OpCombine && normal && isDispatch(f.Expected) && isDispatch(f.Seen):
		name = "whether a dispatch waits for counts, or has room for more than " + itoa(abi.AtOnceRows) + " rows"
	case !ok:
		name = fmt.Sprintf("field %d", f.Field)
	}
	return status.Errorf(status.Mismatch, "%s: ranks disagree on %s: rank %d has %s, rank %d has %s", head, name, b.rank, mine, f.Peer, theirs)
}

// isDispatch: of the operations that ranks compare, a notify or a dispatch that is not cached.
func isDispatch(number int64) bool {
	return number == int64(abi.OpNotify) || number == int64(abi.OpDispatch)
}

// handleText: of a handle without a routing, in a combine, by how many rows its dispatch had room for.
func handleText(rows int64) string {
	if rows > 0 {
		return "one of num_worst_tokens up to " + strconv.FormatInt(rows, 10)
	}
	return "another"
}

func phaseText(op, phase uint32) string {
	switch {
	case op == abi.OpLayout || op == abi.OpMask || op == abi.OpBarrier || op == abi.OpClean:
		return ""
	case phase == abi.PhaseSend:
		return " (send)"
	case phase == abi.PhaseRecv:
		return " (receive)"
	}
	return ""
}

func seconds(ns uint64) string {
	return strconv.FormatFloat(float64(ns)/float64(time.Second), 'f', 1, 64) + " s"
}

// PeerDied aborts the waits of running kernels, or with Shrink masks the rank. The group calls it, from any goroutine.
func (b *Buffer) PeerDied(rank int) { b.lost(rank, b.died) }

// PeerLeft marks a rank that closed its buffer in good order. What it sent still counts; a wait for more ends. The
// group calls it, from any goroutine.
func (b *Buffer) PeerLeft(rank int) { b.lost(rank, b.left) }

// lost runs then for a lost rank. During the start there is no status page yet: build reads the ranks' states at its
// end.
func (b *Buffer) lost(rank int, then func(int)) {
	if b.enter() != nil {
		return
	}
	defer b.leave()
	if b.watching.Load() {
		then(rank)
	}
}

// ReadStates marks the ranks that died or left before the group knew of this buffer.
func (b *Buffer) ReadStates() {
	if b.enter() != nil {
		return
	}
	defer b.leave()
	if b.watching.Load() {
		b.readStates()
	}
}

func (b *Buffer) died(rank int) {
	b.losePeer(rank)
	markDead(b.words, rank)
	if b.opt.Shrink {
		return
	}
	_, how := b.members.State(rank)
	b.abort(rank, status.Errorf(status.PeerDead, "%s died: %s", b.members.Describe(rank), how))
}

// left discards sends queued for a rank that has closed its buffer and marks it dead, without an abort: what it has
// already sent may complete this call.
func (b *Buffer) left(rank int) {
	b.losePeer(rank)
	markDead(b.words, rank)
}

// abort sets the abort word, at which running kernels leave their waits. The first reason counts.
func (b *Buffer) abort(rank int, err error) {
	if b.death.CompareAndSwap(nil, &err) {
		atomic.StoreInt32(&b.words.AbortRank, int32(rank))
		atomic.StoreUint32(&b.words.AbortWord, uint32(status.PeerDead))
	}
}

// unmarkDead clears what markDead has set.
func unmarkDead(words *abi.Status, rank int) {
	word := (*uint32)(unsafe.Pointer(&words.Dead[rank&^3]))
	atomic.AndUint32(word, ^(uint32(0xff) << (8 * (rank & 3))))
}

// markDead sets a byte of words.Dead. Go has no atomic bytes: the word around it is changed, on a little-endian
// machine.
func markDead(words *abi.Status, rank int) {
	word := (*uint32)(unsafe.Pointer(&words.Dead[rank&^3]))
	atomic.OrUint32(word, 1<<(8*(rank&3)))
}
