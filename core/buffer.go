package core

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/monitor"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// BufferOptions say what buffer is wanted. Ranks must agree on all of it except Device, Preinitialize and Background.
type BufferOptions struct {
	Engine        string // EngineAuto or "", EngineCPU, EngineCUDA
	Device        int    // ordinal; -1: the current one
	NumNVLBytes   uint64
	NumRDMABytes  uint64
	LowLatency    bool
	NumQPsPerRank int  // queue pairs toward each rank of another node; 0: 24
	DisableNVLink bool // low-latency calls go by RDMA inside a node too; V1's allow_nvlink_for_low_latency_mode, turned round
	AllowMNNVL    bool // NVLink between hosts may be used
	UseFabric     bool // share memory by fabric handles
	Shrink        bool // low-latency calls go on without ranks that are lost
	Preinitialize bool // do everything now that the first call would do
	Background    bool // return at once; the first operation waits for the rest
	Timeout       time.Duration
	FirstTimeout  time.Duration
}

// Buffer is memory that the ranks of a group share, and the order of the calls that use it. NewBuffer makes it, Destroy ends it.
//
// Tensors are addresses that the buffer's engine can reach: plain memory with "cpu" (see AddressOf), device memory with "cuda".
// Rows are contiguous and begin at multiples of 16 bytes. All tensors belong to the caller and must stay valid and unchanged
// until the call is done; the buffer keeps none of them.
//
// Order: an operation begins after the present work of Call.Stream, or after Call.Previous, and after the buffer's earlier
// operations. Call.Event is recorded at its end; without Async, Call.Stream waits for it. Methods may be called from any
// goroutine. Collective operations are called by all ranks in the same order.
//
// Errors of all operations: ErrInvalidArgument names the argument, what came and what is allowed; ErrInvalidState after Destroy;
// the error of a Background start; ErrAborted once an earlier operation of the buffer has failed, with that failure. A failure of
// an operation itself (ErrTimeout, ErrPeerDead, ErrMismatch, ErrDevice) is the error of the wait for it: of a synchronous call
// where Info.HostStream, else of Event.Wait, WaitCounts and Check.
type Buffer struct {
	engine *engine.Buffer
	group  *Group
}

// NewBuffer makes a buffer. Collective: all ranks of the group make theirs in the same order. Where the host itself is at
// fault the error (of WaitReady and the first call, with Background) says what `deepep doctor` found first.
func (g *Group) NewBuffer(ctx context.Context, o BufferOptions) (*Buffer, error) {
	s, err := env.Current()
	if err != nil {
		return nil, err
	}
	if err := g.check(&o, s); err != nil {
		return nil, err
	}
	library, name, err := chooseEngine(o.Engine, s)
	if err != nil {
		return nil, g.diagnosed(err, &o)
	}
	if library, err = libraryFor(library, name, g.byQueues(&o), s); err != nil {
		return nil, err
	}
	if !o.Background {
		if err := g.wait(ctx); err != nil {
			return nil, err
		}
	}
	b := &Buffer{group: g}
	opt, err := g.options(&o, s)
	if err != nil {
		return nil, err
	}
	opt.Library, opt.ISA = library, isaOf(name, s)
	if opt.ID, err = g.enter(b); err != nil {
		return nil, err
	}
	if o.Background {
		ctx = context.WithoutCancel(ctx) // the caller's context may end with his call
	}
	made, err := engine.New(ctx, &members{g}, opt)
	if err != nil {
		_ = g.forget(b) // the first error counts
		return nil, err
	}
	g.publish(b, made)
	made.ReadStates() // a rank may have died or left before publish
	return b, nil
}

// options turns what the caller wants into what the engine takes.
func (g *Group) options(o *BufferOptions, s env.Settings) (engine.Options, error) {
	timeout, first := deadlines(o, s)
	opt := engine.Options{
		Ordinal: o.Device, Topology: g.topology, NVLBytes: o.NumNVLBytes, RDMABytes: o.NumRDMABytes, LowLatency: o.LowLatency, Shrink: o.Shrink,
		Preinitialize: o.Preinitialize, Background: o.Background, Timeout: timeout, FirstTimeout: first, StartLimit: g.limit, Log: g.log,
		Explain: func(err error) error { return g.diagnosed(err, o) },
	}
	if s.Stats {
		opt.NewPage = g.newPage
	}
	var err error
	opt.RDMA, err = g.rdma(o, s.RDMA)
	return opt, err
}

// byQueues says whether some calls of such a buffer go by queue pairs.
func (g *Group) byQueues(o *BufferOptions) bool {
	return g.size > 1 && (g.topology.Nodes() > 1 || o.LowLatency && o.DisableNVLink)
}

// rdma plans how ranks are reached that loads and stores do not reach. The environment's number of queue pairs stands above
// the program's, since it is there for programs that cannot be changed.
func (g *Group) rdma(o *BufferOptions, s env.RDMA) (engine.RDMAOptions, error) {
	wanted := plan.QueueOptions{PerPeer: s.QPs, MaxTokens: s.MaxTokens, Depth: s.QPDepth}
	if wanted.PerPeer == 0 {
		wanted.PerPeer = o.NumQPsPerRank
	}
	if wanted.PerPeer == 0 {
		wanted.PerPeer = plan.DefaultQueuePairs
	}
	queues, err := plan.NewQueues(g.topology, wanted)
	if err != nil {
		return engine.RDMAOptions{}, fmt.Errorf("queue pairs by DEEPEP_QP_DEPTH (or its other names) and DEEPEP_NUM_MAX_RDMA_TOKENS: %w", err)
	}
	return engine.RDMAOptions{
		Queues: queues, Everywhere: o.LowLatency && o.DisableNVLink, MaxTokens: s.MaxTokens, Workspace: s.WorkspaceBytes, Seed: s.Seed, Late: s.Late,
	}, nil
}

// maxBytes is the address space of a process, so that sizes never wrap around.
const maxBytes = 1 << 47

// check refuses options that nothing here can do.
func (g *Group) check(o *BufferOptions, s env.Settings) error {
	for name, bytes := range map[string]uint64{"num_nvl_bytes": o.NumNVLBytes, "num_rdma_bytes": o.NumRDMABytes} {
		if bytes > maxBytes {
			return status.InvalidArg(name, bytes, fmt.Sprintf("at most %d", uint64(maxBytes)))
		}
	}
	switch {
	case o.Device < -1:
		return status.InvalidArg("device", o.Device, "-1 (the current one) or an ordinal")
	case o.NumQPsPerRank < 0 || o.NumQPsPerRank > plan.MaxQueuePairs:
		return status.InvalidArg("num_qps_per_rank", o.NumQPsPerRank, fmt.Sprintf("0 (the default of %d) to %d", plan.DefaultQueuePairs, plan.MaxQueuePairs))
	case o.Timeout < 0 || o.FirstTimeout < 0:
		return status.InvalidArg("timeout", min(o.Timeout, o.FirstTimeout), "0 (the default) or more")
	case !o.LowLatency && g.topology.Nodes() > s.RDMA.MaxPeers:
		return status.Errorf(status.InvalidArgument, "%d ranks with num_nvl_peers = %d are %d nodes: DEEPEP_NUM_MAX_RDMA_PEERS = %d allows no more for normal mode",
			g.size, g.topology.Peers, g.topology.Nodes(), s.RDMA.MaxPeers)
	case o.UseFabric:
		return status.Errorf(status.Unsupported, "use_fabric: memory is shared by file descriptors, which reach the ranks of one host; fabric handles are for several")
	}
	return nil
}

// enter gives a buffer its number, the same on all ranks since making buffers is collective.
func (g *Group) enter(b *Buffer) (uint32, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return 0, status.Errorf(status.InvalidState, "the group was destroyed")
	}
	g.buffers[b] = true
	g.made++
	return g.made, nil
}

// publish makes a buffer known to those who watch the ranks.
func (g *Group) publish(b *Buffer, made *engine.Buffer) {
	g.mu.Lock()
	b.engine = made
	g.mu.Unlock()
}

// Group is the group that the buffer was made in.
func (b *Buffer) Group() *Group { return b.group }

// Destroy ends the buffer: local, idempotent, bounded by about 2 s. What peers have mapped of it stays valid for them.
func (b *Buffer) Destroy() error {
	err := b.engine.Destroy()
	status.Keep(&err, b.group.forget(b))
	if err != nil {
		b.group.log.Warn("destroy: "+err.Error(), zap.Int("rank", b.group.rank))
	}
	return err
}

// newPage makes a statistics page that the command-line program can read.
func (g *Group) newPage(h engine.PageHeader) (engine.StatsPage, error) {
	p, err := monitor.Create("", monitor.Meta{
		Rank: h.Rank, NumRanks: h.Size, Buffer: h.BufferID, Group: g.name, Host: g.host, Engine: h.Engine, Device: h.Device,
	})
	if err != nil {
		return nil, err
	}
	return &statsPage{p}, nil
}

type statsPage struct{ *monitor.Page }

func (p *statsPage) Close() error {
	err := p.Remove()
	status.Keep(&err, p.Unmap())
	return err
}
