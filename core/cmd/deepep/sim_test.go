package main

import (
	"encoding/json"
	"errors"
	"flag"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

var updateSim = flag.Bool("update-sim", false, "write the golden files of deepep sim again")

// simSmall is a short comparison.
var simSmall = []string{"sim", "qp", "--ranks", "16", "--tokens", "24", "--hidden", "1024", "--experts", "64"}

// The same arguments give the same text.
func TestSimGolden(t *testing.T) {
	for name, args := range map[string][]string{
		"qp": simSmall,
		"qp-combine": {"sim", "qp", "--ranks", "12", "--ranks-per-node", "4", "--tokens", "24", "--experts", "48", "--operation", "combine", "--nic", "drain", "--qps", "3",
			"--order", "linear,rotated,planned", "--buffer", "0", "--routing", "ecmp", "--fabric", "pod", "--all-rdma", "--in-turn", "--seed", "5"},
		"ep": {"sim", "ep", "--ranks", "8,16,32", "--mode", "low-latency"},
	} {
		out, stderr, code := deepep(t, args...)
		if code != 0 {
			t.Fatalf("%s: %d %s", name, code, stderr)
		}
		file := filepath.Join("testdata", "sim-"+name+".golden")
		if *updateSim {
			if err := os.WriteFile(file, []byte(out), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if out != string(want) {
			t.Errorf("%s: is\n%s\nwas\n%s\n(-update-sim writes the golden files)", name, out, want)
		}
	}
}

func TestSimQPJSON(t *testing.T) {
	out, stderr, code := deepep(t, append(simSmall, "--json", "--nic", "lowest", "--order", "linear,spread", "--skew", "10ns")...)
	var r qpReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("%d %v %s", code, err, stderr)
	}
	if r.Ranks != 16 || r.Nodes != 2 || r.Buffer != "128KiB" || r.SkewUS != 0.01 || len(r.Results) != 4 {
		t.Fatalf("%+v", r)
	}
	for i, one := range r.Results {
		if want := []int{4, 4, 1, 1}[i]; one.Queues != want || one.Order != []string{"linear", "spread"}[i%2] {
			t.Errorf("line %d: %+v", i, one)
		}
		if one.SlowestUS < one.MeanUS || one.MeanUS <= 25 || one.GBs <= 0 || one.GBs > 50 || one.LargestQueue <= 0 || one.Bytes != r.Results[0].Bytes {
			t.Errorf("line %d: %+v", i, one)
		}
	}
	if linear, spread := r.Results[0], r.Results[1]; spread.LargestQueue >= linear.LargestQueue {
		t.Errorf("NICs that prefer low numbers: queue of %d bytes in linear order, of %d spread", linear.LargestQueue, spread.LargestQueue)
	}
}

func TestSimEPFit(t *testing.T) {
	out, stderr, code := deepep(t, "sim", "ep", "--json", "--ranks", "8", "--mode", "normal", "--fit")
	var r epReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("%d %v %s", code, err, stderr)
	}
	if r.CallUS < 24 || r.CallUS > 26 || r.CopyGBs < 157 || r.CopyGBs > 159 || r.Checks != 0 || len(r.Results) != 2 || r.Results[0].Role != "fit" {
		t.Errorf("%s", out)
	}
}

func TestSimPictures(t *testing.T) {
	folder := t.TempDir()
	svg, bitmap := filepath.Join(folder, "qp.svg"), filepath.Join(folder, "ep.png")
	if _, stderr, code := deepep(t, append(simSmall, "--picture", svg, "--nic", "turns,lowest", "--qps", "1")...); code != 0 {
		t.Fatal(stderr)
	}
	drawn, err := os.ReadFile(svg)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<svg", "16 ranks", "slowest rank, us", "largest queue", "planned"} {
		if !strings.Contains(string(drawn), want) {
			t.Errorf("%q is not in the picture", want)
		}
	}
	if _, stderr, code := deepep(t, "sim", "ep", "--mode", "low-latency", "--ranks", "8,16", "--picture", bitmap); code != 0 {
		t.Fatal(stderr)
	}
	f, err := os.Open(bitmap)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dx() < 800 {
		t.Errorf("%v", err)
	}
}

func TestSimRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"routing: \"best\"; allowed are adaptive, ecmp, static": {"qp", "--routing", "best"},
		"fabric: \"torus\"; allowed are rail, pod":              {"ep", "--fabric", "torus"},
		"allowed is a size like 64KiB, or 0":                    {"qp", "--buffer", "much"},
		"at least one segment with its headers":                 {"qp", "--buffer", "1KiB"},
		"nic: \"fast\"; allowed are turns, backlog":             {"qp", "--nic", "fast"},
		"nic: \"slow\"; allowed are turns, backlog":             {"ep", "--nic", "slow"},
		"order: \"up\"; allowed are linear, planned":            {"qp", "--order", "up"},
		"operation: \"gather\"; allowed are dispatch, combine":  {"qp", "--operation", "gather"},
		"mode: \"fast\"; allowed are all, low-latency, normal":  {"ep", "--mode", "fast"},
		"nothing else crosses a NIC":                            {"qp", "--ranks", "8"},
		"every node must be full":                               {"ep", "--ranks", "12"},
		"argument experts: got 100":                             {"qp", "--experts", "100"},
		"argument num_qps_per_rank: got -1":                     {"qp", "--qps", "-1"},
		"argument skew: got -1000":                              {"qp", "--skew", "-1ns"},
		"allowed is a name that ends in .svg or .png":           {"ep", "--ranks", "8", "--mode", "low-latency", "--picture", "x.gif"},
	} {
		if _, stderr, code := deepep(t, append([]string{"sim"}, args...)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%v: %d %s, want %q", args, code, stderr, want)
		}
	}
}

func TestPanicIsAnError(t *testing.T) {
	err := inParallel(t.Context(), 3, func(i int) error {
		if i == 1 {
			panic("no route")
		}
		return nil
	})
	if !errors.Is(err, status.ErrInternal) || !strings.Contains(err.Error(), "no route") {
		t.Errorf("got %v", err)
	}
}
