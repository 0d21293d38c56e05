package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Options describe a buffer. All ranks pass the same, except Ordinal, Preinitialize and Background.
type Options struct {
	Library       *kern.Library
	Ordinal       int    // device; -1: the current one
	ISA           uint32 // 0: the best
	Topology      plan.Topology
	NVLBytes      uint64
	RDMABytes     uint64
	LowLatency    bool
	Shrink        bool // low-latency calls go on without ranks that died
	LLTransfer    plan.Transfer
	LLSMs         int  // of a low-latency call; 0: the kernel library's choice
	NormalCopies  bool // copy engines move rows of normal mode, where they can
	RDMA          RDMAOptions
	Preinitialize bool     // bring in memory during the start
	PreinitBytes  uint64   // how much, where the memory is the host's
	Spent         Spent    // of the time before New, for the report
	Shape         op.Shape // of the calls to come, as far as it is known
	HintNormal    op.Shape // the same by the size hints that were asked for
	HintLL        op.Shape
	Background    bool // New returns at once; the first call waits for the start
	Timeout       time.Duration
	FirstTimeout  time.Duration
	RowSegment    int64  // bytes of the segment that the program makes for received rows; -1: the default
	ID            uint32 // number of the buffer in its group, the same on all ranks
	Maker         uint32 // random, the same on all ranks: by it a handle's buffer is known
	StartLimit    time.Duration
	NewPage       func(PageHeader) (StatsPage, error) // nil: statistics in plain memory
	Explain       func(error) error                   // adds to the reason why the buffer could not be made; nil: nothing to add
	Log           *zap.Logger
	Generation    uint64 // what the count of Restores begins with: how often memory or numbers of a predecessor have changed
	// Bytes of the control and the wire region, if the library needs fewer: those of a predecessor, so that the regions
	// of users stay where they are. The same on all ranks.
	MinControl, MinWire uint64
	Succession
}

// Buffer is the memory and the order of one set of calls among the ranks of a group.
type Buffer struct {
	opt     Options
	members Members
	rank    int
	size    int
	top     plan.Topology
	limits  plan.Limits // of the kernel library
	log     *zap.Logger

	// Set by build, constant once ready is closed.
	dev             *device.Device
	comm            device.Stream
	block           *device.Symmetric
	regions         plan.Regions
	symmetricHeapID []byte                // on rank 0, where the transport has memory of its own
	symmetricHeap   *device.SymmetricHeap // of such a transport; it holds the block
	reach           reach
	transport       uint64 // 0: all ranks are on this node
	team            uint64
	page            *device.HostPage
	words           *abi.Status // in page
	stats           *statistics
	counts          *device.HostPage

	ready    chan struct{}   // closed when build has ended
	buildErr error           // read after ready
	life     context.Context // ends with Destroy
	cancel   func(error)

	heirlooms []*device.Memory       // blocks of predecessors that were not kept: callers' views of them stay valid
	borrowed  bool                   // comm still belongs to opt.From
	stopped   atomic.Bool            // by Stop, so that Destroy has the rest to do
	successor atomic.Pointer[Buffer] // took this buffer's place
	elders    atomic.Pointer[elder]  // predecessors whose calls were captured

	active   atomic.Int32 // calls inside; see enter
	viewed   atomic.Bool  // a caller has the address of a region
	watching atomic.Bool  // the status page exists, so that losses of peers can be written to it
	closed   atomic.Bool
	noticed  atomic.Bool           // a call's config asked for what has no effect here
	failed   atomic.Pointer[error] // the first failure, once failure() has found it
	death    atomic.Pointer[error] // why the abort word is set

	sleep sleep

	mu           sync.Mutex // everything below, and the order of launches
	calls        [abi.NumOps]uint64
	order        order
	params       params
	pending      [numPending]pending
	extra        []*device.HostPage // counts that did not fit into counts
	tickets      [2][2]ticket       // by operation: dispatch, combine
	sends        [2]uint64          // low-latency sends by operation: which wire slot is next
	combines     uint64             // low-latency combines sent: which zero-copy slot is next
	slots        [numShapes]slotLayout
	handles      knownHandles
	minRow       uint64 // a row of so many bytes is known to fit num_nvl_bytes and num_rdma_bytes
	idle         []*device.Event
	awaited      []callID // synchronous calls that threads wait for
	spans        callSpans
	segments     [abi.MaxSegments]*Segment
	segmentsMade uint64
	captured     bool                      // a call was captured into a graph, which may be replayed at any time
	inherits     bool                      // memory from a buffer with such a call, whose team has stopped
	progress     uint64                    // operations of the team that had finished when Stop stopped it
	chosenSMs    [2][maxLoggedSMs + 1]bool // by kind: choices that were logged
	startup      startup
	building     *stages // of the start
}

// params are the parameter structs of the kernel library's operations. They are part of the buffer, so that no call
// allocates.
type params struct {
	layout     abi.LayoutParams
	notify     abi.NotifyParams
	dispatch   abi.DispatchParams
	combine    abi.CombineParams
	balance    abi.BalanceParams
	llDispatch abi.LLDispatchParams
	llCombine  abi.LLCombineParams
	clean      abi.CleanParams
	barrier    abi.BarrierParams
	mask       abi.MaskParams
}

// Info never waits: before the start is complete, what is not known yet is zero.
func (b *Buffer) Info() op.Info {
	i := b.describe()
	select {
	case <-b.ready:
	default:
		return i
	}
	if b.buildErr != nil || b.enter() != nil {
		return i
	}
	defer b.leave()
	i.Ready = true
	i.Device, i.NumDeviceSMs, i.DeviceName, i.ISA = b.dev.Ordinal, b.dev.NumSMs, b.dev.Name, b.dev.ISA
	i.TotalBytes = b.block.Local.Bytes
	b.describeMemory(&i, len(b.reach.peers))
	if !i.HostStream {
		i.CommStream = uintptr(b.comm)
	}
	return i
}

// describe fills in what the options and the library say.
func (b *Buffer) describe() op.Info {
	i := op.Info{
		Rank: b.rank, Size: b.size, NumNVLPeers: b.top.NodeSize(), RDMARank: b.top.Node(b.rank), NumRDMARanks: b.top.Nodes(),
		NVLRank: b.top.Local(b.rank), Device: b.opt.Ordinal, NVLBytes: b.opt.NVLBytes, RDMABytes: b.opt.RDMABytes,
		LowLatency: b.opt.LowLatency, Shrink: b.opt.Shrink, Timeout: b.opt.Timeout, FirstTimeout: b.opt.FirstTimeout,
		RDMATeam: b.top.RDMATeam(b.rank), LLCopies: b.copiesRows(), LLOnStream: b.halvesOnStream(), NormalCopies: b.copiesNormal(),
	}
	if b.usesTransport() {
		i.QPOrderName = b.queueOrder().String()
	}
	if lib := b.opt.Library; lib != nil {
		i.HostStream, i.PeerRows, i.Engine, i.KernelPath = lib.Has(abi.CapHostStream), lib.Has(abi.CapPeerRows), lib.Kind, lib.Path
	}
	if i.PeerRows {
		i.RowSegmentBytes = plan.RowSegmentBytes(b.opt.RowSegment, b.opt.NVLBytes)
	}
	return i
}

// describeMemory fills in the regions and, toward so many peers, the queue pairs.
func (b *Buffer) describeMemory(i *op.Info, peers int) {
	i.ControlBytes, i.WireBytes = b.regions.Control.Bytes, b.regions.Wire.Bytes
	if peers == 0 {
		return
	}
	i.QPPeers, i.QPsPerPeer, i.QPDepth = peers, b.opt.RDMA.Queues.PerPeer, b.opt.RDMA.Queues.Depth
	i.NICs, i.QPsPerNIC = b.perNIC()
	if b.onNICs() {
		peers = b.size - 1
	}
	i.QPs = i.QPsPerNIC * i.NICs * peers
}

// Region is the nvl or rdma memory, which callers may view, and overwrite while no call is in flight.
func (b *Buffer) Region(rdma bool) (address uintptr, bytes uint64, err error) {
	if err := b.startAwake(); err != nil {
		return 0, 0, err
	}
	defer b.leave()
	b.viewed.Store(true)
	r := b.regions.NVL
	if rdma {
		r = b.regions.RDMA
	}
	return uintptr(b.block.Local.Address + r.Offset), r.Bytes, nil
}

// enter counts a call in, so that Destroy does not free memory that it uses; leave counts it out.
func (b *Buffer) enter() error {
	b.active.Add(1)
	if b.closed.Load() {
		b.active.Add(-1)
		if b.stopped.Load() {
			return errStopped
		}
		return errDestroyed
	}
	return nil
}

func (b *Buffer) leave() { b.active.Add(-1) }

var errDestroyed = status.Errorf(status.InvalidState, "the buffer was destroyed")

// start enters and waits for the start. Without an error the caller must leave.
func (b *Buffer) start() error {
	if err := b.enter(); err != nil {
		return err
	}
	err := b.awaitReady(-1)
	if err != nil {
		b.leave()
	}
	return err
}

// Ready reports whether the start has succeeded.
func (b *Buffer) Ready() bool {
	select {
	case <-b.ready:
		return b.buildErr == nil && !b.closed.Load()
	default:
		return false
	}
}

// WaitReady waits up to slice for the start, without a limit if slice is negative, and returns its error. Interrupted:
// it is still running.
func (b *Buffer) WaitReady(slice time.Duration) error {
	if err := b.enter(); err != nil {
		return err
	}
	defer b.leave()
	return b.awaitReady(slice)
}

func (b *Buffer) awaitReady(slice time.Duration) error {
	select {
	case <-b.ready:
		return b.buildErr
	default:
	}
	if slice < 0 {
		<-b.ready
		return b.buildErr
	}
	timer := time.NewTimer(slice)
	defer timer.Stop()
	select {
	case <-b.ready:
		return b.buildErr
	case <-timer.C:
		return errNotYet
	}
}

var errNotYet = status.Errorf(status.Interrupted, "not yet: the slice of waiting is over")
