package plan

import (
	"fmt"
	"slices"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// What a warm-up takes where nobody has said the shape.
const (
	DefaultWarmupBytes = 1 << 30
	DefaultWarmupMS    = 2000

	mostWarmupTokens  = 4096 // of a rank: the batch of upstream's own programs
	leastWarmupTokens = 64   // what a warm-up begins with where the number of tokens is not known
	// WarmupGrowth is by how much it grows from one size to the next.
	WarmupGrowth = 2
)

// Sizes to try where they are not known: those of well-known models, the largest first.
var (
	likelyHidden  = []int32{7168, 6144, 5120, 4096, 3072, 2048, 1024, 512, 256, 128, 64, 32, 16, 8}
	likelyExperts = int32(256)
	likelyTopK    = int32(8)
)

// Modes are those that a buffer allows.
type Modes struct{ Normal, LowLatency bool }

// Warmup is what a warm-up runs.
type Warmup struct {
	Normal, LowLatency         op.Shape
	NormalFrom, LowLatencyFrom op.ShapeFrom // ShapeNone: the mode is left out
	UseFP8, MaxMS              int32
	Given                      string // the caller's options, which ranks compare
}

// NewWarmup completes what a caller has given by what the buffer's options say, then by the size hints that the process
// asked for, then by the largest that fits.
func NewWarmup(o *op.WarmupOptions, told, hintNormal, hintLowLatency op.Shape, allowed Modes, room *Room) Warmup {
	given := op.Shape{NumTokens: o.NumTokens, Hidden: o.Hidden, NumTopK: o.NumTopK, NumExperts: o.NumExperts}
	givenLL := op.Shape{NumTokens: o.LLNumMaxTokens, Hidden: o.LLHidden, NumTopK: o.LLNumTopK, NumExperts: o.LLNumExperts}
	w := Warmup{UseFP8: o.UseFP8, MaxMS: o.MaxMS, Given: givenText(given, givenLL, o)}
	if w.MaxMS == 0 {
		w.MaxMS = DefaultWarmupMS
	}
	all := given == op.Shape{} && givenLL == op.Shape{}
	if given != (op.Shape{}) || all && allowed.Normal {
		w.Normal, w.NormalFrom = complete(given, told, hintNormal, room.Normal)
	}
	if givenLL != (op.Shape{}) || all && allowed.LowLatency {
		if told.NumTokens != 0 && givenLL.NumTokens == 0 { // a batch of normal mode may be larger than a step of decoding
			if _, fits := room.LowLatency(givenLL.Or(told).Or(hintLowLatency)); !fits {
				told.NumTokens = 0
			}
		}
		w.LowLatency, w.LowLatencyFrom = complete(givenLL, told, hintLowLatency, room.LowLatency)
	}
	return w
}

func givenText(normal, lowLatency op.Shape, o *op.WarmupOptions) string {
	return fmt.Sprintf("normal %+v, low latency %+v, use_fp8 %d, max_ms %d, max_bytes %d", normal, lowLatency, o.UseFP8, o.MaxMS, o.MaxBytes)
}

// complete says where the least certain size is from. A shape of which all was given is not checked here: the calls
// say what is wrong with it.
func complete(given, told, hint op.Shape, largest func(op.Shape) (op.Shape, bool)) (op.Shape, op.ShapeFrom) {
	s := given
	for _, next := range []struct {
		from  op.ShapeFrom
		known op.Shape
	}{{op.ShapeGiven, given}, {op.ShapeOptions, told}, {op.ShapeHint, hint}} {
		if s = s.Or(next.known); s.Complete() {
			return s, next.from
		}
	}
	s, ok := largest(s)
	if !ok && given == (op.Shape{}) {
		return op.Shape{}, op.ShapeNone
	}
	return s, op.ShapeRegion
}

// Room is what bounds the calls of a buffer that a warm-up makes.
type Room struct {
	Topology Topology
	Limits   *Limits
	NVLBytes uint64
	// RDMABytes are compared with the size hint, not with what a call needs: it is the hint that programs ask for.
	RDMABytes uint64
	// RowFits reports whether normal mode can stage rows of so many bytes.
	RowFits func(bytes uint64) bool
	// SlotFits reports whether low-latency calls of so many tokens fit.
	SlotFits func(numMaxTokens, hidden, experts int32) bool
	MaxBytes uint64 // of a warm-up's tensors
}

// Normal completes a shape of normal mode: the largest that fits. The second result is false if no shape does.
func (r *Room) Normal(known op.Shape) (op.Shape, bool) {
	s := r.experts(known)
	if s.Hidden == 0 {
		for _, hidden := range likelyHidden {
			if r.RowFits(2*uint64(hidden) + 4*uint64(s.NumTopK)) {
				s.Hidden = hidden
				break
			}
		}
	}
	if s.Hidden == 0 {
		return s, false
	}
	if s.NumTokens == 0 {
		most := min(mostWarmupTokens, max(leastWarmupTokens, r.NVLBytes/(2*uint64(s.Hidden))), r.MaxBytes/max(1, r.normalBytes(s, 1)))
		s.NumTokens = int32(most)
	}
	return s, s.NumTokens > 0
}

// LowLatency completes a shape of low-latency mode, with B as its number of tokens.
func (r *Room) LowLatency(known op.Shape) (op.Shape, bool) {
	s := r.experts(known)
	hidden := likelyHidden
	if s.Hidden != 0 {
		hidden = []int32{s.Hidden}
	}
	for _, h := range hidden {
		s.Hidden = h
		if known.NumTokens != 0 {
			if r.SlotFits(s.NumTokens, h, s.NumExperts) {
				return s, true
			}
			continue
		}
		if s.NumTokens = r.mostSlots(s); s.NumTokens > 0 {
			return s, true
		}
	}
	return s, false
}

// mostSlots is the largest B that fits: what fits for a B fits for all smaller ones.
func (r *Room) mostSlots(s op.Shape) int32 {
	limit, _ := r.Limits.tokens(mostWarmupTokens)
	low, high := int32(0), int32(limit)
	for low < high {
		middle := low + (high-low+1)/2
		s.NumTokens = middle
		hint, err := LowLatencyBytes(int64(middle), int64(s.Hidden), int64(r.Topology.Ranks), int64(s.NumExperts), r.Limits)
		if err == nil && hint <= r.RDMABytes && r.LowLatencyBytes(s) <= r.MaxBytes && r.SlotFits(middle, s.Hidden, s.NumExperts) {
			low = middle
		} else {
			high = middle - 1
		}
	}
	return low
}

// experts completes E and K.
func (r *Room) experts(s op.Shape) op.Shape {
	ranks := int32(r.Topology.Ranks)
	if s.NumExperts == 0 {
		limit, _ := r.Limits.narrower(maxExperts/r.Topology.Ranks, func(l *Limits) int32 { return l.LocalExperts })
		s.NumExperts = ranks * min(int32(limit), max(1, likelyExperts/ranks))
	}
	if s.NumTopK == 0 {
		limit, _ := r.Limits.topK()
		s.NumTopK = min(likelyTopK, s.NumExperts, int32(limit))
	}
	return s
}

// CheckBytes refuses a limit that the shapes of a warm-up exceed: those that were known are run as they are.
func (r *Room) CheckBytes(w *Warmup, limit uint64) error {
	needed := uint64(0)
	if w.NormalFrom != op.ShapeNone {
		needed = r.normalBytes(w.Normal, uint64(w.Normal.NumTokens))
	}
	if w.LowLatencyFrom != op.ShapeNone {
		needed = max(needed, r.LowLatencyBytes(w.LowLatency))
	}
	if limit > 0 && needed > limit {
		return status.InvalidArg("max_bytes", limit, fmt.Sprintf("0, or at least %d for the shapes that are known", needed))
	}
	return nil
}

// normalBytes are the tensors of a layout, dispatch and combine with even routing.
func (r *Room) normalBytes(s op.Shape, tokens uint64) uint64 {
	ranks, row := uint64(r.Topology.Ranks), 2*uint64(s.Hidden)
	received := min(ranks, uint64(s.NumTopK)) // rows for a token: even routing sends each to so many ranks
	return tokens * (2*row + received*(row+12*uint64(s.NumTopK)+4) + 12*uint64(s.NumTopK) + 5*ranks)
}

// LowLatencyBytes are the tensors of a low-latency dispatch and combine.
func (r *Room) LowLatencyBytes(s op.Shape) uint64 {
	tokens, row := uint64(s.NumTokens), 2*uint64(s.Hidden)
	rows := uint64(s.NumExperts) * tokens // [L, R*B]
	return rows*(row+4+uint64(s.Hidden)/scaleChannels*scaleBytes) + tokens*(2*row+12*uint64(s.NumTopK))
}

// WarmupTokens are the numbers of tokens that a warm-up runs one after the other: all of them at once where the number
// is known, else ever larger ones, as long as there is time.
func WarmupTokens(most int32, known bool) []int32 {
	if known {
		return []int32{most}
	}
	var all []int32
	for n := int32(leastWarmupTokens); n < most; n *= WarmupGrowth {
		all = append(all, n)
	}
	return append(all, most)
}

// Preinit divides a budget of bytes among the parts of a block, each from its beginning: the control region whole, equal
// shares to the parts of the wire region, where what a small part leaves goes to the others, then the regions that
// users view. wireParts are the offsets in the wire region at which its parts begin.
func Preinit(r *Regions, wireParts []uint64, budget uint64) []Region {
	wire := make([]Region, len(wireParts))
	for i, offset := range wireParts {
		end := r.Wire.Bytes
		if i+1 < len(wireParts) {
			end = wireParts[i+1]
		}
		wire[i] = Region{r.Wire.Offset + offset, end - offset}
	}
	var all []Region
	take := func(part Region, share uint64) {
		if part.Bytes = min(part.Bytes, share, budget); part.Bytes > 0 {
			all = append(all, part)
			budget -= part.Bytes
		}
	}
	take(r.Control, budget)
	level := waterLevel(wire, budget)
	for _, part := range wire {
		take(part, level)
	}
	take(r.RDMA, budget)
	take(r.NVL, budget)
	return all
}

// waterLevel is the share of each part if what smaller parts do not need goes to the others; whole pages.
func waterLevel(parts []Region, budget uint64) uint64 {
	sizes := make([]uint64, len(parts))
	for i, p := range parts {
		sizes[i] = p.Bytes
	}
	slices.Sort(sizes)
	for i, size := range sizes {
		if share := budget / uint64(len(sizes)-i); size > share {
			return share / PageBytes * PageBytes
		}
		budget -= size
	}
	return maxBlock
}

const maxBlock = 1 << 47 // the address space of a process
