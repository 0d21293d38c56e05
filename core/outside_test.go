package core

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
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

// readmeScript is how the README makes a module into a program, once the module is published; with a checkout, until
// then.
func readmeScript(t *testing.T, root, checkout string) string {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	commands := regexp.MustCompile("(?s)```sh\n([^`]*go mod edit -replace [^`]*)```").FindSubmatch(readme)
	if commands == nil {
		t.Fatal("the README does not say how a Go program gets the module")
	}
	if checkout != "" {
		return strings.ReplaceAll(string(commands[1]), "/path/to/deepep", checkout)
	}
	var script []string
	for line := range strings.Lines(string(commands[1])) {
		if !strings.HasPrefix(line, "go mod edit -replace ") {
			script = append(script, line)
		}
	}
	return strings.Join(script, "")
}

// Until the module is published the README's commands take a checkout, and ask no proxy for the module: one that knows
// only public modules may forbid the question, which ends a go command.
func TestProgramOfACheckout(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	here, err := modules()
	if err != nil {
		t.Fatal(err)
	}
	known := http.FileServer(http.Dir(here.cache))
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/"+modulePath) {
			http.Error(w, "not public", http.StatusForbidden)
			return
		}
		known.ServeHTTP(w, r)
	}))
	defer proxy.Close()
	o := newOutside(t, root)
	o.settings = append(o.settings, "GOPROXY="+proxy.URL+","+here.proxies, "GONOPROXY=")
	o.must(t, "go mod init example.org/outside\n"+readmeScript(t, root, root))
	if out, err := o.run(o.folder, []string{"DEEPEP_KERNELS=" + filepath.Dir(cpuLibrary(t).Path)},
		filepath.Join(o.folder, "bin", "program"), "-goroutines", "-ranks", "2"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// A module of its own that takes this one from a proxy becomes a program by the README's commands, without cgo, and
// finds the kernel library in each of the places that the README names; else its error lists them. With the package that
// deepep-embed writes it needs none of them.
func TestProgramOutsideTheTree(t *testing.T) {
	library := cpuLibrary(t).Path
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	o := newOutside(t, root)
	o.must(t, "go mod init example.org/outside\n"+readmeScript(t, root, ""))
	program, file := filepath.Join(o.folder, "bin", "program"), filepath.Base(library)
	arguments := []string{"-goroutines", "-ranks", "2"}
	if out, err := o.run(o.folder, nil, program, arguments...); err == nil {
		t.Skipf("a library is installed here, which every place below hides: %s", out)
	} else {
		for _, place := range []string{"DEEPEP_KERNELS", "bin/" + file, "lib/" + file, "lib64/" + file, "/usr/local/lib/" + file} {
			if !strings.Contains(out, place) {
				t.Errorf("%s is not in: %s", place, out)
			}
		}
	}
	kernels := filepath.Join(o.folder, "elsewhere")
	for _, place := range []struct {
		folder      string
		environment []string
	}{
		{"bin", nil}, {"lib", nil}, {"lib64", nil}, {"elsewhere", []string{"DEEPEP_KERNELS=" + kernels}}, {"elsewhere", []string{"LD_LIBRARY_PATH=" + kernels}},
	} {
		copyFile(t, library, filepath.Join(o.folder, place.folder, file))
		if out, err := o.run(o.folder, place.environment, program, arguments...); err != nil {
			t.Errorf("%s, %v: %v\n%s", place.folder, place.environment, err, out)
		}
		if err := os.Remove(filepath.Join(o.folder, place.folder, file)); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("embedded", func(t *testing.T) { o.embed(t, library) })
}

// embed makes a program that holds the library, and runs it where nothing else is: two processes dispatch and combine,
// and check the sums.
func (o *outside) embed(t *testing.T, library string) {
	option := "-library " + library
	if os.Getenv("DEEPEP_TEST_FULL") == "1" { // else the library is built from the module's sources, which takes a minute
		option = ""
	}
	for name, text := range map[string]string{
		"embedded.go": "package main\n\nimport _ \"example.org/outside/kernels\"\n",
		"README":      "not a library",
	} {
		if err := os.WriteFile(filepath.Join(o.folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const command = "bin/deepep-embed "
	o.must(t, "go build -trimpath -o bin/ "+modulePath+"/core/cmd/deepep-embed\n"+command+option+" ./kernels\nCGO_ENABLED=0 go build -trimpath -o bin/single .\nCGO_ENABLED=0 GOARCH=386 go vet ./kernels")
	for arguments, wanted := range map[string]string{
		"-library README ./kernels": "not a shared library",
		"./no-package":              "no name of a package",
	} {
		if out, err := o.run(o.folder, o.settings, "sh", "-c", command+"-library "+library+" "+arguments); err == nil || !strings.Contains(out, wanted) {
			t.Errorf("deepep-embed %s: %v, %s", arguments, err, out)
		}
	}
	alone := t.TempDir()
	copyFile(t, filepath.Join(o.folder, "bin", "single"), filepath.Join(alone, "program"))
	out, err := o.run(alone, []string{"TMPDIR=" + t.TempDir()}, filepath.Join(alone, "program"), "-ranks", "2")
	if err != nil {
		t.Errorf("alone: %v\n%s", err, out)
	}
	if out, err := o.run(alone, []string{"DEEPEP_KERNELS=" + alone}, filepath.Join(alone, "program"), "-ranks", "2"); err == nil {
		t.Errorf("the folder that the user names does not go first: %s", out)
	}
}
