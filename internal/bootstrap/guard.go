package bootstrap

import "github.com/deepep-go/deepep/internal/status"

// guard runs f and turns a panic into an error, since an unrecovered one in any goroutine would end the host program.
func guard(name string, failed func(error), f func()) {
	defer func() {
		if p := recover(); p != nil && failed != nil {
			failed(status.Errorf(status.Internal, "%s: panic: %v", name, p))
		}
	}()
	f()
}

// guarded is a task of an errgroup: f, whose panic becomes the task's error.
func guarded(name string, f func() error) func() error {
	return func() (err error) {
		guard(name, func(panicked error) { err = panicked }, func() { err = f() })
		return err
	}
}
