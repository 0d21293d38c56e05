package status_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

var sentinels = []*status.Error{
	status.ErrInvalidArgument, status.ErrInvalidState, status.ErrUnsupported, status.ErrOutOfMemory, status.ErrSystem,
	status.ErrTimeout, status.ErrPeerDead, status.ErrMismatch, status.ErrAborted, status.ErrNotFound, status.ErrVersion,
	status.ErrFork, status.ErrInterrupted, status.ErrDevice, status.ErrInternal,
}

func TestSentinelsCoverEveryCodeOnce(t *testing.T) {
	for i, s := range sentinels {
		if want := status.Code(i + 1); s.Code != want {
			t.Errorf("sentinel %d has code %d", i, s.Code)
		}
		if s.Error() != s.Code.String() || strings.HasPrefix(s.Error(), "code ") {
			t.Errorf("code %d has no name: %q", s.Code, s.Error())
		}
	}
	if got := status.Code(99).String(); got != "code 99" {
		t.Errorf("unknown code: %q", got)
	}
}

// The kernel interface repeats the numbers; a drift would turn one failure into another.
func TestCodesEqualTheKernelInterface(t *testing.T) {
	for code, kernels := range map[status.Code]int{
		status.OK: abi.OK, status.InvalidArgument: abi.EINVAL, status.InvalidState: abi.ESTATE, status.Unsupported: abi.EUNSUPPORTED,
		status.OutOfMemory: abi.ENOMEM, status.System: abi.ESYSTEM, status.Timeout: abi.ETIMEOUT, status.PeerDead: abi.EPEERDEAD,
		status.Mismatch: abi.EMISMATCH, status.Aborted: abi.EABORTED, status.NotFound: abi.ENOTFOUND, status.Version: abi.EVERSION,
		status.Device: abi.EDEVICE, status.Internal: abi.EINTERNAL,
	} {
		if int(code) != kernels {
			t.Errorf("%q is %d in deepep.h and %d in kernels.h", code, code, kernels)
		}
	}
}

func TestIsAndCodeOfThroughWrapping(t *testing.T) {
	cause := errors.New("disk on fire")
	err := fmt.Errorf("buffer 3: %w", status.Errorf(status.Timeout, "rank %d is late: %w", 2, cause))
	if got, want := err.Error(), "buffer 3: rank 2 is late: disk on fire"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	if !errors.Is(err, status.ErrTimeout) || !errors.Is(err, cause) || errors.Is(err, status.ErrPeerDead) {
		t.Error("errors.Is does not see the kind or the cause")
	}
	var own *status.Error
	if !errors.As(err, &own) || own.Code != status.Timeout {
		t.Error("errors.As does not find the error")
	}
	outer := status.Errorf(status.Aborted, "refused: %w", err)
	if status.CodeOf(outer) != status.Aborted || !errors.Is(outer, status.ErrTimeout) {
		t.Error("the outer kind must win and the inner one stay visible")
	}
	full := &status.Error{Code: status.System, Msg: "memfd", Err: syscall.EMFILE}
	if got := full.Error(); got != "memfd: too many open files" {
		t.Errorf("text %q", got)
	}
	if errors.Is(status.Errorf(status.Timeout, "a"), status.Errorf(status.Timeout, "b")) {
		t.Error("two errors of one kind are not the same error")
	}
}

func TestCodeOfForeignErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		want status.Code
	}{
		{nil, status.OK},
		{errors.New("?"), status.Internal},
		{context.DeadlineExceeded, status.Timeout},
		{fmt.Errorf("x: %w", context.Canceled), status.Interrupted},
		{&fs.PathError{Op: "open", Path: "/x", Err: syscall.ENOENT}, status.System},
		{fmt.Errorf("mmap: %w", syscall.ENOMEM), status.OutOfMemory},
		{errors.Join(errors.New("?"), status.Errorf(status.Device, "d")), status.Device},
	} {
		if got := status.CodeOf(c.err); got != c.want {
			t.Errorf("CodeOf(%v) = %v, want %v", c.err, got, c.want)
		}
	}
}

func TestInvalidArgNamesAll(t *testing.T) {
	err := status.InvalidArg("num_sms", 7, "an even number from 2 to 132")
	if got, want := err.Error(), "argument num_sms: got 7, allowed an even number from 2 to 132"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	if !errors.Is(err, status.ErrInvalidArgument) {
		t.Error("wrong kind")
	}
}

// A deadline has a text of ours, and is still Go's.
func TestCause(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 0)
	defer cancel()
	<-ctx.Done()
	err := status.Errorf(status.Timeout, "exchange: %w", status.Cause(ctx))
	if err.Error() != "exchange: not done within its time limit" || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, status.ErrTimeout) {
		t.Errorf("%v", err)
	}
	own := errors.New("the process ends")
	stopped, stop := context.WithCancelCause(context.Background())
	stop(own)
	if status.Cause(stopped) != own {
		t.Errorf("%v", status.Cause(stopped))
	}
}
