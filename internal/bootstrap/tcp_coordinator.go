package bootstrap

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/internal/status"
)

// arrival is a connection whose joiner has proved that it knows the secret, or the error that ends the start.
type arrival struct {
	rank      int
	conn      net.Conn
	challenge [16]byte // made for this connection alone, so that a join cannot be replayed
	nonce     [16]byte // of the joiner
	err       error
}

// refusals counts joins with another secret, by the rank that they say.
type refusals struct {
	mu     sync.Mutex
	counts map[int]int
	last   map[int]net.Addr
}

func (r *refusals) add(rank int, from net.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts == nil {
		r.counts, r.last = map[int]int{}, map[int]net.Addr{}
	}
	r.counts[rank]++
	r.last[rank] = from
}

// of says how often the ranks came with another secret; "" if none did.
func (r *refusals) of(ranks []int) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := ""
	for _, rank := range ranks {
		if n := r.counts[rank]; n > 0 {
			text += fmt.Sprintf("; a rank %d with another secret was refused (%d times, last from %s)", rank, n, r.last[rank])
		}
	}
	return text
}

// coordinate is rank 0's part of the start: it listens until every rank has joined.
func (t *tcp) coordinate(ctx context.Context, o TCPOptions, address string) error {
	t.nonce = randomNonce()
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return status.Errorf(status.System, "rank 0: %w", err)
	}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	start, inner := errgroup.WithContext(inner)
	arrivals := make(chan arrival)
	var joined []arrival
	start.Go(guarded("accept", func() error {
		t.acceptLoop(inner, l, o, arrivals)
		return nil
	}))
	start.Go(guarded("start", func() (err error) {
		defer l.Close() // ends the accept loop
		defer cancel()  // ends its handshakes
		joined, err = t.collectJoiners(inner, arrivals, address)
		return err
	}))
	if err := start.Wait(); err != nil {
		t.refuseAll(err)
		return err
	}
	return t.each(func(rank int, c net.Conn) error {
		a := joined[rank]
		p := proof(o.Secret, roleCoordinator, a.challenge, a.nonce, t.nonce, rank, t.size)
		if err := writeFrame(c, &frame{kind: kindAccept, nonce: t.nonce, blob: p[:]}); err != nil {
			return ioError(ctx, err, fmt.Sprintf("welcoming rank %d (%s)", rank, c.RemoteAddr()))
		}
		return nil
	})
}

// collectJoiners fills t.conns and returns the arrivals by rank.
func (t *tcp) collectJoiners(ctx context.Context, arrivals <-chan arrival, address string) ([]arrival, error) {
	joined := make([]arrival, t.size)
	begin := time.Now()
	for missing := t.size - 1; missing > 0; missing-- {
		select {
		case a := <-arrivals:
			if a.err != nil {
				return nil, a.err
			}
			if other := t.conns[a.rank]; other != nil {
				err := status.Errorf(status.Mismatch, "ranks disagree: both %s and %s say that they are rank %d",
					other.RemoteAddr(), a.conn.RemoteAddr(), a.rank)
				refuse(a.conn, a.challenge, err)
				return nil, err
			}
			t.conns[a.rank], joined[a.rank] = a.conn, a
		case <-ctx.Done():
			var names []int
			for r := 1; r < t.size; r++ {
				if t.conns[r] == nil {
					names = append(names, r)
				}
			}
			return nil, ctxError(ctx, fmt.Sprintf("%s did not come to rank 0 at %s within %.1f s%s",
				rankList(names), address, time.Since(begin).Seconds(), t.refused.of(names)))
		}
	}
	return joined, nil
}

// acceptLoop runs the handshake on every connection, a bounded number at once, and passes on the joiners of this group.
func (t *tcp) acceptLoop(ctx context.Context, l net.Listener, o TCPOptions, arrivals chan<- arrival) {
	var handshakes errgroup.Group
	strangers := newLobby(t.size)
	for ctx.Err() == nil {
		conn, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				break
			}
			select {
			case <-time.After(redialTCP):
			case <-ctx.Done():
			}
			continue
		}
		strangers.enter(conn)
		handshakes.Go(guarded("handshake", func() error {
			t.admit(ctx, conn, o, arrivals, strangers)
			return nil
		}))
	}
	_ = handshakes.Wait() // a panic in one ends that connection only
}

// admit is rank 0's half of the handshake. It refuses a connection without the secret; the start goes on.
func (t *tcp) admit(ctx context.Context, conn net.Conn, o TCPOptions, arrivals chan<- arrival, strangers *lobby) {
	stop := boundHandshake(ctx, conn, handshakeTime)
	a, err := t.challenge(conn, o)
	stop()
	if !strangers.leave(conn) {
		conn.Close()
		return
	}
	if err != nil {
		refuse(conn, a.challenge, err)
		return
	}
	if a.err != nil {
		refuse(conn, a.challenge, a.err)
	}
	select {
	case arrivals <- a:
	case <-ctx.Done():
		conn.Close()
	}
}

// challenge asks for the proof and checks it. An error refuses this connection; arrival.err ends the whole start,
// because a rank of this group has the wrong rank or size.
func (t *tcp) challenge(conn net.Conn, o TCPOptions) (arrival, error) {
	a := arrival{conn: conn, challenge: randomNonce()}
	if err := writeFrame(conn, &frame{kind: kindChallenge, nonce: a.challenge}); err != nil {
		return a, err
	}
	f, err := readFrame(conn, handshakeBlob)
	if err != nil {
		return a, err
	}
	if f.kind != kindJoin || f.nonce != a.challenge {
		return a, status.Errorf(status.Mismatch, "no join request that answers this connection's challenge")
	}
	j, err := decodeJoin(f.blob)
	if err != nil {
		return a, status.Errorf(status.Mismatch, "%w", err)
	}
	want := proof(o.Secret, roleJoiner, a.challenge, j.nonce, [16]byte{}, f.rank, j.size)
	if !hmac.Equal(want[:], j.proof[:]) {
		t.refused.add(f.rank, conn.RemoteAddr())
		return a, status.Errorf(status.Mismatch, "rank 0 was given another secret than rank %d: one of them belongs to another job", f.rank)
	}
	a.rank, a.nonce = f.rank, j.nonce
	if j.size != t.size {
		a.err = status.Errorf(status.Mismatch, "ranks disagree on the number of ranks: rank 0 has %d, rank %d (%s) has %d",
			t.size, f.rank, conn.RemoteAddr(), j.size)
	} else if f.rank < 1 || f.rank >= t.size {
		a.err = status.Errorf(status.Mismatch, "ranks disagree: %s also says that it is rank %d", conn.RemoteAddr(), f.rank)
	}
	return a, nil
}

// relay is rank 0's half of a gather. When one rank fails it sends the reason to all others.
func (t *tcp) relay(ctx context.Context, all [][]byte) error {
	err := t.each(func(rank int, c net.Conn) error {
		f, err := t.readGather(c)
		if err == nil && f.rank != rank {
			err = fmt.Errorf("a blob of rank %d", f.rank)
		}
		if err != nil {
			return ioError(ctx, err, fmt.Sprintf("exchange: waiting for rank %d (%s)", rank, c.RemoteAddr()))
		}
		all[rank] = f.blob
		return nil
	})
	if err != nil && ctx.Err() != nil {
		var late []int
		for rank, blob := range all {
			if blob == nil && rank != t.rank {
				late = append(late, rank)
			}
		}
		if late != nil {
			err = ctxError(ctx, "exchange: rank 0 has nothing from "+rankList(late))
		}
	}
	if err != nil {
		t.refuseAll(err)
		return err
	}
	return t.each(func(rank int, c net.Conn) error {
		for from, blob := range all {
			if from == rank {
				continue
			}
			if err := writeFrame(c, t.gatherFrame(from, blob)); err != nil {
				return ioError(ctx, err, fmt.Sprintf("exchange: sending to rank %d (%s)", rank, c.RemoteAddr()))
			}
		}
		return nil
	})
}

// refuseAll sends the reason to the ranks that have joined.
func (t *tcp) refuseAll(err error) {
	t.each(func(_ int, c net.Conn) error {
		c.SetWriteDeadline(time.Now().Add(refuseTime))
		return writeFrame(c, &frame{kind: kindRefuse, nonce: t.nonce, blob: encodeRefusal(err)})
	})
}
