package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/engine"
)

// collectWarnings gathers what is logged at warn or above until the test ends.
func collectWarnings(t *testing.T) func() []string {
	t.Helper()
	engine.Warned.Clear()
	var mu sync.Mutex
	var lines []string
	SetLog(func(level int, message string) {
		mu.Lock()
		defer mu.Unlock()
		if level >= 2 {
			lines = append(lines, message)
		}
	})
	t.Cleanup(func() { SetLog(nil) })
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(lines)
	}
}

// withFiles makes thisHost a machine of these files.
func withFiles(t *testing.T, names ...string) {
	t.Helper()
	before, files := thisHost, fstest.MapFS{}
	for _, name := range names {
		files[name] = &fstest.MapFile{}
	}
	thisHost = func() doctor.Root { return doctor.Root{FS: files} }
	t.Cleanup(func() { thisHost = before })
}

// cpuAlone is a folder of kernel libraries in which only the CPU's lies, as after `make install` without `make cuda`.
func cpuAlone(t *testing.T) string {
	t.Helper()
	library := cpuLibrary(t).Path
	dir := t.TempDir()
	if err := os.Symlink(library, filepath.Join(dir, "libdeepep_cpu.so")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DEEPEP_KERNELS", dir)
	return dir
}

func TestGPUWithoutItsLibraryIsNamedOnce(t *testing.T) {
	needEngine(t)
	gpu := []string{"dev/nvidia0", "dev/nvidiactl", "proc/driver/nvidia/version"}
	construct := func(peers int, o BufferOptions) {
		t.Helper()
		o.Device, o.NumNVLBytes = -1, 1<<16
		exchangers := NewLocal(2)
		var ranks sync.WaitGroup
		for rank := range 2 {
			ranks.Go(func() {
				g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], NumNVLPeers: peers})
				if err != nil {
					t.Error(err)
					return
				}
				b, err := g.NewBuffer(context.Background(), o)
				if err == nil {
					err = b.Destroy()
				}
				if err := errors.Join(err, g.Destroy()); err != nil {
					t.Error(err)
				}
			})
		}
		ranks.Wait()
	}
	for _, c := range []struct {
		what   string
		files  []string
		peers  int
		engine string
		env    string
		parts  []string
	}{
		{"no GPU", []string{"dev/null"}, 2, "", "", nil},
		{"a driver without a GPU", []string{"proc/driver/nvidia/version", "dev/nvidiactl"}, 2, "", "", nil},
		{"a GPU", gpu, 2, "", "", []string{"has a GPU", "CPU engine", "libdeepep_cuda.so cannot be loaded", "`make cuda`", "DEEPEP_ENGINE=cpu"}},
		{"several nodes", gpu, 1, "", "", []string{"`make cuda nvshmem`"}},
		{"the CPU engine by argument", gpu, 2, EngineCPU, "", nil},
		{"the CPU engine by setting", gpu, 2, "", EngineCPU, nil},
	} {
		t.Run(c.what, func(t *testing.T) {
			cpuAlone(t)
			withFiles(t, c.files...)
			t.Setenv("DEEPEP_ENGINE", c.env)
			warnings := collectWarnings(t)
			construct(c.peers, BufferOptions{Engine: c.engine})
			construct(c.peers, BufferOptions{Engine: cmp.Or(c.engine, EngineAuto)})
			got := warnings()
			if len(got) != min(1, len(c.parts)) {
				t.Fatalf("%d warnings: %q", len(got), got)
			}
			for _, part := range c.parts {
				if !strings.Contains(got[0], part) {
					t.Errorf("%q is not in %q", part, got[0])
				}
			}
		})
	}
}

// A CUDA engine that is asked for by name and is not there ends in an error that says what to build.
func TestMissingLibraryIsInTheError(t *testing.T) {
	needEngine(t)
	cpuAlone(t)
	g := alone(t)
	if e := g.examination(&BufferOptions{Engine: EngineCUDA}); !e.Searched || len(e.Kernels) != 0 {
		t.Errorf("the doctor is not told that there is no library: %+v", e)
	}
}

// A rank whose buffer is refused while its group still starts ends that start with the refusal as its reason, which is
// what peers are told, and logs no error of its own about connecting.
func TestRefusalEndsTheStart(t *testing.T) {
	needEngine(t)
	warnings := collectWarnings(t)
	exchangers := NewLocal(2)
	ended := make(chan *bootstrap.Pending, 1)
	go func() { // rank 1 says hello and then does not connect
		pending, err := bootstrap.Begin(context.Background(), exchangers[1], bootstrap.HelloOptions{Version: versionText(), Extra: []byte("1")})
		if err != nil {
			t.Error(err)
		}
		ended <- pending
	}()
	g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[0], NumNVLPeers: 1, Background: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVSHMEM_QP_DEPTH", "1024")
	t.Setenv("DEEP_EP_NUM_MAX_RDMA_TOKENS", "2048")
	if _, err := g.NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, Device: -1}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("%v", err)
	}
	if err := g.Destroy(); err != nil {
		t.Error(err)
	}
	err = g.wait(context.Background())
	if err == nil || !strings.Contains(err.Error(), "its buffer was refused: variable NVSHMEM_QP_DEPTH: got 1024") {
		t.Errorf("%v", err)
	}
	if got := warnings(); len(got) != 0 {
		t.Errorf("%q", got)
	}
	if err := (<-ended).Close(); err != nil {
		t.Error(err)
	}
}

// allow_mnnvl, which only NVSHMEM can use, is not taken without a word elsewhere.
func TestLinksThatAreNotThere(t *testing.T) {
	warnings := collectWarnings(t)
	for _, allow := range []bool{false, true, true} {
		onNodes(t, 2, 1, BufferOptions{AllowMNNVL: allow, LowLatency: true}, func(*member) {})
		if got, want := len(warnings()), map[bool]int{true: 1}[allow]; got != want {
			t.Errorf("allowed %v: %q", allow, warnings())
		}
	}
	if got := fmt.Sprint(warnings()); !strings.Contains(got, "allow_mnnvl has no effect with engine cpu") {
		t.Error(got)
	}
}

// A config that asks for SMs inside a node of the CPU engine is warned of once; V1's default and the library's are not.
func TestConfigsWithoutEffect(t *testing.T) {
	warnings := collectWarnings(t)
	use := func(peers int, config Config) {
		onNodes(t, 2, peers, BufferOptions{}, func(m *member) {
			own, perRank, perExpert, inRank := routing(1, 2, 20, 3, 4)[m.rank], make([]int32, 2), make([]int32, 4), make([]uint8, 40)
			for range 2 {
				m.must(m.Layout(&LayoutArgs{NumTokens: int32(own.tokens), NumTopK: 3, NumExperts: 4, IndexType: Int64, TopKIdx: address(m, own.index),
					NumTokensPerRank: address(m, perRank), NumTokensPerExpert: address(m, perExpert), IsTokenInRank: address(m, inRank)}, &Call{Config: &config}))
			}
		})
	}
	chunks := Config{NumSMs: 0, NVLSendChunk: 3, NVLRecvChunk: 40, RDMASendChunk: 5, RDMARecvChunk: 50}
	use(2, DefaultConfig())
	use(2, chunks)
	chunks.NumSMs = 36
	use(1, chunks)
	if got := warnings(); len(got) != 0 {
		t.Errorf("chunks count on the CPU engine, 0 and 20 SMs ask for nothing, and between nodes SMs count: %q", got)
	}
	for range 2 {
		use(2, chunks)
	}
	if got := warnings(); len(got) != 1 || !strings.Contains(got[0], "num_sms = 36 has no effect inside a node") {
		t.Errorf("%q", got)
	}
}
