package monitor

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/testutil/pagetest"
)

func TestDamagedPagesAreSkippedWithAReason(t *testing.T) {
	dir := folder(t)
	good := create(t, dir, meta)
	whole, err := os.ReadFile(good.Path())
	if err != nil {
		t.Fatal(err)
	}
	field := func(offset uintptr, n int, v uint64) []byte {
		b := append([]byte(nil), whole...)
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], v)
		copy(b[offset:], word[:n])
		return b
	}
	var h abi.StatsPage
	for i, c := range []struct {
		bytes []byte
		want  string
	}{
		{nil, "0 bytes"},
		{whole[:100], "100 bytes"},
		{whole[:len(whole)-8], "says"},
		{field(unsafe.Offsetof(h.Magic), 8, 12345), "mark"},
		{field(unsafe.Offsetof(h.Version), 4, 9), "version 9"},
		{field(unsafe.Offsetof(h.TotalBytes), 4, 1<<31), "says 2147483648"},
		{field(unsafe.Offsetof(h.NumOps), 4, 11), "11 operations"},
		{field(unsafe.Offsetof(h.NumRanks), 4, 1<<31-1), "2147483647 ranks"},
		{field(unsafe.Offsetof(h.Rank), 4, 4), "rank 4 of 4"},
		{field(unsafe.Offsetof(h.State), 4, 0), "state 0"},
		{field(unsafe.Offsetof(h.PeersOffset), 8, 1<<63), "table of peers"},
		{field(unsafe.Offsetof(h.PeersOffset), 8, uint64(len(whole)-8)), "table of peers"},
		{field(unsafe.Offsetof(h.TraceOffset), 8, 1<<64-8), "trace of 8"},
		{field(unsafe.Offsetof(h.TraceLen), 8, 1<<60), "trace of"},
		{field(unsafe.Offsetof(h.PID), 4, 1), "page of process 1"},
	} {
		name := fileName{pid: os.Getpid(), start: good.header().StartTime, number: uint32(100 + i), namespace: pidNamespace()}
		path := filepath.Join(dir, name.String())
		if err := os.WriteFile(path, c.bytes, 0o600); err != nil {
			t.Fatal(err)
		}
		entries, err := List(dir)
		if err != nil || len(entries) != 2 || entries[0].Stats == nil {
			t.Fatalf("%s: %d entries, %v", c.want, len(entries), err)
		}
		if e := entries[1]; e.Path != path || e.Stats != nil || e.Err == nil || !strings.Contains(e.Err.Error(), c.want) {
			t.Errorf("want %q: %+v", c.want, e)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// Files that are not pages neither block nor kill the reader.
func TestStrangeFiles(t *testing.T) {
	dir := folder(t)
	create(t, dir, meta)
	if err := errors.Join(
		unix.Mkfifo(filepath.Join(dir, "1-1-1-1.page"), 0o600),
		os.Symlink("/etc/passwd", filepath.Join(dir, "1-1-2-1.page")),
		os.Mkdir(filepath.Join(dir, "1-1-3-1.page"), 0o700),
		os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600),
		os.WriteFile(filepath.Join(dir, "x.page"), nil, 0o600),
		os.Truncate(filepath.Join(dir, "x.page"), 1<<40),
		os.WriteFile(filepath.Join(dir, "\x1b[31mred.page"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	entries, err := List(dir)
	if err != nil || len(entries) != 6 || entries[0].Err != nil {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	for _, e := range entries[1:] {
		if e.Err == nil {
			t.Errorf("%s passed for a page", e.Path)
		} else if strings.Contains(e.Err.Error(), "\x1b") {
			t.Errorf("a terminal would obey %q", e.Err)
		}
	}
	if entries, err := List(filepath.Join(dir, "absent")); err != nil || len(entries) != 0 {
		t.Errorf("an absent folder: %v %v", entries, err)
	}
}

func TestTextsDoNotReachTheTerminal(t *testing.T) {
	m := meta
	m.Group = "a\x1b[2Jb\xff"
	s, err := create(t, folder(t), m).Snapshot()
	if err != nil || s.Group != "a?[2Jb?" {
		t.Errorf("%q %v", s.Group, err)
	}
}

// Root reads the pages of all users, and changes nothing in their folders.
func TestOtherUsersFolders(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, which reads the pages of all users")
	}
	const other = 4002
	dir := folder(t)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	stale := fileName{pid: os.Getpid(), start: 1, number: 1, namespace: pidNamespace()}
	link := stale
	link.number = 2
	longAgo := time.Unix(1_000_000_000, 0)
	name := func(n fileName) string { return filepath.Join(dir, n.String()) }
	if err := errors.Join(
		os.WriteFile(secret, nil, 0o600), os.Chtimes(secret, longAgo, longAgo), os.Symlink(secret, name(link)),
		os.WriteFile(name(stale), stalePage(t, 1), 0o600), os.Lchown(name(stale), other, other), os.Lchown(dir, other, other),
	); err != nil {
		t.Fatal(err)
	}
	entries, err := List(dir)
	if err != nil || len(entries) != 2 || !entries[0].Dead || entries[0].Own || entries[1].Err == nil {
		t.Fatalf("%+v %v", entries, err)
	}
	if st, err := os.Stat(secret); err != nil || !st.ModTime().Equal(longAgo) {
		t.Errorf("the times of another file changed: %v", err)
	}
	if err := os.Chtimes(name(stale), longAgo, longAgo); err != nil {
		t.Fatal(err)
	}
	if entries, err := List(dir); err != nil || len(entries) != 1 {
		t.Errorf("a page that is dead for long: %+v %v", entries, err)
	}
	if _, err := os.Lstat(name(stale)); err != nil {
		t.Errorf("removed or renamed: %v", err)
	}
}

// stalePage is the page of a dead process of this pid.
func stalePage(t *testing.T, start uint64) []byte {
	t.Helper()
	p := create(t, folder(t), meta)
	p.header().StartTime = start
	return append([]byte(nil), p.Bytes()...)
}

// A link that is swapped in between two looks at a page does not lead to another file.
func TestRetireFollowsNoLink(t *testing.T) {
	dir := folder(t)
	create(t, dir, meta)
	stale := fileName{pid: os.Getpid(), start: 1, number: 9, namespace: pidNamespace()}
	path, victim := filepath.Join(dir, stale.String()), filepath.Join(t.TempDir(), "victim")
	longAgo := time.Unix(1_000_000_000, 0)
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.WriteFile(victim, nil, 0o600), os.Chtimes(victim, longAgo, longAgo)); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(os.Remove(path), os.Symlink(victim, path)); err != nil {
		t.Fatal(err)
	}
	retire(path, fd, stale, false)
	if st, err := os.Stat(victim); err != nil || !st.ModTime().Equal(longAgo) {
		t.Errorf("the times of another file changed: %v", err)
	}
}

func TestParseStat(t *testing.T) {
	line := "42 (a) b (c) S 1 " + strings.Repeat("0 ", 17) + "777 0 0"
	if n, err := parseStat(line); err != nil || n != 777 {
		t.Errorf("%d %v", n, err)
	}
	for _, bad := range []string{"", "42 (x", "42 (x) S 1 2", strings.Replace(line, " S ", " Z ", 1)} {
		if n, err := parseStat(bad); err == nil {
			t.Errorf("%q: %d", bad, n)
		}
	}
}

// FuzzPage changes bytes anywhere in a page and reads it.
func FuzzPage(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "pages")
	p, err := Create(dir, meta)
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _, _ = p.Remove(), p.Unmap() }()
	pagetest.Record(p.Bytes(), pagetest.Call{Op: 3, Duration: 5, WaitFor: []time.Duration{1, 2}})
	whole := append([]byte(nil), p.Bytes()...)
	f.Add(uint16(0), []byte{1, 2, 3})
	f.Add(uint16(24), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	for at := 0; at < 88; at += 8 {
		f.Add(uint16(at), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f})
	}
	f.Fuzz(func(t *testing.T, at uint16, change []byte) {
		b := append([]byte(nil), whole...)
		if int(at) < len(b) {
			copy(b[at:], change)
		}
		use(t, b)
		use(t, change)
	})
}

// use reads a page and calls everything that the commands call.
func use(t *testing.T, b []byte) {
	s, err := decode(b)
	if err != nil {
		return
	}
	if len(s.Trace) > maxTrace {
		t.Errorf("%d calls in the trace", len(s.Trace))
	}
	readings := map[int][]OpStats{s.Rank: s.Ops[:]}
	w := WaitsOf(s.NumRanks, readings)
	w.Slowest()
	var sum OpStats
	for i := range s.Ops {
		o := s.Ops[i].Sub(&s.Ops[(i+1)%len(s.Ops)])
		sum.Add(&o)
		if o.Mean() < 0 || o.Percentile(0.99) < 0 || o.Max() < 0 {
			t.Errorf("a negative time: %+v", o)
		}
	}
}

// FuzzPageFile lists a folder that holds a good page beside a file of a living process: any number of words of its
// header changed, cut or longer. The good page is read, and the file is a page or has a reason.
func FuzzPageFile(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "pages")
	p, err := Create(dir, meta)
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _, _ = p.Remove(), p.Unmap() }()
	pagetest.Record(p.Bytes(), pagetest.Call{Op: 3, Duration: 5, WaitFor: []time.Duration{1, 2}})
	if err := p.Publish(); err != nil {
		f.Fatal(err)
	}
	whole := append([]byte(nil), p.Bytes()...)
	name := fileName{pid: os.Getpid(), start: p.header().StartTime, number: 1 << 30, namespace: pidNamespace()}
	f.Add(uint16(len(whole)), []byte{})
	f.Add(uint16(100), []byte{1})
	f.Add(uint16(len(whole)), []byte{0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 9, 1, 0, 0, 0, 0, 0, 0, 0})
	for word := range byte(16) { // of the header
		f.Add(uint16(len(whole)), []byte{word, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f})
		f.Add(uint16(len(whole)+8), []byte{word, 1, 0, 0, 0, 0, 0, 0, 0})
	}
	f.Fuzz(func(t *testing.T, size uint16, changes []byte) {
		b := make([]byte, size)
		copy(b, whole)
		for ; len(changes) >= 9; changes = changes[9:] { // a word's number, and what it becomes
			if at := 8 * int(changes[0]); at+8 <= len(b) {
				copy(b[at:], changes[1:9])
			}
		}
		path := filepath.Join(dir, name.String())
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		entries, err := List(dir)
		if err != nil || len(entries) > 2 || len(entries) == 0 || entries[0].Stats == nil {
			t.Fatalf("%+v %v", entries, err)
		}
		for _, e := range entries {
			if (e.Stats == nil) == (e.Err == nil) || e.Dead {
				t.Errorf("%+v", e)
			}
			if e.Stats != nil {
				use(t, b)
			}
		}
	})
}

func FuzzName(f *testing.F) {
	f.Add("12-345-6-4026531836.page")
	f.Add("12-345-6-4026531836.dead")
	f.Add("--.page")
	f.Fuzz(func(t *testing.T, base string) {
		n, err := parseName(base)
		if err != nil {
			return
		}
		again, err := parseName(n.String())
		if err != nil || again != n {
			t.Errorf("%q: %v %v", base, again, err)
		}
	})
}
