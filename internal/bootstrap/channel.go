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
	// drainAfterEnd bounds the reading of a dead peer's last frames. They are in this rank's socket buffer; the limit
	// matters if a forked child keeps the other end open, so that the reader gets no end of file.
	drainAfterEnd = 100 * time.Millisecond
	// blameTime is how long a lost connection waits for the report of a death that explains it.
	blameTime = 100 * time.Millisecond
	// flushAtClose bounds how long Close waits for peers to read the queued frames, of which the bye is the last.
	flushAtClose = 250 * time.Millisecond
)

// Peer is a rank of the group as its hello describes it. Lists of peers include this rank.
type Peer struct {
	Rank             int
	Absent           bool // no process has this place: Exchanges hold an empty message for it
	Host             string
	PID              int
	StartTime        uint64 // field 22 of /proc/<pid>/stat; 0: unknown
	SameHost         bool   // same kernel and network namespace: the ranks can share memory and descriptors
	SamePIDNamespace bool
	SameProcess      bool // the rank is a goroutine of this process
	Crowd            bool // of so many that no descriptors are exchanged with it, but memory is shared by addresses
	Version, Build   string
	Extra            []byte
}

// String names the peer in errors.
func (p Peer) String() string {
	if p.Absent {
		return fmt.Sprintf("rank %d (left out by regroup)", p.Rank)
	}
	return fmt.Sprintf("rank %d (host %s, pid %d)", p.Rank, p.Host, p.PID)
}

// PeerState is a peer's state as this channel sees it.
type PeerState struct {
	Ended  bool // the system reported the end of its process
	Closed bool // its connection has ended, for any reason
	Left   bool // it closed its channel
}

// Channel joins the ranks of one group directly. All methods may be called from any goroutine.
type Channel struct {
	rank  int
	nonce [16]byte
	peers []Peer
	watch *procWatch
	inbox *inbox         // of what the crowd sends; nil: there is none
	wg    sync.WaitGroup // readers and handlers of deaths
	wout  sync.WaitGroup // writers

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced whenever something below changes
	links    []*link       // by rank; nil: not connected yet, or this rank
	state    []PeerState
	failed   []error // by rank: why no further message of it will come
	culprits []int   // the failed ranks in the order of failure: later ones often fail because of the first
	lost     []lost  // connections that have ended without a word, in this order
	boxes    map[boxKey]*box
	posts    map[boxKey]*post       // what each rank posts; see Gather
	pending  []int                  // unclaimed bytes by rank
	active   map[string]*collecting // Exchanges under way
	onChange map[int]func(rank int)
	onNote   func(rank int, note []byte)
	onWord   func(rank int, tag string, word []byte)
	nextID   int
	waits    int         // of this rank, of which the others were told
	heard    []heardWait // what other ranks said of theirs
	elder    Elder       // nil: this channel follows none
	closed   bool
	done     chan struct{} // closed at the end of Close
}

func newChannel(rank int, nonce [16]byte, peers []Peer) (*Channel, error) {
	n := len(peers)
	c := &Channel{
		rank: rank, nonce: nonce, peers: peers, changed: make(chan struct{}), links: make([]*link, n), state: make([]PeerState, n),
		failed: make([]error, n), boxes: make(map[boxKey]*box), posts: make(map[boxKey]*post), pending: make([]int, n), active: make(map[string]*collecting),
		onChange: make(map[int]func(int)), heard: make([]heardWait, n), done: make(chan struct{}),
	}
	var err error
	c.watch, err = newProcWatch(func(rank int) { // a goroutine for each death, because each waits for its reader
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

// State returns a peer's current state.
func (c *Channel) State(rank int) PeerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state[rank]
}

// OnChange makes the channel's goroutines call f after each change of a rank's State. f must not block or call Close.
// After cancel has returned no new call of f begins, but one may still be running.
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

// Fail ends every pending and later Exchange that lacks this rank's message with err. The first error for a rank
// counts.
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

// firstFailure is the earliest failure among the ranks for which missing is true. Needs c.mu.
func (c *Channel) firstFailure(missing func(rank int) bool) error {
	for _, rank := range c.culprits {
		if missing(rank) {
			return c.failed[rank]
		}
	}
	return nil
}

func (c *Channel) wake() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// update changes a peer's state and calls the subscribers if the state differs.
func (c *Channel) update(rank int, change func(*PeerState), why error) {
	c.mu.Lock()
	before := c.state[rank]
	change(&c.state[rank])
	if why != nil {
		c.fail(rank, why)
	}
	var subscribers []func(int)
	if c.state[rank] != before && !c.closed {
		c.wake()
		for _, f := range c.onChange {
			subscribers = append(subscribers, f)
		}
	}
	c.mu.Unlock()
	for _, f := range subscribers {
		f(rank)
	}
}

// processEnded is the process watch's callback. The reader takes what the peer sent before it died; then the peer is
// marked as ended.
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

// awaitReader waits until the reader of a rank has ended, for twice the drain time at most.
func (c *Channel) awaitReader(rank int) {
	c.waitUntil(2*drainAfterEnd, func() bool { return c.state[rank].Closed })
}

// awaitBlame waits for the report of a death that explains a lost connection. A peer that gave up because of a third
// rank is not the culprit, and an error about a socket hides that a process has ended.
func (c *Channel) awaitBlame() {
	c.waitUntil(blameTime, func() bool { return len(c.culprits) > 0 })
}

// waitUntil waits until holds returns true (called with c.mu held), the channel is closed, or d has passed.
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

// start begins to read and write a connected link. It returns false if the rank has a link or the channel is closed.
func (c *Channel) start(l *link) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.links[l.rank] != nil {
		return false
	}
	c.links[l.rank] = l
	if l.near != nil {
		c.wake()
		return true
	}
	c.wout.Go(func() { guard("channel writer", c.broken(l), l.writeLoop) })
	c.wg.Go(func() { guard("channel reader", c.broken(l), func() { c.readLoop(l) }) })
	c.wake()
	return true
}

// broken is what guard calls after a panic in a goroutine of a link.
func (c *Channel) broken(l *link) func(error) {
	return func(err error) {
		l.shut()
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
		onNote := c.onNote
		c.mu.Unlock()
		if onNote != nil {
			onNote(f.rank, f.blob)
		}
		return nil
	case kindWord:
		closeFDs(f.fds)
		c.mu.Lock()
		onWord := c.onWord
		c.mu.Unlock()
		if onWord != nil {
			onWord(f.rank, f.tag, f.blob)
		}
		return nil
	case kindWait:
		closeFDs(f.fds)
		return c.heardWait(f)
	case kindLost:
		closeFDs(f.fds)
		return c.heardLost(f)
	case kindPost:
		closeFDs(f.fds)
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.posted(f)
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

// linkEnded classifies the end of a connection. A bye arrives before it; the report of a death may come after it.
func (c *Channel) linkEnded(l *link, err error) {
	stolen := l.stolen()
	l.shut() // else a peer that still writes would wait for a reader that has ended
	c.update(l.rank, func(s *PeerState) { s.Closed = true }, nil)
	p := c.peers[l.rank]
	if why := l.unusable.Load(); why != nil {
		err = *why
	}
	switch {
	case stolen: // the last rank that an error names is the cause
		c.mu.Lock()
		defer c.mu.Unlock()
		c.failAndTell(l.rank, c.rank, status.Errorf(status.System, "the connection to %s broke: something else in the process of %s has closed its descriptor: %w",
			p, c.peers[c.rank], err))
	case errors.Is(err, os.ErrDeadlineExceeded): // the end of the drain: processEnded sets the error
	case connectionGone(err):
		c.mu.Lock()
		c.lost = append(c.lost, lost{l.rank, status.Errorf(status.PeerDead, "%s closed its connection without leaving the group: "+
			"its process has ended or given up: %w", p, err)})
		c.mu.Unlock()
		c.awaitBlame()
		c.failLost(l.rank)
	default:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.failAndTell(l.rank, l.rank, status.Errorf(status.System, "the connection to %s broke: %w", p, err))
	}
}

// Close leaves the group; see CloseWith.
func (c *Channel) Close() error { return c.CloseWith(nil) }

// CloseWith leaves the group and sends the cause, if not nil, to the others: their error then has its kind. It is local
// and idempotent; a peer that does not read delays it by a quarter of a second at most. Pending Exchanges of this rank
// fail. A callback of the channel must not call it.
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
			l.endWriting()
		}
	}
	c.mu.Unlock()
	c.leaveCrowd(cause)
	c.wout.Wait()
	for _, l := range links {
		if l != nil {
			l.shut()
		}
	}
	c.watch.close()
	if c.inbox != nil {
		c.inbox.close()
	}
	c.wg.Wait()
	c.dropBoxes()
	close(c.done)
	return nil
}
