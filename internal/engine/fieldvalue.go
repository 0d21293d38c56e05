package engine

import (
	"strconv"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
)

// cachedCall marks a cached dispatch among the operations that ranks compare.
const cachedCall = 256

// fieldValue writes what a rank has said in a compared field (abi.Field*) of an operation as people read it.
func fieldValue(number, field uint32, value int64) string {
	switch field {
	case abi.FieldOperation:
		name := op.Operation(value % cachedCall).String()
		if value >= cachedCall {
			return "cached " + name
		}
		return name
	case abi.FieldFormat:
		return formatText(number, value)
	case abi.FieldXType:
		return op.Type(value).String()
	case abi.FieldRouting:
		return routingText(value)
	}
	return strconv.FormatInt(value, 10)
}

// routingText: the layout of rows, and above it the flags of a combine.
func routingText(value int64) string {
	names := map[int64]string{abi.RoutingNone: "no routing", abi.RoutingPlain: "plain", abi.RoutingExpanded: "expanded"}
	text := names[value%256]
	if value>>8&abi.CombineUnreduced != 0 {
		text += " unreduced"
	}
	if value>>8&abi.CombineApart != 0 {
		text += " apart"
	}
	return text
}

// formatText: low-latency dispatch has its format, whether weights came, and flags there, low-latency combine flags,
// dispatch whether weights came.
func formatText(number uint32, value int64) string {
	yes := func(on bool, text, otherwise string) string {
		if on {
			return text
		}
		return otherwise
	}
	flags := value >> 8
	switch number {
	case abi.OpLLDispatch:
		texts := map[int64]string{abi.FormatFP8: "use_fp8=True", abi.FormatFP4: "FP4 rows", abi.FormatNVFP4: "use_nvfp4=True"}
		text, known := texts[value&(abi.FormatWeights-1)]
		text = yes(known, text, "use_fp8=False")
		text += yes(value&abi.FormatWeights != 0, " topk_weights", "")
		text += yes(flags&abi.LLRoundScale != 0, " round_scale=True", "")
		return text + yes(flags&abi.LLUE8M0 != 0, " use_ue8m0=True", "")
	case abi.OpLLCombine:
		return yes(value&abi.LLLogFMT != 0, "use_logfmt=True", "use_logfmt=False")
	case abi.OpDispatch:
		return yes(value != 0, "topk_weights", "no topk_weights")
	}
	return strconv.FormatInt(value, 10)
}
