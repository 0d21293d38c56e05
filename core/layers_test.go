package core_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	module   = "github.com/deepep-go/deepep/"
	internal = module + "internal/"
	document = "../ARCHITECTURE.md"
	heading  = "## Layers"
)

// onlyIn names third-party packages that one package alone may import.
var onlyIn = map[string]string{"github.com/ebitengine/purego": "dl"}

// arrows is what each package imports of this module, sorted. Names are relative to internal/, else to the module.
type arrows map[string][]string

type pkg struct {
	ImportPath string
	Imports    []string
}

func list(t *testing.T, pattern string) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", pattern).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list %s: %v\n%s", pattern, err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// short is a package's name in the table; ok is false for packages of other modules.
func short(path string) (name string, ok bool) {
	name, ok = strings.CutPrefix(path, module)
	return strings.TrimPrefix(name, "internal/"), ok
}

var (
	tableRow  = regexp.MustCompile("^\\| `([^`]+)` \\|([^|]*)\\|")
	tableWord = regexp.MustCompile("`([^`]+)`")
)

// table reads "| `package` | `may` `import` | … |" rows below the heading.
func table(text string) arrows {
	_, section, _ := strings.Cut(text, "\n"+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	found := arrows{}
	for line := range strings.Lines(section) {
		if cells := tableRow.FindStringSubmatch(line); cells != nil {
			found[cells[1]] = []string{}
			for _, w := range tableWord.FindAllStringSubmatch(cells[2], -1) {
				found[cells[1]] = append(found[cells[1]], w[1])
			}
			slices.Sort(found[cells[1]])
		}
	}
	return found
}

// imports is the same from the sources: of internal/... and of each other package that the table has a row for.
func imports(all []pkg, rows arrows) arrows {
	found := arrows{}
	for _, p := range all {
		name, _ := short(p.ImportPath)
		if _, named := rows[name]; !named && !strings.HasPrefix(p.ImportPath, internal) {
			continue
		}
		found[name] = []string{}
		for _, i := range p.Imports {
			if below, ours := short(i); ours {
				found[name] = append(found[name], below)
			}
		}
		slices.Sort(found[name])
	}
	return found
}

// differences names each package whose row and imports differ.
func differences(written, found arrows) (lines []string) {
	names := maps.Clone(written)
	maps.Copy(names, found)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		may, named := written[name]
		has, there := found[name]
		switch {
		case !named:
			lines = append(lines, fmt.Sprintf("no row for %s, which imports %v", name, has))
		case !there:
			lines = append(lines, fmt.Sprintf("a row for %s, which is no package", name))
		case !slices.Equal(may, has):
			lines = append(lines, fmt.Sprintf("%s: the table has %v, the sources import %v", name, may, has))
		}
	}
	return lines
}

// upward names imports of packages that have no row themselves: internal packages import nothing above them.
func upward(found arrows) (lines []string) {
	for _, name := range slices.Sorted(maps.Keys(found)) {
		for _, i := range found[name] {
			if _, layer := found[i]; !layer {
				lines = append(lines, name+" imports "+i+", which is above it")
			}
		}
	}
	return lines
}

// misplaced names imports of cgo and of third-party packages that belong elsewhere.
func misplaced(all []pkg) (lines []string) {
	for _, p := range all {
		name, _ := short(p.ImportPath)
		for _, i := range p.Imports {
			if home, ok := onlyIn[i]; ok && name != home {
				lines = append(lines, name+" imports "+i+", which belongs to "+home)
			} else if i == "C" {
				lines = append(lines, name+" needs cgo")
			}
		}
	}
	return lines
}

func documented(t *testing.T) arrows {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	rows := table(string(text))
	if len(rows) < 10 {
		t.Fatalf("only %d rows below %q of %s", len(rows), heading, document)
	}
	return rows
}

func TestImportsEqualTheTableOfLayers(t *testing.T) {
	rows := documented(t)
	all := append(list(t, module+"core/..."), list(t, module+"internal/...")...)
	found := imports(all, rows)
	for _, line := range slices.Concat(differences(rows, found), upward(found), misplaced(all)) {
		t.Error(line)
	}
}

// One arrow more or less, in the document or in the sources, fails the test above.
func TestADifferenceOfOneArrowIsSeen(t *testing.T) {
	rows := documented(t)
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		more := maps.Clone(rows)
		more[name] = append(slices.Clone(rows[name]), "zzz")
		if len(differences(rows, more)) != 1 || len(differences(more, rows)) != 1 || len(upward(more)) != 1 {
			t.Errorf("%s -> zzz passes", name)
		}
		if n := len(rows[name]); n > 0 {
			less := maps.Clone(rows)
			less[name] = rows[name][:n-1]
			if len(differences(rows, less)) != 1 || len(differences(less, rows)) != 1 {
				t.Errorf("%s without %s passes", name, rows[name][n-1])
			}
		}
		gone := maps.Clone(rows)
		delete(gone, name)
		if len(differences(rows, gone)) != 1 || len(differences(gone, rows)) != 1 {
			t.Errorf("%s in one of the two passes", name)
		}
	}
	all := []pkg{{internal + "plan", []string{"github.com/ebitengine/purego"}}, {internal + "dl", []string{"C"}}}
	if len(misplaced(all)) != 2 {
		t.Error("purego in plan or cgo in dl passes")
	}
	if found := imports(all, rows); len(found) != 2 {
		t.Errorf("of 2 packages %v are seen", found)
	}
}

// Only capi needs cgo: a program that uses core can be cross-compiled and linked by Go alone.
func TestCoreBuildsWithoutCgo(t *testing.T) {
	cmd := exec.Command("go", "list", "-export", module+"core/...", module+"internal/...") // compiles, and links nothing
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
