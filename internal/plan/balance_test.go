package plan

import (
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

func TestBalanceRowsAreTheLongestThatFit(t *testing.T) {
	top := Topology{Ranks: 4, Peers: 4}
	for _, c := range []struct {
		bytes, fits, row uint64
		rows             int32
	}{
		{64 << 20, 1 << 20, 32 << 10, 2048}, {64 << 20, 5000, 4096, 16384}, {16 * 2053, 1 << 20, 16, 2053}, {48, 1 << 20, 48, 1}, {16, 1, 16, 1},
	} {
		d, err := Balance{NumSlots: 3, NumLocal: 2}.Tensor(0, c.bytes, top, func(row uint64) bool { return row <= c.fits })
		if err != nil || d.RowBytes != c.row || d.NumRows != c.rows || d.NumTokens != 2*c.rows || d.NumTopK != 12 || d.Parts != 1 {
			t.Errorf("%d bytes, rows of up to %d: %+v, %v", c.bytes, c.fits, d, err)
		}
	}
}

// Every slot, or row, is in one part, and what arrives by one part has room in the workspace.
func TestBalanceParts(t *testing.T) {
	for _, ranks := range []int{1, 3, 8, 32} {
		top := Topology{Ranks: ranks, Peers: ranks}
		for _, slots := range []int32{1, 5, 40, 128} {
			for _, bytes := range []uint64{16, 64 << 20, 7 * 4096} {
				for _, reduce := range []bool{false, true} {
					d, err := Balance{NumSlots: slots, NumLocal: 2, Reduce: reduce}.Tensor(0, bytes, top, func(uint64) bool { return true })
					if err != nil {
						t.Fatalf("%d ranks, %d slots, %d bytes: %v", ranks, slots, bytes, err)
					}
					whole, most := slots, int32(maxRoutedTopK)
					if reduce {
						whole, most = d.NumRows, 1
						if arrive := uint64(ranks) * uint64(slots) * uint64(d.Part); d.Bytes-d.Rows < arrive*d.RowBytes || d.Rows-d.Arrived < 4*arrive {
							t.Errorf("%+v has no room for %d rows", d, arrive)
						}
						if d.Part > 1 && uint64(d.Part)*uint64(ranks)*uint64(slots)*d.RowBytes > balanceRoom {
							t.Errorf("%+v takes more than %d bytes for copies", d, balanceRoom)
						}
					}
					if d.Part < 1 || (d.Parts-1)*d.Part >= whole || d.Parts*d.Part < whole || d.NumTopK > most || uint64(d.NumRows)*d.RowBytes != bytes {
						t.Errorf("%d ranks, %d slots, %d bytes, reduce %v: %+v", ranks, slots, bytes, reduce, d)
					}
					if d.Head < d.Matrix || d.Index-d.Head < 4*uint64(d.NumTokens)*uint64(ranks) || d.Weights-d.Slot < 4*uint64(d.NumTokens)*uint64(d.NumTopK) {
						t.Errorf("parts of the workspace overlap: %+v", d)
					}
				}
			}
		}
	}
}

func TestBalanceRefuses(t *testing.T) {
	top := Topology{Ranks: 4, Peers: 4}
	good := op.BalanceArgs{NumTensors: 2, NumSlots: 3, NumLocalExperts: 2}
	for name, c := range map[string]struct {
		change func(*op.BalanceArgs)
		top    Topology
		code   status.Code
	}{
		"num_tensors":       {func(a *op.BalanceArgs) { a.NumTensors = 17 }, top, status.InvalidArgument},
		"num_slots":         {func(a *op.BalanceArgs) { a.NumSlots = 1025 }, top, status.InvalidArgument},
		"num_local_experts": {func(a *op.BalanceArgs) { a.NumLocalExperts = 0 }, top, status.InvalidArgument},
		"ranks":             {func(*op.BalanceArgs) {}, Topology{Ranks: 33, Peers: 33}, status.Unsupported},
		"":                  {func(*op.BalanceArgs) {}, top, status.OK},
	} {
		a := good
		c.change(&a)
		err := Balance{NumSlots: a.NumSlots, NumLocal: a.NumLocalExperts}.Check(&a, c.top)
		if status.CodeOf(err) != c.code {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, bytes := range []uint64{0, 8, 1 << 62} {
		if _, err := (Balance{NumSlots: 3, NumLocal: 2}).Tensor(1, bytes, top, func(uint64) bool { return true }); status.CodeOf(err) != status.InvalidArgument {
			t.Errorf("%d bytes: %v", bytes, err)
		}
	}
}
