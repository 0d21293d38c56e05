package bootstrap

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// maxPosts bounds the tags under which a rank may post.
const maxPosts = 64

// post is what a rank posts under a tag.
type post struct {
	number  uint64 // of the newest one
	blob    []byte // nil: withdrawn
	dead    uint64 // posts up to this number were part of a gathering that has failed
	after   uint64 // of another rank's: which of this rank's posts it knew to be dead when it posted
	killed  error  // of this rank's own: a member whose gathering had seen it has failed
	view    view   // which posts the rank has gathered, as it says
	beside  beside // which of this rank's posts it has seen while its own stood
	members []int  // of this rank's own: whose posts it waits for
}

// beside are two posts that stood at the same time, by their numbers.
type beside struct{ theirs, mine uint64 }

// view is which posts a rank has gathered: their numbers by rank. A rank whose process has ended has none, also where
// one of the others already left it out of its members.
type view map[int]uint64

// The first byte of a frame of kind kindPost. What follows: a post's number, that of the newest of the receiver's posts that
// the sender knows to be dead, and the post; or a withdrawal, or a view.
const (
	postStands = 1
	postEnds   = 2
	postView   = 3
	postSeen   = 4 // by the receiver: the number of the sender's post, which stands, and that of the receiver's follow
)

// withdrawal ends the sender's post, and kills those that stood beside it.
type withdrawal struct {
	Seen   map[int]uint64 // by rank: the number of that post
	Reason []byte
}

// sendPost sends a frame of kind kindPost to every rank that is connected. Needs c.mu.
func (c *Channel) sendPost(tag string, blob func(rank int) []byte) error {
	if c.closed {
		return closedError(tag)
	}
	for rank, l := range c.links {
		if l != nil {
			l.queue(&outgoing{frame: frame{kind: kindPost, rank: c.rank, nonce: c.nonce, tag: tag, blob: blob(rank)}})
		}
	}
	return nil
}

// sendPostJSON sends the same to every rank. Needs c.mu.
func (c *Channel) sendPostJSON(tag string, first byte, what any) error {
	text, err := json.Marshal(what)
	if err != nil {
		return err
	}
	text = append([]byte{first}, text...)
	return c.sendPost(tag, func(int) []byte { return text })
}

// postOf finds or makes a rank's entry. Needs c.mu.
func (c *Channel) postOf(rank int, tag string) (*post, error) {
	k := boxKey{rank, tag}
	p := c.posts[k]
	if p == nil {
		if len(c.posts) >= maxPosts*len(c.peers) {
			return nil, errors.New("too many tags are posted under")
		}
		p = &post{}
		c.posts[k] = p
	}
	return p, nil
}

// posted handles a frame of kind kindPost of another rank. Needs c.mu.
func (c *Channel) posted(f *frame) error {
	p, err := c.postOf(f.rank, f.tag)
	if err != nil {
		return err
	}
	switch {
	case len(f.blob) >= 17 && f.blob[0] == postStands:
		p.number, p.after = binary.LittleEndian.Uint64(f.blob[1:]), binary.LittleEndian.Uint64(f.blob[9:])
		p.blob = f.blob[17:]
		c.goesOn(f.rank)
		c.acknowledge(f.rank, f.tag)
	case len(f.blob) >= 1 && f.blob[0] == postEnds:
		var w withdrawal
		if err := json.Unmarshal(f.blob[1:], &w); err != nil {
			return err
		}
		p.blob = nil
		if own := c.posts[boxKey{c.rank, f.tag}]; own != nil && own.number > own.dead && w.Seen[c.rank] == own.number && own.killed == nil {
			cause := decodeRefusal(w.Reason)
			own.killed = status.Errorf(status.CodeOf(cause), "%s has given up: %w", c.peers[f.rank], cause)
		}
		for rank := range c.peers {
			if rank == c.rank || w.Seen[rank] == 0 {
				continue
			}
			third, err := c.postOf(rank, f.tag)
			if err != nil {
				return err
			}
			third.dead = max(third.dead, w.Seen[rank])
		}
	case len(f.blob) == 17 && f.blob[0] == postSeen:
		p.beside = beside{binary.LittleEndian.Uint64(f.blob[1:]), binary.LittleEndian.Uint64(f.blob[9:])}
	case len(f.blob) >= 1 && f.blob[0] == postView:
		p.view = nil
		if err := json.Unmarshal(f.blob[1:], &p.view); err != nil {
			return err
		}
	default:
		return errors.New("a damaged post")
	}
	c.wake()
	return nil
}

// Withdraw ends this rank's post under a tag, and makes the gatherings fail that had a post which stood beside it. One
// whose rank knew that this post was dead stands for the next gathering: a member may have given up before this rank.
func (c *Channel) Withdraw(tag string, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := withdrawal{Seen: map[int]uint64{}, Reason: encodeRefusal(why)}
	own := c.posts[boxKey{c.rank, tag}]
	for rank := range c.peers {
		p := c.posts[boxKey{rank, tag}]
		if p == nil || own != nil && own.outlived(p) {
			continue
		}
		w.Seen[rank], p.dead = p.number, max(p.dead, p.number)
	}
	_ = c.sendPostJSON(tag, postEnds, w) // of a closed channel nobody waits for a post
}

// outlived reports whether another rank knew this rank's own post to be dead when it made its post.
func (own *post) outlived(theirs *post) bool { return own.number <= theirs.after }

// Gather posts a blob, and waits until each of the members has posted one or its process has ended, which its message
// says. Unlike an Exchange it needs no common count of calls: a rank that gives up (Withdraw) ends its post and those
// that it has seen, upon which their ranks fail too; newer ones count on. It returns once all have gathered the same
// posts. agree is given each rank's post, and its error is Gather's if that rank has seen this one's post while its own
// stood; else the post may be one that the rank is about to withdraw. After an error Gather has withdrawn.
func (c *Channel) Gather(ctx context.Context, tag string, blob []byte, members []int, agree func(rank int, post []byte) error) ([]Message, error) {
	if err := checkMessage(tag, blob, nil); err != nil {
		return nil, err
	}
	got, err := c.gather(ctx, tag, blob, members, agree)
	if err != nil {
		c.Withdraw(tag, err)
	}
	return got, err
}

func (c *Channel) gather(ctx context.Context, tag string, blob []byte, members []int, agree func(int, []byte) error) ([]Message, error) {
	if err := c.stand(tag, blob, members); err != nil {
		return nil, err
	}
	wait := c.beginWait()
	defer wait.end()
	for {
		c.mu.Lock()
		got, missing, err := c.gathered(tag, members)
		changed := c.changed
		if err == nil && len(missing) == 0 {
			if missing, err = c.disagreeing(tag, members, got, agree); err == nil && len(missing) == 0 {
				missing, err = c.compareViews(tag, members, got)
			}
		}
		if failed := c.failedMember(members); err == nil && len(missing) > 0 && wait.hopeless(failed) {
			err = failed
		}
		if err == nil && len(missing) > 0 && ctx.Err() != nil {
			err = c.lateError(ctx, tag, missing, time.Since(wait.began))
			wait.giveUp(ctx, missing)
		}
		c.mu.Unlock()
		if err != nil || len(missing) == 0 {
			return got, err
		}
		wait.until(ctx, missing, changed)
	}
}

// disagreeing returns the error of agree for a post that stands beside this rank's, and the ranks whose posts do not
// agree and may be about to be withdrawn: a rank may have given up before this one began. Needs c.mu.
func (c *Channel) disagreeing(tag string, members []int, got []Message, agree func(int, []byte) error) (unsure []int, err error) {
	for _, rank := range members {
		if got[rank].Lost {
			continue
		}
		if err := agree(rank, got[rank].Blob); err != nil {
			if p := c.posts[boxKey{rank, tag}]; rank == c.rank || p.beside == (beside{p.number, c.posts[boxKey{c.rank, tag}].number}) {
				return nil, err
			}
			unsure = append(unsure, rank)
		}
	}
	return unsure, nil
}

// acknowledge tells a rank that its post and this rank's stand at the same time, if they do and this rank's gathering is
// not bound to fail. Needs c.mu.
func (c *Channel) acknowledge(rank int, tag string) {
	own, theirs, l := c.posts[boxKey{c.rank, tag}], c.posts[boxKey{rank, tag}], c.links[rank]
	if own == nil || own.blob == nil || own.killed != nil || own.number <= own.dead || c.failedMember(own.members) != nil {
		return
	}
	if l == nil || theirs == nil || theirs.blob == nil || theirs.number <= theirs.dead || own.outlived(theirs) {
		return
	}
	blob := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64([]byte{postSeen}, own.number), theirs.number)
	l.queue(&outgoing{frame: frame{kind: kindPost, rank: c.rank, nonce: c.nonce, tag: tag, blob: blob}})
}

// compareViews tells the others which posts this rank has gathered, and returns those who have not gathered the same. A
// post whose withdrawal is under way thus joins nobody. Needs c.mu.
func (c *Channel) compareViews(tag string, members []int, got []Message) (differ []int, err error) {
	mine := view{}
	for _, rank := range members {
		if !got[rank].Lost {
			mine[rank] = c.posts[boxKey{rank, tag}].number
		}
	}
	own := c.posts[boxKey{c.rank, tag}]
	if !maps.Equal(own.view, mine) {
		own.view = mine
		if err := c.sendPostJSON(tag, postView, mine); err != nil {
			return nil, err
		}
	}
	for _, rank := range members {
		if !got[rank].Lost && !maps.Equal(c.posts[boxKey{rank, tag}].view, mine) {
			differ = append(differ, rank)
		}
	}
	return differ, nil
}

// stand makes and sends this rank's post.
func (c *Channel) stand(tag string, blob []byte, members []int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	own, err := c.postOf(c.rank, tag)
	if err != nil {
		return err
	}
	own.number++
	own.blob, own.killed, own.view, own.members = append([]byte{}, blob...), nil, nil, members
	if err := c.sendPost(tag, func(rank int) []byte {
		var dead uint64
		if p := c.posts[boxKey{rank, tag}]; p != nil {
			dead = p.dead
		}
		head := binary.LittleEndian.AppendUint64([]byte{postStands}, own.number)
		return append(binary.LittleEndian.AppendUint64(head, dead), blob...)
	}); err != nil {
		return err
	}
	for rank := range c.peers {
		if rank != c.rank {
			c.acknowledge(rank, tag)
		}
	}
	return nil
}

// failedMember is the first failure of a member whose process lives: the gathering cannot succeed. Needs c.mu.
func (c *Channel) failedMember(members []int) error {
	return c.firstFailure(func(rank int) bool {
		return slices.Contains(members, rank) && (!c.state[rank].Ended || c.state[rank].Left)
	})
}

// gathered takes the members' posts as they are now. Needs c.mu.
func (c *Channel) gathered(tag string, members []int) (got []Message, missing []int, err error) {
	if c.closed {
		return nil, nil, closedError(tag)
	}
	if own := c.posts[boxKey{c.rank, tag}]; own.killed != nil {
		return nil, nil, own.killed
	}
	got = make([]Message, len(c.peers))
	for _, rank := range members {
		s, p := c.state[rank], c.posts[boxKey{rank, tag}]
		switch {
		case s.Ended && !s.Left:
			got[rank].Lost = true
		case c.failed[rank] != nil:
			err = c.failed[rank] // returned once all others have come, so that they fail with this rank
		case p == nil || p.blob == nil || p.number <= p.dead:
			missing = append(missing, rank)
		default:
			got[rank].Blob = p.blob
		}
	}
	if len(missing) > 0 {
		return nil, missing, nil
	}
	return got, nil, err
}

// WhileGathered returns a context that ends once what Gather returned holds no more: a member has withdrawn, or its
// process has ended. The caller calls stop.
func (c *Channel) WhileGathered(ctx context.Context, tag string, members []int, got []Message) (held context.Context, stop func()) {
	held, cancel := context.WithCancelCause(ctx)
	go guard("watch over posts", nil, func() {
		for {
			c.mu.Lock()
			err := c.changedSince(tag, members, got)
			changed := c.changed
			c.mu.Unlock()
			if err != nil {
				cancel(err)
				return
			}
			select {
			case <-changed:
			case <-held.Done():
				return
			}
		}
	})
	return held, func() { cancel(nil) }
}

// changedSince returns why a gathering holds no more, nil if it does. Needs c.mu.
func (c *Channel) changedSince(tag string, members []int, got []Message) error {
	now, _, err := c.gathered(tag, members)
	if err != nil {
		return err
	}
	for rank := range got {
		switch {
		case now == nil:
			return status.Errorf(status.Aborted, "a member has given up")
		case now[rank].Lost && !got[rank].Lost:
			return c.endedError(rank)
		case !bytes.Equal(now[rank].Blob, got[rank].Blob):
			return status.Errorf(status.Aborted, "%s has given up", c.peers[rank])
		}
	}
	return nil
}
