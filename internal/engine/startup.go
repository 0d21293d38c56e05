package engine

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// stage is what time is spent on during a start.
type stage int

const (
	stageLoad    stage = iota // kernel library, device, kernels
	stageMemory               // allocated, mapped, brought in
	stageConnect              // other ranks, queue pairs
	stageLaunch               // calls
	numStages
)

// Spent is time by stage, of what a buffer's user did before it was made.
type Spent struct{ Load, Connect time.Duration }

// stages measures a start. Its stages exclude each other: time counts for the newest one that has not ended.
type stages struct {
	spent  [numStages]time.Duration
	now    stage
	since  time.Time
	faults uint64 // at the beginning
	bytes  uint64
}

func newStages(now stage) *stages {
	return &stages{now: now, since: time.Now(), faults: device.PageFaults()}
}

// to begins a stage and returns the function that ends it.
func (s *stages) to(next stage) (end func()) {
	before := s.now
	s.change(next)
	return func() { s.change(before) }
}

func (s *stages) change(next stage) {
	now := time.Now()
	s.spent[s.now] += now.Sub(s.since)
	s.now, s.since = next, now
}

// endStages ends the measurement and adds it to the report.
func (b *Buffer) endStages(s *stages, phase op.StartPhase) {
	s.change(s.now)
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &b.startup.report
	for i, total := range []*[3]uint64{&r.LoadNS, &r.MemoryNS, &r.ConnectNS, &r.LaunchNS} {
		total[phase] += uint64(s.spent[i])
	}
	r.Bytes[phase] += s.bytes
	r.PageFaults[phase] += device.PageFaults() - s.faults
}

// startup is what a buffer knows of its start. b.mu guards it, but for faults.
type startup struct {
	report  op.StartupReport // but for the first calls
	warming bool             // between the parts of a warm-up
	left    time.Time        // when its first part ended
	first   [op.NumOps]firstCall
	issued  time.Duration // the host's time in the launches of first calls

	window atomic.Uint64 // while a first call runs: 1 + the page faults at its launch
	faults atomic.Uint64 // in such windows that have ended
}

// firstCall is what is known of an operation's first call.
type firstCall struct {
	launches    int    // since base
	calls, time uint64 // counted by the kernels before: of warm-ups
	first       uint64 // ns in the kernels
}

// launchesWatched is how many launches of an operation may pass until the kernels have counted the first call: the CUDA
// kernels count a call in the next one.
const launchesWatched = 6

// firstLaunch is what was so when an operation's first launch began; zero: no first launch.
type firstLaunch struct {
	began  time.Time
	faults uint64 // of the calling thread, where a launch returns before its kernel ends
}

// beforeLaunch watches the first calls of an operation. b.mu is held.
//
// Where the host runs the kernels, the process's page faults count until the call ends. To ask for those of a process
// takes the longer the more threads it has, a good part of a short call; where a device runs the kernels, only the
// calling thread's count, while it launches.
func (b *Buffer) beforeLaunch(number op.Operation) (l firstLaunch) {
	f := &b.startup.first[number]
	if f.launches > launchesWatched {
		return l
	}
	f.launches++
	if b.startup.warming {
		return l
	}
	b.endWindow()
	if f.launches > 1 {
		b.firstIsCounted(number)
		return l
	}
	if b.dev.HostStream() {
		b.startup.window.Store(1 + device.PageFaults())
	} else {
		l.faults = device.ThreadPageFaults()
	}
	l.began = time.Now()
	return l
}

// afterLaunch ends what beforeLaunch began. b.mu is held.
func (b *Buffer) afterLaunch(l firstLaunch) {
	if l.began.IsZero() {
		return
	}
	b.startup.issued += time.Since(l.began)
	if !b.dev.HostStream() {
		b.startup.faults.Add(device.ThreadPageFaults() - l.faults)
	}
}

// firstIsCounted takes the first call's time from the statistics while they count no second one. b.mu is held.
func (b *Buffer) firstIsCounted(number op.Operation) {
	f, counted := &b.startup.first[number], &b.stats.head.Ops[number]
	if f.first == 0 && atomic.LoadUint64(&counted.Calls) == f.calls+1 {
		f.first = atomic.LoadUint64(&counted.TotalNS) - f.time
	}
}

// endWindow ends the count of a first call's page faults, if one runs.
func (b *Buffer) endWindow() {
	if b.startup.window.Load() == 0 {
		return
	}
	if before := b.startup.window.Swap(0); before != 0 {
		b.startup.faults.Add(device.PageFaults() - (before - 1))
	}
}

// watchFirstCalls begins to watch for first calls anew.
func (b *Buffer) watchFirstCalls() error {
	if err := b.flushStats(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for number := range b.startup.first {
		counted := &b.stats.head.Ops[number]
		b.startup.first[number] = firstCall{calls: atomic.LoadUint64(&counted.Calls), time: atomic.LoadUint64(&counted.TotalNS)}
	}
	b.startup.warming, b.startup.issued = false, 0
	b.startup.window.Store(0)
	b.startup.faults.Store(0)
	return nil
}

// StartupReport says where the time of the start, of warm-ups and of first calls went.
func (b *Buffer) StartupReport() (op.StartupReport, error) {
	if err := b.start(); err != nil {
		return op.StartupReport{}, err
	}
	defer b.leave()
	if err := b.flushStats(); err != nil {
		return op.StartupReport{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.startup.report
	r.Preinitialized = op.Bool(b.opt.Preinitialize)
	r.LaunchNS[op.StartFirstCalls] = uint64(b.startup.issued)
	r.PageFaults[op.StartFirstCalls] = b.startup.faults.Load()
	if n := r.PageFaults[op.StartFirstCalls]; n > 0 {
		cost, err := pageCost()
		if err != nil {
			return op.StartupReport{}, err
		}
		r.MemoryNS[op.StartFirstCalls] = n * uint64(cost)
		r.Bytes[op.StartFirstCalls] = n * uint64(unix.Getpagesize())
	}
	if b.startup.warming {
		return r, nil
	}
	for number := range b.startup.first {
		f, counted := &b.startup.first[number], &b.stats.head.Ops[number]
		b.firstIsCounted(op.Operation(number))
		r.FirstNS[number] = f.first
		if later := atomic.LoadUint64(&counted.Calls) - f.calls; f.first != 0 && later > 1 {
			r.LaterNS[number] = (atomic.LoadUint64(&counted.TotalNS) - f.time - f.first) / (later - 1)
		}
	}
	return r, nil
}

// pageCost is the time that a page of new memory takes here.
func pageCost() (time.Duration, error) {
	const pages = 256
	size := unix.Getpagesize()
	memory, err := unix.Mmap(-1, 0, pages*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, status.Errorf(status.CodeOf(err), "mapping %d bytes: %w", pages*size, err)
	}
	began := time.Now()
	for at := 0; at < len(memory); at += size {
		memory[at] = 1
	}
	cost := time.Since(began) / pages
	return cost, unix.Munmap(memory)
}

// populate brings in this rank's block on an engine whose memory is the host's, as far as PreinitBytes allow: the
// control region, and of each part of the others an equal share from its beginning, which is where calls begin.
func (b *Buffer) populate(s *stages) error {
	sizes := b.blockSizes(0)
	if code := b.opt.Library.BlockSizes(sizes); code != 0 {
		return status.Errorf(status.Code(code), "dk_block_sizes: %v", status.Code(code))
	}
	for _, part := range plan.Preinit(&b.regions, sizes.WirePart[:min(sizes.NumWireParts, abi.MaxWireParts)], b.opt.PreinitBytes) {
		if err := b.block.Local.Populate(part.Offset, part.Bytes); err != nil {
			return err
		}
		s.bytes += part.Bytes
	}
	return nil
}

// describe is the log's line of what a phase of the start took.
func describe(r *op.StartupReport, phase op.StartPhase) string {
	parts := make([]string, 0, numStages+2)
	for i, total := range []*[3]uint64{&r.LoadNS, &r.MemoryNS, &r.ConnectNS, &r.LaunchNS} {
		parts = append(parts, fmt.Sprintf("%s %.1f ms", [...]string{"kernels", "memory", "connections", "launches"}[i], float64(total[phase])/1e6))
	}
	if phase == op.StartWarmup && r.LanguageNS > 0 {
		parts = append(parts, fmt.Sprintf("calls of the language's interface %.1f ms", float64(r.LanguageNS)/1e6))
	}
	return strings.Join(parts, ", ") + fmt.Sprintf("; %d MiB, %d page faults", r.Bytes[phase]>>20, r.PageFaults[phase])
}
