package dl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/deepep-go/deepep/internal/status"
)

// answers makes the bytes of a library whose function f returns n.
func answers(t *testing.T, n int) []byte {
	t.Helper()
	image, err := os.ReadFile(build(t, t.TempDir(), "libf.so", fmt.Sprintf("int f(void *p) { return %d; }", n)))
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func ask(t *testing.T, l *Library) int32 {
	t.Helper()
	fn, err := l.Symbol("f")
	if err != nil {
		t.Fatal(err)
	}
	return Call(fn, unsafe.Pointer(new(int32)))
}

// Two images with the same name are two libraries, also where the second one gets the descriptor that the first one had.
func TestImagesFromMemory(t *testing.T) {
	one, two, three := answers(t, 1), answers(t, 2), answers(t, 3)
	t.Setenv("TMPDIR", "/nonexistent") // a file would fail
	t.Setenv("XDG_CACHE_HOME", "/nonexistent")
	first, err := OpenImage("libf.so", one)
	if err != nil {
		t.Fatal(err)
	}
	second, err := OpenImage("libf.so", two)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := ask(t, first), ask(t, second); a != 1 || b != 2 {
		t.Errorf("the libraries answer %d and %d", a, b)
	}
	first.Close()
	third, err := OpenImage("libf.so", three)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	defer second.Close()
	if a, b := ask(t, second), ask(t, third); a != 2 || b != 3 || third.memory != first.memory {
		t.Errorf("the libraries answer %d and %d; descriptor %d after %d", a, b, third.memory, first.memory)
	}
	if err := os.Truncate(fmt.Sprintf("/proc/self/fd/%d", second.memory), 0); err == nil {
		t.Error("the mapped memory can be cut short")
	}
}

// Where anonymous memory is refused a file does, which is gone afterwards.
func TestImageFromAPrivateFile(t *testing.T) {
	image, temporary, cache := answers(t, 7), t.TempDir(), t.TempDir()
	original := memfd
	t.Cleanup(func() { memfd = original })
	memfd = func(string) (int, error) { return -1, errors.New("forbidden") }
	for _, folder := range []string{temporary, cache} {
		t.Setenv("TMPDIR", temporary)
		t.Setenv("XDG_CACHE_HOME", cache)
		if folder == cache {
			t.Setenv("TMPDIR", "/nonexistent")
		}
		l, err := OpenImage("libf.so", image)
		if err != nil {
			t.Fatal(err)
		}
		if got := ask(t, l); got != 7 || l.Path != "libf.so (embedded in the program)" {
			t.Errorf("%s answers %d", l.Path, got)
		}
		maps, err := os.ReadFile("/proc/self/maps")
		if err != nil || !strings.Contains(string(maps), filepath.Join(folder, "deepep-")) {
			t.Errorf("the library is not mapped from %s (%v)", folder, err)
		}
		if left, err := os.ReadDir(folder); err != nil || len(left) != 0 {
			t.Errorf("%s holds %v (%v)", folder, left, err)
		}
		l.Close()
	}
	t.Setenv("XDG_CACHE_HOME", "/nonexistent")
	if _, err := OpenImage("libf.so", image); err == nil || !strings.Contains(err.Error(), "forbidden") || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("both refused: %v", err)
	}
}

// The program's own library goes first, unless the user names a folder; a refused one is listed with the paths.
func TestFindTriesTheImageFirst(t *testing.T) {
	folder := t.TempDir()
	build(t, folder, "libembedded.so", "int f(void *p) { return 1; }")
	var got int32
	accept := func(l *Library) error { got = ask(t, l); return nil }
	image := answers(t, 2)
	if err := Find(Query{File: "libembedded.so", Image: image, Beside: []string{folder}}, accept); err != nil || got != 2 {
		t.Errorf("%v, answer %d", err, got)
	}
	if err := Find(Query{File: "libembedded.so", Image: image, Dir: folder}, accept); err != nil || got != 1 {
		t.Errorf("%v, answer %d of the folder that the user names", err, got)
	}
	refuse := func(*Library) error { return status.Errorf(status.Version, "wrong colour") }
	err := Find(Query{File: "libembedded.so", Image: image}, refuse)
	if !errors.Is(err, status.ErrVersion) || !strings.Contains(err.Error(), "libembedded.so (embedded in the program): wrong colour") {
		t.Errorf("refused: %v", err)
	}
	if err := Find(Query{File: "libembedded.so", Image: []byte("not a library")}, accept); err == nil || !strings.Contains(err.Error(), "embedded") {
		t.Errorf("no library: %v", err)
	}
}
