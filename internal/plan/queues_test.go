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

func TestPeerOrderMeetsEveryRankOnceRemoteFirst(t *testing.T) {
	for _, top := range []Topology{{1, 8}, {6, 8}, {4, 1}, {4, 2}, {6, 2}, {16, 8}, {64, 8}, {15, 5}} {
		for rank := range top.Ranks {
			order := top.PeerOrder(rank)
			if sorted := slices.Sorted(slices.Values(order)); len(sorted) != top.Ranks-1 || len(slices.Compact(sorted)) != top.Ranks-1 || slices.Contains(order, rank) {
				t.Fatalf("%+v: order of rank %d is %v", top, rank, order)
			}
			for i, peer := range order {
				if top.Remote(rank, peer) != (i < top.NumRemote()) {
					t.Fatalf("%+v: rank %d is at place %d of rank %d's order", top, peer, i, rank)
				}
			}
		}
	}
}

// With one rank a node every place of the order is a permutation: no two ranks have the same peer there.
func TestRotationKeepsRanksApart(t *testing.T) {
	top := Topology{8, 1}
	for step := range top.Ranks - 1 {
		seen := map[int]bool{}
		for rank := range top.Ranks {
			seen[top.PeerOrder(rank)[step]] = true
		}
		if len(seen) != top.Ranks {
			t.Errorf("step %d reaches %d of %d ranks", step, len(seen), top.Ranks)
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
			fmt.Fprintf(&out, "  rank %2d: %v %v\n", rank, top.PeerOrder(rank), numbers)
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
