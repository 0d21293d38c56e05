package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// LowLatency is the shape of a low-latency call.
type LowLatency struct {
	NumTokens, NumMaxTokens, Hidden, NumTopK, NumExperts int32
	IndexType                                            op.Type
	Flags                                                op.Flags
	FP8                                                  bool // dispatch casts
	FP4                                                  op.FP4
}

// LocalExperts is the number of experts of one rank.
func (l LowLatency) LocalExperts(t Topology) int { return int(l.NumExperts) / t.Ranks }

// CheckDispatch refuses shapes that a low-latency dispatch of the library cannot have.
func (l LowLatency) CheckDispatch(t Topology, limits *Limits) error {
	if err := l.check(t, limits); err != nil {
		return err
	}
	switch {
	case l.Flags&^(op.LLRoundScale|op.LLUE8M0) != 0:
		return status.InvalidArg("flags", l.Flags, "a sum of ROUND_SCALE = 1 and UE8M0 = 2")
	case l.FP4 < 0 || l.FP4 > op.FP4Cast:
		return status.InvalidArg("fp4", l.FP4, "0, PACKED = 1 or CAST = 2")
	case l.FP4 != 0 && l.Flags != 0:
		return status.InvalidArg("flags", l.Flags, "0 with FP4 rows")
	case l.FP4 != 0 && l.Hidden%scaleChannels != 0:
		return status.InvalidArg("hidden", l.Hidden, "a multiple of 128 with FP4 rows")
	case l.Flags != 0 && !l.FP8:
		return status.InvalidArg("flags", l.Flags, "0 without use_fp8: there are no scales to round or pack")
	case l.Flags == op.LLUE8M0:
		return status.InvalidArg("use_ue8m0", true, "only together with round_scale: a UE8M0 scale is a power of two")
	case l.FP8 && l.Hidden%scaleChannels != 0:
		return status.InvalidArg("hidden", l.Hidden, "a multiple of 128 with use_fp8: one scale for 128 channels")
	case l.Flags&op.LLUE8M0 != 0 && l.Hidden%(4*scaleChannels) != 0:
		return status.InvalidArg("hidden", l.Hidden, "a multiple of 512 with use_ue8m0: four scales in a word")
	}
	return nil
}

// CheckCombine refuses shapes that a low-latency combine of the library cannot have.
func (l LowLatency) CheckCombine(t Topology, limits *Limits) error {
	if err := l.check(t, limits); err != nil {
		return err
	}
	switch {
	case l.Flags&^(op.LLLogFMT|op.LLZeroCopy|op.LLUnreduced) != 0:
		return status.InvalidArg("flags", l.Flags, "a sum of LOGFMT = 4, ZERO_COPY = 8 and UNREDUCED = 16")
	case l.Flags&op.LLLogFMT != 0 && l.Flags&op.LLZeroCopy != 0:
		return status.InvalidArg("zero_copy", true, "not together with use_logfmt")
	case l.Flags&op.LLLogFMT != 0 && l.Hidden%scaleChannels != 0:
		return status.InvalidArg("hidden", l.Hidden, "a multiple of 128 with use_logfmt")
	}
	return nil
}

func (l LowLatency) check(t Topology, limits *Limits) error {
	if err := CheckSlots(l.NumMaxTokens, l.Hidden, l.NumExperts, t, limits); err != nil {
		return err
	}
	if l.NumTokens < 0 || l.NumTokens > l.NumMaxTokens {
		return status.InvalidArg("num_tokens", l.NumTokens,
			fmt.Sprintf("0 to num_max_dispatch_tokens_per_rank = %d", l.NumMaxTokens))
	}
	if limit, whose := limits.topK(); l.NumTopK < 1 || int(l.NumTopK) > limit {
		return status.InvalidArg("num_topk", l.NumTopK, fmt.Sprintf("1 to %d%s", limit, whose.with()))
	}
	return checkIndexType(l.IndexType)
}

// CheckSlots checks the three sizes that decide where low-latency data lies.
func CheckSlots(numMaxTokens, hidden, experts int32, t Topology, limits *Limits) error {
	limit, whose := limits.tokens(min(maxTokens, maxInt32/t.Ranks))
	if numMaxTokens < 1 || int(numMaxTokens) > limit {
		return status.InvalidArg("num_max_dispatch_tokens_per_rank", numMaxTokens, fmt.Sprintf("1 to %d%s", limit, whose.with()))
	}
	if err := checkHidden(int64(hidden), 2); err != nil {
		return err
	}
	if err := checkExperts(experts, t); err != nil {
		return err
	}
	return limits.checkExperts(int64(experts), t.Ranks)
}
