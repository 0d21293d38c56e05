package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/status"
)

// Limits are a kernel library's own limits for low-latency calls, which may be narrower than the interface's. A limit
// of 0 is none; so is a nil *Limits.
type Limits struct {
	Library      string // file name, for errors
	TopK         int32
	Tokens       int32 // num_max_dispatch_tokens_per_rank
	LocalExperts int32
}

// narrower returns the smaller one of the interface's limit and the library's, and for the latter the library.
func (l *Limits) narrower(most int, own func(*Limits) int32) (limit int, whose *Limits) {
	if l == nil {
		return most, nil
	}
	if n := int(own(l)); n > 0 && n < most {
		return n, l
	}
	return most, nil
}

// with names the library that a limit is of.
func (l *Limits) with() string {
	if l == nil {
		return ""
	}
	return " with " + l.Library
}

func (l *Limits) topK() (int, *Limits) {
	return l.narrower(MaxTopK, func(l *Limits) int32 { return l.TopK })
}

func (l *Limits) tokens(most int) (int, *Limits) {
	return l.narrower(most, func(l *Limits) int32 { return l.Tokens })
}

// checkExperts refuses more experts on a rank than the library has room for.
func (l *Limits) checkExperts(experts int64, ranks int) error {
	limit, whose := l.narrower(maxExperts/ranks, func(l *Limits) int32 { return l.LocalExperts })
	if experts > int64(limit)*int64(ranks) {
		return status.InvalidArg("num_experts", experts,
			fmt.Sprintf("at most %d (%d local experts on each of %d ranks)%s", limit*ranks, limit, ranks, whose.with()))
	}
	return nil
}
