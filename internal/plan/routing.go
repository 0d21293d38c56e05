package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

// maxRoutedTopK is how many choices a warp looks at together.
const maxRoutedTopK = 32

// Routing is the shape of what a handle keeps of a routing.
type Routing struct {
	Kind                           op.Routing
	NumTokens, NumTopK, NumExperts int32
	IndexType                      op.Type
	NumMaxTokens, ExpertAlignment  int32
}

// NotifyRouting is the shape in a notify's arguments.
func NotifyRouting(a *op.NotifyArgs) Routing {
	return Routing{a.Routing, a.NumTokens, a.NumTopK, a.NumExperts, a.IndexType, a.NumMaxTokens, a.ExpertAlignment}
}

// HandleRouting is the shape in a handle.
func HandleRouting(h *op.Handle) Routing {
	return Routing{h.Routing, h.NumTokens, h.NumTopK, h.NumExperts, h.IndexType, h.NumMaxTokens, h.ExpertAlignment}
}

// Expanded reports whether there is a row for each choice.
func (r Routing) Expanded() bool { return r.Kind == op.RoutingExpanded }

// Check refuses shapes that no routing has; nothing but the kind is looked at without one.
func (r Routing) Check(t Topology) error {
	switch r.Kind {
	case op.RoutingNone:
		return nil
	case op.RoutingPlain, op.RoutingExpanded:
	default:
		return status.InvalidArg("routing", int32(r.Kind), "0 (none), 1 (plain) or 2 (expanded)")
	}
	if r.NumTopK < 1 || r.NumTopK > maxRoutedTopK {
		return status.InvalidArg("num_topk", r.NumTopK, fmt.Sprintf("1 to %d with a routing", maxRoutedTopK))
	}
	if err := checkExperts(r.NumExperts, t); err != nil {
		return err
	}
	if r.NumExperts > abi.MaxRoutedExperts {
		return status.InvalidArg("num_experts", r.NumExperts, fmt.Sprintf("at most %d with a routing", abi.MaxRoutedExperts))
	}
	if err := checkIndexType(r.IndexType); err != nil {
		return err
	}
	if limit := maxInt32 / max(int64(t.Ranks), int64(r.NumTopK)); r.NumMaxTokens < r.NumTokens || int64(r.NumMaxTokens) > int64(limit) {
		return status.InvalidArg("num_max_tokens", r.NumMaxTokens, fmt.Sprintf("num_tokens = %d to %d", r.NumTokens, limit))
	}
	return CheckAlignment(r.ExpertAlignment)
}
