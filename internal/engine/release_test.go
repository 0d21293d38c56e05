package engine_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

func TestReleaseStopsTheTeamBeforeItsMemoryGoes(t *testing.T) {
	r := newRig(t)
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.read()
	r.must(r.Release(-1))
	r.expect("release", "record a on C", "wait a", "wait b", "team stops", "memory goes")
	r.must(r.Release(-1))
	r.expect("once more")
	if err := r.Barrier(&engine.Call{Stream: 1}); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "released") {
		t.Errorf("a call: %v", err)
	}
	r.must(r.Restore(-1))
	r.expect("restore", "memory comes", "team goes on")
	r.must(r.Restore(-1))
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.expect("a call", "barrier #2 on 1 limit 5 ms", "record a on 1")
}

// Graphs may have been launched on any stream: the library waits for all of them.
func TestReleaseAfterACapture(t *testing.T) {
	r := newRig(t)
	r.capturing(2)
	r.must(r.Barrier(&engine.Call{Stream: 2}))
	if err := r.Release(-1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "being captured") {
		t.Errorf("during a capture: %v", err)
	}
	r.capturing(0)
	r.read()
	r.must(r.Release(-1))
	r.expect("after it", "record a on C", "wait a", "team stops after graphs", "memory goes")
	r.must(r.Destroy())
	if trace := r.read(); strings.Contains(trace, "team ends") {
		t.Errorf("a replay has nothing to look at: %s", trace)
	}
}

func TestReleaseWithAnOpenHalf(t *testing.T) {
	r := newRig(t)
	ticket, err := r.half(1, 0, 0)
	r.must(err)
	if err := r.Release(-1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "low_latency_dispatch #1 is without its receive half") {
		t.Errorf("%v", err)
	}
	_, err = r.half(2, ticket, 0)
	r.must(err)
	r.must(r.Release(-1))
	r.must(r.Restore(-1))
	if _, err := r.half(2, ticket, 0); !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("a ticket of before: %v", err)
	}
}

func TestHeapsAreNotReleased(t *testing.T) {
	r, _, err := heapRig(t, &among{rank: 0, size: 4, elsewhere: 2}, heapWell)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Release(-1); !errors.Is(err, status.ErrUnsupported) {
		t.Errorf("%v", err)
	}
	r.must(r.Barrier(&engine.Call{}))
	r.must(r.Destroy())
}

// Whose graphs are replayed after a regroup learns it from the buffer that follows, once for each look.
func TestReplaysOfBefore(t *testing.T) {
	r := newRig(t)
	r.capturing(2)
	r.must(r.Barrier(&engine.Call{Stream: 2}))
	r.capturing(0)
	o := rigOptions(fakeLibrary(t, "libfake.so"), plan.Topology{Ranks: 1, Peers: 8})
	r.Inherit(&o)
	o.ID, o.From, o.Was = 2, r.Buffer, []int{0}
	o.Commit = func(_ context.Context, _ string, blob []byte) ([]device.Message, error) {
		return []device.Message{{Blob: blob}}, nil
	}
	next, err := engine.New(context.Background(), &alone{}, o)
	r.must(err)
	r.Succeeded(next)
	r.must(r.Destroy())
	r.must(next.Check())
	r.replay()
	r.replay()
	if err := next.Check(); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "graph of before regroup() was replayed") {
		t.Errorf("after replays: %v", err)
	}
	r.must(next.Check())
	r.must(next.Barrier(&engine.Call{Stream: 2}))
	r.read()
	r.must(next.Destroy())
	if trace := r.read(); !strings.Contains(trace, "memory goes") {
		t.Errorf("a replay has nothing to look at: %s", trace)
	}
}

// Copies in captured graphs would go on to memory that is not there: the library refuses, the buffer stays as it was.
func TestNoReleaseWithCapturedCopies(t *testing.T) {
	lib := fakeLibrary(t, "libfake.so")
	o := rigOptions(lib, plan.Topology{Ranks: 1, Peers: 8})
	o.LLTransfer = plan.CopyTransfer
	b, err := engine.New(context.Background(), &alone{}, o)
	if err != nil {
		t.Fatal(err)
	}
	r := watch(t, b, lib)
	r.capturing(2)
	r.must(r.Barrier(&engine.Call{Stream: 2}))
	r.capturing(0)
	if err := r.Release(-1); !errors.Is(err, status.ErrUnsupported) || !strings.Contains(err.Error(), "DEEPEP_LL_TRANSFER=copy") {
		t.Errorf("got %v", err)
	}
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	r.must(r.Destroy())
}
