package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

const (
	// maxUnclaimed bounds the bytes that a peer may send ahead of this rank's Exchanges.
	maxUnclaimed = 4 * MaxBlob
	// messageCost is added to a message's bytes, which bounds the number of empty messages.
	messageCost = 1 << 20
)

// Message is one rank's contribution to an Exchange. The descriptors are close-on-exec and belong to the receiver.
type Message struct {
	Blob []byte
	FDs  []int
	Lost bool // of an ExchangeAmong that tolerates losses: the rank's process has ended
}

type boxKey struct {
	rank int
	tag  string
}

// box queues a rank's messages with one tag until an Exchange claims them. skip counts messages of Exchanges that ended
// without them: deliver drops these, so that the next Exchange gets the right ones.
type box struct {
	queue []Message
	skip  int
}

// Exchange gathers a blob and descriptors from every rank. It is collective: each rank calls it with the same tag, and
// for one tag in the same order; Exchanges with different tags may run at once. blob is at most MaxBlob bytes, fds at
// most MaxFDs long. The caller keeps fds; its entry in the result holds duplicates. With a rank on another machine, fds
// are Unsupported. If a rank is dead, has left or was failed before its message came, the error names the rank and the
// reason; when ctx ends, it names every late rank (Timeout). After an error the tag can be used again.
func (c *Channel) Exchange(ctx context.Context, tag string, blob []byte, fds []int) ([]Message, error) {
	if len(fds) > 0 {
		var remote []string
		for _, p := range c.peers {
			if !p.SameHost {
				remote = append(remote, p.String())
			}
		}
		if len(remote) > 0 {
			return nil, status.Errorf(status.Unsupported, "exchange %q: descriptors cannot be sent to %s: not on this machine",
				tag, strings.Join(remote, ", "))
		}
	}
	return c.ExchangeLocalFDs(ctx, tag, blob, fds)
}

// ExchangeLocalFDs is Exchange, except that ranks on other machines get the blob without the descriptors. So do in both
// ranks of the crowd.
func (c *Channel) ExchangeLocalFDs(ctx context.Context, tag string, blob []byte, fds []int) ([]Message, error) {
	return c.exchange(ctx, tag, blob, fds, nil, false)
}

// ExchangeAmong is Exchange without descriptors, which waits for the members alone; every connected rank gets the
// blob. With lossOK a member whose process ends before its message comes is no error: its message says Lost.
func (c *Channel) ExchangeAmong(ctx context.Context, tag string, blob []byte, members []int, lossOK bool) ([]Message, error) {
	return c.exchange(ctx, tag, blob, nil, members, lossOK)
}

// exchange is an Exchange among the members; nil: all ranks.
func (c *Channel) exchange(ctx context.Context, tag string, blob []byte, fds []int, members []int, lossOK bool) ([]Message, error) {
	if err := checkMessage(tag, blob, fds); err != nil {
		return nil, err
	}
	mine, err := dupFDs(fds)
	if err != nil {
		return nil, status.Errorf(status.System, "exchange %q: %w", tag, err)
	}
	blob = slices.Clone(blob) // queued frames outlive an Exchange that ends early
	got := make([]*Message, len(c.peers))
	for rank, p := range c.peers {
		if p.Absent || members != nil && !slices.Contains(members, rank) {
			got[rank] = &Message{}
		}
	}
	got[c.rank] = &Message{Blob: blob, FDs: mine}
	if err = c.send(tag, blob, fds); err == nil {
		err = c.collect(ctx, tag, got, lossOK)
	}
	if err != nil {
		for _, m := range got {
			if m != nil {
				closeFDs(m.FDs)
			}
		}
		return nil, err
	}
	out := make([]Message, len(got))
	for i, m := range got {
		out[i] = *m
	}
	out[c.rank].Blob = slices.Clone(blob)
	return out, nil
}

func checkMessage(tag string, blob []byte, fds []int) error {
	if tag == "" || len(tag) > maxTag {
		return status.InvalidArg("tag", fmt.Sprintf("%d bytes", len(tag)), fmt.Sprintf("1 to %d bytes", maxTag))
	}
	if len(fds) > MaxFDs {
		return status.InvalidArg("fds", fmt.Sprintf("%d descriptors", len(fds)), fmt.Sprintf("at most %d", MaxFDs))
	}
	return checkBlob(blob)
}

// send queues this rank's message for every peer and reserves the tag.
func (c *Channel) send(tag string, blob []byte, fds []int) error {
	var shared *sharedFDs
	if len(fds) > 0 {
		dup, err := dupFDs(fds)
		if err != nil {
			return status.Errorf(status.System, "exchange %q: %w", tag, err)
		}
		shared = &sharedFDs{fds: dup}
		shared.refs.Store(1)
		defer shared.release()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return closedError(tag)
	}
	if c.active[tag] != nil {
		return status.Errorf(status.InvalidState, "exchange %q is under way already", tag)
	}
	c.active[tag] = &collecting{}
	for rank, l := range c.links {
		if l == nil {
			continue
		}
		o := &outgoing{frame: frame{kind: kindData, rank: c.rank, nonce: c.nonce, tag: tag, blob: blob}}
		if shared != nil && c.peers[rank].SameHost && !c.peers[rank].Crowd {
			o.fds, o.shared = shared.fds, shared
			shared.refs.Add(1)
		}
		if !l.queue(o) {
			o.shared.release()
			c.fail(rank, status.Errorf(status.Timeout, "%s has not read for %d messages", c.peers[rank], queueFrames))
		}
	}
	return nil
}

func closedError(tag string) error {
	return status.Errorf(status.InvalidState, "exchange %q: this rank's channel is closed", tag)
}

// collect fills got as messages arrive. A rank that has died, or with which a connection has broken, may have sent its
// message to some of the others only: those that lack it have given up, and those that have it would wait for them. So
// a failure among the members ends it too. A rank that left in good order has sent everything to all.
func (c *Channel) collect(ctx context.Context, tag string, got []*Message, lossOK bool) error {
	wait := c.beginWait()
	defer wait.end()
	strangers := make([]bool, len(got))
	for rank := range got {
		strangers[rank] = got[rank] != nil
	}
	doomed := func(rank int) bool {
		s := c.state[rank]
		return !strangers[rank] && !s.Left && !(lossOK && s.Ended)
	}
	for {
		c.mu.Lock()
		missing, err := c.claim(tag, got, lossOK)
		if failed := c.firstFailure(doomed); err == nil && len(missing) > 0 && wait.hopeless(failed) {
			err = fmt.Errorf("exchange %q: %w", tag, failed)
		}
		if err == nil && len(missing) > 0 && ctx.Err() != nil {
			err = c.lateError(ctx, tag, missing, time.Since(wait.began))
			wait.giveUp(ctx, missing)
		}
		if err != nil {
			c.abandon(tag, missing)
		}
		if err != nil || len(missing) == 0 {
			delete(c.active, tag)
			c.mu.Unlock()
			return err
		}
		changed := c.changed
		c.active[tag].missing = len(missing)
		c.mu.Unlock()
		wait.until(ctx, missing, changed)
	}
}

// collecting is an Exchange under way: of how many ranks it lacks the message. The last one wakes it.
type collecting struct{ missing int }

// claim moves queued messages into got. The error is the first failure of a rank whose message is missing. Needs c.mu.
func (c *Channel) claim(tag string, got []*Message, lossOK bool) (missing []int, err error) {
	for rank := range got {
		if got[rank] != nil {
			continue
		}
		if m, ok := c.pop(boxKey{rank, tag}); ok {
			got[rank] = &m
			continue
		}
		if s := c.state[rank]; lossOK && s.Ended && !s.Left {
			got[rank] = &Message{Lost: true}
			continue
		}
		missing = append(missing, rank)
	}
	if c.closed && len(missing) > 0 {
		return missing, closedError(tag)
	}
	if err := c.firstFailure(func(rank int) bool { return got[rank] == nil }); err != nil {
		return missing, fmt.Errorf("exchange %q: %w", tag, err)
	}
	return missing, nil
}

// abandon makes deliver drop the missing messages of this Exchange when they arrive. Needs c.mu.
func (c *Channel) abandon(tag string, missing []int) {
	for _, rank := range missing {
		if c.failed[rank] == nil {
			c.box(boxKey{rank, tag}).skip++
		}
	}
}

// box and pop need c.mu. An empty box is deleted, so that used tags take no memory.
func (c *Channel) box(k boxKey) *box {
	b := c.boxes[k]
	if b == nil {
		b = &box{}
		c.boxes[k] = b
	}
	return b
}

func (c *Channel) pop(k boxKey) (Message, bool) {
	b := c.boxes[k]
	if b == nil || len(b.queue) == 0 {
		return Message{}, false
	}
	m := b.queue[0]
	c.pending[k.rank] -= len(m.Blob) + messageCost
	if b.queue = b.queue[1:]; len(b.queue) == 0 {
		delete(c.boxes, k)
	}
	return m, true
}

// deliver queues a message for its Exchange. Messages of a failed rank are dropped: a later Exchange would take them
// for its own.
func (c *Channel) deliver(f *frame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := boxKey{f.rank, f.tag}
	c.goesOn(f.rank)
	if c.closed || c.failed[f.rank] != nil || c.skipped(k) {
		closeFDs(f.fds)
		return nil
	}
	cost := len(f.blob) + messageCost
	if c.pending[f.rank]+cost > maxUnclaimed {
		closeFDs(f.fds)
		return fmt.Errorf("more than %d bytes were sent ahead", maxUnclaimed)
	}
	c.pending[f.rank] += cost
	b := c.box(k)
	b.queue = append(b.queue, Message{Blob: f.blob, FDs: f.fds})
	if e := c.active[f.tag]; e != nil {
		if e.missing--; e.missing <= 0 {
			c.wake()
		}
	}
	return nil
}

// skipped reports whether the next message of k belongs to an Exchange that has ended without it. Needs c.mu.
func (c *Channel) skipped(k boxKey) bool {
	b := c.boxes[k]
	if b == nil || b.skip == 0 {
		return false
	}
	if b.skip--; b.skip == 0 {
		delete(c.boxes, k)
	}
	return true
}

// dropBoxes closes the descriptors of unclaimed messages.
func (c *Channel) dropBoxes() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, b := range c.boxes {
		for _, m := range b.queue {
			closeFDs(m.FDs)
		}
		delete(c.boxes, k)
	}
}
