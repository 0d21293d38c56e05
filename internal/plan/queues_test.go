package plan

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestQueuesForShapes(t *testing.T) {
	top := Topology{16, 8}
	for _, c := range []struct {
		o              QueueOptions
		perPeer, depth int
	}{
		{QueueOptions{}, DefaultQueuePairs, 1024},
		{QueueOptions{PerPeer: 3}, 3, 1024},
		{QueueOptions{PerPeer: MaxQueuePairs}, MaxQueuePairs, 1024},
		{QueueOptions{MaxTokens: 511}, 24, 1024},
		{QueueOptions{MaxTokens: 512}, 24, 2048},
		{QueueOptions{MaxTokens: 16383}, 24, 32768},
		{QueueOptions{MaxTokens: 128, Depth: 512}, 24, 512},
		{QueueOptions{MaxTokens: 128, Depth: 300}, 24, 512},
		{QueueOptions{Depth: 1}, 24, 1},
	} {
		q := must[Queues](t)(NewQueues(top, c.o))
		if q.PerPeer != c.perPeer || q.Depth != c.depth {
			t.Errorf("%+v: %d queue pairs of depth %d, want %d of %d", c.o, q.PerPeer, q.Depth, c.perPeer, c.depth)
		}
	}
	for name, o := range map[string]QueueOptions{
		"num_qps_per_rank":                 {PerPeer: 1025},
		"num_max_dispatch_tokens_per_rank": {MaxTokens: 16384}, "qp_depth": {Depth: 32769},
	} {
		_, err := NewQueues(top, o)
		refused(t, name, err, name)
	}
	_, err := NewQueues(top, QueueOptions{Depth: 256, MaxTokens: 128})
	refused(t, "depth for the tokens", err, "qp_depth", "256", "at least 512 for 128 tokens")
	_, err = NewQueues(top, QueueOptions{Depth: 1024, DepthFrom: "D", DepthFix: "F", MaxTokens: 2048, TokensFrom: "T"})
	refused(t, "depth and tokens of the environment", err, "variable D: got 1024, allowed at least 8192 with T=2048", "; fix: export F=8192")
}

func TestUsedQueuePairs(t *testing.T) {
	for _, c := range [][3]int{{0, 0, 1}, {16, 10, 16}, {8, 10, 10}, {5000, 10, MaxQueuePairs}} {
		if n := UsedQueuePairs(c[0], c[1]); n != c[2] {
			t.Errorf("%d local experts and %d channels use %d queue pairs, want %d", c[0], c[1], n, c[2])
		}
	}
}

func TestDevicesAreDealtOut(t *testing.T) {
	for _, c := range [][3]int{{8, 8, 1}, {16, 8, 2}, {9, 8, 1}, {1, 8, 1}, {0, 8, 1}, {4, 0, 4}} {
		if n := DevicesOfRank(c[0], c[1]); n != c[2] {
			t.Errorf("%d NICs of %d ranks: %d a rank, want %d", c[0], c[1], n, c[2])
		}
	}
}

// Experts and channels share what queue pairs there are evenly, whatever their number.
func TestEveryQueueIsUsedAlike(t *testing.T) {
	for perPeer := 1; perPeer <= 9; perPeer++ {
		q := must[Queues](t)(NewQueues(Topology{4, 2}, QueueOptions{PerPeer: perPeer}))
		experts, channels := make([]int, perPeer), make([]int, perPeer)
		for i := range 3 * perPeer {
			experts[q.OfExpert(i)]++
			channels[q.OfChannel(i)]++
		}
		if slices.Min(experts) != 3 || slices.Min(channels) != 3 {
			t.Errorf("%d queue pairs: %v experts, %v channels", perPeer, experts, channels)
		}
		for devices := 1; devices <= 4; devices++ {
			if n := q.PerDevice(devices); n*devices < perPeer || (n-1)*devices >= perPeer {
				t.Errorf("%d queue pairs on %d devices: %d on each", perPeer, devices, n)
			}
		}
	}
}

var orders = []Order{DefaultOrder, Linear, Planned, Rotated, Spread}

func TestOrdersMeetEveryRankOnce(t *testing.T) {
	for _, top := range []Topology{{1, 8}, {6, 8}, {4, 1}, {4, 2}, {6, 2}, {16, 8}, {64, 8}, {15, 5}} {
		for _, o := range orders {
			for rank := range top.Ranks {
				order := o.Peers(top, rank)
				if sorted := slices.Sorted(slices.Values(order)); len(sorted) != top.Ranks-1 || len(slices.Compact(sorted)) != top.Ranks-1 || slices.Contains(order, rank) {
					t.Fatalf("%+v: order %v of rank %d is %v", top, o, rank, order)
				}
				for i, peer := range order {
					if remoteFirst := o != Linear && o != Rotated; remoteFirst && top.Remote(rank, peer) != (i < top.NumRemote()) {
						t.Fatalf("%+v: rank %d is at place %d of rank %d's order %v", top, peer, i, rank, o)
					}
				}
				q := Queues{Topology: top, Order: o}
				remote := slices.DeleteFunc(slices.Clone(order), func(peer int) bool { return !top.Remote(rank, peer) })
				if !slices.Equal(q.RemotePeers(rank), remote) || len(remote) != top.NumRemote() {
					t.Fatalf("%+v, %v: remote peers of rank %d are %v", top, o, rank, q.RemotePeers(rank))
				}
			}
		}
	}
}

// Each order is what its name says, seen at one rank of two nodes of four.
func TestOrdersByName(t *testing.T) {
	for o, want := range map[Order]string{
		DefaultOrder: "[6 7 4 5 3 0 1]", Linear: "[0 1 3 4 5 6 7]", Planned: "[4 5 6 7 3 0 1]", Rotated: "[3 4 5 6 7 0 1]", Spread: "[6 7 4 5 3 0 1]",
	} {
		if got := fmt.Sprint(o.Peers(Topology{8, 4}, 2)); got != want {
			t.Errorf("%v: %s, want %s", o, got, want)
		}
	}
	for i, name := range OrderNames() {
		if text := Order(i).String(); i > 0 && text != name {
			t.Errorf("order %d is called %s and %s", i, text, name)
		}
	}
	if DefaultOrder.String() != "spread" {
		t.Error("the default order has another name")
	}
}

// At every place of the default order no two ranks have the same peer: also ranks that share a node are kept apart.
func TestDefaultOrderKeepsRanksApart(t *testing.T) {
	for _, top := range []Topology{{8, 1}, {16, 8}, {24, 8}, {64, 8}} {
		for step := range top.NumRemote() {
			seen := map[int]bool{}
			for rank := range top.Ranks {
				seen[top.PeerOrder(rank)[step]] = true
			}
			if len(seen) != top.Ranks {
				t.Errorf("%+v: step %d reaches %d of %d ranks", top, step, len(seen), top.Ranks)
			}
		}
	}
}

func TestSubTeam(t *testing.T) {
	for _, c := range []struct {
		top  Topology
		rank int
		want string
	}{{Topology{16, 8}, 3, "[3 11]"}, {Topology{16, 8}, 11, "[3 11]"}, {Topology{6, 2}, 5, "[1 3 5]"}, {Topology{4, 1}, 2, "[0 1 2 3]"}, {Topology{4, 8}, 2, "[2]"}} {
		if got := fmt.Sprint(c.top.RDMATeam(c.rank).Ranks()); got != c.want {
			t.Errorf("%+v: sub-team of rank %d is %s, want %s", c.top, c.rank, got, c.want)
		}
	}
}

// TestQueuesGolden compares whole tables, so that a change of the order is seen and meant.
func TestQueuesGolden(t *testing.T) {
	var out strings.Builder
	for _, top := range []Topology{{4, 1}, {4, 2}, {6, 2}, {16, 8}} {
		q := must[Queues](t)(NewQueues(top, QueueOptions{PerPeer: 3}))
		fmt.Fprintf(&out, "%d ranks, %d a node: peers in the order of creation, then the numbers of queue pair 1\n", top.Ranks, top.Peers)
		for rank := range top.Ranks {
			var numbers []int
			for peer := range top.Ranks {
				numbers = append(numbers, q.Number(rank, peer, 1))
			}
			fmt.Fprintf(&out, "  rank %2d: %v %v\n", rank, q.PeerOrder(rank), numbers)
		}
	}
	path := filepath.Join("testdata", "queues.golden")
	if *update {
		if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	if q := (Queues{Topology: Topology{4, 2}, PerPeer: 3}); q.Number(1, 1, 0) != -1 || q.Number(0, 2, 3) != -1 || q.Number(0, 9, 0) != -1 {
		t.Error("queue pairs that do not exist have numbers")
	}
}
