package bootstrap

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	// handshakeTime bounds the handshake of a connection from another program. A rank of the group speaks at once, and
	// dials again where it was stopped for so long.
	handshakeTime = 2 * time.Second
	// handshakeBlob bounds what is read before the other side has shown that it belongs to the group.
	handshakeBlob = 4096
	// redialEvery is the pause after a full backlog.
	redialEvery = 5 * time.Millisecond
	// maxRedials bounds how often a rank dials again after it was sent away: by a peer whose lobby is full of strangers.
	maxRedials = 100
)

// connector joins one rank to all others: it dials the lower ranks and accepts the higher ones.
type connector struct {
	*Pending
	c     *Channel
	pidfd int            // of this process, sent to peers of the same host; -1: none
	tasks errgroup.Group // dialers and acceptors; their errors go to the channel, where await sees them at once

	decided chan struct{} // closed when await has returned
	verdict error         // what it returned; read after decided

	mu      sync.Mutex
	dialing map[*link]bool // connections that wait for the welcome
}

// Connect joins the ranks directly, without the Exchanger of Begin. It returns PeerDead early if a rank dies whose
// process can be watched, and Timeout with the missing ranks' names when ctx ends.
func (p *Pending) Connect(ctx context.Context) (*Channel, error) {
	if p.listeners == nil {
		return nil, status.Errorf(status.InvalidState, "connect: already connected or closed")
	}
	listeners := p.listeners
	c, err := newChannel(p.self.Rank, p.nonce, p.peers)
	if err != nil {
		p.Close()
		return nil, err
	}
	c.elder = p.elder
	if slices.ContainsFunc(p.peers, func(p Peer) bool { return p.Crowd }) {
		c.inbox = newInbox(len(p.peers))
		c.wg.Go(func() { guard("crowd's reader", func(err error) { c.Fail(c.rank, err) }, c.readInbox) })
		c.joinCrowd()
	}
	n := &connector{Pending: p, c: c, pidfd: -1, decided: make(chan struct{}), dialing: make(map[*link]bool)}
	if !p.noPidfd {
		if fd, err := unix.PidfdOpen(os.Getpid(), 0); err == nil {
			n.pidfd = fd
		}
	}
	if p.onConnect != nil {
		p.onConnect(n)
	}
	inner, cancel := context.WithCancel(ctx)
	n.watchProcesses()
	for _, l := range listeners {
		n.spawn(&n.tasks, "accept", func() { n.acceptLoop(inner, l) })
	}
	for rank := range c.rank {
		if p.peers[rank].Absent || p.peers[rank].Crowd {
			continue
		}
		n.spawn(&n.tasks, "dial", func() { n.dial(inner, rank) })
	}
	err = n.await(ctx)
	n.verdict = err
	close(n.decided)
	cancel()
	p.Close()
	_ = n.tasks.Wait()
	if n.pidfd >= 0 {
		unix.Close(n.pidfd)
	}
	if err != nil {
		c.CloseWith(err)
		return nil, err
	}
	return c, nil
}

func (n *connector) spawn(group *errgroup.Group, name string, f func()) {
	group.Go(func() error {
		guard(name, func(err error) { n.c.Fail(n.c.rank, err) }, f)
		return nil
	})
}

// watchProcesses watches every process that can be looked up by its pid, so that Connect sees a death at once.
func (n *connector) watchProcesses() {
	for _, p := range n.peers {
		if p.SameProcess || !p.SamePIDNamespace || p.StartTime == 0 {
			continue
		}
		add := n.c.watch.addPID
		if n.noPidfd {
			add = func(rank, pid int, start uint64) error { return n.c.watch.addProbe(rank, probe{pid, start}) }
		}
		if err := add(p.Rank, p.PID, p.StartTime); errors.Is(err, errProcessGone) {
			n.c.processEnded(p.Rank)
		}
	}
}

// await waits until every rank is connected, a rank fails, or ctx ends.
func (n *connector) await(ctx context.Context) error {
	wait := n.c.beginWait()
	defer wait.end()
	for {
		missing, changed, err := n.missing()
		if err != nil || len(missing) == 0 {
			return err
		}
		n.endStolen()
		if wait.until(ctx, missing, changed); ctx.Err() == nil {
			continue
		}
		if missing, _, err = n.missing(); err != nil || len(missing) == 0 {
			return err
		}
		n.c.mu.Lock()
		names, others := n.c.late(missing)
		wait.giveUp(ctx, missing)
		n.c.mu.Unlock()
		return ctxError(ctx, fmt.Sprintf("connecting: %s not joined after %.1f s%s", names, time.Since(wait.began).Seconds(), others))
	}
}

func (n *connector) missing() (ranks []int, changed chan struct{}, err error) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	if failed := n.c.firstFailure(func(int) bool { return true }); failed != nil {
		err = fmt.Errorf("connecting: %w", failed)
	}
	for rank, l := range n.c.links {
		if l == nil && rank != n.c.rank && !n.peers[rank].Absent {
			ranks = append(ranks, rank)
		}
	}
	return ranks, n.c.changed, err
}

// dial connects to one lower rank.
func (n *connector) dial(ctx context.Context, rank int) {
	l, err := n.tryDial(ctx, rank)
	if err != nil {
		if errors.Is(err, status.ErrPeerDead) {
			n.c.awaitBlame()
		}
		if ctx.Err() == nil {
			n.c.Fail(rank, err)
		}
		return
	}
	if !n.c.start(l) {
		l.shut()
	}
}

func (n *connector) tryDial(ctx context.Context, rank int) (*link, error) {
	network, address := "unix", "@"+n.hellos[rank].Socket
	if !n.peers[rank].SameHost {
		network, address = "tcp", n.hellos[rank].TCP
	}
	what := fmt.Sprintf("connecting to %s", n.peers[rank])
	for redials := 0; ; redials++ {
		conn, err := dialRetrying(ctx, network, address)
		if err != nil {
			return nil, ioError(ctx, err, what)
		}
		l := newLink(rank, conn)
		stop := boundHandshake(ctx, conn, 0)
		n.keep(l, true)
		err = n.introduce(l)
		n.keep(l, false)
		stop()
		if err == nil {
			return l, nil
		}
		stolen := l.stolen()
		if ctx.Err() != nil && !stolen {
			n.farewell(l)
		}
		l.shut()
		if !stolen && !connectionGone(err) || redials == maxRedials || ctx.Err() != nil {
			return nil, ioError(ctx, err, what)
		}
		if err := sleep(ctx, redialEvery, what); err != nil {
			return nil, err
		}
	}
}

// keep remembers a connection while it waits for the welcome.
func (n *connector) keep(l *link, waits bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if waits {
		n.dialing[l] = true
	} else {
		delete(n.dialing, l)
	}
}

// endStolen ends the waits of dialers whose connection something else in this process has closed. They dial again: the
// other rank has seen the end of it, and waits for a new one.
func (n *connector) endStolen() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for l := range n.dialing {
		if l.stolen() {
			l.conn.SetReadDeadline(time.Unix(1, 0))
		}
	}
}

// farewell tells a rank that may take this one for connected why it gives up.
func (n *connector) farewell(l *link) {
	<-n.decided
	bye := &frame{kind: kindBye, rank: n.c.rank, nonce: n.nonce}
	if n.verdict != nil {
		bye.blob = encodeRefusal(n.verdict)
	}
	l.conn.SetWriteDeadline(time.Now().Add(flushAtClose))
	_ = l.write(bye) // it may have ended
}

// dialRetrying dials again while the listener's backlog is full. A refusal is final: every rank listened before the
// gather.
func dialRetrying(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, network, address)
		if !errors.Is(err, syscall.EAGAIN) {
			return conn, err
		}
		select {
		case <-time.After(redialEvery):
		case <-ctx.Done():
			return nil, status.Cause(ctx)
		}
	}
}

// boundHandshake ends reads and writes on conn with ctx, or after limit unless that is 0, until stop is called, once.
// After stop conn has no deadline, also where ctx has ended: the link may then still say why this rank gives up.
func boundHandshake(ctx context.Context, conn net.Conn, limit time.Duration) (stop func()) {
	if limit > 0 {
		conn.SetDeadline(time.Now().Add(limit))
	}
	ended := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		conn.SetDeadline(time.Unix(1, 0))
		close(ended)
	})
	return func() {
		if !unhook() {
			<-ended
		}
		conn.SetDeadline(time.Time{})
	}
}

// introduce is the dialer's half of the handshake: it sends a hello with its rank and the expected one, and reads the
// welcome.
func (n *connector) introduce(l *link) error {
	if err := checkUser(l.unix); err != nil {
		return err
	}
	hello := n.handshake(kindHello, l)
	hello.blob = binary.LittleEndian.AppendUint32(nil, uint32(l.rank))
	if err := l.write(hello); err != nil {
		return err
	}
	f, err := l.read(handshakeBlob)
	if err != nil {
		return err
	}
	if f.kind == kindRefuse {
		closeFDs(f.fds)
		return status.Errorf(status.Mismatch, "refused: %s", f.blob)
	}
	if f.kind != kindWelcome || f.rank != l.rank || !sameNonce(f.nonce, n.nonce) {
		closeFDs(f.fds)
		return status.Errorf(status.Mismatch, "the answer is not a welcome of rank %d", l.rank)
	}
	n.watchReceived(l.rank, f.fds)
	return nil
}

func (n *connector) handshake(kind frameKind, l *link) *frame {
	f := &frame{kind: kind, rank: n.c.rank, nonce: n.nonce}
	if l.unix != nil && n.pidfd >= 0 {
		f.fds = []int{n.pidfd}
	}
	return f
}

// watchReceived watches a process by the pidfd that it sent, if it is not watched by its pid.
func (n *connector) watchReceived(rank int, fds []int) {
	use := len(fds) == 1 && !n.noPidfd && !n.peers[rank].SameProcess && !n.c.watch.watches(rank)
	if use {
		if _, err := pidOf(fds[0]); err == nil {
			n.c.watch.addFD(rank, fds[0]) // after an error only the heartbeat shows a death
			return
		}
	}
	closeFDs(fds)
}

// acceptLoop runs the handshake on every connection, a bounded number at once. Another user's is closed at once.
func (n *connector) acceptLoop(ctx context.Context, l net.Listener) {
	var handshakes errgroup.Group
	defer func() { _ = handshakes.Wait() }()
	strangers := newLobby(len(n.peers))
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			select { // most likely no descriptor is free now
			case <-time.After(redialEvery):
				continue
			case <-ctx.Done():
				return
			}
		}
		if unixConn, ok := conn.(*net.UnixConn); ok && checkUser(unixConn) != nil {
			conn.Close()
			continue
		}
		strangers.enter(conn)
		n.spawn(&handshakes, "handshake", func() {
			defer strangers.leave(conn)
			n.accept(ctx, conn, strangers)
		})
	}
}

// accept is the listener's half of the handshake. A connection from outside the group gets no answer.
func (n *connector) accept(ctx context.Context, conn net.Conn, strangers *lobby) {
	l := newLink(-1, conn)
	stop := boundHandshake(ctx, conn, handshakeTime)
	err := n.answer(l, strangers)
	stop()
	if err != nil || !n.c.start(l) {
		conn.Close()
	}
}

func (n *connector) answer(l *link, strangers *lobby) error {
	f, err := l.read(handshakeBlob)
	if err != nil {
		return err
	}
	if reason := n.checkHello(l, &f); reason != nil {
		closeFDs(f.fds)
		if sameNonce(f.nonce, n.nonce) {
			l.write(&frame{kind: kindRefuse, rank: n.c.rank, nonce: n.nonce, blob: []byte(reason.Error())})
		}
		return reason
	}
	if !strangers.leave(l.conn) {
		closeFDs(f.fds)
		return errSentAway
	}
	l.rank = f.rank
	if err := l.write(n.handshake(kindWelcome, l)); err != nil {
		closeFDs(f.fds)
		return err
	}
	n.watchReceived(l.rank, f.fds)
	return nil
}

var errSentAway = errors.New("sent away for a newcomer")

// checkHello returns why a hello frame is refused.
func (n *connector) checkHello(l *link, f *frame) error {
	switch {
	case f.kind != kindHello || len(f.blob) != 4 || !sameNonce(f.nonce, n.nonce):
		return errors.New("not a hello of this group")
	case int(binary.LittleEndian.Uint32(f.blob)) != n.c.rank:
		return fmt.Errorf("this is rank %d, not rank %d", n.c.rank, binary.LittleEndian.Uint32(f.blob))
	case f.rank <= n.c.rank || f.rank >= len(n.peers) || n.peers[f.rank].Absent:
		return fmt.Errorf("rank %d does not connect to rank %d", f.rank, n.c.rank)
	case n.peers[f.rank].SameHost != (l.unix != nil) || n.peers[f.rank].Crowd:
		return fmt.Errorf("rank %d came over the wrong kind of link", f.rank)
	}
	return nil
}

func sameNonce(a, b [16]byte) bool { return subtle.ConstantTimeCompare(a[:], b[:]) == 1 }

// checkUser refuses a Unix peer of another user. The kernel supplies the peer's user id.
func checkUser(conn *net.UnixConn) error {
	if conn == nil {
		return nil
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) {
		cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if inner != nil {
		return inner
	}
	if int(cred.Uid) != os.Geteuid() {
		return status.Errorf(status.Mismatch, "the peer's process runs as uid %d, this one as uid %d", cred.Uid, os.Geteuid())
	}
	return nil
}
