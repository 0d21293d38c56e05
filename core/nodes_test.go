package core

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/plan"
)

// grouping is a number of nodes and the ranks of each.
type grouping struct{ nodes, perNode int }

func (g grouping) ranks() int     { return g.nodes * g.perNode }
func (g grouping) String() string { return fmt.Sprintf("%dx%d", g.nodes, g.perNode) }

var groupings = []grouping{{2, 2}, {4, 1}, {3, 2}}

// softly sets the character of the software RDMA: half of the suites run with everything as late as it may be.
func softly(t *testing.T, seed int) {
	t.Helper()
	character := fmt.Sprint(seed)
	if seed%2 == 1 {
		character += ":late"
	}
	t.Setenv("DEEPEP_SOFTWARE_RDMA", character)
}

// normalRoom is what a normal-mode buffer of nodes takes by the hints for the smallest configuration there is.
func normalRoom(t testing.TB, g grouping, rowBytes int64) BufferOptions {
	t.Helper()
	c, top := plan.Config{NumSMs: 2, NVLSendChunk: 1, NVLRecvChunk: 2, RDMASendChunk: 1, RDMARecvChunk: 2}, plan.Topology{Ranks: g.ranks(), Peers: g.perNode}
	nvl, err := c.NVLBytes(rowBytes, top)
	if err != nil {
		t.Fatal(err)
	}
	rdma, err := c.RDMABytes(rowBytes, top)
	if err != nil {
		t.Fatal(err)
	}
	return BufferOptions{NumNVLBytes: nvl, NumRDMABytes: rdma}
}

func TestLayoutOfNodes(t *testing.T) {
	for _, g := range groupings {
		onNodes(t, g.ranks(), g.perNode, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
			const k = 3
			experts := 2 * m.size
			own := routing(1, m.size, 20, k, experts)[m.rank]
			perRank, perNode, perExpert := make([]int32, m.size), make([]int32, g.nodes), make([]int32, experts)
			inRank := make([]uint8, 20*m.size)
			m.must(m.Layout(&LayoutArgs{NumTokens: int32(own.tokens), NumTopK: k, NumExperts: int32(experts), IndexType: Int64, TopKIdx: address(m, own.index),
				NumTokensPerRank: address(m, perRank), NumTokensPerRDMARank: address(m, perNode), NumTokensPerExpert: address(m, perExpert), IsTokenInRank: address(m, inRank)}, &Call{}))
			want := make([]int32, g.nodes)
			for token := range own.tokens {
				for node := range g.nodes { // once for a node, however many of its ranks want the token
					for to := node * g.perNode; to < (node+1)*g.perNode; to++ {
						if own.sends(token, k, to, 2) {
							want[node]++
							break
						}
					}
				}
			}
			m.check(fmt.Sprint(perNode) == fmt.Sprint(want), "%v tokens to the nodes, want %v", perNode, want)
		})
	}
}

func TestNormalModeAcrossNodes(t *testing.T) {
	for seed, g := range groupings {
		for i, c := range []normal{{g.ranks(), 24, 40, 3, 2}, {g.ranks(), 70, 1032, 8, 4}} {
			t.Run(fmt.Sprintf("%v %+v", g, c), func(t *testing.T) {
				softly(t, seed+i)
				onNodes(t, g.ranks(), g.perNode, normalRoom(t, g, 2*int64(c.hidden)), func(m *member) { m.normalRounds(c, 4) })
			})
		}
		t.Run(fmt.Sprintf("%v cached, worst case", g), func(t *testing.T) {
			softly(t, seed)
			onNodes(t, g.ranks(), g.perNode, normalRoom(t, g, 64), func(m *member) {
				scalesAndCached(m)
				worstCase(m)
			})
		})
	}
}

// A call works at the floor that the error names, and fails below it.
func TestSmallRDMABuffers(t *testing.T) {
	c := normal{4, 40, 1032, 4, 2}
	var floor uint64
	onNodes(t, 4, 2, BufferOptions{NumNVLBytes: 4 << 20, NumRDMABytes: 64}, func(m *member) {
		err := m.combineNothing(c.hidden)
		m.check(errors.Is(err, ErrInvalidArgument), "%v", err)
		_, after, found := strings.Cut(err.Error(), "num_rdma_bytes = 64 of the buffer cannot stage rows of 2064 bytes between 2 nodes: at least ")
		m.check(found, "%v", err)
		if m.rank == 0 {
			_, err = fmt.Sscan(after, &floor)
			m.must(err)
		}
	})
	hint, err := plan.DefaultConfig.RDMABytes(2064, plan.Topology{Ranks: 4, Peers: 2})
	if err != nil || floor == 0 || floor > hint {
		t.Fatalf("floor %d, hint %d, %v", floor, hint, err)
	}
	onNodes(t, 4, 2, BufferOptions{NumNVLBytes: 4 << 20, NumRDMABytes: floor + 4*8}, func(m *member) { m.normalRounds(c, 2) })
}

func (m *member) combineNothing(hidden int) error {
	prefix := make([]int32, m.size*m.size)
	h := &Handle{NumRanks: int32(m.size), RankPrefixMatrix: address(m, prefix)}
	return m.Combine(&CombineArgs{Hidden: int64(hidden), Handle: h}, &Call{})
}

func TestLowLatencyAcrossNodes(t *testing.T) {
	for seed, g := range groupings {
		t.Run(g.String(), func(t *testing.T) {
			softly(t, seed)
			c := lowLatencyShape{g.ranks(), 7, 8, 256, 3, 2}
			onNodes(t, g.ranks(), g.perNode, c.room(t), func(m *member) {
				m.lowLatencyRounds(c, 5)
				m.lowLatencyHalves(6, 256, 2, 2*g.ranks())
			})
		})
	}
}

// Without NVLink every other rank is reached by queue pairs, on one node and on several.
func TestLowLatencyWithoutNVLink(t *testing.T) {
	for seed, g := range []grouping{{1, 3}, {2, 2}} {
		t.Run(g.String(), func(t *testing.T) {
			softly(t, seed)
			c := lowLatencyShape{g.ranks(), 7, 8, 256, 3, 2}
			o := c.room(t)
			o.DisableNVLink = true
			onNodes(t, g.ranks(), g.perNode, o, func(m *member) { m.lowLatencyRounds(c, 4) })
		})
	}
}

// Any number of queue pairs of any depth will do.
func TestFewAndShallowQueuePairs(t *testing.T) {
	g := grouping{2, 2}
	c, ll := normal{4, 50, 136, 4, 3}, lowLatencyShape{4, 7, 8, 256, 3, 3}
	for _, q := range []struct{ qps, depth string }{{"1", "1"}, {"2", "2"}, {"5", "8"}} {
		t.Run(q.qps+" of depth "+q.depth, func(t *testing.T) {
			softly(t, 1)
			t.Setenv("DEEPEP_NUM_QPS_PER_RANK", q.qps)
			t.Setenv("NVSHMEM_QP_DEPTH", q.depth)
			o := ll.room(t)
			o.NumNVLBytes = 4 << 20
			onNodes(t, g.ranks(), g.perNode, o, func(m *member) {
				m.normalRounds(c, 2)
				m.must(m.Clean(8, 256, 12, &Call{}))
				m.lowLatencyRounds(ll, 3)
				m.lowLatencyHalves(6, 256, 2, 12) // then this rank destroys its buffer: peers must still receive what it sent
			})
		})
	}
}

func TestSettingsOfNodes(t *testing.T) {
	making := func(t *testing.T, o BufferOptions, change func(rank int, o *BufferOptions)) (errs [4]error) {
		t.Helper()
		needEngine(t)
		exchangers := NewLocal(4)
		o.Engine, o.Device = EngineCPU, -1
		var ranks sync.WaitGroup
		for rank := range 4 {
			ranks.Go(func() {
				o := o
				if change != nil {
					change(rank, &o)
				}
				g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], NumNVLPeers: 1, Timeout: 10 * time.Second})
				if err != nil {
					t.Error(err)
					return
				}
				b, err := g.NewBuffer(context.Background(), o)
				if errs[rank] = err; err == nil {
					errs[rank] = b.Destroy()
				}
				if err := g.Destroy(); err != nil {
					t.Error(err)
				}
			})
		}
		ranks.Wait()
		return errs
	}
	refused := func(t *testing.T, errs [4]error, kind error, parts ...string) {
		t.Helper()
		for rank, err := range errs {
			for _, part := range parts {
				if !errors.Is(err, kind) || !strings.Contains(err.Error(), part) {
					t.Errorf("rank %d: %q is not in %v", rank, part, err)
				}
			}
		}
	}
	t.Run("queue pairs differ", func(t *testing.T) {
		errs := making(t, BufferOptions{}, func(rank int, o *BufferOptions) { o.NumQPsPerRank = 3 + rank/3 })
		refused(t, errs, ErrMismatch, "num_qps_per_rank: ranks 0, 1, 2 have 3, rank 3 has 4")
	})
	t.Run("the environment's number counts", func(t *testing.T) {
		t.Setenv("DEEPEP_NUM_QPS_PER_RANK", "2")
		errs := making(t, BufferOptions{}, func(rank int, o *BufferOptions) { o.NumQPsPerRank = 3 + rank/3 })
		if errs != [4]error{} {
			t.Error(errs)
		}
	})
	t.Run("too many nodes", func(t *testing.T) {
		t.Setenv("NUM_MAX_RDMA_PEERS", "3")
		refused(t, making(t, BufferOptions{}, nil), ErrInvalidArgument, "4 ranks with num_nvl_peers = 1 are 4 nodes", "DEEPEP_NUM_MAX_RDMA_PEERS = 3")
		if errs := making(t, BufferOptions{LowLatency: true}, nil); errs != [4]error{} { // V1 has the limit in normal mode alone
			t.Error(errs)
		}
	})
	t.Run("too shallow", func(t *testing.T) {
		t.Setenv("NVSHMEM_IBGDA_QP_DEPTH", "256")
		t.Setenv("DEEP_EP_NUM_MAX_RDMA_TOKENS", "128")
		refused(t, making(t, BufferOptions{}, nil), ErrInvalidArgument, "variable NVSHMEM_IBGDA_QP_DEPTH: got 256, allowed at least 512 with DEEP_EP_NUM_MAX_RDMA_TOKENS=128",
			"fix: export NVSHMEM_QP_DEPTH=512")
		t.Setenv("NVSHMEM_QP_DEPTH", "512")
		if errs := making(t, BufferOptions{}, nil); errs != [4]error{} {
			t.Errorf("after the fix: %v", errs)
		}
	})
	t.Run("the exports of the guides, where there is no queue pair", func(t *testing.T) {
		t.Setenv("NVSHMEM_IBGDA_QP_DEPTH", "1024")
		t.Setenv("DEEP_EP_NUM_MAX_RDMA_TOKENS", "2048")
		onNodes(t, 2, 2, BufferOptions{LowLatency: true}, func(m *member) {})
	})
	t.Run("order of creation", func(t *testing.T) {
		const tokens = 8
		for _, order := range plan.OrderNames() {
			t.Setenv("DEEPEP_QP_ORDER", order)
			c := lowLatencyShape{4, 7, tokens, 256, 3, 2}
			onNodes(t, 4, 2, c.room(t), func(m *member) {
				m.lowLatencyRounds(c, 1)
				i, team := m.Info(), map[int]string{0: "[0 2]", 1: "[1 3]", 2: "[0 2]", 3: "[1 3]"}
				m.check(i.QPOrderName == order || order == "auto" && i.QPOrderName == "spread", "%s: the order is %s", order, i.QPOrderName)
				m.check(fmt.Sprint(i.RDMATeam.Ranks()) == team[m.rank], "sub-team %v", i.RDMATeam)
			})
		}
	})
	t.Run("workspace", func(t *testing.T) {
		t.Setenv("NUM_WORKSPACE_BYTES", "100")
		refused(t, making(t, BufferOptions{}, nil), ErrInvalidArgument, "of 4 ranks take", "DEEPEP_NUM_WORKSPACE_BYTES = 100")
	})
}

// Buffers of nodes end while their last messages are under way; what was sent still arrives.
func TestDestroyAcrossNodes(t *testing.T) {
	g := grouping{2, 2}
	c := lowLatencyShape{4, 7, 8, 256, 3, 2}
	softly(t, 3)
	t.Run("after the last message", func(t *testing.T) {
		for seed := range 6 {
			t.Setenv("DEEPEP_SOFTWARE_RDMA", fmt.Sprintf("%d:late", seed))
			onNodes(t, g.ranks(), g.perNode, c.room(t), func(m *member) {
				m.must(m.Barrier(&Call{}))
				m.lowLatencyRounds(c, 1)
			})
		}
	})
	t.Run("work that never ends", func(t *testing.T) {
		var launched sync.WaitGroup
		launched.Add(g.ranks() - 1)
		onNodes(t, g.ranks(), g.perNode, c.room(t), func(m *member) {
			if m.rank == 3 {
				launched.Wait()
				return // the others wait for it in vain
			}
			goOn := sync.OnceFunc(launched.Done)
			defer goOn()
			ev := m.event()
			m.must(m.Barrier(&Call{Async: true, Event: ev}))
			goOn()
			begin := time.Now()
			m.must(m.Buffer.Destroy())
			m.check(time.Since(begin) < 2*time.Second, "destroy took %v", time.Since(begin))
			m.must(ev.Destroy())
		})
	})
}

// The CUDA engine takes its library with NVSHMEM where ranks are beyond NVLink, and that alone. Two libraries that do
// nothing stand in for both.
func TestNodesOfGPUsNeedTheirLibrary(t *testing.T) {
	dir := t.TempDir()
	build := fakeLibraries(t, dir)
	t.Setenv("DEEPEP_KERNELS", dir)
	made := func(perNode int, o BufferOptions) (paths []string, err error) {
		exchangers := NewLocal(2)
		var lock sync.Mutex
		var ranks sync.WaitGroup
		for rank := range 2 {
			ranks.Go(func() {
				g, e := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], NumNVLPeers: perNode, Timeout: 10 * time.Second})
				if e != nil {
					t.Error(e)
					return
				}
				o := o
				o.Engine, o.Device = EngineCUDA, -1
				b, e := g.NewBuffer(context.Background(), o)
				lock.Lock()
				defer lock.Unlock()
				if err = e; e == nil {
					paths = append(paths, filepath.Base(b.Info().KernelPath))
					e = b.Destroy()
				} else {
					e = nil
				}
				if e := errors.Join(e, g.Destroy()); e != nil {
					t.Error(e)
				}
			})
		}
		ranks.Wait()
		return paths, err
	}
	build("libdeepep_cuda.so", "NO_TRANSPORT")
	if paths, err := made(2, BufferOptions{}); err != nil || fmt.Sprint(paths) != "[libdeepep_cuda.so libdeepep_cuda.so]" {
		t.Errorf("one node: %v %v", paths, err)
	}
	t.Setenv("DEEPEP_ENGINE", EngineAuto)
	const limit = "argument num_max_dispatch_tokens_per_rank: got 70000, allowed 0 to 65535 with libdeepep_cuda.so"
	if _, err := LowLatencySizeHint(70000, 128, 2, 8); err == nil || err.Error() != limit {
		t.Errorf("a hint above the library's limit: %v", err)
	}
	for _, o := range []struct {
		perNode int
		BufferOptions
	}{{1, BufferOptions{}}, {2, BufferOptions{LowLatency: true, DisableNVLink: true}}} {
		if _, err := made(o.perNode, o.BufferOptions); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "libdeepep_nvshmem.so") {
			t.Errorf("without the library: %v", err)
		}
	}
	build("libdeepep_nvshmem.so", "HEAP")
	if paths, err := made(1, BufferOptions{}); err != nil || fmt.Sprint(paths) != "[libdeepep_nvshmem.so libdeepep_nvshmem.so]" {
		t.Errorf("two nodes: %v %v", paths, err)
	}
}
