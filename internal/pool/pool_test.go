package core

import (
	"math/rand/v2"
	"testing"
)

func testPool(bytes uint64) *Pool { return NewPool(&Segment{Address: 1 << 20, Bytes: bytes}) }

func TestPoolGivesEveryByteAgain(t *testing.T) {
	p := testPool(64 * poolAlign)
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
		bytes := uint64(r.IntN(20*poolAlign) + 1)
		at := p.Allocate(bytes)
		if at == 0 {
			continue
		}
		if at%poolAlign != 0 || at < 1<<20 || uint64(at)+bytes > 1<<20+64*poolAlign {
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
	if len(p.free) != 1 || p.free[0].bytes != 64*poolAlign {
		t.Fatalf("the free spans did not join: %v", p.free)
	}
}

func TestPoolRefuses(t *testing.T) {
	p := testPool(4 * poolAlign)
	if p.Allocate(0) != 0 || p.Allocate(5*poolAlign) != 0 || p.Allocate(1<<63) != 0 {
		t.Fatal("a block that does not fit was given")
	}
	at := p.Allocate(1)
	if !p.Holds(at) || p.Holds(at+1) {
		t.Fatal("Holds")
	}
	if err := p.Free(at + poolAlign); CodeOf(err) != CodeOf(ErrInvalidArgument) {
		t.Fatalf("freeing a stranger: %v", err)
	}
	if err := p.Free(at); err != nil || p.Free(at) == nil {
		t.Fatal("a block is freed once")
	}
}
