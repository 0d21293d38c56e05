package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/plan"
)

type benchFlags struct {
	spec    benchSpec
	json    bool
	picture string
}

// benchDefault lists the operations that bench measures if none is named.
var benchDefault = []string{"dispatch", "dispatch-cached", "combine", "low_latency_dispatch", "low_latency_combine", "low-latency"}

func benchCommand() *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "bench [operation…]",
		Short: "Latency of the operations among local ranks",
		Long: `Starts the ranks as processes of this host and times each operation: all ranks
meet, each takes its time on the host until the call is done, and the slowest
counts. Operations: dispatch (layout, counts, the host's wait for them, rows),
dispatch-cached, combine, low_latency_dispatch, low_latency_combine, low-latency
(the round trip; --tokens is B), and first-call, which shows by stage where the
time of construction, of a warm-up and of the first dispatch with its combine
goes: plain, preinitialized, and warmed up with and without a shape.

GB/s is the payload that a rank sends in a call, itself included, over p50.
"kernels" is the mean time in the operation's own kernels, "waiting" the share of
it spent waiting for peers; both are of rank 0.`,
		Example: `  deepep bench --ranks 4
  deepep bench dispatch combine --tokens 64,512,4096 --routing zipf --picture latency.png
  deepep bench low-latency --engine cuda --ranks 8 --fp8 --tokens 128
  deepep bench dispatch combine --engine cpu --ranks 4 --ranks-per-node 2
  deepep bench first-call --tokens 512`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.spec.Operations = args
			return f.run(cmd)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.spec.Engine, "engine", "auto", "cpu, cuda, or auto")
	flags.IntVar(&f.spec.Ranks, "ranks", 4, "rank processes to start")
	flags.IntVar(&f.spec.PerNode, "ranks-per-node", 0, "ranks of one node; nodes are joined by RDMA, in software with cpu; 0: one node")
	flags.IntSliceVar(&f.spec.Tokens, "tokens", []int{128}, "tokens a rank, one or several numbers")
	flags.IntVar(&f.spec.Hidden, "hidden", 7168, "hidden size (BF16 elements a row)")
	flags.IntVar(&f.spec.Experts, "experts", 256, "experts of all ranks together")
	flags.IntVar(&f.spec.TopK, "top-k", 8, "experts a token")
	flags.StringVar(&f.spec.Routing, "routing", "uniform", "uniform, zipf or one-hot")
	flags.BoolVar(&f.spec.FP8, "fp8", false, "low-latency dispatch casts to FP8")
	flags.IntVar(&f.spec.Iterations, "iterations", 30, "timed calls of each operation")
	flags.IntVar(&f.spec.Warmup, "warmup", 5, "calls before the timed ones, at least 2")
	flags.Uint64Var(&f.spec.Seed, "seed", 1, "of the routing")
	flags.BoolVar(&f.json, "json", false, "print JSON")
	flags.StringVar(&f.picture, "picture", "", "write a picture (PNG) of latency against tokens")
	cmd.AddCommand(benchConstructCommand())
	return cmd
}

// benchStarts are the ways to begin that first-call compares.
var benchStarts = []string{"plain", "preinitialize", "warm-up", "warm-up with the shape"}

// Bounds for typing errors, which could overload the host.
const (
	maxBenchRanks = 64
	maxIterations = 1_000_000
)

func (f *benchFlags) check() error {
	s := &f.spec
	if len(s.Operations) == 0 {
		s.Operations = benchDefault
	}
	for i, o := range s.Operations {
		if name := strings.ReplaceAll(o, "-", "_"); benchOperations[name] != 0 { // low-latency-dispatch too
			o, s.Operations[i] = name, name
		}
		if _, ok := benchOperations[o]; !ok {
			return fmt.Errorf("operation: %q; allowed are %s and first-call", o, strings.Join(benchDefault, ", "))
		}
	}
	switch {
	case !slices.Contains([]string{"auto", "cpu", "cuda"}, s.Engine):
		return fmt.Errorf("engine: %q; allowed are auto, cpu and cuda", s.Engine)
	case s.Ranks < 1 || s.Ranks > maxBenchRanks:
		return fmt.Errorf("ranks: %d; allowed is 1 to %d", s.Ranks, maxBenchRanks)
	case s.Iterations < 1 || s.Iterations > maxIterations:
		return fmt.Errorf("iterations: %d; allowed is 1 to %d", s.Iterations, maxIterations)
	case s.Warmup < 0 || s.Warmup > maxIterations:
		return fmt.Errorf("warmup: %d; allowed is 0 to %d", s.Warmup, maxIterations)
	case s.FP8 && s.Hidden%128 != 0:
		return fmt.Errorf("hidden: %d; allowed with --fp8 is a multiple of 128", s.Hidden)
	case len(s.Tokens) == 0:
		return errors.New("tokens: none; allowed is one number or several")
	}
	if _, err := route(s.Routing, 0, s.TopK, s.Experts, 0, 0); err != nil {
		return err
	}
	if !slices.Contains(routings, s.Routing) {
		return fmt.Errorf("routing: %q; allowed are %s", s.Routing, strings.Join(routings, ", "))
	}
	if s.PerNode == 0 {
		s.PerNode = s.Ranks
	}
	t, err := plan.NewTopology(s.Ranks, s.PerNode)
	if err != nil {
		return err
	}
	for _, tokens := range s.Tokens {
		call := plan.LowLatency{NumTokens: int32(tokens), NumMaxTokens: int32(tokens), Hidden: int32(s.Hidden), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts), IndexType: op.Int64, FP8: s.FP8}
		if err := call.CheckDispatch(t, nil); err != nil {
			return err
		}
	}
	return nil
}

func (f *benchFlags) run(cmd *cobra.Command) error {
	if err := f.check(); err != nil {
		return err
	}
	report := benchReport{Spec: f.spec}
	steady := slices.DeleteFunc(slices.Clone(f.spec.Operations), func(o string) bool { return o == "first-call" })
	if len(steady) > 0 {
		if err := report.add(cmd.Context(), f.spec, steady, ""); err != nil {
			return err
		}
	}
	if len(steady) < len(f.spec.Operations) {
		for _, start := range benchStarts {
			if err := report.add(cmd.Context(), f.spec, []string{"first-call"}, start); err != nil {
				return err
			}
		}
	}
	if f.picture != "" {
		if err := report.picture(f.picture); err != nil {
			return err
		}
	}
	if f.json {
		return printJSON(cmd.OutOrStdout(), report)
	}
	return report.print(cmd.OutOrStdout())
}

// add measures the operations in new processes and adds the results to the report.
func (r *benchReport) add(ctx context.Context, spec benchSpec, operations []string, start string) error {
	spec.Operations, spec.Start = operations, start
	folder, err := os.MkdirTemp("", "deepep-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	spec.Folder = folder
	results, err := startRanks(ctx, spec)
	if err != nil {
		return err
	}
	return r.merge(results)
}

// startRanks runs one process for each rank. The first failure ends all: the others would wait for that rank.
func startRanks(parent context.Context, spec benchSpec) ([]*rankResult, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ranks, ctx := errgroup.WithContext(parent)
	results := make([]*rankResult, spec.Ranks)
	for rank := range spec.Ranks {
		ranks.Go(func() error {
			s := spec
			s.Rank = rank
			return guarded(func() (err error) {
				results[rank], err = startRank(ctx, exe, &s)
				return err
			})
		})
	}
	err = ranks.Wait()
	if parent.Err() != nil {
		return nil, parent.Err()
	}
	return results, err
}

// startRank runs a rank to its end.
func startRank(ctx context.Context, exe string, spec *benchSpec) (*rankResult, error) {
	input, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, exe, "bench-rank")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // the kernel kills the rank when the parent ends
	failed := cmd.Run()
	var result rankResult
	if err := json.Unmarshal(stdout.Bytes(), &result); err != nil {
		return nil, fmt.Errorf("rank %d: %w: %s", spec.Rank, errors.Join(failed, ctx.Err()), strings.TrimSpace(stderr.String()))
	}
	if result.Error != "" {
		return nil, fmt.Errorf("rank %d: %s", spec.Rank, result.Error)
	}
	return &result, failed
}
