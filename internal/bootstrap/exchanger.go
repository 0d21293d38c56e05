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
	// AllGather returns every rank's blob, in rank order, each at most MaxBlob bytes. After an error the Exchanger is
	// not usable.
	AllGather(ctx context.Context, blob []byte) ([][]byte, error)
	// Close is local and idempotent. A gather of the other ranks then fails.
	Close() error
}

// CheckGroup refuses a rank or size that is out of range.
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

// NewCallback makes an Exchanger of the caller's all-gather. AllGather checks that f returns as many blobs as ranks,
// and this rank's blob at its index.
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
		return nil, status.Errorf(status.Mismatch, "the caller's exchange returned %d blobs on rank %d, want one for each of %d ranks",
			len(all), c.rank, c.size)
	}
	if !bytes.Equal(all[c.rank], blob) {
		return nil, status.Errorf(status.Mismatch,
			"the caller's exchange returned another blob at the index of rank %d than that rank gave: wrong rank, or wrong order", c.rank)
	}
	return all, nil
}

func checkBlob(blob []byte) error {
	if len(blob) > MaxBlob {
		return status.InvalidArg("blob", fmt.Sprintf("%d bytes", len(blob)), fmt.Sprintf("at most %d bytes", MaxBlob))
	}
	return nil
}

// ctxError gives a context's end one of this library's kinds: a deadline is a Timeout; a cancellation has its cause's
// kind, or Interrupted.
func ctxError(ctx context.Context, what string) error {
	cause := status.Cause(ctx)
	if errors.Is(cause, context.DeadlineExceeded) {
		return status.Errorf(status.Timeout, "%s: %w", what, cause)
	}
	return status.Errorf(status.CodeOf(cause), "%s: %w", what, cause)
}

// ioError classifies an error of a connection under ctx, unless it has a kind already. A closed connection means a dead
// process.
func ioError(ctx context.Context, err error, what string) error {
	var classified *status.Error
	if errors.As(err, &classified) {
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

// timedOut covers all timeouts of package net, of which not all are os.ErrDeadlineExceeded.
func timedOut(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// rankList formats ascending ranks: "rank 3", "ranks 0-2, 5".
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
