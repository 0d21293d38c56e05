package status

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Error is an error with a kind. Msg is what happened, Err what caused it; either may be empty.
type Error struct {
	Code Code
	Msg  string
	Err  error
}

// Sentinels, one per kind, for errors.Is. They carry no text of their own.
var (
	ErrInvalidArgument = &Error{Code: InvalidArgument}
	ErrInvalidState    = &Error{Code: InvalidState}
	ErrUnsupported     = &Error{Code: Unsupported}
	ErrOutOfMemory     = &Error{Code: OutOfMemory}
	ErrSystem          = &Error{Code: System}
	ErrTimeout         = &Error{Code: Timeout}
	ErrPeerDead        = &Error{Code: PeerDead}
	ErrMismatch        = &Error{Code: Mismatch}
	ErrAborted         = &Error{Code: Aborted}
	ErrNotFound        = &Error{Code: NotFound}
	ErrVersion         = &Error{Code: Version}
	ErrFork            = &Error{Code: Fork}
	ErrInterrupted     = &Error{Code: Interrupted}
	ErrDevice          = &Error{Code: Device}
	ErrInternal        = &Error{Code: Internal}
)

// Error gives the message, then the cause. A bare sentinel gives its kind.
func (e *Error) Error() string {
	switch {
	case e.Err == nil && e.Msg == "":
		return e.Code.String()
	case e.Err == nil:
		return e.Msg
	case e.Msg == "":
		return e.Err.Error()
	}
	return e.Msg + ": " + e.Err.Error()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is says whether target is the sentinel of this error's kind.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Msg == "" && t.Err == nil && t.Code == e.Code
}

// Errorf makes an error of a kind; %w works as in fmt.Errorf. The kind given here wins over that of a wrapped error.
func Errorf(code Code, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	switch err.(type) {
	case interface{ Unwrap() error }, interface{ Unwrap() []error }:
		return &Error{Code: code, Err: err}
	}
	return &Error{Code: code, Msg: err.Error()}
}

// InvalidArg is the error of every argument check: which argument, what came, what is allowed.
func InvalidArg(name string, given any, allowed string) error {
	return Errorf(InvalidArgument, "argument %s: got %v, allowed %s", name, given, allowed)
}

// Cause is the cause of a context's end, with a text that a user of the library understands in place of Go's ("context
// deadline exceeded"). errors.Is finds the cause as before.
func Cause(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != context.DeadlineExceeded { // one that is wrapped has a text of its own
		return cause
	}
	return pastDeadline{}
}

type pastDeadline struct{}

func (pastDeadline) Error() string { return "not done within its time limit" }
func (pastDeadline) Unwrap() error { return context.DeadlineExceeded }

// CodeOf finds the kind of an error: its own where it has one, else what the standard library's error stands for.
// nil is OK. An error that nobody classified is Internal, so that it is noticed.
func CodeOf(err error) Code {
	var own *Error
	var errno syscall.Errno
	switch {
	case err == nil:
		return OK
	case errors.As(err, &own):
		return own.Code
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, context.Canceled):
		return Interrupted
	case errors.As(err, &errno):
		if errno == syscall.ENOMEM {
			return OutOfMemory
		}
		return System
	}
	return Internal
}
