package costs

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/nicsim"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// The costs of the documents are what the fit finds, and a fit from other values finds about the same.
func TestFit(t *testing.T) {
	want, got := Builtin(), Builtin()
	for _, k := range got.Kernels {
		for _, n := range knobs {
			for _, name := range k.Fitted {
				if name == n.name {
					*n.of(k) *= 1.3
				}
			}
		}
	}
	if err := got.Fit(); err != nil {
		t.Fatal(err)
	}
	for i := range want.Measured {
		m := &want.Measured[i]
		was, missed, err := want.Compare(m)
		now, _, err2 := got.Compare(m)
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		if m.Fit && (math.Abs(now.US/was.US-1) > 0.02 || math.Abs(missed) > 0.03) {
			t.Errorf("%s %s, %d ranks, %d SMs: %.1f us, by the file %.1f, measured %.1f", m.Operation, m.Format, m.Ranks, m.SMs, now.US, was.US, m.US)
		}
	}
}

// One call on paper: every token goes to every rank of two nodes of one.
func TestPrediction(t *testing.T) {
	f := Builtin()
	*f.Kernels["dispatch between nodes"] = Kernel{CallUS: 1, NotifyUS: 2, RowUS: 0.5, SMGBs: 1, Senders: 0.5, StreamRowUS: 3, StreamGBs: 2, PutGBs: 4, SignalUS: 0.25, MetadataByte: 8}
	c := Call{Operation: "dispatch", Format: "bf16", Ranks: 2, RanksPerNode: 1, Tokens: 40, Hidden: 500, TopK: 2, Experts: 2, SMs: 8, Seed: 1}
	m := Machine{NICGBs: 0.5, NVLinkGBs: 4, MemoryGBs: 2, Latency: 10, PostUS: 100}
	p, err := f.Predict(c, m)
	if err != nil {
		t.Fatal(err)
	}
	// 40 rows of 1000 bytes cross, 80 are staged and 80 read. 4 warps send 15 streams each, so 60 channels, and 24 queue pairs; a warp has 10 rows.
	for name, want := range map[string]float64{NIC: 40 * 1008 / 500.0, NVLink: 0, SMs: 160 * 1.5 / 8, Streams: 10 * 3.5, QueuePairs: 40.0 / 24 * 100, Memory: 2 * 200 * 1000 / 2e3} {
		if got := p.Limit(name); math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v us, on paper %v", name, got, want)
		}
	}
	if fixed := 1 + 2 + 10 + 0.25; p.FixedUS != fixed || p.Binds() != Memory || p.US != fixed+200 {
		t.Errorf("%+v", p)
	}
	m.NICGBs, m.PostUS, c.Cached = 0, 0, true // over NVLink the warp moves the bytes, too
	if p, _ = f.Predict(c, m); math.Abs(p.Limit(Streams)-10*(3+0.5+0.25)) > 1e-9 || p.FixedUS != 11.25 {
		t.Errorf("%+v", p)
	}
}

// Counts agree with the probability that a token goes to a rank, and rows that leave arrive.
func TestCounts(t *testing.T) {
	top, err := plan.NewTopology(8, 4)
	if err != nil {
		t.Fatal(err)
	}
	n, err := nicsim.Count(nicsim.Job{Operation: nicsim.Dispatch, Topology: top, Tokens: 4096, Hidden: 128, TopK: 2, Experts: 16, SMs: 2, Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	toRank := 1 - 14.0*13/(16*15)
	toNode := 1 - 8.0*7/(16*15)
	for name, pair := range map[string][2]float64{
		"experts": {n.ExpertRows, 2 * 4096}, "ranks": {n.RankRows, 8 * toRank * 4096}, "nodes": {n.NodeRows, 2 * toNode * 4096}, "far nodes": {n.FarNodes, toNode * 4096},
		"far ranks": {n.FarRanks, 4 * toRank * 4096}, "near ranks": {n.NearRanks, 3 * toRank * 4096}, "far experts": {n.FarExperts, 4096}, "stream": {n.StreamRows, toNode * 4096},
		"forwarded": {n.Forwarded, 6 * toRank * 4096},
	} {
		if math.Abs(pair[0]/pair[1]-1) > 0.05 {
			t.Errorf("%s: %.0f rows, %.0f expected", name, pair[0], pair[1])
		}
	}
}

func TestFilesAreChecked(t *testing.T) {
	var text bytes.Buffer
	if err := Builtin().Write(&text); err != nil {
		t.Fatal(err)
	}
	for change, says := range map[[2]string]string{
		{`"call_us"`, `"cal_us"`}:                              "cal_us",
		{`"sm_gb_s": 2400`, `"sm_gb_s": 0`}:                    "sm_gb_s: got 0",
		{`"nvlink_gb_s": 354`, `"nvlink_gb_s": -1`}:            "nvlink_gb_s: got -1",
		{`"machine": "h200"`, `"machine": "h20"`}:              "measured: machine: got h20",
		{`"combine between nodes"`, `"combine betwixt"`}:       `"combine between nodes"`,
		{`"operation": "dispatch"`, `"operation": "dispatsh"`}: "operation: got dispatsh",
		{`"format": "fp8"`, `"format": "fp4"`}:                 "format: got fp4",
		{`"ranks": 4`, `"ranks": 5`}:                           "num_ranks",
		{`"row_us"`, `"stream_gb_s": -1, "row_us"`}:            "stream_gb_s: got -1",
	} {
		bad := strings.Replace(text.String(), change[0], change[1], 1)
		if _, err := Read(strings.NewReader(bad)); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", change[1], err)
		}
	}
}

// Lines of mode=sweep, llsweep and ll, as bench_ops prints them.
func TestReadBench(t *testing.T) {
	list, err := ReadBench(strings.NewReader(`csv,sweep,isa,ranks,tokens,hidden,routing,sms,operation,link_bytes,median_us,worst_us,in_kernel_us
csv,sms,0,4,4096,7168,uniform,16,dispatch_fp8,1,250,260,245
csv,sms,0,4,4096,7168,uniform,16,dispatch_fp8_staged,1,350,360,345
csv,routing,0,4,4096,7168,zipf,16,dispatch_fp8,1,270,280,265
csv,tokens,0,4,512,7168,uniform,16,combine_bf16,1,90,95,85
done: sweep ranks=4 devices=4 tokens=4096 hidden=7168 isa=0
csv,4,128,7168,0,combine,31.00,32.00,24.20,25.00
LL combine, sums, weights now                median    45.5 us  p99    53.2 us  inside    37.9 us  p99    45.7 us
LL combine, each row                         median    62.3 us  p99    65.9 us  inside    53.9 us  p99    57.3 us
graph: combine, sums                         median    34.2 us  p99    35.1 us  inside     nan us  p99     nan us
done: ll ranks=4 nodes=2 devices=4 tokens=128 hidden=7168
`), "h200", "x")
	if err != nil || len(list) != 4 {
		t.Fatalf("%v %+v", err, list)
	}
	for i, want := range []Measurement{
		{Operation: "dispatch", Format: "fp8", Ranks: 4, RanksPerNode: 4, Tokens: 4096, Hidden: 7168, SMs: 16, US: 245, Cached: true, Machine: "h200", Fit: true, Source: "x"},
		{Operation: "combine", Format: "bf16", Ranks: 4, RanksPerNode: 4, Tokens: 512, Hidden: 7168, SMs: 16, US: 85, Machine: "h200", Fit: true, Source: "x"},
		{Operation: "low-latency combine", Format: "bf16", Ranks: 4, RanksPerNode: 4, Tokens: 128, Hidden: 7168, US: 24.2, Machine: "h200", Fit: true, Source: "x"},
		{Operation: "low-latency combine", Format: "bf16", Ranks: 4, RanksPerNode: 2, Tokens: 128, Hidden: 7168, US: 53.9, Unreduced: true, Machine: "h200", Source: "x"},
	} {
		if list[i] != want {
			t.Errorf("is %+v, should be %+v", list[i], want)
		}
	}
}
