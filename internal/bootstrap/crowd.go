package bootstrap

import (
	"io"
	"slices"
	"sync"

	"github.com/deepep-go/deepep/internal/status"
)

// crowdSize is the number of ranks of one process from which on these are joined by memory alone. A socket for each pair
// of them, and a descriptor of each for every other one, would be more than a process may have.
const crowdSize = 65

// findCrowd marks the peers that are joined to this rank by memory.
func (p *Pending) findCrowd() {
	here := 0
	for _, peer := range p.peers {
		if peer.SameProcess {
			here++
		}
	}
	for i := range p.peers {
		p.peers[i].Crowd = here >= crowdSize && p.peers[i].SameProcess && i != p.self.Rank
	}
}

// sharedProcess is the ranks of a group that are in this process, from the first that connects to the last that closes.
type sharedProcess struct {
	here map[int]*Channel
	gone map[int]error // why those that closed before all others had come have left
}

// crowds are this process's, by nonce.
var crowds = struct {
	sync.Mutex
	by map[[16]byte]*sharedProcess
}{by: make(map[[16]byte]*sharedProcess)}

// joinCrowd links a channel with those of its crowd that are there; later ones link themselves with it.
func (c *Channel) joinCrowd() {
	crowds.Lock()
	defer crowds.Unlock()
	all := crowds.by[c.nonce]
	if all == nil {
		all = &sharedProcess{here: make(map[int]*Channel), gone: make(map[int]error)}
		crowds.by[c.nonce] = all
	}
	for _, other := range all.here {
		if !other.start(&link{rank: c.rank, home: other.rank, near: c.inbox}) {
			c.Fail(other.rank, status.Errorf(status.Aborted, "%s has left the group", c.peers[other.rank]))
			continue
		}
		c.start(&link{rank: other.rank, home: c.rank, near: other.inbox})
	}
	for rank, why := range all.gone {
		c.Fail(rank, why)
	}
	all.here[c.rank] = c
}

// leaveCrowd makes later ranks fail with the cause.
func (c *Channel) leaveCrowd(cause error) {
	if c.inbox == nil {
		return
	}
	crowds.Lock()
	defer crowds.Unlock()
	all := crowds.by[c.nonce]
	if all == nil || all.here[c.rank] != c {
		return
	}
	delete(all.here, c.rank)
	why := status.Errorf(status.Aborted, "%s has left the group", c.peers[c.rank])
	if cause != nil {
		why = status.Errorf(status.CodeOf(cause), "%w: %w", why, cause)
	}
	if all.gone[c.rank] = why; len(all.here) == 0 {
		delete(crowds.by, c.nonce)
	}
}

// inbox is where the crowd's ranks put their frames for one of them. One goroutine takes them all, in the order of each
// sender, in place of a reader and a writer for each pair.
type inbox struct {
	mu      sync.Mutex
	frames  []letter
	waiting []int         // frames of each sender that were not taken yet
	deaf    []bool        // nothing more is taken of this sender
	ready   chan struct{} // capacity 1: there are frames, or the inbox is closed
	closed  bool
}

// letter is a frame, or the end of what a rank sends.
type letter struct {
	frame
	end bool
}

func newInbox(ranks int) *inbox {
	return &inbox{waiting: make([]int, ranks), deaf: make([]bool, ranks), ready: make(chan struct{}, 1)}
}

// put passes a frame on without waiting. It returns false if the rank does not take them.
func (b *inbox) put(l letter) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed || b.deaf[l.rank]: // as a socket takes what nobody reads any more
		return true
	case b.waiting[l.rank] >= queueFrames && !l.end:
		return false
	}
	b.waiting[l.rank]++
	b.frames = append(b.frames, l)
	b.poke()
	return true
}

// poke needs mu.
func (b *inbox) poke() {
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

// has is the number of a sender's frames that were not taken yet.
func (b *inbox) has(rank int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting[rank]
}

// take waits for frames and returns them, ok false once the inbox is closed.
func (b *inbox) take() (frames []letter, ok bool) {
	<-b.ready
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, false
	}
	frames, b.frames = b.frames, nil
	clear(b.waiting)
	return frames, true
}

func (b *inbox) ignore(rank int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.deaf[rank] = true
}

func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed, b.frames = true, nil
	b.poke()
}

// readInbox delivers what the crowd sends until the channel closes.
func (c *Channel) readInbox() {
	over := make([]bool, len(c.peers))
	for {
		frames, ok := c.inbox.take()
		if !ok {
			return
		}
		for i := range frames {
			f := &frames[i]
			if over[f.rank] {
				continue
			}
			err := error(io.EOF)
			if !f.end {
				f.blob = slices.Clone(f.blob) // every receiver has its own
				err = c.take(&f.frame)
			}
			if err != nil {
				over[f.rank] = true
				c.inbox.ignore(f.rank)
				// Aside: it may wait for what explains the end, which comes through this inbox.
				c.wg.Go(func() {
					guard("end of a rank of the process", nil, func() { c.linkEnded(&link{rank: f.rank, near: c.inbox}, err) })
				})
			}
		}
	}
}
