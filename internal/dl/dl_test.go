package dl

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/deepep-go/deepep/internal/status"
)

// build compiles a small library. Without a C compiler the test is skipped.
func build(t testing.TB, dir, name, source string) string {
	t.Helper()
	cc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc to make a shared library")
	}
	c := filepath.Join(t.TempDir(), "x.c")
	if err := os.WriteFile(c, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	so := filepath.Join(dir, name)
	if out, err := exec.Command(cc, "-shared", "-fPIC", "-o", so, c).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return so
}

func TestCallReadsAndWritesTheStruct(t *testing.T) {
	so := build(t, t.TempDir(), "libcall.so", "int add(int *p) { p[2] = p[0] + p[1]; return -7; }")
	l, err := Open(so)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	fn, err := l.Symbol("add")
	if err != nil {
		t.Fatal(err)
	}
	p := &[3]int32{40, 2, 0}
	if r := Call(fn, unsafe.Pointer(p)); r != -7 || p[2] != 42 {
		t.Errorf("returned %d, wrote %d", r, p[2])
	}
	allocs := testing.AllocsPerRun(100, func() { Call(fn, unsafe.Pointer(p)) })
	if allocs != 0 {
		t.Errorf("%v allocations a call", allocs)
	}
	if _, err := l.Symbol("sub"); err == nil || !strings.Contains(err.Error(), "no function sub") {
		t.Errorf("missing symbol: %v", err)
	}
}

// The cost of a call into C.
func BenchmarkCall(b *testing.B) {
	l, err := Open(build(b, b.TempDir(), "libnothing.so", "int nothing(int *p) { return *p; }"))
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	fn, err := l.Symbol("nothing")
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		p := int32(7)
		if Call(fn, unsafe.Pointer(&p)) != 7 {
			b.Fatal("another result")
		}
	}
}

// deep calls fn with a local struct, below the given number of frames.
func deep(fn uintptr, frames int32) (sum int32) {
	var room [64]int32 // makes the stack grow on the way down, so that the collector shrinks it later
	room[frames&63] = frames
	if frames > 0 {
		return deep(fn, frames-1) + room[frames&63] - frames
	}
	p := [3]int32{40, 2, 0}
	if r := Call(fn, unsafe.Pointer(&p)); r != -7 {
		return r
	}
	return p[2]
}

// A local struct stays in place during the call, even when the collector shrinks the goroutine's stack.
func TestCallWithALocalStruct(t *testing.T) {
	so := build(t, t.TempDir(), "libslow.so", `#include <unistd.h>
		int add(volatile int *p) { for (int i = 0; i < 5; i++) { usleep(100); p[2] = p[0] + p[1]; } return -7; }`)
	l, err := Open(so)
	if err != nil {
		t.Fatal(err)
	}
	fn, err := l.Symbol("add")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range int32(40) {
				if got := deep(fn, 1+i*37%300); got != 42 {
					t.Errorf("C left %d", got)
				}
				if got := deep(fn, 0); got != 42 { // on a stack that is too large now
					t.Errorf("C left %d", got)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	for {
		select {
		case <-done:
			l.Close()
			return
		default:
			runtime.GC()
		}
	}
}

func TestFindTakesTheFirstAcceptedAndListsWhatItTried(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	build(t, first, "libx.so", "int f(void *p) { return 1; }")
	build(t, second, "libx.so", "int f(void *p) { return 2; }")
	if err := os.WriteFile(filepath.Join(first, "liby.so"), []byte("not an ELF file"), 0o600); err != nil {
		t.Fatal(err)
	}
	var got string
	refuse := errors.New("wrong colour")
	accept := func(l *Library) error {
		if filepath.Dir(l.Path) == first {
			return status.Errorf(status.Version, "%w", refuse)
		}
		got = l.Path
		return nil
	}
	if err := Find(Query{File: "libx.so", Beside: []string{first, second}}, accept); err != nil || filepath.Dir(got) != second {
		t.Errorf("found %q: %v", got, err)
	}
	err := Find(Query{File: "libx.so", Dir: first, Beside: []string{second}}, accept)
	if !errors.Is(err, status.ErrVersion) || !strings.Contains(err.Error(), first) || !strings.Contains(err.Error(), "wrong colour") {
		t.Errorf("only the named folder is searched: %v", err)
	}
	err = Find(Query{File: "liby.so", Beside: []string{first, second}}, accept)
	if !errors.Is(err, status.ErrNotFound) {
		t.Errorf("kind: %v", err)
	}
	for _, part := range []string{filepath.Join(first, "liby.so"), "file too short", filepath.Join(second, "liby.so"), "no such file", "DEEPEP_KERNELS"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in: %v", part, err)
		}
	}
}

func TestCandidatesAreOrderedAndUnique(t *testing.T) {
	root := sourceTree()
	if root == "" {
		t.Fatal("the test runs in a checkout, and sourceTree does not find it")
	}
	tree := filepath.Join(root, "build", "lib")
	got := candidates(Query{File: "f.so", Beside: []string{"/a", tree}})
	want := []string{"/a/f.so", tree + "/f.so", filepath.Join(codeFolder(), "f.so"), "f.so", "/usr/local/lib/f.so"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestMappedFile(t *testing.T) {
	const maps = "1000-2000 r-xp 00000000 00:01 7   /a dir/lib x.so (deleted)\n3000-4000 rw-p 00000000 00:00 0 \n"
	for address, want := range map[uint64]string{0x1000: "/a dir/lib x.so", 0x1fff: "/a dir/lib x.so", 0x2000: "", 0x3000: "", 0x9000: ""} {
		if got := mappedFile(maps, address); got != want {
			t.Errorf("%x: %q, want %q", address, got, want)
		}
	}
}

// Without /proc the loader names the file of an address.
func TestLoadedFile(t *testing.T) {
	path := build(t, t.TempDir(), "loaded.so", "int f(void) { return 1; }")
	l, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.Symbol("f")
	if err != nil {
		t.Fatal(err)
	}
	if got := loadedFile(f); got != path {
		t.Errorf("%q, want %q", got, path)
	}
	if got := loadedFile(1); got != "" {
		t.Errorf("an address of no file: %q", got)
	}
}
