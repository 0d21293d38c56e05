package core

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/env"
)

func TestLogGoesToItsFileAndToTheCallback(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l := logger(env.Settings{LogLevel: env.LogWarn, LogPath: path})
	l.Info("too quiet")
	l.Warn("in the file", zap.Int("rank", 3))
	var got []string
	SetLog(func(level int, message string) { got = append(got, strings.Repeat("!", level)+message) })
	l.Debug("debug too")
	l.With(zap.Int("rank", 1)).Error("an error")
	SetLog(nil)
	l.Debug("below the level")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(text), "\n"); lines != 1 || !strings.Contains(string(text), "in the file") || !strings.Contains(string(text), `"rank": 3`) {
		t.Errorf("%d lines: %s", lines, text)
	}
	if want := "debug too,!!!an error"; strings.Join(got, ",") != want {
		t.Errorf("callback got %q", got)
	}
}

// A host program that closed its standard error, or whose reader has gone, loses the lines and nothing else.
func TestLogWithoutAReader(t *testing.T) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	for _, d := range []descriptor{newDescriptor(pipe[1]), newDescriptor(-1)} {
		if n, err := d.Write([]byte("lost\n")); n != 5 || err != nil {
			t.Errorf("descriptor %d: %d %v", d.fd, n, err)
		}
	}
}

// Something else in the process has closed the descriptor, and another file has the number: no line goes there.
func TestLogLeavesTheFileOfAnotherAlone(t *testing.T) {
	folder := t.TempDir()
	d := newDescriptor(create(t, filepath.Join(folder, "log")))
	if _, err := d.Write([]byte("first\n")); err != nil {
		t.Fatal(err)
	}
	other := create(t, filepath.Join(folder, "other"))
	if err := unix.Dup3(other, d.fd, unix.O_CLOEXEC); err != nil { // closes the log's, and takes its number
		t.Fatal(err)
	}
	if n, err := d.Write([]byte("second\n")); n != 7 || err != nil {
		t.Errorf("%d %v", n, err)
	}
	for name, want := range map[string]string{"log": "first\n", "other": ""} {
		if text, err := os.ReadFile(filepath.Join(folder, name)); err != nil || string(text) != want {
			t.Errorf("%s: %q %v, want %q", name, text, err, want)
		}
	}
}

func create(t *testing.T, path string) int {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}
