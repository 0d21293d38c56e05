package engine_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
)

// alone is a group of one rank.
type alone struct{}

func (*alone) Rank() int                            { return 0 }
func (*alone) Size() int                            { return 1 }
func (*alone) Peer(int) engine.Peer                 { return engine.Peer{SameHost: true, SameProcess: true} }
func (*alone) Join(context.Context) error           { return nil }
func (*alone) Publish(engine.LastCall)              {}
func (*alone) Tell(string, []byte) error            { return nil }
func (*alone) Describe(int) string                  { return "rank 0 (alone)" }
func (*alone) State(int) (engine.PeerState, string) { return engine.PeerAlive, "" }
func (*alone) Awaits(int) int                       { return -1 }
func (*alone) Called(int) engine.LastCall           { return engine.LastCall{} }
func (*alone) Exchange(_ context.Context, _ string, blob []byte, _ []int) ([]device.Message, error) {
	return []device.Message{{Blob: append([]byte(nil), blob...)}}, nil
}

// fakeDir holds the fake library, made once for all tests.
var fakeDir string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if _, err := exec.LookPath("gcc"); err == nil {
			dir, err := os.MkdirTemp("", "deepep-engine-test")
			if err != nil {
				panic(err)
			}
			defer os.RemoveAll(dir)
			if err := buildFake(dir); err != nil {
				panic(err)
			}
			fakeDir = dir
		}
		return m.Run()
	}())
}

func buildFake(dir string) error {
	for file, define := range map[string]string{"libfake.so": "TRANSPORT", "libnear.so": "NO_TRANSPORT", "libheap.so": "HEAP"} {
		out, err := exec.Command("gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I", "../../kernels/abi", "-D"+define,
			"-o", filepath.Join(dir, file), "testdata/fake.c").CombinedOutput()
		if err != nil {
			return errors.New(string(out))
		}
	}
	return nil
}

// rig is a buffer over the fake library, which records the calls.
type rig struct {
	*engine.Buffer
	t                     testing.TB
	trace, capture, quiet uintptr
	refused               uintptr
	library               string
}

func newRig(t testing.TB) *rig {
	t.Helper()
	return newRigWith(t, func(*engine.Options) {})
}

// newRigWith is newRig of a buffer whose options change has seen.
func newRigWith(t testing.TB, change func(*engine.Options)) *rig {
	t.Helper()
	lib := fakeLibrary(t, "libfake.so")
	o := rigOptions(lib, plan.Topology{Ranks: 1, Peers: 8})
	change(&o)
	b, err := engine.New(context.Background(), &alone{}, o)
	if err != nil {
		t.Fatal(err)
	}
	r := watch(t, b, lib)
	r.read()
	t.Cleanup(func() {
		r.capturing(0)
		r.must(b.Destroy())
	})
	return r
}

func fakeLibrary(t testing.TB, file string) *kern.Library {
	t.Helper()
	if fakeDir == "" {
		t.Skip("needs gcc to make the fake kernel library")
	}
	lib, err := kern.Load(dl.Query{File: file, Dir: fakeDir})
	if err != nil {
		t.Fatal(err)
	}
	return lib
}

func rigOptions(lib *kern.Library, top plan.Topology) engine.Options {
	return engine.Options{
		Library: lib, Ordinal: -1, Topology: top, NVLBytes: 4096, RDMABytes: 1 << 16, LowLatency: true, Shrink: true,
		Timeout: 5 * time.Millisecond, FirstTimeout: 7 * time.Millisecond, StartLimit: time.Second, ID: 1,
	}
}

// watch finds the fake library's functions for tests.
func watch(t testing.TB, b *engine.Buffer, lib *kern.Library) *rig {
	t.Helper()
	r := &rig{Buffer: b, t: t, library: lib.Path}
	file, err := dl.Open(lib.Path)
	r.must(err)
	r.trace, err = file.Symbol("fake_trace")
	r.must(err)
	r.capture, err = file.Symbol("fake_capture")
	r.must(err)
	r.quiet, err = file.Symbol("fake_quiet")
	r.must(err)
	r.refused, err = file.Symbol("fake_refuse")
	r.must(err)
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// capturing sets which stream a graph is being captured from; 0: none.
func (r *rig) capturing(stream uint64) {
	p := &stream
	dl.Call(r.capture, unsafe.Pointer(p))
}

// refuse writes the refusal of a call as a kernel does.
func (r *rig) refuse(f abi.Failure) {
	p := &f
	dl.Call(r.refused, unsafe.Pointer(p))
}

// fail writes the failure of a call as a kernel does.
func (r *rig) fail(f abi.Failure) {
	file, err := dl.Open(r.library)
	r.must(err)
	failed, err := file.Symbol("fake_fail")
	r.must(err)
	p := &f
	dl.Call(failed, unsafe.Pointer(p))
}

// replay is what a call of a graph of the team before the newest one leaves.
func (r *rig) replay() {
	file, err := dl.Open(r.library)
	r.must(err)
	replay, err := file.Symbol("fake_replay")
	r.must(err)
	dl.Call(replay, nil)
}

// silent sets whether the library records calls; 1: no.
func (r *rig) silent(on int32) {
	p := &on
	dl.Call(r.quiet, unsafe.Pointer(p))
}

// read returns the calls since the last read.
func (r *rig) read() string {
	text := make([]byte, 1<<16)
	dl.Call(r.trace, unsafe.Pointer(unsafe.SliceData(text)))
	return kern.Text(text)
}

// expect compares the trace. C stands for the communication stream; events are a, b, … in the order in which they
// appear.
func (r *rig) expect(what string, want ...string) {
	r.t.Helper()
	var lines []string
	names := map[string]string{}
	comm := strconv.Itoa(int(r.Info().CommStream))
	for line := range strings.Lines(r.read()) {
		words := strings.Fields(line)
		for i, w := range words {
			switch _, err := strconv.Atoi(strings.TrimPrefix(w, "e")); {
			case w == comm:
				words[i] = "C"
			case w[0] == 'e' && err == nil:
				if names[w] == "" {
					names[w] = string(rune('a' + len(names)))
				}
				words[i] = names[w]
			}
		}
		lines = append(lines, strings.Join(words, " "))
	}
	if got, want := strings.Join(lines, "; "), strings.Join(want, "; "); got != want {
		r.t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// somewhere is an address that the fake library does not follow.
const somewhere = 0x10000

func (r *rig) layout(c *engine.Call) error {
	return r.Layout(&op.LayoutArgs{NumTokens: 1, NumTopK: 1, NumExperts: 1, IndexType: op.Int64, TopKIdx: somewhere,
		NumTokensPerRank: somewhere, NumTokensPerExpert: somewhere, IsTokenInRank: somewhere}, c)
}

// half issues one half of a low-latency dispatch, or both.
func (r *rig) half(phases, ticket uint32, stream uintptr) (uint32, error) {
	return r.send(phases, ticket, &engine.Call{Stream: stream})
}

func (r *rig) send(phases, ticket uint32, c *engine.Call) (uint32, error) {
	a := &op.LLDispatchArgs{Phases: op.Phase(phases), Ticket: ticket, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1, NumExperts: 1,
		IndexType: op.Int64, X: somewhere, TopKIdx: somewhere, RecvX: somewhere, RecvCount: somewhere, SrcInfo: somewhere, LayoutRange: somewhere}
	err := r.LowLatencyDispatch(a, c)
	return a.Ticket, err
}
