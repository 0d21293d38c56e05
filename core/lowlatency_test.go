package core

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// lowLatency is the tensors of low-latency calls of one shape.
type lowLatency struct {
	tokens, b, hidden, k, experts, ranks, rank int
	x, recvX, combined                         []uint16
	recv8                                      []uint8
	scales                                     []float32
	index                                      []int64
	weights                                    []float32
	count, source                              []int32
	ranges                                     []int64
	pin                                        *runtime.Pinner
	stats                                      []int32
	waits                                      []int64
}

func newLowLatency(pin *runtime.Pinner, rank, ranks, tokens, b, hidden, k, experts int) *lowLatency {
	l := &lowLatency{pin: pin, tokens: tokens, b: b, hidden: hidden, k: k, experts: experts, ranks: ranks, rank: rank}
	local := experts / ranks
	room := local * ranks * b
	l.x, l.recvX, l.combined = make([]uint16, b*hidden), make([]uint16, room*hidden), make([]uint16, b*hidden)
	l.recv8, l.scales = make([]uint8, room*hidden), make([]float32, room*hidden/128+64)
	l.index, l.weights = make([]int64, b*k+8), make([]float32, b*k+16)
	l.count, l.source, l.ranges = make([]int32, local+16), make([]int32, room+16), make([]int64, local*ranks+8)
	l.stats, l.waits = make([]int32, local+16), make([]int64, ranks+8)
	for t := range tokens {
		for h := range hidden {
			l.x[t*hidden+h] = ToBF16(elem(rank, t))
		}
		for i := range k {
			l.index[t*k+i] = int64((t + rank + i*3) % experts)
			l.weights[t*k+i] = 0.5
		}
		if t%5 == 4 {
			l.index[t*k] = -1
		}
	}
	return l
}

func (l *lowLatency) dispatch(phases Phase, fp8 bool) *LLDispatchArgs {
	a := &LLDispatchArgs{
		Phases: phases, NumTokens: int32(l.tokens), NumMaxTokens: int32(l.b), Hidden: int32(l.hidden), NumTopK: int32(l.k),
		NumExperts: int32(l.experts), IndexType: Int64, UseFP8: op.Bool(fp8), X: AddressOf(l.pin, l.x), TopKIdx: AddressOf(l.pin, l.index), TopKWeights: AddressOf(l.pin, l.weights),
		RecvX: AddressOf(l.pin, l.recvX), RecvCount: AddressOf(l.pin, l.count), SrcInfo: AddressOf(l.pin, l.source), LayoutRange: AddressOf(l.pin, l.ranges),
		CumulativeRecvStats: AddressOf(l.pin, l.stats), WaitRecvCostStats: AddressOf(l.pin, l.waits),
	}
	if fp8 {
		a.RecvX, a.RecvXScales = AddressOf(l.pin, l.recv8), AddressOf(l.pin, l.scales)
	}
	return a
}

func (l *lowLatency) combine(phases Phase, flags Flags) *LLCombineArgs {
	return &LLCombineArgs{
		Phases: phases, Flags: flags, NumTokens: int32(l.tokens), NumMaxTokens: int32(l.b), Hidden: int32(l.hidden), NumTopK: int32(l.k),
		NumExperts: int32(l.experts), IndexType: Int64, X: AddressOf(l.pin, l.recvX), TopKIdx: AddressOf(l.pin, l.index), TopKWeights: AddressOf(l.pin, l.weights),
		SrcInfo: AddressOf(l.pin, l.source), LayoutRange: AddressOf(l.pin, l.ranges), CombinedX: AddressOf(l.pin, l.combined), WaitRecvCostStats: AddressOf(l.pin, l.waits),
	}
}

// wantRow is what a row of another rank's token holds, and whether the token names the expert.
func (l *lowLatency) chooses(rank, token, expert int) bool {
	for i := range l.k {
		if i == 0 && token%5 == 4 {
			continue
		}
		if (token+rank+i*3)%l.experts == expert {
			return true
		}
	}
	return false
}

// checkRows compares every expert's rows: by source rank, then by token.
func (l *lowLatency) checkRows(m *member, fp8 bool) {
	local := l.experts / l.ranks
	for e := range local {
		row := 0
		for source := range l.ranks {
			first := row
			for token := range l.tokens {
				if !l.chooses(source, token, m.rank*local+e) {
					continue
				}
				at := (e*l.ranks*l.b + row)
				m.check(l.source[at] == int32(token), "expert %d row %d: token %d, want %d", e, row, l.source[at], token)
				got := FromBF16(l.recvX[at*l.hidden])
				if fp8 {
					got = 448 * l.scales[(e*l.hidden/128)*l.ranks*l.b+row] // the greatest value of a block is 448
				}
				m.check(abs(got-elem(source, token)) < 1e-4*got, "expert %d row %d: %v, want %v", e, row, got, elem(source, token))
				row++
			}
			span := l.ranges[e*l.ranks+source]
			m.check(row == first && span&0xffffffff == 0 || span == int64(first)<<32|int64(row-first), "expert %d from rank %d: range %#x, want %d+%d", e, source, span, first, row-first)
		}
		m.check(int(l.count[e]) == row, "expert %d: %d rows, want %d", e, l.count[e], row)
	}
}

func (l *lowLatency) checkCombined(m *member) {
	for token := range l.tokens {
		want := float32(0)
		for i := range l.k {
			if l.index[token*l.k+i] >= 0 {
				want += 0.5 * elem(m.rank, token)
			}
		}
		for h := range l.hidden {
			got := FromBF16(l.combined[token*l.hidden+h])
			m.check(abs(got-want) <= want/128, "token %d element %d: %v, want %v", token, h, got, want)
		}
	}
}

func abs(f float32) float32 { return max(f, -f) }

// roomFor gives the options of a low-latency buffer.
func roomFor(t testing.TB, ranks, b, hidden, experts int) BufferOptions {
	t.Helper()
	bytes, err := LowLatencySizeHint(int64(b), int64(hidden), int64(ranks), int64(experts))
	if err != nil {
		t.Fatal(err)
	}
	return BufferOptions{NumRDMABytes: bytes, LowLatency: true, NumNVLBytes: 1 << 20}
}

// lowLatencyShape is a shape of low-latency calls.
type lowLatencyShape struct{ ranks, tokens, b, hidden, k, perRank int }

func (c lowLatencyShape) room(t testing.TB) BufferOptions {
	return roomFor(t, c.ranks, c.b, c.hidden, c.perRank*c.ranks)
}

func TestLowLatencyRoundTrips(t *testing.T) {
	for _, c := range []lowLatencyShape{{1, 3, 4, 128, 1, 2}, {2, 7, 8, 512, 2, 3}, {4, 16, 16, 256, 4, 2}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			onRanks(t, c.ranks, c.room(t), func(m *member) { m.lowLatencyRounds(c, 6) })
		})
	}
}

// lowLatencyRounds goes there and back in BF16, and there in FP8 in between.
func (m *member) lowLatencyRounds(c lowLatencyShape, rounds int) {
	l := newLowLatency(&m.pin, m.rank, c.ranks, c.tokens, c.b, c.hidden, c.k, c.perRank*c.ranks)
	for round := range rounds {
		clear(l.combined)
		fp8 := round%2 == 1
		m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, fp8), &Call{}))
		l.checkRows(m, fp8)
		if fp8 {
			continue
		}
		m.must(m.LowLatencyCombine(l.combine(SendRecv, 0), &Call{}))
		l.checkCombined(m)
	}
	m.check(l.stats[0] == int32(rounds)*l.count[0], "cumulative statistics %d of %d a call", l.stats[0], l.count[0])
}

// Two micro-batches in turn, each in halves, as inference engines interleave them.
func TestLowLatencyHalves(t *testing.T) {
	const ranks, tokens, hidden, k, experts = 3, 6, 256, 2, 6
	onRanks(t, ranks, roomFor(t, ranks, tokens, hidden, experts), func(m *member) { m.lowLatencyHalves(tokens, hidden, k, experts) })
}

func (m *member) lowLatencyHalves(tokens, hidden, k, experts int) {
	ranks := m.size
	a := newLowLatency(&m.pin, m.rank, ranks, tokens, tokens, hidden, k, experts)
	b := newLowLatency(&m.pin, m.rank, ranks, tokens, tokens, hidden, k, experts)
	for range 4 {
		sendA, sendB := a.dispatch(Send, false), b.dispatch(Send, false)
		m.must(m.LowLatencyDispatch(sendA, &Call{}))
		m.must(m.LowLatencyDispatch(sendB, &Call{}))
		third := a.dispatch(Send, false)
		m.check(status.CodeOf(m.LowLatencyDispatch(third, &Call{})) == status.InvalidState, "a third send is taken")
		for i, half := range []*LLDispatchArgs{sendA, sendB} {
			half.Phases = Recv
			m.must(m.LowLatencyDispatch(half, &Call{}))
			[]*lowLatency{a, b}[i].checkRows(m, false)
		}
		combineA, combineB := a.combine(Send, 0), b.combine(Send, LLZeroCopy)
		m.must(m.LowLatencyCombine(combineA, &Call{}))
		b.writeZeroCopy(m)
		m.must(m.LowLatencyCombine(combineB, &Call{}))
		for i, half := range []*LLCombineArgs{combineA, combineB} {
			half.Phases = Recv
			m.must(m.LowLatencyCombine(half, &Call{}))
			[]*lowLatency{a, b}[i].checkCombined(m)
		}
	}
}

// writeZeroCopy moves the rows to where the next combine reads them and spoils the others.
func (l *lowLatency) writeZeroCopy(m *member) {
	at, stride, err := m.NextCombineBuffer(int32(l.b), int32(l.hidden), int32(l.experts))
	m.must(err)
	rows := l.experts / l.ranks * l.ranks * l.b
	for row := range rows {
		to := memoryAt[uint16](at+uintptr(row)*uintptr(stride), l.hidden)
		copy(to, l.recvX[row*l.hidden:])
	}
	clear(l.recvX)
}

func TestMasks(t *testing.T) {
	const ranks, tokens, hidden, k, experts = 3, 6, 128, 2, 6
	o := roomFor(t, ranks, tokens, hidden, experts)
	o.Shrink = true
	onRanks(t, ranks, o, func(m *member) {
		masks := make([]int32, 16)
		query := func() []int32 {
			m.must(m.QueryMask(address(m, masks), &Call{}))
			return masks[:ranks]
		}
		m.check(fmt.Sprint(query()) == "[0 0 0]", "masks %v", masks)
		if m.rank != 2 { // ranks 0 and 1 go on without rank 2, which does nothing
			m.must(m.UpdateMask(2, true, &Call{}))
			m.check(fmt.Sprint(query()) == "[0 0 1]", "masks %v", masks)
			l := newLowLatency(&m.pin, m.rank, ranks, tokens, tokens, hidden, k, experts)
			m.must(m.LowLatencyDispatch(l.dispatch(SendRecv, false), &Call{}))
			for e := range experts / ranks {
				m.check(l.ranges[e*ranks+2]&0xffffffff == 0, "expert %d has rows of the masked rank", e)
			}
			m.must(m.LowLatencyCombine(l.combine(SendRecv, 0), &Call{}))
		}
		m.must(m.CleanMask(&Call{}))
		m.check(fmt.Sprint(query()) == "[0 0 0]", "masks %v", masks)
		m.check(status.CodeOf(m.UpdateMask(3, true, &Call{})) == status.InvalidArgument, "a rank that is none")
	})
}

// lowLatency is what a rank's process does of it.
func (p *player) lowLatency(what string) error {
	var pin runtime.Pinner
	defer pin.Unpin()
	l := newLowLatency(&pin, p.rank, p.size, 5, 8, 128, 2, 2*p.size)
	if what == "roundtrip" {
		if err := p.LowLatencyDispatch(l.dispatch(SendRecv, true), &Call{}); err != nil {
			return err
		}
		return p.LowLatencyCombine(l.combine(SendRecv, 0), &Call{})
	}
	half := l.dispatch(Send, false)
	if err := p.LowLatencyDispatch(half, &Call{}); err != nil {
		return err
	}
	half.Phases = Recv
	return p.LowLatencyDispatch(half, &Call{})
}

// The CPU engine takes the settings, says that they change nothing, and goes on.
func TestLowLatencySettingsOnTheCPU(t *testing.T) {
	needEngine(t)
	for _, c := range []struct{ name, value, want string }{
		{"DEEPEP_LL_TRANSFER", "copy", "DEEPEP_LL_TRANSFER=copy changes nothing: the engine cpu has no copy engines"},
		{"DEEPEP_LL_TRANSFER", "stream", "DEEPEP_LL_TRANSFER=stream changes nothing: the engine cpu has no streams"},
		{"DEEPEP_LL_SMS", "16", "DEEPEP_LL_SMS changes nothing: the engine cpu has no SMs"},
	} {
		t.Run(c.name+"="+c.value, func(t *testing.T) { lowLatencySettingOnTheCPU(t, c.name, c.value, c.want) })
	}
}

func lowLatencySettingOnTheCPU(t *testing.T, name, value, want string) {
	t.Setenv(name, value)
	warnings := collectWarnings(t)
	onRanks(t, 2, BufferOptions{Engine: EngineCPU, LowLatency: true, NumRDMABytes: 1 << 22}, func(m *member) {
		m.check(!m.Info().LLCopies && !m.Info().LLOnStream, "the CPU engine has neither")
		l := newLowLatency(&m.pin, m.rank, m.size, 3, 4, 128, 2, 4)
		a := l.dispatch(Send, false)
		m.must(m.LowLatencyDispatch(a, &Call{}))
		a.Phases = Recv
		m.must(m.LowLatencyDispatch(a, &Call{}))
	})
	if got := warnings(); len(got) != 1 || !strings.Contains(got[0], want) {
		t.Errorf("got %q, want %q once", got, want)
	}
}

// Likewise the setting for normal mode.
func TestNormalTransferOnTheCPU(t *testing.T) {
	needEngine(t)
	t.Setenv("DEEPEP_NORMAL_TRANSFER", "copy")
	warnings := collectWarnings(t)
	onRanks(t, 2, BufferOptions{Engine: EngineCPU, NumNVLBytes: 1 << 22}, func(m *member) {
		m.check(!m.Info().NormalCopies, "the CPU engine has no copy engines")
	})
	const want = "DEEPEP_NORMAL_TRANSFER=copy changes nothing: the engine cpu has no copy engines"
	if got := warnings(); len(got) != 1 || !strings.Contains(got[0], want) {
		t.Errorf("got %q, want %q once", got, want)
	}
}
