package core

import (
	"runtime/debug"

	"github.com/deepep-go/deepep/internal/status"
)

// recovered turns a panic of a goroutine into an error. A panic here is a bug of ours, but the host process must live.
func recovered(where string, err *error) {
	if p := recover(); p != nil {
		*err = status.Errorf(status.Internal, "panic in the %s: %v\n%s", where, p, debug.Stack())
	}
}
