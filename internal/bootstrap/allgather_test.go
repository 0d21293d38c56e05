package bootstrap

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

func TestAllGatherOfEqualBlocks(t *testing.T) {
	ctx := context.Background()
	other := []byte("of rank 1")
	ex := NewAllGather(0, 2, func(_ context.Context, send, recv []byte) error {
		if len(recv) != 2*len(send) {
			t.Errorf("blocks of %d bytes, room for %d", len(send), len(recv))
		}
		copy(recv, send)
		recv[len(send)] = byte(len(other))
		copy(recv[len(send)+blockHead:], other)
		return nil
	})
	got, err := ex.AllGather(ctx, []byte("of rank 0"))
	if err != nil || string(got[0]) != "of rank 0" || string(got[1]) != "of rank 1" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := ex.AllGather(ctx, make([]byte, blockBytes)); !errors.Is(err, status.ErrInternal) {
		t.Errorf("a blob larger than a block: %v", err)
	}
	damaged := NewAllGather(0, 2, func(_ context.Context, send, recv []byte) error {
		copy(recv, send)
		copy(recv[len(send):], "\xff\xff\xff\xff")
		return nil
	})
	if _, err := damaged.AllGather(ctx, nil); !errors.Is(err, status.ErrMismatch) || !strings.Contains(err.Error(), "rank 1") {
		t.Errorf("a damaged block: %v", err)
	}
	failing := NewAllGather(0, 1, func(context.Context, []byte, []byte) error { return errors.New("planted") })
	if _, err := failing.AllGather(ctx, nil); err == nil || !strings.Contains(err.Error(), "planted") {
		t.Errorf("a failing all-gather: %v", err)
	}
	if _, err := NewAllGather(0, 1, nil).AllGather(ctx, nil); !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("no function: %v", err)
	}
}
