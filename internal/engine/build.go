package engine

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"sync/atomic"
	"unsafe"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// New makes a buffer. Collective. With Background it returns at once and the first operation waits for the start, whose
// error is that of WaitReady and of every call.
func New(parent context.Context, members Members, opt Options) (*Buffer, error) {
	opt.Timeout, opt.FirstTimeout = atLeastMillisecond(opt.Timeout), atLeastMillisecond(opt.FirstTimeout)
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	b := &Buffer{
		opt: opt, members: members, rank: members.Rank(), size: members.Size(), top: opt.Topology, ready: make(chan struct{}),
		log: opt.Log.With(zap.Int("rank", members.Rank()), zap.Uint32("buffer", opt.ID)),
	}
	b.sleep.generation.Store(opt.Generation)
	b.startup.report.LoadNS[op.StartConstruction] = uint64(opt.Spent.Load)
	b.startup.report.ConnectNS[op.StartConstruction] = uint64(opt.Spent.Connect)
	b.limits = LimitsOf(opt.Library)
	b.life, b.cancel = context.WithCancelCause(context.Background())
	build := func() {
		ctx, done := b.limited(parent)
		defer done()
		b.finishBuild(ctx)
	}
	b.building = newStages(stageConnect)
	if opt.Background {
		go build()
		return b, nil
	}
	build()
	if b.buildErr != nil {
		b.Destroy()
		return nil, b.buildErr
	}
	return b, nil
}

// LimitsOf names a kernel library's limits for low-latency calls.
func LimitsOf(l *kern.Library) plan.Limits {
	return plan.Limits{
		Library: filepath.Base(l.Path), TopK: l.Limits.TopK, Tokens: l.Limits.Tokens, LocalExperts: l.Limits.LocalExperts,
	}
}

// limited is the context of a buffer's exchanges with the other ranks. It ends with parent, with the buffer, and at the
// limit of a start.
func (b *Buffer) limited(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, done := context.WithTimeout(b.life, b.opt.StartLimit)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(parent, func() { cancel(context.Cause(parent)) })
	return ctx, func() {
		stop()
		cancel(nil)
		done()
	}
}

// finishBuild builds the buffer, or stores why it cannot, and closes b.ready. It recovers: it may run in a goroutine of
// its own.
func (b *Buffer) finishBuild(ctx context.Context) {
	defer close(b.ready)
	defer func() {
		if p := recover(); p != nil {
			b.buildErr = status.Errorf(status.Internal, "panic while the buffer was made: %v\n%s", p, debug.Stack())
		}
		if b.buildErr != nil {
			b.buildErr = fmt.Errorf("making buffer %d on rank %d: %w", b.opt.ID, b.rank, b.buildErr)
			if b.opt.Explain != nil {
				b.buildErr = b.opt.Explain(b.buildErr)
			}
			b.log.Error(b.buildErr.Error())
		}
	}()
	b.buildErr = b.build(ctx)
	b.endStages(b.building, op.StartConstruction)
	if b.buildErr == nil {
		b.log.Info("made: " + describe(&b.startup.report, op.StartConstruction))
	}
}

// build runs the collective start, and with Preinitialize what the first call would otherwise do.
func (b *Buffer) build(ctx context.Context) error {
	if err := b.members.Join(ctx); err != nil {
		return err
	}
	err := b.open()
	var prints []fingerprint
	memory := func(ctx context.Context, blob []byte, fds []int) ([]device.Message, error) {
		defer b.building.to(stageConnect)()
		return b.exchanger("memory")(ctx, blob, fds)
	}
	if from := b.opt.From; err == nil && from != nil {
		err = from.Stop() // before this rank's offer: peers then clear what its kernels write to
	}
	exchange := withFingerprint(b.fingerprint(err), memory, b.absent, func(all []fingerprint) error {
		prints = all
		return compareAll(all, b.members.Describe)
	})
	if err != nil {
		_, _ = exchange(ctx, nil, nil) // it carries the error to the other ranks; here err counts
		return err
	}
	if b.opt.Library.HasTransportHeap() {
		err = b.shareSymmetricHeap(ctx, exchange)
	} else {
		end := b.building.to(stageMemory)
		b.block, err = b.dev.ShareAmong(ctx, b.places(), b.regions.Total, exchange)
		end()
	}
	if err != nil {
		if code := status.CodeOf(err); code == status.OutOfMemory {
			err = status.Errorf(code, "num_nvl_bytes = %d and num_rdma_bytes = %d are too much: %w", b.opt.NVLBytes, b.opt.RDMABytes, err)
		}
		return err
	}
	b.findReach()
	err = b.join(prints)
	if err == nil && b.opt.Preinitialize && !b.block.Kept() {
		err = b.touch()
	}
	if err = b.agree(ctx, "ready", err); err != nil {
		return err
	}
	b.watching.Store(true)
	b.readStates()
	b.markReleased()
	return b.maskAbsent()
}

// onThisHost returns for each rank whether its memory can be mapped.
func (b *Buffer) onThisHost() []bool {
	here := make([]bool, b.size)
	for rank := range here {
		here[rank] = b.members.Peer(rank).SameHost
	}
	return here
}

// crowd returns for each rank whether its memory is used without a mapping; nil: of no rank.
func (b *Buffer) crowd() []bool {
	here, any := make([]bool, b.size), false
	for rank := range here {
		here[rank] = b.members.Peer(rank).Crowd
		any = any || here[rank]
	}
	if !any {
		return nil
	}
	return here
}

func (b *Buffer) exchanger(what string) device.Exchange {
	tag := b.tag(what)
	return func(ctx context.Context, blob []byte, fds []int) ([]device.Message, error) {
		return b.members.Exchange(ctx, tag, blob, fds)
	}
}

func (b *Buffer) tag(what string) string { return fmt.Sprintf("buffer/%d/%s", b.opt.ID, what) }

// agree exchanges each rank's error. All ranks get one if any of them failed, so that none goes on alone.
func (b *Buffer) agree(ctx context.Context, what string, here error) error {
	var all []device.Message
	var err error
	if b.opt.From != nil && what == "ready" {
		all, err = b.opt.Commit(ctx, b.tag(what), errorText(here))
	} else {
		all, err = b.exchanger(what)(ctx, errorText(here), nil)
	}
	if here != nil {
		return here
	}
	if err != nil {
		return err
	}
	for rank, m := range all {
		if len(m.Blob) > 1 {
			return status.Errorf(status.Code(m.Blob[0]), "%s failed: %s", b.members.Describe(rank), m.Blob[1:])
		}
	}
	return nil
}

func errorText(err error) []byte {
	if err == nil {
		return nil
	}
	return append([]byte{byte(status.CodeOf(err))}, err.Error()...)
}

// open does the local part before the first exchange: device, reach of the other ranks, sizes of the regions.
func (b *Buffer) open() (err error) {
	defer b.building.to(stageLoad)()
	if from := b.opt.From; from != nil {
		b.dev = from.dev.Retain()
	} else if b.dev, err = device.Open(b.opt.Library, b.opt.Ordinal, b.opt.ISA); err != nil {
		return err
	}
	if err := b.checkReach(); err != nil {
		return err
	}
	b.mentionUseless()
	if err := b.measure(); err != nil {
		return err
	}
	return b.makeSymmetricHeapID()
}

// measure asks the library for what it needs beside the regions, and lays the block out. It needs neither a device nor
// peers.
func (b *Buffer) measure() error {
	p := b.blockSizes(0)
	if code := b.opt.Library.BlockSizes(p); code != 0 {
		return b.unsupported(kern.Error("dk_block_sizes", code, p.DeviceError))
	}
	if limit := b.opt.RDMA.Workspace; limit > 0 && p.ControlBytes > limit {
		return status.Errorf(status.InvalidArgument, "flags and counts of %d ranks take %d bytes: DEEPEP_NUM_WORKSPACE_BYTES = %d allows less",
			b.size, p.ControlBytes, limit)
	}
	b.regions = plan.NewRegions(max(p.ControlBytes, b.opt.MinControl), max(p.WireBytes, b.opt.MinWire), b.opt.NVLBytes, b.opt.RDMABytes)
	return nil
}

// blockSizes are the parameters with which the library computes what it needs beside the regions, and for rows of a
// size.
func (b *Buffer) blockSizes(rowBytes uint64) *abi.BlockSizesParams {
	return &abi.BlockSizesParams{
		NumRanks: int32(b.size), NumNVLPeers: int32(b.top.NodeSize()), NVLBytes: b.opt.NVLBytes, RDMABytes: b.opt.RDMABytes,
		MaxRowBytes: rowBytes, Flags: b.teamFlags(),
	}
}

// countsSlot is the bytes for the counts of one exchange: up to 1020 local experts. More get a page of their own.
const countsSlot = 4096

// join makes this rank's part: status page, counts, statistics, stream, events, transport, team.
func (b *Buffer) join(prints []fingerprint) (err error) {
	defer b.building.to(stageMemory)()
	if b.page, err = b.dev.NewHostPage(abi.StatusBytes); err != nil {
		return err
	}
	b.words = (*abi.Status)(unsafe.Pointer(unsafe.SliceData(b.page.Host)))
	atomic.StoreInt32(&b.words.AbortRank, -1)
	if b.counts, err = b.dev.NewHostPage(numPending * countsSlot); err != nil {
		return err
	}
	for i := range b.pending {
		b.pending[i].page = b.counts.Host[i*countsSlot : (i+1)*countsSlot]
		b.pending[i].address = b.counts.Address + uint64(i*countsSlot)
	}
	if b.stats, err = newStatistics(b); err != nil {
		return err
	}
	if b.opt.From != nil {
		b.comm, b.borrowed = b.opt.From.comm, true
	} else if b.comm, err = b.dev.NewStream(); err != nil {
		return err
	}
	for _, ev := range b.ownEvents() {
		if *ev, err = b.dev.NewEvent(); err != nil {
			return err
		}
	}
	if b.block.Kept() {
		if err = b.reset(); err != nil {
			return err
		}
	}
	b.building.change(stageConnect)
	if err = b.openTransport(); err != nil {
		return err
	}
	b.building.change(stageLoad) // the library loads its kernels
	return b.makeTeam(prints)
}

func (b *Buffer) makeTeam(prints []fingerprint) error {
	r := &b.regions
	p := &abi.TeamCreateParams{
		Device: b.dev.Handle(), Rank: int32(b.rank), NumRanks: int32(b.size), NumNVLPeers: int32(b.top.NodeSize()),
		HostPeerBlocks: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.reach.local)))), Transport: b.transport, Flags: b.teamFlags(),
		ControlOffset: r.Control.Offset, ControlBytes: r.Control.Bytes, WireOffset: r.Wire.Offset, WireBytes: r.Wire.Bytes,
		NVLOffset: r.NVL.Offset, NVLBytes: r.NVL.Bytes, RDMAOffset: r.RDMA.Offset, RDMABytes: r.RDMA.Bytes,
		HostStatus: b.page.HostAddress(), Status: b.page.Address, HostStats: b.stats.page.HostAddress(), Stats: b.stats.page.Address,
	}
	for rank, f := range prints { // ranks of a device, goroutines or processes under MPS, run at the same time on SMs of their own
		if f.UUID == prints[b.rank].UUID && !f.absent {
			if rank < b.rank {
				p.SMShareIndex++
			}
			p.SMShare++
		}
	}
	if code := b.opt.Library.TeamCreate(p); code != 0 {
		return b.unsupported(kern.Error("dk_team_create", code, p.DeviceError))
	}
	b.team = p.Team
	return nil
}

// touch brings in memory, so that the first calls do not wait for pages: on an engine whose memory is the host's as far
// as PreinitBytes allow, since most of a large region is never used; else the regions, all of which have memory.
func (b *Buffer) touch() error {
	defer b.building.to(stageMemory)()
	if b.dev.HostStream() {
		return b.populate(b.building)
	}
	for _, r := range []plan.Region{b.regions.NVL, b.regions.RDMA} {
		if r.Bytes == 0 {
			continue
		}
		p := &abi.FillParams{Device: b.dev.Handle(), Stream: uint64(b.comm), Dst: b.block.Local.Address + r.Offset, Bytes: r.Bytes}
		if code := b.opt.Library.Fill(p); code != 0 {
			return kern.Error("dk_fill", code, p.DeviceError)
		}
		b.building.bytes += r.Bytes
	}
	if err := b.order.end.Record(b.comm); err != nil {
		return err
	}
	for {
		if done, err := b.order.end.Wait(waitSlice); done || err != nil {
			return err
		}
	}
}

// readStates marks the ranks that died or left before the status page existed. PeerDied and PeerLeft handle what comes
// after watching is set.
func (b *Buffer) readStates() {
	for rank := range b.size {
		switch state, _ := b.members.State(rank); state {
		case PeerDead:
			b.died(rank)
		case PeerGone:
			b.left(rank)
		}
	}
}
