package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// maxConstructRanks bounds the ranks that construct starts as goroutines; as processes maxBenchRanks does not hold
// either, since they make no calls.
const maxConstructRanks = 512

// constructResult is what one rank, or with goroutines all ranks together, needed until its buffer stood.
type constructResult struct {
	Group  time.Duration `json:"group_ns"`  // NewGroup; the processes have met before
	Buffer time.Duration `json:"buffer_ns"` // NewBuffer
	CPU    time.Duration `json:"cpu_ns"`    // user and system, of the whole process in that time
	RSS    uint64        `json:"rss_bytes"` // most memory that the process has had
	FDs    int           `json:"fds"`       // open in the process once the buffer stood
	Maps   int           `json:"maps"`      // mappings then
	Error  string        `json:"error,omitempty"`
}

// constructReport is the result of `deepep bench construct`: the slowest rank's times, the sum of CPU time, the largest
// of the rest.
type constructReport struct {
	Ranks      int               `json:"ranks"`
	PerNode    int               `json:"ranks_per_node"`
	Goroutines bool              `json:"goroutines"`
	Rounds     []constructResult `json:"rounds"`
}

func benchConstructCommand() *cobra.Command {
	spec := benchSpec{Engine: core.EngineCPU, Tokens: []int{128}, Operations: []string{"low-latency"}, Start: "plain"}
	var goroutines, asJSON bool
	var rounds int
	cmd := &cobra.Command{
		Use:   "construct",
		Short: "Time, memory and descriptors that the construction of a group and its buffer takes",
		Long: `Makes a group and a buffer for normal and low-latency mode (CPU engine) on ranks
of this host, as processes or as goroutines of one process, and destroys them.
group and buffer are the slowest rank's NewGroup and NewBuffer, from when all
processes stand; CPU is user and system time of all ranks together; memory,
descriptors and mappings are of the process that has most.`,
		Example: `  deepep bench construct --ranks 64 --ranks-per-node 8
  deepep bench construct --ranks 256 --ranks-per-node 8 --goroutines`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if spec.Ranks < 1 || spec.Ranks > maxConstructRanks {
				return fmt.Errorf("ranks: %d; allowed is 1 to %d", spec.Ranks, maxConstructRanks)
			}
			if rounds < 1 || rounds > 1000 {
				return fmt.Errorf("rounds: %d; allowed is 1 to 1000", rounds)
			}
			if spec.PerNode == 0 {
				spec.PerNode = spec.Ranks
			}
			if _, err := plan.NewTopology(spec.Ranks, spec.PerNode); err != nil {
				return err
			}
			spec.Experts = spec.Ranks * 2
			report := constructReport{Ranks: spec.Ranks, PerNode: spec.PerNode, Goroutines: goroutines}
			for range rounds {
				r, err := construct(cmd.Context(), spec, goroutines)
				if err != nil {
					return err
				}
				report.Rounds = append(report.Rounds, *r)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), report)
			}
			return report.print(cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&spec.Ranks, "ranks", 64, "ranks to start")
	flags.IntVar(&spec.PerNode, "ranks-per-node", 8, "ranks of one node; 0: one node")
	flags.IntVar(&spec.Hidden, "hidden", 7168, "hidden size of which the buffer's memory is sized")
	flags.BoolVar(&goroutines, "goroutines", false, "ranks are goroutines of one process")
	flags.IntVar(&rounds, "rounds", 3, "times that all is made anew")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// construct makes all ranks once.
func construct(ctx context.Context, spec benchSpec, goroutines bool) (*constructResult, error) {
	processes := spec.Ranks
	if goroutines {
		processes = 1
	}
	folder, err := os.MkdirTemp("", "deepep-construct-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	spec.Folder = folder
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	results := make([]constructResult, processes)
	running, ctx := errgroup.WithContext(ctx)
	for i := range processes {
		running.Go(func() error {
			return guarded(func() error { return startConstruct(ctx, exe, spec, i, goroutines, &results[i]) })
		})
	}
	if err := running.Wait(); err != nil {
		return nil, err
	}
	all := results[0]
	for _, r := range results[1:] {
		all.Group, all.Buffer, all.CPU = max(all.Group, r.Group), max(all.Buffer, r.Buffer), all.CPU+r.CPU
		all.RSS, all.FDs, all.Maps = max(all.RSS, r.RSS), max(all.FDs, r.FDs), max(all.Maps, r.Maps)
	}
	return &all, nil
}

// startConstruct runs a rank's process, or that of all ranks, to its end.
func startConstruct(ctx context.Context, exe string, spec benchSpec, rank int, goroutines bool, result *constructResult) error {
	spec.Rank = rank
	if goroutines {
		spec.Rank = -1
	}
	input, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, exe, "bench-construct")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // the kernel kills the rank when the parent ends
	failed := cmd.Run()
	if err := json.Unmarshal(stdout.Bytes(), result); err != nil {
		return fmt.Errorf("rank %d: %w: %s", spec.Rank, errors.Join(failed, ctx.Err()), strings.TrimSpace(stderr.String()))
	}
	if result.Error != "" {
		return fmt.Errorf("rank %d: %s", spec.Rank, result.Error)
	}
	return failed
}

// benchConstructRankCommand is the process of one rank, or of all as goroutines (rank -1).
func benchConstructRankCommand() *cobra.Command {
	return &cobra.Command{
		Use: "bench-construct", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var spec benchSpec
			if err := json.NewDecoder(cmd.InOrStdin()).Decode(&spec); err != nil {
				return fmt.Errorf("bench-construct: reading its input from standard input: %w", err)
			}
			result, err := constructHere(cmd.Context(), &spec)
			if err != nil {
				result = &constructResult{Error: err.Error()}
			}
			status.Keep(&err, json.NewEncoder(cmd.OutOrStdout()).Encode(result))
			if err != nil {
				return exitCode(exitProblems) // the parent prints the reason
			}
			return nil
		},
	}
}

// constructHere makes the ranks of this process.
func constructHere(ctx context.Context, spec *benchSpec) (*constructResult, error) {
	if spec.Rank >= 0 {
		meet, err := core.OpenFile(ctx, core.FileOptions{Rank: spec.Rank, Size: spec.Ranks, Dir: spec.Folder, Name: "construct"})
		if err != nil {
			return nil, err
		}
		return constructRanks(ctx, spec, []core.Exchanger{meet})
	}
	return constructRanks(ctx, spec, core.NewLocal(spec.Ranks))
}

// constructRanks makes a group and a buffer on each rank of this process, measures, and destroys them.
func constructRanks(ctx context.Context, spec *benchSpec, meets []core.Exchanger) (*constructResult, error) {
	options, err := spec.buffer()
	if err != nil {
		return nil, err
	}
	groups, buffers := make([]*core.Group, len(meets)), make([]*core.Buffer, len(meets))
	each := func(f func(i int) error) (time.Duration, error) {
		var all errgroup.Group
		began := time.Now()
		for i := range meets {
			all.Go(func() error { return guarded(func() error { return f(i) }) })
		}
		err := all.Wait()
		return time.Since(began), err
	}
	var result constructResult
	before := cpuTime()
	result.Group, err = each(func(i int) (err error) {
		groups[i], err = core.NewGroup(ctx, core.GroupOptions{Exchanger: meets[i], NumNVLPeers: spec.PerNode, Timeout: groupLimit})
		return err
	})
	if err == nil {
		result.Buffer, err = each(func(i int) (err error) {
			buffers[i], err = groups[i].NewBuffer(ctx, options)
			return err
		})
	}
	result.CPU = cpuTime() - before
	if err == nil {
		result.FDs, result.Maps, err = openThings()
	}
	if err == nil {
		// Ranks leave together: a rank that has left cannot take part in the others' last exchange.
		_, err = each(func(i int) error { return buffers[i].Barrier(&core.Call{}) })
	}
	var ends sync.WaitGroup
	for i := range meets {
		ends.Go(func() {
			if buffers[i] != nil {
				_ = buffers[i].Destroy()
			}
			if groups[i] != nil {
				_ = groups[i].Destroy()
			}
		})
	}
	ends.Wait()
	var used unix.Rusage
	if e := unix.Getrusage(unix.RUSAGE_SELF, &used); e == nil {
		result.RSS = uint64(used.Maxrss) << 10
	}
	return &result, err
}

// cpuTime is the user and system time of this process.
func cpuTime() time.Duration {
	var used unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &used) != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// openThings counts this process's descriptors and mappings.
func openThings() (fds, maps int, err error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, 0, err
	}
	text, err := os.ReadFile("/proc/self/maps")
	return len(entries), bytes.Count(text, []byte{'\n'}), err
}

func (r *constructReport) print(w io.Writer) error {
	kind := "processes"
	if r.Goroutines {
		kind = "goroutines of one process"
	}
	fmt.Fprintf(w, "%s as %s, %d a node\n", count(r.Ranks, "rank"), kind, r.PerNode)
	t := newTable()
	header := table.Row{"", "group", "buffer", "together", "CPU", "memory", "descriptors", "mappings"}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	row := func(name string, c constructResult) {
		t.AppendRow(table.Row{name, timeText(c.Group), timeText(c.Buffer), timeText(c.Group + c.Buffer), timeText(c.CPU), sizeText(c.RSS), c.FDs, c.Maps})
	}
	for i, c := range r.Rounds {
		row(fmt.Sprintf("round %d", i+1), c)
	}
	if len(r.Rounds) > 1 {
		sorted := slices.SortedFunc(slices.Values(r.Rounds), func(a, b constructResult) int { return int(a.Group + a.Buffer - b.Group - b.Buffer) })
		t.AppendSeparator()
		row("median", sorted[(len(sorted)-1)/2])
	}
	_, err := fmt.Fprintln(w, t.Render())
	return err
}
