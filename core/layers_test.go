package core_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const (
	module   = "github.com/deepep-go/deepep/"
	internal = module + "internal/"
	leaf     = module + "core/op" // public, and below all others
)

// allowed is the architecture: which internal package may import which. Everything not named here is not allowed.
var allowed = map[string][]string{
	leaf:          {},
	"status":      {},
	"env":         {"status"},
	"pool":        {"status"},
	"abi":         {},
	"plan":        {leaf, "abi", "status"},
	"dl":          {"status"},
	"bootstrap":   {"status"},
	"kern":        {"abi", "dl", "status"},
	"device":      {"abi", "kern", "status"},
	"health":      {leaf, "bootstrap", "status"},
	"doctor":      {"plan", "bootstrap", "status", "env"},
	"doctor/libs": {"doctor", "dl", "status"}, // opens system libraries; its own package so that the checks stay pure
	"monitor":     {leaf, "plan", "bootstrap", "status", "abi"},
	"testutil":    {"abi", "monitor"}, // for tests; no product package imports it
	"engine":      {leaf, "plan", "device", "health", "kern", "abi", "status"},
}

// onlyIn names third-party packages that one package alone may import.
var onlyIn = map[string]string{"github.com/ebitengine/purego": "dl"}

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

// trespasses checks one package against the table.
func trespasses(p pkg) (found []string) {
	name := strings.TrimPrefix(p.ImportPath, internal)
	layer, _, _ := strings.Cut(name, "/")
	if p.ImportPath == leaf {
		layer = leaf
	}
	may, known := allowed[name]
	if !known {
		may, known = allowed[layer]
	}
	if strings.HasPrefix(p.ImportPath, internal) && !known {
		return []string{p.ImportPath + " is in no layer"}
	}
	for _, i := range p.Imports {
		if home, ok := onlyIn[i]; ok && layer != home {
			found = append(found, p.ImportPath+" imports "+i+", which belongs to "+home)
		}
		below, ours := strings.CutPrefix(i, internal)
		below, _, _ = strings.Cut(below, "/")
		switch {
		case known && ours && below != layer && !slices.Contains(may, below):
			found = append(found, p.ImportPath+" imports "+i)
		case known && i == leaf && slices.Contains(may, leaf):
		case known && !ours && strings.HasPrefix(i, module):
			found = append(found, p.ImportPath+" imports "+i+", which is above it")
		case i == "C":
			found = append(found, p.ImportPath+" needs cgo")
		}
	}
	return found
}

func TestImportsGoDownOnly(t *testing.T) {
	all := append(list(t, module+"core/..."), list(t, module+"internal/...")...)
	if len(all) < 10 {
		t.Fatalf("only %d packages listed", len(all))
	}
	for _, p := range all {
		for _, what := range trespasses(p) {
			t.Error(what)
		}
	}
}

// The check is shown to fail.
func TestTrespassesAreSeen(t *testing.T) {
	for _, p := range []pkg{
		{internal + "status", []string{internal + "plan"}}, {internal + "plan", []string{"github.com/ebitengine/purego"}},
		{internal + "newcomer", nil}, {leaf, []string{internal + "status"}}, {internal + "dl", []string{leaf}}, {internal + "engine", []string{module + "core"}}, {internal + "dl", []string{"C"}},
	} {
		if len(trespasses(p)) == 0 {
			t.Errorf("%+v passes", p)
		}
	}
}

// Only capi needs cgo: a program that uses core can be cross-compiled and linked by Go alone.
func TestCoreBuildsWithoutCgo(t *testing.T) {
	cmd := exec.Command("go", "build", module+"core/...", module+"internal/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
