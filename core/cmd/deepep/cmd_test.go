package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/monitor"
	"github.com/deepep-go/deepep/internal/testutil/pagetest"
)

// deepep runs a command line and returns what it printed.
func deepep(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(context.Background(), args, &out, &err)
	return out.String(), err.String(), code
}

// pages makes the pages of a job of four ranks in which rank slow (-1: none) is 20 ms late.
func pages(t *testing.T, slow, calls int) (folder string, list []*monitor.Page) {
	t.Helper()
	folder = filepath.Join(t.TempDir(), "pages")
	clock := monotonic()
	for r := range 4 {
		p, err := monitor.Create(folder, monitor.Meta{Rank: r, NumRanks: 4, Buffer: 3, Group: "train", Host: "node-a", Engine: "cpu", Device: "Xeon", TraceLen: 16})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = p.Remove(), p.Unmap() })
		list = append(list, p)
		for i := range calls {
			wait := []time.Duration{9e3, 9e3, 9e3, 9e3}
			took := 400 * time.Microsecond
			if slow >= 0 && r != slow {
				wait[slow] = 20 * time.Millisecond
				took += wait[slow]
			}
			start := clock + uint64(i)*uint64(25*time.Millisecond)
			pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpDispatch, Start: start, Duration: took, BytesTo: []uint64{1e6, 1e6, 1e6, 1e6}, WaitFor: wait})
			pagetest.Record(p.Bytes(), pagetest.Call{Op: abi.OpCombine, Start: start + uint64(took), Duration: 300 * time.Microsecond, BytesTo: []uint64{1e6, 1e6, 1e6, 1e6}, WaitFor: wait[:0:0]})
		}
		if err := p.Publish(); err != nil {
			t.Fatal(err)
		}
	}
	return folder, list
}

func TestTopNamesTheSlowRank(t *testing.T) {
	folder, _ := pages(t, 2, 10)
	out, _, code := deepep(t, "top", "--once", "--folder", folder)
	for _, want := range []string{"group train", "buffer 3", "cpu", "4 of 4 ranks here", "dispatch", "combine", "2 ◄ slow", "rank 2 is slow:", "wait 20.0 ms for it", "p99.9", "9.00 us"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
	folder, _ = pages(t, -1, 10)
	if out, _, _ := deepep(t, "top", "--once", "--folder", folder); strings.Contains(out, "slow") {
		t.Errorf("an even job has a slow rank:\n%s", out)
	}
}

func TestTopJSON(t *testing.T) {
	folder, _ := pages(t, 1, 10)
	out, _, _ := deepep(t, "top", "--once", "--json", "--folder", folder)
	var r hostReport
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	b := r.Buffers[0]
	if len(r.Buffers) != 1 || b.SlowRank == nil || *b.SlowRank != 1 || len(b.Ranks) != 4 || len(b.Ranks[0].Ops) != 2 {
		t.Fatalf("%+v", r)
	}
	if d := b.Ranks[3].Ops[0]; d.Op != "dispatch" || d.Calls != 10 || d.Bytes[2] != 1e7 || d.Wait[1] != 2e8 || d.MaxNS != 20_400_000 {
		t.Errorf("%+v", d)
	}
}

// The second view of `deepep top` shows the calls since the first.
func TestTopLive(t *testing.T) {
	folder, list := pages(t, -1, 100)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	reader, writer := io.Pipe()
	done := make(chan int)
	go func() {
		code := run(ctx, []string{"top", "--json", "--interval", "100ms", "--folder", folder}, writer, io.Discard)
		writer.Close()
		done <- code
	}()
	looks := json.NewDecoder(reader)
	var first, second hostReport
	if err := looks.Decode(&first); err != nil {
		t.Fatal(err)
	}
	pagetest.Record(list[0].Bytes(), pagetest.Call{Op: abi.OpCombine, Duration: time.Second})
	if err := looks.Decode(&second); err != nil {
		t.Fatal(err)
	}
	cancel()
	go func() { _, _ = io.Copy(io.Discard, reader) }() // what it still writes
	if code := <-done; code != 0 {
		t.Errorf("exit status %d", code)
	}
	for r := range 4 {
		want := uint64(0)
		if r == 0 {
			want = 1
		}
		if got := second.Buffers[0].Ranks[r].Ops[1]; first.Buffers[0].Ranks[r].Ops[1].Calls != 100 || got.Calls != want {
			t.Errorf("rank %d: %+v", r, got)
		}
	}
}

func TestTopWithDamagedAndDeadPages(t *testing.T) {
	folder, list := pages(t, -1, 1)
	name := filepath.Base(list[0].Path())
	parts := strings.SplitN(name, "-", 3)
	damaged := filepath.Join(folder, parts[0]+"-"+parts[1]+"-99-"+strings.Split(parts[2], "-")[1])
	if err := os.WriteFile(damaged, []byte("no page"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _, code := deepep(t, "top", "--once", "--folder", folder)
	if code != 0 || !strings.Contains(out, "skipped: ") || !strings.Contains(out, "damaged: 7 bytes") || !strings.Contains(out, "4 of 4 ranks here") {
		t.Errorf("exit status %d\n%s", code, out)
	}
	// A page of this process's pid with another start time is that of a dead process.
	b, err := os.ReadFile(list[3].Path())
	if err != nil {
		t.Fatal(err)
	}
	const startAt = 24
	b[startAt]++
	var start uint64
	for i := range 8 {
		start |= uint64(b[startAt+i]) << (8 * i)
	}
	if err := os.Remove(list[3].Path()); err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(folder, fmt.Sprintf("%s-%d-%s", parts[0], start, parts[2]))
	if err := os.WriteFile(dead, b, 0o600); err != nil {
		t.Fatal(err)
	}
	out, _, _ = deepep(t, "top", "--once", "--folder", folder)
	if !strings.Contains(out, "rank 3 is dead: process "+parts[0]+" has ended") {
		t.Errorf("%s", out)
	}
	marked := strings.TrimSuffix(dead, ".page") + ".dead"
	longAgo := time.Now().Add(-2 * monitor.DeadFor)
	if err := os.Chtimes(marked, longAgo, longAgo); err != nil {
		t.Fatal(err)
	}
	if out, _, _ = deepep(t, "top", "--once", "--folder", folder); strings.Contains(out, "is dead") {
		t.Errorf("still shown:\n%s", out)
	}
	if _, err := os.Stat(marked); !os.IsNotExist(err) {
		t.Errorf("the dead page is still there: %v", err)
	}
}

func parseMetrics(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return families
}

// metric finds the value of a series by its labels.
func metric(f *dto.MetricFamily, labels map[string]string) *dto.Metric {
	for _, m := range f.GetMetric() {
		left := len(labels)
		for _, l := range m.GetLabel() {
			if labels[l.GetName()] == l.GetValue() {
				left--
			}
		}
		if left == 0 {
			return m
		}
	}
	return nil
}

func checkMetrics(t *testing.T, text string, slow int) {
	t.Helper()
	families := parseMetrics(t, text)
	for peer := range 4 {
		m := metric(families["deepep_slow_rank"], map[string]string{"group": "train", "peer": fmt.Sprint(peer)})
		if got := m.GetGauge().GetValue() == 1; got != (peer == slow) {
			t.Errorf("slow_rank of %d is %v", peer, m)
		}
	}
	rank0 := map[string]string{"rank": "0", "op": "dispatch"}
	h := metric(families["deepep_call_duration_seconds"], rank0).GetHistogram()
	if h.GetSampleCount() != 10 || len(h.GetBucket()) < 10 || h.GetSampleSum() < 0.2 {
		t.Errorf("histogram %v", h)
	}
	if n := metric(families["deepep_calls_total"], rank0).GetCounter().GetValue(); n != 10 {
		t.Errorf("%v calls", n)
	}
	rank0["peer"] = fmt.Sprint(slow)
	if s := metric(families["deepep_wait_seconds_total"], rank0).GetCounter().GetValue(); s != 0.2 {
		t.Errorf("%v s waited", s)
	}
	awaited := families["deepep_awaited_seconds_total"]
	if s := metric(awaited, map[string]string{"peer": fmt.Sprint(slow)}).GetCounter().GetValue(); s < 0.59 {
		t.Errorf("%v s awaited", s)
	}
}

// Two pages with the same labels, which any user can make: the series of the other pages are served.
func TestMetricsOfDoubledPages(t *testing.T) {
	folder, list := pages(t, 2, 10)
	b, err := os.ReadFile(list[1].Path())
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(filepath.Base(list[1].Path()), "-")
	parts[2] = "99"
	if err := os.WriteFile(filepath.Join(folder, strings.Join(parts, "-")), b, 0o600); err != nil {
		t.Fatal(err)
	}
	out, _, code := deepep(t, "metrics", "--once", "--folder", folder)
	if code != 0 {
		t.Fatalf("exit status %d", code)
	}
	if n := metric(parseMetrics(t, out)["deepep_pages_skipped"], nil).GetGauge().GetValue(); n != 1 {
		t.Errorf("%v pages skipped", n)
	}
	if n := metric(parseMetrics(t, out)["deepep_calls_total"], map[string]string{"rank": "0", "op": "dispatch"}).GetCounter().GetValue(); n != 10 {
		t.Errorf("%v calls", n)
	}
}

// A client that says nothing after its first request does not keep its connection for ever.
func TestMetricsClosesIdleConnections(t *testing.T) {
	before := idleTimeout
	idleTimeout = 50 * time.Millisecond
	defer func() { idleTimeout = before }()
	ctx, cancel := context.WithCancel(context.Background())
	reader, writer := io.Pipe()
	done := make(chan int)
	go func() {
		code := run(ctx, []string{"metrics", "--listen", "127.0.0.1:0", "--folder", t.TempDir()}, io.Discard, writer)
		writer.Close()
		done <- code
	}()
	var address string
	if _, err := fmt.Fscanf(reader, "deepep: serving http://%s", &address); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, reader) }()
	conn, err := net.Dial("tcp", strings.TrimSuffix(address, "/metrics"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); err != nil { // to the end of the connection
		t.Error(err)
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit status %d", code)
	}
}

func TestMetricsOnce(t *testing.T) {
	folder, _ := pages(t, 2, 10)
	out, _, code := deepep(t, "metrics", "--once", "--folder", folder)
	if code != 0 {
		t.Fatalf("exit status %d", code)
	}
	checkMetrics(t, out, 2)
}

func TestMetricsServer(t *testing.T) {
	folder, _ := pages(t, 3, 10)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	reader, writer := io.Pipe()
	done := make(chan int)
	go func() {
		done <- run(ctx, []string{"metrics", "--listen", "127.0.0.1:0", "--folder", folder}, io.Discard, writer)
	}()
	line := make([]byte, 200)
	n, err := reader.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.TrimSpace(strings.TrimPrefix(string(line[:n]), "deepep: serving "))
	if !strings.HasPrefix(url, "http://127.0.0.1:") {
		t.Fatalf("serves on %q", url)
	}
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%v %v", response.Status, err)
	}
	checkMetrics(t, string(body), 3)
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit status %d", code)
	}
	if defaultAddress[:10] != "127.0.0.1:" {
		t.Error("the default address is not this host alone")
	}
}

func TestTrace(t *testing.T) {
	folder, _ := pages(t, 2, 10)
	file := filepath.Join(t.TempDir(), "t.json")
	out, _, code := deepep(t, "trace", "--folder", folder, "--output", file, "--last", "6")
	if code != 0 || !strings.Contains(out, "24 calls of 1 buffer") {
		t.Fatalf("%d %s", code, out)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var f traceFile
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	names, longest := map[string]int{}, map[int]float64{}
	for _, e := range f.TraceEvents {
		switch e.Phase {
		case "X":
			names[e.Name]++
			longest[e.PID] = max(longest[e.PID], *e.Dur)
		case "M":
			if e.Name == "process_name" && !strings.Contains(e.Args["name"].(string), fmt.Sprintf("rank %d, group train", e.PID-1)) {
				t.Errorf("process %d is %v", e.PID, e.Args["name"])
			}
		}
	}
	if names["dispatch"] != 12 || names["combine"] != 12 {
		t.Errorf("%v", names)
	}
	for pid, us := range longest {
		if slow := pid-1 == 2; slow != (us < 1000) {
			t.Errorf("process %d: longest call %v us", pid, us)
		}
	}
}

func TestTraceWithoutClock(t *testing.T) {
	events := traceCalls(1, []monitor.Call{{Op: 5, Phase: 1, Number: 7, Duration: 2000}, {Op: 5, Phase: 2, Number: 7, Duration: 3000}})
	if events[0].Name != "low_latency_dispatch send" || events[1].Name != "low_latency_dispatch receive" || events[1].TS != 2 || *events[1].Dur != 3 || events[1].Args["start"] != "not known" {
		t.Errorf("%+v", events)
	}
}

func TestWrongArguments(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
	}{
		{"bogus", "bogus"},
		{"doctor --for gpu", `"gpu"`},
		{"doctor stray", "--compare"},
		{"doctor --compare one.json", "two files"},
		{"doctor --compare a.json b.json", "a.json"},
		{"doctor --pid 999999999", "999999999"},
		{"doctor --pid -3", "-3"},
		{"doctor --root /nowhere", "/nowhere"},
		{"doctor --ranks 0", "num_ranks"},
		{"top --interval 1ms", "100ms"},
		{"top --once --folder /nowhere", "/nowhere"},
		{"metrics --listen 9464", "host:port"},
		{"metrics --listen :9464", "host:port"},
		{"trace --last 0", "last"},
		{"plan --ranks 9", "num_ranks"},
		{"plan --experts 255", "num_experts"},
		{"plan --hidden -1", "hidden"},
		{"plan --memory lots", "lots"},
		{"plan --engine rocm", "rocm"},
		{"plan extra", "extra"},
	} {
		_, stderr, code := deepep(t, strings.Fields(c.args)...)
		if code != exitUsage || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit status %d, %q does not name %q", c.args, code, stderr, c.want)
		}
	}
}
