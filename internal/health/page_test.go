package health

import (
	"encoding/binary"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPackKeepsWhatFitsAndCutsTheRest(t *testing.T) {
	for _, c := range []struct{ in, out LastCall }{
		{LastCall{}, LastCall{}},
		{LastCall{3, 17, 2, 5}, LastCall{3, 17, 2, 5}},
		{LastCall{62, 1<<40 - 1, 14, 1<<14 - 2}, LastCall{62, 1<<40 - 1, 14, 1<<14 - 2}},
		{LastCall{1 << 20, 1<<40 + 9, 1 << 20, 1 << 20}, LastCall{63, 9, 15, 1<<14 - 1}},
	} {
		if got := unpack(pack(c.in)); got != c.out {
			t.Errorf("%+v became %+v, want %+v", c.in, got, c.out)
		}
	}
}

func TestNames(t *testing.T) {
	for want, c := range map[string]LastCall{
		"none": {Number: 4}, "dispatch #17 (receive)": {3, 17, 2, 1}, "low_latency_combine #1 (send)": {6, 1, 1, 1}, "barrier #2": {8, 2, 3, 1},
		"mask #3": {9, 3, 0, 1}, "operation 40 #1 (phase 7)": {40, 1, 7, 1},
	} {
		if got := c.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestPeerPageChecks(t *testing.T) {
	mine, fd, err := newPage(3)
	if err != nil {
		t.Fatal(err)
	}
	defer mine.unmap()
	defer unix.Close(fd)
	seen, err := peerPage(fd, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer seen.unmap()
	mine.last, mine.beat = pack(LastCall{3, 17, 2, 5}), 9
	if v, err := decodeNote(seen.words(), 3); err != nil || v != (view{9, LastCall{3, 17, 2, 5}, false}) {
		t.Errorf("the peer sees %+v, %v", v, err)
	}
	if err := unix.Ftruncate(fd, 0); err == nil {
		t.Error("the page can be truncated: a peer that reads it would get SIGBUS")
	}
	_, err = peerPage(fd, 4)
	wantText(t, err, "of rank 3 in place of rank 4")

	made := func(flags int, size int64, seal int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|flags)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		unix.Ftruncate(fd, size)
		unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seal)
		return fd
	}
	for words, fd := range map[string]int{
		"not sealed":       made(unix.MFD_ALLOW_SEALING, pageBytes, unix.F_SEAL_GROW),
		"page of 12 bytes": made(unix.MFD_ALLOW_SEALING, 12, seals),
		"magic 0x0":        made(unix.MFD_ALLOW_SEALING, pageBytes, seals),
		"bad file":         -1,
	} {
		_, err := peerPage(fd, 3)
		wantText(t, err, words)
	}
}

func wantText(t *testing.T, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("got %v, want %q", err, words)
	}
}

func FuzzDecodeNote(f *testing.F) {
	good := make([]byte, noteBytes)
	binary.LittleEndian.PutUint64(good, pageMagic)
	binary.LittleEndian.PutUint64(good[8:], 2)
	binary.LittleEndian.PutUint64(good[24:], pack(LastCall{3, 17, 2, 5}))
	binary.LittleEndian.PutUint64(good[32:], stateLive)
	f.Add(good, 2)
	f.Add(good, 1)
	f.Add(good[:39], 2)
	f.Fuzz(func(t *testing.T, b []byte, rank int) {
		v, err := decodeNote(b, rank)
		if err != nil {
			return
		}
		if pack(v.last) != binary.LittleEndian.Uint64(b[24:]) {
			t.Errorf("last call %+v does not pack to what it came from", v.last)
		}
		_ = v.last.String()
	})
}
