package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// benchSpec is the input of a rank's process.
type benchSpec struct {
	Rank       int      `json:"rank"`
	Ranks      int      `json:"ranks"`
	PerNode    int      `json:"ranks_per_node"`
	Folder     string   `json:"folder"` // for the ranks' bootstrap
	Engine     string   `json:"engine"`
	Operations []string `json:"operations"`
	Tokens     []int    `json:"tokens"`
	Hidden     int      `json:"hidden"`
	Experts    int      `json:"experts"`
	TopK       int      `json:"top_k"`
	Routing    string   `json:"routing"`
	FP8        bool     `json:"fp8"`
	Warmup     int      `json:"warmup"`
	Iterations int      `json:"iterations"`
	Seed       uint64   `json:"seed"`
	Start      string   `json:"start"` // first-call: one of benchStarts
}

// rankSeries holds a rank's measurements of an operation with one number of tokens.
type rankSeries struct {
	Operation string  `json:"operation"`
	Tokens    int     `json:"tokens"`
	Times     []int64 `json:"times"`     // ns, one an iteration
	Bytes     uint64  `json:"bytes"`     // payload bytes that this rank sent in one call
	KernelNS  int64   `json:"kernel_ns"` // mean time in the operation's own kernels, from the statistics
	WaitNS    int64   `json:"wait_ns"`   // of KernelNS, waiting for peers
}

// rankResult is the output of a rank's process.
type rankResult struct {
	Engine string       `json:"engine"`
	Device string       `json:"device"`
	ISA    string       `json:"isa"`
	Series []rankSeries `json:"series"`
	Starts []rankStart  `json:"starts,omitempty"`
	Error  string       `json:"error,omitempty"`
}

// rankStart is where a rank's time went until its first call had ended.
type rankStart struct {
	Start  string             `json:"start"`
	Tokens int                `json:"tokens"`
	First  int64              `json:"first_ns"` // layout, dispatch and combine, on the host
	Report core.StartupReport `json:"report"`   // after the first call
}

// benchOperations maps what bench measures to the operation whose statistics belong to it.
var benchOperations = map[string]op.Operation{
	"dispatch":             core.OpDispatch,
	"dispatch-cached":      core.OpDispatch,
	"combine":              core.OpCombine,
	"low_latency_dispatch": core.OpLLDispatch,
	"low_latency_combine":  core.OpLLCombine,
	"low-latency":          0, // the round trip: two operations
	"first-call":           0,
}

// benchRankCommand runs one rank of `deepep bench`.
func benchRankCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "bench-rank",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var spec benchSpec
			if err := json.NewDecoder(cmd.InOrStdin()).Decode(&spec); err != nil {
				return fmt.Errorf("bench-rank: reading its input from standard input: %w", err)
			}
			return runRank(cmd.Context(), &spec, cmd.OutOrStdout())
		},
	}
}

// groupLimit is long enough for eight processes that start on two cores.
const groupLimit = 2 * time.Minute

func runRank(ctx context.Context, spec *benchSpec, out io.Writer) error {
	result, err := measureRank(ctx, spec)
	if err != nil {
		result = &rankResult{Error: err.Error()}
	}
	status.Keep(&err, json.NewEncoder(out).Encode(result))
	if err != nil {
		return exitCode(exitProblems) // the parent prints the reason
	}
	return nil
}

func measureRank(ctx context.Context, spec *benchSpec) (result *rankResult, err error) {
	began := time.Now()
	meet, err := core.OpenFile(ctx, core.FileOptions{Rank: spec.Rank, Size: spec.Ranks, Dir: spec.Folder, Name: "bench"})
	if err != nil {
		return nil, err
	}
	group, err := core.NewGroup(ctx, core.GroupOptions{Exchanger: meet, NumNVLPeers: spec.PerNode, Timeout: groupLimit})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, group.Destroy()) }()
	options, err := spec.buffer()
	if err != nil {
		return nil, err
	}
	buffer, err := group.NewBuffer(ctx, options)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, buffer.Destroy()) }()
	if err := buffer.WaitReady(-1); err != nil {
		return nil, err
	}
	constructed := time.Since(began)
	c, err := newCaller(buffer, spec)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	info := buffer.Info()
	result = &rankResult{Engine: info.Engine, Device: info.DeviceName, ISA: info.ISA}
	for _, tokens := range spec.Tokens {
		for _, operation := range spec.Operations {
			series, err := c.measure(operation, tokens, constructed)
			if err != nil {
				return nil, fmt.Errorf("%s, %d tokens: %w", operation, tokens, err)
			}
			result.Series = append(result.Series, series...)
			result.Starts = c.starts
			c.mem.free()
		}
	}
	// The ranks leave together, because a rank that has left cannot take part in the others' calls.
	return result, c.together()
}

// buffer sizes the buffer for the largest shape.
func (s *benchSpec) buffer() (core.BufferOptions, error) {
	o := core.BufferOptions{Engine: s.Engine, Device: -1, LowLatency: true, Preinitialize: s.Start != "plain"}
	largest := slices.Max(s.Tokens)
	for _, kind := range []int{core.KindDispatch, core.KindCombine} {
		config, err := plan.ConfigFor(kind, s.Ranks)
		if err != nil {
			return o, err
		}
		nvl, err := config.NVLBytes(2*int64(s.Hidden), s.topology())
		if err != nil {
			return o, err
		}
		rdma, err := config.RDMABytes(2*int64(s.Hidden), s.topology())
		if err != nil {
			return o, err
		}
		o.NumNVLBytes, o.NumRDMABytes = max(o.NumNVLBytes, nvl), max(o.NumRDMABytes, rdma)
	}
	info, err := core.QueryEngine(s.Engine)
	if err != nil {
		return o, err
	}
	if info.NumDevices > 1 {
		o.Device = s.Rank % info.NumDevices
	}
	if s.needsLowLatency() {
		n, err := core.LowLatencySizeHint(int64(largest), int64(s.Hidden), int64(s.Ranks), int64(s.Experts))
		if err != nil {
			return o, err
		}
		o.NumRDMABytes = max(o.NumRDMABytes, n)
	}
	return o, nil
}

// topology groups the ranks into nodes. check has validated it.
func (s *benchSpec) topology() plan.Topology { return plan.Topology{Ranks: s.Ranks, Peers: s.PerNode} }

func (s *benchSpec) needsLowLatency() bool {
	for _, o := range s.Operations {
		if o != "dispatch" && o != "dispatch-cached" && o != "combine" && o != "first-call" {
			return true
		}
	}
	return false
}

// measure times one operation at one number of tokens.
func (c *caller) measure(operation string, tokens int, constructed time.Duration) ([]rankSeries, error) {
	if operation == "first-call" {
		return c.firstCall(tokens, constructed)
	}
	prepare, run, err := c.operation(operation, tokens)
	if err != nil {
		return nil, err
	}
	number := benchOperations[operation]
	// At least two: one makes the outputs, the next is the first like all others.
	if _, err := c.samples(0, max(c.spec.Warmup, 2), prepare, run); err != nil {
		return nil, err
	}
	var before core.OpStats
	if number != 0 {
		if before, err = c.Stats(number); err != nil {
			return nil, err
		}
	}
	times, err := c.samples(c.spec.Iterations, 0, prepare, run)
	if err != nil {
		return nil, err
	}
	series := rankSeries{Operation: operation, Tokens: tokens, Times: times}
	if number != 0 {
		err = c.kernelTime(&series, number, before)
	}
	return []rankSeries{series}, err
}

// operation returns the function to time and the one to run before it.
func (c *caller) operation(name string, tokens int) (prepare, run func() error, err error) {
	switch name {
	case "dispatch", "dispatch-cached", "combine":
		n, err := c.normal(tokens)
		if err != nil {
			return nil, nil, err
		}
		if name == "dispatch" {
			return nil, n.Dispatch, nil
		}
		if err := n.Dispatch(); err != nil {
			return nil, nil, err
		}
		if name == "combine" {
			return nil, n.Combine, nil
		}
		return nil, n.Cached, nil
	}
	l, err := c.lowLatency(tokens)
	if err != nil {
		return nil, nil, err
	}
	switch name {
	case "low_latency_dispatch":
		return nil, l.Dispatch, nil
	case "low_latency_combine":
		return l.Dispatch, l.Combine, nil
	}
	return nil, l.roundTrip, nil
}

// kernelTime reads from the statistics the time in kernels of the calls since before.
func (c *caller) kernelTime(s *rankSeries, number op.Operation, before core.OpStats) error {
	after, err := c.Stats(number)
	if err != nil {
		return err
	}
	calls := after.Calls - before.Calls
	if calls == 0 {
		return fmt.Errorf("the statistics counted no call of %s", number)
	}
	s.Bytes = (after.Bytes - before.Bytes) / calls
	s.KernelNS = (after.Total - before.Total).Nanoseconds() / int64(calls)
	s.WaitNS = (after.Wait - before.Wait).Nanoseconds() / int64(calls)
	return nil
}

// firstCall times construction, the first dispatch with its combine, and a later dispatch with its combine.
func (c *caller) firstCall(tokens int, constructed time.Duration) ([]rankSeries, error) {
	s := c.spec
	one := func(name string, d time.Duration) rankSeries {
		return rankSeries{Operation: name + " (" + s.Start + ")", Tokens: tokens, Times: []int64{d.Nanoseconds()}}
	}
	list := []rankSeries{one("construction", constructed)}
	warm := core.WarmupOptions{}
	switch s.Start {
	case "warm-up with the shape":
		warm = core.WarmupOptions{NumTokens: int32(tokens), Hidden: int32(s.Hidden), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts)}
		fallthrough
	case "warm-up":
		start := time.Now()
		if _, err := c.Warmup(warm); err != nil {
			return nil, err
		}
		list = append(list, one("warm-up", time.Since(start)))
	}
	n, err := c.normal(tokens)
	if err != nil {
		return nil, err
	}
	// Outputs are allocated before the timed part, for the case that every rank sends all its tokens to this one.
	if err := n.outputs(tokens * s.Ranks); err != nil {
		return nil, err
	}
	both := func() error {
		if err := n.dispatchRows(true); err != nil {
			return err
		}
		return n.Combine()
	}
	if err := c.together(); err != nil {
		return nil, err
	}
	start := time.Now()
	if err := both(); err != nil {
		return nil, err
	}
	first := time.Since(start)
	list = append(list, one("first call", first))
	report, err := c.StartupReport()
	if err != nil {
		return nil, err
	}
	c.starts = append(c.starts, rankStart{Start: s.Start, Tokens: tokens, First: first.Nanoseconds(), Report: report})
	times, err := c.samples(s.Iterations, s.Warmup, nil, both)
	if err != nil {
		return nil, err
	}
	return append(list, rankSeries{Operation: "steady call (" + s.Start + ")", Tokens: tokens, Times: times}), nil
}
