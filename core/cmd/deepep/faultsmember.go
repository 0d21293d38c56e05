package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/status"
)

// spec has a small shape: a round's calls take about 100 us.
func (o *faultOrder) spec() *benchSpec {
	return &benchSpec{
		Rank: o.Rank, Ranks: o.Ranks, PerNode: o.PerNode, Folder: o.Folder, Engine: o.Engine, Operations: []string{"low-latency"},
		Tokens: []int{16}, Hidden: 512, Experts: 2 * o.Ranks, TopK: 2, Routing: "uniform", Seed: o.Seed, FP8: o.Phase == "low-latency fp8",
	}
}

// member is a rank's group and buffer in a round.
type member struct {
	spec      *benchSpec
	group     *core.Group
	buffer    *core.Buffer
	calls     *caller
	normal    *normalCalls
	ll        *lowLatencyCalls
	shrink    bool
	others    *caller // masks: makes other, whose calls overwrite what a rank that was stopped and masked may be reading
	other     *lowLatencyCalls
	limit     time.Duration // of a regroup
	maskWords uintptr
	x         []uint16
	index     []int64
}

func (o *faultOrder) open(name string) (m *member, err error) {
	m = &member{spec: o.spec(), shrink: strings.HasPrefix(o.Phase, "masks")}
	defer func() {
		if err != nil {
			_ = m.close() // the first error counts
			m = nil
		}
	}()
	start := time.Duration(o.StartMS) * time.Millisecond
	ctx, cancel := context.WithTimeout(context.Background(), start)
	defer cancel()
	meet, err := core.OpenFile(ctx, core.FileOptions{Rank: o.Rank, Size: o.Ranks, Dir: o.Folder, Name: name})
	if err != nil {
		return m, err
	}
	if m.group, err = core.NewGroup(ctx, core.GroupOptions{Exchanger: meet, NumNVLPeers: o.PerNode, Timeout: start}); err != nil {
		return m, err
	}
	options, err := m.spec.buffer()
	if err != nil {
		return m, err
	}
	limit := time.Duration(o.LimitMS) * time.Millisecond
	options.NumRDMABytes *= 2
	if options.Device >= 0 {
		info, err := core.QueryEngine(o.Engine)
		if err != nil {
			return m, err
		}
		options.Device = o.Place % info.NumDevices
	}
	m.limit = limit
	options.Timeout, options.FirstTimeout, options.Shrink = limit, limit, m.shrink
	if m.buffer, err = m.group.NewBuffer(ctx, options); err != nil {
		return m, err
	}
	if err = m.buffer.WaitReady(-1); err != nil {
		return m, err
	}
	if m.calls, err = newCaller(m.buffer, m.spec); err != nil {
		return m, err
	}
	if o.Phase == "asynchronous" && m.calls.event == nil {
		if m.calls.event, err = m.buffer.NewEvent(); err != nil {
			return m, err
		}
	}
	if err = m.tensors(); err == nil && m.shrink {
		err = m.otherShape()
	}
	return m, err
}

func (m *member) otherShape() (err error) {
	spec := *m.spec
	spec.Tokens, spec.Hidden = []int{m.spec.Tokens[0] / 4}, 2*m.spec.Hidden
	if m.others, err = newCaller(m.buffer, &spec); err == nil {
		m.other, err = m.others.lowLatency(spec.Tokens[0])
	}
	return err
}

func (m *member) tensors() (err error) {
	tokens, s := m.spec.Tokens[0], m.spec
	if m.index, err = route(s.Routing, tokens, s.TopK, s.Experts, s.Rank, s.Seed); err != nil {
		return err
	}
	if m.normal, err = m.calls.normal(tokens); err != nil {
		return err
	}
	if m.ll, err = m.calls.lowLatency(tokens); err != nil {
		return err
	}
	m.x = make([]uint16, tokens*s.Hidden)
	for i := range m.x {
		m.x[i] = core.ToBF16(float32((7*s.Rank+3*(i/s.Hidden)+i)%32 - 8)) // sums of a few are exact
	}
	ones := make([]float32, tokens*s.TopK)
	for i := range ones {
		ones[i] = 1
	}
	mem := m.calls.mem
	m.maskWords = mem.alloc(4 * s.Ranks)
	return errors.Join(
		mem.err,
		put(mem, m.normal.x, m.x), put(mem, m.ll.dispatch.X, m.x), put(mem, m.normal.weights, ones), put(mem, m.ll.combine.TopKWeights, ones))
}

// all lists the ranks of a group.
func all(size int) []int {
	ranks := make([]int, size)
	for rank := range ranks {
		ranks[rank] = rank
	}
	return ranks
}

// put writes a slice to device memory, and get reads it.
func put[T any](t *tensors, to uintptr, values []T) error {
	defer runtime.KeepAlive(values)
	return t.copy(to, uintptr(unsafe.Pointer(unsafe.SliceData(values))), len(values)*int(unsafe.Sizeof(values[0])))
}

func get[T any](t *tensors, values []T, from uintptr) error {
	defer runtime.KeepAlive(values)
	return t.copy(uintptr(unsafe.Pointer(unsafe.SliceData(values))), from, len(values)*int(unsafe.Sizeof(values[0])))
}

// close ends the buffer before the memory that its kernels use.
func (m *member) close() (err error) {
	if m.buffer != nil {
		status.Keep(&err, m.buffer.Destroy())
	}
	for _, c := range []*caller{m.calls, m.others} {
		if c != nil {
			status.Keep(&err, c.close())
		}
	}
	if m.group != nil {
		status.Keep(&err, m.group.Destroy())
	}
	return err
}

// moveTo lets the failed buffer go on among the survivors; both modes work in it.
func (m *member) moveTo(o *faultOrder) (err error) {
	if err := m.buffer.Regroup(context.Background(), core.RegroupOptions{Members: o.Members, Renumber: true, Timeout: usualLimit}); err != nil {
		return err
	}
	before := m.calls
	defer func() { status.Keep(&err, before.close()) }()
	m.spec = o.spec()
	if m.calls, err = newCaller(m.buffer, m.spec); err != nil {
		m.calls = nil
		return err
	}
	if err := m.tensors(); err != nil {
		return err
	}
	return m.bothModes()
}

func (m *member) bothModes() error {
	for range 2 {
		for _, phase := range []string{"normal", "low-latency"} {
			if err := m.step(phase, 0, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// step makes one call of a phase and checks its results. e.Masks is what the masks were.
func (m *member) step(phase string, number int64, e *faultEvent) error {
	switch phase {
	case "construct", "destroy", "normal", "asynchronous":
		return errors.Join(m.normal.Dispatch(), m.combineNormal())
	case "cached":
		if number == 0 {
			return m.step("normal", 0, e)
		}
		if err := m.normal.Cached(); err != nil {
			return err
		}
		return m.combineNormal()
	case "combine":
		if number == 0 {
			return m.step("normal", 0, e)
		}
		return m.combineNormal()
	case "low-latency", "low-latency fp8", "low-latency hooks":
		return m.roundTrip(phase)
	case "masks":
		return m.masked(number, e)
	case "barrier":
		return m.calls.together()
	case "regroup":
		if number == 0 {
			return m.step("normal", 0, e)
		}
		if err := m.buffer.Regroup(context.Background(), core.RegroupOptions{Members: all(m.spec.Ranks), Renumber: true, Timeout: m.limit}); err != nil {
			return err
		}
		return m.step("normal", number, e)
	case "clean":
		s := m.spec
		call := &core.Call{}
		if m.calls.event == nil {
			return m.buffer.Clean(int32(s.Tokens[0]), int32(s.Hidden), int32(s.Experts), call)
		}
		call.Stream = m.buffer.Info().CommStream
		if err := m.buffer.Clean(int32(s.Tokens[0]), int32(s.Hidden), int32(s.Experts), call); err != nil {
			return err
		}
		return m.calls.finish(m.calls.event.Record(call.Stream))
	case "warm-up":
		s := m.spec
		_, err := m.buffer.Warmup(core.WarmupOptions{
			NumTokens: int32(s.Tokens[0]), Hidden: int32(s.Hidden), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts),
			LLNumMaxTokens: int32(s.Tokens[0]), LLHidden: int32(s.Hidden), LLNumTopK: int32(s.TopK), LLNumExperts: int32(s.Experts),
		})
		return err
	}
	return fmt.Errorf("no phase %q", phase)
}

// combineNormal checks the sums: a token's row comes back once from each rank that it went to.
func (m *member) combineNormal() error {
	if err := m.normal.Combine(); err != nil {
		return err
	}
	return m.compare(m.normal.out, func(token int) float32 {
		ranks := map[int64]bool{}
		for _, expert := range m.experts(token) {
			ranks[expert/int64(m.spec.Experts/m.spec.Ranks)] = true
		}
		return float32(len(ranks))
	})
}

func (m *member) experts(token int) []int64 {
	return m.index[token*m.spec.TopK : (token+1)*m.spec.TopK]
}

// roundTrip checks the sums: a token's row comes back once from each expert, with the weight 1.
func (m *member) roundTrip(phase string) error {
	hooks := phase == "low-latency hooks"
	l := m.ll
	if !l.spec.FP8 {
		l.combine.X = l.dispatch.RecvX // the experts leave rows as they are
	}
	dispatch := func() error { return l.finish(l.LowLatencyDispatch(&l.dispatch, l.call())) }
	combine := func() error { return l.finish(l.LowLatencyCombine(&l.combine, l.call())) }
	if !hooks {
		l.dispatch.Phases, l.combine.Phases = core.SendRecv, core.SendRecv
		if err := errors.Join(dispatch()); err != nil {
			return err
		}
		if err := combine(); err != nil {
			return err
		}
	} else {
		for _, half := range []core.Phase{core.Send, core.Recv} {
			l.dispatch.Phases = half
			if err := dispatch(); err != nil {
				return err
			}
		}
		for _, half := range []core.Phase{core.Send, core.Recv} {
			l.combine.Phases = half
			if err := combine(); err != nil {
				return err
			}
		}
	}
	if l.spec.FP8 {
		return nil // the rows that come back are zeros
	}
	return m.compare(l.combine.CombinedX, func(int) float32 { return float32(m.spec.TopK) })
}

// masked is a round trip in which ranks may be lost: their experts add nothing. In the call in which a rank is masked
// its share is undefined.
func (m *member) masked(number int64, e *faultEvent) error {
	if number%3 == 2 {
		return errors.Join(m.other.Dispatch(), m.other.Combine())
	}
	before, err := m.masks()
	if err != nil {
		return err
	}
	l := m.ll
	l.combine.X = l.dispatch.RecvX
	if err := l.Dispatch(); err != nil {
		return err
	}
	if err := l.Combine(); err != nil {
		return err
	}
	after, err := m.masks()
	if err != nil {
		return err
	}
	if e != nil && len(after) > 0 {
		e.Masks = after
	}
	if len(before) != len(after) {
		return nil
	}
	lost := map[int64]bool{}
	for _, rank := range after {
		lost[int64(rank)] = true
	}
	return m.compare(l.combine.CombinedX, func(token int) (terms float32) {
		for _, expert := range m.experts(token) {
			if !lost[expert/int64(m.spec.Experts/m.spec.Ranks)] {
				terms++
			}
		}
		return terms
	})
}

// masks lists the masked ranks.
func (m *member) masks() (ranks []int, err error) {
	call := &core.Call{}
	if m.calls.event != nil {
		call.Stream = m.buffer.Info().CommStream
	}
	if err := m.buffer.QueryMask(m.maskWords, call); err != nil {
		return nil, err
	}
	if m.calls.event != nil {
		if err := m.calls.finish(m.calls.event.Record(call.Stream)); err != nil {
			return nil, err
		}
	}
	words := make([]int32, m.spec.Ranks)
	if err := get(m.calls.mem, words, m.maskWords); err != nil {
		return nil, err
	}
	for rank, masked := range words {
		if masked != 0 {
			ranks = append(ranks, rank)
		}
	}
	return ranks, nil
}

var errWrong = errors.New("wrong result")

// compare checks that each token of out is this rank's token times terms.
func (m *member) compare(out uintptr, terms func(token int) float32) error {
	got := make([]uint16, len(m.x))
	if err := get(m.calls.mem, got, out); err != nil {
		return err
	}
	for i, bits := range got {
		if want := core.FromBF16(m.x[i]) * terms(i/m.spec.Hidden); core.FromBF16(bits) != want {
			return fmt.Errorf("%w: token %d, channel %d: got %v, want %v", errWrong, i/m.spec.Hidden, i%m.spec.Hidden, core.FromBF16(bits), want)
		}
	}
	return nil
}
