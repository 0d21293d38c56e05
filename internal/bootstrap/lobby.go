package bootstrap

import (
	"net"
	"slices"
	"sync"
	"time"
)

// extraStrangers is how many connections beside those of the ranks may be unproven at once.
const extraStrangers = 64

const roomPatience = 5 * time.Millisecond

// lobby holds the connections that have not shown yet that they belong to the group. When it is full the oldest one
// goes, not the newcomer: a rank proves itself within a round trip, so that those who only hold their place are older.
// A rank that is sent away all the same dials again.
type lobby struct {
	mu      sync.Mutex
	waiting []net.Conn
	limit   int
	room    chan struct{} // somebody has left
}

func newLobby(ranks int) *lobby {
	return &lobby{limit: ranks + extraStrangers, room: make(chan struct{}, 1)}
}

// enter lets a connection in. Where the lobby is full it waits a moment first: those whose connection has ended leave by
// themselves as soon as they are heard, and a rank must not go because they were not.
func (l *lobby) enter(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == l.limit {
		l.mu.Unlock()
		select {
		case <-l.room:
		case <-time.After(roomPatience):
		}
		l.mu.Lock()
	}
	if len(l.waiting) == l.limit {
		l.waiting[0].Close() // ends its handshake
		l.waiting = l.waiting[1:]
	}
	l.waiting = append(l.waiting, conn)
}

// leave is for a connection whose handshake has ended, well or not. It returns false if the connection was sent away
// before.
func (l *lobby) leave(conn net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, conn)
	if i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		select {
		case l.room <- struct{}{}:
		default:
		}
	}
	return i >= 0
}

// empty sends everybody away.
func (l *lobby) empty() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.waiting {
		conn.Close()
	}
	l.waiting = nil
}
