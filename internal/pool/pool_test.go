package pool

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

// segment counts how often it was released.
type segment struct{ released int }

func (s *segment) Drain(uintptr) error { return nil }
func (s *segment) Release() error      { s.released++; return nil }

func testPool(bytes uint64) *Pool { return New(&segment{}, 1<<20, bytes) }

func TestFreedBlocksJoin(t *testing.T) {
	p := testPool(64 * align)
	r := rand.New(rand.NewPCG(1, 2))
	var live []uintptr
	for range 10000 {
		if len(live) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(live))
			if err := p.Free(live[i]); err != nil {
				t.Fatal(err)
			}
			live = append(live[:i], live[i+1:]...)
			continue
		}
		bytes := uint64(r.IntN(20*align) + 1)
		at := p.Allocate(bytes)
		if at == 0 {
			continue
		}
		if at%align != 0 || at < 1<<20 || uint64(at)+bytes > 1<<20+64*align {
			t.Fatalf("block %#x of %d bytes lies outside", at, bytes)
		}
		for _, other := range live {
			n := p.used[other]
			if at < other+uintptr(n) && other < at+uintptr(p.used[at]) {
				t.Fatalf("blocks %#x and %#x overlap", at, other)
			}
		}
		live = append(live, at)
	}
	for _, at := range live {
		if err := p.Free(at); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.free) != 1 || p.free[0].bytes != 64*align {
		t.Fatalf("the free spans did not join: %v", p.free)
	}
}

func TestRoomIsTheLargestBlock(t *testing.T) {
	p := testPool(8 * align)
	a, b := p.Allocate(3*align), p.Allocate(align)
	for _, step := range []struct {
		do   func() error
		room uint64
	}{
		{func() error { return nil }, 4},
		{func() error { return p.Free(a) }, 4},
		{func() error { return p.Free(b) }, 8},
		{p.Close, 0},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if got := p.Room(); got != step.room*align || got > 0 && p.Allocate(got+1) != 0 {
			t.Fatalf("room for %d bytes, want %d", got, step.room*align)
		}
	}
}

func TestPoolRefusesWhatItCannotServe(t *testing.T) {
	p := testPool(4 * align)
	if p.Allocate(0) != 0 || p.Allocate(5*align) != 0 || p.Allocate(1<<63) != 0 {
		t.Fatal("a block that does not fit was allocated")
	}
	at := p.Allocate(1)
	if !p.Holds(at) || p.Holds(at+1) {
		t.Fatal("Holds")
	}
	if err := p.Free(at + align); !errors.Is(err, status.ErrInvalidArgument) {
		t.Fatalf("freeing what is no block: %v", err)
	}
	if err := p.Free(at); err != nil || p.Free(at) == nil {
		t.Fatal("a block is freed once")
	}
}

func TestSegmentIsReleasedWithTheLastBlock(t *testing.T) {
	s := &segment{}
	p := New(s, 1<<20, 4*align)
	at := p.Allocate(1)
	if err := p.Close(); err != nil || p.Done() || s.released != 0 {
		t.Fatalf("closed with a live block: %v, released %d times", err, s.released)
	}
	if p.Allocate(1) != 0 {
		t.Fatal("a closed pool allocated")
	}
	if err := p.Free(at); err != nil || !p.Done() || s.released != 1 {
		t.Fatalf("after the last block: %v, released %d times", err, s.released)
	}
	if err := p.Close(); err != nil || s.released != 1 {
		t.Fatalf("closed twice: %v, released %d times", err, s.released)
	}
}
