package bootstrap

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// Patience of a rank with a connection that rank 0 has not answered: at first, doubled each time, at most.
const (
	firstPatience = 500 * time.Millisecond
	mostPatience  = 8 * time.Second
)

// join is the other ranks' part of the start: it dials until rank 0 listens, and again if rank 0 sent it away before it
// was accepted, as rank 0 does with the oldest when strangers crowd its port. A host whose queue for the port is full
// drops connections, also ones that look established here, and tries each again after seconds: a new one comes sooner.
func (t *tcp) join(ctx context.Context, o TCPOptions, address string, local net.Addr) error {
	d := net.Dialer{LocalAddr: local, Timeout: firstPatience}
	begin := time.Now()
	var last error // the newest one that is not a mere timeout
	var lost error // of a handshake
	for redials := 0; ; {
		conn, err := d.DialContext(ctx, "tcp", address)
		if err == nil {
			lost = t.answer(ctx, conn, o, d.Timeout)
			unheard := lost == errUnheard
			if lost == nil || !unheard && (!connectionGone(lost) || redials == maxRedials) {
				return lost
			}
			if !unheard {
				redials++
			}
			err = lost
			conn.Close()
		} else if lost != nil && errors.Is(err, syscall.ECONNREFUSED) {
			return lost // rank 0 has ended
		}
		if last == nil || !timedOut(err) {
			last = err
		}
		if timedOut(err) {
			d.Timeout = min(2*d.Timeout, mostPatience)
		}
		if lost == nil && !worthRetrying(err) && ctx.Err() == nil {
			return status.Errorf(status.System, "rank %d, connecting to rank 0 at %s: %w", t.rank, address, err)
		}
		select {
		case <-time.After(redialTCP):
		case <-ctx.Done():
			return ctxError(ctx, fmt.Sprintf("rank %d found no rank 0 at %s within %.1f s (%v)", t.rank, address, time.Since(begin).Seconds(), last))
		}
	}
}

// worthRetrying reports whether err is one of those seen before rank 0, its host or its name is up.
func worthRetrying(err error) bool {
	var dns *net.DNSError
	for _, e := range []error{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ECONNRESET} {
		if errors.Is(err, e) {
			return true
		}
	}
	return timedOut(err) || errors.As(err, &dns)
}

// errUnheard is of a connection on which rank 0 has said nothing for as long as the joiner waits.
var errUnheard = status.Errorf(status.Timeout, "rank 0 does not answer: %w", os.ErrDeadlineExceeded)

// answer is the joiner's half of the handshake. Rank 0 speaks at once, and accepts when all ranks have joined, so that
// only ctx bounds the rest.
func (t *tcp) answer(ctx context.Context, conn net.Conn, o TCPOptions, patience time.Duration) error {
	t.conns[0] = conn
	what := fmt.Sprintf("rank %d, joining rank 0 at %s", t.rank, conn.RemoteAddr())
	heard := boundHandshake(ctx, conn, patience)
	f, err := readFrame(conn, 0)
	heard()
	if err != nil && timedOut(err) && ctx.Err() == nil {
		return errUnheard
	}
	if err != nil {
		return ioError(ctx, err, what)
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(t.lastMoment(ctx)) })
	defer stop()
	if f.kind != kindChallenge {
		return status.Errorf(status.Mismatch, "%s: what listens there is not rank 0", what)
	}
	challenge := f.nonce
	j := joinRequest{size: t.size, nonce: randomNonce()}
	j.proof = proof(o.Secret, roleJoiner, challenge, j.nonce, [16]byte{}, t.rank, t.size)
	if err := writeFrame(conn, &frame{kind: kindJoin, rank: t.rank, nonce: challenge, blob: j.encode()}); err != nil {
		return ioError(ctx, err, what)
	}
	if f, err = readFrame(conn, handshakeBlob); err != nil {
		return ioError(ctx, err, what)
	}
	t.nonce = f.nonce
	want := proof(o.Secret, roleCoordinator, challenge, j.nonce, t.nonce, t.rank, t.size)
	switch {
	case f.kind == kindRefuse:
		return fmt.Errorf("%s: %w", what, decodeRefusal(f.blob))
	case f.kind != kindAccept || !hmac.Equal(f.blob, want[:]):
		return status.Errorf(status.Mismatch, "%s: the answer does not come from a rank 0 that knows the secret", what)
	}
	return nil
}

// sendAndReceive is the other ranks' half of a gather.
func (t *tcp) sendAndReceive(ctx context.Context, all [][]byte) error {
	c := t.conns[0]
	// An error of the write is not returned: rank 0 may have sent the reason before it closed, and the read below gets
	// it.
	_ = writeFrame(c, t.gatherFrame(t.rank, all[t.rank]))
	for from := range all {
		if from == t.rank {
			continue
		}
		f, err := t.readGather(c)
		if err == nil && f.rank != from {
			err = fmt.Errorf("a blob of rank %d in place of rank %d's", f.rank, from)
		}
		if err != nil {
			return ioError(ctx, err, fmt.Sprintf("exchange: waiting for rank 0 (%s)", c.RemoteAddr()))
		}
		all[from] = f.blob
	}
	return nil
}
