package bootstrap

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/internal/status"
)

const (
	// knockBytes bounds what a stranger may send to a door.
	knockBytes = 64 << 10
	// knockAgain is the pause of a process that found no door.
	knockAgain = 10 * time.Millisecond
	// maxVisitors bounds the processes that wait at one door.
	maxVisitors = 64
)

// Door is where processes of this host ask to be let into a group: a Unix socket in the abstract namespace, whose name
// is made of the group's key and a number, so that a process finds the doors of all members without an address. The key
// is no secret: a visitor must have the user id of this process.
//
// A visitor waits at one door, and comes to another one when that closes.
type Door struct {
	key       string
	listener  net.Listener
	strangers *lobby
	tasks     errgroup.Group

	mu       sync.Mutex
	visitors []*visitor // in the order of their arrival
	closed   bool
}

// Visitor is a process that asks to be let in.
type Visitor struct {
	ID    string // random
	Rank  int    // the place that it asks for; -1: any
	Hello []byte // of its Candidate
}

type visitor struct {
	Visitor
	link *link
}

func doorName(key string, number int) string { return fmt.Sprintf("@deepep-join-%s-%d", key, number) }

func doorNonce(key string) [16]byte {
	sum := sha256.Sum256([]byte("deepep join " + key))
	return [16]byte(sum[:16])
}

// OpenDoor opens a door of the group with this key, at the first free number from rank on. The caller ends it with
// Close.
func OpenDoor(key string, rank int) (*Door, error) {
	d := &Door{key: key, strangers: newLobby(0)}
	for i := range maxRanks {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: doorName(key, (rank+i)%maxRanks)})
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, status.Errorf(status.System, "unix socket: %w", err)
		}
		d.listener = l
		d.spawn("door", d.acceptLoop)
		return d, nil
	}
	return nil, status.Errorf(status.System, "no number is free for a socket %s", doorName(key, rank))
}

func (d *Door) spawn(name string, f func()) {
	d.tasks.Go(func() error {
		guard(name, nil, f)
		return nil
	})
}

func (d *Door) acceptLoop() {
	for {
		conn, err := d.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			time.Sleep(redialEvery) // most likely no descriptor is free now
		case checkUser(conn.(*net.UnixConn)) != nil:
			conn.Close()
		default:
			d.strangers.enter(conn)
			d.spawn("visitor", func() { d.receive(conn) })
		}
	}
}

// receive reads a visitor's request, and then waits with it for the end of the connection.
func (d *Door) receive(conn net.Conn) {
	defer conn.Close()
	v := &visitor{link: newLink(-1, conn)}
	conn.SetDeadline(time.Now().Add(handshakeTime))
	err := d.read(v)
	if err == nil {
		err = v.link.write(&frame{kind: kindWelcome, nonce: doorNonce(d.key)})
	}
	conn.SetDeadline(time.Time{})
	if d.strangers.leave(conn) && err == nil && d.enter(v) {
		conn.Read(make([]byte, 1)) // nothing comes: it returns when the visitor has gone, or was sent away
		d.drop(v)
	}
}

func (d *Door) read(v *visitor) error {
	f, err := v.link.read(knockBytes)
	if err != nil {
		return err
	}
	closeFDs(f.fds)
	if f.kind != kindKnock || !sameNonce(f.nonce, doorNonce(d.key)) {
		return errors.New("not a request of this group")
	}
	if err := json.Unmarshal(f.blob, &v.Visitor); err != nil {
		return err
	}
	_, err = decodeHello(v.Hello)
	return err
}

func (d *Door) enter(v *visitor) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.visitors) == maxVisitors {
		return false
	}
	d.visitors = append(d.visitors, v)
	return true
}

func (d *Door) drop(v *visitor) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.visitors, v); i >= 0 {
		d.visitors = slices.Delete(d.visitors, i, i+1)
	}
}

// Visitors lists who waits at this door, in the order of arrival.
func (d *Door) Visitors() []Visitor {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]Visitor, len(d.visitors))
	for i, v := range d.visitors {
		all[i] = v.Visitor
	}
	return all
}

// Admit lets a visitor in: its Knock returns the blob. Visitors of other doors are not known here, which is no error.
func (d *Door) Admit(id string, blob []byte) {
	d.mu.Lock()
	i := slices.IndexFunc(d.visitors, func(v *visitor) bool { return v.ID == id })
	var v *visitor
	if i >= 0 {
		v = d.visitors[i]
		d.visitors = slices.Delete(d.visitors, i, i+1)
	}
	d.mu.Unlock()
	if v != nil { // after a failed write the visitor knocks again; what was written stays readable
		v.link.conn.SetWriteDeadline(time.Now().Add(refuseTime))
		v.link.write(&frame{kind: kindAdmit, nonce: doorNonce(d.key), blob: blob})
		v.link.conn.Close()
	}
}

// Close sends the visitors away; they look for another door. Idempotent.
func (d *Door) Close() error {
	d.mu.Lock()
	d.closed = true
	for _, v := range d.visitors {
		v.link.conn.Close()
	}
	d.mu.Unlock()
	d.listener.Close()
	d.strangers.empty()
	_ = d.tasks.Wait()
	return nil
}

// Knock asks at the doors of the group with this key, one after the other, until a member lets this process in, and
// returns what the member gave to Admit. It waits as long as there is no member or none lets it in, until ctx ends.
func Knock(ctx context.Context, key string, rank int, hello []byte) ([]byte, error) {
	id := randomNonce()
	request, err := json.Marshal(Visitor{ID: fmt.Sprintf("%x", id), Rank: rank, Hello: hello})
	if err != nil {
		return nil, status.Errorf(status.Internal, "join request: %w", err)
	}
	begin, met := time.Now(), false
	for {
		for number := range maxRanks {
			blob, welcome, err := knockAt(ctx, key, number, request)
			if err == nil {
				return blob, nil
			}
			met = met || welcome
			if ctx.Err() != nil {
				break
			}
		}
		select {
		case <-time.After(knockAgain):
		case <-ctx.Done():
			why := "no member listens under that key: a member's join_key opens its socket"
			if met {
				why = "no regroup let this process in"
			}
			return nil, ctxError(ctx, fmt.Sprintf("joining group %s: %s for %.1f s", key, why, time.Since(begin).Seconds()))
		}
	}
}

// knockAt waits at one door. welcome: there was one.
func knockAt(ctx context.Context, key string, number int, request []byte) (blob []byte, welcome bool, err error) {
	conn, err := dialRetrying(ctx, "unix", doorName(key, number))
	if err != nil {
		return nil, false, err
	}
	defer conn.Close()
	l := newLink(-1, conn)
	if err := checkUser(l.unix); err != nil {
		return nil, false, errors.New("the socket is another user's")
	}
	stop := boundHandshake(ctx, conn, handshakeTime)
	defer func() { stop() }()
	if err := l.write(&frame{kind: kindKnock, nonce: doorNonce(key), blob: request}); err != nil {
		return nil, false, err
	}
	if _, err := readDoor(l, key, kindWelcome); err != nil {
		return nil, false, err
	}
	stop()
	stop = boundHandshake(ctx, conn, 0)
	f, err := readDoor(l, key, kindAdmit)
	return f.blob, true, err
}

func readDoor(l *link, key string, kind frameKind) (frame, error) {
	f, err := l.read(MaxBlob)
	if err != nil {
		return f, err
	}
	closeFDs(f.fds)
	if f.kind != kind || !sameNonce(f.nonce, doorNonce(key)) {
		return f, errors.New("not an answer of this group")
	}
	return f, nil
}
