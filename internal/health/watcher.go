package health

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/status"
)

// exchangeTag is the tag of Start's exchange.
const exchangeTag = "health"

// Options of Start; zero values are the defaults.
type Options struct {
	Heartbeat time.Duration // period of this rank's beats and of its looks at the others; 100 ms
	DeadAfter time.Duration // age of the last beat at which a rank with a closed connection is dead; 1.5 s
	Log       *zap.Logger   // nil: none
}

// Watcher is one rank's view of its group's health.
type Watcher struct {
	ch     *bootstrap.Channel
	o      Options
	rank   int
	wake   chan struct{} // capacity 1: a state may have changed
	stop   chan struct{}
	ended  chan struct{} // closed at the end of the watcher's goroutine
	unhook func()

	// SetLastCall counts itself in users while it writes to the page, so that Close can unmap the page without a lock.
	mine   *mapping
	users  atomic.Int64
	closed atomic.Bool

	mu    sync.Mutex
	peers []peer
	subs  map[int]*subscriber
	next  int
	once  sync.Once
}

// peer is the watcher's state of one rank. Its fields need the watcher's mu.
type peer struct {
	bootstrap.Peer
	page     *mapping // nil: on another machine, or this rank
	seen     view     // the page as last read
	beatAt   time.Time
	left     bool
	death    *Death
	diedSeen time.Time
}

// Start makes this rank's page, exchanges pages over ch (collective, with the tag "health") and begins to watch. A
// channel has one watcher at a time. After an error the caller closes the channel, so that the others do not wait.
func Start(ctx context.Context, ch *bootstrap.Channel, o Options) (*Watcher, error) {
	o.setDefaults()
	if o.Heartbeat <= 0 || o.DeadAfter < o.Heartbeat {
		return nil, status.InvalidArg("Heartbeat, DeadAfter", fmt.Sprint(o.Heartbeat, ", ", o.DeadAfter), "a positive heartbeat, and a limit that is not shorter")
	}
	mine, fd, err := newPage(ch.Rank())
	if err != nil {
		return nil, status.Errorf(status.System, "health page: %w", err)
	}
	var name []byte
	if slices.ContainsFunc(ch.Peers(), func(p bootstrap.Peer) bool { return p.Crowd }) {
		name = mine.share()
	}
	got, err := ch.ExchangeLocalFDs(ctx, exchangeTag, name, []int{fd})
	unix.Close(fd)
	if err != nil {
		mine.unmap()
		return nil, err
	}
	w := &Watcher{
		ch: ch, o: o, rank: ch.Rank(), wake: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
		mine: mine, subs: make(map[int]*subscriber),
	}
	if err := w.mapPeers(got); err != nil {
		w.unmapAll()
		return nil, err
	}
	ch.OnNote(w.note)
	w.unhook = ch.OnChange(func(int) { w.poke() })
	go w.run()
	return w, nil
}

func (o *Options) setDefaults() {
	if o.Heartbeat == 0 {
		o.Heartbeat = 100 * time.Millisecond
	}
	if o.DeadAfter == 0 {
		o.DeadAfter = 1500 * time.Millisecond
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
}

// mapPeers maps the peers' pages and closes all descriptors.
func (w *Watcher) mapPeers(got []bootstrap.Message) (err error) {
	w.peers = make([]peer, len(got))
	for rank, m := range got {
		p := &w.peers[rank]
		p.Peer, p.beatAt = w.ch.Peers()[rank], time.Now()
		if p.Crowd {
			p.page = sharedPage(m.Blob)
			p.left = p.page == nil
		} else if rank != w.rank && p.SameHost && !p.Absent && err == nil {
			if len(m.FDs) != 1 {
				err = status.Errorf(status.Mismatch, "%s sent %d health pages, want 1", p.Peer, len(m.FDs))
			} else if p.page, err = peerPage(m.FDs[0], rank); err != nil {
				err = status.Errorf(status.Mismatch, "health page of %s: %w", p.Peer, err)
			}
		}
		for _, fd := range m.FDs {
			unix.Close(fd)
		}
	}
	return err
}

// SetLastCall writes the call that this rank begins to its page: its peers report it if the rank dies. It takes a few
// nanoseconds and no lock.
func (w *Watcher) SetLastCall(c LastCall) {
	w.users.Add(1)
	if !w.closed.Load() {
		atomic.StoreUint64(&w.mine.last, pack(c))
	}
	w.users.Add(-1)
}

// Dead returns a rank's death, if it is dead.
func (w *Watcher) Dead(rank int) (Death, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d := w.peers[rank].death; d != nil {
		return *d, true
	}
	return Death{}, false
}

// Left reports whether a rank has left.
func (w *Watcher) Left(rank int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.peers[rank]
	w.look(p)
	return p.left
}

// Stalled is the age of a rank's last heartbeat, exact to the heartbeat's period; 0 for this rank.
func (w *Watcher) Stalled(rank int) time.Duration {
	if rank == w.rank {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.peers[rank]
	w.look(p)
	return time.Since(p.beatAt)
}

// LastCallOf is another rank's newest call: of this machine's as it is, of others as the last heartbeat said.
func (w *Watcher) LastCallOf(rank int) LastCall {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.peers[rank]
	w.look(p)
	return p.seen.last
}

// Describe names a rank for errors: host, pid, last call and state.
func (w *Watcher) Describe(rank int) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.peers[rank]
	w.look(p)
	if p.Absent {
		return p.String()
	}
	last, state := p.seen.last, ""
	switch {
	case rank == w.rank:
		if w.mine.page != nil {
			last = unpack(atomic.LoadUint64(&w.mine.last))
		}
		state = "this rank"
	case p.death != nil:
		state = fmt.Sprintf("dead since %.1f s", time.Since(p.diedSeen).Seconds())
	case p.left:
		state = "has left"
	default:
		state = fmt.Sprintf("heartbeat %.1f s ago", time.Since(p.beatAt).Seconds())
	}
	return fmt.Sprintf("rank %d (host %s, pid %d, last call %s, %s)", rank, p.Host, p.PID, last, state)
}

// Close marks this rank as left and ends the watch. After it has returned no callback runs; the methods still return
// the last state. A callback must not call Close.
func (w *Watcher) Close() error {
	w.once.Do(func() {
		w.closed.Store(true)
		close(w.stop)
		w.unhook()
		<-w.ended
		w.ch.OnNote(nil)
		for w.users.Load() != 0 { // stores that began before closed was set end within nanoseconds
			runtime.Gosched()
		}
		atomic.StoreUint64(&w.mine.state, stateLeft)
		w.sendNotes()
		w.unmapAll()
	})
	return nil
}

func (w *Watcher) unmapAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mine.unmap()
	w.mine = &mapping{} // ranks of the crowd may use the page still, and unmap it
	for i := range w.peers {
		w.peers[i].page.unmap()
		w.peers[i].page = nil
	}
}
