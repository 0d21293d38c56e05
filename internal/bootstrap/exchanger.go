package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// maxRanks is the largest group; the kernel interface has the same limit (DK_MAX_RANKS).
const maxRanks = 1024

// Exchanger gathers small blobs among the ranks of a group. Its calls are collective and come from one goroutine.
type Exchanger interface {
	Rank() int
	Size() int
	// AllGather gives every rank's blob, in rank order, each at most MaxBlob bytes. After an error the Exchanger is of no more use.
	AllGather(ctx context.Context, blob []byte) ([][]byte, error)
	// Close is local and idempotent; ranks that still gather then get an error.
	Close() error
}

// CheckGroup refuses a rank or size that no group has.
func CheckGroup(rank, size int) error {
	if size < 1 || size > maxRanks {
		return status.InvalidArg("size", size, fmt.Sprintf("1 to %d", maxRanks))
	}
	if rank < 0 || rank >= size {
		return status.InvalidArg("rank", rank, fmt.Sprintf("0 to %d", size-1))
	}
	return nil
}

type callback struct {
	rank, size int
	f          func(context.Context, []byte) ([][]byte, error)
}

// NewCallback makes an Exchanger of the caller's own all-gather. What f returns is checked: as many blobs as ranks, and
// at this rank's place the blob that it gave.
func NewCallback(rank, size int, f func(ctx context.Context, blob []byte) ([][]byte, error)) Exchanger {
	return &callback{rank, size, f}
}

func (c *callback) Rank() int    { return c.rank }
func (c *callback) Size() int    { return c.size }
func (c *callback) Close() error { return nil }

func (c *callback) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	if err := CheckGroup(c.rank, c.size); err != nil {
		return nil, err
	}
	if err := checkBlob(blob); err != nil {
		return nil, err
	}
	if c.f == nil {
		return nil, status.InvalidArg("exchange callback", "none", "a function that gathers one blob from each rank")
	}
	all, err := c.f(ctx, blob)
	if err != nil {
		return nil, fmt.Errorf("the caller's exchange failed on rank %d: %w", c.rank, err)
	}
	if len(all) != c.size {
		return nil, status.Errorf(status.Mismatch, "the caller's exchange gave %d blobs to rank %d, want one for each of %d ranks",
			len(all), c.rank, c.size)
	}
	if !bytes.Equal(all[c.rank], blob) {
		return nil, status.Errorf(status.Mismatch,
			"the caller's exchange gave rank %d something else than its own blob at its place: wrong rank, or wrong order", c.rank)
	}
	return all, nil
}

func checkBlob(blob []byte) error {
	if len(blob) > MaxBlob {
		return status.InvalidArg("blob", fmt.Sprintf("%d bytes", len(blob)), fmt.Sprintf("at most %d bytes", MaxBlob))
	}
	return nil
}

// ctxError turns a context's end into this library's kinds: a deadline is a timeout; a cancellation keeps its cause's
// kind if it has one and counts as interrupted otherwise.
func ctxError(ctx context.Context, what string) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, context.DeadlineExceeded) {
		return status.Errorf(status.Timeout, "%s: %w", what, cause)
	}
	return status.Errorf(status.CodeOf(cause), "%s: %w", what, cause)
}

// ioError classifies an error of a connection under ctx, unless it has its kind already; a closed connection stands for
// the dead process behind it.
func ioError(ctx context.Context, err error, what string) error {
	var own *status.Error
	if errors.As(err, &own) {
		return fmt.Errorf("%s: %w", what, err)
	}
	if ctx.Err() != nil {
		return ctxError(ctx, what)
	}
	if timedOut(err) {
		return status.Errorf(status.Timeout, "%s: %w", what, err)
	}
	if connectionGone(err) {
		return status.Errorf(status.PeerDead, "%s: connection lost: %w", what, err)
	}
	return status.Errorf(status.System, "%s: %w", what, err)
}

// timedOut: the net package has several errors for it, of which not all are os.ErrDeadlineExceeded.
func timedOut(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// rankList names ranks for people: "rank 3", "ranks 0-2, 5". The numbers come in ascending order.
func rankList(ranks []int) string {
	var parts []string
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		part := strconv.Itoa(ranks[i])
		if j > i {
			part += "-" + strconv.Itoa(ranks[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	word := "rank "
	if len(ranks) != 1 {
		word = "ranks "
	}
	return word + strings.Join(parts, ", ")
}
