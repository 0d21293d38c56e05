package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/monitor"
)

// The job of these tests: four processes dispatch and combine until the test ends, and one of them starts every
// dispatch 100 ms late: on a busy machine each of them waits 20 ms and more for a core.
const (
	jobRank  = "DEEPEP_TEST_JOB_RANK" // environment variable of its processes
	jobSlow  = 2
	jobLate  = 100 * time.Millisecond
	jobRanks = 4
)

// runJobRank is a rank's process. It prints "running" after ten rounds and ends with its standard input.
func runJobRank(rank int) error {
	spec := &benchSpec{Rank: rank, Ranks: jobRanks, PerNode: 2, Folder: os.Args[1], Engine: "cpu", Operations: []string{"dispatch"}, Tokens: []int{16}, Hidden: 256, Experts: 16, TopK: 4, Routing: "uniform", Start: "preinitialize"}
	ctx := context.Background()
	meet, err := core.OpenFile(ctx, core.FileOptions{Rank: rank, Size: jobRanks, Dir: spec.Folder, Name: "job"})
	if err != nil {
		return err
	}
	group, err := core.NewGroup(ctx, core.GroupOptions{Exchanger: meet, NumNVLPeers: spec.PerNode, Timeout: groupLimit})
	if err != nil {
		return err
	}
	options, err := spec.buffer()
	if err != nil {
		return err
	}
	buffer, err := group.NewBuffer(ctx, options)
	if err != nil {
		return err
	}
	c, err := newCaller(buffer, spec)
	if err != nil {
		return err
	}
	n, err := c.normal(16)
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends when the test does
		os.Exit(0)
	}()
	for round := 0; ; round++ {
		if rank == jobSlow {
			time.Sleep(jobLate)
		}
		if err := errors.Join(n.Dispatch(), n.Combine()); err != nil {
			fmt.Fprintf(os.Stderr, "rank %d: %v\n", rank, err)
			select {} // the test has killed a rank and now reads the others' pages
		}
		if round == 10 {
			fmt.Println("running")
		}
	}
}

// startJob runs the four processes until the test ends.
func startJob(t *testing.T) []*exec.Cmd {
	t.Helper()
	needKernels(t)
	folder := t.TempDir()
	var job []*exec.Cmd
	for rank := range jobRanks {
		cmd := exec.Command(os.Args[0], folder)
		cmd.Env = append(os.Environ(), jobRank+"="+strconv.Itoa(rank))
		cmd.Stderr = os.Stderr
		in, err1 := cmd.StdinPipe()
		out, err2 := cmd.StdoutPipe()
		if err := errors.Join(err1, err2, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			in.Close()
			_ = cmd.Process.Kill() // it may have ended by itself
			_ = cmd.Wait()
		})
		job = append(job, cmd)
		defer func() {
			if line, err := bufio.NewReader(out).ReadString('\n'); line != "running\n" {
				t.Fatalf("rank %d printed %q: %v", rank, line, err)
			}
		}()
	}
	return job
}

func pids(job []*exec.Cmd) []int {
	var list []int
	for _, cmd := range job {
		list = append(list, cmd.Process.Pid)
	}
	return list
}

// jobGroup finds the job's group among those that run on this machine.
func jobGroup(t *testing.T, job []*exec.Cmd) string {
	t.Helper()
	entries, err := monitor.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Stats != nil && slices.Contains(pids(job), e.Stats.PID) {
			return e.Stats.Group
		}
	}
	t.Fatal("no page of the job")
	return ""
}

func TestRunningJob(t *testing.T) {
	job := startJob(t)
	group := jobGroup(t, job)
	time.Sleep(500 * time.Millisecond)
	t.Run("top", func(t *testing.T) { checkJobTop(t, job, group) })
	t.Run("metrics", func(t *testing.T) { checkJobMetrics(t, group) })
	t.Run("trace", func(t *testing.T) { checkJobTrace(t, group) })
	t.Run("dead", func(t *testing.T) { checkJobDead(t, job, group) }) // the last one: it kills a rank
}

// checkJobTop checks that both forms of `deepep top` name the slow rank.
func checkJobTop(t *testing.T, job []*exec.Cmd, group string) {
	out, _, code := deepep(t, "top", "--once", "--group", group)
	for _, want := range []string{"group " + group, "4 of 4 ranks here", "dispatch", "combine", fmt.Sprintf("rank %d is slow:", jobSlow), fmt.Sprintf("%d ◄ slow", jobSlow)} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("exit status %d: %q is not in\n%s", code, want, out)
		}
	}
	out, _, _ = deepep(t, "top", "--once", "--json", "--group", group)
	var r hostReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Buffers) != 1 {
		t.Fatalf("%v\n%s", err, out)
	}
	if s := r.Buffers[0].SlowRank; s == nil || *s != jobSlow {
		t.Errorf("slow rank %v", s)
	}
	for i, rank := range r.Buffers[0].Ranks {
		waits := r.Buffers[0].WaitNS[i]
		if rank.PID != job[i].Process.Pid || rank.Dead {
			t.Errorf("rank %d is process %d, dead %v", i, rank.PID, rank.Dead)
		}
		if i != jobSlow && waits[jobSlow] < float64(jobLate)/2 {
			t.Errorf("rank %d waits %v", i, waits)
		}
	}
}

// checkJobMetrics checks the slow rank's gauge and the time that others waited for it.
func checkJobMetrics(t *testing.T, group string) {
	out, _, code := deepep(t, "metrics", "--once", "--group", group)
	if code != 0 {
		t.Fatalf("exit status %d", code)
	}
	families := parseMetrics(t, out)
	for peer := range jobRanks {
		labels := map[string]string{"group": group, "peer": strconv.Itoa(peer)}
		if got := metric(families["deepep_slow_rank"], labels).GetGauge().GetValue(); (got == 1) != (peer == jobSlow) {
			t.Errorf("slow_rank of %d is %v", peer, got)
		}
	}
	waited := metric(families["deepep_awaited_seconds_total"], map[string]string{"peer": strconv.Itoa(jobSlow)}).GetCounter().GetValue()
	if want := 3 * 10 * jobLate.Seconds() * 0.8; waited < want {
		t.Errorf("%v s waited for the slow rank, want at least %v", waited, want)
	}
}

// checkJobTrace counts the calls that take most of jobLate: the ranks that wait for the slow one have them.
func checkJobTrace(t *testing.T, group string) {
	file := filepath.Join(t.TempDir(), "trace.json")
	if out, stderr, code := deepep(t, "trace", "--group", group, "--output", file); code != 0 {
		t.Fatalf("exit status %d: %s%s", code, out, stderr)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var f traceFile
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	long := map[int]int{}
	clock := float64(monotonic()) / 1e3
	for _, e := range f.TraceEvents {
		if e.Phase != "X" {
			continue
		}
		if *e.Dur > 0.75*float64(jobLate.Microseconds()) {
			long[e.PID-1]++
		}
		if e.TS > clock || e.TS < clock-600e6 {
			t.Fatalf("a call of rank %d starts at %v us, it is %v", e.PID-1, e.TS, clock)
		}
	}
	for rank := range jobRanks {
		// The slow rank waits for no other, but a busy machine may delay it too.
		if rank != jobSlow && (long[rank] < 5 || long[rank] < 2*long[jobSlow]) {
			t.Errorf("long calls by rank: %v", long)
		}
	}
}

// checkJobDead kills rank 1, whose page then shows it as dead.
func checkJobDead(t *testing.T, job []*exec.Cmd, group string) {
	if err := job[1].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = job[1].Wait() // it was killed, so that Wait returns an error
	out, _, _ := deepep(t, "top", "--once", "--group", group)
	if want := fmt.Sprintf("rank 1 is dead: process %d has ended", job[1].Process.Pid); !strings.Contains(out, want) {
		t.Errorf("%q is not in\n%s", want, out)
	}
	metrics, _, _ := deepep(t, "metrics", "--once", "--group", group)
	labels := map[string]string{"group": group, "rank": "1"}
	if live := metric(parseMetrics(t, metrics)["deepep_buffer_live"], labels).GetGauge().GetValue(); live != 0 {
		t.Errorf("metrics: buffer_live of the dead rank is %v", live)
	}
}
