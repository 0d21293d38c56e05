package engine

import (
	"testing"

	"github.com/deepep-go/deepep/internal/abi"
)

func TestFieldValue(t *testing.T) {
	for _, c := range []struct {
		op, field uint32
		value     int64
		want      string
	}{
		{abi.OpDispatch, abi.FieldOperation, abi.OpDispatch, "dispatch"},
		{abi.OpDispatch, abi.FieldOperation, cachedCall + abi.OpDispatch, "cached dispatch"},
		{abi.OpCombine, abi.FieldOperation, abi.OpCombine, "combine"},
		{abi.OpDispatch, abi.FieldFormat, 1, "topk_weights"},
		{abi.OpDispatch, abi.FieldFormat, 0, "no topk_weights"},
		{abi.OpLLDispatch, abi.FieldFormat, 0, "use_fp8=False"},
		{abi.OpLLDispatch, abi.FieldFormat, abi.FormatFP8 | (abi.LLRoundScale|abi.LLUE8M0)<<8, "use_fp8=True round_scale=True use_ue8m0=True"},
		{abi.OpLLDispatch, abi.FieldFormat, abi.FormatFP4, "FP4 rows"},
		{abi.OpLLDispatch, abi.FieldFormat, abi.FormatNVFP4 | abi.FormatWeights, "use_nvfp4=True topk_weights"},
		{abi.OpLLDispatch, abi.FieldFormat, abi.FormatBF16, "use_fp8=False"},
		{abi.OpLLDispatch, abi.FieldFormat, abi.FormatFP8 | abi.FormatWeights, "use_fp8=True topk_weights"},
		{abi.OpLLCombine, abi.FieldFormat, abi.LLLogFMT, "use_logfmt=True"},
		{abi.OpNotify, abi.FieldNumExperts, 8, "8"},
		{abi.OpNotify, abi.FieldRouting, abi.RoutingPlain, "plain"},
		{abi.OpCombine, abi.FieldRouting, abi.RoutingExpanded | abi.CombineUnreduced<<8, "expanded unreduced"},
		{abi.OpCombine, abi.FieldRouting, abi.RoutingPlain | abi.CombineApart<<8, "plain apart"},
	} {
		if got := fieldValue(c.op, c.field, c.value); got != c.want {
			t.Errorf("fieldValue(%d, %d, %d) = %q, want %q", c.op, c.field, c.value, got, c.want)
		}
	}
}
