package bootstrap

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/deepep-go/deepep/internal/status"
)

// Pending is a channel between the gather and the joining of the ranks. Its listeners are open.
type Pending struct {
	self      hello
	hellos    []hello
	peers     []Peer
	nonce     [16]byte
	noPidfd   bool
	listeners []net.Listener
	elder     Elder            // see Follows
	onConnect func(*connector) // of tests: called when the ranks begin to dial
}

// Open makes a Channel with one gather on ex: Begin and Connect together.
func Open(ctx context.Context, ex Exchanger, h HelloOptions) (*Channel, error) {
	p, err := Begin(ctx, ex, h)
	if err != nil {
		return nil, err
	}
	return p.Connect(ctx)
}

// Begin gathers all ranks' hellos in one gather and compares them. If ranks disagree on their number, order, version or
// build, every rank gets a Mismatch that names each rank's value. The caller must call Connect or Close next.
func Begin(ctx context.Context, ex Exchanger, h HelloOptions) (*Pending, error) {
	if err := CheckGroup(ex.Rank(), ex.Size()); err != nil {
		return nil, err
	}
	p, failure := prepare(ex.Rank(), ex.Size(), h)
	if failure != nil {
		p.self.Failure = failure.Error() // the other ranks wait in the gather and return this reason
	}
	err := p.gather(ctx, ex)
	if failure != nil {
		err = failure
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// prepare makes this rank's hello and listeners. It returns the Pending with an error too.
func prepare(rank, size int, o HelloOptions) (*Pending, error) {
	p := &Pending{noPidfd: o.noPidfd, self: hello{
		Rank: rank, Size: size, Version: o.Version, Build: o.Build, identity: currentIdentity(), Nonce: freshNonce(),
	}}
	if len(o.Extra) > MaxExtra {
		return p, status.InvalidArg("Extra", fmt.Sprintf("%d bytes", len(o.Extra)), fmt.Sprintf("at most %d bytes", MaxExtra))
	}
	p.self.Extra = o.Extra
	p.self.Socket = fmt.Sprintf("deepep-%s-%d", p.self.Nonce, rank)
	unixListener, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: "@" + p.self.Socket})
	if err != nil {
		return p, status.Errorf(status.System, "unix socket: %w", err)
	}
	p.listeners = append(p.listeners, unixListener)
	if o.Interface == "" {
		return p, nil
	}
	addr, err := interfaceAddress(o.Interface)
	if err != nil {
		return p, err
	}
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		return p, status.Errorf(status.System, "listening on interface %s (DEEPEP_INTERFACE): %w", o.Interface, err)
	}
	p.listeners = append(p.listeners, tcp)
	p.self.TCP = tcp.Addr().String()
	return p, nil
}

func (p *Pending) gather(ctx context.Context, ex Exchanger) error {
	blob, err := p.self.encode()
	if err != nil {
		return status.Errorf(status.Internal, "hello: %w", err)
	}
	blobs, err := ex.AllGather(ctx, blob)
	if err != nil {
		return fmt.Errorf("gathering the ranks' hellos: %w", err)
	}
	if len(blobs) != p.self.Size {
		return status.Errorf(status.Mismatch, "the exchange joined %d ranks, rank %d expects %d", len(blobs), p.self.Rank, p.self.Size)
	}
	if p.hellos, err = decodeHellos(blobs); err != nil {
		return err
	}
	return p.meet()
}

// meet compares the hellos of all ranks, which are in p.hellos, and derives the nonce and the peers from them.
func (p *Pending) meet() error {
	if err := compareHellos(p.hellos); err != nil {
		return err
	}
	p.nonce = groupNonce(p.hellos)
	self := p.hellos[p.self.Rank]
	p.peers = make([]Peer, len(p.hellos))
	for i, h := range p.hellos {
		p.peers[i] = self.peer(h)
	}
	p.findCrowd()
	return nil
}

// peer describes another rank as seen from h.
func (h *hello) peer(o hello) Peer {
	if o.absent {
		return Peer{Rank: o.Rank, Absent: true, SameHost: true}
	}
	sameHost := o.machine() == h.machine()
	return Peer{
		Rank: o.Rank, Host: o.Host, PID: o.PID, StartTime: o.Start, Version: o.Version, Build: o.Build, Extra: o.Extra,
		SameHost: sameHost, SamePIDNamespace: sameHost && o.PIDNS == h.PIDNS && o.PIDNS != "", SameProcess: o.Process == h.Process,
	}
}

// Peers describes all ranks, in order.
func (p *Pending) Peers() []Peer { return p.peers }

// Nonce is the channel's nonce.
func (p *Pending) Nonce() [16]byte { return p.nonce }

// Close closes the listeners, so that other ranks' connections are refused. After Connect it does nothing.
func (p *Pending) Close() error {
	for _, l := range p.listeners {
		l.Close()
	}
	p.listeners = nil
	return nil
}
