package health

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/status"
)

// exchangeTag names the one exchange that Start needs.
const exchangeTag = "health"

// Options of Start; zero values are the defaults.
type Options struct {
	Heartbeat time.Duration // how often the own page is renewed and the others are looked at; 100 ms
	DeadAfter time.Duration // silence after which a rank whose connection is closed too is dead; 1.5 s
	Log       *zap.Logger   // nil: none
}

// Watcher is one rank's view of its group's health.
type Watcher struct {
	ch     *bootstrap.Channel
	o      Options
	rank   int
	wake   chan struct{} // capacity 1: something may have changed
	stop   chan struct{}
	ended  chan struct{} // closed when the watcher's goroutine is over
	unhook func()

	// SetLastCall counts itself in users while it touches the page, so that Close can take the page away without a lock.
	own    *mapping
	users  atomic.Int64
	closed atomic.Bool

	mu    sync.Mutex
	peers []peer
	subs  map[int]*subscriber
	next  int
	once  sync.Once
}

// peer is what is known of one rank. Its fields need the watcher's mu.
type peer struct {
	bootstrap.Peer
	page     *mapping // nil: on another machine, or the own rank
	seen     view     // last content seen
	beatAt   time.Time
	left     bool
	death    *Death
	diedSeen time.Time
}

// Start makes the own page, exchanges pages over ch (collective, under the tag "health") and begins to watch. A channel
// has one watcher at a time. After an error the caller closes the channel, so that the others do not wait.
func Start(ctx context.Context, ch *bootstrap.Channel, o Options) (*Watcher, error) {
	o.setDefaults()
	if o.Heartbeat <= 0 || o.DeadAfter < o.Heartbeat {
		return nil, status.InvalidArg("Heartbeat, DeadAfter", fmt.Sprint(o.Heartbeat, ", ", o.DeadAfter), "a positive heartbeat, and a limit that is not shorter")
	}
	own, fd, err := newPage(ch.Rank())
	if err != nil {
		return nil, status.Errorf(status.System, "health page: %w", err)
	}
	got, err := ch.ExchangeNear(ctx, exchangeTag, nil, []int{fd})
	unix.Close(fd)
	if err != nil {
		own.unmap()
		return nil, err
	}
	w := &Watcher{
		ch: ch, o: o, rank: ch.Rank(), wake: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
		own: own, subs: make(map[int]*subscriber),
	}
	if err := w.adopt(got); err != nil {
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

// adopt maps the peers' pages and closes all descriptors.
func (w *Watcher) adopt(got []bootstrap.Message) (err error) {
	w.peers = make([]peer, len(got))
	for rank, m := range got {
		p := &w.peers[rank]
		p.Peer, p.beatAt = w.ch.Peers()[rank], time.Now()
		if rank != w.rank && p.SameHost && err == nil {
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

// SetLastCall notes what this rank is about to do, for its peers to read should it die. A few nanoseconds, no lock.
func (w *Watcher) SetLastCall(c LastCall) {
	w.users.Add(1)
	if !w.closed.Load() {
		atomic.StoreUint64(&w.own.last, pack(c))
	}
	w.users.Add(-1)
}

// Dead says whether a rank is dead, and how it was seen.
func (w *Watcher) Dead(rank int) (Death, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d := w.peers[rank].death; d != nil {
		return *d, true
	}
	return Death{}, false
}

// Left says whether a rank said goodbye.
func (w *Watcher) Left(rank int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.peers[rank]
	w.look(p)
	return p.left
}

// Stalled is the age of a rank's last heartbeat. It is as exact as the heartbeat is frequent; 0 for the own rank.
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

// Describe names a rank for errors: host, pid, last call and how it fares.
func (w *Watcher) Describe(rank int) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.peers[rank]
	w.look(p)
	last, fares := p.seen.last, ""
	switch {
	case rank == w.rank:
		if w.own.page != nil {
			last = unpack(atomic.LoadUint64(&w.own.last))
		}
		fares = "this rank"
	case p.death != nil:
		fares = fmt.Sprintf("dead since %.1f s", time.Since(p.diedSeen).Seconds())
	case p.left:
		fares = "has left"
	default:
		fares = fmt.Sprintf("heartbeat %.1f s ago", time.Since(p.beatAt).Seconds())
	}
	return fmt.Sprintf("rank %d (host %s, pid %d, last call %s, %s)", rank, p.Host, p.PID, last, fares)
}

// Close says goodbye to the other ranks and ends the watch. After it has returned no callback runs any more, and the
// watcher still answers what it knew. Not to be called from a callback.
func (w *Watcher) Close() error {
	w.once.Do(func() {
		w.closed.Store(true)
		close(w.stop)
		w.unhook()
		<-w.ended
		w.ch.OnNote(nil)
		for w.users.Load() != 0 { // a store that began before closed was set: nanoseconds
			runtime.Gosched()
		}
		atomic.StoreUint64(&w.own.state, stateLeft)
		w.tellFar()
		w.unmapAll()
	})
	return nil
}

func (w *Watcher) unmapAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.own.unmap()
	for i := range w.peers {
		w.peers[i].page.unmap()
	}
}
