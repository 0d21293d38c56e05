package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/internal/status"
)

// redialTCP is the pause before a rank dials rank 0 again: rank 0 may start later than the others.
const redialTCP = 50 * time.Millisecond

// TCPOptions describes a group that meets at rank 0.
type TCPOptions struct {
	Rank, Size int
	// Address is "host:port" of rank 0, which listens there and nowhere else.
	Address string
	// Secret keeps other programs and other jobs out: it must be equal on every rank. It is not sent. Whoever knows it
	// can join. Empty is allowed.
	Secret string
	// Interface is the network interface, or its address, that rank 0 listens on and the others connect from. Empty:
	// loopback, and Address must be a loopback address.
	Interface string
}

// tcp is one rank's end of the star around rank 0. On rank 0 conns holds all other ranks, elsewhere rank 0 alone.
type tcp struct {
	rank, size int
	nonce      [16]byte
	conns      []net.Conn
	seq        uint64
	refused    refusals

	mu     sync.Mutex
	broken error // the error that every further gather returns
}

// DialTCP joins the ranks at rank 0 and returns when all have joined. It is collective. Ranks that disagree on the
// size, a rank given twice or another secret are a Mismatch; if ctx ends first, Timeout names the missing ranks.
func DialTCP(ctx context.Context, o TCPOptions) (Exchanger, error) {
	if err := CheckGroup(o.Rank, o.Size); err != nil {
		return nil, err
	}
	t := &tcp{rank: o.Rank, size: o.Size, conns: make([]net.Conn, o.Size)}
	if o.Size == 1 {
		return t, nil
	}
	address, local, err := resolve(ctx, o)
	if err != nil {
		return nil, err
	}
	if o.Rank == 0 {
		err = t.coordinate(ctx, o, address)
	} else {
		err = t.join(ctx, o, address, local)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// resolve returns rank 0's address, and the local address from which the others connect.
func resolve(ctx context.Context, o TCPOptions) (address string, local net.Addr, err error) {
	const allowed = `"host:port" of rank 0 with a port from 1 to 65535`
	host, port, err := net.SplitHostPort(o.Address)
	if err != nil {
		return "", nil, status.InvalidArg("address", strconv.Quote(o.Address), allowed)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", nil, status.InvalidArg("address", strconv.Quote(o.Address), allowed)
	}
	if o.Interface != "" {
		address, err := interfaceAddress(o.Interface)
		if err != nil {
			return "", nil, err
		}
		if o.Rank == 0 { // the host's name may resolve to loopback here and to the network elsewhere
			return net.JoinHostPort(address.String(), port), nil, nil
		}
		return o.Address, net.TCPAddrFromAddrPort(netip.AddrPortFrom(address, 0)), nil
	}
	if host == "" {
		host = "127.0.0.1"
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return "", nil, status.Errorf(status.System, "address of rank 0: %w", err)
	}
	for _, a := range addrs {
		if !a.Unmap().IsLoopback() {
			return "", nil, status.InvalidArg("address", o.Address,
				"a loopback address, or any address once the network interface is named (DEEPEP_INTERFACE)")
		}
	}
	return net.JoinHostPort(addrs[0].Unmap().String(), port), nil, nil
}

func (t *tcp) Rank() int { return t.rank }
func (t *tcp) Size() int { return t.size }

// Close is local. The other ranks' next gather fails.
func (t *tcp) Close() error {
	t.fail(status.Errorf(status.InvalidState, "exchange: this rank's exchanger is closed"))
	for _, c := range t.conns {
		if c != nil {
			c.Close()
		}
	}
	return nil
}

func (t *tcp) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.broken == nil {
		t.broken = err
	}
}

func (t *tcp) usable() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.broken
}

// AllGather sends every blob to rank 0, which sends all of them to every rank. An error leaves the exchanger unusable.
func (t *tcp) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	if err := checkBlob(blob); err != nil {
		return nil, err
	}
	if err := t.usable(); err != nil {
		return nil, err
	}
	t.seq++
	all := make([][]byte, t.size)
	all[t.rank] = append([]byte(nil), blob...)
	stop := context.AfterFunc(ctx, func() {
		for _, c := range t.conns {
			if c != nil {
				c.SetDeadline(t.lastMoment(ctx))
			}
		}
	})
	var err error
	if t.rank == 0 {
		err = t.relay(ctx, all)
	} else {
		err = t.sendAndReceive(ctx, all)
	}
	if !stop() && err == nil { // ctx ended together with the gather, and its deadline is set on the connections
		t.fail(ctxError(ctx, "exchange"))
	}
	if err != nil {
		t.fail(err)
		return nil, err
	}
	return all, nil
}

// nameGrace is how long a joiner whose time is over still listens to rank 0, which waits for all, has about the same
// limit, and says who is late.
const nameGrace = time.Second

// lastMoment is when this rank's connections end once ctx has.
func (t *tcp) lastMoment(ctx context.Context) time.Time {
	if t.rank != 0 && errors.Is(status.Cause(ctx), context.DeadlineExceeded) {
		return time.Now().Add(nameGrace)
	}
	return time.Unix(1, 0)
}

func (t *tcp) gatherFrame(rank int, blob []byte) *frame {
	return &frame{kind: kindGather, rank: rank, nonce: t.nonce, tag: strconv.FormatUint(t.seq, 10), blob: blob}
}

func (t *tcp) readGather(c net.Conn) (frame, error) {
	f, err := readFrame(c, MaxBlob)
	switch {
	case err != nil:
		return f, err
	case f.nonce != t.nonce:
		return f, errors.New("a frame of another group")
	case f.kind == kindRefuse:
		return f, decodeRefusal(f.blob)
	case f.kind != kindGather:
		return f, fmt.Errorf("a frame of kind %d", f.kind)
	case f.tag != strconv.FormatUint(t.seq, 10):
		return f, status.Errorf(status.Mismatch, "rank %d is at gather %.20q, this rank at %d", f.rank, f.tag, t.seq)
	}
	return f, nil
}

// each runs f for every connection at once and returns the first error. That error ends the other connections' reads:
// the gather cannot complete without that rank.
func (t *tcp) each(f func(rank int, c net.Conn) error) error {
	group, failed := errgroup.WithContext(context.Background())
	context.AfterFunc(failed, func() {
		if context.Cause(failed) == context.Canceled { // by Wait: no task failed
			return
		}
		for _, c := range t.conns {
			if c != nil {
				c.SetReadDeadline(time.Unix(1, 0))
			}
		}
	})
	for rank, c := range t.conns {
		if c != nil {
			group.Go(guarded("exchange", func() error { return f(rank, c) }))
		}
	}
	return group.Wait()
}
