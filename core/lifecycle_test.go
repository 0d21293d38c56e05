package core

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/env"
)

// released is a channel for the rank that waits for another one, which calls goOn, also where it fails.
func released() (until <-chan struct{}, goOn func()) {
	c := make(chan struct{})
	return c, sync.OnceFunc(func() { close(c) })
}

func TestEventsAndAsync(t *testing.T) {
	waited, goOn := released()
	onRanks(t, 2, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
		done, before := m.event(), m.event()
		defer func() { m.must(done.Destroy()); m.must(before.Destroy()) }()
		m.must(done.Wait(0)) // never recorded: done
		if m.rank == 0 {
			defer goOn()
			m.must(m.Barrier(&Call{Async: true, Event: done}))
			m.check(errors.Is(done.Wait(0), ErrInterrupted), "the barrier ended without rank 1")
			begin := time.Now()
			err := done.Wait(30 * time.Millisecond)
			m.check(errors.Is(err, ErrInterrupted), "the barrier ended without rank 1: %v", err)
			m.check(time.Since(begin) > 25*time.Millisecond && time.Since(begin) < time.Second, "a slice of 30 ms took %v", time.Since(begin))
			goOn()
			m.must(before.Record(0))
			m.must(m.Barrier(&Call{Async: true, Previous: before, Event: done}))
			m.must(done.StreamWait(0))
		} else {
			<-waited
			m.must(m.Barrier(&Call{}))
			m.must(m.Barrier(&Call{}))
		}
		m.must(m.Check())
	})
}

func (m *member) event() *Event {
	ev, err := m.NewEvent()
	m.must(err)
	return ev
}

func TestBackgroundStart(t *testing.T) {
	needEngine(t)
	exchangers := NewLocal(2)
	var ranks sync.WaitGroup
	waited, goOn := released()
	for rank := range 2 {
		ranks.Go(func() {
			defer reportFail(t)
			m := &member{t: t, rank: rank}
			if rank == 0 {
				defer goOn()
			}
			g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], Background: true, Timeout: 10 * time.Second})
			m.must(err)
			defer func() { m.must(g.Destroy()) }()
			if rank == 1 {
				<-waited
			}
			b, err := g.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1, NumNVLBytes: 1 << 20, Background: true, Preinitialize: true})
			m.must(err)
			defer func() { m.must(b.Destroy()) }()
			if rank == 0 {
				m.check(!b.Ready() && !b.Info().Ready && b.Info().Engine == EngineCPU, "ready before rank 1 began")
				m.check(errors.Is(b.WaitReady(10*time.Millisecond), ErrInterrupted), "ready before rank 1 began")
				m.must(b.Check())
				goOn()
			}
			m.must(b.Barrier(&Call{})) // waits for the rest
			m.check(b.Ready() && b.Info().Ready, "not ready after a call")
		})
	}
	ranks.Wait()
}

func TestWarmupAndStatistics(t *testing.T) {
	for _, perNode := range []int{0, 2} {
		t.Run(fmt.Sprintf("nodes of %d", perNode), func(t *testing.T) { warmupAndStatistics(t, perNode) })
	}
}

func warmupAndStatistics(t *testing.T, perNode int) {
	o := roomFor(t, 4, 16, 256, 8)
	o.NumNVLBytes = 4 << 20
	onNodes(t, 4, perNode, o, func(m *member) {
		for _, fp8 := range []bool{false, true} {
			m.warmup(WarmupOptions{NumTokens: 16, Hidden: 256, NumTopK: 3, NumExperts: 8, LLNumMaxTokens: 16, LLHidden: 256, LLNumTopK: 3, LLNumExperts: 8, UseFP8: op.Bool(fp8)})
		}
		for _, number := range []Operation{OpLayout, OpNotify, OpDispatch, OpCombine, OpLLDispatch, OpLLCombine} {
			s, err := m.Stats(number)
			m.must(err)
			calls := uint64(2)
			if number == OpLLDispatch || number == OpLLCombine {
				calls = 8 // each warm-up fills both slots, by whole calls and by halves
			}
			m.check(s.Calls == calls && s.Errors == 0 && s.Total > 0 && s.P50 > 0 && s.P99 >= s.P50 && s.Max >= s.P99, "%s: %+v", number, s)
			if number == OpDispatch {
				var sum uint64
				for _, n := range s.BytesToPeer {
					sum += n
				}
				m.check(sum == s.Bytes && sum > 16*256, "bytes %d, to peers %v", s.Bytes, s.BytesToPeer)
			}
		}
	})
}

func TestDestroyIsBoundedAndIdempotent(t *testing.T) {
	launched, goOn := released()
	onRanks(t, 2, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
		if m.rank == 1 {
			<-launched
			return // rank 0 waits for it in vain
		}
		defer goOn()
		ev := m.event()
		m.must(m.Barrier(&Call{Async: true, Event: ev}))
		goOn()
		waited := make(chan error)
		go func() { waited <- ev.Wait(-1) }()
		begin := time.Now()
		m.must(m.Buffer.Destroy())
		m.check(time.Since(begin) < 2*time.Second, "destroy took %v", time.Since(begin))
		m.must(m.Buffer.Destroy())
		<-waited
		m.must(ev.Destroy())
		m.check(errors.Is(m.Barrier(&Call{}), ErrInvalidState), "a call after destroy")
		m.check(errors.Is(m.Check(), ErrInvalidState), "check after destroy")
		_, _, err := m.Region(false)
		m.check(errors.Is(err, ErrInvalidState), "region after destroy: %v", err)
	})
}

// A group that was destroyed lives until its last buffer is; two buffers work at once.
func TestTwoBuffersAndTheirGroup(t *testing.T) {
	onRanks(t, 2, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
		second, err := m.group.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1, NumNVLBytes: 1 << 20})
		m.must(err)
		m.must(m.group.Destroy())
		var both sync.WaitGroup
		for _, b := range []*Buffer{m.Buffer, second} {
			both.Go(func() {
				for range 20 {
					if err := b.Barrier(&Call{}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		both.Wait()
		_, err = m.group.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1})
		m.check(errors.Is(err, ErrInvalidState), "a buffer of a destroyed group: %v", err)
		m.must(second.Destroy())
	})
}

func TestCyclesLeakNothing(t *testing.T) {
	for _, perNode := range []int{0, 1} {
		t.Run(fmt.Sprintf("nodes of %d", perNode), func(t *testing.T) { cyclesLeakNothing(t, perNode) })
	}
}

func cyclesLeakNothing(t *testing.T, perNode int) {
	cycles := 50
	if testing.Short() {
		cycles = 5
	}
	o := roomFor(t, 2, 8, 128, 4)
	cycle := func() {
		onNodes(t, 2, perNode, o, func(m *member) {
			l := newLowLatency(&m.pin, m.rank, 2, 4, 8, 128, 2, 4)
			m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, false), &Call{}))
			l.checkRows(m, false)
		})
	}
	cycle() // what is made once
	before := footprint(t)
	for range cycles {
		cycle()
	}
	after := footprint(t)
	for what, n := range after {
		if n > before[what]+footprintSlack[what] {
			t.Errorf("%s: %d before, %d after %d cycles", what, before[what], n, cycles)
		}
	}
	goleak.VerifyNone(t)
}

// footprintSlack is what Go's own threads and heap may grow by meanwhile.
var footprintSlack = map[string]int{"threads": 20, "readable MiB": 128}

// footprint counts what this process holds.
func footprint(t *testing.T) map[string]int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return map[string]int{
		"threads":     len(threads),
		"descriptors": len(fds), "shared mappings": strings.Count(string(maps), "memfd:"), "zero mappings": strings.Count(string(maps), "/dev/zero"),
		"statistics pages": strings.Count(string(maps), ".page"),
		"readable MiB":     int(addressSpace(string(maps)) >> 20),
	}
}

// addressSpace adds up what is mapped readable: queue pairs are private memory without a name.
func addressSpace(maps string) (bytes uint64) {
	for line := range strings.Lines(maps) {
		var from, to uint64
		var mode string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); n == 3 && mode[0] == 'r' {
			bytes += to - from
		}
	}
	return bytes
}

func TestEngines(t *testing.T) {
	env.SetSource(func(name string) string {
		return map[string]string{"DEEPEP_KERNELS": "/nowhere", "DEEPEP_ENGINE": "cpu"}[name]
	})
	defer env.SetSource(nil)
	info, err := QueryEngine(EngineAuto)
	if err != nil || info.Available || info.Name != EngineCPU || !strings.Contains(info.Reason, "/nowhere/libdeepep_cpu.so") {
		t.Errorf("%+v %v", info, err)
	}
	if _, err := QueryEngine("tpu"); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("unknown engine: %v", err)
	}
	env.SetSource(func(string) string { return "maybe" })
	if _, err := QueryEngine(EngineAuto); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("damaged settings: %v", err)
	}
}

func TestHintsAndDefaults(t *testing.T) {
	c, err := DefaultConfigFor(KindCombine, 24)
	if err != nil {
		t.Fatal(err)
	}
	for _, ranks := range []int{1, 4, 8, 12, 16, 160} {
		nvl, err := SizeHint(c, 14336, ranks, false)
		rdma, err2 := SizeHint(c, 14336, ranks, true)
		if err != nil || err2 != nil || nvl == 0 || (rdma == 0) != (ranks <= 8) {
			t.Errorf("%d ranks: %d %d %v %v", ranks, nvl, rdma, err, err2)
		}
	}
	if _, err := SizeHint(c, 14336, 0, false); !errors.Is(err, ErrInvalidArgument) {
		t.Error(err)
	}
}

func TestBF16(t *testing.T) {
	for f, want := range map[float32]uint16{0: 0, 1: 0x3f80, -2: 0xc000, 1.00390625: 0x3f80, 1.01171875: 0x3f82, 3e38: 0x7f62} {
		if got := ToBF16(f); got != want {
			t.Errorf("%v: %#x, want %#x", f, got, want)
		}
	}
	if FromBF16(0x4049) != 3.140625 {
		t.Error(FromBF16(0x4049))
	}
}

// Threads of one rank share its buffer; what they issue is put in order inside.
func TestThreadsShareABuffer(t *testing.T) {
	o := roomFor(t, 2, 8, 128, 4)
	onRanks(t, 2, o, func(m *member) {
		var threads sync.WaitGroup
		for range 4 {
			threads.Go(func() {
				for range 25 { // barriers are alike: whichever thread's comes first meets the other rank's next one
					if err := m.Barrier(&Call{}); err != nil {
						t.Error(err)
					}
					if _, err := m.Stats(OpBarrier); err != nil {
						t.Error(err)
					}
				}
			})
		}
		threads.Wait()
		s, err := m.Stats(OpBarrier)
		m.must(err)
		m.check(s.Calls == 100, "%d barriers", s.Calls)
	})
}

// Normal mode may use the memory of low-latency mode in between; a clean brings the slots back, sends that were never
// received included.
func TestClean(t *testing.T) {
	o := roomFor(t, 2, 8, 128, 4)
	onRanks(t, 2, o, func(m *member) {
		l := newLowLatency(&m.pin, m.rank, 2, 4, 8, 128, 2, 4)
		for range 3 {
			half := l.dispatch(Send, false)
			m.must(m.LowLatencyDispatch(half, &Call{}))
			address, bytes, err := m.Region(true)
			m.must(err)
			m.must(m.Barrier(&Call{}))
			clear(memoryAt[uint8](address, int(bytes)))
			m.must(m.Clean(8, 128, 4, &Call{}))
			half.Phases = Recv
			m.check(errors.Is(m.LowLatencyDispatch(half, &Call{}), ErrInvalidArgument), "a receive of what was cleaned away")
			m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, false), &Call{}))
			l.checkRows(m, false)
			m.must(m.LowLatencyCombine(l.combine(SendRecv, 0), &Call{}))
			l.checkCombined(m)
		}
	})
}
