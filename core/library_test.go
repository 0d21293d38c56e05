package core

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
)

// cpuLibrary loads the CPU kernel library as a buffer would.
func cpuLibrary(t *testing.T) *kern.Library {
	t.Helper()
	needEngine(t)
	s, err := env.Current()
	if err != nil {
		t.Fatal(err)
	}
	l, err := kern.Load(dl.Query{File: "libdeepep_cpu.so", Dir: s.Kernels})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Callers that load one library at once get the same one; a failure is not kept.
func TestLibrariesAreLoadedOnce(t *testing.T) {
	path := cpuLibrary(t).Path
	dir := t.TempDir()
	if l, err := loadEngine(EngineCPU, dir); !errors.Is(err, ErrNotFound) {
		t.Fatalf("an empty folder gave %v, %v", l, err)
	}
	if err := os.Symlink(path, filepath.Join(dir, filepath.Base(path))); err != nil {
		t.Fatal(err)
	}
	var loaded [8]*kern.Library
	var group errgroup.Group
	for i := range loaded {
		group.Go(func() (err error) {
			loaded[i], err = loadEngine(EngineCPU, dir)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for i, l := range loaded {
		if l != loaded[0] {
			t.Errorf("caller %d got a library of its own", i)
		}
	}
}

// A buffer sized by a hint is large enough: the library's needs stay below the hints.
func TestHintsCoverTheLibrarysNeeds(t *testing.T) {
	l := cpuLibrary(t)
	for _, ranks := range []int32{1, 2, 3, 8, 16, 64} {
		for _, tokens := range []int32{1, 3, 128, 1024} {
			for _, hidden := range []int32{8, 128, 136, 2048, 7168, 16384} {
				for _, perRank := range []int32{1, 2, 7, 32} {
					p := &abi.LLLayoutParams{NumRanks: ranks, NumMaxTokens: tokens, Hidden: hidden, NumExperts: perRank * ranks}
					if code := l.LLLayout(p); code != 0 {
						t.Fatalf("%+v: code %d", p, code)
					}
					hint, err := LowLatencySizeHint(int64(tokens), int64(hidden), int64(ranks), int64(perRank*ranks))
					if err != nil || p.RDMABytes > hint {
						t.Errorf("%d ranks, %d tokens, hidden %d, %d experts each: needs %d, hint %d (%v)", ranks, tokens, hidden, perRank, p.RDMABytes, hint, err)
					}
				}
			}
		}
	}
}

func TestNormalHintsCoverTheFloor(t *testing.T) {
	l := cpuLibrary(t)
	least := plan.Config{NumSMs: 2, NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 1, RDMARecvChunk: 2}
	for _, c := range []plan.Config{least, plan.DefaultConfig} {
		for _, ranks := range []int{1, 2, 3, 8} {
			for _, hiddenBytes := range []int64{16, 272, 14336, 65536} {
				hint, err := c.NVLBytes(hiddenBytes, plan.Topology{Ranks: ranks, Peers: 8})
				if err != nil {
					t.Fatal(err)
				}
				p := &abi.BlockSizesParams{NumRanks: int32(ranks), NumNVLPeers: int32(ranks), NVLBytes: hint, MaxRowBytes: uint64(hiddenBytes) + 4*plan.MaxScales}
				if code := l.BlockSizes(p); code != 0 || p.MinNVLBytes > hint {
					t.Errorf("%+v, %d ranks, rows of %d: floor %d, hint %d (code %d)", c, ranks, hiddenBytes, p.MinNVLBytes, hint, code)
				}
			}
		}
	}
}

// Between nodes too: whatever the configuration, a buffer by its two hints serves rows of that size.
func TestHintsOfNodesCoverTheFloor(t *testing.T) {
	l := cpuLibrary(t)
	least := plan.Config{NumSMs: 2, NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 1, RDMARecvChunk: 2}
	for _, c := range []plan.Config{least, plan.DefaultConfig} {
		for _, top := range []plan.Topology{{Ranks: 2, Peers: 1}, {Ranks: 4, Peers: 2}, {Ranks: 6, Peers: 2}, {Ranks: 16, Peers: 1}, {Ranks: 64, Peers: 8}, {Ranks: 1024, Peers: 8}} {
			for _, hiddenBytes := range []int64{16, 272, 14336, 65536} {
				nvl, err := c.NVLBytes(hiddenBytes, top)
				if err != nil {
					t.Fatal(err)
				}
				rdma, err := c.RDMABytes(hiddenBytes, top)
				if err != nil {
					t.Fatal(err)
				}
				for _, flags := range []uint32{0, abi.TeamShrink} {
					p := &abi.BlockSizesParams{NumRanks: int32(top.Ranks), NumNVLPeers: int32(top.NodeSize()), NVLBytes: nvl, RDMABytes: rdma,
						MaxRowBytes: uint64(hiddenBytes) + 4*plan.MaxScales, Flags: flags}
					if code := l.BlockSizes(p); code != 0 || p.MinNVLBytes > nvl || p.MinRDMABytes == 0 || p.MinRDMABytes > rdma {
						t.Errorf("%+v, %+v, flags %d, rows of %d: floors %d and %d, hints %d and %d (code %d)",
							c, top, flags, hiddenBytes, p.MinNVLBytes, p.MinRDMABytes, nvl, rdma, code)
					}
				}
			}
		}
	}
}

// The library makes queue pairs in the plan's order, whichever it is, and under the plan's numbers.
func TestQueuePairsAreMadeByThePlan(t *testing.T) {
	l := cpuLibrary(t)
	dev, err := device.Open(l, -1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dev.Release() }()
	block, err := dev.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = block.Release() }()
	var pin runtime.Pinner
	defer pin.Unpin()
	for _, order := range []plan.Order{plan.DefaultOrder, plan.Linear, plan.Planned, plan.Rotated, plan.Spread} {
		q, err := plan.NewQueues(plan.Topology{Ranks: 6, Peers: 2}, plan.QueueOptions{PerPeer: 3, Depth: 16, Order: order})
		if err != nil {
			t.Fatal(err)
		}
		const rank = 3
		peers, blocks := make([]int32, 0, 8), make([]uint64, 8)
		for _, peer := range q.PeerOrder(rank) {
			peers = append(peers, int32(peer))
		}
		for i := range blocks {
			blocks[i] = block.Address
		}
		p := &abi.TransportOpenParams{Device: dev.Handle(), Rank: rank, NumRanks: 6, NumQPs: int32(q.PerPeer), QPDepth: int32(q.Depth), NumPeers: int32(len(peers)),
			HostPeers: uint64(AddressOf(&pin, peers)), HostBlocks: uint64(AddressOf(&pin, blocks)), BlockBytes: 4096}
		if code := l.TransportOpen(p); code != 0 {
			t.Fatalf("opening: code %d", code)
		}
		for _, peer := range peers {
			for queue := range q.PerPeer {
				query := &abi.TransportQueryParams{Transport: p.Transport, Peer: peer, QP: int32(queue)}
				if code := l.TransportQuery(query); code != 0 || int(query.Created) != q.Number(rank, int(peer), queue) {
					t.Errorf("%v: queue pair %d to rank %d is number %d, planned %d (code %d)", order, queue, peer, query.Created, q.Number(rank, int(peer), queue), code)
				}
			}
		}
		if code := l.TransportClose(&abi.TransportCloseParams{Transport: p.Transport}); code != 0 {
			t.Errorf("closing: code %d", code)
		}
	}
}

// fakeLibraries returns a function that builds a library that does nothing, with a setting of its source.
func fakeLibraries(t *testing.T, dir string) func(name, define string) {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc to make libraries")
	}
	return func(name, define string) {
		t.Helper()
		out, err := exec.Command(gcc, "-shared", "-fPIC", "-I", "../kernels/abi", "-D"+define, "-o", filepath.Join(dir, name), "../internal/engine/testdata/fake.c").CombinedOutput()
		if err != nil {
			t.Fatal(string(out))
		}
	}
}

// Where the driver is too old for the CUDA library, the one of an older toolkit takes its place, if it finds a device.
func TestLibraryForOldDrivers(t *testing.T) {
	for _, c := range []struct{ newer, older, want string }{
		{"OLD_DRIVER", "", "libdeepep_cuda.so 0"},
		{"OLD_DRIVER", "OLD_DRIVER", "libdeepep_cuda.so 0"},
		{"OLD_DRIVER", "HEAP", "libdeepep_cuda12.so 1"},
		{"HEAP", "HEAP", "libdeepep_cuda.so 1"},
	} {
		dir := t.TempDir() // the loader knows libraries by their files
		build := fakeLibraries(t, dir)
		build("libdeepep_cuda.so", c.newer)
		if c.older != "" {
			build("libdeepep_cuda12.so", c.older)
		}
		l, err := loadEngine(EngineCUDA, dir)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%s %d", filepath.Base(l.Path), l.NumDevices); got != c.want {
			t.Errorf("%s and %s: got %s, want %s", c.newer, c.older, got, c.want)
		}
	}
}
