package core

import (
	"context"
	"fmt"
	"hash/fnv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/monitor"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// BufferOptions describe a buffer. Ranks pass equal options, except Device, Preinitialize and Background.
type BufferOptions struct {
	Engine        string // EngineAuto or "", EngineCPU, EngineCUDA
	Device        int    // ordinal; -1: the current one
	NumNVLBytes   uint64 // memory for normal mode inside a node (SizeHint)
	NumRDMABytes  uint64 // memory for normal mode between nodes (SizeHint) or for low-latency mode (LowLatencySizeHint)
	LowLatency    bool   // the buffer is for low-latency calls
	NumQPsPerRank int    // queue pairs toward each rank of another node; 0: 24
	DisableNVLink bool   // low-latency calls use RDMA inside a node as well: V1's allow_nvlink_for_low_latency_mode = False
	AllowMNNVL    bool   // GPUs of several nodes: NVSHMEM may use NVLink between hosts, where there is one
	UseFabric     bool   // refused (ErrUnsupported): memory is shared by file descriptors
	Shrink        bool   // calls go on without ranks that are lost, which are masked
	Preinitialize bool   // NewBuffer brings in memory that the first calls would bring in
	Background    bool   // NewBuffer returns at once; the first operation waits for the start

	Timeout      time.Duration // of a wait for a peer; 0: DEEPEP_TIMEOUT_MS
	FirstTimeout time.Duration // the same for the first call of an operation; 0: Timeout, else DEEPEP_FIRST_TIMEOUT_MS

	Shape Shape // of the calls to come, for Warmup
}

// Buffer is memory that the ranks of a group share, and the order of the calls that use it. NewBuffer makes it, Destroy
// ends it.
//
// Tensors are addresses that the buffer's engine can reach: plain memory with "cpu" (see AddressOf), device memory with
// "cuda". Rows are contiguous and begin at multiples of 16 bytes. All tensors belong to the caller and must stay valid
// and unchanged until the call is done; the buffer keeps none of them.
//
// Order: an operation begins after the present work of Call.Stream, or after Call.Previous, and after the buffer's
// earlier operations. Call.Event is recorded at its end; without Async, Call.Stream waits for it. Methods may be called
// from any goroutine. Collective operations are called by all ranks in the same order.
//
// Errors of all operations: ErrInvalidArgument names the argument, what came and what is allowed; ErrInvalidState after
// Destroy; the error of a Background start; ErrAborted once an earlier operation of the buffer has failed, with that
// failure. A failure of an operation itself (ErrTimeout, ErrPeerDead, ErrMismatch, ErrDevice) is the error of the wait
// for it: of a synchronous call where Info.HostStream, else of Event.Wait, WaitCounts and Check.
type Buffer struct {
	engine  atomic.Pointer[engine.Buffer] // changes with Regroup, as does the group
	group   atomic.Pointer[Group]
	options BufferOptions
	key     string // by which processes find the buffer that want to join it

	regrouping sync.Mutex
	doorMu     sync.Mutex
	door       *bootstrap.Door // nil: nobody asked for the key yet
	closed     bool            // the door stays closed
}

// live is the engine's buffer of the present group.
func (b *Buffer) live() *engine.Buffer { return b.engine.Load() }

// NewBuffer makes a buffer, which the caller ends with Destroy. Collective: all ranks of the group make their buffers
// in the same order. If the cause of an error lies in the host, the error (with Background, that of WaitReady and of
// the first call) adds the first FAIL of `deepep doctor`.
func (g *Group) NewBuffer(ctx context.Context, o BufferOptions) (*Buffer, error) {
	b, err := g.newBuffer(ctx, o)
	g.mu.Lock()
	g.refused = err
	g.mu.Unlock()
	return b, err
}

func (g *Group) newBuffer(ctx context.Context, o BufferOptions) (*Buffer, error) {
	asked := o
	s, err := env.Current()
	if err != nil {
		return nil, err
	}
	if err := g.check(&o, s); err != nil {
		return nil, err
	}
	began := time.Now()
	library, name, err := chooseEngine(o.Engine, s)
	if err != nil {
		return nil, g.diagnosed(err, &o)
	}
	if library, err = libraryFor(library, name, g.byQueues(&o), s); err != nil {
		return nil, err
	}
	loaded := time.Since(began)
	if !o.Background {
		if err := g.wait(ctx); err != nil {
			return nil, err
		}
	}
	g.noticeGPU(&o, name, s)
	g.noticeLinks(&o, library, name)
	b := &Buffer{options: asked}
	b.group.Store(g)
	opt, err := g.options(&o, s)
	if err != nil {
		return nil, err
	}
	opt.Library, opt.ISA = library, isaOf(name, s)
	opt.Spent = engine.Spent{Load: loaded, Connect: g.takeSpent()}
	findNICs(&opt, s)
	if library.HasTransportHeap() {
		for _, warning := range networkOf(&s.RDMA.NICs).Warnings {
			engine.WarnOnce(g.log, warning)
		}
	}
	if opt.ID, err = g.enter(b); err != nil {
		return nil, err
	}
	opt.Maker = g.maker(opt.ID)
	g.heir.bequeath(&opt)
	b.key = g.joinKey(opt.ID)
	if o.Background {
		ctx = context.WithoutCancel(ctx) // the caller's context may end with this call
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

// options are the engine's options for the caller's.
func (g *Group) options(o *BufferOptions, s env.Settings) (engine.Options, error) {
	timeout, first := deadlines(o, s)
	opt := engine.Options{
		Ordinal: o.Device, Topology: g.topology, NVLBytes: o.NumNVLBytes, RDMABytes: o.NumRDMABytes, LowLatency: o.LowLatency, Shrink: o.Shrink,
		Preinitialize: o.Preinitialize, Background: o.Background, Timeout: timeout, FirstTimeout: first, StartLimit: g.limit, Log: g.log,
		RowSegment: s.RowSegment, PreinitBytes: s.PreinitBytes, Shape: o.Shape, LLTransfer: s.LLTransfer,
		LLSMs: s.LLSMs, NormalCopies: s.NormalCopies,
		Explain: func(err error) error { return g.diagnosed(err, o) },
	}
	opt.HintNormal, opt.HintLL = hints.find(g.size, o.NumNVLBytes, o.NumRDMABytes)
	if s.Stats {
		opt.NewPage = g.newPage
	}
	var err error
	opt.RDMA, err = g.rdma(o, s.RDMA)
	return opt, err
}

// queueGroup is the group as the settings of queue pairs see it, with a buffer's options.
func (g *Group) queueGroup(o *BufferOptions) env.Group {
	return env.Group{Topology: g.topology, LowLatency: o.LowLatency, Everywhere: o.LowLatency && o.DisableNVLink, QPs: o.NumQPsPerRank}
}

// byQueues reports whether some calls of such a buffer use queue pairs.
func (g *Group) byQueues(o *BufferOptions) bool {
	return g.topology.ByQueues(o.LowLatency && o.DisableNVLink)
}

// rdma plans the queue pairs.
func (g *Group) rdma(o *BufferOptions, s env.RDMA) (engine.RDMAOptions, error) {
	asked := g.queueGroup(o)
	queues, err := s.Queues(asked)
	return engine.RDMAOptions{
		Queues: queues, Everywhere: asked.Everywhere, MaxTokens: s.MaxTokens, MNNVL: o.AllowMNNVL, Workspace: s.WorkspaceBytes, Seed: s.Seed, Late: s.Late,
		Settings: strings.Join(s.NICs.Lines(), "\n"),
	}, err
}

// maxBytes is the address space of a process. Smaller sizes never wrap around.
const maxBytes = 1 << 47

// check refuses options out of range or unsupported.
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
	case o.Shape.NumTokens < 0 || o.Shape.Hidden < 0 || o.Shape.NumTopK < 0 || o.Shape.NumExperts < 0:
		return status.InvalidArg("num_tokens, hidden, num_topk, num_experts", fmt.Sprintf("%+v", o.Shape), "0 (not known) or more")
	case o.Timeout < 0 || o.FirstTimeout < 0:
		return status.InvalidArg("timeout", min(o.Timeout, o.FirstTimeout), "0 (the default) or more")
	case o.UseFabric:
		return status.Errorf(status.Unsupported, "use_fabric: memory is shared by file descriptors, which reach the ranks of one host; fabric handles are for several")
	}
	_, err := s.RDMA.Queues(g.queueGroup(o))
	return err
}

// enter numbers a buffer and adds it to the group. The number is the same on all ranks since NewBuffer is collective.
func (g *Group) enter(b *Buffer) (uint32, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return 0, status.Errorf(status.InvalidState, "the group was destroyed")
	}
	g.buffers[b] = nil
	g.made++
	return g.made, nil
}

// maker is a number of a buffer that those of other groups hardly have, the same on all ranks.
func (g *Group) maker(id uint32) uint32 {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s/%d", g.name, id)
	return h.Sum32()
}

// publish lets the watch over the ranks report losses to the buffer.
func (g *Group) publish(b *Buffer, made *engine.Buffer) {
	g.mu.Lock()
	g.buffers[b] = made
	b.engine.Store(made)
	words := g.words
	complete := true
	for _, each := range g.buffers {
		complete = complete && each != nil
	}
	if complete {
		g.words = nil
	}
	g.mu.Unlock()
	for _, w := range words {
		made.Told(w.rank, w.tag, w.text)
	}
}

// Group returns the group that the buffer was made in.
func (b *Buffer) Group() *Group { return b.group.Load() }

// Destroy ends the buffer and frees its memory. Local, idempotent, bounded by about 2 s; from any goroutine. What peers
// have mapped of the memory stays valid for them. It first lets work in flight end, then aborts it; ErrTimeout if that
// does not end either, whose memory then stays until the process ends.
func (b *Buffer) Destroy() error {
	b.closeDoor()
	err := b.live().Destroy()
	group := b.Group()
	status.Keep(&err, group.forget(b))
	if err != nil {
		group.log.Warn("destroy: "+err.Error(), zap.Int("rank", group.rank))
	}
	return err
}

// newPage makes the statistics page that `deepep top` reads.
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
