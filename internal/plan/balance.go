package plan

import (
	"fmt"
	"math"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

const (
	// MaxBalanced is the number of tensors in a BalanceArgs.
	MaxBalanced = len(op.BalanceArgs{}.Copies)

	balanceRow  = 32 << 10 // an expert's bytes travel as equal rows of at most so many
	balanceUnit = 16       // and of a multiple of so many

	balanceRoom  = 128 << 20 // for copies of gradients, as long as a row of each fits
	balanceAlign = 256       // of the parts of a workspace
)

// Balance is the shape of a call that copies experts to other ranks, or adds up what was made of the copies.
type Balance struct {
	NumSlots, NumLocal int32
	Reduce             bool
}

// BalanceTensor is how a tensor travels: in dispatches, each of which has a part of the slots, or with Reduce of the
// rows.
type BalanceTensor struct {
	RowBytes  uint64
	NumRows   int32 // of an expert
	NumTokens int32 // T
	NumTopK   int32 // K of a whole part
	Part      int32 // slots or rows in a dispatch; the last has the rest
	Parts     int32
	// Where the parts of the workspace begin; Bytes is their end.
	Matrix, Head, Index, Slot, Weights, Arrived, Rows, Bytes uint64
}

// Check refuses what no call has.
func (b Balance) Check(a *op.BalanceArgs, t Topology) error {
	most := abi.MaxBalancedSlots / t.Ranks
	switch {
	case t.Ranks > maxRoutedTopK:
		return status.Errorf(status.Unsupported, "copies of experts: the group has %d ranks, allowed at most %d", t.Ranks, maxRoutedTopK)
	case a.NumTensors < 1 || int(a.NumTensors) > MaxBalanced:
		return status.InvalidArg("num_tensors", a.NumTensors, fmt.Sprintf("1 to %d", MaxBalanced))
	case b.NumSlots < 1 || int(b.NumSlots) > most:
		return status.InvalidArg("num_slots", b.NumSlots, fmt.Sprintf("1 to %d", most))
	case b.NumLocal < 1 || int(b.NumLocal)*t.Ranks > maxExperts:
		return status.InvalidArg("num_local_experts", b.NumLocal, fmt.Sprintf("1 to %d", maxExperts/t.Ranks))
	}
	return nil
}

// Tensor says how a tensor of so many bytes an expert travels. fits: whether the buffer can stage a row.
func (b Balance) Tensor(number int, bytes uint64, t Topology, fits func(row uint64) bool) (BalanceTensor, error) {
	name := fmt.Sprintf("expert_bytes[%d]", number)
	if bytes == 0 || bytes%balanceUnit != 0 {
		return BalanceTensor{}, status.InvalidArg(name, bytes, fmt.Sprintf("a multiple of %d", balanceUnit))
	}
	d := BalanceTensor{RowBytes: balanceUnit}
	units := bytes / balanceUnit
	for n := uint64(balanceRow / balanceUnit); n > 1; n-- {
		if units%n == 0 && fits(n*balanceUnit) {
			d.RowBytes = n * balanceUnit
			break
		}
	}
	ranks, owners := uint64(t.Ranks), uint64(b.NumLocal)
	if b.Reduce {
		owners = uint64(b.NumSlots)
	}
	rows := bytes / d.RowBytes
	if limit := uint64(min(maxTokens, maxInt32/t.Ranks)); rows > limit || rows*max(owners, uint64(b.NumSlots)) > limit {
		return BalanceTensor{}, status.InvalidArg(name, bytes, fmt.Sprintf(
			"fewer, or with a larger divisor: a rank has at most %d rows of %d bytes", limit, d.RowBytes))
	}
	d.NumRows, d.NumTokens = int32(rows), int32(rows*owners)
	copies, whole := uint64(b.NumSlots)*ranks, b.NumSlots // of all ranks; what is divided into parts
	if b.Reduce {
		d.NumTopK, whole = 1, d.NumRows
		d.Part = int32(min(rows, max(1, balanceRoom/(copies*d.RowBytes)), math.MaxInt32/copies))
	} else {
		d.Part = min(b.NumSlots, maxRoutedTopK/int32(t.Ranks))
		d.NumTopK = d.Part * int32(t.Ranks)
	}
	d.Parts = (whole + d.Part - 1) / d.Part
	next := func(bytes uint64) (at uint64) {
		at, d.Bytes = d.Bytes, d.Bytes+align(bytes, balanceAlign)
		return at
	}
	tokens, choices := uint64(d.NumTokens), uint64(d.NumTokens)*uint64(d.NumTopK)
	d.Matrix, d.Head = next(4*ranks*ranks), next(4*tokens*ranks)
	d.Index, d.Slot, d.Weights = next(4*choices), next(4*choices), next(4*choices)
	if b.Reduce {
		arriving := copies * uint64(d.Part)
		d.Arrived, d.Rows = next(4*arriving), next(arriving*d.RowBytes)
	}
	return d, nil
}
