package plan

import (
	"testing"

	"github.com/deepep-go/deepep/core/op"
)

func room(ranks int, change func(*Room)) *Room {
	r := &Room{
		Topology: Topology{Ranks: ranks, Peers: 8}, Limits: &Limits{TopK: 32, LocalExperts: 512}, NVLBytes: 1 << 30, RDMABytes: 1 << 30, MaxBytes: 1 << 30,
		RowFits: func(uint64) bool { return true }, SlotFits: func(int32, int32, int32) bool { return true },
	}
	if change != nil {
		change(r)
	}
	return r
}

func TestNormalShapeOfARoom(t *testing.T) {
	for name, c := range map[string]struct {
		known op.Shape
		room  *Room
		want  op.Shape
		none  bool
	}{
		"nothing known":   {op.Shape{}, room(4, nil), op.Shape{NumTokens: 4096, Hidden: 7168, NumTopK: 8, NumExperts: 256}, false},
		"three ranks":     {op.Shape{}, room(3, nil), op.Shape{NumTokens: 4096, Hidden: 7168, NumTopK: 8, NumExperts: 255}, false},
		"many ranks":      {op.Shape{}, room(320, nil), op.Shape{NumTokens: 4096, Hidden: 7168, NumTopK: 8, NumExperts: 320}, false},
		"small rows":      {op.Shape{}, room(4, func(r *Room) { r.RowFits = func(n uint64) bool { return n <= 4000 } }), op.Shape{NumTokens: 4096, Hidden: 1024, NumTopK: 8, NumExperts: 256}, false},
		"no row":          {op.Shape{}, room(4, func(r *Room) { r.RowFits = func(uint64) bool { return false } }), op.Shape{NumTopK: 8, NumExperts: 256}, true},
		"a small region":  {op.Shape{}, room(4, func(r *Room) { r.NVLBytes = 100 * 14336 }), op.Shape{NumTokens: 100, Hidden: 7168, NumTopK: 8, NumExperts: 256}, false},
		"little memory":   {op.Shape{}, room(4, func(r *Room) { r.MaxBytes = 87000 * 10 }), op.Shape{NumTokens: 10, Hidden: 7168, NumTopK: 8, NumExperts: 256}, false},
		"hidden is known": {op.Shape{Hidden: 512, NumTokens: 9}, room(4, nil), op.Shape{NumTokens: 9, Hidden: 512, NumTopK: 8, NumExperts: 256}, false},
		"few experts":     {op.Shape{NumExperts: 4}, room(4, nil), op.Shape{NumTokens: 4096, Hidden: 7168, NumTopK: 4, NumExperts: 4}, false},
		"a narrow library": {op.Shape{}, room(2, func(r *Room) { r.Limits = &Limits{TopK: 2, LocalExperts: 3} }),
			op.Shape{NumTokens: 4096, Hidden: 7168, NumTopK: 2, NumExperts: 6}, false},
	} {
		got, ok := c.room.Normal(c.known)
		if got != c.want || ok == c.none {
			t.Errorf("%s: %+v %v, want %+v", name, got, ok, c.want)
		}
		if need := c.room.normalBytes(got, uint64(got.NumTokens)); ok && need > c.room.MaxBytes {
			t.Errorf("%s: %d bytes", name, need)
		}
	}
}

// A region of a hint's bytes is taken for the hint's shape.
func TestLowLatencyShapeOfARoom(t *testing.T) {
	hint := must[uint64](t)(LowLatencyBytes(128, 7168, 4, 256, nil))
	got, ok := room(4, func(r *Room) { r.RDMABytes = hint }).LowLatency(op.Shape{})
	if want := (op.Shape{NumTokens: 128, Hidden: 7168, NumTopK: 8, NumExperts: 256}); got != want || !ok {
		t.Errorf("%+v %v, want %+v", got, ok, want)
	}
	got, ok = room(4, func(r *Room) { r.RDMABytes, r.MaxBytes = hint, 1<<28 }).LowLatency(op.Shape{})
	if !ok || got.NumTokens >= 128 || got.NumTokens < 60 {
		t.Errorf("with less memory: %+v %v", got, ok)
	}
	if got, ok = room(4, func(r *Room) { r.RDMABytes = 1 << 16 }).LowLatency(op.Shape{}); !ok || got.Hidden > 64 {
		t.Errorf("a small region: %+v %v", got, ok)
	}
	if _, ok = room(4, func(r *Room) { r.RDMABytes = 64 }).LowLatency(op.Shape{}); ok {
		t.Error("a region without room has a shape")
	}
	refuses := room(4, func(r *Room) { r.SlotFits = func(n, _, _ int32) bool { return n <= 100 } })
	if got, ok = refuses.LowLatency(op.Shape{Hidden: 512}); !ok || got.NumTokens != 100 {
		t.Errorf("a library with room for 100: %+v %v", got, ok)
	}
	if _, ok = refuses.LowLatency(op.Shape{NumTokens: 101, Hidden: 512}); ok {
		t.Error("101 tokens in a library with room for 100")
	}
}

func TestWarmupTakesWhatIsKnownBest(t *testing.T) {
	told := op.Shape{NumTokens: 20, Hidden: 256, NumTopK: 3}
	hint := op.Shape{NumTokens: 30, Hidden: 512, NumExperts: 12}
	both := Modes{Normal: true, LowLatency: true}
	w := NewWarmup(&op.WarmupOptions{}, told, op.Shape{Hidden: 1024}, hint, both, room(4, nil))
	if w.Normal != (op.Shape{NumTokens: 20, Hidden: 256, NumTopK: 3, NumExperts: 256}) || w.NormalFrom != op.ShapeRegion {
		t.Errorf("%+v", w)
	}
	if w.LowLatency != (op.Shape{NumTokens: 20, Hidden: 256, NumTopK: 3, NumExperts: 12}) || w.LowLatencyFrom != op.ShapeHint {
		t.Errorf("%+v", w)
	}
	w = NewWarmup(&op.WarmupOptions{NumExperts: 8}, told, op.Shape{}, hint, both, room(4, nil))
	if w.NormalFrom != op.ShapeOptions || w.Normal.NumExperts != 8 || w.LowLatencyFrom != op.ShapeNone {
		t.Errorf("%+v", w)
	}
	if w = NewWarmup(&op.WarmupOptions{}, told, op.Shape{}, hint, Modes{LowLatency: true}, room(4, nil)); w.NormalFrom != op.ShapeNone || w.LowLatencyFrom == op.ShapeNone {
		t.Errorf("%+v", w)
	}
	if w.MaxMS != DefaultWarmupMS || w.Given == NewWarmup(&op.WarmupOptions{MaxMS: 5}, told, op.Shape{}, hint, both, room(4, nil)).Given {
		t.Errorf("%+v", w)
	}
	refused(t, "max_bytes", room(4, nil).CheckBytes(&w, 1000), "max_bytes")
	if err := room(4, nil).CheckBytes(&w, 0); err != nil {
		t.Error(err)
	}
}

func TestWarmupTokens(t *testing.T) {
	if all := WarmupTokens(512, true); len(all) != 1 || all[0] != 512 {
		t.Error(all)
	}
	for _, most := range []int32{1, 64, 65, 512, 4096} {
		all := WarmupTokens(most, false)
		if all[len(all)-1] != most {
			t.Errorf("%d: %v", most, all)
		}
		for i := range all[1:] {
			if all[i+1] <= all[i] || all[i+1] > WarmupGrowth*all[i] {
				t.Errorf("%d: %v", most, all)
			}
		}
	}
}

func TestPreinit(t *testing.T) {
	const page = PageBytes
	r := NewRegions(2*page, 100*page, 10*page, 20*page)
	wire := []uint64{0, 4 * page, 40 * page} // 4, 36 and 60 pages
	for name, c := range map[string]struct {
		budget uint64
		want   []Region
	}{
		"nothing":    {0, nil},
		"control":    {page, []Region{{0, page}}},
		"some":       {26 * page, []Region{{0, 2 * page}, {2 * page, 4 * page}, {6 * page, 10 * page}, {42 * page, 10 * page}}},
		"all wire":   {102 * page, []Region{{0, 2 * page}, {2 * page, 4 * page}, {6 * page, 36 * page}, {42 * page, 60 * page}}},
		"everything": {1 << 40, []Region{{0, 2 * page}, {2 * page, 4 * page}, {6 * page, 36 * page}, {42 * page, 60 * page}, {112 * page, 20 * page}, {102 * page, 10 * page}}},
	} {
		got := Preinit(&r, wire, c.budget)
		if len(got) != len(c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
			continue
		}
		for i := range got {
			if got[i] != c.want[i] {
				t.Errorf("%s: %v, want %v", name, got, c.want)
			}
		}
	}
}
