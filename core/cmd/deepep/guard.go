package main

import (
	"runtime/debug"

	"github.com/deepep-go/deepep/internal/status"
)

// guarded returns a panic of f as an error, so that the command's other goroutines and its ranks' processes end in
// order.
func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.Errorf(status.Internal, "panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}
