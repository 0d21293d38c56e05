package engine_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Moods of the fake library's heap, numbered as in fake.c.
const (
	heapWell int32 = iota
	heapNoID
	heapNoStart
	heapStuckStart
	heapFull
	heapFar
	heapStuckFree
)

// heapRig is rank 0 of two nodes of two over a library whose transport has memory of its own.
func heapRig(t *testing.T, a *among, mood int32) (*rig, func(int32), error) {
	t.Helper()
	lib := fakeLibrary(t, "libheap.so")
	file, err := dl.Open(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	symbol, err := file.Symbol("fake_heap")
	if err != nil {
		t.Fatal(err)
	}
	set := func(mood int32) {
		p := &mood
		dl.Call(symbol, unsafe.Pointer(p))
	}
	set(mood)
	r, err := nodes(t, a, 2, func(o *engine.Options) { o.Library, o.StartLimit, o.RDMA.MNNVL = lib, 200*time.Millisecond, true })
	return r, set, err
}

func TestSymmetricHeap(t *testing.T) {
	r, _, err := heapRig(t, &among{rank: 0, size: 4, elsewhere: 2}, heapWell) // other hosts can be reached
	if err != nil {
		t.Fatal(err)
	}
	want := "id for 4 ranks, 2 a node, 5 x 1024 flags 4; attach 0 of 4 by ii flags 4; heap 5; transport 5 x 1024 seed 0 flags 0 blocks 1011 peers 2 3; " +
		"team flags 3 blocks 1100 transport 9"
	if got := r.withoutRecords(); got != want {
		t.Errorf("start:\n got %s\nwant %s", got, want)
	}
	r.must(r.Destroy())
	want = "transport 9 quiet, peer -1; team ends; transport 9 ends; heap freed; detach 5"
	if got := r.withoutRecords(); got != want {
		t.Errorf("end:\n got %s\nwant %s", got, want)
	}
}

func TestSymmetricHeapThatDoesNotStart(t *testing.T) {
	for mood, c := range map[int32]struct {
		kind error
		part string
	}{
		heapNoID: {status.ErrVersion, "3.3.8 is too old"}, heapNoStart: {status.ErrSystem, "no NIC"}, heapFull: {status.ErrOutOfMemory, "num_nvl_bytes = 4096"},
		heapFar: {status.ErrUnsupported, "num_nvl_peers = 2 puts rank 1 (test) into this rank's node"}, heapStuckStart: {status.ErrTimeout, "the start of the transport"},
	} {
		begin := time.Now()
		_, set, err := heapRig(t, &among{rank: 0, size: 4}, mood)
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.part) || time.Since(begin) > 2*time.Second {
			t.Errorf("mood %d: after %v: %v", mood, time.Since(begin), err)
		}
		set(heapWell)
	}
}

// Destroy is bounded though all ranks free together: a slow release goes on in its goroutine, and none begins with a
// dead rank.
func TestSymmetricHeapIsFreedInTheBackground(t *testing.T) {
	r, set, err := heapRig(t, &among{rank: 0, size: 4}, heapStuckFree)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	r.must(r.Destroy())
	if d := time.Since(begin); d < 300*time.Millisecond || d > time.Second {
		t.Errorf("destroy took %v", d)
	}
	r.read()
	begin = time.Now()
	if engine.AwaitFrees(50*time.Millisecond) || time.Since(begin) > time.Second {
		t.Errorf("the memory counts as free, or that took %v to see", time.Since(begin))
	}
	set(heapWell)
	if !engine.AwaitFrees(5 * time.Second) {
		t.Fatal("the memory was never freed")
	}
	if got := r.read(); !strings.Contains(got, "detach 5") {
		t.Errorf("the memory counts as free after %s", got)
	}
	a := &among{rank: 0, size: 4}
	if r, _, err = heapRig(t, a, heapWell); err != nil {
		t.Fatal(err)
	}
	a.lost = 3
	r.PeerDied(3)
	r.read()
	r.must(r.Destroy())
	if got := r.read(); strings.Contains(got, "freed") {
		t.Errorf("memory is freed though rank 3 is dead: %s", got)
	}
}

// NVSHMEM gets what a peer's queue pairs are on each of the rank's NICs, and the draft of the same buffer says so.
func TestQueuePairsAreDividedOverTheNICs(t *testing.T) {
	lib := fakeLibrary(t, "libheap.so")
	for _, c := range []struct {
		what       string
		nics, host int
		elsewhere  int
		perNIC     string
	}{
		{"none known", 0, 0, 2, "5"}, {"one a rank", 0, 3, 2, "5"}, {"two a rank", 0, 6, 2, "3"}, {"fewer than ranks", 0, 1, 2, "5"},
		{"all on one host", 0, 8, 0, "3"}, {"set", 4, 8, 2, "2"},
	} {
		change := func(o *engine.Options) {
			o.Library, o.StartLimit, o.RDMA.RankNICs, o.RDMA.HostNICs, o.RDMA.Settings = lib, time.Second, c.nics, c.host, "A=1 B=2"
		}
		a := &among{rank: 0, size: 4, elsewhere: c.elsewhere}
		r, err := nodes(t, a, 2, change)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.withoutRecords(); !strings.Contains(got, "id for 4 ranks, 2 a node, "+c.perNIC+" x 1024 flags 0 [A=1 B=2]; ") || !strings.Contains(got, "transport 5 x 1024") {
			t.Errorf("%s: %s, want %s on each NIC", c.what, got, c.perNIC)
		}
		made := r.Info()
		r.must(r.Destroy())
		o := rigOptions(lib, plan.Topology{Ranks: 4, Peers: 2})
		change(&o)
		if o.RDMA.Queues, err = plan.NewQueues(o.Topology, plan.QueueOptions{PerPeer: 5}); err != nil {
			t.Fatal(err)
		}
		for rank := range 4 {
			if a.Peer(rank).SameHost {
				o.RDMA.RanksOfHost++
			}
		}
		draft, err := engine.NewDraft(o, 0)
		if err != nil {
			t.Fatal(err)
		}
		if p := draft.Info(); p.QPsPerNIC != made.QPsPerNIC || p.NICs != made.NICs || p.QPs != made.QPs || p.QPs != p.QPsPerNIC*p.NICs*3 || strconv.Itoa(p.QPsPerNIC) != c.perNIC {
			t.Errorf("%s: planned %+v, made %+v", c.what, p, made)
		}
	}
}
