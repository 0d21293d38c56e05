package core

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// GroupOptions describe a group. The zero value of every field but Exchanger is the default.
type GroupOptions struct {
	Exchanger   Exchanger     // NewGroup closes it
	NumNVLPeers int           // ranks of one NVLink domain; 0: DEEPEP_NUM_MAX_NVL_PEERS, or 8
	Background  bool          // NewGroup returns after the exchange; the start goes on in a goroutine
	Timeout     time.Duration // of the exchange and of the start; 0: DEEPEP_FIRST_TIMEOUT_MS
}

// Group is a set of ranks that are connected with each other and watch which of them are alive. NewGroup makes it,
// Destroy ends it. Methods may be called from any goroutine.
type Group struct {
	rank, size int
	topology   plan.Topology
	settings   env.Settings
	limit      time.Duration
	log        *zap.Logger
	name       string // the same on all ranks and on no other group
	host       string
	heir       heir           // the buffer whose place the group's first one takes, after a regroup
	warm       *device.Device // opened before the group was joined; nil: none

	ready  chan struct{} // closed when the start has ended
	err    error         // read after ready
	cancel context.CancelCauseFunc
	link   link // read after ready

	mu      sync.Mutex
	spent   time.Duration              // of NewGroup, until a buffer's report has taken it
	buffers map[*Buffer]*engine.Buffer // nil: it is being made, and reads the ranks' states at the end of that
	made    uint32
	words   []word // for buffers that are being made
	refused error  // why the newest buffer was refused: what peers are told if the group ends for it
	closed  bool   // Destroy was called; the end comes with the last buffer
	owned   bool   // a regroup made it: the end comes with the last buffer, without Destroy
	ended   bool
}

// heir is what a buffer has of the one whose place it takes.
type heir struct {
	Key string // "": there was none
	ID  uint32

	Maker         uint32 // of its handles
	Generation    uint64
	Control, Wire uint64 // bytes of its regions
}

// NewGroup connects the ranks. Collective; it uses the Exchanger once, on this goroutine, and closes it. Errors:
// ErrInvalidArgument, ErrMismatch if ranks disagree on NumNVLPeers or have different versions, ErrTimeout with the
// missing ranks, ErrPeerDead.
func NewGroup(ctx context.Context, o GroupOptions) (*Group, error) {
	if o.Exchanger == nil {
		return nil, status.InvalidArg("exchanger", "none", "NewCallback, NewLocal, DialTCP or OpenFile")
	}
	defer o.Exchanger.Close()
	began := time.Now()
	g, err := newGroup(o.Exchanger.Rank(), o.Exchanger.Size(), o.NumNVLPeers, o.Timeout)
	if err != nil {
		return nil, err
	}
	limited, done := context.WithTimeout(ctx, g.limit)
	pending, err := bootstrap.Begin(limited, o.Exchanger, bootstrap.HelloOptions{
		Version: versionText(), Interface: g.settings.Interface, Extra: []byte(strconv.Itoa(g.topology.Peers)),
	})
	done()
	if err != nil {
		return nil, err
	}
	if err := samePeers(pending.Peers()); err != nil {
		_ = pending.Close()
		return nil, err
	}
	g.adopt(pending)
	if err := g.connect(ctx, pending, o.Background); err != nil {
		return nil, err
	}
	g.spent = time.Since(began)
	return g, nil
}

// adopt names the group by the ranks that have met.
func (g *Group) adopt(pending *bootstrap.Pending) {
	nonce := pending.Nonce()
	g.name, g.host = hex.EncodeToString(nonce[:8]), pending.Peers()[g.rank].Host
}

// takeSpent returns the time of NewGroup for the report of the group's first buffer, and 0 for others.
func (g *Group) takeSpent() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	spent := g.spent
	g.spent = 0
	return spent
}

func newGroup(rank, size, peers int, timeout time.Duration) (*Group, error) {
	s, err := env.Current()
	if err != nil {
		return nil, err
	}
	if peers == 0 {
		peers = s.MaxNVLPeers
	}
	if err := bootstrap.CheckGroup(rank, size); err != nil {
		return nil, err
	}
	t, err := plan.NewTopology(size, peers)
	if err != nil {
		return nil, err
	}
	limit, err := s.StartLimit(timeout)
	if err != nil {
		return nil, err
	}
	return &Group{
		rank: rank, size: size, topology: t, settings: s, limit: limit, log: logger(s),
		ready: make(chan struct{}), buffers: map[*Buffer]*engine.Buffer{},
	}, nil
}

func samePeers(peers []bootstrap.Peer) error {
	for _, p := range peers {
		if string(p.Extra) != string(peers[0].Extra) {
			return status.Errorf(status.Mismatch, "ranks disagree on num_nvl_peers: rank 0 has %s, rank %d has %s", peers[0].Extra, p.Rank, p.Extra)
		}
	}
	return nil
}

func versionText() string { return fmt.Sprintf("%d.%d.%d", VersionMajor, VersionMinor, VersionPatch) }

// connect opens the channel among the ranks, in a goroutine if background is set.
func (g *Group) connect(ctx context.Context, pending *bootstrap.Pending, background bool) error {
	if background {
		ctx = context.WithoutCancel(ctx) // the caller's context may end with this call
	}
	limited, done := context.WithTimeout(ctx, g.limit)
	limited, g.cancel = context.WithCancelCause(limited)
	start := func() {
		defer done()
		defer close(g.ready)
		defer recovered("start of the group", &g.err)
		g.err = g.link.open(limited, pending, g)
		switch {
		case g.err == nil:
		case background: // the first call that needs the group returns it; before that it may be but the trace of a refusal
			g.log.Info(g.err.Error(), zap.Int("rank", g.rank))
		default:
			g.log.Error(g.err.Error(), zap.Int("rank", g.rank))
		}
	}
	if background {
		go start()
		return nil
	}
	start()
	return g.err
}

// Rank is this rank's number, from 0.
func (g *Group) Rank() int { return g.rank }

// Size is the number of ranks.
func (g *Group) Size() int { return g.size }

// NumNVLPeers is the number of ranks of one node.
func (g *Group) NumNVLPeers() int { return g.topology.Peers }

// wait waits for the group's start. At a deadline it prefers the error of the start, whose own deadline is about the
// same and which names the ranks that are missing.
func (g *Group) wait(ctx context.Context) error {
	select {
	case <-g.ready:
		return g.err
	case <-ctx.Done():
		if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			select {
			case <-g.ready:
				return g.err
			case <-time.After(nameGrace):
			}
		}
		return status.Errorf(status.CodeOf(context.Cause(ctx)), "waiting for the start of the group: %w", status.Cause(ctx))
	}
}

// Destroy ends the group. Local, idempotent, bounded. Buffers of the group stay usable; with the last of them the
// group's channel closes, and the other ranks see that this one has left.
func (g *Group) Destroy() error {
	g.mu.Lock()
	g.closed = true
	end := g.takeEnd()
	g.mu.Unlock()
	if end {
		return g.end()
	}
	return nil
}

// takeEnd returns true once, when the group is destroyed and has no buffer left. g.mu is held.
func (g *Group) takeEnd() bool {
	if !g.closed && !g.owned || len(g.buffers) > 0 || g.ended {
		return false
	}
	g.ended = true
	return true
}

// startGrace is how long a start that was cancelled, or has come to its deadline, may take to end.
const startGrace = 500 * time.Millisecond

// nameGrace is how long a caller whose deadline has passed waits for the start's own error, which names the ranks that
// are missing: where ranks share few cores the start may see its deadline later than the caller.
const nameGrace = 1500 * time.Millisecond

// errDestroyedEarly is the cause of a start that Destroy cut short.
var errDestroyedEarly = status.Errorf(status.InvalidState, "the group was destroyed before its start was complete")

func (g *Group) end() error {
	g.mu.Lock()
	refused := g.refused
	g.mu.Unlock()
	cause := errDestroyedEarly
	if refused != nil {
		cause = status.Errorf(status.CodeOf(errDestroyedEarly), "%w, since its buffer was refused: %w", errDestroyedEarly, refused)
	}
	g.cancel(cause)
	select {
	case <-g.ready:
	case <-time.After(startGrace):
		return status.Errorf(status.Timeout, "the group's start did not stop within %v", startGrace)
	}
	err := g.link.close(nil)
	if g.warm != nil {
		status.Keep(&err, g.warm.Release())
	}
	return err
}

// forget removes a destroyed buffer, and with the last one ends a group that was destroyed before.
func (g *Group) forget(b *Buffer) error {
	g.mu.Lock()
	delete(g.buffers, b)
	end := g.takeEnd()
	g.mu.Unlock()
	if end {
		return g.end()
	}
	return nil
}

// each calls f for every live buffer.
func (g *Group) each(f func(*engine.Buffer)) {
	g.mu.Lock()
	all := make([]*engine.Buffer, 0, len(g.buffers))
	for _, made := range g.buffers {
		if made != nil {
			all = append(all, made)
		}
	}
	g.mu.Unlock()
	for _, b := range all {
		f(b)
	}
}

// word is what a rank has told the others.
type word struct {
	rank int
	tag  string
	text []byte
}

// told hands a rank's word to the buffers. Those that are being made get it from publish: their first word may come
// before the last rank's NewBuffer has returned.
func (g *Group) told(rank int, tag string, text []byte) {
	g.mu.Lock()
	for _, made := range g.buffers {
		if made == nil {
			g.words = append(g.words, word{rank, tag, text})
			break
		}
	}
	g.mu.Unlock()
	g.each(func(b *engine.Buffer) { b.Told(rank, tag, text) })
}

// recovered turns a panic of a goroutine into an error. A panic here is a bug of ours, but the host process must live.
func recovered(where string, err *error) {
	if p := recover(); p != nil {
		*err = status.Errorf(status.Internal, "panic in the %s: %v\n%s", where, p, debug.Stack())
	}
}
