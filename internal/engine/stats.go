package engine

import (
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// PageHeader identifies a statistics page.
type PageHeader struct {
	Rank, Size     int
	BufferID       uint32
	Engine, Device string
}

// StatsPage is memory that other processes can read. Options.NewPage fills in the header.
type StatsPage interface {
	Bytes() []byte // page-aligned
	Close() error
}

// statistics is a buffer's page: kernels count there, Stats reads.
type statistics struct {
	page  *device.HostPage
	owner StatsPage // nil: memory of this process alone
	head  *abi.StatsPage
	bytes []uint64 // [op][peer]
	waits []uint64
}

func newStatistics(b *Buffer) (s *statistics, err error) {
	s = &statistics{}
	if b.opt.NewPage != nil {
		h := PageHeader{Rank: b.rank, Size: b.size, BufferID: b.opt.ID, Engine: b.opt.Library.Kind, Device: b.dev.Name}
		if s.owner, err = b.opt.NewPage(h); err != nil {
			return nil, err
		}
		if s.page, err = b.dev.Register(s.owner.Bytes()); err != nil {
			_ = s.owner.Close() // the first error counts
			return nil, err
		}
		s.head = (*abi.StatsPage)(unsafe.Pointer(unsafe.SliceData(s.page.Host)))
	} else if err = s.privatePage(b); err != nil {
		return nil, err
	}
	tables := unsafe.Slice((*uint64)(unsafe.Pointer(&s.page.Host[s.head.PeersOffset])), 2*abi.NumOps*b.size)
	s.bytes, s.waits = tables[:abi.NumOps*b.size], tables[abi.NumOps*b.size:]
	return s, nil
}

// privatePage makes a page that only this process reads, without a trace, which no one could ask for.
func (s *statistics) privatePage(b *Buffer) (err error) {
	head := int(unsafe.Sizeof(abi.StatsPage{}))
	if s.page, err = b.dev.NewHostPage(head + 2*abi.NumOps*b.size*8); err != nil {
		return err
	}
	s.head = (*abi.StatsPage)(unsafe.Pointer(unsafe.SliceData(s.page.Host)))
	*s.head = abi.StatsPage{
		Magic: abi.StatsMagic, Version: abi.StatsVersion, TotalBytes: uint32(len(s.page.Host)), NumOps: abi.NumOps,
		Rank: int32(b.rank), NumRanks: int32(b.size), BufferID: b.opt.ID, State: abi.PageLive, PeersOffset: uint64(head), TraceOffset: uint64(len(s.page.Host)),
	}
	return nil
}

func (s *statistics) setState(state uint32) { atomic.StoreUint32(&s.head.State, state) }

func (s *statistics) close() error {
	s.setState(abi.PageDestroyed)
	err := s.page.Close()
	if s.owner != nil {
		status.Keep(&err, s.owner.Close())
	}
	return err
}

// statsFlushLimit bounds the wait for a busy device. After it Stats reads what the page held before.
const statsFlushLimit = 50 * time.Millisecond

func (b *Buffer) flushStats() error {
	p := &abi.StatsFlushParams{Team: b.team, TimeoutNS: uint64(statsFlushLimit)}
	if code := b.opt.Library.StatsFlush(p); code != 0 && status.Code(code) != status.Timeout {
		return kern.Error("dk_stats_flush", code, p.DeviceError)
	}
	return nil
}

// Stats reads the counters of an operation. It waits for no call. Kernels may leave the newest call's counters in
// device memory; Stats has them written out first.
func (b *Buffer) Stats(number op.Operation) (op.OpStats, error) {
	if number == op.OpNone || number >= op.NumOps {
		return op.OpStats{}, status.InvalidArg("op", uint32(number), "1 (layout) to 9 (mask)")
	}
	if err := b.start(); err != nil {
		return op.OpStats{}, err
	}
	defer b.leave()
	if err := b.flushStats(); err != nil {
		return op.OpStats{}, err
	}
	from := &b.stats.head.Ops[number]
	var s op.OpStats
	s.Calls, s.Errors = atomic.LoadUint64(&from.Calls), atomic.LoadUint64(&from.Errors)
	s.Bytes = atomic.LoadUint64(&from.Bytes)
	s.Wait, s.Total = time.Duration(atomic.LoadUint64(&from.WaitNS)), time.Duration(atomic.LoadUint64(&from.TotalNS))
	longest := atomic.LoadUint64(&from.MaxNS)
	s.Max = time.Duration(longest)
	var hist [plan.HistogramBuckets]uint64
	for i := range hist {
		hist[i] = atomic.LoadUint64(&from.Hist[i])
	}
	percentile := func(share float64) time.Duration { return time.Duration(plan.Percentile(&hist, share, longest)) }
	s.P50, s.P99, s.P999 = percentile(0.5), percentile(0.99), percentile(0.999)
	if s.Calls > 0 {
		s.Mean = s.Total / time.Duration(s.Calls)
	}
	s.BytesToPeer, s.WaitForPeer = make([]uint64, b.size), make([]time.Duration, b.size)
	for peer := range b.size {
		at := int(number)*b.size + peer
		s.BytesToPeer[peer] = atomic.LoadUint64(&b.stats.bytes[at])
		s.WaitForPeer[peer] = time.Duration(atomic.LoadUint64(&b.stats.waits[at]))
	}
	return s, nil
}
