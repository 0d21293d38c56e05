package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// Layout is the shape of a layout call.
type Layout struct {
	NumTokens, NumTopK, NumExperts int32
	IndexType                      op.Type
}

// Check refuses shapes that no layout has.
func (l Layout) Check(t Topology) error {
	if err := checkTokens(l.NumTokens, t); err != nil {
		return err
	}
	if err := checkTopK(l.NumTopK, 1); err != nil {
		return err
	}
	if err := checkExperts(l.NumExperts, t); err != nil {
		return err
	}
	return checkIndexType(l.IndexType)
}

// Rows is the shape of a normal-mode dispatch: what ranks must agree on, and what must be equal in both of its steps.
type Rows struct {
	NumTokens, NumTopK, NumExperts int32
	NumWorstTokens, NumScales      int32
	XType                          op.Type
	Hidden                         int64
}

// NotifyRows is the shape in a notify's arguments.
func NotifyRows(a *op.NotifyArgs) Rows {
	return Rows{a.NumTokens, a.NumTopK, a.NumExperts, a.NumWorstTokens, a.NumScales, a.XType, a.Hidden}
}

// DispatchRows is the shape in a dispatch's arguments. Of a cached one NumTopK, NumExperts and NumWorstTokens are 0; with a
// routing the first two are the handle's, cached or not.
func DispatchRows(a *op.DispatchArgs) Rows {
	if h := a.Handle; h != nil && h.Routing != op.RoutingNone {
		return Rows{a.NumTokens, h.NumTopK, h.NumExperts, a.NumWorstTokens, a.NumScales, a.XType, a.Hidden}
	}
	return Rows{a.NumTokens, a.NumTopK, a.NumExperts, a.NumWorstTokens, a.NumScales, a.XType, a.Hidden}
}

// HiddenBytes is the size of one row of x.
func (r Rows) HiddenBytes() uint64 { return uint64(r.Hidden) * uint64(r.XType.Size()) }

// Check refuses shapes that no dispatch has. Without top-k the number of experts may be 0.
func (r Rows) Check(t Topology) error {
	if err := checkTokens(r.NumTokens, t); err != nil {
		return err
	}
	if err := checkTopK(r.NumTopK, 0); err != nil {
		return err
	}
	if r.NumTopK > 0 || r.NumExperts != 0 {
		if err := checkExperts(r.NumExperts, t); err != nil {
			return err
		}
	}
	switch {
	case r.NumWorstTokens < 0:
		return status.InvalidArg("num_worst_tokens", r.NumWorstTokens, "0 or more")
	case r.NumWorstTokens > 0 && r.NumTopK == 0:
		return status.InvalidArg("num_worst_tokens", r.NumWorstTokens, "0 without topk_idx: rows past the last one are marked by index -1")
	case r.NumScales < 0 || r.NumScales > maxExperts:
		return status.InvalidArg("num_scales", r.NumScales, fmt.Sprintf("0 to %d", maxExperts))
	case r.XType.Size() == 0 || r.XType == op.Int64:
		return status.InvalidArg("x_type", int32(r.XType), "a type of 1, 2 or 4 bytes: 0, 2, 3, 4 or 5")
	}
	return checkHidden(r.Hidden, int64(r.XType.Size()))
}

// CheckAlignment refuses an expert_alignment that cannot be rounded to.
func CheckAlignment(alignment int32) error {
	if alignment < 1 || alignment > maxTokens {
		return status.InvalidArg("expert_alignment", alignment, fmt.Sprintf("1 to %d", maxTokens))
	}
	return nil
}

// Combine is the shape of a normal-mode combine.
type Combine struct {
	NumTokens, NumRecvTokens, NumTopK int32
	Hidden                            int64
}

// Check refuses shapes that no combine has.
func (c Combine) Check(t Topology) error {
	if err := checkTokens(c.NumTokens, t); err != nil {
		return err
	}
	if c.NumRecvTokens < 0 {
		return status.InvalidArg("handle.num_recv_tokens", c.NumRecvTokens, "0 or more")
	}
	if err := checkTopK(c.NumTopK, 0); err != nil {
		return err
	}
	return checkHidden(c.Hidden, 2)
}

func checkTokens(tokens int32, t Topology) error {
	if limit := min(maxTokens, maxInt32/t.Ranks); tokens < 0 || int(tokens) > limit {
		return status.InvalidArg("num_tokens", tokens, fmt.Sprintf("0 to %d", limit))
	}
	return nil
}

func checkIndexType(t op.Type) error {
	if t != op.Int32 && t != op.Int64 {
		return status.InvalidArg("index_type", t, "0 (int32) or 1 (int64)")
	}
	return nil
}

func checkTopK(k, lowest int32) error {
	if k < lowest || k > MaxTopK {
		return status.InvalidArg("num_topk", k, fmt.Sprintf("%d to %d", lowest, MaxTopK))
	}
	return nil
}

func checkExperts(experts int32, t Topology) error {
	if experts < 1 || experts > maxExperts || int(experts)%t.Ranks != 0 {
		return status.InvalidArg("num_experts", experts,
			fmt.Sprintf("a multiple of num_ranks = %d, from %d to %d", t.Ranks, t.Ranks, maxExperts))
	}
	return nil
}

func checkHidden(hidden, itemBytes int64) error {
	if hidden < 1 || hidden > maxHiddenBytes/itemBytes || hidden*itemBytes%16 != 0 {
		return status.InvalidArg("hidden", hidden, fmt.Sprintf(
			"rows of a multiple of 16 bytes, at most %d: %d-byte elements in multiples of %d", maxHiddenBytes, itemBytes, 16/itemBytes))
	}
	return nil
}
