package core

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// copyFile copies a file with its mode.
func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, info.Mode())
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
}

// A module of its own becomes a program by the README's commands, and finds the kernel library in each of the places
// that the README names; else its error lists them.
func TestProgramOutsideTheTree(t *testing.T) {
	library := cpuLibrary(t).Path
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	commands := regexp.MustCompile("(?s)```sh\n([^`]*go get github.com/deepep-go/deepep/core[^`]*)```").FindSubmatch(readme)
	if commands == nil {
		t.Fatal("the README does not say how a Go program gets the module")
	}
	outside := t.TempDir()
	for _, name := range []string{"main.go", "rank.go", "lowlatency.go"} {
		copyFile(t, filepath.Join("example", name), filepath.Join(outside, name))
	}
	script := "set -e\ngo mod init example.org/outside\n" + strings.ReplaceAll(string(commands[1]), "/path/to/deepep", root)
	run := func(environment []string, name string, args ...string) (string, error) {
		cmd := exec.Command(name, args...)
		cmd.Dir = outside
		for _, setting := range os.Environ() {
			if !strings.HasPrefix(setting, "DEEPEP_") && !strings.HasPrefix(setting, "LD_LIBRARY_PATH=") {
				cmd.Env = append(cmd.Env, setting)
			}
		}
		cmd.Env = append(cmd.Env, environment...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	// What this module needs is at hand since the test was built: no network.
	if out, err := run([]string{"GOPROXY=off", "GOSUMDB=off", "GOFLAGS="}, "sh", "-c", script); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	program, file := filepath.Join(outside, "bin", "program"), filepath.Base(library)
	arguments := []string{"-goroutines", "-ranks", "2"}
	if out, err := run(nil, program, arguments...); err == nil {
		t.Skipf("a library is installed here, which every place below hides: %s", out)
	} else {
		for _, place := range []string{"DEEPEP_KERNELS", "bin/" + file, "lib/" + file, "lib64/" + file, "/usr/local/lib/" + file} {
			if !strings.Contains(out, place) {
				t.Errorf("%s is not in: %s", place, out)
			}
		}
	}
	kernels := filepath.Join(outside, "elsewhere")
	for _, place := range []struct {
		folder      string
		environment []string
	}{
		{"bin", nil}, {"lib", nil}, {"lib64", nil}, {"elsewhere", []string{"DEEPEP_KERNELS=" + kernels}}, {"elsewhere", []string{"LD_LIBRARY_PATH=" + kernels}},
	} {
		copyFile(t, library, filepath.Join(outside, place.folder, file))
		if out, err := run(place.environment, program, arguments...); err != nil {
			t.Errorf("%s, %v: %v\n%s", place.folder, place.environment, err, out)
		}
		if err := os.Remove(filepath.Join(outside, place.folder, file)); err != nil {
			t.Fatal(err)
		}
	}
}
