package main

import (
	"context"
	"encoding/json"
	"fmt"
	"image/png"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/deepep-go/deepep/core"
)

func TestMain(m *testing.M) {
	// bench starts its own executable, here this test binary, as the ranks' processes.
	if len(os.Args) == 2 && strings.HasPrefix(os.Args[1], "bench-") {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	if rank, err := strconv.Atoi(os.Getenv(jobRank)); err == nil {
		if err := runJobRank(rank); err != nil {
			fmt.Fprintf(os.Stderr, "rank %d: %v\n", rank, err)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		http.DefaultClient.CloseIdleConnections()
		os.Exit(code)
	}))
}

func needKernels(t *testing.T) {
	t.Helper()
	info, err := core.QueryEngine(core.EngineCPU)
	if err != nil {
		t.Fatal(err)
	}
	if !info.Available {
		t.Skipf("needs the CPU kernel library (make kernels): %s", info.Reason)
	}
}

// Operations have the names that statistics and errors have; dashes are understood.
func TestBenchOperationNames(t *testing.T) {
	for name, o := range benchOperations {
		if o != 0 && name != "dispatch-cached" && name != o.String() {
			t.Errorf("%s is called %s elsewhere", name, o)
		}
	}
	f := benchFlags{spec: benchSpec{Engine: "cpu", Ranks: 2, Tokens: []int{1}, Hidden: 128, Experts: 2, TopK: 1, Routing: "uniform", Iterations: 1}}
	f.spec.Operations = []string{"low-latency-combine", "dispatch-cached", "low_latency_dispatch"}
	if err := f.check(); err != nil || !slices.Equal(f.spec.Operations, []string{"low_latency_combine", "dispatch-cached", "low_latency_dispatch"}) {
		t.Errorf("%q, %v", f.spec.Operations, err)
	}
}

func TestBench(t *testing.T) {
	needKernels(t)
	file := filepath.Join(t.TempDir(), "latency.png")
	out, stderr, code := deepep(t, "bench", "--engine", "cpu", "--ranks", "2", "--hidden", "128", "--experts", "8", "--top-k", "2",
		"--tokens", "4,16", "--iterations", "5", "--warmup", "1", "--routing", "zipf", "--fp8", "--json", "--picture", file)
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, stderr)
	}
	var r benchReport
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	if r.Engine != "cpu" || len(r.Results) != 2*len(benchDefault) {
		t.Fatalf("%+v", r)
	}
	for _, l := range r.Results {
		if l.Calls != 5 || l.P50US <= 0 || l.P50US > l.P99US || l.P99US > l.MaxUS {
			t.Errorf("%+v", l)
		}
		if l.Operation != "low-latency" && (l.Bytes == 0 || l.KernelUS <= 0 || l.KernelUS > l.MaxUS) {
			t.Errorf("statistics of %+v", l)
		}
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil || img.Bounds().Dx() < 500 {
		t.Errorf("%v", err)
	}
}

// With one expert a token on another rank, the number of sent bytes is known.
func TestBenchBytes(t *testing.T) {
	needKernels(t)
	out, stderr, code := deepep(t, "bench", "dispatch", "combine", "--engine", "cpu", "--ranks", "3", "--hidden", "64", "--experts", "3", "--top-k", "1",
		"--tokens", "10", "--iterations", "2", "--warmup", "0", "--routing", "one-hot", "--json")
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, stderr)
	}
	var r benchReport
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	// In dispatch each rank sends its 10 rows to rank 0; in combine rank 0 sends all 30 back.
	for i, rows := range []uint64{10, 30} {
		if got, least := r.Results[i].Bytes, rows*64*2; got < least || got > 2*least {
			t.Errorf("%s sends %d bytes, its rows alone have %d", r.Results[i].Operation, got, least)
		}
	}
}

func TestBenchOfNodes(t *testing.T) {
	needKernels(t)
	out, stderr, code := deepep(t, "bench", "dispatch", "combine", "--engine", "cpu", "--ranks", "4", "--ranks-per-node", "2", "--hidden", "64", "--experts", "8",
		"--top-k", "2", "--tokens", "10", "--iterations", "2", "--warmup", "0")
	if code != 0 || !strings.Contains(out, "4 ranks on 2 nodes") || !strings.Contains(out, "combine") {
		t.Errorf("exit status %d: %s%s", code, out, stderr)
	}
}

func TestBenchFirstCall(t *testing.T) {
	needKernels(t)
	args := []string{"bench", "first-call", "--engine", "cpu", "--ranks", "2", "--hidden", "1024", "--experts", "4", "--top-k", "2", "--tokens", "256", "--iterations", "3"}
	out, stderr, code := deepep(t, args...)
	for _, want := range []string{"construction (plain)", "first call (preinitialize)", "warm-up (warm-up)", "steady call (warm-up with the shape)", "2 ranks", "where the time goes, 256 tokens", "of it page faults, about"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("exit status %d: %q is not in\n%s%s", code, want, out, stderr)
		}
	}
	var r benchReport
	if out, stderr, code = deepep(t, append(args, "--json")...); code != 0 {
		t.Fatalf("exit status %d: %s", code, stderr)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	spent := func(start, stage string) float64 {
		for _, s := range r.Starts {
			for _, line := range s.Stages {
				if s.Start == start && line.Name == stage {
					return line.US
				}
			}
		}
		t.Errorf("%s, %s: not there", start, stage)
		return 0
	}
	for _, start := range benchStarts {
		warm := strings.HasPrefix(start, "warm-up")
		for _, stage := range []string{"construction: kernels", "construction: memory", "construction: connections", "first call", "of it launches"} {
			if spent(start, stage) <= 0 {
				t.Errorf("%s, %s: no time", start, stage)
			}
		}
		for _, stage := range []string{"warm-up: memory", "warm-up: connections", "warm-up: calls"} {
			if (spent(start, stage) > 0) != warm {
				t.Errorf("%s, %s: %f us", start, stage, spent(start, stage))
			}
		}
	}
	if plain, warm := spent("plain", "of it page faults, about"), spent("warm-up with the shape", "of it page faults, about"); warm*2 > plain {
		t.Errorf("page faults: %f us plain, %f us after a warm-up", plain, warm)
	}
}

// A rank that cannot start ends the others, and the command prints its reason.
func TestBenchRankFails(t *testing.T) {
	needKernels(t)
	t.Setenv("DEEPEP_HEARTBEAT_MS", "never")
	_, stderr, code := deepep(t, "bench", "--engine", "cpu", "--ranks", "2", "--hidden", "64", "--experts", "4", "--tokens", "8", "--top-k", "2")
	if code != exitUsage || !strings.Contains(stderr, "DEEPEP_HEARTBEAT_MS") || !strings.Contains(stderr, "rank ") {
		t.Errorf("exit status %d: %s", code, stderr)
	}
}

func TestBenchArguments(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"bench sideways", `"sideways"`},
		{"bench --engine rocm", `"rocm"`},
		{"bench --ranks 0", "ranks: 0"},
		{"bench --ranks 65", "ranks: 65"},
		{"bench --ranks 4 --ranks-per-node 3", "a multiple of 3"},
		{"bench --iterations 0", "iterations: 0"},
		{"bench --routing odd", `"odd"`},
		{"bench --top-k 300", "top-k: 300"},
		{"bench --tokens 0", "num_max_dispatch_tokens_per_rank"},
		{"bench --experts 255", "num_experts"},
		{"bench --hidden 100 --fp8", "hidden: 100"},
		{"bench-rank", "standard input"},
		{"bench-construct", "standard input"},
		{"bench construct --ranks 0", "ranks: 0"},
		{"bench construct --rounds 0", "rounds: 0"},
		{"bench construct --ranks 3 --ranks-per-node 2", "a multiple of 2"},
	} {
		_, stderr, code := deepep(t, strings.Fields(c.args)...)
		if code != exitUsage || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit status %d, %q does not name %q", c.args, code, stderr, c.want)
		}
	}
}

func TestRouting(t *testing.T) {
	const tokens, topK, experts = 400, 4, 32
	count := map[string][]int{}
	for _, how := range routings {
		index, err := route(how, tokens, topK, experts, 1, 7)
		if err != nil {
			t.Fatal(err)
		}
		again, _ := route(how, tokens, topK, experts, 1, 7)
		if !slices.Equal(index, again) {
			t.Errorf("%s does not repeat", how)
		}
		n := make([]int, experts)
		for token := range tokens {
			choice := slices.Sorted(slices.Values(index[token*topK : (token+1)*topK]))
			if len(slices.Compact(choice)) != topK {
				t.Fatalf("%s: token %d chooses an expert twice", how, token)
			}
			for _, e := range index[token*topK : (token+1)*topK] {
				n[e]++
			}
		}
		count[how] = n
	}
	if n := count["one-hot"]; n[0] != tokens || n[topK-1] != tokens || n[topK] != 0 {
		t.Errorf("one-hot: %v", n)
	}
	if n := count["uniform"]; slices.Min(n) < 20 || slices.Max(n) > 90 { // 50 expected
		t.Errorf("uniform: %v", n)
	}
	if n := count["zipf"]; n[0] < 4*n[experts-1] || n[0] < n[1] || n[experts-1] == 0 {
		t.Errorf("zipf: %v", n)
	}
	other, _ := route("uniform", tokens, topK, experts, 2, 7)
	if same, _ := route("uniform", tokens, topK, experts, 1, 7); slices.Equal(other, same) {
		t.Error("two ranks route alike")
	}
}

func TestMergeTakesTheSlowestRank(t *testing.T) {
	series := func(times ...int64) *rankResult {
		return &rankResult{Engine: "cpu", Series: []rankSeries{{Operation: "combine", Tokens: 8, Times: times, Bytes: uint64(times[0])}}}
	}
	var r benchReport
	if err := r.merge([]*rankResult{series(1000, 5000, 2000, 2000), series(3000, 1000, 2500, 9000)}); err != nil {
		t.Fatal(err)
	}
	if l := r.Results[0]; l.P50US != 3 || l.P99US != 9 || l.MaxUS != 9 || l.Bytes != 3000 || l.GBs != 1 {
		t.Errorf("%+v", l)
	}
	if err := r.merge([]*rankResult{series(1, 2), series(1)}); err == nil {
		t.Error("ranks that measured different things were merged")
	}
}

func TestPictureOfNothing(t *testing.T) {
	r := benchReport{}
	if err := r.picture(filepath.Join(t.TempDir(), "x.png")); err == nil || !strings.Contains(err.Error(), "nothing") {
		t.Error(err)
	}
	r = benchReport{Spec: benchSpec{Ranks: 2, PerNode: 2, Tokens: []int{8}}, Results: []benchResult{{Operation: "combine", Tokens: 8, P50US: 3, P99US: 4}}}
	if err := r.picture(filepath.Join(t.TempDir(), "x.jpg")); err == nil || !strings.Contains(err.Error(), ".png") {
		t.Error(err)
	}
	if err := r.picture(filepath.Join(t.TempDir(), "one.png")); err != nil {
		t.Errorf("a single point: %v", err)
	}
}

// Construction is measured on processes and on goroutines; 64 processes on 8 nodes where long tests run.
func TestBenchConstruct(t *testing.T) {
	needKernels(t)
	cases := [][]string{{"--ranks", "4", "--ranks-per-node", "2"}, {"--ranks", "4", "--ranks-per-node", "2", "--goroutines"}}
	if os.Getenv("DEEPEP_TEST_FULL") == "1" {
		cases = append(cases, []string{"--ranks", "64"})
	}
	for _, args := range cases {
		out, stderr, code := deepep(t, append([]string{"bench", "construct", "--rounds", "1", "--json"}, args...)...)
		if code != 0 {
			t.Fatalf("%q: exit status %d: %s", args, code, stderr)
		}
		var r constructReport
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatal(err)
		}
		one := r.Rounds[0]
		if len(r.Rounds) != 1 || one.Group <= 0 || one.Buffer <= 0 || one.CPU <= 0 || one.RSS < 1<<20 || one.FDs < 3 || one.Maps < 3 {
			t.Errorf("%q: %+v", args, one)
		}
		var text strings.Builder
		if err := r.print(&text); err != nil || !strings.Contains(text.String(), "round 1") {
			t.Errorf("%v: %s", err, &text)
		}
	}
}
