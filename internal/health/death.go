package health

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/status"
)

// Death is how a rank was lost.
type Death struct {
	Rank     int
	Host     string
	PID      int
	Last     LastCall
	LastName string // the same for people: "dispatch #17 (receive)", "none"
	How      string // how it was seen
}

// Err is the error that waits for this rank end with.
func (d Death) Err() error {
	return status.Errorf(status.PeerDead, "rank %d (host %s, pid %d, last call %s) is dead: %s", d.Rank, d.Host, d.PID, d.LastName, d.How)
}

// subscriber gets every event of a kind once for each rank. told needs the watcher's mu; calling is held during a call,
// so that a cancel can wait for it.
type subscriber struct {
	tell    func(p *peer) func() // nil: nothing to tell of this rank yet. Needs the watcher's mu
	told    []bool
	calling sync.Mutex
	over    bool // needs calling
}

// OnDeath calls f for every rank that dies, and soon for those that are dead already, from the watcher's goroutine. After
// cancel has returned f is not running and will not run; so cancel must not be called from f, nor under a lock that f
// takes.
func (w *Watcher) OnDeath(f func(Death)) (cancel func()) {
	return w.subscribe(func(p *peer) func() {
		if p.death == nil {
			return nil
		}
		d := *p.death
		return func() { f(d) }
	})
}

// OnLeft is OnDeath for ranks that say goodbye.
func (w *Watcher) OnLeft(f func(rank int)) (cancel func()) {
	return w.subscribe(func(p *peer) func() {
		if !p.left {
			return nil
		}
		rank := p.Rank
		return func() { f(rank) }
	})
}

func (w *Watcher) subscribe(tell func(p *peer) func()) (cancel func()) {
	s := &subscriber{tell: tell, told: make([]bool, len(w.peers))}
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

// poke makes the watcher look now.
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

// turn renews the own page if it is time, looks at all ranks and tells the subscribers. A panic that got out of here
// would end the host program.
func (w *Watcher) turn(beat bool) {
	defer func() {
		if p := recover(); p != nil {
			w.o.Log.Error("health watch", zap.Any("panic", p))
		}
	}()
	if beat {
		atomic.AddUint64(&w.own.beat, 1)
		w.tellFar()
	}
	for _, d := range w.judge() {
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

// deliver makes one call, unless the subscription was cancelled meanwhile.
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

// nextCall finds something that a subscriber has not been told.
func (w *Watcher) nextCall() (*subscriber, func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.subs {
		for rank := range w.peers {
			if s.told[rank] {
				continue
			}
			if call := s.tell(&w.peers[rank]); call != nil {
				s.told[rank] = true
				return s, call
			}
		}
	}
	return nil, nil
}

// judge finds who died since the last look.
func (w *Watcher) judge() (deaths []Death) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.peers {
		p := &w.peers[i]
		if p.Rank == w.rank || p.death != nil {
			continue
		}
		w.look(p)
		how := w.verdict(p)
		if how == "" {
			continue
		}
		p.death = &Death{Rank: p.Rank, Host: p.Host, PID: p.PID, Last: p.seen.last, LastName: p.seen.last.String(), How: how}
		p.diedSeen = time.Now()
		deaths = append(deaths, *p.death)
	}
	return deaths
}

// verdict says how a rank is seen to be dead, or nothing. Needs mu.
func (w *Watcher) verdict(p *peer) string {
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

// look takes in what a rank shows now. Needs mu.
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

// see takes in a rank's page.
func (p *peer) see(v view) {
	if v.beat != p.seen.beat {
		p.beatAt = time.Now()
	}
	p.seen = v
	if p.death == nil && v.left {
		p.left = true
	}
}

// tellFar sends the own page to ranks on other machines.
func (w *Watcher) tellFar() {
	note := w.own.words()
	for i := range w.peers {
		if !w.peers[i].SameHost {
			_ = w.ch.Note(i, note) // repeated with the next beat
		}
	}
}

// note takes the page of a rank on another machine.
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
