package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/doctor"
)

// hostFolder writes the files of a host without GPUs and with 64 KiB of locked memory.
func hostFolder(t *testing.T, name string) string {
	t.Helper()
	root := t.TempDir()
	for file, text := range map[string]string{
		"proc/sys/kernel/hostname":  name,
		"proc/sys/kernel/osrelease": "6.8.0",
		"proc/self/limits":          "Max locked memory         65536                65536                bytes\nMax address space         unlimited            unlimited            bytes\n",
		"proc/self/status":          "CapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\n",
		"proc/meminfo":              "MemTotal: 65536000 kB\nMemAvailable: 62914560 kB\n",
		"usr/bin/python3.12":        "",
	} {
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestDoctorExitStatus(t *testing.T) {
	root := hostFolder(t, "node-a")
	for use, want := range map[string]int{"": 0, "cpu": 0, "intranode": exitProblems, "internode": exitProblems} {
		out, _, code := deepep(t, "doctor", "--root", root, "--for", use)
		if code != want || !strings.Contains(out, "host node-a, kernel 6.8.0") {
			t.Errorf("for %q: exit status %d\n%s", use, code, out)
		}
	}
}

func TestDoctorJSONAndProblems(t *testing.T) {
	root := hostFolder(t, "node-a")
	out, _, code := deepep(t, "doctor", "--root", root, "--for", "intranode", "--json", "--problems")
	var r doctor.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != exitProblems {
		t.Fatalf("%d %v", code, err)
	}
	if r.Host != "node-a" || r.Status != doctor.Fail || len(r.Lines) != 1 || r.Lines[0].Check != "gpu" {
		t.Errorf("%+v", r)
	}
}

// The last line counts all checks: of a sound host it would say that nothing was looked at.
func TestDoctorCountsWhatItDoesNotPrint(t *testing.T) {
	root := hostFolder(t, "node-a")
	for _, use := range []string{"cpu", "intranode"} {
		all, _, _ := deepep(t, "doctor", "--root", root, "--for", use)
		some, _, _ := deepep(t, "doctor", "--root", root, "--for", use, "--problems")
		lines, few := strings.Split(strings.TrimSpace(all), "\n"), strings.Split(strings.TrimSpace(some), "\n")
		if last := few[len(few)-1]; last != lines[len(lines)-1] || strings.HasPrefix(last, "0 OK") || len(few) >= len(lines) {
			t.Errorf("for %s, of\n%s\nthese are problems:\n%s", use, all, some)
		}
	}
}

func TestDoctorMeasuresThePlan(t *testing.T) {
	root := hostFolder(t, "node-a")
	out, _, code := deepep(t, "doctor", "--root", root, "--for", "cpu", "--ranks", "8", "--max-tokens", "4096", "--json")
	var r doctor.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(r.Lines, func(l doctor.Line) bool { return l.Check == "memory" })
	if l := r.Lines[i]; code != exitProblems || l.Status != doctor.Fail || !strings.Contains(l.Read, "× 8 ranks") {
		t.Errorf("exit status %d: %s", code, l)
	}
}

func TestDoctorCompare(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for i, name := range []string{"node-a", "node-b", "node-c"} {
		root := hostFolder(t, name)
		if i == 1 {
			if err := os.WriteFile(filepath.Join(root, "proc/sys/kernel/osrelease"), []byte("5.15.0"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		out, _, _ := deepep(t, "doctor", "--root", root, "--json")
		file := filepath.Join(dir, name+".json")
		if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	out, _, code := deepep(t, append([]string{"doctor", "--compare"}, files...)...)
	if code != exitProblems || !strings.Contains(out, "5.15.0") || !strings.Contains(out, "← node-b") {
		t.Errorf("exit status %d\n%s", code, out)
	}
	out, _, code = deepep(t, "doctor", "--compare", files[0], files[2])
	if code != 0 || !strings.Contains(out, "no difference") {
		t.Errorf("exit status %d\n%s", code, out)
	}
	var c doctor.Comparison
	out, _, code = deepep(t, "doctor", "--compare", "--json", files[0], files[1])
	if err := json.Unmarshal([]byte(out), &c); err != nil || code != exitProblems || len(c.Differences) != 1 {
		t.Errorf("%d %v %+v", code, err, c)
	}
}

func TestDoctorOfARunningProcess(t *testing.T) {
	out, stderr, code := deepep(t, "doctor", "--for", "cpu", "--pid", "1")
	if code == exitUsage {
		t.Errorf("%s%s", out, stderr)
	}
}
