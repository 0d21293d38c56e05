package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/costs"
)

const scalePage = "../../../docs/scale.md"

// The page is what the command writes.
func TestSimOursWritesThePage(t *testing.T) {
	want, err := os.ReadFile(scalePage)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := strings.Index(string(want), oursBegin), strings.Index(string(want), oursEnd)
	if begin < 0 || end < begin {
		t.Fatalf("no marks in %s", scalePage)
	}
	copied := filepath.Join(t.TempDir(), "scale.md")
	if err := os.WriteFile(copied, []byte(string(want[:begin])+oursBegin+"old\n"+string(want[end:])), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, stderr, code := deepep(t, "sim", "ep", "--ours", "--markdown", copied); code != 0 || !strings.Contains(out, "dispatch FP8") {
		t.Fatalf("%d %s %s", code, out, stderr)
	}
	if got, err := os.ReadFile(copied); err != nil || string(got) != string(want) {
		t.Errorf("%v: docs/scale.md is not what `deepep sim ep --ours --markdown docs/scale.md` writes", err)
	}
	if err := os.WriteFile(copied, []byte("no marks"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := deepep(t, "sim", "ep", "--ours", "--ranks", "16", "--markdown", copied); code == 0 || !strings.Contains(stderr, "sim/ep: begin") {
		t.Errorf("a page without marks: %d %s", code, stderr)
	}
}

func oursOf(t *testing.T, args ...string) *oursReport {
	t.Helper()
	out, stderr, code := deepep(t, append([]string{"sim", "ep", "--ours", "--json"}, args...)...)
	var r oursReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("%d %v %s", code, err, stderr)
	}
	return &r
}

// Other costs of a file give other predictions, by as much as the cost says.
func TestSimOursTakesTheCosts(t *testing.T) {
	file := costs.Builtin()
	file.Kernels["dispatch between nodes"].NotifyUS += 1000
	m := file.Machines["h800"]
	m.NICGBs /= 10
	file.Machines["h800"] = m
	path := filepath.Join(t.TempDir(), "costs.json")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Write(f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	before, after := oursOf(t, "--ranks", "16"), oursOf(t, "--ranks", "16", "--costs", path)
	for i, one := range after.Results {
		was, more := before.Results[i], 0.0
		if one.Operation == "dispatch" {
			more = 1000
		}
		if one.Binds() != costs.NIC || one.FixedUS-was.FixedUS < more-0.01 || one.FixedUS-was.FixedUS > more+0.01 || one.Limit(costs.NIC) < 9.9*was.Limit(costs.NIC) {
			t.Errorf("%s: was %+v, is %+v", one.name(), was.Prediction, one.Prediction)
		}
	}
}

// More SMs and queue pairs never make a call slower, and reach the limits that they are about.
func TestSimOursFlags(t *testing.T) {
	few, many := oursOf(t, "--ranks", "32", "--sms", "2", "--qps", "1"), oursOf(t, "--ranks", "32", "--sms", "64", "--qps", "32")
	for i, one := range many.Results {
		low := strings.HasPrefix(one.Operation, "low")
		if was := few.Results[i]; one.US > was.US || !low && one.Limit(costs.SMs) >= was.Limit(costs.SMs) || low && one.Limit(costs.QueuePairs) >= was.Limit(costs.QueuePairs) {
			t.Errorf("%s: %+v, with few %+v", one.name(), one.Prediction, was.Prediction)
		}
	}
	for _, refused := range []struct{ args, says string }{
		{"--costs x", "counts only with --ours"}, {"--sms 4", "counts only with --ours"}, {"--ours --nic drain", "does not count with --ours"},
		{"--ours --machine none", "h200, h800"}, {"--ours --sms 0", "sms"}, {"--ours --ranks 12", "num_ranks"}, {"--ours --costs /none", "no such file"}, {"--ours --qps -1", "num_qps_per_rank"},
	} {
		if _, stderr, code := deepep(t, append([]string{"sim", "ep"}, strings.Fields(refused.args)...)...); code == 0 || !strings.Contains(stderr, refused.says) {
			t.Errorf("%s: %d %s", refused.args, code, stderr)
		}
	}
}

// sim costs fits what bench_ops prints; the result is a file for --costs.
func TestSimCosts(t *testing.T) {
	output := filepath.Join(t.TempDir(), "bench.txt")
	lines := `2 nodes of 2 ranks; rank 0 gets 14800 rows and sends 4080 to other nodes
dispatch BF16  sms  24  median    960.0 us  p99    970.0 us  in-kernel mean    955.0 us  to other nodes  220.0 GB/s
dispatch FP8   sms  24  median    610.0 us  p99    620.0 us  in-kernel mean    605.0 us  to other nodes  140.0 GB/s
done: nodes ranks=4 nodes=2 devices=4 tokens=4096 hidden=7168
`
	if err := os.WriteFile(output, []byte(lines), 0o644); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := deepep(t, "sim", "costs", output, "--source", "a run")
	if code != 0 {
		t.Fatalf("%d %s", code, stderr)
	}
	file, err := costs.Read(strings.NewReader(out))
	if err != nil {
		t.Fatal(err)
	}
	old, fitted := costs.Builtin(), 0
	for i := range file.Measured {
		m := &file.Measured[i]
		if m.Source != "a run" {
			continue
		}
		fitted++
		if p, miss, err := file.Compare(m); err != nil || abs(miss) > 0.02 || m.RanksPerNode != 2 {
			t.Errorf("%+v: %v %+v", m, err, p)
		}
	}
	if fitted != 2 || file.Kernels["dispatch between nodes"].SMGBs == old.Kernels["dispatch between nodes"].SMGBs {
		t.Errorf("%d measurements, %v", fitted, file.Kernels["dispatch between nodes"])
	}
	if file.Kernels["combine"].String() != old.Kernels["combine"].String() || !strings.HasPrefix(file.Source, "a run; ") {
		t.Errorf("%+v, %s", file.Kernels["combine"], file.Source)
	}
	for text, says := range map[string]string{"": "no times of bench_ops", strings.Split(lines, "done")[0]: "cut off", "csv,1,2\n": "2 fields"} {
		if err := os.WriteFile(output, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, stderr, code := deepep(t, "sim", "costs", output); code == 0 || !strings.Contains(stderr, says) {
			t.Errorf("%q: %d %s", text, code, stderr)
		}
	}
}
