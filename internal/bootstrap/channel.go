package bootstrap

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

const (
	// drainAfterEnd is how long a dead peer's last frames may take to be read. They lie in our socket already; the limit
	// counts where a forked child keeps the other end open, so that no end of file comes.
	drainAfterEnd = 100 * time.Millisecond
	// blameTime is how long after a lost connection a death may come to light that explains it.
	blameTime = 100 * time.Millisecond
	// flushAtClose bounds how long Close waits for peers to take what is queued, the goodbye last.
	flushAtClose = 250 * time.Millisecond
)

// Peer is a rank of the group as its hello described it; the own rank is among them.
type Peer struct {
	Rank             int
	Host             string
	PID              int
	StartTime        uint64 // field 22 of /proc/<pid>/stat; 0: unknown
	SameHost         bool   // shares this rank's kernel and network namespace: memory and descriptors can be shared
	SamePIDNamespace bool
	SameProcess      bool // a goroutine's rank of this very process
	Version, Build   string
	Extra            []byte
}

// String names the peer in errors.
func (p Peer) String() string { return fmt.Sprintf("rank %d (host %s, pid %d)", p.Rank, p.Host, p.PID) }

// PeerState is what a channel has seen of a peer.
type PeerState struct {
	Ended  bool // its process has ended, by the system's word
	Closed bool // its connection has ended, for whatever reason
	Left   bool // it closed its channel in order
}

// Channel joins the ranks of one group directly. All methods may be called from any goroutine.
type Channel struct {
	rank  int
	nonce [16]byte
	peers []Peer
	watch *procWatch
	wg    sync.WaitGroup // readers, and who handles a death
	wout  sync.WaitGroup // writers

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced whenever something below changes
	links    []*link       // by rank; nil: not yet, or own
	state    []PeerState
	failed   []error // why nothing more is to be had of a rank
	culprits []int   // the ranks that failed, the first one first: others often fail because of it
	boxes    map[boxKey]*box
	pending  []int // bytes that lie unclaimed, by rank
	active   map[string]bool
	onChange map[int]func(rank int)
	onNote   func(rank int, note []byte)
	nextID   int
	closed   bool
	done     chan struct{} // closed when Close has finished
}

func newChannel(rank int, nonce [16]byte, peers []Peer) (*Channel, error) {
	n := len(peers)
	c := &Channel{
		rank: rank, nonce: nonce, peers: peers, changed: make(chan struct{}), links: make([]*link, n), state: make([]PeerState, n),
		failed: make([]error, n), boxes: make(map[boxKey]*box), pending: make([]int, n), active: make(map[string]bool),
		onChange: make(map[int]func(int)), done: make(chan struct{}),
	}
	var err error
	c.watch, err = newProcWatch(func(rank int) { // beside each other: each waits for its reader
		c.wg.Go(func() {
			guard("death of a peer", func(err error) { c.Fail(rank, err) }, func() { c.processEnded(rank) })
		})
	})
	if err != nil {
		return nil, status.Errorf(status.System, "process watch: %w", err)
	}
	return c, nil
}

// Rank is this rank's number.
func (c *Channel) Rank() int { return c.rank }

// Size is the number of ranks.
func (c *Channel) Size() int { return len(c.peers) }

// Peers describes all ranks, in order. The slice is shared: read only.
func (c *Channel) Peers() []Peer { return c.peers }

// Nonce is equal on all ranks and different for every channel.
func (c *Channel) Nonce() [16]byte { return c.nonce }

// State tells what is known of a peer now.
func (c *Channel) State(rank int) PeerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state[rank]
}

// OnChange calls f, from goroutines of the channel, whenever the State of a rank changed. f must not block or call the
// channel's Close. After cancel has returned no new call begins, but one may be under way.
func (c *Channel) OnChange(f func(rank int)) (cancel func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := c.nextID
	c.nextID++
	c.onChange[id] = f
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.onChange, id)
	}
}

// Fail makes every Exchange, pending or later, that lacks this rank's message end at once with err. The first reason stays.
func (c *Channel) Fail(rank int, err error) {
	if err == nil {
		err = status.Errorf(status.PeerDead, "%s is dead", c.peers[rank])
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail(rank, err)
}

// fail and wake need c.mu.
func (c *Channel) fail(rank int, err error) {
	if c.failed[rank] == nil {
		c.failed[rank] = err
		c.culprits = append(c.culprits, rank)
		c.wake()
	}
}

// firstFailure is the earliest failure among the ranks that lack says are missed. Needs c.mu.
func (c *Channel) firstFailure(lack func(rank int) bool) error {
	for _, rank := range c.culprits {
		if lack(rank) {
			return c.failed[rank]
		}
	}
	return nil
}

func (c *Channel) wake() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// update changes a peer's state and tells the subscribers if that made a difference.
func (c *Channel) update(rank int, change func(*PeerState), why error) {
	c.mu.Lock()
	before := c.state[rank]
	change(&c.state[rank])
	if why != nil {
		c.fail(rank, why)
	}
	var tell []func(int)
	if c.state[rank] != before && !c.closed {
		c.wake()
		for _, f := range c.onChange {
			tell = append(tell, f)
		}
	}
	c.mu.Unlock()
	for _, f := range tell {
		f(rank)
	}
}

// processEnded comes from the process watch. What the peer sent before it died is read first; then it is marked.
func (c *Channel) processEnded(rank int) {
	c.mu.Lock()
	l, reading := c.links[rank], !c.state[rank].Closed
	c.mu.Unlock()
	if l != nil && reading {
		l.endReadingIn(drainAfterEnd)
		c.awaitReader(rank)
	}
	c.update(rank, func(s *PeerState) { s.Ended = true }, c.endedError(rank))
}

func (c *Channel) endedError(rank int) error {
	return status.Errorf(status.PeerDead, "%s is dead: its process has ended", c.peers[rank])
}

// awaitReader waits, for the drain's time at most, until the reader of a rank has ended.
func (c *Channel) awaitReader(rank int) {
	c.waitUntil(2*drainAfterEnd, func() bool { return c.state[rank].Closed })
}

// awaitBlame gives a death that explains a lost connection the time to come to light. A peer that gave up because of a
// third rank is not to blame, nor should the error speak of sockets where a process has ended.
func (c *Channel) awaitBlame() {
	c.waitUntil(blameTime, func() bool { return len(c.culprits) > 0 })
}

// waitUntil waits until holds, which is asked under c.mu, the channel is closed, or the time is over.
func (c *Channel) waitUntil(d time.Duration, holds func() bool) {
	limit := time.NewTimer(d)
	defer limit.Stop()
	for {
		c.mu.Lock()
		over, changed := c.closed || holds(), c.changed
		c.mu.Unlock()
		if over {
			return
		}
		select {
		case <-changed:
		case <-limit.C:
			return
		}
	}
}

// start takes a connected link into service. False if the rank has one already or the channel is closed.
func (c *Channel) start(l *link) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.links[l.rank] != nil {
		return false
	}
	c.links[l.rank] = l
	c.wout.Go(func() { guard("channel writer", c.broken(l), l.writeLoop) })
	c.wg.Go(func() { guard("channel reader", c.broken(l), func() { c.readLoop(l) }) })
	c.wake()
	return true
}

// broken gives what to do when a goroutine of a link panicked.
func (c *Channel) broken(l *link) func(error) {
	return func(err error) {
		l.conn.Close()
		c.update(l.rank, func(s *PeerState) { s.Closed = true }, err)
	}
}

// readLoop delivers what one peer sends until the connection ends.
func (c *Channel) readLoop(l *link) {
	for {
		f, err := l.read(MaxBlob)
		if err == nil && (f.nonce != c.nonce || f.rank != l.rank) {
			closeFDs(f.fds)
			err = errors.New("frame of another group or rank")
		}
		if err == nil {
			err = c.take(&f)
		}
		if err != nil {
			c.linkEnded(l, err)
			return
		}
	}
}

// take handles one frame; an error ends the link.
func (c *Channel) take(f *frame) error {
	switch f.kind {
	case kindData:
		return c.deliver(f)
	case kindNote:
		closeFDs(f.fds)
		c.mu.Lock()
		tell := c.onNote
		c.mu.Unlock()
		if tell != nil {
			tell(f.rank, f.blob)
		}
		return nil
	case kindBye:
		closeFDs(f.fds)
		why := status.Errorf(status.Aborted, "%s has left the group", c.peers[f.rank])
		if len(f.blob) > 0 {
			cause := decodeRefusal(f.blob)
			why = status.Errorf(status.CodeOf(cause), "%w: %w", why, cause)
		}
		c.update(f.rank, func(s *PeerState) { s.Left = true }, why)
		return nil
	}
	closeFDs(f.fds)
	return fmt.Errorf("frame of kind %d in the middle of a channel", f.kind)
}

// linkEnded classifies the end of a connection. Leaving was told before it; a death may be told after it.
func (c *Channel) linkEnded(l *link, err error) {
	l.conn.Close() // a peer that still writes must not wait for a reader that is gone
	c.update(l.rank, func(s *PeerState) { s.Closed = true }, nil)
	p := c.peers[l.rank]
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded): // the drain is over: processEnded knows why
	case connectionGone(err):
		c.awaitBlame()
		c.Fail(l.rank, status.Errorf(status.PeerDead, "%s closed its connection without leaving the group: "+
			"its process has ended or given up: %w", p, err))
	default:
		c.Fail(l.rank, status.Errorf(status.System, "the connection to %s broke: %w", p, err))
	}
}

// Close leaves the group in order; see CloseWith.
func (c *Channel) Close() error { return c.CloseWith(nil) }

// CloseWith leaves the group and tells the others why, if there is a cause: their error then has its kind. It is local, idempotent and bounded: a peer
// that does not read delays it by a quarter of a second. Pending Exchanges of this rank fail. Not to be called from a
// callback of the channel.
func (c *Channel) CloseWith(cause error) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.done
		return nil
	}
	c.closed = true
	c.wake()
	links := c.links
	bye := frame{kind: kindBye, rank: c.rank, nonce: c.nonce}
	if cause != nil {
		bye.blob = encodeRefusal(cause)
	}
	for _, l := range links {
		if l != nil {
			l.queue(&outgoing{frame: bye})
			l.conn.SetWriteDeadline(time.Now().Add(flushAtClose))
			close(l.out)
		}
	}
	c.mu.Unlock()
	c.wout.Wait()
	for _, l := range links {
		if l != nil {
			l.conn.Close()
		}
	}
	c.watch.close()
	c.wg.Wait()
	c.dropBoxes()
	close(c.done)
	return nil
}
