package health

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/status"
)

// Death describes a lost rank.
type Death struct {
	Rank     int
	Host     string
	PID      int
	Last     LastCall
	LastName string // Last as text: "dispatch #17 (receive)", "none"
	How      string // how the watcher saw it
}

// Err is the error of calls that wait for this rank.
func (d Death) Err() error {
	return status.Errorf(status.PeerDead, "rank %d (host %s, pid %d, last call %s) is dead: %s", d.Rank, d.Host, d.PID, d.LastName, d.How)
}

// subscriber is called once for each rank with an event of its kind. calling is held during a call, so that cancel can
// wait for it.
type subscriber struct {
	event   func(p *peer) func() // the call for this rank; nil: no event yet. Needs the watcher's mu
	called  []bool               // by rank. Needs the watcher's mu
	calling sync.Mutex
	over    bool // cancelled. Needs calling
}

// OnDeath makes the watcher's goroutine call f for every rank that dies, and for those that are dead already. After
// cancel has returned f is not running and will not run; so f must not call cancel, nor may its caller hold a lock that
// f takes.
func (w *Watcher) OnDeath(f func(Death)) (cancel func()) {
	return w.subscribe(func(p *peer) func() {
		if p.death == nil {
			return nil
		}
		d := *p.death
		return func() { f(d) }
	})
}

// OnLeft is OnDeath for ranks that leave.
func (w *Watcher) OnLeft(f func(rank int)) (cancel func()) {
	return w.subscribe(func(p *peer) func() {
		if !p.left {
			return nil
		}
		rank := p.Rank
		return func() { f(rank) }
	})
}

func (w *Watcher) subscribe(event func(p *peer) func()) (cancel func()) {
	s := &subscriber{event: event, called: make([]bool, len(w.peers))}
	w.mu.Lock()
	id := w.next
	w.next++
	w.subs[id] = s
	w.mu.Unlock()
	w.poke()
	return func() {
		w.mu.Lock()
		delete(w.subs, id)
		w.mu.Unlock()
		s.calling.Lock()
		s.over = true
		s.calling.Unlock()
	}
}

// poke wakes the watcher's goroutine.
func (w *Watcher) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run is the watcher's goroutine.
func (w *Watcher) run() {
	defer close(w.ended)
	tick := time.NewTicker(w.o.Heartbeat)
	defer tick.Stop()
	for beat := true; ; {
		w.turn(beat)
		select {
		case <-tick.C:
			beat = true
		case <-w.wake:
			beat = false
		case <-w.stop:
			return
		}
	}
}

// turn adds a beat to this rank's page, looks at all ranks and calls the subscribers. It recovers from panics, which
// would end the program.
func (w *Watcher) turn(beat bool) {
	defer func() {
		if p := recover(); p != nil {
			w.o.Log.Error("health watch", zap.Any("panic", p))
		}
	}()
	if beat {
		atomic.AddUint64(&w.mine.beat, 1)
		w.sendNotes()
	}
	for _, d := range w.findDeaths() {
		w.o.Log.Warn("rank lost", zap.Int("rank", d.Rank), zap.String("host", d.Host), zap.Int("pid", d.PID),
			zap.String("last_call", d.LastName), zap.String("how", d.How))
		w.ch.Fail(d.Rank, d.Err())
	}
	for {
		s, call := w.nextCall()
		if call == nil {
			return
		}
		s.deliver(call, w.o.Log)
	}
}

// deliver makes one call, unless the subscription has been cancelled.
func (s *subscriber) deliver(call func(), log *zap.Logger) {
	s.calling.Lock()
	defer s.calling.Unlock()
	defer func() {
		if p := recover(); p != nil {
			log.Error("callback of the health watch", zap.Any("panic", p))
		}
	}()
	if !s.over {
		call()
	}
}

// nextCall finds an event for which a subscriber has not been called.
func (w *Watcher) nextCall() (*subscriber, func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.subs {
		for rank := range w.peers {
			if s.called[rank] {
				continue
			}
			if call := s.event(&w.peers[rank]); call != nil {
				s.called[rank] = true
				return s, call
			}
		}
	}
	return nil, nil
}

// findDeaths returns the ranks that have died since the last call.
func (w *Watcher) findDeaths() (deaths []Death) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.peers {
		p := &w.peers[i]
		if p.Rank == w.rank || p.Absent || p.death != nil {
			continue
		}
		w.look(p)
		how := w.causeOfDeath(p)
		if how == "" {
			continue
		}
		p.death = &Death{Rank: p.Rank, Host: p.Host, PID: p.PID, Last: p.seen.last, LastName: p.seen.last.String(), How: how}
		p.diedSeen = time.Now()
		deaths = append(deaths, *p.death)
	}
	return deaths
}

// causeOfDeath returns how a rank died, "" if it lives. Needs mu.
func (w *Watcher) causeOfDeath(p *peer) string {
	if p.left || p.SameProcess {
		return ""
	}
	s := w.ch.State(p.Rank)
	age := time.Since(p.beatAt)
	switch {
	case s.Ended:
		return "its process has ended"
	case s.Closed && age > w.o.DeadAfter:
		return fmt.Sprintf("its connection is closed and its heartbeat is %.1f s old", age.Seconds())
	}
	return ""
}

// look reads a rank's page and its channel's state. Needs mu.
func (w *Watcher) look(p *peer) {
	if p.Rank == w.rank || w.closed.Load() {
		return
	}
	if p.page != nil && p.page.page != nil {
		if v, err := decodeNote(p.page.words(), p.Rank); err == nil {
			p.see(v)
		}
	}
	if p.death == nil && w.ch.State(p.Rank).Left {
		p.left = true
	}
}

// see stores what a rank's page shows.
func (p *peer) see(v view) {
	if v.beat != p.seen.beat {
		p.beatAt = time.Now()
	}
	p.seen = v
	if p.death == nil && v.left {
		p.left = true
	}
}

// sendNotes sends this rank's page to ranks on other machines.
func (w *Watcher) sendNotes() {
	note := w.mine.words()
	for i := range w.peers {
		if !w.peers[i].SameHost {
			_ = w.ch.Note(i, note) // repeated with the next beat
		}
	}
}

// note receives the page of a rank on another machine.
func (w *Watcher) note(rank int, b []byte) {
	v, err := decodeNote(b, rank)
	if err != nil {
		w.o.Log.Warn("heartbeat", zap.Error(err))
		return
	}
	w.mu.Lock()
	p := &w.peers[rank]
	left := p.left
	p.see(v)
	changed := p.left != left
	w.mu.Unlock()
	if changed {
		w.poke()
	}
}
