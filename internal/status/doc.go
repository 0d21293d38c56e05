// Package status holds the kinds of error that the whole library knows, which are the codes of include/deepep.h.
//
// An error made here keeps its code through any number of fmt.Errorf("…: %w") hops; CodeOf finds it again, and
// errors.Is(err, status.ErrTimeout) asks for a kind. Values are immutable and may be shared among goroutines.
// The package never logs, and it never turns a foreign error into something milder than it was.
package status
