package core

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/env"
)

func (m *member) warmup(o WarmupOptions) StartupReport {
	r, err := m.Warmup(o)
	m.must(err)
	return r
}

func (m *member) report() StartupReport {
	r, err := m.StartupReport()
	m.must(err)
	return r
}

func (m *member) calls(number Operation) uint64 {
	s, err := m.Stats(number)
	m.must(err)
	return s.Calls
}

// residentBytes is how much of a buffer's block has memory here.
func residentBytes(t testing.TB, address uintptr) (kib int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	for line := range strings.Lines(string(text)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x", &from, &to); n == 2 {
			inside = from <= address && address < to
		}
		if inside && strings.HasPrefix(line, "Rss:") {
			_, err := fmt.Sscanf(line, "Rss: %d kB", &kib)
			if err != nil {
				t.Fatal(err)
			}
			return kib
		}
	}
	return 0
}

// preinitialize brings in as much memory as the setting says, and nothing without it.
func TestPreinitializeBringsMemoryIn(t *testing.T) {
	for name, c := range map[string]struct {
		preinitialize bool
		setting       string
		least, most   int // KiB
	}{
		"without":                  {false, "", 0, 1 << 10},
		"default":                  {true, "", 20 << 10, 256 << 10},
		"a setting":                {true, "4194304", 4<<10 - 64, 5 << 10},
		"no memory":                {true, "0", 0, 1 << 10},
		"more than the buffer has": {true, "1099511627776", 100 << 10, 200 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			env.SetSource(func(variable string) string {
				return map[string]string{"DEEPEP_PREINIT_BYTES": c.setting, "DEEPEP_KERNELS": os.Getenv("DEEPEP_KERNELS")}[variable]
			})
			defer env.SetSource(nil)
			onRanks(t, 1, BufferOptions{NumNVLBytes: 8 << 20, NumRDMABytes: 16 << 20, LowLatency: true, Preinitialize: c.preinitialize}, func(m *member) {
				address, _, err := m.Region(false)
				m.must(err)
				resident, r := residentBytes(t, address), m.report()
				m.check(resident >= c.least && resident <= c.most, "%d KiB of the block have memory", resident)
				brought := int(r.Bytes[StartConstruction] >> 10)
				m.check(brought <= resident && (c.least == 0 || brought >= c.least), "the report says %d KiB of %d", brought, resident)
				m.check(r.Preinitialized == op.Bool(c.preinitialize), "%+v", r)
			})
		})
	}
}

// What a program types first: no shape at all. Every mode that the buffer allows makes its calls, on both slots.
func TestWarmupWithoutShape(t *testing.T) {
	low := roomFor(t, 2, 16, 512, 8)
	low.NumNVLBytes = 0
	for name, c := range map[string]struct {
		o                  BufferOptions
		normal, lowLatency bool
	}{
		"both modes":  {BufferOptions{NumNVLBytes: 1 << 20, NumRDMABytes: low.NumRDMABytes, LowLatency: true}, true, true},
		"normal":      {BufferOptions{NumNVLBytes: 1 << 20}, true, false},
		"low latency": {low, false, true},
		"tiny":        {BufferOptions{NumNVLBytes: 4096}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			onRanks(t, 2, c.o, func(m *member) {
				r := m.warmup(WarmupOptions{})
				for _, number := range []Operation{OpLayout, OpNotify, OpDispatch, OpCombine} {
					m.check((m.calls(number) > 0) == c.normal, "%s: %d calls", number, m.calls(number))
				}
				for _, number := range []Operation{OpLLDispatch, OpLLCombine} {
					m.check((m.calls(number) >= 2) == c.lowLatency, "%s: %d calls", number, m.calls(number))
				}
				m.check((r.ShapeFrom != ShapeNone) == c.normal && (r.NumTokens*r.Hidden*r.NumTopK*r.NumExperts > 0) == c.normal, "%+v", r)
				m.check((r.LLShapeFrom != ShapeNone) == c.lowLatency && (r.LLNumMaxTokens*r.LLHidden > 0) == c.lowLatency, "%+v", r)
				m.check(r.NumWarmups == 1 && r.LaunchNS[StartWarmup] > 0 && r.MemoryNS[StartWarmup] > 0 && r.Bytes[StartWarmup] > 0, "%+v", r)
				m.check(r.FirstNS == [10]uint64{}, "a warm-up's calls are no first calls: %+v", r)
			})
		})
	}
}

// The shape that is known best counts: given, of the buffer's options, of a size hint, the largest that fits.
func TestWarmupKnowsTheShape(t *testing.T) {
	hints = hintList{}
	bytes, err := LowLatencySizeHint(24, 384, 2, 12)
	if err != nil {
		t.Fatal(err)
	}
	nvl, err := SizeHint(DefaultConfig(), 2*384, 2, false)
	if err != nil {
		t.Fatal(err)
	}
	o := BufferOptions{NumNVLBytes: nvl, NumRDMABytes: bytes, LowLatency: true}
	run := func(o BufferOptions, w WarmupOptions) (r StartupReport) {
		t.Helper()
		onRanks(t, 2, o, func(m *member) {
			if report := m.warmup(w); m.rank == 0 {
				r = report
			}
		})
		return r
	}
	if r := run(o, WarmupOptions{}); r.LLNumMaxTokens != 24 || r.LLHidden != 384 || r.LLNumExperts != 12 || r.Hidden != 384 || r.LLShapeFrom != ShapeRegion {
		t.Errorf("by hints: %+v", r)
	}
	o.Shape = Shape{NumTokens: 20, Hidden: 256, NumTopK: 3, NumExperts: 8}
	r := run(o, WarmupOptions{})
	if r.NumTokens != 20 || r.Hidden != 256 || r.NumTopK != 3 || r.NumExperts != 8 || r.ShapeFrom != ShapeOptions {
		t.Errorf("by the options: %+v", r)
	}
	if r.LLNumMaxTokens != 20 || r.LLHidden != 256 || r.LLNumTopK != 3 || r.LLNumExperts != 8 || r.LLShapeFrom != ShapeOptions {
		t.Errorf("by the options, low latency: %+v", r)
	}
	o.Shape.NumTokens = 5000 // a batch of normal mode, too large for a step of decoding
	if r = run(o, WarmupOptions{}); r.NumTokens != 5000 || r.LLNumMaxTokens >= 5000 || r.LLNumMaxTokens < 1 {
		t.Errorf("a large batch: %+v", r)
	}
	r = run(o, WarmupOptions{NumTokens: 7, Hidden: 128, NumTopK: 2, NumExperts: 4})
	if r.NumTokens != 7 || r.Hidden != 128 || r.NumTopK != 2 || r.NumExperts != 4 || r.ShapeFrom != ShapeGiven || r.LLShapeFrom != ShapeNone {
		t.Errorf("given: %+v", r)
	}
	if r = run(o, WarmupOptions{Hidden: 128}); r.Hidden != 128 || r.NumTopK != 3 || r.ShapeFrom != ShapeOptions || r.LLShapeFrom != ShapeNone {
		t.Errorf("given in part: %+v", r)
	}
}

func TestWarmupArguments(t *testing.T) {
	o := roomFor(t, 2, 16, 256, 8)
	o.NumNVLBytes = 1 << 20
	onRanks(t, 2, o, func(m *member) {
		given := WarmupOptions{NumTokens: 8, Hidden: 256, NumTopK: 2, NumExperts: 8}
		for _, c := range []struct { // in one order on all ranks
			want   string
			change func(*WarmupOptions)
		}{
			{"num_experts", func(w *WarmupOptions) { w.NumExperts = 7 }},
			{"hidden", func(w *WarmupOptions) { w.Hidden = 12 }},
			{"max_bytes", func(w *WarmupOptions) { w.MaxBytes = 100 }},
			{"max_ms", func(w *WarmupOptions) { w.MaxMS = -1 }},
			{"part", func(w *WarmupOptions) { w.Part = 3 }},
			{"0 or more", func(w *WarmupOptions) { w.NumTokens = -1 }},
		} {
			w := given
			c.change(&w)
			_, err := m.Warmup(w)
			m.check(errors.Is(err, ErrInvalidArgument) && strings.Contains(err.Error(), c.want), "%s: %v", c.want, err)
		}
		_, err := m.Warmup(WarmupOptions{Part: WarmupEnd})
		m.check(errors.Is(err, ErrInvalidState), "an end without a beginning: %v", err)
		w := given
		w.NumTokens += int32(m.rank)
		_, err = m.Warmup(w)
		m.check(errors.Is(err, ErrMismatch) && strings.Contains(err.Error(), "rank 1 gave"), "two shapes: %v", err)
		m.warmup(given)
	})
	onRanks(t, 1, BufferOptions{NumNVLBytes: 1 << 20, Shape: Shape{Hidden: 64}}, func(m *member) {
		_, err := m.group.NewBuffer(t.Context(), BufferOptions{Engine: EngineCPU, Device: -1, Shape: Shape{Hidden: -1}})
		m.check(errors.Is(err, ErrInvalidArgument) && strings.Contains(err.Error(), "hidden"), "%v", err)
	})
}

// Calls between the parts of a warm-up belong to it; the first call after it is measured apart from later ones.
func TestFirstCallsAreReported(t *testing.T) {
	o := roomFor(t, 2, 64, 512, 8)
	onRanks(t, 2, o, func(m *member) {
		l := newLowLatency(&m.pin, m.rank, 2, 64, 64, 512, 3, 8)
		round := func() {
			m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, false), &Call{}))
			m.must(m.LowLatencyCombine(l.combine(SendRecv, 0), &Call{}))
		}
		round()
		plain := m.report()
		m.check(plain.FirstNS[OpLLDispatch] > 0 && plain.FirstNS[OpLLCombine] > 0 && plain.LaterNS[OpLLDispatch] == 0, "%+v", plain)
		m.check(plain.LaunchNS[StartFirstCalls] > 0 && plain.PageFaults[StartFirstCalls] > 0 && plain.MemoryNS[StartFirstCalls] > 0, "%+v", plain)
		m.check(plain.LoadNS[StartConstruction] > 0 && plain.ConnectNS[StartConstruction] > 0 && plain.MemoryNS[StartConstruction] > 0, "%+v", plain)
		round()
		second := m.report()
		m.check(second.FirstNS == plain.FirstNS && second.LaterNS[OpLLDispatch] > 0 && second.LaterNS[OpLLCombine] > 0, "%+v", second)

		m.warmup(WarmupOptions{Part: WarmupBegin, LLNumMaxTokens: 64, LLHidden: 512, LLNumTopK: 3, LLNumExperts: 8})
		round()
		m.check(m.report().FirstNS == [10]uint64{}, "calls of a warm-up that has not ended are no first calls")
		r := m.warmup(WarmupOptions{Part: WarmupEnd})
		m.check(r.NumWarmups == 1 && r.LanguageNS > 0 && r.FirstNS == [10]uint64{}, "%+v", r)
		round()
		r = m.report()
		m.check(r.FirstNS[OpLLDispatch] > 0 && r.FirstNS[OpLLCombine] > 0 && r.LaterNS[OpLLDispatch] == 0, "%+v", r)
	})
}

// A warm-up leaves nothing that the first call has to bring in: its page faults are next to none.
func TestFirstCallAfterWarmupFindsItsMemory(t *testing.T) {
	const tokens, hidden, topK, experts = 64, 2048, 4, 16
	faults := map[string]uint64{}
	var lock sync.Mutex
	for name, warm := range map[string]*WarmupOptions{
		"plain": nil, "no shape": {}, "shape": {LLNumMaxTokens: tokens, LLHidden: hidden, LLNumTopK: topK, LLNumExperts: experts},
	} {
		onRanks(t, 1, roomFor(t, 1, tokens, hidden, experts), func(m *member) {
			l := newLowLatency(&m.pin, m.rank, 1, tokens, tokens, hidden, topK, experts)
			clear(l.recvX) // the outputs are the caller's
			if warm != nil {
				m.warmup(*warm)
			}
			m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, false), &Call{}))
			m.must(m.LowLatencyCombine(l.combine(SendRecv, 0), &Call{}))
			lock.Lock()
			defer lock.Unlock()
			faults[name] = m.report().PageFaults[StartFirstCalls]
		})
	}
	if faults["shape"]*4 > faults["plain"] || faults["no shape"]*4 > faults["plain"] {
		t.Errorf("page faults of the first calls: %v", faults)
	}
}
