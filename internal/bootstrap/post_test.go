package bootstrap

import (
	"errors"
	"fmt"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func anything(int, []byte) error { return nil }

// Rank 1 has given up a gathering of before, and the word of that reaches rank 0 only after it has come to the next one:
// a post whose withdrawal is under way is no disagreement.
func TestGatherBesideAPostOfBefore(t *testing.T) {
	channels := open(t, 2, nil)
	both, met := []int{0, 1}, make(chan struct{})
	agree := func(_ int, post []byte) error {
		if string(post) == "now" {
			return nil
		}
		select {
		case <-met:
		default:
			close(met)
		}
		return status.Errorf(status.Mismatch, "rank 1 posts %q", post)
	}
	other := channels[1]
	if err := other.stand("meet", []byte("before"), both); err != nil {
		t.Fatal(err)
	}
	other.mu.Lock()
	line := other.links[0]
	other.links[0] = nil
	other.mu.Unlock()
	other.Withdraw("meet", errors.New("no more"))
	other.mu.Lock()
	other.links[0] = line
	other.mu.Unlock()
	noErrors(t, each(2, func(r int) error {
		if r == 1 {
			<-met
			word := withdrawal{Seen: map[int]uint64{1: 1}, Reason: encodeRefusal(errors.New("no more"))}
			other.mu.Lock()
			err := other.sendPostJSON("meet", postEnds, word)
			other.mu.Unlock()
			if err != nil {
				return err
			}
		}
		_, err := channels[r].Gather(proctest.Context(t), "meet", []byte("now"), both, agree)
		return err
	}))
}

// await waits until a rank's newest post, as this one knows it, has the number.
func (c *Channel) await(rank int, number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := c.posts[boxKey{rank, "meet"}]; p == nil || p.number != number; p = c.posts[boxKey{rank, "meet"}] {
		changed := c.changed
		c.mu.Unlock()
		<-changed
		c.mu.Lock()
	}
}

// Both have gathered and then give up, for a reason of their own; rank 1 is the later one and already has rank 0's post
// for the next gathering: that one stands.
func TestGatherBeforeTheOtherHasGivenUp(t *testing.T) {
	channels := open(t, 2, nil)
	both := []int{0, 1}
	gather := func(r int, blob string) error {
		_, err := channels[r].Gather(proctest.Context(t), "meet", []byte(blob), both, anything)
		return err
	}
	noErrors(t, each(2, func(r int) error { return gather(r, "before") }))
	channels[0].Withdraw("meet", errors.New("not so"))
	noErrors(t, each(2, func(r int) error {
		if r == 1 {
			channels[1].await(0, 2)
			channels[1].Withdraw("meet", errors.New("not so"))
		}
		return gather(r, "now")
	}))
}

// Rank 0 gives up while all stand, and posts again, as rank 2 does once it has failed. Rank 1 has their next posts before it
// notices: they stand.
func TestGatherBeforeTheOtherNoticesAnEnd(t *testing.T) {
	for _, ranks := range []int{2, 3} {
		channels := open(t, ranks, nil)
		all := []int{0, 1, 2}[:ranks]
		for _, c := range channels {
			if err := c.stand("meet", []byte("before"), all); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range channels {
			for rank := range ranks {
				c.await(rank, 1)
			}
		}
		channels[0].Withdraw("meet", errors.New("not so"))
		noErrors(t, each(ranks, func(r int) error {
			c := channels[r]
			if r == 1 {
				for rank := range ranks {
					if rank != 1 {
						c.await(rank, 2)
					}
				}
			}
			for failed := r == 0; !failed; {
				c.mu.Lock()
				_, _, err := c.gathered("meet", all)
				changed := c.changed
				c.mu.Unlock()
				if failed = err != nil; failed {
					wantError(t, err, status.Internal, "not so")
					c.Withdraw("meet", err)
				} else {
					<-changed
				}
			}
			_, err := c.Gather(proctest.Context(t), "meet", []byte("now"), all, anything)
			return err
		}))
	}
}

// Posts that stand beside each other and disagree fail the gathering on both ranks: one finds it, and tells the other.
func TestGatherOfPostsThatDisagree(t *testing.T) {
	channels := open(t, 2, nil)
	for _, err := range each(2, func(r int) error {
		_, err := channels[r].Gather(proctest.Context(t), "meet", []byte{byte(r)}, []int{0, 1}, func(rank int, post []byte) error {
			if post[0] != byte(r) {
				return status.Errorf(status.Mismatch, "rank %d posts %d", rank, post)
			}
			return nil
		})
		return err
	}) {
		wantError(t, err, status.Mismatch, " posts [")
	}
}

// A rank dies as the others come to meet: one of them knows so already and does not count it, the other one finds out
// on the way. Both gather the same posts.
func TestGatherWithARankThatOneKnowsToBeDead(t *testing.T) {
	checkFDs(t)
	channels := open(t, 3, nil)
	dead := 2
	for _, c := range channels[:dead] {
		c.update(dead, func(s *PeerState) { s.Ended = true }, errors.New("killed"))
	}
	members := [][]int{{0, 1}, {0, 1, dead}}
	noErrors(t, each(dead, func(r int) error {
		got, err := channels[r].Gather(proctest.Context(t), "meet", []byte{byte(r)}, members[r], anything)
		if err != nil {
			return err
		}
		for rank, m := range got[:dead] {
			if len(m.Blob) != 1 || m.Blob[0] != byte(rank) {
				return fmt.Errorf("the post of rank %d is %v", rank, m.Blob)
			}
		}
		if got[dead].Lost != (r == 1) || got[dead].Blob != nil {
			return fmt.Errorf("of the dead rank: %+v", got[dead])
		}
		return nil
	}))
}
