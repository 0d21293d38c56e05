package core

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/deepep-go/deepep/internal/plan"
)

// emulatedGPUs makes the CUDA library on emulated devices the CUDA engine of the test.
func emulatedGPUs(t *testing.T) {
	t.Helper()
	library := os.Getenv("DEEPEP_TEST_EMULATED")
	if library == "" {
		t.Skip("needs DEEPEP_TEST_EMULATED, a CUDA library on emulated devices (make emulated)")
	}
	dir := t.TempDir()
	if err := os.Symlink(library, filepath.Join(dir, "libdeepep_cuda.so")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"cpu"} {
		if err := os.Symlink(filepath.Join(os.Getenv("DEEPEP_KERNELS"), "libdeepep_"+name+".so"), filepath.Join(dir, "libdeepep_"+name+".so")); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("DEEPEP_KERNELS", dir)
}

func TestPlanOnEmulatedGPUs(t *testing.T) {
	emulatedGPUs(t)
	for _, settings := range []environment{{}, {"DEEPEP_TIMEOUT_MS": "90000", "DEEPEP_ZERO_COPY_BYTES": "1048576", "DEEPEP_NORMAL_TRANSFER": "copy", "DEEPEP_LL_TRANSFER": "stream"}} {
		settings.set(t)
		for _, size := range []int{1, 2, 3} {
			for _, o := range []PlanOptions{
				{Size: size, NumTokens: 8, Hidden: 256, NumTopK: 2, NumExperts: 6},
				{Size: size, NumMaxTokens: 4, Hidden: 256, NumTopK: 2, NumExperts: 12, Buffer: BufferOptions{Shrink: true}},
				{Size: size, Buffer: BufferOptions{NumNVLBytes: 3<<20 + 5}},
			} {
				o.Buffer.Engine = EngineCUDA
				comparePlan(t, o)
			}
		}
	}
}

// Without a number from the caller the plan's formula chooses the SMs, and each choice is logged once; a configuration
// with a number is obeyed in silence.
func TestChosenSMsAreLogged(t *testing.T) {
	emulatedGPUs(t)
	var mu sync.Mutex
	var lines []string
	SetLog(func(_ int, message string) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(message, " SMs for ") {
			lines = append(lines, message)
		}
	})
	defer SetLog(nil)
	o := BufferOptions{Engine: EngineCUDA, NumNVLBytes: 4 << 20}
	onRanks(t, 2, o, func(m *member) {
		w := WarmupOptions{NumTokens: 3, Hidden: 256, NumTopK: 2, NumExperts: 4}
		m.warmup(w)
		m.warmup(w)
	})
	q := plan.SMQuery{Topology: plan.Topology{Ranks: 2, Peers: 8}, RowBytes: 512, Tokens: 3, TopK: 2, Staged: true, ComputeCapability: 90}
	var want []string
	for range 2 { // ranks
		q.Kind = plan.KindDispatch
		want = append(want, fmt.Sprintf("%d SMs for dispatch of 3 tokens, top-2, rows of 512 bytes through staging memory", plan.NumSMs(q)))
		q.Kind = plan.KindCombine
		want = append(want, fmt.Sprintf("%d SMs for combine of 3 tokens, top-2, rows of 512 bytes", plan.NumSMs(q)))
	}
	for i := range lines {
		lines[i], _, _ = strings.Cut(lines[i], ": neither set_num_sms nor a config gives a number")
	}
	slices.Sort(lines)
	slices.Sort(want)
	if !slices.Equal(lines, want) {
		t.Errorf("got  %q\nwant %q", lines, want)
	}
}
