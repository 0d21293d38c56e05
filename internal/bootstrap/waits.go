package bootstrap

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

const (
	// tellEvery is the time between two words to the other ranks of whom this rank waits for.
	tellEvery = 200 * time.Millisecond
	// waitHolds is how long such a word counts: a rank that has been stopped since says nothing any more.
	waitHolds = 3 * tellEvery
)

// waiting is a wait for other ranks that is under way. A rank that waits itself is not to blame for being late, so the
// others are told of a wait that lasts.
type waiting struct {
	c     *Channel
	tick  *time.Ticker
	began time.Time
	told  bool
	due   bool      // the others are to be told
	lost  time.Time // when it was first known that a rank of the step has failed; zero: none has
}

func (c *Channel) beginWait() *waiting {
	return &waiting{c: c, tick: time.NewTicker(tellEvery), began: time.Now()}
}

// hopelessTime is how long a step whose rank has failed, and which can thus succeed by luck alone, still waits for the
// others, so that all come to the same end where that is a matter of messages that are under way.
const hopelessTime = time.Second

// hopeless reports whether a rank of the step has failed so long ago that the others will not come any more.
func (w *waiting) hopeless(failed error) bool {
	if failed == nil {
		return false
	}
	if w.lost.IsZero() {
		w.lost = time.Now()
	}
	return time.Since(w.lost) > hopelessTime
}

// giveUp tells the others, at the deadline of this wait, whom this rank has waited for: their deadlines come a moment
// later, and it is not to blame for what it does not send any more. Needs c.mu.
func (w *waiting) giveUp(ctx context.Context, missing []int) {
	if !errors.Is(status.Cause(ctx), context.DeadlineExceeded) {
		return
	}
	if w.told {
		w.told = false
		w.c.waits--
	}
	w.c.tellWait(w.c.toBlame(missing)[0], true)
}

// until waits for the missing ranks: for a change, the context's end, or the time to tell the others, whom the next call
// then tells of those that are missing still.
func (w *waiting) until(ctx context.Context, missing []int, changed <-chan struct{}) {
	if w.due {
		w.due = false
		w.c.mu.Lock()
		if !w.told {
			w.told = true
			w.c.waits++
		}
		w.c.tellWait(w.c.toBlame(missing)[0], false)
		w.c.mu.Unlock()
	}
	select {
	case <-w.tick.C:
		w.due = true
	case <-changed:
	case <-ctx.Done():
	}
}

func (w *waiting) end() {
	w.tick.Stop()
	if !w.told {
		return
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if w.c.waits--; w.c.waits == 0 {
		w.c.tellWait(-1, false)
	}
}

// tellWait tells every connected rank that reads whom this rank waits for, -1: nobody, or has waited for when it gave
// up. Needs c.mu.
func (c *Channel) tellWait(rank int, gaveUp bool) {
	if c.closed {
		return
	}
	blob := append(binary.LittleEndian.AppendUint32(nil, uint32(rank+1)), 0)
	if gaveUp {
		blob[4] = 1
	}
	for _, l := range c.links {
		if l != nil && l.hasRoom() {
			l.queue(&outgoing{frame: frame{kind: kindWait, rank: c.rank, nonce: c.nonce, blob: blob}})
		}
	}
}

// heardWait handles a frame of kind kindWait.
func (c *Channel) heardWait(f *frame) error {
	if len(f.blob) != 5 || int64(binary.LittleEndian.Uint32(f.blob)) > int64(len(c.peers)) {
		return errors.New("a damaged word of a wait")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard[f.rank] = heardWait{awaited: int(binary.LittleEndian.Uint32(f.blob)) - 1, at: time.Now(), gaveUp: f.blob[4] != 0}
	return nil
}

// heardWait is whom a rank last said that it waits for, -1 for nobody, and when it said so.
type heardWait struct {
	awaited int
	at      time.Time
	gaveUp  bool // at its deadline: holds until the rank begins another step
}

// rank is whom the word names while it counts, else -1.
func (h heardWait) rank() int {
	if h.gaveUp || time.Since(h.at) < waitHolds {
		return h.awaited
	}
	return -1
}

// goesOn forgets that a rank has given up: it sends again. Needs c.mu.
func (c *Channel) goesOn(rank int) {
	if c.heard[rank].gaveUp {
		c.heard[rank] = heardWait{awaited: -1}
	}
}

// Awaits returns the rank that another one has said of late that it waits for, or waited for when it gave up; -1 for
// none.
func (c *Channel) Awaits(rank int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heard[rank].rank()
}

// awaits is whom a rank waits for, here or in the channel that this one follows. Needs c.mu.
func (c *Channel) awaits(rank int) (awaited int, waits bool) {
	if awaited = c.heard[rank].rank(); awaited >= 0 {
		return awaited, true
	}
	if c.elder == nil {
		return -1, false
	}
	return c.elder(rank)
}

func (c *Channel) isWaiting(rank int) bool {
	_, waits := c.awaits(rank)
	return waits
}

// toBlame are those of the missing ranks that do not wait themselves; all where each does. Needs c.mu.
func (c *Channel) toBlame(missing []int) []int {
	blamed := slices.DeleteFunc(slices.Clone(missing), c.isWaiting)
	if len(blamed) == 0 {
		return missing
	}
	return blamed
}

// endOfWaits is the rank that the first of the missing ranks waits for, or that one waits for, and so on, where all of
// them wait; -1 where one does not, where they wait for this rank, for one that is not of this channel, or in a circle.
// Needs c.mu.
func (c *Channel) endOfWaits(missing []int) int {
	if !c.isWaiting(missing[0]) || c.toBlame(missing)[0] != missing[0] {
		return -1
	}
	at := missing[0]
	for range c.peers {
		next, waits := c.awaits(at)
		if !waits {
			return at
		}
		if at = next; at < 0 || at == c.rank {
			return -1
		}
	}
	return -1
}

// late splits the ranks that are missing at a deadline: those to blame, by name, and a word on those that only wait for
// them. Where all wait none is spared. Needs c.mu.
func (c *Channel) late(missing []int) (names, others string) {
	blamed := c.toBlame(missing)
	text := make([]string, len(blamed))
	for i, rank := range blamed {
		text[i] = c.peers[rank].String()
	}
	if end := c.endOfWaits(missing); end >= 0 {
		waits := "waits"
		if c.heard[missing[0]].gaveUp {
			waits = "has waited"
		}
		return strings.Join(text, ", "), ", which " + waits + " for " + c.peers[end].String()
	}
	spared := slices.DeleteFunc(slices.Clone(missing), func(rank int) bool { return slices.Contains(blamed, rank) })
	switch len(spared) {
	case 0:
	case 1:
		others = fmt.Sprintf(" (%s waits too)", rankList(spared))
	default:
		others = fmt.Sprintf(" (%s wait too)", rankList(spared))
	}
	return strings.Join(text, ", "), others
}

// lateError names every rank whose message is missing and who does not wait itself. Needs c.mu.
func (c *Channel) lateError(ctx context.Context, tag string, missing []int, waited time.Duration) error {
	names, others := c.late(missing)
	return ctxError(ctx, fmt.Sprintf("exchange %q: nothing from %s after %.1f s%s", tag, names, waited.Seconds(), others))
}

// Elder reports whether a rank still waits in the channel that another one follows, and for whom: -1 for one that is not
// of the new channel. Ranks are numbered as in the new one.
type Elder func(rank int) (awaited int, waits bool)

// Follows tells a channel that is being opened of the one that it follows. Before Connect.
func (p *Pending) Follows(elder Elder) { p.elder = elder }

// Succeeded ends what Follows began: no rank waits in the elder channel any more, whose memory this one then lets go of.
func (c *Channel) Succeeded() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.elder = nil
}
