package engine_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// among is one rank of a group whose other ranks say the same as it does.
type among struct {
	alone
	rank, size int
	elsewhere  int    // a rank on another host; 0: none
	lost       int    // a rank that has died; 0: none
	fails      string // the end of the tag of an exchange in which rank 1 says that it has failed
	awaits     map[int]int
	called     map[int]engine.LastCall
}

func (a *among) Called(rank int) engine.LastCall { return a.called[rank] }

func (a *among) Awaits(rank int) int {
	if awaited, waits := a.awaits[rank]; waits {
		return awaited
	}
	return -1
}

func (a *among) Rank() int { return a.rank }
func (a *among) Size() int { return a.size }
func (a *among) Peer(rank int) engine.Peer {
	return engine.Peer{SameHost: a.elsewhere == 0 || rank != a.elsewhere}
}
func (a *among) Describe(rank int) string { return fmt.Sprintf("rank %d (test)", rank) }
func (a *among) State(rank int) (engine.PeerState, string) {
	if a.lost != 0 && rank == a.lost {
		return engine.PeerDead, "seen by the test"
	}
	return engine.PeerAlive, ""
}
func (a *among) Exchange(_ context.Context, tag string, blob []byte, _ []int) ([]device.Message, error) {
	all := make([]device.Message, a.size)
	for i := range all {
		all[i].Blob = append([]byte(nil), blob...)
	}
	if a.fails != "" && strings.HasSuffix(tag, a.fails) {
		all[1].Blob = append([]byte{byte(status.CodeOf(status.ErrOutOfMemory))}, "no memory"...)
	}
	return all, nil
}

// An error that another rank brings into an exchange names that rank's process, too.
func TestARankThatFailedIsNamed(t *testing.T) {
	_, err := nodes(t, &among{size: 4, fails: "/ready"}, 2, nil)
	if !errors.Is(err, status.ErrOutOfMemory) || !strings.Contains(err.Error(), "rank 1 (test) failed: no memory") {
		t.Error(err)
	}
}

// nodes makes a buffer of one rank of a group on several nodes.
func nodes(t *testing.T, a *among, peers int, change func(*engine.Options)) (*rig, error) {
	t.Helper()
	top, err := plan.NewTopology(a.size, peers)
	if err != nil {
		t.Fatal(err)
	}
	o := rigOptions(fakeLibrary(t, "libfake.so"), top)
	if o.RDMA.Queues, err = plan.NewQueues(top, plan.QueueOptions{PerPeer: 5}); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&o)
	}
	r := watch(t, nil, o.Library)
	r.read() // what others left there
	r.Buffer, err = engine.New(context.Background(), a, o)
	return r, err
}

// withoutRecords returns what the library was asked, less records of events and waits for them.
func (r *rig) withoutRecords() string {
	var lines []string
	for line := range strings.Lines(r.read()) {
		if !strings.HasPrefix(line, "record ") && !strings.HasPrefix(line, "wait ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "; ")
}

// The parameters of transport and team, and the order in which they are made and destroyed.
func TestTransportOfNodes(t *testing.T) {
	for _, c := range []struct {
		what        string
		rank, peers int
		change      func(*engine.Options)
		transport   string
		team        string
	}{
		{"three nodes of two", 3, 2, nil, "transport 5 x 1024 seed 0 flags 0 blocks 110111 peers 5 4 1 0", "team flags 3 blocks 001100 transport 9"},
		{"a rank a node", 1, 1, nil, "transport 5 x 1024 seed 0 flags 0 blocks 111111 peers 2 3 4 5 0", "team flags 3 blocks 010000 transport 9"},
		{"one node", 1, 8, nil, "", "team flags 3 blocks 111111 transport 0"},
		{"normal mode", 5, 3, func(o *engine.Options) { o.LowLatency, o.Shrink, o.RDMA.Everywhere = false, false, true },
			"transport 5 x 1024 seed 0 flags 0 blocks 111001 peers 2 0 1", "team flags 0 blocks 000111 transport 9"},
		{"no NVLink", 3, 2, func(o *engine.Options) { o.RDMA.Everywhere, o.RDMA.Seed, o.RDMA.Late = true, 7, true },
			"transport 5 x 1024 seed 7 flags 2 blocks 111111 peers 5 4 1 0 2", "team flags 7 blocks 001100 transport 9"},
		{"linear order", 3, 2, func(o *engine.Options) { o.RDMA.Queues.Order = plan.Linear }, "transport 5 x 1024 seed 0 flags 0 blocks 110111 peers 0 1 4 5",
			"team flags 3 blocks 001100 transport 9"},
		{"planned order, no NVLink", 3, 2, func(o *engine.Options) { o.RDMA.Queues.Order, o.RDMA.Everywhere = plan.Planned, true },
			"transport 5 x 1024 seed 0 flags 0 blocks 111111 peers 4 5 0 1 2", "team flags 7 blocks 001100 transport 9"},
		{"no NVLink on one node", 2, 8, func(o *engine.Options) { o.RDMA.Everywhere, o.Shrink = true, false },
			"transport 5 x 1024 seed 0 flags 0 blocks 111111 peers 3 4 5 0 1", "team flags 6 blocks 111111 transport 9"},
	} {
		t.Run(c.what, func(t *testing.T) {
			r, err := nodes(t, &among{rank: c.rank, size: 6}, c.peers, c.change)
			if err != nil {
				t.Fatal(err)
			}
			begin, end := c.team, "team ends"
			if c.transport != "" {
				begin, end = c.transport+"\n"+c.team, "transport 9 quiet, peer -1; team ends; transport 9 ends"
			}
			if got := strings.TrimSpace(r.read()); got != begin {
				t.Errorf("start:\n got %s\nwant %s", got, begin)
			}
			r.must(r.Destroy())
			if got := r.withoutRecords(); got != end {
				t.Errorf("end:\n got %s\nwant %s", got, end)
			}
		})
	}
}

// The transport discards what is queued for a rank of another node that has died or left. A rank of this node has no
// queue pairs.
func TestTheDeadAreLost(t *testing.T) {
	a := &among{rank: 3, size: 6}
	r, err := nodes(t, a, 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { r.must(r.Destroy()) }()
	r.read()
	a.lost = 2
	r.PeerDied(2)
	r.PeerDied(0)
	r.PeerLeft(5)
	if got := r.withoutRecords(); got != "transport 9 loses 0; transport 9 loses 5" {
		t.Errorf("got %q", got)
	}
}

func TestWhatNoTransportReaches(t *testing.T) {
	near := func(o *engine.Options) { o.Library = fakeLibrary(t, "libnear.so") }
	for _, c := range []struct {
		what   string
		peers  int
		away   int
		change func(*engine.Options)
		parts  []string
	}{
		{"library without a transport", 2, 0, near, []string{"6 ranks with num_nvl_peers = 2 are 3 nodes", "engine fake", "libnear.so", "no transport"}},
		{"no NVLink without a transport", 8, 0, func(o *engine.Options) { near(o); o.RDMA.Everywhere = true },
			[]string{"allow_nvlink_for_low_latency_mode = 0", "no transport"}},
		{"another host", 2, 4, nil, []string{"rank 4 (test) is on another host", "nodes of one host"}},
		{"another host in the node", 8, 4, nil, []string{"rank 4 (test) is on another host", "num_nvl_peers = 8", "ranks of this host"}},
	} {
		_, err := nodes(t, &among{rank: 3, size: 6, elsewhere: c.away}, c.peers, c.change)
		if !errors.Is(err, status.ErrUnsupported) {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		for _, part := range c.parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q is not in %q", c.what, part, err)
			}
		}
	}
	_, err := nodes(t, &among{rank: 3, size: 5}, 1, nil)
	for _, part := range []string{"5 ranks with num_nvl_peers = 1 are 5 nodes", "kernels of engine fake", "libfake.so", "loads and stores alone", "dk_team_create"} {
		if !errors.Is(err, status.ErrUnsupported) || !strings.Contains(err.Error(), part) {
			t.Errorf("kernels without a transport: %q is not in %v", part, err)
		}
	}
	_, err = nodes(t, &among{rank: 3, size: 6}, 2, func(o *engine.Options) { o.RDMA.Seed, o.RDMA.Late = 99, true })
	if !errors.Is(err, status.ErrUnsupported) || !strings.Contains(err.Error(), "DEEPEP_SOFTWARE_RDMA") {
		t.Errorf("late hardware: %v", err)
	}
	for _, order := range []plan.Order{plan.Linear, plan.Planned, plan.Spread} {
		_, err = nodes(t, &among{rank: 3, size: 6}, 2, func(o *engine.Options) { o.Library, o.RDMA.Queues.Order = fakeLibrary(t, "libheap.so"), order })
		if !errors.Is(err, status.ErrUnsupported) || !strings.Contains(err.Error(), `DEEPEP_QP_ORDER: got "`+order.String()+`", allowed auto or rotated`) || !strings.Contains(err.Error(), "libheap.so") {
			t.Errorf("a transport that makes its queue pairs itself, order %v: %v", order, err)
		}
	}
	r, err := nodes(t, &among{rank: 3, size: 6}, 8, near)
	if err != nil {
		t.Fatalf("one node needs no transport: %v", err)
	}
	r.must(r.Destroy())
}

// Errors about sizes between nodes name the argument, what was given and what is needed.
func TestLimitsBetweenNodes(t *testing.T) {
	small := func(o *engine.Options) { o.RDMABytes, o.RDMA.MaxTokens = 100, 4 }
	r, err := nodes(t, &among{rank: 0, size: 4}, 2, small)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { r.must(r.Destroy()) }()
	h := &op.Handle{NumRanks: 4, NumTokens: 1, RankPrefixMatrix: somewhere, SendHead: somewhere, RecvSrcIdx: somewhere}
	combine := &op.CombineArgs{Hidden: 64, X: somewhere, Handle: h, CombinedX: somewhere}
	expect := func(err error, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), part) {
				t.Errorf("%q is not in %v", part, err)
			}
		}
	}
	expect(r.Combine(combine, &engine.Call{}), "num_rdma_bytes = 100", "rows of 128 bytes", "2 nodes", "at least 384 is needed")
	expect(r.LowLatencyDispatch(&op.LLDispatchArgs{Phases: 3, NumMaxTokens: 5, Hidden: 128, NumTopK: 1, NumExperts: 4, IndexType: op.Int64},
		&engine.Call{}), "num_max_dispatch_tokens_per_rank", "got 5", "at most DEEPEP_NUM_MAX_RDMA_TOKENS = 4")
	expect(r.LowLatencyCombine(&op.LLCombineArgs{Phases: 3, NumMaxTokens: 5, Hidden: 128, NumTopK: 1, NumExperts: 4, IndexType: op.Int64},
		&engine.Call{}), "at most DEEPEP_NUM_MAX_RDMA_TOKENS = 4")
	_, err = nodes(t, &among{rank: 0, size: 4}, 2, func(o *engine.Options) { o.RDMA.Workspace = 4095 })
	expect(err, "flags and counts of 4 ranks take 4096 bytes", "DEEPEP_NUM_WORKSPACE_BYTES = 4095")

	one, err := nodes(t, &among{rank: 0, size: 4}, 8, small) // no node is crossed, so neither limit is met
	if err != nil {
		t.Fatal(err)
	}
	defer func() { one.must(one.Destroy()) }()
	one.must(one.Combine(combine, &engine.Call{}))
}
