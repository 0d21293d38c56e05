package monitor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/pagetest"
)

var meta = Meta{Rank: 1, NumRanks: 4, Buffer: 7, Group: "g-17", Host: "node-a", Engine: "cpu", Device: "Xeon", TraceLen: 8}

func create(t *testing.T, dir string, m Meta) *Page {
	t.Helper()
	p, err := Create(dir, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = p.Remove(), p.Unmap() })
	return p
}

// folder is a folder that Create accepts.
func folder(t *testing.T) string { return filepath.Join(t.TempDir(), "pages") }

func publish(t *testing.T, p *Page) {
	t.Helper()
	if err := p.Publish(); err != nil {
		t.Fatal(err)
	}
}

func only(t *testing.T, dir string) Entry {
	t.Helper()
	entries, err := List(dir)
	if err != nil || len(entries) != 1 {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	return entries[0]
}

func TestCountersComeBack(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	for i := range 11 {
		pagetest.Record(p.Bytes(), pagetest.Call{
			Op: abi.OpDispatch, Start: uint64(1000 + i), Duration: 100 * time.Microsecond, Error: i == 10,
			BytesTo: []uint64{1, 2, 3, 4}, WaitFor: []time.Duration{0, 0, 50, 7},
		})
	}
	pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpCombine, Duration: time.Millisecond})
	publish(t, p)
	e := only(t, dir)
	if e.Err != nil || e.Dead {
		t.Fatalf("%+v", e)
	}
	s := e.Stats
	if s.Rank != 1 || s.NumRanks != 4 || s.Buffer != 7 || s.Group != "g-17" || s.Host != "node-a" || s.Engine != "cpu" ||
		s.Device != "Xeon" || s.PID != os.Getpid() || s.State != Live || time.Since(s.Created) > time.Minute {
		t.Errorf("head: %+v", s)
	}
	d := s.Ops[abi.OpDispatch]
	if d.Calls != 11 || d.Errors != 1 || d.Bytes != 110 || d.WaitNS != 11*57 || d.TotalNS != 11*100_000 ||
		!reflect.DeepEqual(d.BytesTo, []uint64{11, 22, 33, 44}) || !reflect.DeepEqual(d.WaitFor, []uint64{0, 0, 550, 77}) {
		t.Errorf("dispatch: %+v", d)
	}
	if d.Mean() != 100*time.Microsecond || d.Max() != 100*time.Microsecond || d.Percentile(0.5) != 100*time.Microsecond {
		t.Errorf("mean %v, max %v, p50 %v", d.Mean(), d.Max(), d.Percentile(0.5))
	}
	if s.TraceTotal != 12 || len(s.Trace) != 8 || s.Trace[0].Number != 5 || s.Trace[0].Start != 1004 || s.Trace[7].Op != abi.OpCombine {
		t.Errorf("trace of %d: %+v", s.TraceTotal, s.Trace)
	}
	own, err := p.Snapshot()
	if err != nil || !reflect.DeepEqual(own, s) {
		t.Errorf("the owner reads something else: %v\n%+v\n%+v", err, own, s)
	}
}

// The test writer and plan agree on the bounds of the histogram's buckets.
func TestBucketsMeanTheSame(t *testing.T) {
	for b := range abi.HistBuckets {
		end := plan.BucketEnd(b)
		if got := pagetest.Bucket(end - 1); got != b {
			t.Errorf("%d ns is in bucket %d, not %d", end-1, got, b)
		}
		if got := pagetest.Bucket(end); got != min(b+1, abi.HistBuckets-1) {
			t.Errorf("%d ns is in bucket %d, not %d", end, got, b+1)
		}
	}
}

func TestFilesAreTheOwnersAlone(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	for path, want := range map[string]fs.FileMode{dir: 0o700 | fs.ModeDir, p.Path(): 0o600} {
		st, err := os.Stat(path)
		if err != nil || st.Mode() != want {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	if len(p.Bytes())%pageSize != 0 || uintptr(unsafe.Pointer(&p.Bytes()[0]))%pageSize != 0 {
		t.Error("not whole pages of memory")
	}
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(open, meta); err == nil || !strings.Contains(err.Error(), "0777") {
		t.Errorf("a folder open to all: %v", err)
	}
	if _, err := List(open); err == nil || !strings.Contains(err.Error(), "0777") {
		t.Errorf("listing a folder open to all: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(link, meta); err == nil || !strings.Contains(err.Error(), "not a folder") {
		t.Errorf("a link: %v", err)
	}
}

func TestRemoveAndUnmap(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	if err := p.Remove(); err != nil {
		t.Fatal(err)
	}
	if entries, err := List(dir); err != nil || len(entries) != 0 {
		t.Errorf("%v %v", entries, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
	s, err := p.Snapshot() // kernels may still write, so that the memory is mapped
	if err != nil || s.State != Destroyed {
		t.Errorf("%v %v", s, err)
	}
	for range 2 {
		if err := errors.Join(p.Remove(), p.Unmap()); err != nil {
			t.Error(err)
		}
	}
}

// Goroutines that create and remove pages at the same time remove and make the folder again and again.
func TestFolderComesAndGoes(t *testing.T) {
	dir := folder(t)
	var makers sync.WaitGroup
	for range 4 {
		makers.Go(func() {
			for range 200 {
				p, err := Create(dir, meta)
				if err != nil {
					t.Error(err)
					return
				}
				if err := errors.Join(p.Remove(), p.Unmap()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	makers.Wait()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}

func TestWrongArguments(t *testing.T) {
	for _, c := range []struct {
		change func(*Meta)
		want   string
	}{
		{func(m *Meta) { m.NumRanks = 0 }, "num_ranks"},
		{func(m *Meta) { m.NumRanks = 1025 }, "1025"},
		{func(m *Meta) { m.Rank = 4 }, "rank"},
		{func(m *Meta) { m.Rank = -1 }, "rank"},
		{func(m *Meta) { m.TraceLen = -5 }, "trace_len"},
		{func(m *Meta) { m.TraceLen = maxTrace + 1 }, "trace_len"},
	} {
		m := meta
		c.change(&m)
		if _, err := Create(folder(t), m); status.CodeOf(err) != status.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	if _, err := Create("/proc/nowhere", meta); err == nil || !strings.Contains(err.Error(), "/proc/nowhere") {
		t.Errorf("%v", err)
	}
	long := meta
	long.Group, long.Engine = strings.Repeat("g", 100), strings.Repeat("e", 100)
	s, err := create(t, folder(t), long).Snapshot()
	if err != nil || len(s.Group) != 63 || len(s.Engine) != 15 {
		t.Errorf("%v %v", s, err)
	}
}

func TestFallsBack(t *testing.T) {
	if err := inMemory("/dev/shm"); err != nil {
		t.Errorf("%v", err)
	}
	if err := inMemory("/proc"); err == nil || !strings.Contains(err.Error(), "/proc lies on a disk") {
		t.Errorf("%v", err)
	}
	p := &Page{bytes: make([]byte, pageSize), owner: os.Getpid()}
	if err := p.file("", "1-1-1-1.page"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(p.path), unix.Munmap(p.lock)); err != nil {
		t.Error(err)
	}
	_ = os.Remove(filepath.Dir(p.path)) // fails where other processes have pages
}

// Where no page can be, no folder is left.
func TestNoFolderIsLeft(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pages")
	p := &Page{bytes: make([]byte, pageSize), owner: os.Getpid()}
	if err := p.fileIn(dir, "1-1-1-1.page", false); err == nil {
		t.Skip("the temporary folder lies in memory")
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
	if err := p.fileIn(dir, strings.Repeat("x", 300), true); err == nil {
		t.Error("a name of 300 bytes")
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}

// A script that cuts pages short (or replaces them) ends no process, and the next copy mends the page.
func TestCutShort(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	if err := os.Truncate(p.Path(), 0); err != nil {
		t.Fatal(err)
	}
	pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpBarrier, Duration: time.Millisecond}) // SIGBUS in a mapping of the file
	end := time.Now().Add(100 * PublishEvery)
	for entries, err := List(dir); ; entries, err = List(dir) {
		if err == nil && len(entries) == 1 && entries[0].Err == nil && entries[0].Stats.Ops[abi.OpBarrier].Calls == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("not published: %+v %v", entries, err)
		}
		time.Sleep(PublishEvery / 10)
	}
	if err := errors.Join(os.Remove(p.Path()), os.WriteFile(p.Path(), []byte("another's"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(); err == nil {
		t.Error("another file was written")
	}
	if b, err := os.ReadFile(p.Path()); err != nil || string(b) != "another's" {
		t.Errorf("%q %v", b, err)
	}
}

// The publisher ends with the last page.
func TestPublisherEnds(t *testing.T) {
	p, q := create(t, folder(t), meta), create(t, folder(t), meta)
	if err := p.Remove(); err != nil {
		t.Fatal(err)
	}
	if published.stop == nil {
		t.Error("ended with the first page")
	}
	if err := q.Unmap(); err != nil {
		t.Fatal(err)
	}
	if published.stop != nil {
		t.Error("runs without a page")
	}
}

const childFolder = "DEEPEP_TEST_PAGE_FOLDER"

// TestDeadProcess makes a page in a child that is killed.
func TestDeadProcess(t *testing.T) {
	if dir := os.Getenv(childFolder); dir != "" {
		p, err := Create(dir, meta)
		if err != nil {
			t.Fatal(err)
		}
		pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpBarrier, Duration: time.Millisecond})
		time.Sleep(4 * PublishEvery) // what a process did before is seen after its death
		fmt.Println("made")
		time.Sleep(time.Minute) // until the parent kills the process
		return
	}
	dir := folder(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^TestDeadProcess$")
	cmd.Env = append(os.Environ(), childFolder+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fscanln(out, new(string)); err != nil {
		t.Fatal(err)
	}
	if e := only(t, dir); e.Err != nil || e.Dead || e.Stats.PID != cmd.Process.Pid {
		t.Fatalf("living: %+v", e)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed, so that it returns an error
	for range 2 {  // every reader sees it
		e := only(t, dir)
		if e.Err != nil || !e.Dead || e.Stats.Ops[abi.OpBarrier].Calls != 1 || !strings.HasSuffix(e.Path, deadSuffix) {
			t.Fatalf("dead: %+v", e)
		}
	}
	longAgo := time.Now().Add(-2 * DeadFor)
	if err := os.Chtimes(only(t, dir).Path, longAgo, longAgo); err != nil {
		t.Fatal(err)
	}
	gone(t, dir)
}

// gone checks that the folder holds no page.
func gone(t *testing.T, dir string) {
	t.Helper()
	if entries, err := List(dir); err != nil || len(entries) != 0 {
		t.Errorf("listed: %v %v", entries, err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 0 {
		t.Errorf("left: %v %v", files, err)
	}
}

// Create removes pages of dead processes, even if no process lists them.
func TestCreateSweeps(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	stale := fileName{pid: os.Getpid(), start: 1, number: 1, namespace: pidNamespace()}
	foreign := fileName{pid: os.Getpid(), start: 1, number: 1, namespace: 1}
	for _, n := range []fileName{stale, foreign} {
		if err := os.WriteFile(filepath.Join(dir, n.String()), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	create(t, dir, meta)
	stale.dead = true
	marked := filepath.Join(dir, stale.String())
	longAgo := time.Now().Add(-2 * DeadFor)
	if err := os.Chtimes(marked, longAgo, longAgo); err != nil {
		t.Fatal(err)
	}
	create(t, dir, meta)
	if _, err := os.Stat(marked); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the stale page is still there: %v", err)
	}
	for _, path := range []string{p.Path(), filepath.Join(dir, foreign.String())} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("swept away: %v", err)
		}
	}
}

// A page with this process's pid and another start time is that of a dead process.
func TestReusedPid(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	p.header().StartTime++
	publish(t, p)
	name, err := parseName(filepath.Base(p.Path()))
	if err != nil {
		t.Fatal(err)
	}
	name.start++
	if err := os.Rename(p.Path(), filepath.Join(dir, name.String())); err != nil {
		t.Fatal(err)
	}
	if e := only(t, dir); e.Err != nil || !e.Dead {
		t.Errorf("%+v", e)
	}
}

// For a pid of another PID namespace the lock shows whether the process is alive.
func TestForeignNamespace(t *testing.T) {
	dir := folder(t)
	p := create(t, dir, meta)
	name, err := parseName(filepath.Base(p.Path()))
	if err != nil {
		t.Fatal(err)
	}
	name.namespace++
	foreign := filepath.Join(dir, name.String())
	if err := os.Rename(p.Path(), foreign); err != nil {
		t.Fatal(err)
	}
	p.path = foreign
	if e := only(t, dir); e.Err != nil || e.Dead {
		t.Errorf("mapped by its owner: %+v", e)
	}
	if err := p.Unmap(); err != nil {
		t.Fatal(err)
	}
	if e := only(t, dir); e.Err != nil || !e.Dead {
		t.Errorf("unmapped: %+v", e)
	}
	p.owner = 0 // Remove then does nothing
}
